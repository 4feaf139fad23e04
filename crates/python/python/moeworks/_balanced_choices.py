"""Choices and factors that balance the load of experts, without a gradient.

T tokens, E experts, K experts a token.
"""

from __future__ import annotations

import math

from ._torch import torch

Tensor = torch.Tensor


def balanced_assignment(scores: Tensor) -> Tensor:
    """Returns an expert ``[T]`` for each token, so that loads differ by at most one and the sum of scores is highest.

    Bertsekas' auction, as in BASE layers; the sum is within a thousandth of the scores' range of the highest, a token.

    Args:
        scores: ``[T, E]``.
    """
    num_tokens, num_experts = scores.shape
    experts = torch.arange(num_experts, device=scores.device)
    room = num_tokens // num_experts + (experts < num_tokens % num_experts).to(torch.int64)
    values = torch.nan_to_num(scores.double()).masked_fill(room == 0, -math.inf)
    finite = values[values.isfinite()]
    span = float(finite.max() - finite.min()) if finite.numel() else 0.0
    prices, chosen = torch.zeros(num_experts, dtype=torch.float64), torch.full((num_tokens,), -1)
    for divisor in (8.0, 64.0, 1024.0):
        increment = max(span, 1e-30) / divisor
        chosen.fill_(-1)
        bids = torch.full((num_tokens,), -math.inf, dtype=torch.float64)
        while (waiting := (chosen < 0).nonzero().squeeze(1)).numel():
            gains, best = (values[waiting] - prices).topk(min(2, num_experts), dim=-1)
            rise = gains[:, 0] - gains[:, -1] if num_experts > 1 else torch.zeros_like(gains[:, 0])
            rise = torch.where(rise.isfinite(), rise, 0.0)
            bids[waiting] = prices[best[:, 0]] + rise + increment
            chosen[waiting] = best[:, 0]
            for expert in best[:, 0].unique().tolist():
                places, own = int(room[expert]), (chosen == expert).nonzero().squeeze(1)
                if own.numel() >= places:
                    kept = bids[own].topk(places).indices
                    is_kept = torch.zeros(own.numel(), dtype=torch.bool)
                    is_kept[kept] = True
                    chosen[own[~is_kept]] = -1
                    prices[expert] = torch.maximum(prices[expert], bids[own[is_kept]].min())
    return chosen


def sinkhorn_factors(logits: Tensor) -> Tensor:
    """Returns the logarithms of the factors ``[E]`` of the columns of a matrix whose rows and columns have equal sums.

    Args:
        logits: ``[T, E]``, the logarithms of the matrix before it is balanced.
    """
    num_tokens, num_experts = logits.shape
    matrix = (logits - logits.amax(-1, keepdim=True)).double().exp()
    factors = torch.ones(num_experts, dtype=torch.float64, device=logits.device)
    for _ in range(100):
        rows = 1.0 / (num_tokens * (matrix @ factors))
        following = (1.0 / (num_experts * (rows @ matrix).clamp_min(1e-30))).clamp_min(1e-200)
        change = (following / factors - 1.0).abs().mean()
        factors = following
        if change < 1e-4:
            break
    return factors.log().to(logits.dtype)


def balanced_table(counts: Tensor, vocab_size: int, num_experts: int, top_k: int) -> Tensor:
    """Returns experts ``[ids, K]`` that get about equally many tokens, frequent ids first to those with fewest.

    Args:
        counts: ``[ids]``, how often each id is in the text.
        vocab_size: the number of ids.
        num_experts: E.
        top_k: K.
    """
    if counts.shape != (vocab_size,):
        raise ValueError(f"counts: shape {list(counts.shape)} must be [{vocab_size}]")
    loads, table = [(0, expert) for expert in range(num_experts)], [[0] * top_k] * vocab_size
    for token in counts.argsort(dim=0, descending=True, stable=True).tolist():
        least = sorted(loads)[:top_k]
        table[token] = [expert for _, expert in least]
        for load, expert in least:
            loads[expert] = (load + int(counts[token]), expert)
    return torch.tensor(table)
