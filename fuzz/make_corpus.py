"""Writes the corpus that fuzzing starts from: fuzz/corpus/{safetensors,gguf}, small files of every kind of content.

    python fuzz/make_corpus.py          needs numpy, safetensors and gguf
"""

import json
import pathlib
import struct

import gguf
import numpy as np
from safetensors.numpy import save

HERE = pathlib.Path(__file__).parent / "corpus"
MODELS = pathlib.Path(__file__).parent.parent / "crates/model/tests/fixtures/gguf"


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


def every_type(writer):
    for kind in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32"]:
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"t.{kind.name}", gguf.quants.quantize(np.ones((2, 32), np.float32), kind), raw_dtype=kind)


def main():
    for target in ["safetensors", "gguf"]:
        (HERE / target).mkdir(parents=True, exist_ok=True)
    for name, data in safetensors_files():
        (HERE / "safetensors" / name).write_bytes(data)
    gguf_file(HERE / "gguf" / "values", "llama", every_value)
    gguf_file(HERE / "gguf" / "types", "llama", every_type)
    for model in MODELS.glob("*.gguf"):
        (HERE / "gguf" / model.stem).write_bytes(model.read_bytes())
    for target in ["safetensors", "gguf"]:
        print(target, len(list((HERE / target).iterdir())), "files")


if __name__ == "__main__":
    main()
