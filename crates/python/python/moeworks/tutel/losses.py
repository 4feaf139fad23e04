"""Auxiliary losses that keep the load of experts even."""

from __future__ import annotations

import math

from .._torch import torch

Tensor = torch.Tensor


def gshard_loss(scores_w_noise: Tensor, top_ids: Tensor) -> Tensor:
    """Returns GShard's loss: ``E * sum over e of f_e P_e``, 1 for an even load.

    ``f_e`` is the share of tokens whose first choice is e, ``P_e`` the mean score of e.

    Args:
        scores_w_noise: ``[T, E]``, scores of each token with sum 1.
        top_ids: ``[T, K]``, first choices first.
    """
    num_tokens, num_experts = scores_w_noise.shape
    counts = torch.bincount(top_ids[:, 0], minlength=num_experts).to(scores_w_noise.dtype)
    return num_experts * (scores_w_noise.sum(0) * counts).sum() / (num_tokens * num_tokens)


def load_importance_loss(
    scores_wo_noise: Tensor, topk_logits: Tensor, num_global_experts: int, gate_noise: float
) -> Tensor:
    """Returns the mean of two squared coefficients of variation over experts (Shazeer et al., 2017).

    Importance is the sum of an expert's scores. Load is the expected number of tokens that choose it under new noise.

    Args:
        scores_wo_noise: ``[T, E]``, the softmax of logits without noise.
        topk_logits: ``[T, K]``, logits with noise of the chosen experts, the least last.
        num_global_experts: E.
        gate_noise: the noise has deviation ``gate_noise / E``; more than 0.

    Raises:
        ValueError: if there is no noise.
    """
    if not gate_noise > 0:
        raise ValueError(f"gate_noise {gate_noise}: must be more than 0 for the load and importance loss")
    scores = scores_wo_noise.float()
    deviation = gate_noise / num_global_experts
    distance = (scores - topk_logits[:, -1:].float()) / deviation
    load = (0.5 * (1 + torch.erf(distance / math.sqrt(2.0)))).sum(0)
    return (_variation(scores.sum(0)) + _variation(load)) / 2.0


def _variation(values: Tensor) -> Tensor:
    """Returns the variance over the squared mean."""
    return values.var() / (values.mean() ** 2 + 1e-10)
