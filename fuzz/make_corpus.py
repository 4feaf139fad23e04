"""Writes the corpus that fuzzing starts from: fuzz/corpus/{safetensors,gguf,folder}, small files of every kind of content.

    python fuzz/make_corpus.py          needs numpy, safetensors and gguf
"""

import json
import pathlib
import struct

import gguf
import numpy as np
from safetensors.numpy import save

HERE = pathlib.Path(__file__).parent / "corpus"
MODELS = pathlib.Path(__file__).parent.parent / "crates/model/tests/fixtures"
# What fuzz/run takes at most.
MAX_BYTES = 1 << 17


def safetensors_files():
    rng = np.random.default_rng(1)
    kinds = [np.float32, np.float16, np.uint8, np.int64, np.bool_, np.uint32, np.float64]
    for kind in kinds:
        yield np.dtype(kind).name, save({"a": rng.integers(0, 2, (2, 3)).astype(kind), "b.weight": np.zeros((0, 4), kind)})
    yield "empty", save({})
    yield "metadata", save({"x": np.zeros(1, np.float32)}, metadata={"format": "pt", "": "\u0000"})

    def raw(header, data=b""):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    for dtype, size in [("BF16", 2), ("F8_E4M3", 1), ("F8_E5M2", 1), ("I8", 1), ("U64", 8), ("F4", 1)]:
        yield dtype, raw({"t": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size]}}, bytes(2 * size))
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    yield "overlap", raw({"a": entry, "b": entry}, bytes(4))
    yield "hole", raw({"a": entry, "b": {**entry, "data_offsets": [8, 12]}}, bytes(12))
    yield "overflow", raw({"a": {**entry, "shape": [2**62, 2**62]}}, bytes(4))
    yield "twice", raw(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4))
    yield "deep", raw(b'{"a":' + b"[" * 200 + b"]" * 200 + b"}")
    yield "long", struct.pack("<Q", 2**63) + b"{}"
    yield "spaces", raw(b"{}      ")


def gguf_file(path, architecture, fill):
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def every_value(writer):
    for kind in ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64", "bool"]:
        getattr(writer, f"add_{kind}")(f"k.{kind}", 1)
    writer.add_string("k.string", "text")
    writer.add_array("k.numbers", [1, 2, 3])
    writer.add_array("k.texts", ["a", "", "ü"])
    writer.add_array("k.flags", [True, False])


TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4", "BF16", "F16", "F32"]


def add_blocks(writer, name, kind, shape):
    """A tensor of small random blocks, of types, too, that the package does not make from numbers."""
    kind = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(1).integers(0, 8, (*shape[:-1], shape[-1] // elements * size), dtype=np.uint8)
    writer.add_tensor(name, data, raw_dtype=kind)


def every_type(writer):
    for kind in TYPES:
        add_blocks(writer, f"t.{kind}", kind, (2, 256))


def model_of_every_type(writer):
    """A model of one layer, each matrix of which is of another type."""
    reader = gguf.GGUFReader(MODELS / "gguf/llama.gguf")
    other = {"block_count": 1, "embedding_length": 256, "attention.key_length": 8, "attention.value_length": 8,
             "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 8, "feed_forward_length": 32}
    for name, field in reader.fields.items():
        if name.split(".", 1)[-1] not in other and not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for name, value in other.items():
        writer.add_uint32(f"llama.{name}", value)
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].contents())
    matrices = {"token_embd": ("Q2_K", vocabulary, 256), "output": ("Q3_K", vocabulary, 256)}
    layer = {"attn_q": ("Q4_K", 32, 256), "attn_k": ("Q5_K", 16, 256), "attn_v": ("Q6_K", 16, 256), "attn_output": ("IQ4_NL", 256, 32),
             "ffn_gate": ("Q8_0", 32, 256), "ffn_up": ("Q8_0", 32, 256), "ffn_down": ("MXFP4", 256, 32)}
    matrices |= {f"blk.0.{name}": value for name, value in layer.items()}
    for name, (kind, rows, cols) in matrices.items():
        add_blocks(writer, f"{name}.weight", kind, (rows, cols))
    for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"]:
        writer.add_tensor(f"{name}.weight", np.ones(256, np.float32))


# One of each way in which experts lie in files; one of these has matrices as MXFP4, two as eight-bit floats.
FOLDERS = ["deepseek_v3_fp8", "gpt_oss", "gpt_oss_mxfp4", "granitemoe", "llama", "mixtral", "qwen2_moe", "qwen3_moe_fp8"]


def folders():
    """Folders that the model's tests have: a line of configuration, then the tensors."""
    for folder in FOLDERS:
        config = json.loads((MODELS / folder / "config.json").read_text())
        yield folder, json.dumps(config).encode() + b"\n" + (MODELS / folder / "model.safetensors").read_bytes()


def gguf_files():
    for name, fill in [("values", every_value), ("types", every_type), ("blocks", model_of_every_type)]:
        path = HERE / "gguf" / name
        gguf_file(path, "llama", fill)
        yield name, path.read_bytes()
    for model in sorted((MODELS / "gguf").glob("*.gguf")):
        yield model.stem, model.read_bytes()


def main():
    for target, files in [("safetensors", safetensors_files), ("gguf", gguf_files), ("folder", folders)]:
        (HERE / target).mkdir(parents=True, exist_ok=True)
        kept = [(name, data) for name, data in files() if len(data) <= MAX_BYTES]
        for name, data in kept:
            (HERE / target / name).write_bytes(data)
        print(target, len(kept), "files")


if __name__ == "__main__":
    main()
