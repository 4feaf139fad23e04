"""Attention of training and of prefill on the CPU: Moeworks beside PyTorch's scaled_dot_product_attention, causal, in turn.

Ours are the cases of `moeworks bench attention` with more than one query, the best time of each; PyTorch's times are the best of
as many runs of the same shapes. A round is one of ours and one of PyTorch's; a cell shows the medians of the rounds. Backward is the
backward pass alone, on both sides.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import time

import torch

from moeworks_bench import PROGRAM

NAME = re.compile(r"^attention (forward|backward) (\d+) x (\d+) heads (\d+)/(\d+) x (\d+), (F32|BF16)$")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def ours():
    """Milliseconds by (pass, batch, positions, heads, key heads, head size, type)."""
    command = [PROGRAM, "bench", "attention", "--json"]
    cases = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["cases"]
    found = [(NAME.match(case["name"]), case["seconds"]) for case in cases]
    return {(m[1], *map(int, m.groups()[1:6]), m[7].lower()): 1e3 * seconds for m, seconds in found if m}


def best(run, prepare):
    """Milliseconds of the shortest run of about half a second of them, three at least."""
    times, end = [], time.perf_counter() + 0.5
    while len(times) < 3 or time.perf_counter() < end:
        prepared = prepare()
        start = time.perf_counter()
        run(prepared)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def theirs(name, batch, positions, heads, kv_heads, size, dtype):
    shape = lambda heads: (batch, positions, heads, size)
    q, k, v = (torch.randn(shape(h), dtype=DTYPES[dtype]).transpose(1, 2) for h in (heads, kv_heads, kv_heads))
    attend = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
    if name == "forward":
        attend()
        return best(lambda _: attend(), lambda: None)
    for x in (q, k, v):
        x.requires_grad_()
    d_o = torch.randn_like(attend())
    return best(lambda o: o.backward(d_o), attend)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="PyTorch's; ours has one a core")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rounds = []
    for _ in range(args.rounds):
        found = ours()
        rounds.append({cell: (ms, theirs(*cell)) for cell, ms in found.items()})
    print(f"{args.threads} threads, PyTorch {torch.__version__}; milliseconds, medians of {args.rounds} rounds")
    print(f"{'pass':20} {'sequences':>9} {'positions':>9} {'heads':>9} {'type':5} {'Moeworks':>9} {'PyTorch':>9} {'ratio':>6}")
    ratios = []
    for cell in rounds[0]:
        mine, other = (statistics.median(found[cell][side] for found in rounds) for side in (0, 1))
        ratios.append(other / mine)
        name, batch, positions, heads, kv_heads, size, dtype = cell
        of_heads = f"{heads}/{kv_heads} x {size}"
        print(f"{name:20} {batch:9} {positions:9} {of_heads:>9} {dtype:5} {mine:9.2f} {other:9.2f} {other / mine:6.2f}")
    print(f"geometric mean of {len(ratios)} ratios {statistics.geometric_mean(ratios):.2f}, least {min(ratios):.2f}")


if __name__ == "__main__":
    main()
