"""Experts and grouped matrix products as differentiable operators of PyTorch, on the CPU.

The dispatcher knows them as ``torch.ops.moeworks.experts`` and ``torch.ops.moeworks.grouped_mm``; they work under
``torch.compile``, autocast and checkpointing. f32 and bf16 train; f16 computes forward. Other types, and training in
f16, take PyTorch's own products, which are slower.

T tokens, D width, F expert width, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import _kernels
from ._torch import torch

Tensor = torch.Tensor

__all__ = ["experts", "grouped_mm"]

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float | None = None,
    softcaps: tuple[float, float] | None = None,
    layout: str = "stacked",
) -> Tensor:
    """Returns ``y [T, D]``, the weighted sum of each token's experts, in the type of ``x``.

    ``y_t = sum over k of expert_weights[t, k] * (down[e] act(gate_up[e] x_t + gate_up_bias[e]) + down_bias[e])`` with
    ``e = expert_ids[t, k]``. An id outside ``0 .. E - 1`` is skipped: it adds nothing, and its weight's gradient is 0.
    Gradients flow to ``x``, ``expert_weights``, the weights and the biases; frozen ones cost nothing.

    Args:
        x: ``[T, D]``.
        gate_up: ``[E, 2 F, D]``, the gate's F rows first; ``[E, F, D]`` for an activation without gate.
        down: ``[E, D, F]``, of the type of ``gate_up``.
        expert_ids: ``[T, K]``, whole numbers, in any order and perhaps repeated.
        expert_weights: ``[T, K]``, of any float type.
        gate_up_bias: ``[E, 2 F]`` (or ``[E, F]``).
        down_bias: ``[E, D]``.
        activation: ``"swiglu"`` (``silu(gate) * up``), ``"geglu_tanh"`` (``gelu(gate) * up`` with the tanh approximation),
            ``"clamped_swiglu"`` (GPT-OSS: ``gate * sigmoid(alpha * gate) * (up + 1)`` with both clamped),
            ``"clamped_silu"`` (DeepSeek-V4: ``silu(gate) * up`` with both clamped), ``"softcapped_swiglu"`` (Inkling 2:
            ``cap(gate) * sigmoid(gate) * cap(up)`` with ``cap(x) = c * tanh(x / c)``), or without gate ``"gelu"``,
            ``"gelu_tanh"``, ``"relu"`` or ``"relu_squared"``.
        alpha: the slope of the sigmoid of ``"clamped_swiglu"``.
        limit: the limit of ``"clamped_swiglu"`` and ``"clamped_silu"``: gates are at most this, ups from its negative to
            it; ``None`` for 7.
        softcaps: the caps of gate and up of ``"softcapped_swiglu"``; ``None`` for 4 and 25.
        layout: ``"stacked"`` as above; ``"transposed"`` for ``gate_up [E, D, 2 F]`` and ``down [E, F, D]``;
            ``"interleaved"`` for these with the columns of gate and up in turn (GPT-OSS).

    Raises:
        TypeError: if something is not a tensor, or of another type.
        ValueError: if shapes do not fit, or a setting is unknown.
        NotImplementedError: if a tensor is not on the CPU.
    """
    if gate_up_bias is None and down_bias is None and layout == "stacked" and activation in _kernels.ACTIVATIONS:
        numbers = _numbers(activation, alpha, limit, softcaps)
        y = _direct(x, gate_up, down, expert_ids, expert_weights, activation, *numbers)
        if y is not None:
            return y
    if layout not in _kernels.LAYOUTS:
        raise ValueError(f"layout {layout!r}: must be one of {', '.join(_kernels.LAYOUTS)}")
    if activation not in _kernels.ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: must be one of {', '.join(_kernels.ACTIVATIONS)}")
    alpha, limit = _numbers(activation, alpha, limit, softcaps)
    if torch.is_autocast_enabled("cpu") and isinstance(x, Tensor) and x.is_floating_point():
        dtype = torch.get_autocast_dtype("cpu")
        x, gate_up, down = (_cast(tensor, dtype) for tensor in (x, gate_up, down))
        with torch.autocast("cpu", enabled=False):
            return _experts(
                x, gate_up, down, expert_ids, expert_weights, gate_up_bias, down_bias, activation, alpha, limit, layout
            )
    return _experts(
        x, gate_up, down, expert_ids, expert_weights, gate_up_bias, down_bias, activation, alpha, limit, layout
    )


def _numbers(
    activation: str, alpha: float, limit: float | None, softcaps: tuple[float, float] | None
) -> tuple[float, float]:
    """Returns the two numbers of an activation, as kernels take them."""
    if activation != "softcapped_swiglu":
        return float(alpha), 7.0 if limit is None else float(limit)
    gate_cap, up_cap = (4.0, 25.0) if softcaps is None else (float(cap) for cap in softcaps)
    if not (gate_cap > 0.0 and up_cap > 0.0):
        raise ValueError(f"softcaps {gate_cap}, {up_cap}: must be above 0")
    return gate_cap, up_cap


def _direct(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor | None:
    """Computes the most usual call, with plain tensors in order and without gradients; ``None`` for any other.

    One token takes about as long as checking all that can be wrong. What is unusual here is checked by the caller.
    """
    if torch.compiler.is_compiling():
        return None
    tensors = (x, gate_up, down, expert_weights, expert_ids)
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TYPES or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
            return None
    dtype = x.dtype
    if (
        (dtype is not torch.float32 and dtype is not torch.bfloat16)
        or gate_up.dtype is not dtype
        or down.dtype is not dtype
        or expert_weights.dtype is not torch.float32
        or expert_ids.dtype is not torch.int64
        or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        or torch.is_autocast_enabled("cpu")
        or not is_plain()
    ):
        return None
    try:
        (num_tokens, width), (num_experts, columns, depth), (stacked, height, size) = x.shape, gate_up.shape, down.shape
        num_rows, num_choices = shape = expert_ids.shape
    except ValueError:
        return None
    fits = width == depth == height and columns == _kernels.ACTIVATIONS[activation] * size and stacked == num_experts
    fits = fits and num_rows == num_tokens and expert_weights.shape == shape
    if not fits or 0 in (width, size, num_experts, num_choices):
        return None
    return _kernels.direct_forward(
        tensors, (num_experts, width, size), (num_tokens, num_choices), (activation, alpha, limit)
    )


def _experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    layout: str,
) -> Tensor:
    biases = (gate_up_bias, down_bias)
    check(x, gate_up, down, expert_ids, expert_weights, biases, activation, layout)
    if expert_ids.dtype != torch.int64:
        expert_ids = expert_ids.to(torch.int64)
    tensors = [x, gate_up, down, expert_weights, *(bias for bias in biases if bias is not None)]
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    has_kernel = x.dtype in _KERNEL_DTYPES and not (trains and x.dtype == torch.float16)
    is_direct = not trains and has_kernel and is_plain(*tensors, expert_ids)
    if layout == "interleaved" and _kernels.ACTIVATIONS[activation] == 1:
        layout = "transposed"
    if not has_kernel:
        gate = gate_of(activation, alpha, limit, layout == "interleaved")
        first, second = (gate_up.mT, down.mT) if layout == "stacked" else (gate_up, down)
        return two_products(x, expert_ids, expert_weights, first, second, gate, biases)
    weights = expert_weights if expert_weights.dtype == torch.float32 else expert_weights.float()
    first_bias, second_bias = _both(gate_up, down, biases, layout)
    if layout == "interleaved" and first_bias is not None:
        first_bias = torch.cat((first_bias[:, ::2], first_bias[:, 1::2]), 1)
    settings = (activation, alpha, limit, layout)
    if is_direct:
        return _kernels.experts_forward(
            x, gate_up, down, expert_ids, weights, first_bias, second_bias, *settings, False
        )[0]
    return torch.ops.moeworks.experts(
        x, gate_up, down, expert_ids, weights, first_bias, second_bias, *settings, trains
    )[0]


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_float else tensor


def _both(
    gate_up: Tensor, down: Tensor, biases: tuple[Tensor | None, Tensor | None], layout: str
) -> tuple[Tensor | None, Tensor | None]:
    """Returns both biases if there is one: the kernels take none or two."""
    first, second = biases
    if first is None and second is None:
        return None, None
    rows = 1 if layout == "stacked" else 2
    if first is None:
        first = gate_up.new_zeros(gate_up.shape[0], gate_up.shape[rows])
    if second is None:
        second = down.new_zeros(down.shape[0], down.shape[rows])
    return first, second


def is_plain(*tensors: Tensor) -> bool:
    """Returns whether nothing but the kernel has to see a call: no compiler, mode or transform, and plain tensors."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(type(tensor) in _PLAIN_TYPES and tensor.device.type == "cpu" for tensor in tensors)
    )


def check(
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
    if not x.is_floating_point():
        raise TypeError(f"x: must be floats, not {x.dtype}")
    for name in ("gate_up", "down"):
        if given[name].dtype != x.dtype:
            raise TypeError(f"{name}: is {given[name].dtype}, but x is {x.dtype}; cast one of them")
    if expert_ids.is_floating_point() or expert_ids.is_complex() or expert_ids.dtype == torch.bool:
        raise TypeError(f"expert_ids: must be whole numbers, not {expert_ids.dtype}")
    for name in ("expert_weights", "gate_up_bias", "down_bias"):
        if name in given and not given[name].is_floating_point():
            raise TypeError(f"{name}: must be floats, not {given[name].dtype}")
    _check_shapes(given, _kernels.ACTIVATIONS[activation], layout)


def check_tensors(given: dict[str, Any]) -> None:
    """Raises an exception unless all are dense tensors on the CPU (or have no memory, as those of a compiler)."""
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: must be a tensor, not {type(tensor).__name__}")
        if tensor.device.type not in ("cpu", "meta"):
            raise NotImplementedError(f"{name}: is on {tensor.device}; moeworks.ops computes on the CPU")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}: must be dense, not {tensor.layout}")
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


def grouped_mm(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor) -> Tensor:
    """Multiplies groups of consecutive rows, each by a matrix of its own; ``[M, N]``, differentiable.

    The signature is that of ``torch.nn.functional.grouped_mm``. Group g has the rows ``offs[g - 1] .. offs[g]`` of
    ``mat_a``. Rows after the last group give zeros, and get zeros as gradients.

    Args:
        mat_a: ``[M, K]``.
        mat_b: ``[G, K, N]``, with any strides; those of a transposed tensor need no copy.
        offs: ``[G]``, int32: the ends of the groups, from small to large.

    Raises:
        TypeError: if something is not a tensor, or of another type.
        ValueError: if shapes do not fit, or ``offs`` does not grow.
        NotImplementedError: if a tensor is not on the CPU.
    """
    given = {"mat_a": mat_a, "mat_b": mat_b, "offs": offs}
    check_tensors(given)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        mat_a, mat_b = _cast(mat_a, dtype), _cast(mat_b, dtype)
    for name, tensor, dims in (("mat_a", mat_a, 2), ("mat_b", mat_b, 3), ("offs", offs, 1)):
        if tensor.dim() != dims:
            raise ValueError(f"{name}: must have {dims} dims, not shape {list(tensor.shape)}")
    if not mat_a.is_floating_point() or mat_a.dtype != mat_b.dtype:
        raise TypeError(f"mat_a is {mat_a.dtype} and mat_b {mat_b.dtype}: must be floats of one type")
    if offs.dtype != torch.int32:
        raise TypeError(f"offs: must be int32, not {offs.dtype}")
    if mat_a.shape[1] != mat_b.shape[1] or 0 in mat_b.shape:
        raise ValueError(f"mat_b: shape {list(mat_b.shape)} does not fit mat_a of shape {list(mat_a.shape)}")
    if offs.shape[0] != mat_b.shape[0]:
        raise ValueError(f"offs: has {offs.shape[0]} groups, but mat_b {mat_b.shape[0]}")
    trains = torch.is_grad_enabled() and (mat_a.requires_grad or mat_b.requires_grad)
    if mat_a.dtype not in (torch.float32, torch.bfloat16):
        return _plain_grouped(mat_a, mat_b, offs)
    if not trains and is_plain(mat_a, mat_b, offs):
        return _kernels.grouped_forward(mat_a, mat_b, offs)
    return torch.ops.moeworks.grouped_mm(mat_a, mat_b, offs)


def _plain_grouped(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Computes :func:`grouped_mm` by PyTorch, for types that the kernels do not have."""
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    parts = [a[start:end] @ matrix for start, end, matrix in zip(starts, ends, b, strict=True)]
    return torch.cat([*parts, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])


def gate_of(activation: str, alpha: float, limit: float, is_interleaved: bool) -> Callable[[Tensor], Tensor]:
    """Returns an activation as a function of ``h [M, A F]``, in PyTorch. Its two numbers are those of the kernels."""
    functional = torch.nn.functional

    def gated(h: Tensor) -> Tensor:
        gate, up = (h[:, ::2], h[:, 1::2]) if is_interleaved else h.chunk(2, -1)
        if activation == "swiglu":
            return functional.silu(gate) * up
        if activation == "geglu_tanh":
            return functional.gelu(gate, approximate="tanh") * up
        if activation == "softcapped_swiglu":
            return alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * (limit * torch.tanh(up / limit))
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if activation == "clamped_silu":
            return functional.silu(gate) * up
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    plain = {
        "gelu": functional.gelu,
        "gelu_tanh": lambda h: functional.gelu(h, approximate="tanh"),
        "relu": functional.relu,
        "relu_squared": lambda h: functional.relu(h).square(),
    }
    return plain.get(activation, gated)


class LowRank(NamedTuple):
    """A low-rank addition to a stack of matrices ``[E, K, N]``: ``scaling * left right``.

    Attributes:
        left: ``[E, K, r]``.
        right: ``[E, r, N]``.
        scaling: a factor.
    """

    left: Tensor
    right: Tensor
    scaling: float


def _adapted(rows: Tensor, stack: Tensor, added: LowRank | None, ends: Tensor) -> Tensor:
    """Multiplies groups of rows by a stack and its low-rank addition, without making their sum."""
    y = grouped_mm(rows, stack, offs=ends)
    if added is None:
        return y
    narrow = grouped_mm(rows, added.left, offs=ends) * added.scaling
    return y + grouped_mm(narrow, added.right, offs=ends)


def two_products(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    first: Tensor,
    second: Tensor,
    gate: Callable[[Tensor], Tensor],
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    after: Callable[[Tensor], Tensor] | None = None,
    low_rank: tuple[LowRank | None, LowRank | None] = (None, None),
) -> Tensor:
    """Computes experts by two grouped products with any function between them.

    Args:
        x: ``[T, D]``.
        expert_ids: ``[T, K]``.
        expert_weights: ``[T, K]``.
        first: ``[E, D, A F]``, with any strides.
        second: ``[E, F, D]``, with any strides.
        gate: the activation, ``[M, A F]`` to ``[M, F]``.
        biases: those of both products.
        after: a function of the second product's rows, such as a norm.
        low_rank: what is added to ``first`` and ``second``, as factors.
    """
    num_tokens, num_choices = expert_ids.shape
    num_experts = first.shape[0]
    flat = expert_ids.reshape(-1)
    flat = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    order = torch.argsort(flat, stable=True)
    groups = flat[order]
    every = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    ends = torch.searchsorted(groups, every, right=True).to(torch.int32)
    is_skipped = (groups == num_experts).unsqueeze(1)
    groups = groups.clamp(max=num_experts - 1)
    h = _adapted(x[order // num_choices], first, low_rank[0], ends)
    if biases[0] is not None:
        h = h + biases[0].to(h.dtype)[groups]
    out = _adapted(gate(h).to(x.dtype), second, low_rank[1], ends)
    if biases[1] is not None:
        out = out + biases[1].to(out.dtype)[groups]
    if after is not None:
        out = after(out)
    weights = expert_weights.reshape(-1)[order].unsqueeze(1)
    # Filled and not multiplied by 0, which keeps what is not a number.
    out = out.masked_fill(is_skipped, 0) * weights.masked_fill(is_skipped, 0)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return out[back].view(num_tokens, num_choices, out.shape[-1]).sum(1).to(x.dtype)
