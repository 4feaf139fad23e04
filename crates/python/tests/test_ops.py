"""Experts and grouped products on PyTorch's tensors, against loops in PyTorch."""

import warnings
from unittest import SkipTest

try:
    import torch
except ImportError as error:
    raise SkipTest(str(error)) from error

from moeworks import ops
from ops_cases import (
    ACTIVATIONS,
    D,
    E,
    F,
    GATED,
    SETTINGS,
    assert_alike,
    assert_close,
    case,
    grads,
    numbers,
    ours,
    plain,
    raises,
    theirs,
)


def test_all_activations_with_and_without_bias():
    for activation in ACTIVATIONS:
        for has_bias in (False, True):
            assert_alike(*case(activation=activation, has_bias=has_bias), activation=activation)


def test_sizes_at_the_edges():
    for num_tokens, k in ((0, 2), (1, 1), (1, 4), (300, 3)):
        assert_alike(*case(num_tokens, k), bound=1e-4)


def test_ids_outside_are_skipped_with_exact_zeros():
    tensors, ids = case()
    ids[0] = E
    ids[1] = torch.tensor([-1, E + 5])
    ids[2, 1] = E
    y = ours(tensors, ids)
    assert (y[:2] == 0).all()
    found = grads(y, tensors, torch.randn_like(y))
    assert (found["weights"][:2] == 0).all() and found["weights"][2, 1] == 0 and (found["x"][:2] == 0).all()
    assert all(torch.isfinite(grad).all() for grad in found.values())
    assert_alike(tensors, torch.where(ids < 0, E, ids))


def test_no_rows_at_all():
    tensors, ids = case()
    ids[:] = E
    y = ours(tensors, ids)
    assert (y == 0).all() and all((grad == 0).all() for grad in grads(y, tensors, torch.ones_like(y)).values())


def test_repeated_ids_and_an_unused_expert():
    tensors, ids = case(num_ids=1)
    ids[:, 1] = ids[:, 0]
    assert_alike(tensors, ids)
    y = ours(tensors, ids)
    found = grads(y, tensors, torch.ones_like(y))
    assert (found["gate_up"][1:] == 0).all() and (found["down"][1:] == 0).all()


def test_bf16_is_as_close_to_f64_as_a_loop_in_bf16():
    for has_bias in (False, True):
        tensors, ids = case(64, 2, torch.bfloat16, has_bias=has_bias)
        exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
        dy = torch.randn(64, D).bfloat16()
        results = []
        for call, of, d in ((ours, tensors, dy), (theirs, tensors, dy), (theirs, exact, dy.double())):
            y = call(of, ids)
            results.append({"y": y, **grads(y, of, d)})
        for name, wanted in results[2].items():
            assert results[0][name].dtype == results[1][name].dtype, name
            errors = [(result[name].double() - wanted).norm().item() for result in results[:2]]
            assert errors[0] <= 1.5 * errors[1] + 2e-3 * wanted.norm().item(), (name, errors)


def test_weights_of_choices_in_any_type_get_gradients_in_it():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensors, ids = case()
        tensors["weights"] = tensors["weights"].detach().to(dtype).requires_grad_()
        y = ours(tensors, ids)
        assert grads(y, tensors, torch.ones_like(y))["weights"].dtype == dtype and y.dtype == torch.float32


def test_frozen_weights_get_no_gradients():
    tensors, ids = case()
    exact = grads(theirs(tensors, ids), tensors, torch.ones(7, D))
    for trained in ("x", "gate_up", "down", "weights"):
        frozen = {name: tensor.detach().requires_grad_(name == trained) for name, tensor in tensors.items()}
        ours(frozen, ids).sum().backward()
        for name, tensor in frozen.items():
            assert (tensor.grad is not None) == (name == trained), name
        assert_close(frozen[trained].grad, exact[trained], what=trained)


def test_strides_offsets_and_expanded_gradients():
    tensors, ids = case()
    wide = numbers(7, 2 * D)
    strided = dict(tensors, x=wide)
    y = ours(dict(tensors, x=wide[:, ::2]), ids)
    exact = theirs(dict(tensors, x=wide[:, ::2]), ids)
    assert_close(y, exact)
    # The gradient of a sum has strides of zero.
    found, wanted = (torch.autograd.grad(out.sum(), list(strided.values())) for out in (y, exact))
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b)
    turned = tensors["gate_up"].detach().mT.contiguous().mT.requires_grad_()
    assert_alike(dict(tensors, gate_up=turned), ids.T.contiguous().T)
    # Memory that begins at no multiple of 16 bytes, or of the element's size, as in a mapped file.
    for shift in (4, 1):
        memory = bytearray(shift + tensors["down"].numel() * 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            moved = torch.frombuffer(memory, dtype=torch.uint8)[shift:].view(torch.uint8)
        moved.copy_(tensors["down"].detach().reshape(-1).view(torch.uint8))
        moved = torch.frombuffer(memory, dtype=torch.float32, offset=shift).view(E, D, F)
        with torch.no_grad():
            assert_close(ours(dict(tensors, down=moved), ids), theirs(tensors, ids), what=f"offset {shift}")


def test_transposed_and_interleaved_weights():
    for has_bias in (False, True):
        for activation in ACTIVATIONS:
            tensors, ids = case(activation=activation, has_bias=has_bias)
            dy = torch.randn(7, D)
            wanted = theirs(tensors, ids, activation)
            exact = grads(wanted, tensors, dy)

            def in_turn(x):
                return torch.stack(x.chunk(2, -1), -1).flatten(-2)

            for layout in ("transposed", "interleaved"):
                is_in_turn = layout == "interleaved" and activation in GATED
                change = in_turn if is_in_turn else lambda x: x
                changed = dict(tensors, gate_up=change(tensors["gate_up"].mT), down=tensors["down"].mT)
                if has_bias:
                    changed["gate_up_bias"] = change(tensors["gate_up_bias"])
                y = ours(changed, ids, activation=activation, layout=layout)
                assert_close(y, wanted, what=layout)
                found = grads(y, tensors, dy)
                assert all(found[name].shape == exact[name].shape for name in exact)
                for name in exact:
                    assert_close(found[name], exact[name], 5e-5, f"{layout} {name}")
                with torch.no_grad():
                    changed = {name: tensor.contiguous() for name, tensor in changed.items()}
                    assert_close(ours(changed, ids, activation=activation, layout=layout), wanted, what=layout)


def test_autocast_computes_in_its_type():
    tensors, ids = case(32, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours(tensors, ids)
    assert y.dtype == torch.bfloat16
    found = grads(y, tensors, torch.ones_like(y))
    exact = grads(theirs(tensors, ids), tensors, torch.ones(32, D))
    for name, grad in found.items():
        assert grad.dtype == torch.float32 and (grad - exact[name]).norm() <= 2e-2 * exact[name].norm(), name


def test_other_types_take_pytorchs_products():
    tensors, ids = case()
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    assert_alike(wide, ids, 1e-12)
    half = {name: tensor.detach().half() for name, tensor in tensors.items()}
    y = ours(half, ids)
    assert y.dtype == torch.float16 and (y.double() - theirs(wide, ids)).abs().max() < 2e-2
    trained = {name: tensor.requires_grad_() for name, tensor in half.items()}
    assert grads(ours(trained, ids), trained, torch.ones(7, D).half())["gate_up"].dtype == torch.float16


def test_a_check_by_finite_differences():
    tensors, ids = case(3, 2)
    wide = [tensors[name].detach().double().requires_grad_() for name in ("x", "weights")]
    others = [tensors[name].detach().double() for name in ("gate_up", "down")]
    assert torch.autograd.gradcheck(lambda x, weights: ops.experts(x, *others, ids, weights), wide)


def test_opcheck():
    tensors, ids = case(has_bias=True)
    names = ("gate_up_bias", "down_bias")
    x, gate_up, down, weights = (tensors[name] for name in ("x", "gate_up", "down", "weights"))
    biases = [tensors[name] for name in names]
    ids[0, 0] = E
    args = (x, gate_up, down, ids, weights, *biases, "swiglu", 1.702, 7.0, "stacked", True)
    torch.library.opcheck(torch.ops.moeworks.experts.default, args)
    turned = (gate_up.detach().mT.contiguous().requires_grad_(), down.detach().mT.contiguous().requires_grad_())
    args = (x, *turned, ids, weights, *biases, "clamped_swiglu", 1.702, 7.0, "interleaved", True)
    torch.library.opcheck(torch.ops.moeworks.experts.default, args)
    args = (x, gate_up, down, ids, weights, None, None, "swiglu", 1.702, 7.0, "stacked", True)
    torch.library.opcheck(torch.ops.moeworks.experts.default, args)
    a, b, offs = numbers(9, D), numbers(3, D, F), torch.tensor([2, 2, 7], dtype=torch.int32)
    torch.library.opcheck(torch.ops.moeworks.grouped_mm.default, (a, b, offs))
    turned = numbers(3, F, D).detach().mT.requires_grad_()
    torch.library.opcheck(torch.ops.moeworks.grouped_mm.default, (a, turned, offs))


def test_compiled_without_breaks():
    tensors, ids = case()
    wanted = theirs(tensors, ids)
    exact = grads(wanted, tensors, torch.ones_like(wanted))
    compiled = torch.compile(lambda of: ours(of, ids), backend="aot_eager", fullgraph=True)
    y = compiled(tensors)
    assert_close(y, wanted)
    for name, grad in grads(y, tensors, torch.ones_like(y)).items():
        assert_close(grad, exact[name], what=name)
    with torch.no_grad():
        assert_close(compiled(tensors), wanted)


def test_second_derivatives_are_refused():
    tensors, ids = case()
    y = ours(tensors, ids)
    (dx,) = torch.autograd.grad(y.sum(), [tensors["x"]], create_graph=True)
    raises(RuntimeError, "no second derivative", lambda: dx.sum().backward())


def test_two_backward_passes_add_up():
    tensors, ids = case()
    y = ours(tensors, ids).sum()
    y.backward(retain_graph=True)
    once = tensors["gate_up"].grad.clone()
    y.backward()
    assert torch.equal(tensors["gate_up"].grad, 2 * once)


def test_checkpointing_and_hooks():
    from torch.utils.checkpoint import checkpoint

    tensors, ids = case()
    plain = grads(ours(tensors, ids), tensors, torch.ones(7, D))
    again = grads(checkpoint(ours, tensors, ids, use_reentrant=False), tensors, torch.ones(7, D))
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    seen = []
    tensors["gate_up"].register_hook(lambda grad: seen.append(grad.shape))
    ours(tensors, ids).sum().backward()
    assert seen == [tensors["gate_up"].shape]


def test_grouped_products_match_a_loop():
    for dtype, bound in ((torch.float32, 2e-5), (torch.bfloat16, 4e-2)):
        for ends in ([3, 3, 8], [0, 0, 0], [1, 2, 10]):
            for is_turned in (False, True):
                torch.manual_seed(5)
                a = numbers(10, D, dtype=dtype)
                b = numbers(3, F, D, dtype=dtype).detach().mT if is_turned else numbers(3, D, F, dtype=dtype).detach()
                b.requires_grad_()
                offs = torch.tensor(ends, dtype=torch.int32)
                y = ops.grouped_mm(a, b, offs=offs)
                wanted = ops._plain_grouped(a, b, offs)
                assert_close(y, wanted, bound)
                with torch.no_grad():
                    assert torch.equal(ops.grouped_mm(a, b, offs=offs), y)
                dy = torch.randn(10, F).to(dtype)
                found, exact = (torch.autograd.grad(out, [a, b], dy) for out in (y, wanted))
                for grad, other in zip(found, exact, strict=True):
                    assert_close(grad, other, bound)
                assert found[1].stride() == b.stride()


def test_wrong_arguments_raise_clear_exceptions():
    tensors, ids = case()
    x, gate_up, down, weights = (tensors[name] for name in ("x", "gate_up", "down", "weights"))

    def softcapped(**settings):
        return ops.experts(x, gate_up, down, ids, weights, activation="softcapped_swiglu", **settings)

    wrong = [
        (TypeError, "x: must be a tensor", lambda: ops.experts([1.0], gate_up, down, ids, weights)),
        (TypeError, "gate_up: is torch.bfloat16", lambda: ops.experts(x, gate_up.bfloat16(), down, ids, weights)),
        (TypeError, "whole numbers", lambda: ops.experts(x, gate_up, down, ids.float(), weights)),
        (TypeError, "x: must be f32", lambda: ops.experts(x.int(), gate_up.int(), down.int(), ids, weights)),
        (TypeError, "float8", lambda: ops.experts(x.to(torch.float8_e4m3fn), gate_up, down, ids, weights)),
        (TypeError, "must be floats", lambda: ops.experts(x, gate_up, down, ids, ids)),
        (ValueError, "2 dims", lambda: ops.experts(x[0], gate_up, down, ids, weights)),
        (ValueError, "does not fit x", lambda: ops.experts(x[:, 1:], gate_up, down, ids, weights)),
        (ValueError, "down: shape", lambda: ops.experts(x, gate_up, down[:, 1:], ids, weights)),
        (ValueError, "down: shape", lambda: ops.experts(x, gate_up, down[1:], ids, weights)),
        (ValueError, "7 tokens", lambda: ops.experts(x, gate_up, down, ids[1:], weights[1:])),
        (ValueError, "must be that of expert_ids", lambda: ops.experts(x, gate_up, down, ids, weights[:, :1])),
        (ValueError, "at least one expert", lambda: ops.experts(x, gate_up, down, ids[:, :0], weights[:, :0])),
        (ValueError, "activation 'tanh'", lambda: ops.experts(x, gate_up, down, ids, weights, activation="tanh")),
        (ValueError, "activation ['relu']", lambda: ops.experts(x, gate_up, down, ids, weights, activation=["relu"])),
        (TypeError, "alpha: must be a number", lambda: ops.experts(x, gate_up, down, ids, weights, alpha="1")),
        (ValueError, "limit -1.0", lambda: ops.experts(x, gate_up, down, ids, weights, limit=-1.0)),
        (ValueError, "limit: is not a number", lambda: ops.experts(x, gate_up, down, ids, weights, limit=float("nan"))),
        (TypeError, "softcaps: must be two numbers", lambda: softcapped(softcaps=(1.0,))),
        (TypeError, "softcaps: must be two numbers", lambda: softcapped(softcaps=3)),
        (ValueError, "softcaps 0.0, 1.0: must be above 0", lambda: softcapped(softcaps=(0, 1))),
        (ValueError, "layout 'x'", lambda: ops.experts(x, gate_up, down, ids, weights, layout="x")),
        (
            ValueError,
            "down_bias",
            lambda: ops.experts(x, gate_up, down, ids, weights, down_bias=torch.zeros(E, D + 1)),
        ),
        (ValueError, "one device", lambda: ops.experts(x, gate_up.to("meta"), down, ids, weights)),
        (TypeError, "dense", lambda: ops.experts(x.detach().to_sparse(), gate_up, down, ids, weights)),
        (TypeError, "nested", lambda: ops.experts(torch.nested.nested_tensor([x]), gate_up, down, ids, weights)),
        (TypeError, "int32", lambda: ops.grouped_mm(x, gate_up.mT, offs=torch.tensor([1, 2, 3, 4]))),
    ]
    for ends in ([1, 5, 4, 7], [-1, 2, 3, 4], [1, 2, 3, 99]):
        offs = torch.tensor(ends, dtype=torch.int32)
        for dtype in (torch.float32, torch.float64):
            a, b = x.to(dtype), gate_up.to(dtype).mT
            wrong.append((ValueError, "offs[", lambda a=a, b=b, offs=offs: ops.grouped_mm(a, b, offs=offs)))
    for kind, words, call in wrong:
        raises(kind, words, call)


def test_the_dispatchers_operators_refuse_what_kernels_cannot_read():
    tensors, ids = case()
    x, gate_up, down, weights = (tensors[name].detach() for name in ("x", "gate_up", "down", "weights"))

    def forward(x=x, gate_up=gate_up, down=down, ids=ids, weights=weights, biases=(None, None), activation="swiglu"):
        settings = (activation, 1.702, 7.0, "stacked", False)
        return torch.ops.moeworks.experts(x, gate_up, down, ids, weights, *biases, *settings)

    def backward(dy=x, h=torch.zeros(14, 2 * F), needs_biases=False):
        settings = ("swiglu", 1.702, 7.0, "stacked", True, needs_biases)
        return torch.ops.moeworks.experts_backward(dy, x, gate_up, down, ids, weights, h, None, None, *settings)

    def grouped(a=x, b=gate_up.mT, offs=torch.tensor([1, 2, 3, 4], dtype=torch.int32)):
        return torch.ops.moeworks.grouped_mm(a, b, offs)

    bias = torch.zeros(E, 2 * F)
    for kind, words, call in (
        (ValueError, "down: shape", lambda: forward(down=down[..., 1:])),
        (ValueError, "expert_ids: shape", lambda: forward(ids=ids[:3])),
        (ValueError, "activation 'tanh'", lambda: forward(activation="tanh")),
        (TypeError, "expert_ids: moeworks::experts takes torch.int64", lambda: forward(ids=ids.int())),
        (TypeError, "expert_weights: moeworks::experts takes", lambda: forward(weights=weights.bfloat16())),
        (TypeError, "gate_up: is torch.bfloat16", lambda: forward(gate_up=gate_up.bfloat16())),
        (TypeError, "f64", lambda: forward(x.double(), gate_up.double(), down.double())),
        (ValueError, "both biases or none", lambda: forward(biases=(bias, None))),
        (ValueError, "h: shape [13, 32] must be [14, 32]", lambda: backward(h=torch.zeros(13, 2 * F))),
        (TypeError, "h is torch.bfloat16", lambda: backward(h=torch.zeros(14, 2 * F).bfloat16())),
        (ValueError, "dy: shape", lambda: backward(dy=x[1:])),
        (ValueError, "there are no biases", lambda: backward(needs_biases=True)),
        (ValueError, "mat_b: shape", lambda: grouped(b=gate_up.mT[:, 1:])),
        (TypeError, "int32", lambda: grouped(offs=torch.tensor([1, 2, 3, 4]))),
        (TypeError, "takes f32 and bf16", lambda: grouped(x.half(), gate_up.half().mT)),
    ):
        raises(kind, words, call)
    assert torch.equal(forward()[0], ours(tensors, ids)) and len(backward()) == 6


def test_tensors_on_another_device_are_refused_in_one_line():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, gate_up, down = (torch.empty(size, device="cuda") for size in ((7, D), (E, 2 * F, D), (E, D, F)))
        ids, weights = torch.empty(7, 2, dtype=torch.int64, device="cuda"), torch.empty(7, 2, device="cuda")
    words = "x: is on cuda:0; the operators of moeworks compute on the CPU"
    raises(NotImplementedError, words, lambda: ops.experts(x, gate_up, down, ids, weights))


def test_all_ways_of_a_call_have_the_same_bits():
    """Without gradients from the tensors themselves, with them past the dispatcher, and through it."""
    for dtype in (torch.float32, torch.bfloat16):
        for num_tokens, k in ((0, 2), (1, 1), (1, 4), (2, 3), (40, 2)):
            for activation in ACTIVATIONS:
                tensors, ids = case(num_tokens, k, dtype, activation, num_ids=E + 1)
                numbers = SETTINGS.get(activation, {})
                numbers = numbers.get("softcaps", (numbers.get("alpha", 1.702), numbers.get("limit", 7.0)))
                inputs = [tensors[name] for name in ("x", "gate_up", "down")] + [ids, tensors["weights"], None, None]
                wanted = torch.ops.moeworks.experts(*inputs, activation, *numbers, "stacked", True)[0]
                trained = ours(tensors, ids, activation=activation)
                with torch.no_grad():
                    assert torch.equal(ours(tensors, ids, activation=activation), wanted), (activation, num_tokens)
                assert torch.equal(trained, wanted), (activation, num_tokens)
                dy = torch.randn(num_tokens, D).to(dtype)
                exact = grads(wanted, tensors, dy)
                for name, grad in grads(trained, tensors, dy).items():
                    assert torch.equal(grad, exact[name]), (activation, num_tokens, name)


def test_plain_tensors_take_the_way_past_the_dispatcher():
    tensors, ids = case(1, 2)
    taken = []
    direct, apply = ops._kernels.direct_forward, ops._kernels.PlainExperts.apply
    ops._kernels.direct_forward = lambda *inputs: taken.append("direct") or direct(*inputs)
    ops._kernels.PlainExperts.apply = lambda *inputs: taken.append("trained") or apply(*inputs)
    try:
        ours(tensors, ids)
        with torch.no_grad():
            assert torch.equal(ours(tensors, ids), ours(tensors, ids.int()))
    finally:
        ops._kernels.direct_forward, ops._kernels.PlainExperts.apply = direct, apply
    assert taken == ["trained", "direct", "direct"], taken
    assert direct(tensors["x"][:, 1:], *(tensors[name] for name in ("gate_up", "down")), ids, ids, "relu", 1.0, 7.0) is None


def test_one_token_skips_and_repeats_choices():
    tensors, _ = case(1, 6)
    for ids in ([3, E, 0, 3, -1, 2**40], [E] * 6, [1] * 6):
        assert_alike(tensors, torch.tensor([ids]))


def test_forward_mode_derivatives_are_refused():
    tensors, ids = case()
    x, gate_up, down, weights = (tensors[name].detach() for name in ("x", "gate_up", "down", "weights"))
    words = "no forward-mode derivatives"
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        raises(NotImplementedError, words, lambda: ops.experts(dual, gate_up, down, ids, weights))
        assert torch.equal(ops.experts(x, gate_up, down, ids, weights), ours(tensors, ids))
    call = lambda x: ops.experts(x, gate_up, down, ids, weights)
    raises(NotImplementedError, words, lambda: torch.func.jvp(call, (x,), (x,)))


def test_vmap_computes_each_of_a_batch():
    tensors, ids = case()
    x, gate_up, down, weights = (tensors[name].detach() for name in ("x", "gate_up", "down", "weights"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.vmap(lambda x: ops.experts(x, gate_up, down, ids, weights))(torch.stack([x, 2 * x]))
    assert torch.equal(found, torch.stack([ops.experts(f * x, gate_up, down, ids, weights) for f in (1, 2)]))


def test_negated_views_are_read_with_their_sign():
    tensors, ids = case()
    x = torch.complex(tensors["x"].detach(), tensors["x"].detach()).conj().imag
    assert x.is_neg()
    with torch.no_grad():
        assert torch.equal(ours(dict(tensors, x=x), ids), ours(dict(tensors, x=x.resolve_neg().contiguous()), ids))


def test_the_sizes_of_scattermoe():
    for num_tokens, k, width, size in ((128, 2, 256, 128), (128, 4, 128, 600)):
        torch.manual_seed(7)
        tensors = {
            "x": numbers(num_tokens, width),
            "gate_up": (numbers(8, 2 * size, width).detach() * 0.2).requires_grad_(),
            "down": (numbers(8, width, size).detach() * 0.2).requires_grad_(),
            "weights": numbers(num_tokens, k),
        }
        assert_alike(tensors, torch.randint(0, 8, (num_tokens, k)), 5e-4)
