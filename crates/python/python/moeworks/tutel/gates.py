"""Gates: linear maps of tokens to logits of experts. A gate has ``top_k``; its layer adds capacity and noise."""

from __future__ import annotations

import math
from typing import Any

from .._torch import torch

Tensor = torch.Tensor

_OPTIONS = ("capacity_factor", "gate_noise")


class LinearTopKGate(torch.nn.Module):
    """A matrix ``wg.weight [E, D]``.

    Attributes:
        top_k: K.
        fp32_gate: whether logits are computed in f32.
    """

    def __init__(
        self, model_dim: int, num_global_experts: int, k: int = 1, fp32_gate: bool = False, **options: Any
    ) -> None:
        """Draws the matrix as ``torch.nn.Linear`` does.

        Args:
            model_dim: D.
            num_global_experts: E.
            k: K; E if that is less.
            fp32_gate: whether the weights are f32 and logits are computed in f32.
            options: ``capacity_factor`` and ``gate_noise``, which the layer reads.

        Raises:
            ValueError: for another option, or a wrong ``k``.
        """
        super().__init__()
        _check(k, options)
        dtype = torch.float32 if fp32_gate else None
        self.wg = torch.nn.Linear(model_dim, num_global_experts, bias=False, dtype=dtype)
        self.top_k, self.fp32_gate = min(num_global_experts, int(k)), fp32_gate

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits ``[T, E]``.

        Args:
            x: ``[T, D]``.
        """
        weight = self.wg.weight.float() if self.fp32_gate else self.wg.weight
        return torch.nn.functional.linear(x.to(weight.dtype), weight)


class CosineTopKGate(torch.nn.Module):
    """The cosine of a projected token and a vector of each expert, times a learned scale of at most 100 (X-MoE).

    Attributes:
        temperature: ``[1]``, the logarithm of the scale.
        cosine_projector: the projection.
        sim_matrix: ``[P, E]``, the vectors of experts.
        top_k: K.
        fp32_gate: whether logits are computed in f32.
    """

    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        fp32_gate: bool = False,
        proj_dim: int = 256,
        init_t: float = 0.5,
        **options: Any,
    ) -> None:
        """Draws the projection as ``torch.nn.Linear`` does, and vectors of deviation 0.01.

        Args:
            model_dim: D.
            num_global_experts: E.
            k: K; E if that is less.
            fp32_gate: whether logits are computed in f32.
            proj_dim: P.
            init_t: the scale is ``1 / init_t`` at first.
            options: ``capacity_factor`` and ``gate_noise``, which the layer reads.

        Raises:
            ValueError: for another option, or a wrong ``k``.
        """
        super().__init__()
        _check(k, options)
        self.top_k, self.fp32_gate = min(num_global_experts, int(k)), fp32_gate
        self.temperature = torch.nn.Parameter(torch.log(torch.full([1], 1.0 / init_t)))
        self.cosine_projector = torch.nn.Linear(model_dim, proj_dim)
        # Drawn twice, as Tutel does, for the same random numbers after it.
        self.sim_matrix = torch.nn.Parameter(torch.randn(proj_dim, num_global_experts))
        torch.nn.init.normal_(self.sim_matrix, 0, 0.01)
        self.clamp_max = math.log(100.0)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits ``[T, E]``.

        Args:
            x: ``[T, D]``.
        """
        functional, projector = torch.nn.functional, self.cosine_projector
        dtype = torch.float32 if self.fp32_gate else projector.weight.dtype
        projected = functional.linear(x.to(dtype), projector.weight.to(dtype), projector.bias.to(dtype))
        logits = functional.normalize(projected, dim=1) @ functional.normalize(self.sim_matrix.to(dtype), dim=0)
        return logits * self.temperature.clamp(max=self.clamp_max).exp().to(dtype)


GATES = {"top": LinearTopKGate, "cosine_top": CosineTopKGate}


def _check(k: int, options: dict[str, Any]) -> None:
    if int(k) < 1:
        raise ValueError(f"k {k}: must be at least 1")
    for name in options:
        if name not in _OPTIONS:
            raise ValueError(f"gate_type: unknown option {name!r}; further ones are {' and '.join(_OPTIONS)}")
