"""Makes ``experts_implementation="moeworks"`` known to transformers, 5.7 or newer.

>>> import moeworks.transformers
>>> model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moeworks")

or, for a model that is loaded, ``model.set_experts_implementation("moeworks")``. Parameters and files stay as they are.

Experts whose activation the kernels have are computed by them, in any layout. The others take two grouped products with
the module's own activation between them, with one warning for each class. A LoRA adapter of
PEFT (``target_parameters``) is computed from its factors, without the sum of it and the weight.
"""

from __future__ import annotations

import warnings
from typing import Any

from . import ops
from ._torch import numbers, torch

try:
    import transformers as _transformers
except ImportError as _error:
    raise ImportError(
        "moeworks.transformers needs transformers 5.7 or newer: pip install 'transformers>=5.7'"
    ) from _error

if numbers(_transformers.__version__) < (5, 7):
    raise ImportError(
        f"moeworks.transformers needs transformers 5.7 or newer, and {_transformers.__version__} is installed: "
        "pip install --upgrade 'transformers>=5.7'"
    )

from transformers.integrations import finegrained_fp8 as _fp8  # noqa: E402
from transformers.integrations import moe as _moe  # noqa: E402

Tensor = torch.Tensor

__all__ = ["enable", "experts_forward", "fused_settings", "register"]

NAME = "moeworks"


def register() -> None:
    """Registers the implementation. Importing the module does so, too; a second time changes nothing."""
    # The validator takes the names of both registries together, so that one alone would fail only at the first pass.
    _moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    registry = getattr(_fp8, "ALL_FP8_EXPERTS_FUNCTIONS", None)
    if registry is not None:
        registry.register(NAME, fp8_experts_forward)


def enable(model: torch.nn.Module) -> torch.nn.Module:
    """Makes a loaded model use the implementation, and returns it.

    Raises:
        TypeError: if it is not a model of transformers.
    """
    if not hasattr(model, "set_experts_implementation"):
        raise TypeError(f"model: must be a model of transformers, not {type(model).__name__}")
    model.set_experts_implementation(NAME)
    return model


def fused_settings(experts: torch.nn.Module) -> dict[str, Any] | None:
    """Returns the activation settings by which :func:`moeworks.ops.experts` computes a module of experts.

    ``None`` if no kernel has its activation: it then takes two grouped products. The module's flags and its activation
    decide, not the model's name.
    """
    flags = {name: getattr(experts, name, usual) for name, usual in _FLAGS.items()}
    if flags["has_post_expert_norm"]:
        return None
    layout = _layout(flags)
    if not flags["has_gate"]:
        activation = _ungated(getattr(experts, "act_fn", None))
        return None if activation is None or layout != "stacked" else {"activation": activation}
    gate = getattr(experts, "_apply_gate", None)
    if layout is not None and getattr(gate, "__func__", None) is _moe._default_apply_gate:
        activation = _gated(getattr(experts, "act_fn", None))
        return None if activation is None else {"activation": activation, "layout": layout}
    return None if gate is None else _probed(experts, gate, layout)


_FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}


def _layout(flags: dict[str, bool]) -> str | None:
    """Returns the layout by the name of :func:`moeworks.ops.experts`; ``None`` for one that it does not have."""
    if flags["is_transposed"]:
        return "transposed" if flags["is_concatenated"] else "interleaved"
    return "stacked" if flags["is_concatenated"] else None


def _gated(act: Any) -> str | None:
    functional = torch.nn.functional
    if act is functional.silu or type(act) is torch.nn.SiLU or type(act).__name__ == "SiLUActivation":
        return "swiglu"
    return "geglu_tanh" if _ungated(act) == "gelu_tanh" else None


def _ungated(act: Any) -> str | None:
    functional = torch.nn.functional
    if act is functional.relu or type(act) is torch.nn.ReLU:
        return "relu"
    if act is functional.gelu or type(act).__name__ == "GELUActivation":
        return "gelu"
    if isinstance(act, torch.nn.GELU):
        return "gelu" if act.approximate == "none" else "gelu_tanh"
    names = {"PytorchGELUTanh": "gelu_tanh", "GELUTanh": "gelu_tanh", "ReLUSquaredActivation": "relu_squared"}
    return names.get(type(act).__name__)


_PROBES: dict[Any, dict[str, Any] | None] = {}


def _probed(experts: torch.nn.Module, gate: Any, layout: str | None) -> dict[str, Any] | None:
    """Returns the settings of a gate of the module's own by its values at many points."""
    numbers = tuple((name, value) for name, value in vars(experts).items() if isinstance(value, int | float))
    numbers += _softcaps(experts) or ()
    key = (type(experts), getattr(gate, "__func__", gate), numbers, type(getattr(experts, "act_fn", None)))
    if key not in _PROBES:
        if torch.compiler.is_compiling():
            return None
        _PROBES[key] = _probe(experts, gate, layout)
    return _PROBES[key]


def _softcaps(experts: torch.nn.Module) -> tuple[float, float] | None:
    """Returns the caps of gate and up, if the module's activation has some."""
    act = getattr(experts, "act_fn", None)
    caps = [getattr(getattr(act, name, None), "softcap", None) for name in ("gate_softcap", "up_softcap")]
    return tuple(map(float, caps)) if all(isinstance(cap, int | float) and cap > 0 for cap in caps) else None


def _probe(experts: torch.nn.Module, gate: Any, layout: str | None) -> dict[str, Any] | None:
    if layout is None:
        return None
    columns = experts.gate_up_proj.shape[1 if layout == "stacked" else 2]
    generator = torch.Generator().manual_seed(0)
    # Small values, and values around and beyond limits.
    scales = torch.tensor([[0.1], [1.0], [4.0], [30.0]])
    h = torch.randn(4, columns, generator=generator) * scales
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            found = gate(h)
        except Exception:  # A gate with other needs has no kernel.
            return None
        alphas = [getattr(experts, name, None) for name in ("alpha", "swiglu_alpha")]
        limits = [getattr(experts, name, None) for name in ("limit", "swiglu_limit")]
        alpha, limit = (next((value for value in values if isinstance(value, int | float)), None) for values in (alphas, limits))
        candidates: list[dict[str, Any]] = [{"activation": "swiglu"}]
        if limit is not None:
            candidates.append({"activation": "clamped_silu", "limit": float(limit)})
        if alpha is not None and limit is not None:
            candidates.append({"activation": "clamped_swiglu", "alpha": float(alpha), "limit": float(limit)})
        if (softcaps := _softcaps(experts)) is not None:
            candidates.append({"activation": "softcapped_swiglu", "softcaps": softcaps})
        for candidate in candidates:
            first, second = candidate.get("softcaps", (candidate.get("alpha", 1.702), candidate.get("limit", 7.0)))
            wanted = ops.gate_of(candidate["activation"], first, second, layout == "interleaved")(h)
            if isinstance(found, Tensor) and found.shape == wanted.shape and torch.allclose(found, wanted, 1e-5, 1e-6):
                return {**candidate, "layout": layout}
    return None


def experts_forward(
    self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Computes a module of experts of transformers; the function that is registered.

    Args:
        self: the module.
        hidden_states: ``[T, D]``.
        top_k_index: ``[T, K]``; ids of ``num_experts`` and above are skipped, as expert parallelism marks those of others.
        top_k_weights: ``[T, K]``.
    """
    has_gate, has_bias = getattr(self, "has_gate", True), getattr(self, "has_bias", False)
    names = ("gate_up_proj" if has_gate else "up_proj", "down_proj")
    adapters = [_adapter(self, name) for name in names]
    biases = tuple(getattr(self, f"{name}_bias") if has_bias else None for name in names)
    settings = None if any(adapters) else fused_settings(self)
    if settings is not None:
        first, second = (getattr(self, name) for name in names)
        return ops.experts(
            hidden_states,
            first,
            second,
            top_k_index,
            top_k_weights,
            gate_up_bias=biases[0],
            down_bias=biases[1],
            **settings,
        )
    if not any(adapters):
        _warn(type(self))
    stacks, factors = [], []
    for name, adapter in zip(names, adapters, strict=True):
        stack = getattr(self, name) if adapter is None else adapter.original
        left, right = (None, None) if adapter is None else (adapter[0].lhs, adapter[0].rhs)
        if not getattr(self, "is_transposed", False):
            stack = stack.mT
            left, right = (None, None) if adapter is None else (right.mT, left.mT)
        stacks.append(stack)
        factors.append(None if adapter is None else ops.LowRank(left, right, adapter[0].scaling))
    gate = self._apply_gate if has_gate else self.act_fn
    after = self.post_expert_norm if getattr(self, "has_post_expert_norm", False) else None
    return ops.two_products(
        hidden_states, top_k_index, top_k_weights, *stacks, gate, biases, after, tuple(factors)
    )


def _adapter(experts: torch.nn.Module, name: str) -> Any:
    """Returns PEFT's only adapter of a parameter, as a list with its factors, and the frozen ``original``.

    ``None`` if there is none, or another kind: the parameter is then their sum, which PEFT makes.
    """
    chains = experts._modules.get("parametrizations")
    if chains is None or name not in chains:
        return None
    chain = chains[name]
    is_factors = len(chain) == 1 and type(chain[0]).__name__ == "_LoraFactorsProxy"
    return chain if is_factors else None


def fp8_experts_forward(
    self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Computes experts whose weights are FP8, by their own grouped products."""
    _warn(type(self))
    return _fp8.ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)


_WARNED: set[type] = set()


@torch.compiler.disable(recursive=True)
def _say(cls: type) -> None:
    warnings.warn(
        f"moeworks: {cls.__name__} has an activation or a layout without a kernel of its own; it takes two grouped "
        "products, which are right but slower",
        stacklevel=4,
    )


def _warn(cls: type) -> None:
    if cls not in _WARNED and not torch.compiler.is_compiling():
        _WARNED.add(cls)
        _say(cls)


register()
