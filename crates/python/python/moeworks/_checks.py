"""Checks of the arguments of operators: one clear line for whatever cannot be computed.

T tokens, D width, F expert width, E experts, K experts a token, A F columns before the activation, M rows.
"""

from __future__ import annotations

from typing import Any

from ._torch import torch

Tensor = torch.Tensor

# Types of inputs and weights: those of kernels, and f64 by PyTorch's products.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Columns before the activation for each after it.
ACTIVATIONS = {
    "swiglu": 2,
    "geglu_tanh": 2,
    "clamped_swiglu": 2,
    "clamped_silu": 2,
    "softcapped_swiglu": 2,
    "gelu": 1,
    "gelu_tanh": 1,
    "relu": 1,
    "relu_squared": 1,
}
LAYOUTS = ("stacked", "transposed", "interleaved")


def check_settings(activation: Any, layout: Any) -> None:
    """Raises an exception unless the activation and the layout are known."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: must be one of {', '.join(LAYOUTS)}")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: must be one of {', '.join(ACTIVATIONS)}")


def activation_numbers(activation: str, alpha: Any, limit: Any, softcaps: Any) -> tuple[float, float]:
    """Returns the two numbers of an activation, as kernels take them."""
    if activation != "softcapped_swiglu":
        limit = 7.0 if limit is None else _number("limit", limit)
        if not limit > 0.0:
            raise ValueError(f"limit {limit}: must be above 0")
        return _number("alpha", alpha), limit
    if softcaps is None:
        return 4.0, 25.0
    if not isinstance(softcaps, (tuple, list)) or len(softcaps) != 2:
        raise TypeError(f"softcaps: must be two numbers, for gate and up, not {softcaps!r}")
    gate_cap, up_cap = (_number("softcaps", cap) for cap in softcaps)
    if not (gate_cap > 0.0 and up_cap > 0.0):
        raise ValueError(f"softcaps {gate_cap}, {up_cap}: must be above 0")
    return gate_cap, up_cap


def _number(name: str, value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name}: must be a number, not {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}: must be a number, not {value!r}") from None
    if number != number:
        raise ValueError(f"{name}: is not a number")
    return number


def check_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    activation: str,
    layout: str,
) -> None:
    """Raises an exception unless types, shapes and devices fit."""
    given = {"x": x, "gate_up": gate_up, "down": down, "expert_ids": expert_ids, "expert_weights": expert_weights}
    for name, bias in zip(("gate_up_bias", "down_bias"), biases, strict=True):
        if bias is not None:
            given[name] = bias
    check_tensors(given)
    for name, dims in (("x", 2), ("gate_up", 3), ("down", 3), ("expert_ids", 2), ("expert_weights", 2)):
        if given[name].dim() != dims:
            raise ValueError(f"{name}: must have {dims} dims, not shape {list(given[name].shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x: must be f32, bf16, f16 or f64 floats, not {x.dtype}")
    for name in ("gate_up", "down"):
        if given[name].dtype != x.dtype:
            raise TypeError(f"{name}: is {given[name].dtype}, but x is {x.dtype}; cast one of them")
    if expert_ids.is_floating_point() or expert_ids.is_complex() or expert_ids.dtype == torch.bool:
        raise TypeError(f"expert_ids: must be whole numbers, not {expert_ids.dtype}")
    for name in ("expert_weights", "gate_up_bias", "down_bias"):
        if name in given and not given[name].is_floating_point():
            raise TypeError(f"{name}: must be floats, not {given[name].dtype}")
    _check_shapes(given, ACTIVATIONS[activation], layout)


def check_tensors(given: dict[str, Any]) -> None:
    """Raises an exception unless all are dense tensors on the CPU (or have no memory, as those of a compiler)."""
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: must be a tensor, not {type(tensor).__name__}")
        if tensor.device.type not in ("cpu", "meta"):
            raise NotImplementedError(
                f"{name}: is on {tensor.device}; the operators of moeworks compute on the CPU: move tensors and modules "
                "there by .cpu()"
            )
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else tensor.layout
            raise TypeError(f"{name}: must be dense, not {kind}")
    if len({tensor.device.type for tensor in given.values()}) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        raise ValueError(f"all tensors must be on one device, not {places}")


def _check_shapes(given: dict[str, Tensor], num_inputs: int, layout: str) -> None:
    gate_up, down = given["gate_up"], given["down"]
    num_experts, width = gate_up.shape[0], given["x"].shape[1]
    first, second = (gate_up.shape[1:], down.shape[1:])
    if layout != "stacked":
        first, second = first[::-1], second[::-1]
    size = second[1]
    if num_experts == 0 or width == 0 or size == 0:
        raise ValueError(f"gate_up: has no elements, shape {list(gate_up.shape)}")
    if first[1] != width:
        raise ValueError(f"gate_up: shape {list(gate_up.shape)} does not fit x of width {width} ({layout})")
    if first[0] != num_inputs * size or second[0] != width or down.shape[0] != num_experts:
        raise ValueError(
            f"down: shape {list(down.shape)} does not fit gate_up of shape {list(gate_up.shape)} ({layout}, "
            f"{num_inputs} columns before the activation for each after it)"
        )
    ids, weights = given["expert_ids"].shape, given["expert_weights"].shape
    if ids[0] != given["x"].shape[0]:
        raise ValueError(f"expert_ids: shape {list(ids)} does not fit x with {given['x'].shape[0]} tokens")
    if ids != weights:
        raise ValueError(f"expert_weights: shape {list(weights)} must be that of expert_ids, {list(ids)}")
    if ids[1] == 0:
        raise ValueError("expert_ids: each token needs at least one expert")
    for name, columns in (("gate_up_bias", first[0]), ("down_bias", width)):
        if name in given and given[name].shape != (num_experts, columns):
            raise ValueError(f"{name}: shape {list(given[name].shape)} must be {[num_experts, columns]}")


def check_grouped(mat_a: Tensor, mat_b: Tensor, offs: Tensor) -> None:
    """Raises an exception unless types, shapes and devices of a grouped product fit."""
    check_tensors({"mat_a": mat_a, "mat_b": mat_b, "offs": offs})
    for name, tensor, dims in (("mat_a", mat_a, 2), ("mat_b", mat_b, 3), ("offs", offs, 1)):
        if tensor.dim() != dims:
            raise ValueError(f"{name}: must have {dims} dims, not shape {list(tensor.shape)}")
    if mat_a.dtype not in DTYPES or mat_a.dtype != mat_b.dtype:
        raise TypeError(f"mat_a is {mat_a.dtype} and mat_b {mat_b.dtype}: must be f32, bf16, f16 or f64 alike")
    if offs.dtype != torch.int32:
        raise TypeError(f"offs: must be int32, not {offs.dtype}")
    if mat_a.shape[1] != mat_b.shape[1] or 0 in mat_b.shape:
        raise ValueError(f"mat_b: shape {list(mat_b.shape)} does not fit mat_a of shape {list(mat_a.shape)}")
    if offs.shape[0] != mat_b.shape[0]:
        raise ValueError(f"offs: has {offs.shape[0]} groups, but mat_b {mat_b.shape[0]}")


def check_ends(ends: list[int], num_rows: int) -> None:
    """Raises an exception unless the ends of groups grow up to the number of rows."""
    before = 0
    for group, end in enumerate(ends):
        if not before <= end <= num_rows:
            raise ValueError(f"offs[{group}] is {end}: must be from {before} to the number of rows, {num_rows}")
        before = end


def check_types_of_kernels(x: Tensor, expert_ids: Tensor, expert_weights: Tensor, biases: tuple[Any, Any]) -> None:
    """Raises an exception unless the dispatcher's operator was called with types that kernels read."""
    for name, tensor, dtype in (
        ("expert_ids", expert_ids, torch.int64),
        ("expert_weights", expert_weights, torch.float32),
    ):
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: moeworks::experts takes {dtype}, not {tensor.dtype}; use moeworks.ops.experts")
    if x.dtype == torch.float64:
        raise TypeError("x: moeworks::experts takes f32, bf16 and f16; use moeworks.ops.experts for f64")
    if (biases[0] is None) != (biases[1] is None):
        raise ValueError("moeworks::experts takes both biases or none; use moeworks.ops.experts for one")
