"""Mixture-of-Experts layers and losses on routers, for PyTorch.

Routing schemes are in :mod:`moeworks.routers`. Parameters have the names and layouts of transformers, so that state
dicts move between the two. Losses are functions of router logits; nothing is kept in global state.

T tokens, D hidden size, F intermediate size, E experts, K experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import ops
from ._checks import ACTIVATIONS, activation_numbers, check_settings, check_tensors
from ._torch import torch
from .routers import Choice, Router, make_router
from .routing import Routing

Tensor = torch.Tensor

__all__ = ["Experts", "MoE", "entropy_loss", "importance_loss", "l1_loss", "load_balancing_loss", "z_loss"]

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
        softcaps: tuple[float, float] | None = None,
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
            softcaps: as for :func:`moeworks.ops.experts`.
            device: where the parameters are.
            dtype: the type of the parameters.
        """
        super().__init__()
        sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        for name, value in sizes.items():
            _positive(name, value)
        check_settings(activation, "stacked")
        activation_numbers(activation, alpha, limit, softcaps)
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.activation, self.alpha, self.limit, self.softcaps = activation, alpha, limit, softcaps
        rows = ACTIVATIONS[activation] * intermediate_size

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
            softcaps=self.softcaps,
        )

    def extra_repr(self) -> str:
        sizes = f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}"
        return f"{sizes}, activation={self.activation!r}, bias={self.gate_up_proj_bias is not None}"


class MoE(torch.nn.Module):
    """An MoE layer: a router, its experts, and perhaps a shared expert that every token passes.

    The router, ``gate``, computes in f32, also under autocast; ``gate.weight [E, D]`` are the experts' vectors.
    ``experts`` is an :class:`Experts`; a shared expert has ``shared_expert.gate_up_proj_weight`` and
    ``shared_expert.down_proj_weight``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        router: str | Router = "top_k",
        router_settings: Mapping[str, Any] | None = None,
        normalize_weights: bool | None = None,
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
            router: the name of a routing scheme (``moeworks.routers.SCHEMES``), or a router.
            router_settings: the scheme's own settings, such as ``{"top_p": 0.3}``.
            normalize_weights: whether the weights of a token's experts are divided by their sum; ``None`` for the
                scheme's own choice, which for ``top_k`` is yes.
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
        if isinstance(capacity_factor, bool) or not isinstance(capacity_factor, int | float):
            raise TypeError(f"capacity_factor: must be a number, not {capacity_factor!r}")
        if not (capacity_factor >= 0.0 and math.isfinite(capacity_factor)):
            raise ValueError(f"capacity_factor {capacity_factor}: must be at least 0; 0 for no limit")
        self.top_k, self.num_experts, self.capacity_factor = top_k, num_experts, capacity_factor
        options = {"device": device, "dtype": dtype}
        if isinstance(router, str):
            rules = {"normalize_weights": normalize_weights, "score": score, **options}
            router = make_router(router, hidden_size, num_experts, top_k, router_settings, **rules)
        elif not isinstance(router, Router):
            raise TypeError(f"router: must be a name or a moeworks.routers.Router, not {type(router).__name__}")
        self.gate = router
        settings = {"activation": activation, **options}
        self.experts = Experts(num_experts, hidden_size, intermediate_size, bias=bias, **settings)
        size = shared_intermediate_size
        self.shared_expert = _Shared(hidden_size, size, **settings) if size else None

    def route(self, x: Tensor, token_ids: Tensor | None = None, progress: float = 1.0) -> Choice:
        """Returns the router's logits ``[T, E]``, and the ids and weights of each token's experts ``[T, K]``.

        Choices over an expert's capacity have the id E.

        Args:
            x: ``[T, D]``.
            token_ids: ``[T]``, for the scheme ``hash``.
            progress: the share of the run that is over, for the scheme ``dense_to_sparse``.
        """
        choice = self.gate(x, token_ids, progress)
        if self.capacity_factor > 0.0:
            ids = within_capacity(choice.expert_ids, self.num_experts, self.capacity_factor, self.top_k)
            choice = choice._replace(expert_ids=ids)
        return choice

    def forward(
        self,
        x: Tensor,
        output_router_logits: bool = False,
        *,
        output_routing: bool = False,
        token_ids: Tensor | None = None,
        progress: float = 1.0,
    ) -> Any:
        """Returns the layer's output, of the shape and type of ``x``.

        Args:
            x: ``[..., D]``.
            output_router_logits: whether the router's logits ``[T, E]`` (f32) are returned, too, for losses.
            output_routing: whether a :class:`moeworks.Routing` is returned, too, as the last.
            token_ids: ``[...]``, for the scheme ``hash``.
            progress: the share of the run that is over, for the scheme ``dense_to_sparse``.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"x: must be a tensor, not {type(x).__name__}")
        if x.dim() < 1 or x.shape[-1] != self.experts.hidden_size:
            raise ValueError(f"x: shape {list(x.shape)} must end with the hidden size, {self.experts.hidden_size}")
        tokens = x.reshape(-1, x.shape[-1])
        choice = self.route(tokens, token_ids, progress)
        y = self.experts(tokens, choice.expert_ids, choice.expert_weights)
        if self.shared_expert is not None:
            y = y + self.shared_expert(tokens)
        results = [y.view(*x.shape)]
        if output_router_logits:
            results.append(choice.logits)
        if output_routing:
            results.append(Routing.from_choices(choice.expert_ids, choice.expert_weights, self.num_experts))
        return results[0] if len(results) == 1 else tuple(results)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, capacity_factor={self.capacity_factor}"


class _Shared(torch.nn.Module):
    """A dense network as one expert that takes all tokens."""

    def __init__(self, hidden_size: int, size: int, activation: str, **options: Any) -> None:
        super().__init__()
        _positive("shared_intermediate_size", size)
        rows = ACTIVATIONS[activation] * size
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


def within_capacity(
    expert_ids: Tensor, num_experts: int, capacity_factor: float, top_k: int | None = None
) -> Tensor:
    """Returns ids ``[T, K]`` in which choices beyond an expert's capacity are ``num_experts``, which are skipped.

    First choices of all tokens come before second ones, and so on (GShard).

    Args:
        expert_ids: ``[T, K]``.
        num_experts: E.
        capacity_factor: an expert takes ``ceil(capacity_factor * T K / E)`` rows.
        top_k: K, where rows of ``expert_ids`` have places without an expert; otherwise their length.
    """
    num_tokens, num_choices = expert_ids.shape
    capacity = math.ceil(capacity_factor * num_tokens * (top_k or num_choices) / num_experts)
    by_rank = expert_ids.t().reshape(-1)
    is_chosen = torch.nn.functional.one_hot(by_rank, num_experts + 1)[:, :num_experts]
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
    layers = _layers(logits)
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
    layers = _layers(logits)
    return torch.cat([layer.float().logsumexp(-1) for layer in layers]).square().mean()


def importance_loss(expert_ids: Tensor, expert_weights: Tensor, num_experts: int) -> Tensor:
    """Returns the squared coefficient of variation of the experts' sums of weights (Shazeer et al., 1701.06538).

    Args:
        expert_ids: ``[T, K]``; ids outside ``0 .. E - 1`` do not count.
        expert_weights: ``[T, K]``.
        num_experts: E.
    """
    check_tensors({"expert_ids": expert_ids, "expert_weights": expert_weights})
    ids, weights = expert_ids.reshape(-1), expert_weights.float().reshape(-1)
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    sums = weights.new_zeros(num_experts + 1).index_add(0, ids, weights)[:num_experts]
    mean = sums.mean()
    return (sums - mean).square().mean() / mean.square().clamp_min(1e-20)


def l1_loss(logits: Tensor, top_k: int, *, balanced: bool = True) -> Tensor:
    """Returns the L1 loss of ReLU routing (ReMoE, 2412.14711), a mean over tokens.

    Args:
        logits: ``[T, E]`` of the scheme ``relu``.
        top_k: K, the experts that a token shall have on average.
        balanced: whether an expert's gates count by its load over its even share (equation 11).
    """
    check_tensors({"logits": logits})
    gates = logits.relu()
    loads = (gates > 0).sum(0) * (logits.shape[1] / (top_k * max(logits.shape[0], 1)))
    return (gates * loads if balanced else gates).sum() / max(gates.numel(), 1)


def entropy_loss(logits: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns the mean entropy of the tokens' distributions over experts, which keeps ``top_p`` at few experts.

    Args:
        logits: ``[T, E]``, or a list of these.
    """
    layers = _layers(logits)
    logs = [layer.float().log_softmax(-1) for layer in layers]
    return torch.cat([-(log.exp() * log).sum(-1) for log in logs]).mean()


def _layers(logits: Any) -> list[Tensor]:
    """Returns the router logits of each layer."""
    layers = [logits] if isinstance(logits, Tensor) else list(logits) if isinstance(logits, Sequence) else []
    if not layers or any(not isinstance(layer, Tensor) or layer.dim() != 2 for layer in layers):
        raise ValueError("logits: give a tensor [tokens, experts], or a list of these")
    return layers


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: must be a whole number, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} {value}: must be at least 1")
