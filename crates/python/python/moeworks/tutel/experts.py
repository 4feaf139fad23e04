"""Experts ``ffn`` and ``llama_ffn``: by the fused kernels where the activation is one of theirs.

An activation is any function. It is called on fixed points before each pass, since a dropout or a mode within may
change it. One that is not known stands in PyTorch between two grouped products, on rows ``[E, C, F]`` as in Tutel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .. import ops
from .._torch import torch

Tensor = torch.Tensor

_functional = torch.nn.functional
_PLAIN = {
    "relu": _functional.relu,
    "gelu": _functional.gelu,
    "gelu_tanh": lambda x: _functional.gelu(x, approximate="tanh"),
}
_GATED = {"swiglu": _functional.silu}


class FusedExpertsNetwork(torch.nn.Module):
    """Experts of two products with an activation between them.

    Attributes:
        batched_fc1_w: ``[E, F, D]``.
        batched_fc2_w: ``[E, F, O]``, in memory ``[E, O, F]`` as the kernels read it. O is D, or
            ``output_dim``.
        batched_fc1_bias: ``[E, F]``, or ``None``.
        batched_fc2_bias: ``[E, O]``, or ``None``.
    """

    def __init__(
        self,
        model_dim: int,
        hidden_size_per_expert: int,
        num_experts_per_device: int,
        sharded_count: int = 1,
        activation_fn: Callable[[Tensor], Tensor] | None = None,
        activation_fn_with_self: Callable[[Tensor, torch.nn.Module], Tensor] | None = None,
        output_dim: int | None = None,
        has_fc1_bias: bool = True,
        has_fc2_bias: bool = True,
    ) -> None:
        """Draws uniform weights within one over the root of the inputs of a product; biases are 0.

        Args:
            model_dim: D.
            hidden_size_per_expert: F.
            num_experts_per_device: E.
            sharded_count: 1.
            activation_fn: a function of ``[E, C, F]``; ``None`` for ReLU.
            activation_fn_with_self: a function of ``[E, C, F]`` and this module, in place of ``activation_fn``.
            output_dim: O.
            has_fc1_bias: whether the first product has a bias.
            has_fc2_bias: whether the second product has a bias.

        Raises:
            ValueError: if both activations are given.
        """
        super().__init__()
        if activation_fn is not None and activation_fn_with_self is not None:
            raise ValueError("activation_fn and activation_fn_with_self: give one of them")
        self.model_dim, self.hidden_size, self.output_dim = model_dim, hidden_size_per_expert, output_dim or model_dim
        self.hidden_size_per_expert, self.local_experts = hidden_size_per_expert, num_experts_per_device
        self.sharded_count = sharded_count
        self._is_own = activation_fn_with_self is not None
        self.activation_fn = activation_fn or _functional.relu
        if activation_fn_with_self is not None:
            self.activation_fn = lambda x: activation_fn_with_self(x, self)
        stack, sizes = num_experts_per_device, (self.hidden_size, self.output_dim)
        self.batched_fc1_w = torch.nn.Parameter(torch.empty(stack, self.hidden_size, model_dim))
        self.batched_fc2_w = torch.nn.Parameter(torch.empty(stack, *sizes[::-1]).mT)
        names = ("batched_fc1_bias", "batched_fc2_bias")
        for name, has_bias, size in zip(names, (has_fc1_bias, has_fc2_bias), sizes, strict=True):
            self.register_parameter(name, torch.nn.Parameter(torch.empty(stack, size)) if has_bias else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights again, in Tutel's order."""
        for first, second in zip(self.batched_fc1_w, self.batched_fc2_w, strict=True):
            for weight, num_inputs in ((first, self.model_dim), (second, self.hidden_size)):
                bound = 1.0 / math.sqrt(num_inputs)
                drawn = torch.rand(weight.shape, dtype=torch.float32, device=weight.device)
                weight.copy_(drawn * (2 * bound) - bound)
        for bias in (self.batched_fc1_bias, self.batched_fc2_bias):
            if bias is not None:
                bias.zero_()

    def fused(self) -> str | None:
        """Returns the activation of the kernels that computes these experts now; ``None`` if none does."""
        if self._is_own or self.output_dim != self.model_dim:
            return None
        return _known(self.activation_fn, _PLAIN, self.batched_fc1_w.dtype)

    def weighted(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, activation: str) -> Tensor:
        """Returns the weighted sum of each token's experts ``[T, D]`` by the fused kernels.

        Args:
            x: ``[T, D]``.
            expert_ids: ``[T, K]``; E for a choice that is dropped.
            expert_weights: ``[T, K]``.
            activation: what :meth:`fused` returned.
        """
        return ops.experts(
            x,
            self.batched_fc1_w,
            self.batched_fc2_w.mT,
            expert_ids,
            expert_weights,
            gate_up_bias=self.batched_fc1_bias,
            down_bias=self.batched_fc2_bias,
            activation=activation,
        )

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        """Returns the outputs of experts ``[E, C, O]``.

        Args:
            x: ``[E, C, D]``, the rows of each expert.
            ctx: the layer; not used.
        """
        h = _products(x, self.batched_fc1_w.mT)
        if self.batched_fc1_bias is not None:
            h = h + self.batched_fc1_bias.unsqueeze(1).to(h.dtype)
        y = _products(self.activation_fn(h), self.batched_fc2_w)
        if self.batched_fc2_bias is not None:
            y = y + self.batched_fc2_bias.unsqueeze(1).to(y.dtype)
        return y

    def extra_repr(self) -> str:
        sizes = f"model_dim={self.model_dim}, hidden_size={self.hidden_size}, output_dim={self.output_dim}"
        has_bias = [bias is not None for bias in (self.batched_fc1_bias, self.batched_fc2_bias)]
        biases = f"has_fc1_bias={has_bias[0]}, has_fc2_bias={has_bias[1]}"
        return f"{sizes}, num_experts_per_device={self.local_experts}, {biases}"


class LlamaFFNNetwork(torch.nn.Module):
    """Gated experts: ``(act(x W_fc1) * (x W_fc2)) W_fc3``. Parameters are rows of numbers, as Tutel divides them.

    Attributes:
        W_fc1: ``[E D F]``, of the shape ``W_fc1_full_shape`` ``[E, D, F]``.
        W_fc2: as ``W_fc1``.
        W_fc3: ``[E F D]``, of the shape ``W_fc3_full_shape`` ``[E, F, D]``.
    """

    def __init__(
        self,
        model_dim: int,
        hidden_size_per_expert: int,
        num_experts_per_device: int,
        sharded_count: int = 1,
        activation_fn: Callable[[Tensor], Tensor] = _functional.silu,
    ) -> None:
        """Draws weights from a normal distribution of deviation 0.01.

        Args:
            model_dim: D.
            hidden_size_per_expert: F.
            num_experts_per_device: E.
            sharded_count: 1.
            activation_fn: a function of ``[E, C, F]``.
        """
        super().__init__()
        self.model_dim, self.sharded_count, self.activation_fn = model_dim, sharded_count, activation_fn
        first = torch.Size((num_experts_per_device, model_dim, hidden_size_per_expert))
        self.W_fc1_full_shape = self.W_fc2_full_shape = first
        self.W_fc3_full_shape = torch.Size((num_experts_per_device, hidden_size_per_expert, model_dim))
        for name in ("W_fc1", "W_fc2", "W_fc3"):
            setattr(self, name, torch.nn.Parameter(torch.empty(first.numel())))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights again."""
        for weight in (self.W_fc1, self.W_fc2, self.W_fc3):
            weight.normal_(0, 0.01)

    def _matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        first, second = (weight.view(self.W_fc1_full_shape) for weight in (self.W_fc1, self.W_fc2))
        return first, second, self.W_fc3.view(self.W_fc3_full_shape)

    def fused(self) -> str | None:
        """Returns the activation of the kernels that computes these experts now; ``None`` if none does."""
        return _known(self.activation_fn, _GATED, self.W_fc1.dtype)

    def weighted(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, activation: str) -> Tensor:
        """Returns the weighted sum of each token's experts ``[T, D]`` by the fused kernels.

        The kernels read other layouts, so each pass copies the weights once.

        Args:
            x: ``[T, D]``.
            expert_ids: ``[T, K]``; E for a choice that is dropped.
            expert_weights: ``[T, K]``.
            activation: what :meth:`fused` returned.
        """
        first, second, third = self._matrices()
        gate_up = torch.cat((first.mT, second.mT), 1)
        return ops.experts(x, gate_up, third.mT, expert_ids, expert_weights, activation=activation)

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        """Returns the outputs of experts ``[E, C, D]``.

        Args:
            x: ``[E, C, D]``, the rows of each expert.
            ctx: the layer; not used.
        """
        first, second, third = self._matrices()
        return _products(self.activation_fn(_products(x, first)) * _products(x, second), third)

    def extra_repr(self) -> str:
        return f"num_experts, model_dim, hidden_size = {list(self.W_fc1_full_shape)}"


EXPERTS = {"ffn": FusedExpertsNetwork, "llama_ffn": LlamaFFNNetwork}


def _products(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiplies the rows of each expert ``[E, C, I]`` by its matrix ``[E, I, O]``."""
    num_experts, capacity, width = x.shape
    ends = torch.arange(1, num_experts + 1, dtype=torch.int32, device=x.device) * capacity
    y = ops.grouped_mm(x.reshape(-1, width), matrices, offs=ends)
    return y.view(num_experts, capacity, matrices.shape[2])


def _known(
    function: Callable[[Tensor], Tensor], candidates: dict[str, Callable[[Tensor], Tensor]], dtype: torch.dtype
) -> str | None:
    """Returns the name of the candidate that a function equals at fixed points.

    The generator of random numbers is left as it was. Learned parameters within the function rule all out.
    """
    for name, candidate in candidates.items():
        if function is candidate:
            return name
    if isinstance(function, torch.nn.Module) and any(True for _ in function.parameters()):
        return None
    points = torch.cat((torch.linspace(-6.0, 6.0, 49), torch.tensor([-40.0, -0.01, 0.01, 40.0]))).to(dtype)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        try:
            found = function(points.clone().view(1, 1, -1))
        except Exception:  # A function with other needs has no kernel.
            return None
        if not isinstance(found, Tensor) or found.requires_grad or found.numel() != points.numel():
            return None
        for name, candidate in candidates.items():
            if torch.allclose(found.reshape(-1).to(dtype), candidate(points), 1e-6, 1e-7):
                return name
    return None
