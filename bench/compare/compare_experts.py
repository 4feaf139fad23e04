"""How the time of an MoE layer grows with the number of experts, and with tokens times choices; draws both as an SVG.

The first plot keeps T K and changes E from 8 to 512: what grows is the reading of the weights, whose time at the rate of a copy
of memory is drawn beside it. The second keeps E and changes T K.
"""

import argparse
import os
import time

import matplotlib
import numpy

from moeworks_bench import ROOT, Moeworks

matplotlib.use("svg")
import matplotlib.pyplot as plt

D, F, K = 512, 256, 4


def read_rate():
    """Bytes a second that one thread of this program reads; a floor of what the machine gives."""
    memory = numpy.ones(1 << 26, dtype=numpy.float32)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        memory.sum()
        best = min(best, time.perf_counter() - start)
    return memory.nbytes / best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=str(ROOT / "docs" / "experts-sweep.svg"))
    args = parser.parse_args()
    ours, rate = Moeworks(args.threads), read_rate()
    experts, tokens = [8, 16, 32, 64, 128, 256, 512], [256, 512, 1024, 2048, 4096, 8192]
    cells = {(e, 2048) for e in experts} | {(64, t) for t in tokens}
    times = {cell: [] for cell in cells}
    for _ in range(args.rounds):
        for (e, t), found in times.items():
            found += ours.times((D, F, e, K, "swiglu"), "f32", t)
    ours.close()
    # The shortest run: neighbours of the machine only add to it.
    milliseconds = {cell: min(found) * 1e3 for cell, found in times.items()}
    by_experts, by_tokens = [milliseconds[e, 2048] for e in experts], [milliseconds[64, t] for t in tokens]
    reading = [e * 3 * D * F * 4 / rate * 1e3 for e in experts]
    print(f"D {D}, F {F}, K {K}, f32 forward; memory read at {rate / 1e9:.0f} GB/s by one thread")
    for e, found, read in zip(experts, by_experts, reading):
        print(f"  T 2048, E {e:4}: {found:8.2f} ms, of which reading the weights {read:6.2f}")
    for t, found in zip(tokens, by_tokens):
        print(f"  T {t:5}, E 64: {found:8.2f} ms, {found / t / K * 1e6:6.1f} ns a choice")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    left.plot(experts, by_experts, "o-", label="layer, forward")
    left.plot(experts, reading, "--", label="reading the weights, one thread")
    left.set(xscale="log", xticks=experts, xticklabels=experts, ylim=(0, None), xlabel="experts, at T 2048, K 4", ylabel="ms")
    left.minorticks_off()
    left.legend()
    right.plot([t * K for t in tokens], by_tokens, "o-")
    right.set(xlabel="tokens x choices, at 64 experts", ylabel="ms", xlim=(0, None), ylim=(0, None))
    figure.suptitle(f"MoE layer, D {D}, F {F}, f32, {args.threads} threads")
    figure.tight_layout()
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
