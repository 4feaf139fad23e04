"""Dispatch by a counting sort against the dense formulations that it replaces, in turn, in one run; f32, forward.

- The whole layer and the dispatch alone against GShard's einsums (Lepikhin et al. 2020, section 2.2 and algorithm 1): positions
  by a cumulative sum over a one-hot matrix, masks of tokens by experts by capacity, `einsum` to the experts and back.
- The counting sort against the cumulative sum over the one-hot matrix alone.

The dispatch alone is here the sort and a copy of the rows in its order; the layer itself makes no such copy.
"""

import argparse
import os
import statistics
import time

import torch
import torch.nn.functional as F

from moeworks_bench import Moeworks


def positions(ids, num_experts):
    """[T, K] the place of each choice in its expert, and the one-hot matrix [T K, E] it was counted in."""
    one_hot = F.one_hot(ids.flatten(), num_experts)
    places = one_hot.cumsum(0) - 1
    return (places * one_hot).sum(-1).view(ids.shape), one_hot


def masks(ids, weights, num_experts, capacity):
    """GShard's combine weights [T, E, C] and dispatch mask, for choices that all find room."""
    place, one_hot = positions(ids, num_experts)
    experts = one_hot.view(*ids.shape, num_experts).to(weights.dtype)
    slots = F.one_hot(place.clamp(max=capacity - 1), capacity).to(weights.dtype)
    combine = torch.einsum("tk,tke,tkc->tec", weights, experts, slots)
    return combine, (combine > 0).to(weights.dtype)


def einsum_dispatch(x, ids, weights, num_experts, capacity):
    combine, dispatch = masks(ids, weights, num_experts, capacity)
    return combine, torch.einsum("tec,td->ecd", dispatch, x)


def einsum_layer(x, router, gate_up, down, k, capacity):
    probs = F.linear(x, router).softmax(-1)
    weights, ids = probs.topk(k, dim=-1)
    combine, rows = einsum_dispatch(x, ids, weights / weights.sum(-1, keepdim=True), len(router), capacity)
    gate, up = torch.bmm(rows, gate_up.transpose(1, 2)).chunk(2, dim=-1)
    return torch.einsum("tec,ecd->td", combine, torch.bmm(F.silu(gate) * up, down.transpose(1, 2)))


def median(function, runs):
    function()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ours = Moeworks(args.threads)
    with torch.no_grad():
        compare(ours, args.runs)
    ours.close()


def compare(ours, runs):
    tokens, d, f, e, k = 4096, 2048, 512, 64, 2
    shape = (d, f, e, k, "swiglu")
    x, router = torch.randn(tokens, d), torch.randn(e, d) * 0.02
    gate_up, down = torch.randn(e, 2 * f, d) * 0.02, torch.randn(e, d, f) * 0.02
    ids = torch.rand(tokens, e).topk(k, dim=-1).indices
    weights = torch.full((tokens, k), 1 / k)
    capacity = int(ids.flatten().bincount(minlength=e).max())
    used = F.linear(x, router).topk(k, dim=-1).indices
    room = int(used.flatten().bincount(minlength=e).max())
    many = torch.randint(e, (16384, 2))
    rows = [
        ("whole layer, T 4096, D 2048, F 512, E 64, K 2", ours.times(shape, "f32", tokens),
         lambda: einsum_layer(x, router, gate_up, down, k, room)),
        ("dispatch alone, the same", ours.times(shape, "f32", tokens, part="dispatch"),
         lambda: einsum_dispatch(x, ids, weights, e, capacity)),
        ("sort against cumulative sum, T 16384, E 64, K 2", ours.times(shape, "f32", 16384, part="sort"),
         lambda: positions(many, e)),
    ]
    print(f"{'':50}{'Moeworks ms':>12}{'dense ms':>12}{'ratio':>8}")
    for name, mine, dense in rows:
        mine, theirs = statistics.median(mine), median(dense, runs)
        print(f"{name:50}{mine * 1e3:12.3f}{theirs * 1e3:12.3f}{theirs / mine:8.1f}")


if __name__ == "__main__":
    main()
