"""Decoding and prefill of one model of OLMoE's shape (2 layers, vocabulary 8,192): Moeworks, transformers and llama.cpp on
the same weights, in turn, in one run.

The weights are drawn once, saved in bf16 as a model folder, and written to GGUF files in f32, bf16, Q8_0 and Q4_0 by llama.cpp's
own package, and in Q4_K_M by llama.cpp itself. Every contender runs in a process of its own: 512 tokens of prefill (the best of 3), then 41 tokens decoded
behind 32 others (the median). llama.cpp comes from the package `cyllama`, whose wheel says which instruction sets it uses.

With `--windows`, decoding with GGUF files is compared once more, this time with llama.cpp alone: both programs stay loaded and go
on and off by quarters of a second, so that what changes from one second to the next on a machine with neighbours changes for both.

    compare_decode.py [--rounds N] [--windows SECONDS] [--threads N] [--types f32 bf16 q8_0 q4_0 q4_k_m]
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from moeworks_bench import PROGRAM

HERE = pathlib.Path(__file__)
PROMPT, DECODED, PREFILL, VOCABULARY = 32, 41, 512, 8192
WINDOW = 0.25
# The tokens of the GGUF files, and the one merge that llama.cpp asks for: two zero bytes, which no text has. Without tokens the
# files have no tokenizer.
TOKENS: list[str] = []
MERGE = "\u0100 \u0100"
SHAPE = dict(vocab_size=VOCABULARY, hidden_size=2048, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=16,
             intermediate_size=1024, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, max_position_embeddings=4096,
             tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
             rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})


def ids(count: int) -> list[int]:
    return [i * 7919 % VOCABULARY for i in range(count)]


def make_folder(folder: pathlib.Path) -> None:
    import torch
    import transformers

    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SHAPE)).save_pretrained(folder)


def make_gguf(folder: pathlib.Path, file: pathlib.Path, kind: str) -> None:
    import gguf
    import numpy as np
    import torch
    from safetensors import safe_open

    ty = gguf.GGMLQuantizationType[kind.upper()]
    arch = gguf.MODEL_ARCH.OLMOE
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(4096)
    writer.add_embedding_length(2048)
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_feed_forward_length(1024)
    writer.add_head_count(16)
    writer.add_head_count_kv(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(64)
    writer.add_expert_used_count(8)
    writer.add_vocab_size(VOCABULARY)
    if TOKENS:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([gguf.TokenType.NORMAL] * len(TOKENS))
        writer.add_token_merges([MERGE])
        writer.add_add_bos_token(False)
    else:
        writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(arch, SHAPE["num_hidden_layers"])

    def add(name: str, tensor: "torch.Tensor") -> None:
        is_exact = tensor.ndim == 1 or "ffn_gate_inp" in name
        # What our program keeps as floats, all do.
        target = gguf.GGMLQuantizationType.F32 if is_exact else gguf.GGMLQuantizationType.BF16 if "token_embd" in name else ty
        writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), target), raw_dtype=target)

    with safe_open(folder / "model.safetensors", "pt") as source:
        for name in source.keys():
            if ".experts." not in name:
                add(names.get_name(name, try_suffixes=(".weight",)), source.get_tensor(name))
        for layer in range(SHAPE["num_hidden_layers"]):
            for part in ["gate_proj", "up_proj", "down_proj"]:
                here = f"model.layers.{layer}.mlp.experts"
                stack = torch.stack([source.get_tensor(f"{here}.{e}.{part}.weight") for e in range(64)])
                add(names.get_name(f"{here}.{part}.weight", try_suffixes=(".weight",)), stack)
                del stack
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_mixture(source: pathlib.Path, file: pathlib.Path, kind: str) -> None:
    """Has llama.cpp write a file in one of its mixtures of types."""
    from cyllama.llama import llama_cpp as lib

    params = lib.LlamaModelQuantizeParams()
    params.ftype = {"q4_k_m": 15}[kind]
    lib.model_quantize(str(source), str(file), params)


def make_file(folder: pathlib.Path, file: pathlib.Path, kind: str) -> bool:
    """Writes the GGUF file of a kind; false if that takes llama.cpp and it is not there."""
    if not kind.endswith("_m"):
        make_gguf(folder, file, kind)
        return True
    source = file.with_name("bf16.gguf")
    if not source.exists():
        make_gguf(folder, source, "bf16")
    try:
        make_mixture(source, file, kind)
    except ImportError:
        print(f"{kind}: llama.cpp, which writes such files, is not there", file=sys.stderr)
        return False
    return True


def timed(prefill, decode, endless: bool = False) -> dict:
    """`prefill()` takes 512 tokens anew; `decode()` makes one token behind 32 others and yields for ever."""
    while endless:
        steps = decode()
        for _ in range(DECODED):
            print(elapsed(lambda: next(steps)), flush=True)
    best = min(elapsed(prefill) for _ in range(3))
    steps = decode()
    times = [elapsed(lambda: next(steps)) for _ in range(DECODED)]
    return {"prefill": PREFILL / best, "decode": 1 / statistics.median(times)}


def elapsed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def transformers_times(folder: str, threads: int, way: str, kind: str) -> dict:
    import torch
    import transformers

    torch.set_num_threads(threads)
    net = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype={"f32": torch.float32, "bf16": torch.bfloat16}[kind], experts_implementation=way).eval()

    @torch.inference_mode()
    def prefill() -> None:
        net(torch.tensor([ids(PREFILL)]), use_cache=True, logits_to_keep=1)

    def decode():
        with torch.inference_mode():
            out = net(torch.tensor([ids(PROMPT)]), use_cache=True, logits_to_keep=1)
            while True:
                out = net(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
                yield

    return timed(prefill, decode)


def llama_cpp_times(file: str, threads: int, endless: bool = False) -> dict:
    from cyllama.llama import llama_cpp as lib

    lib.disable_logging()
    lib.ggml_backend_load_all()
    params = lib.LlamaModelParams()
    params.n_gpu_layers = 0
    model = lib.LlamaModel(path_model=file, params=params, verbose=False)
    params = lib.LlamaContextParams()
    params.n_ctx, params.n_batch, params.n_ubatch = 1024, PREFILL, PREFILL
    params.n_threads = params.n_threads_batch = threads
    context = lib.LlamaContext(model=model, params=params, verbose=False)

    def extend(tokens: list[int], start: int) -> None:
        batch = lib.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
        for i, token in enumerate(tokens):
            batch.add(token, start + i, [0], i + 1 == len(tokens))
        context.decode(batch)
        context.synchronize()

    def prefill() -> None:
        context.kv_cache_clear()
        extend(ids(PREFILL), 0)

    def decode():
        context.kv_cache_clear()
        extend(ids(PROMPT), 0)
        at = PROMPT
        while True:
            extend([at * 31 % VOCABULARY], at)
            at += 1
            yield

    return timed(prefill, decode, endless)


def moeworks_times(model: str, threads: int) -> dict:
    command = [PROGRAM, "bench", "decode", "--model", model, "--threads", str(threads), "--json"]
    case = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["cases"][0]
    return {"prefill": case["prefill_tokens_per_s"], "decode": case["tokens_per_s"],
            "of product": case["prefill_share_of_product"], "of memory": case["share_of_bandwidth"]}


def apart(*arguments: str) -> dict | None:
    """Runs one contender in a process of its own; none if its package is not there."""
    result = subprocess.run([sys.executable, HERE, "--one", *arguments], capture_output=True, text=True)
    if result.returncode != 0:
        print(f"  {arguments[0]} cannot run: {result.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return json.loads(result.stdout.splitlines()[-1])


class Endless:
    """A program that decodes for ever, when it is let."""

    def __init__(self, name: str, command: list):
        self.name, self.lines, self.rates = name, [], []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self.read, daemon=True).start()
        while len(self.lines) < 2 * DECODED:
            if self.process.poll() is not None:
                raise RuntimeError(f"{name} does not run")
            time.sleep(0.05)
        self.process.send_signal(signal.SIGSTOP)

    def read(self) -> None:
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), float(line)))

    def window(self) -> None:
        """Runs for a while; the median of the tokens that were begun and ended in it counts."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGCONT)
        time.sleep(WINDOW)
        self.process.send_signal(signal.SIGSTOP)
        end = time.monotonic()
        time.sleep(WINDOW / 10)
        whole = [seconds for at, seconds in list(self.lines) if at < end and at - seconds > begin]
        self.rates.append(1 / statistics.median(whole) if whole else 0.0)


def windows(file: pathlib.Path, threads: str, seconds: float) -> None:
    commands = {"llama.cpp": [sys.executable, HERE, "--one", "llama.cpp", str(file), threads, "--endless"],
                "moeworks": [PROGRAM, "bench", "decode", "--model", str(file), "--threads", threads, "--endless"]}
    running: list[Endless] = []
    try:
        for name, command in commands.items():
            running.append(Endless(name, command))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for one in running:
                one.window()
    except RuntimeError as error:
        print(f"  {error}", file=sys.stderr)
        return
    finally:
        for one in running:
            one.process.kill()
    other, ours = running
    ratios = [b / a for a, b in zip(other.rates, ours.rates) if a > 0]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    print(f"{file.stem}: {len(ratios)} windows each of {WINDOW} s: tokens/s {statistics.median(ours.rates):.1f}, "
          f"llama.cpp {statistics.median(other.rates):.1f}; ratio {ratio:.2f} (quartiles {low:.2f}, {high:.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--endless", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--windows", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--types", nargs="*", default=["f32", "bf16", "q8_0", "q4_0", "q4_k_m"])
    parser.add_argument("--work", help="folder for the models, which are kept there (default: one that is removed)")
    args = parser.parse_args()
    if args.one:
        who, model, threads = args.one
        if who == "llama.cpp":
            print(json.dumps(llama_cpp_times(model, int(threads), args.endless)))
        else:
            _, way, kind = who.split()
            print(json.dumps(transformers_times(model, int(threads), way, kind)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = pathlib.Path(args.work or temporary)
        folder = work / "folder"
        if not folder.exists():
            make_folder(folder)
        threads = str(args.threads)
        for kind in args.types:
            file = work / f"{kind}.gguf"
            if not file.exists() and not make_file(folder, file, kind):
                continue
            contenders = {"moeworks": lambda: moeworks_times(file, args.threads),
                          "llama.cpp": lambda: apart("llama.cpp", str(file), threads)}
            if kind in ["f32", "bf16"]:
                for who in [f"transformers {way} {kind}" for way in ["eager", "grouped_mm"]]:
                    contenders[who] = lambda who=who: apart(who, str(folder), threads)
            results: dict[str, list[dict]] = {}
            for _ in range(args.rounds):
                for who, run in contenders.items():
                    times = run()
                    if times:
                        results.setdefault(who, []).append(times)
            print(f"\n{kind}, {args.threads} threads, {args.rounds} rounds (median tokens/s)      prefill     decode")
            medians = {who: {part: statistics.median(run[part] for run in runs) for part in runs[0]}
                       for who, runs in results.items()}
            for who, speeds in medians.items():
                print(f"  {who:52} {speeds['prefill']:10.0f} {speeds['decode']:10.1f}", flush=True)
            shares = [f"{medians['moeworks'][part]:10.0%}" for part in ["of product", "of memory"]]
            print(f"  {'moeworks, share of the rates of a product and of memory':52}", *shares, flush=True)
            others = [speeds for who, speeds in medians.items() if who != "moeworks"]
            if others:
                ratios = [medians["moeworks"][part] / max(speeds[part] for speeds in others) for part in ["prefill", "decode"]]
                print(f"  {'ratio to the best alternative':52} {ratios[0]:10.2f} {ratios[1]:10.2f}", flush=True)
            if args.windows > 0:
                windows(file, threads, args.windows)


if __name__ == "__main__":
    main()
