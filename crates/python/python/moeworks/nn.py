"""Mixture-of-Experts layers and losses on routers, for PyTorch.

Parameters have the names and layouts of transformers, so that state dicts move between the two. Losses are functions of
router logits; nothing is kept in global state.

T tokens, D hidden size, F intermediate size, E experts, K experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import _kernels, ops
from ._torch import torch

Tensor = torch.Tensor

__all__ = ["Experts", "MoE", "load_balancing_loss", "z_loss"]

_STD = 0.02


class Experts(torch.nn.Module):
    """The experts of a layer, for ids and weights from any router.

    Attributes:
        gate_up_proj: ``[E, 2 F, D]``, the gate's F rows first; ``[E, F, D]`` for an activation without gate.
        down_proj: ``[E, D, F]``.
        gate_up_proj_bias: ``[E, 2 F]`` (or ``[E, F]``), or ``None``.
        down_proj_bias: ``[E, D]``, or ``None``.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        alpha: float = 1.702,
        limit: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes experts with weights from a normal distribution of deviation 0.02 and biases of 0.

        Args:
            num_experts: E.
            hidden_size: D.
            intermediate_size: F.
            activation: as for :func:`moeworks.ops.experts`.
            bias: whether both products have biases.
            alpha: as for :func:`moeworks.ops.experts`.
            limit: as for :func:`moeworks.ops.experts`.
            device: where the parameters are.
            dtype: the type of the parameters.
        """
        super().__init__()
        sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        for name, value in sizes.items():
            _positive(name, value)
        if activation not in _kernels.ACTIVATIONS:
            raise ValueError(f"activation {activation!r}: must be one of {', '.join(_kernels.ACTIVATIONS)}")
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.activation, self.alpha, self.limit = activation, alpha, limit
        rows = _kernels.ACTIVATIONS[activation] * intermediate_size

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.gate_up_proj = parameter(num_experts, rows, hidden_size)
        self.down_proj = parameter(num_experts, hidden_size, intermediate_size)
        self.gate_up_proj_bias = parameter(num_experts, rows) if bias else None
        self.down_proj_bias = parameter(num_experts, hidden_size) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights again."""
        for weight in (self.gate_up_proj, self.down_proj):
            torch.nn.init.normal_(weight, std=_STD)
        for bias in (self.gate_up_proj_bias, self.down_proj_bias):
            if bias is not None:
                torch.nn.init.zeros_(bias)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Returns the weighted sum of each token's experts, ``[T, D]``.

        Args:
            x: ``[T, D]``.
            expert_ids: ``[T, K]``; ids outside ``0 .. E - 1`` are skipped.
            expert_weights: ``[T, K]``.
        """
        return ops.experts(
            x,
            self.gate_up_proj,
            self.down_proj,
            expert_ids,
            expert_weights,
            gate_up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias,
            activation=self.activation,
            alpha=self.alpha,
            limit=self.limit,
        )

    def extra_repr(self) -> str:
        sizes = f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}"
        return f"{sizes}, activation={self.activation!r}, bias={self.gate_up_proj_bias is not None}"


class MoE(torch.nn.Module):
    """An MoE layer: a router, its experts, and perhaps a shared expert that every token passes.

    The router computes in f32, also under autocast. ``gate.weight [E, D]`` are the router's weights, ``experts`` is an
    :class:`Experts`; a shared expert has ``shared_expert.gate_up_proj_weight`` and ``shared_expert.down_proj_weight``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize_weights: bool = True,
        score: str = "softmax",
        capacity_factor: float = 0.0,
        shared_intermediate_size: int = 0,
        activation: str = "swiglu",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes a layer.

        Args:
            hidden_size: D.
            intermediate_size: F.
            num_experts: E.
            top_k: K.
            normalize_weights: whether the weights of a token's experts are divided by their sum.
            score: ``"softmax"`` over the experts, or ``"sigmoid"`` of each (DeepSeek-V3).
            capacity_factor: an expert takes at most ``ceil(capacity_factor * T K / E)`` rows, first choices first;
                the rest is dropped. 0 for no limit.
            shared_intermediate_size: the width of the shared expert; 0 for none.
            activation: as for :func:`moeworks.ops.experts`.
            bias: whether the experts have biases.
            device: where the parameters are.
            dtype: the type of the parameters.
        """
        super().__init__()
        _positive("num_experts", num_experts)
        _positive("top_k", top_k)
        if top_k > num_experts:
            raise ValueError(f"top_k {top_k}: must be at most num_experts, {num_experts}")
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score {score!r}: must be softmax or sigmoid")
        if not (capacity_factor >= 0.0 and math.isfinite(capacity_factor)):
            raise ValueError(f"capacity_factor {capacity_factor}: must be at least 0; 0 for no limit")
        self.top_k, self.num_experts = top_k, num_experts
        self.normalize_weights, self.score, self.capacity_factor = normalize_weights, score, capacity_factor
        options = {"device": device, "dtype": dtype}
        self.gate = torch.nn.Linear(hidden_size, num_experts, bias=False, **options)
        torch.nn.init.normal_(self.gate.weight, std=_STD)
        settings = {"activation": activation, **options}
        self.experts = Experts(num_experts, hidden_size, intermediate_size, bias=bias, **settings)
        size = shared_intermediate_size
        self.shared_expert = _Shared(hidden_size, size, **settings) if size else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the router's logits ``[T, E]``, and the ids and weights of each token's experts ``[T, K]``.

        Args:
            x: ``[T, D]``.
        """
        with torch.autocast("cpu", enabled=False):
            logits = torch.nn.functional.linear(x.float(), self.gate.weight.float())
            scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
            weights, ids = scores.topk(self.top_k, dim=-1)
            if self.normalize_weights:
                weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        if self.capacity_factor > 0.0:
            ids = within_capacity(ids, self.num_experts, self.capacity_factor)
        return logits, ids, weights

    def forward(self, x: Tensor, output_router_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the layer's output, of the shape and type of ``x``.

        Args:
            x: ``[..., D]``.
            output_router_logits: whether the router's logits ``[T, E]`` (f32) are returned, too, for losses.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"x: must be a tensor, not {type(x).__name__}")
        if x.dim() < 1 or x.shape[-1] != self.experts.hidden_size:
            raise ValueError(f"x: shape {list(x.shape)} must end with the hidden size, {self.experts.hidden_size}")
        tokens = x.reshape(-1, x.shape[-1])
        logits, ids, weights = self.route(tokens)
        y = self.experts(tokens, ids, weights)
        if self.shared_expert is not None:
            y = y + self.shared_expert(tokens)
        y = y.view(*x.shape)
        return (y, logits) if output_router_logits else y

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, score={self.score!r}, capacity_factor={self.capacity_factor}"


class _Shared(torch.nn.Module):
    """A dense network as one expert that takes all tokens."""

    def __init__(self, hidden_size: int, size: int, activation: str, **options: Any) -> None:
        super().__init__()
        _positive("shared_intermediate_size", size)
        rows = _kernels.ACTIVATIONS[activation] * size
        self.activation = activation
        self.gate_up_proj_weight = torch.nn.Parameter(torch.empty(rows, hidden_size, **options))
        self.down_proj_weight = torch.nn.Parameter(torch.empty(hidden_size, size, **options))
        for weight in (self.gate_up_proj_weight, self.down_proj_weight):
            torch.nn.init.normal_(weight, std=_STD)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device)
        weights = torch.ones(x.shape[0], 1, device=x.device)
        stacks = self.gate_up_proj_weight.unsqueeze(0), self.down_proj_weight.unsqueeze(0)
        return ops.experts(x, *stacks, ids, weights, activation=self.activation)


def within_capacity(expert_ids: Tensor, num_experts: int, capacity_factor: float) -> Tensor:
    """Returns ids ``[T, K]`` in which choices beyond an expert's capacity are ``num_experts``, which are skipped.

    First choices of all tokens come before second ones, and so on (GShard).

    Args:
        expert_ids: ``[T, K]``.
        num_experts: E.
        capacity_factor: an expert takes ``ceil(capacity_factor * T K / E)`` rows.
    """
    num_tokens, num_choices = expert_ids.shape
    capacity = math.ceil(capacity_factor * num_tokens * num_choices / num_experts)
    by_rank = expert_ids.t().reshape(-1)
    is_chosen = torch.nn.functional.one_hot(by_rank, num_experts)
    places = (is_chosen.cumsum(0) * is_chosen).sum(-1)
    kept = torch.where(places <= capacity, by_rank, num_experts)
    return kept.view(num_choices, num_tokens).t().contiguous()


def load_balancing_loss(
    logits: Tensor | Sequence[Tensor], top_k: int, *, mask: Tensor | None = None
) -> Tensor:
    """Returns the balance loss of Switch and GShard over the tokens of all layers: 1 times K when even.

    ``E * sum over e of f_e P_e``, with the share ``f_e`` of choices and the mean probability ``P_e`` of an expert.
    The same as ``load_balancing_loss_func`` of transformers.

    Args:
        logits: ``[T, E]``, or a list of these, one for each layer.
        top_k: K.
        mask: ``[T]`` of one layer: 0 for tokens that do not count, such as padding.
    """
    layers = [logits] if isinstance(logits, Tensor) else list(logits)
    if not layers or any(not isinstance(layer, Tensor) or layer.dim() != 2 for layer in layers):
        raise ValueError("logits: give a tensor [tokens, experts], or a list of these")
    num_experts = layers[0].shape[1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k {top_k}: must be from 1 to the number of experts, {num_experts}")
    probabilities = torch.cat([layer.float() for layer in layers]).softmax(-1)
    ids = probabilities.topk(top_k, dim=-1).indices
    chosen = torch.zeros_like(probabilities).scatter_(1, ids, 1.0)
    if mask is None:
        return num_experts * (chosen.mean(0) * probabilities.mean(0)).sum()
    weights = mask.reshape(-1).to(probabilities.dtype).repeat(len(layers)).unsqueeze(1)
    total = weights.sum().clamp_min(1.0)
    return num_experts * ((chosen * weights).sum(0) / total * ((probabilities * weights).sum(0) / total)).sum()


def z_loss(logits: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns the mean square of each token's log-sum-exp of logits (ST-MoE), which keeps logits small.

    Args:
        logits: ``[T, E]``, or a list of these.
    """
    layers = [logits] if isinstance(logits, Tensor) else list(logits)
    if not layers:
        raise ValueError("logits: give a tensor [tokens, experts], or a list of these")
    return torch.cat([layer.float().logsumexp(-1) for layer in layers]).square().mean()


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: must be a whole number, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} {value}: must be at least 1")
