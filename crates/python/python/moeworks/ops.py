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
from ._checks import (
    ACTIVATIONS,
    activation_numbers,
    check_ends,
    check_experts,
    check_grouped,
    check_settings,
    check_tensors,
)
from ._torch import torch

forward_ad = torch.autograd.forward_ad
Tensor = torch.Tensor

__all__ = ["experts", "grouped_mm"]

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
# Those whose two numbers have defaults; a tuple, in which everything can be looked for.
_DIRECT_ACTIVATIONS = tuple(name for name in ACTIVATIONS if name != "softcapped_swiglu")


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
    if gate_up_bias is None and down_bias is None and layout == "stacked" and softcaps is None:
        numbers = (alpha, 7.0 if limit is None else limit)
        y = _direct(x, gate_up, down, expert_ids, expert_weights, activation, *numbers)
        if y is not None:
            return y
    check_settings(activation, layout)
    alpha, limit = activation_numbers(activation, alpha, limit, softcaps)
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


def _direct(
    x: Any,
    gate_up: Any,
    down: Any,
    expert_ids: Any,
    expert_weights: Any,
    activation: Any,
    alpha: Any,
    limit: Any,
) -> Tensor | None:
    """Computes the most usual call, with plain tensors in order and without gradients; ``None`` for any other.

    One token takes about as long as checking all that can be wrong. What is unusual here is checked by the caller.
    """
    if not is_plain() or torch.is_autocast_enabled("cpu") or _kernels.EXCHANGE is None:
        return None
    has_grad = torch.is_grad_enabled()
    for tensor in (x, gate_up, down, expert_ids, expert_weights):
        if type(tensor) not in _PLAIN_TYPES or (has_grad and tensor.requires_grad) or tensor.is_neg():
            return None
    if activation not in _DIRECT_ACTIVATIONS or not (type(alpha) is type(limit) is float and alpha > 0.0 < limit):
        return None
    return _kernels.direct_forward(x, gate_up, down, expert_ids, expert_weights, activation, alpha, limit)


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
    check_experts(x, gate_up, down, expert_ids, expert_weights, biases, activation, layout)
    _check_tangents(x, gate_up, down, expert_weights, *biases)
    if expert_ids.dtype != torch.int64:
        expert_ids = expert_ids.to(torch.int64)
    tensors = [x, gate_up, down, expert_weights, *(bias for bias in biases if bias is not None)]
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    has_kernel = x.dtype in _KERNEL_DTYPES and not (trains and x.dtype == torch.float16)
    if layout == "interleaved" and ACTIVATIONS[activation] == 1:
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
    inputs = (x, gate_up, down, expert_ids, weights, first_bias, second_bias, *settings)
    if not is_plain(*tensors, expert_ids):
        return torch.ops.moeworks.experts(*inputs, trains)[0]
    return _kernels.PlainExperts.apply(*inputs) if trains else _kernels.experts_forward(*inputs, False)[0]


def _check_tangents(*tensors: Tensor | None) -> None:
    """Raises an exception if a tensor has a tangent, which kernels would lose."""
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        for tensor in tensors:
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError("the operators of moeworks have no forward-mode derivatives: use backward ones")


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
        and forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(type(tensor) in _PLAIN_TYPES and tensor.device.type == "cpu" for tensor in tensors)
    )


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
    check_tensors({"mat_a": mat_a, "mat_b": mat_b, "offs": offs})
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        mat_a, mat_b = _cast(mat_a, dtype), _cast(mat_b, dtype)
    check_grouped(mat_a, mat_b, offs)
    _check_tangents(mat_a, mat_b)
    if mat_a.dtype not in (torch.float32, torch.bfloat16):
        return _plain_grouped(mat_a, mat_b, offs)
    trains = torch.is_grad_enabled() and (mat_a.requires_grad or mat_b.requires_grad)
    if not trains and is_plain(mat_a, mat_b, offs):
        return _kernels.grouped_forward(mat_a, mat_b, offs)
    return torch.ops.moeworks.grouped_mm(mat_a, mat_b, offs)


def _plain_grouped(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Computes :func:`grouped_mm` by PyTorch, for types that the kernels do not have."""
    ends = offs.tolist()
    check_ends(ends, a.shape[0])
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
