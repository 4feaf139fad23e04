"""Cases of experts, plain loops over them, and comparisons, for the tests of operators."""

from unittest import SkipTest

try:
    import torch
except ImportError as error:
    raise SkipTest(str(error)) from error

from moeworks import ops

E, D, F = 4, 24, 16
GATED = ("swiglu", "geglu_tanh", "clamped_swiglu", "clamped_silu", "softcapped_swiglu")
ACTIVATIONS = {name: 2 for name in GATED} | {name: 1 for name in ("gelu", "gelu_tanh", "relu", "relu_squared")}
# Limits and caps that some inputs exceed.
SETTINGS = {
    "clamped_swiglu": {"alpha": 1.3, "limit": 0.6},
    "clamped_silu": {"limit": 0.6},
    "softcapped_swiglu": {"softcaps": (0.8, 1.5)},
}


def plain_gate(activation, gate, up):
    """The activations by their formulas, at the settings above."""
    if activation == "swiglu":
        return gate * torch.sigmoid(gate) * up
    if activation == "geglu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if activation == "softcapped_swiglu":
        return 0.8 * torch.tanh(gate / 0.8) * torch.sigmoid(gate) * 1.5 * torch.tanh(up / 1.5)
    gate, up = gate.clamp(max=0.6), up.clamp(-0.6, 0.6)
    slope, raised = (1.3, up + 1) if activation == "clamped_swiglu" else (1.0, up)
    return gate * torch.sigmoid(slope * gate) * raised


def plain(activation, h):
    if ACTIVATIONS[activation] == 2:
        return plain_gate(activation, *h.chunk(2, -1))
    if activation == "relu_squared":
        return torch.relu(h) ** 2
    if activation == "relu":
        return torch.relu(h)
    return torch.nn.functional.gelu(h, approximate="tanh" if activation == "gelu_tanh" else "none")


def loop(x, gate_up, down, ids, weights, gate_up_bias=None, down_bias=None, activation="swiglu"):
    """The plain reference: one expert after another."""
    y = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        tokens, choices = torch.where(ids == e)
        h = x[tokens] @ gate_up[e].T
        h = h if gate_up_bias is None else h + gate_up_bias[e]
        out = plain(activation, h) @ down[e].T
        out = out if down_bias is None else out + down_bias[e]
        y = y.index_add(0, tokens, (out * weights[tokens, choices, None]).to(y.dtype))
    return y


def numbers(*shape, dtype=torch.float32):
    return (torch.randn(shape) * 0.5).to(dtype).requires_grad_()


def case(num_tokens=7, k=2, dtype=torch.float32, activation="swiglu", has_bias=False, num_ids=E):
    torch.manual_seed(3)
    columns = ACTIVATIONS[activation] * F
    tensors = {
        "x": numbers(num_tokens, D, dtype=dtype),
        "gate_up": numbers(E, columns, D, dtype=dtype),
        "down": numbers(E, D, F, dtype=dtype),
        "weights": numbers(num_tokens, k),
    }
    if has_bias:
        tensors |= {"gate_up_bias": numbers(E, columns, dtype=dtype), "down_bias": numbers(E, D, dtype=dtype)}
    return tensors, torch.randint(0, num_ids, (num_tokens, k))


def ours(tensors, ids, **settings):
    x, gate_up, down, weights = (tensors[name] for name in ("x", "gate_up", "down", "weights"))
    biases = {name: tensors[name] for name in ("gate_up_bias", "down_bias") if name in tensors}
    settings = SETTINGS.get(settings.get("activation"), {}) | settings
    return ops.experts(x, gate_up, down, ids, weights, **biases, **settings)


def theirs(tensors, ids, activation="swiglu"):
    x, gate_up, down, weights = (tensors[name] for name in ("x", "gate_up", "down", "weights"))
    biases = (tensors.get("gate_up_bias"), tensors.get("down_bias"))
    return loop(x, gate_up, down, ids, weights, *biases, activation=activation)


def grads(y, tensors, dy):
    found = torch.autograd.grad(y, list(tensors.values()), dy, allow_unused=True)
    pairs = zip(tensors.items(), found, strict=True)
    return {name: torch.zeros_like(p) if grad is None else grad for (name, p), grad in pairs}


def assert_close(found, wanted, bound=2e-5, what=""):
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, (what, found.dtype, wanted.dtype)
    error = (found.double() - wanted.double()).abs().max().item() if found.numel() else 0.0
    assert error <= bound, f"{what}: {error:.2e}"


def assert_alike(tensors, ids, bound=2e-5, activation="swiglu", **settings):
    y, wanted = ours(tensors, ids, activation=activation, **settings), theirs(tensors, ids, activation)
    assert_close(y, wanted, bound, "y")
    dy = torch.randn_like(y)
    exact = grads(wanted, tensors, dy)
    for name, grad in grads(y, tensors, dy).items():
        assert_close(grad, exact[name], bound, name)


def raises(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), f"{error} lacks {words!r}"
        return
    raise AssertionError(f"no {kind.__name__}")
