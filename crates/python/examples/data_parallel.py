"""Trains an MoE layer in several processes: each has its tokens, and gradients are averaged over gloo.

    python -m torch.distributed.run --nproc-per-node 2 data_parallel.py [--steps 30]
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from moeworks.nn import MoE, load_balancing_loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layer = MoE(64, 128, num_experts=8, top_k=2)
    # An expert without tokens on a rank has zeros as gradient there, not none: no search for unused parameters.
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x = torch.randn(256, 64).chunk(world)[rank]
    for step in range(args.steps + 1):
        y, logits = model(x, output_router_logits=True)
        loss = (y - x.roll(1, -1)).square().mean()
        total = loss + 0.01 * load_balancing_loss(logits, top_k=2)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if step % 10 == 0 and rank == 0:
            print(f"step {step:2}: loss {mean.item() / world:.3f}", flush=True)
    weights = layer.experts.gate_up_proj.detach().clone()
    dist.broadcast(weights, 0)
    assert torch.equal(weights, layer.experts.gate_up_proj), "ranks differ"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
