"""The dispatcher's operators: implementations, shapes without values (fake), and backward passes.

T tokens, D width, F expert width, E experts, K experts a token, A F columns before the activation, M rows.
"""

from __future__ import annotations

from typing import Any

from . import _native, _threads
from ._checks import ACTIVATIONS, check_experts, check_grouped, check_settings, check_types_of_kernels
from ._torch import torch

Tensor = torch.Tensor

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_tensor_of = torch._C._from_dlpack

# PyTorch's table of C functions for tensors, if this version has it.
EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)

_LIBRARY = torch.library.Library("moeworks", "DEF")
_LIBRARY.define(
    "experts(Tensor x, Tensor gate_up, Tensor down, Tensor expert_ids, Tensor expert_weights, Tensor? gate_up_bias, "
    "Tensor? down_bias, str activation, float alpha, float limit, str layout, bool save) -> (Tensor y, Tensor h)"
)
_LIBRARY.define(
    "experts_backward(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor expert_ids, Tensor expert_weights, "
    "Tensor h, Tensor? gate_up_bias, Tensor? down_bias, str activation, float alpha, float limit, str layout, "
    "bool needs_stacks, bool needs_biases) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define("grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor")
_LIBRARY.define(
    "grouped_mm_backward(Tensor dy, Tensor a, Tensor b, Tensor offs, bool needs_a, bool needs_b) -> (Tensor, Tensor)"
)


def threads() -> int:
    """Returns the number of threads of a computation."""
    return _threads.chosen() or torch.get_num_threads()


def ready(x: Tensor) -> Tensor:
    """Returns a tensor whose elements are consecutive and aligned, ``x`` itself if it is one."""
    if not x.is_contiguous() or x.is_neg():
        x = x.resolve_neg().contiguous()
    return x.clone() if x.data_ptr() % x.element_size() else x


def _ready_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else ready(bias.to(torch.float32))


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _plan(gate_up: Tensor, activation: str, alpha: float, limit: float, layout: str) -> tuple[Any, ...]:
    size = _columns(gate_up, layout) // ACTIVATIONS[activation]
    width = gate_up.shape[2 if layout == "stacked" else 1]
    return (gate_up.shape[0], width, size, _NAMES[gate_up.dtype], activation, alpha, limit, layout)


def _columns(gate_up: Tensor, layout: str) -> int:
    """Returns A F."""
    return gate_up.shape[1 if layout == "stacked" else 2]


def experts_forward(
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
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Computes experts on the CPU. Weights in f16 multiply inputs in f32."""
    dtype = x.dtype
    is_half = dtype == torch.float16
    x = ready(x.float() if is_half else x)
    gate_up, down, expert_ids = ready(gate_up), ready(down), ready(expert_ids)
    expert_weights = ready(expert_weights)
    gate_up_bias, down_bias = _ready_bias(gate_up_bias), _ready_bias(down_bias)
    y, h = _native.experts_forward(
        _plan(gate_up, activation, alpha, limit, layout),
        (*expert_ids.shape, save, threads()),
        (
            x.data_ptr(),
            expert_ids.data_ptr(),
            expert_weights.data_ptr(),
            gate_up.data_ptr(),
            down.data_ptr(),
            _address(gate_up_bias),
            _address(down_bias),
        ),
    )
    y = _tensor_of(y)
    return y.to(dtype) if is_half else y, x.new_empty(0) if h is None else _tensor_of(h)


def direct_forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor | None:
    """Computes stacked experts without biases and gradients; ``None`` unless types, shapes and memory are usual.

    All must be plain tensors of PyTorch.
    """
    y = _native.experts_direct(
        EXCHANGE,
        x,
        gate_up,
        down,
        expert_ids,
        expert_weights,
        activation,
        alpha,
        limit,
        threads(),
    )
    return None if y is None else _tensor_of(y)


def _checked_experts(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Computes experts for the dispatcher, whose callers nobody has checked."""
    _check_dispatched(*inputs[:8], layout=inputs[10])
    return experts_forward(*inputs)


def _check_dispatched(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    layout: str,
) -> None:
    biases = gate_up_bias, down_bias
    check_settings(activation, layout)
    check_experts(x, gate_up, down, expert_ids, expert_weights, biases, activation, layout)
    check_types_of_kernels(x, expert_ids, expert_weights, biases)


def _experts_backward(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    h: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    layout: str,
    needs_stacks: bool,
    needs_biases: bool,
) -> tuple[Tensor, ...]:
    dy, x, gate_up, down, h = ready(dy.to(x.dtype)), ready(x), ready(gate_up), ready(down), ready(h)
    expert_ids, expert_weights = ready(expert_ids), ready(expert_weights)
    biases = _ready_bias(gate_up_bias), _ready_bias(down_bias)
    grads = _native.experts_backward(
        _plan(gate_up, activation, alpha, limit, layout),
        (*expert_ids.shape, True, threads()),
        (
            dy.data_ptr(),
            x.data_ptr(),
            expert_ids.data_ptr(),
            expert_weights.data_ptr(),
            gate_up.data_ptr(),
            down.data_ptr(),
            h.data_ptr(),
            _address(biases[0]),
            _address(biases[1]),
        ),
        (needs_stacks, needs_biases),
    )
    return tuple(x.new_empty(0) if grad is None else _tensor_of(grad) for grad in grads)


def _checked_backward(*inputs: Any) -> tuple[Tensor, ...]:
    """Computes the gradients of experts for the dispatcher, whose callers nobody has checked."""
    dy, x, gate_up, _, expert_ids, _, h, gate_up_bias, _, activation, _, _, layout, _, needs_biases = inputs
    _check_dispatched(*inputs[1:6], *inputs[7:9], activation, layout)
    if x.dtype == torch.float16:
        raise TypeError("x: moeworks::experts_backward takes f32 and bf16, not torch.float16")
    rows = (expert_ids.numel(), _columns(gate_up, layout))
    for name, tensor, shape in (("dy", dy, x.shape), ("h", h, rows)):
        if tensor.shape != shape:
            raise ValueError(f"{name}: shape {list(tensor.shape)} must be {list(shape)}")
    if h.dtype != x.dtype or not dy.is_floating_point():
        raise TypeError(f"h is {h.dtype} and dy {dy.dtype}: must be floats, and h {x.dtype}")
    if needs_biases and gate_up_bias is None:
        raise ValueError("needs_biases: there are no biases")
    return _experts_backward(*inputs)


def _experts_fake(
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
    save: bool,
) -> tuple[Tensor, Tensor]:
    rows = expert_ids.shape[0] * expert_ids.shape[1]
    h = x.new_empty((rows, _columns(gate_up, layout)), dtype=gate_up.dtype) if save else x.new_empty(0)
    return x.new_empty(x.shape), h


def _experts_backward_fake(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    h: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    layout: str,
    needs_stacks: bool,
    needs_biases: bool,
) -> tuple[Tensor, ...]:
    def grad(wanted: bool, shape: Any, dtype: torch.dtype) -> Tensor:
        return x.new_empty(shape if wanted else 0, dtype=dtype if wanted else x.dtype)

    return (
        x.new_empty(x.shape),
        x.new_empty(expert_weights.shape, dtype=torch.float32),
        grad(needs_stacks, gate_up.shape, gate_up.dtype),
        grad(needs_stacks, down.shape, down.dtype),
        grad(needs_biases, (gate_up.shape[0], _columns(gate_up, layout)), torch.float32),
        grad(needs_biases, (gate_up.shape[0], x.shape[1]), torch.float32),
    )


def _experts_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gate_up, down, expert_ids, expert_weights, gate_up_bias, down_bias, *numbers, save = inputs
    h = output[1]
    ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)
    ctx.numbers, ctx.is_saved = numbers, save
    ctx.save_for_backward(x, gate_up, down, expert_ids, expert_weights, h, gate_up_bias, down_bias)


def _experts_autograd(ctx: Any, dy: Tensor | None, _dh: Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 12
    if not ctx.is_saved:
        raise RuntimeError("moeworks::experts was called with save=False: it has no backward pass")
    return *_gradients(ctx, dy, torch.ops.moeworks.experts_backward), None


def _gradients(ctx: Any, dy: Tensor, backward: Any) -> tuple[Any, ...]:
    """Returns a gradient for each input but the last, by a function that computes those of the tensors."""
    needs = ctx.needs_input_grad
    *tensors, gate_up_bias, down_bias = ctx.saved_tensors
    grads = backward(dy, *tensors, gate_up_bias, down_bias, *ctx.numbers, needs[1] or needs[2], needs[5] or needs[6])
    dx, d_weights, d_gate_up, d_down, d_first, d_second = grads
    first = d_first.to(gate_up_bias.dtype) if needs[5] else None
    second = d_second.to(down_bias.dtype) if needs[6] else None
    return (
        dx if needs[0] else None,
        d_gate_up if needs[1] else None,
        d_down if needs[2] else None,
        None,
        d_weights if needs[4] else None,
        first,
        second,
        None,
        None,
        None,
        None,
    )


class PlainExperts(torch.autograd.Function):
    """Experts with gradients on plain tensors, without the dispatcher, which takes most of the time of a small call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, gate_up, down, expert_ids, expert_weights, gate_up_bias, down_bias, *numbers = inputs
        y, h = experts_forward(*inputs, True)
        ctx.set_materialize_grads(False)
        ctx.numbers = numbers
        ctx.save_for_backward(x, gate_up, down, expert_ids, expert_weights, h, gate_up_bias, down_bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 11
        # With gradients of gradients the operator says that there are none; a compiler sees the operator.
        is_plain = type(dy) is Tensor and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        is_plain = is_plain and torch._C._len_torch_dispatch_stack() == 0
        return _gradients(ctx, dy, _experts_backward if is_plain else torch.ops.moeworks.experts_backward)


def _no_second(name: str) -> Any:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"moeworks::{name} has no second derivative")

    return backward


def _is_transposed(b: Tensor) -> bool:
    return not b.is_contiguous() and b.mT.is_contiguous()


def _grouped(form: str, a: Tensor, b: Tensor, ends: Tensor, k: int, n: int) -> Tensor:
    a, b, ends = ready(a), ready(b), ready(ends)
    sizes = (form, _NAMES[a.dtype], a.shape[0], k, n, ends.shape[0], threads())
    return _tensor_of(_native.grouped(sizes, (a.data_ptr(), b.data_ptr(), ends.data_ptr())))


def grouped_forward(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Multiplies groups of rows of ``a [M, K]`` by ``b [G, K, N]``; ``[M, N]``. The strides of ``b`` may be those of a
    transposed tensor."""
    _, k, n = b.shape
    return _grouped("nt", a, b.mT, offs, k, n) if _is_transposed(b) else _grouped("nn", a, b, offs, k, n)


def _checked_grouped(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Multiplies groups for the dispatcher, whose callers nobody has checked."""
    _check_dispatched_grouped(a, b, offs)
    return grouped_forward(a, b, offs)


def _check_dispatched_grouped(a: Tensor, b: Tensor, offs: Tensor) -> None:
    check_grouped(a, b, offs)
    if a.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"moeworks::grouped_mm takes f32 and bf16, not {a.dtype}; use moeworks.ops.grouped_mm")


def _checked_grouped_backward(
    dy: Tensor, a: Tensor, b: Tensor, offs: Tensor, needs_a: bool, needs_b: bool
) -> tuple[Tensor, Tensor]:
    """Computes gradients of a grouped product for the dispatcher, whose callers nobody has checked."""
    _check_dispatched_grouped(a, b, offs)
    if dy.dtype != a.dtype or dy.shape != (a.shape[0], b.shape[2]):
        raise ValueError(f"dy: is {dy.dtype} {list(dy.shape)}, must be {a.dtype} {[a.shape[0], b.shape[2]]}")
    return _grouped_backward(dy, a, b, offs, needs_a, needs_b)


def _grouped_backward(
    dy: Tensor, a: Tensor, b: Tensor, offs: Tensor, needs_a: bool, needs_b: bool
) -> tuple[Tensor, Tensor]:
    _, k, n = b.shape
    da, db = a.new_empty(0), a.new_empty(0)
    is_transposed = _is_transposed(b)
    if needs_a:
        da = _grouped("nn", dy, b.mT, offs, n, k) if is_transposed else _grouped("nt", dy, b, offs, n, k)
    if needs_b:
        db = _grouped("tn", dy, a, offs, n, k).mT if is_transposed else _grouped("tn", a, dy, offs, k, n)
    return da, db


def _grouped_backward_fake(
    dy: Tensor, a: Tensor, b: Tensor, offs: Tensor, needs_a: bool, needs_b: bool
) -> tuple[Tensor, Tensor]:
    groups, k, n = b.shape
    db = a.new_empty(groups, n, k).mT if _is_transposed(b) else a.new_empty(groups, k, n)
    return a.new_empty(a.shape if needs_a else 0), db if needs_b else a.new_empty(0)


def _grouped_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _grouped_autograd(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None
    needs_a, needs_b, _ = ctx.needs_input_grad
    a, b, offs = ctx.saved_tensors
    da, db = torch.ops.moeworks.grouped_mm_backward(dy.to(a.dtype), a, b, offs, needs_a, needs_b)
    return da if needs_a else None, db if needs_b else None, None


_LIBRARY.impl("experts", _checked_experts, "CPU")
_LIBRARY.impl("experts_backward", _checked_backward, "CPU")
_LIBRARY.impl("grouped_mm", _checked_grouped, "CPU")
_LIBRARY.impl("grouped_mm_backward", _checked_grouped_backward, "CPU")

torch.library.register_fake("moeworks::experts", _experts_fake, lib=_LIBRARY)
torch.library.register_fake("moeworks::experts_backward", _experts_backward_fake, lib=_LIBRARY)
torch.library.register_fake(
    "moeworks::grouped_mm", lambda a, b, offs: a.new_empty(a.shape[0], b.shape[2]), lib=_LIBRARY
)
torch.library.register_fake("moeworks::grouped_mm_backward", _grouped_backward_fake, lib=_LIBRARY)

torch.library.register_autograd(
    "moeworks::experts", _experts_autograd, setup_context=_experts_setup, lib=_LIBRARY
)
torch.library.register_autograd(
    "moeworks::grouped_mm", _grouped_autograd, setup_context=_grouped_setup, lib=_LIBRARY
)
torch.library.register_autograd("moeworks::experts_backward", _no_second("experts_backward"), lib=_LIBRARY)
torch.library.register_autograd("moeworks::grouped_mm_backward", _no_second("grouped_mm_backward"), lib=_LIBRARY)
