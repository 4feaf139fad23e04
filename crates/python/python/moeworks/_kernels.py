"""The dispatcher's operators: implementations, shapes without values (fake), and backward passes.

T tokens, D width, F expert width, E experts, K experts a token, A F columns before the activation, M rows.
"""

from __future__ import annotations

from typing import Any

from . import _native, _threads
from ._torch import torch

Tensor = torch.Tensor

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_tensor_of = torch._C._from_dlpack

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
    tensors: tuple[Tensor, ...],
    sizes: tuple[int, int, int],
    call: tuple[int, int],
    settings: tuple[str, float, float],
) -> Tensor | None:
    """Computes stacked experts without biases; ``None`` if the memory of a tensor is not aligned.

    Args:
        tensors: x, gate_up, down, weights and ids, in order and checked.
        sizes: E, D and F.
        call: T and K.
        settings: the activation with its numbers.
    """
    x, gate_up, down, weights, ids = (tensor.data_ptr() for tensor in tensors)
    if (x | gate_up | down | weights) & 3 or ids & 7:
        return None
    plan = (*sizes, _NAMES[tensors[0].dtype], *settings, "stacked")
    memory = (x, ids, weights, gate_up, down, 0, 0)
    return _tensor_of(_native.experts_forward(plan, (*call, False, threads()), memory)[0])


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
    needs = ctx.needs_input_grad
    *tensors, gate_up_bias, down_bias = ctx.saved_tensors
    grads = torch.ops.moeworks.experts_backward(
        dy, *tensors, gate_up_bias, down_bias, *ctx.numbers, needs[1] or needs[2], needs[5] or needs[6]
    )
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
        None,
    )


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


_LIBRARY.impl("experts", experts_forward, "CPU")
_LIBRARY.impl("experts_backward", _experts_backward, "CPU")
_LIBRARY.impl("grouped_mm", grouped_forward, "CPU")
_LIBRARY.impl("grouped_mm_backward", _grouped_backward, "CPU")

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
