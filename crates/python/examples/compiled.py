"""Trains an MoE layer under torch.compile; with inductor by default, which needs a C++ compiler.

    python compiled.py [--backend inductor] [--steps 30]
"""

import argparse

import torch

from moeworks.nn import MoE, load_balancing_loss


class Block(torch.nn.Module):
    """A norm and an MoE layer beside a residual."""

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.RMSNorm(width)
        self.moe = MoE(width, 2 * width, num_experts=8, top_k=2)

    def forward(self, x):
        y, logits = self.moe(self.norm(x), output_router_logits=True)
        return x + y, logits


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    block, x = Block(64), torch.randn(4, 64, 64)
    # One graph: experts and their backward pass are operators that the compiler knows.
    compiled = torch.compile(block, backend=args.backend, fullgraph=True)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    for step in range(args.steps + 1):
        y, logits = compiled(x)
        loss = (y - x.roll(1, -1)).square().mean()
        total = loss + 0.01 * load_balancing_loss(logits, top_k=2)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:2}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
