"""Training throughput of models (models.py): Moeworks against each way that transformers has, in turn, in one run.

Each round runs every contender once, one after the other, each in a process of its own, so that drift of the machine hits
all alike. Printed: median tokens/s and peak resident memory of each, and the ratio of Moeworks to the best of the others.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from models import MODELS, settings
from moeworks_bench import PROGRAM

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
# batched_mm copies the weights of every token's experts: it needs 50 GB. A loop over experts launches thousands of kernels a layer.
WAYS = {"comparison": ["eager", "grouped_mm"], "1b": ["grouped_mm"]}


def transformers(way: str, model: str, precision: str, args: argparse.Namespace) -> dict:
    command = [sys.executable, HERE / "transformers_train.py", "--model", model, "--experts", way,
               "--precision", "f32" if precision == "f32" else "bf16", "--data", args.data, "--threads", str(args.threads),
               "--device", args.device, "--steps", str(args.steps)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def moeworks(model: str, precision: str, args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        chosen = settings(model) | {
            "train.steps": 24, "train.precision": precision,
            "train.threads": args.threads, "train.device": args.device, "train.balance": "pooled", "train.balance_coef": 0.01, "train.eval_every": 0,
            "train.sample_every": 0, "train.checkpoint_every": 0, "data.tokenizer": "bytes", "run.out": folder,
        }
        command = [PROGRAM, "train", "--data", args.data]
        for key, value in chosen.items():
            command += ["--set", f"{key}={value}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            sys.exit(f"moeworks train ended with status {status}")
        metrics = next(pathlib.Path(folder).glob("*/metrics.jsonl"))
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    speeds = [record["perf/tokens_per_s"] for record in records][4:]
    return {"way": "moeworks", "tokens_per_s": statistics.median(speeds), "resident_mb": usage.ru_maxrss / 1024}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=str(ROOT / "README.md"), help="a text file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=5, help="steps of each of the others after two that warm up")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="*", choices=list(MODELS))
    parser.add_argument("--precisions", nargs="*", choices=["f32", "bf16", "fp8"], help="fp8 is compared with bf16 of the others")
    args = parser.parse_args()
    args.models = args.models or (list(MODELS) if args.device == "cuda" else ["comparison"])
    args.precisions = args.precisions or ["f32", "bf16"] + (["fp8"] if args.device == "cuda" else [])
    for model, precision in itertools.product(args.models, args.precisions):
        results: dict[str, list[dict]] = {}
        for _ in range(args.rounds):
            runs = [moeworks(model, precision, args)]
            runs += [transformers(way, model, precision, args) for way in WAYS[model]]
            for run in runs:
                results.setdefault(run["way"], []).append(run)
        medians = {way: statistics.median(r["tokens_per_s"] for r in runs) for way, runs in results.items()}
        print(f"\ntraining, {model}, {precision}, {args.threads} threads, {args.rounds} rounds (median tokens/s, peak resident MB)")
        for way, speed in medians.items():
            print(f"  {way:28} {speed:10.0f} {max(r['resident_mb'] for r in results[way]):10.0f}")
        best = max(speed for way, speed in medians.items() if way != "moeworks")
        print(f"  ratio to the best alternative {medians['moeworks'] / best:9.2f}")


if __name__ == "__main__":
    main()
