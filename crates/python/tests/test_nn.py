"""Layers and losses, against the blocks of five model families (made by crates/moe/tests/fixtures/make.py)."""

import copy
import io
import json
import pickle
from pathlib import Path
from unittest import SkipTest

try:
    import torch
except ImportError as error:
    raise SkipTest(str(error)) from error

from moeworks.nn import Experts, MoE, importance_loss, l1_loss, load_balancing_loss, within_capacity, z_loss

FIXTURES = Path(__file__).parents[2] / "moe/tests/fixtures"


def read(name):
    return json.loads((FIXTURES / name).read_text())


def raises(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


def assert_close(found, numbers, what, bound=2e-5):
    wanted = torch.tensor(numbers).view(found.shape)
    error = (found - wanted).abs().max().item()
    assert error <= bound * max(1.0, wanted.abs().max().item()), f"{what}: {error:.2e}"


def test_blocks_of_five_families_with_all_gradients():
    file = read("blocks.json")
    for case in file["cases"]:
        has_shared = "shared_gate_up" in case["weights"]
        layer = MoE(
            file["width"],
            file["expert_width"],
            file["num_experts"],
            file["top_k"],
            normalize_weights=case["score_order"].startswith("top_k") or case["normalize_weights"],
            shared_intermediate_size=file["shared_width"] if has_shared else 0,
        )
        named = {"router": layer.gate.weight, "gate_up": layer.experts.gate_up_proj, "down": layer.experts.down_proj}
        if has_shared:
            named["shared_gate_up"] = layer.shared_expert.gate_up_proj_weight
            named["shared_down"] = layer.shared_expert.down_proj_weight
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(torch.tensor(case["weights"][name]).view(parameter.shape))
        x = torch.tensor(case["x"]).view(-1, file["width"]).requires_grad_()
        y, logits = layer(x, output_router_logits=True)
        assert_close(y, case["y"], case["name"])
        losses = file["balance_coef"] * load_balancing_loss(logits, file["top_k"]) + file["z_coef"] * z_loss(logits)
        ((y * torch.tensor(case["dy"]).view(y.shape)).sum() + losses).backward()
        assert_close(x.grad, case["dx"], f"{case['name']} dx")
        for name, parameter in named.items():
            assert_close(parameter.grad, case["grads"][name], f"{case['name']} {name}")


def test_losses_match_those_of_transformers():
    file = read("losses.json")
    layers = [torch.tensor(logits).view(-1, file["num_experts"]).requires_grad_() for logits in file["logits"]]
    pooled = load_balancing_loss(layers, file["top_k"])
    assert_close(pooled, file["pooled"], "pooled")
    for grad, wanted in zip(torch.autograd.grad(pooled, layers), file["pooled_grads"], strict=True):
        assert_close(grad, wanted, "pooled gradient")
    (grad,) = torch.autograd.grad(z_loss(layers[0]), layers[:1])
    assert_close(z_loss(layers[0]), file["z"], "z")
    assert_close(grad, file["z_grad"], "z gradient")
    padded = torch.cat([layers[0], 5 * torch.ones(3, file["num_experts"])])
    mask = torch.tensor([1.0] * layers[0].shape[0] + [0.0] * 3)
    assert_close(load_balancing_loss(padded, 1, mask=mask), load_balancing_loss(layers[0], 1).item(), "mask")


def test_capacity_drops_late_choices_of_busy_experts():
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [1, 0]])
    # Each of 4 experts takes 2 rows: first choices first, in the order of tokens.
    assert within_capacity(ids, 4, 1.0).tolist() == [[0, 1], [0, 2], [4, 4], [1, 4]]
    torch.manual_seed(0)
    layer = MoE(8, 6, 4, 2, capacity_factor=0.5)
    with torch.no_grad():
        layer.gate.weight.zero_()
    x = torch.randn(16, 8)
    y = layer(x)
    # All tokens choose the same experts, which have room for four rows each.
    assert (y[:4] != 0).any(-1).all() and (y[4:] == 0).all()


def test_shapes_types_scores_and_devices():
    torch.manual_seed(0)
    for score in ("softmax", "sigmoid"):
        layer = MoE(8, 6, 4, 2, score=score, bias=True, activation="gelu", dtype=torch.bfloat16)
        y = layer(torch.randn(2, 3, 8, dtype=torch.bfloat16))
        assert y.shape == (2, 3, 8) and y.dtype == torch.bfloat16
    meta = MoE(8, 6, 4, 2, device="meta")
    assert meta(torch.empty(5, 8, device="meta")).shape == (5, 8)
    assert Experts(4, 8, 6).state_dict().keys() == {"gate_up_proj", "down_proj"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, logits = MoE(8, 6, 4, 2, shared_intermediate_size=6)(torch.randn(5, 8), output_router_logits=True)
    assert y.dtype == torch.bfloat16 and logits.dtype == torch.float32


def test_layers_are_copied_pickled_and_loaded_with_the_same_results():
    torch.manual_seed(0)
    for settings in ({}, {"router": "top_p"}, {"router": "cosine", "bias": True}, {"shared_intermediate_size": 6}):
        layer = MoE(8, 6, 4, 2, **settings).eval()
        again = MoE(8, 6, 4, 2, **settings).eval()
        again.load_state_dict(layer.state_dict())
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False), again]
        x = torch.randn(5, 8)
        assert all(torch.equal(of(x), layer(x)) for of in copies), settings


def test_one_graph_serves_all_numbers_of_tokens():
    torch.manual_seed(0)
    layer = MoE(8, 6, 4, 2)
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True, fullgraph=True)
    for num_tokens in (3, 7, 1, 0):
        x = torch.randn(num_tokens, 8)
        assert torch.equal(compiled(x), layer(x))
    exported = torch.export.export(layer, (x.new_ones(5, 8),), dynamic_shapes={"x": {0: torch.export.Dim("t")}}).module()
    x = torch.randn(9, 8)
    assert torch.equal(exported(x), layer(x))


def test_a_layer_learns():
    torch.manual_seed(0)
    layer = MoE(16, 32, 8, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(10)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x = torch.randn(128, 16)
    losses = []
    for _ in range(30):
        y, logits = layer(x, output_router_logits=True)
        loss = (y - x.roll(1, -1)).square().mean() + 0.01 * load_balancing_loss(logits, 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


def test_wrong_arguments_raise_clear_exceptions():
    raises(ValueError, "top_k 5", lambda: MoE(8, 6, 4, 5))
    raises(ValueError, "score", lambda: MoE(8, 6, 4, 2, score="tanh"))
    raises(ValueError, "activation", lambda: Experts(4, 8, 6, activation="tanh"))
    raises(ValueError, "capacity_factor", lambda: MoE(8, 6, 4, 2, capacity_factor=-1.0))
    raises(TypeError, "hidden_size", lambda: Experts(4, 8.0, 6))
    raises(ValueError, "hidden size", lambda: MoE(8, 6, 4, 2)(torch.randn(3, 7)))
    raises(TypeError, "x: must be a tensor", lambda: MoE(8, 6, 4, 2)([1.0]))
    raises(TypeError, "gate_up: is torch.float32", lambda: MoE(8, 6, 4, 2)(torch.randn(3, 8).bfloat16()))
    raises(ValueError, "logits", lambda: load_balancing_loss(torch.randn(3), 1))
    raises(ValueError, "logits", lambda: load_balancing_loss(None, 1))
    raises(ValueError, "logits", lambda: z_loss(3))
    raises(TypeError, "capacity_factor", lambda: MoE(8, 6, 4, 2, capacity_factor="1"))
    raises(TypeError, "router: must be a name", lambda: MoE(8, 6, 4, 2, router=torch.nn.Linear(8, 4)))
    raises(TypeError, "softcaps", lambda: Experts(4, 8, 6, activation="softcapped_swiglu", softcaps=(1,)))
    raises(TypeError, "expert_ids: must be a tensor", lambda: importance_loss([1], [2], 4))
    raises(TypeError, "logits: must be a tensor", lambda: l1_loss(None, 2))
    hashed = MoE(8, 6, 4, 1, router="hash", router_settings={"vocab_size": 10})
    for ids in ([1, 2, 30], [1, 2], [1.0, 2.0, 3.0]):
        raises(ValueError, "token_ids", lambda ids=ids: hashed(torch.randn(3, 8), token_ids=torch.tensor(ids)))
    raises(ValueError, "activation ['relu']", lambda: Experts(4, 8, 6, activation=["relu"]))
