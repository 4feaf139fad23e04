"""Tutel's surface: its numbers where they are known, plain loops in PyTorch elsewhere."""

import contextlib
import io
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import SkipTest

try:
    import torch
except ImportError as error:
    raise SkipTest(str(error)) from error

import torch.nn.functional as F

import moeworks.tutel
from moeworks.tutel import losses, moe, net, system
from moeworks.tutel.__main__ import main
from moeworks.tutel.experts import FusedExpertsNetwork
from moeworks.tutel.routing import expert_capacity

# The calls of Tutel's examples of the helloworld family, at a small size.
SCRIPT = '''
import sys
import torch
import torch.nn.functional as F
from tutel import moe as tutel_moe, net, system
from tutel.impls.fast_dispatch import extract_critical
import tutel.jit_kernels.gating

env = system.init_data_model_parallel(group_count=1, backend="gloo")
assert (env.global_rank, env.global_size, env.model_rank, env.data_rank) == (0, 1, 0, 0)
assert env.local_device.type == "cpu" and env.local_device.index is None

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self._moe_layer = tutel_moe.moe_layer(
            gate_type={"type": "top", "k": 2, "fp32_gate": True, "capacity_factor": 1.0},
            experts={"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 24,
                     "activation_fn": lambda x: F.relu(x)},
            model_dim=16,
            scan_expert_func=lambda name, param: setattr(param, "skip_allreduce", True),
            seeds=(1, env.global_rank + 1, 1),
            a2a_ffn_overlap_degree=1,
            parallel_type="data",
            use_2dh=False,
        )
        for kind in ("local_experts", "gate"):
            env.dist_print(kind, sum(param.numel() for _, param in self._moe_layer.get_parameter_iterator(kind)))

    def forward(self, x, **options):
        return F.log_softmax(torch.sum(self._moe_layer(x, **options), dim=2), dim=1)

model = Model().to(env.local_device)
assert all(p.skip_allreduce and p._tutel_expert for p in model._moe_layer.experts.parameters())
optimizer = net.TutelDistributedOptimizer(model.parameters(), group=None, average_shared=True)
optimizer = optimizer.warp_local(torch.optim.SGD, lr=1e-2)
torch.manual_seed(0)
x, y = torch.randn(4, 8, 16), torch.zeros(4, dtype=torch.int64)
layer = model._moe_layer
losses = []
for step in range(int(sys.argv[1])):
    start = system.record_time()
    optimizer.zero_grad()
    r, o = layer.valid_rs[step % len(layer.valid_rs)], step % 8 + 1
    loss = F.nll_loss(model(x, capacity_factor=1.0, adaptive_r=r, a2a_ffn_overlap_degree=o), y) + 0.01 * layer.l_aux
    loss.backward()
    for p in model.parameters():
        if not hasattr(p, "skip_allreduce"):
            p.grad = net.simple_all_reduce(p.grad)
    optimizer.step()
    losses.append(loss.item())
    assert system.record_time() > start and layer.a2a_ffn_overlap_degree == o and layer.adaptive_degree == r
assert losses[-1] < losses[0]
assert tutel_moe.moe_layer.global_expert_count(2, group=system.get_local_session().model_group) == 2
print("learned", __name__)
'''


def raises(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


def ffn(count=4, size=12, **more):
    return {"type": "ffn", "num_experts_per_device": count, "hidden_size_per_expert": size, **more}


def layer_of(gate=None, experts=None, dim=8, **more):
    return moe.moe_layer({"type": "top", "k": 2, **(gate or {})}, dim, experts or ffn(), seeds=(1, 1, 1), **more)


def loop(layer, x, k=2, factor=1.0, act=F.relu, normalize=True, prescore=False):
    """Computes a layer by a loop over tokens, in f64."""
    weights = {name: parameter.double() for name, parameter in layer.experts.named_parameters()}
    scores = (x.double() @ layer.gates[0].wg.weight.double().T).softmax(1)
    top, ids = scores.topk(k, 1)
    if k > 1 and normalize:
        top = top / top.sum(1, keepdim=True)
    num_experts = scores.shape[1]
    capacity = k * int(factor * math.ceil(len(x) / num_experts)) if factor else len(x) * k
    taken, rows = [0] * num_experts, [[] for _ in x]
    for choice in range(k):
        for token, row in enumerate(x.double()):
            expert, weight = int(ids[token, choice]), top[token, choice]
            taken[expert] += 1
            if taken[expert] > capacity:
                continue
            h = (row * weight if prescore else row) @ weights["batched_fc1_w"][expert].T
            y = act(h + weights["batched_fc1_bias"][expert]) @ weights["batched_fc2_w"][expert]
            y = y + weights["batched_fc2_bias"][expert]
            rows[token].append(y if prescore else y * weight)
    zero = torch.zeros(layer.experts.output_dim, dtype=torch.float64)
    return torch.stack([sum(parts, zero) for parts in rows])


def randomize_biases(layer):
    with torch.no_grad():
        layer.experts.batched_fc1_bias.normal_(0, 0.3)
        layer.experts.batched_fc2_bias.normal_(0, 0.3)


def assert_same_pass(layer, x, options, **settings):
    """Compares the output and all gradients with the loop."""
    dy = torch.randn(len(x), layer.experts.output_dim)
    leaves = [x, *layer.parameters()]
    found, wanted = layer(x, **options), loop(layer, x, **settings)
    grads = torch.autograd.grad((found * dy).sum(), leaves)
    truths = torch.autograd.grad((wanted * dy).sum(), leaves)
    names = ["y", "x", *(name for name, _ in layer.named_parameters())]
    for what, left, right in zip(names, [found, *grads], [wanted, *truths], strict=True):
        error = (left - right).abs().max().item()
        assert error < 1e-5 * max(1.0, right.abs().max().item()), f"{what}: {error:.2e}"


def test_a_script_for_tutel_runs_unmodified():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(SCRIPT)
        output = subprocess.run(
            [sys.executable, "-m", "moeworks.tutel", str(path), "10"], capture_output=True, text=True, timeout=500
        )
    assert output.returncode == 0, output.stderr
    assert output.stdout.split("\n")[:3] == ["local_experts 1616", "gate 32", "learned __main__"], output.stdout


def test_wrong_calls_of_the_runner_give_one_line_and_code_2():
    def call(words, **variables):
        stream, before = io.StringIO(), dict(os.environ)
        os.environ.update(variables)
        try:
            with contextlib.redirect_stderr(stream):
                code = main(words)
        finally:
            os.environ.clear()
            os.environ.update(before)
        return code, stream.getvalue()

    assert call([]) == (2, "usage: python -m moeworks.tutel script.py [args]\n")
    assert call(["missing.py"]) == (2, "error: missing.py: no such script\n")
    code, line = call([__file__], WORLD_SIZE="4")
    assert code == 2 and "one process" in line and "WORLD_SIZE is 4" in line and line.count("\n") == 1


def test_gradients_match_a_loop():
    torch.manual_seed(3)
    x = torch.randn(21, 8, requires_grad=True)
    for activation in (None, lambda v: F.gelu(v), F.silu, lambda v: F.gelu(v, approximate="tanh")):
        layer = layer_of(experts=ffn(activation_fn=activation))
        randomize_biases(layer)
        assert (layer.experts.fused() is None) == (activation is F.silu)
        assert_same_pass(layer, x, {}, act=activation or F.relu)
    layer = layer_of(is_postscore=False)
    assert_same_pass(layer, x, {"capacity_factor": 0}, factor=0, prescore=True)
    layer = layer_of(experts=ffn(activation_fn=F.silu), is_postscore=False, normalize_gate=False)
    assert_same_pass(layer, x, {"top_k": 3}, k=3, act=F.silu, prescore=True, normalize=False)
    layer = layer_of(experts=ffn(output_dim=5))
    randomize_biases(layer)
    assert_same_pass(layer, x, {"top_k": 1}, k=1)
    assert layer(x.view(3, 7, 8)).shape == (3, 7, 5)


def test_llama_experts_match_their_formula():
    torch.manual_seed(4)
    experts = {"type": "llama_ffn", "num_experts_per_device": 3, "hidden_size_per_expert": 12}
    for activation, is_fused in ((lambda v: F.silu(v), True), (F.tanh, False)):
        layer = layer_of({"k": 3, "capacity_factor": 0}, {**experts, "activation_fn": activation})
        assert (layer.experts.fused() is not None) == is_fused
        with torch.no_grad():
            for parameter in layer.experts.parameters():
                parameter.normal_(0, 0.3)
        x = torch.randn(9, 8, requires_grad=True)
        weights = layer.experts.W_fc1, layer.experts.W_fc2, layer.experts.W_fc3
        first, second, third = (w.view(shape) for w, shape in zip(weights, ((3, 8, 12), (3, 8, 12), (3, 12, 8))))
        every = (activation(x @ first) * (x @ second)) @ third
        wanted = (every * layer.gates[0](x).softmax(1).T.unsqueeze(2)).sum(0)
        leaves = [x, *layer.parameters()]
        found = layer(x)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        grads, truths = (torch.autograd.grad(y.square().sum(), leaves) for y in (found, wanted))
        for left, right in zip(grads, truths, strict=True):
            torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_capacity_follows_the_sign_of_its_factor():
    # 10 tokens, 4 experts: 3 tokens per expert; 7 rows at the busiest.
    for factor, alignment, wanted in (
        (1.0, 1, 6), (1.25, 1, 6), (1.5, 1, 8), (0.0, 1, 7), (-1.0, 1, 6), (-2.0, 1, 7), (1.0, 4, 8), (0.1, 1, 0)
    ):
        assert expert_capacity(factor, 10, 4, 2, 7, alignment) == wanted, (factor, alignment)


def test_choices_over_capacity_are_dropped_first_choices_first():
    # Expert 0 is the first choice of tokens 0, 1, 2 and the second of token 3; places 0, 1 exist.
    scores = torch.tensor([[0.6, 0.4, 0.0], [0.7, 0.0, 0.3], [0.9, 0.1, 0.0], [0.3, 0.7, 0.0]])
    critical, loss = moe.extract_critical(scores, 2, capacity_factor=0.5)
    assert critical.capacity == 2 and critical.dispatch_count.tolist() == [4, 3, 1]
    assert [column.tolist() for column in critical.indices] == [[0, 0, 0, 1], [1, 2, 1, 0]]
    assert [column.tolist() for column in critical.locations] == [[0, 1, 2, 0], [1, 0, 2, 3]]
    assert moe.get_reversed_sample_ids(critical).tolist() == [[0, 1], [3, 0], [1, -1]]
    assert moe.get_reversed_sample_ids(critical, "top_id").tolist() == [[0, 0], [0, 1], [1, -1]]
    ids, counts = moe.get_topk_selection(critical)
    assert ids.tolist() == [[0, 1], [0, 2], [0, 1], [1, 0]] and counts is critical.dispatch_count
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    rows = moe.fast_encode(x, critical)
    assert rows.tolist() == [[[0, 1], [2, 3]], [[6, 7], [0, 1]], [[2, 3], [0, 0]]]
    back = moe.fast_decode(rows, critical)
    torch.testing.assert_close(back, x * torch.tensor([[1.0], [1.0], [0.0], [0.7]]))
    back.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[1.0], [1.0], [0.0], [0.7]]).expand(4, 2))
    # By score, tokens 2, 1 (and 3, before 0) come first.
    critical, _ = moe.top_k_routing(scores, 1, capacity_factor=1.0, batch_prioritized_routing=True)
    assert critical.locations[0].tolist() == [2, 1, 0, 0] and critical.capacity == 2
    assert moe.get_reversed_sample_ids(critical).tolist() == [[2, 1], [3, -1], [-1, -1]]
    # Nothing fits: all outputs are 0.
    assert layer_of()(torch.randn(4, 8), capacity_factor=0.1).abs().max() == 0


def test_a_layer_rounds_capacity_by_its_degree_of_overlap():
    x = torch.randn(9, 8)
    layer = layer_of({"k": 1})
    with torch.no_grad():
        layer.gates[0].wg.weight.zero_()
        randomize_biases(layer)
    for degree, kept in ((1, 3), (2, 4), (5, 5)):
        y = layer(x, a2a_ffn_overlap_degree=degree)
        assert (y != 0).any(1).sum() == kept and layer.a2a_ffn_overlap_degree == degree
    with torch.no_grad():
        assert (layer(x, a2a_ffn_overlap_degree=1, megablocks_size=4) != 0).any(1).sum() == 4
        assert layer.megablocks_size == 4
    layer(x, megablocks_size=4)
    assert layer.megablocks_size == 0


def test_losses_follow_their_formulas():
    torch.manual_seed(5)
    logits = torch.randn(12, 4)
    scores, ids = logits.softmax(1), logits.topk(2, 1).indices
    shares = torch.tensor([(ids[:, 0] == expert).float().mean() for expert in range(4)])
    torch.testing.assert_close(losses.gshard_loss(scores, ids), 4 * (shares * scores.mean(0)).sum())
    noisy, noise = logits.gather(1, ids), 0.8
    found = losses.load_importance_loss(scores, noisy, 4, noise)
    normal = torch.distributions.Normal(0.0, noise / 4)
    parts = [scores.sum(0), normal.cdf(scores - noisy[:, -1:]).sum(0)]
    torch.testing.assert_close(found, sum((part.std() / part.mean()) ** 2 for part in parts) / 2)
    raises(ValueError, "gate_noise", lambda: losses.load_importance_loss(scores, noisy, 4, 0.0))
    layer = layer_of()
    x = torch.randn(12, 8)
    y = layer(x)
    scores = layer.gates[0](x).softmax(1)
    torch.testing.assert_close(y.l_aux, losses.gshard_loss(scores, scores.topk(2, 1).indices))
    assert y.l_aux is layer.l_aux and y.l_aux.requires_grad
    layer = layer_of({"gate_noise": 1.0}, is_gshard_loss=False).eval()
    logits = layer.gates[0](x)
    wanted = losses.load_importance_loss(logits.softmax(1), logits.topk(2, 1).values, 4, 1.0)
    torch.testing.assert_close(layer(x).l_aux, wanted)
    assert not torch.equal(layer.train()(x).l_aux, wanted)


def test_custom_gates_and_experts():
    class Gate(torch.nn.Module):
        def __init__(self, model_dim, num_global_experts, top_k):
            super().__init__()
            self.top_k = top_k
            self.own = torch.nn.Linear(model_dim, num_global_experts, bias=False)

        def forward(self, x):
            return self.own(x)

    class Experts(torch.nn.Module):
        # Named as in older versions of Tutel.
        def __init__(self, model_dim, local_experts, sharded_count, scale):
            super().__init__()
            self.scale = scale
            self.W = torch.nn.Parameter(torch.randn(local_experts * model_dim * model_dim))
            self.shape = (local_experts, model_dim, model_dim)

        def forward(self, x, ctx):
            group = net.create_groups_from_world(group_count=-ctx.sharded_count, parent_group=ctx.group).model_group
            self.seen = tuple(x.shape)
            rows = x.flatten(2) @ net.zero_gather(self.W, group=group).view(self.shape) * self.scale
            return rows.view(x.shape)

    layer = moe.moe_layer(
        [{"type": "custom", "module": Gate, "top_k": 1}, {"type": "cosine_top", "k": 2, "proj_dim": 6}],
        8,
        {"type": "custom", "module": Experts, "num_experts_per_device": 3, "scale": 2.0},
        result_func=lambda y: (y, y.l_aux),
    )
    x = torch.randn(5, 2, 4, requires_grad=True)
    y, loss = layer(x, reserve_dims=2, capacity_factor=0)
    scores = layer.gates[0].own(x.view(5, 8)).softmax(1)
    top, ids = scores.max(1)
    matrices = 2 * layer.experts.W.view(3, 8, 8)[ids]
    wanted = (x.view(5, 1, 8) @ matrices).squeeze(1) * top.unsqueeze(1)
    torch.testing.assert_close(y.view(5, 8), wanted)
    assert layer.experts.seen[0] == 3 and layer.experts.seen[2:] == (2, 4) and y.shape == x.shape
    leaves = [x, layer.experts.W, layer.gates[0].own.weight]
    for left, right in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves)):
        torch.testing.assert_close(left, right)
    y, loss = layer(x, gate_index=1, reserve_dims=2)
    (y.sum() + loss).backward()
    assert layer.gates[1].sim_matrix.grad.abs().max() > 0 and layer.gates[1].temperature.grad is not None


def test_activations_are_known_by_their_values_at_each_call():
    dropout = torch.nn.Dropout(0.5)
    experts = FusedExpertsNetwork(8, 12, 2, activation_fn=lambda v: dropout(F.relu(v)))
    state = torch.get_rng_state()
    assert experts.fused() is None
    assert torch.equal(state, torch.get_rng_state())
    dropout.eval()
    assert experts.fused() == "relu"
    assert FusedExpertsNetwork(8, 12, 2, activation_fn=torch.nn.PReLU(init=0.0)).fused() is None
    seen = []

    def activation(h, module):
        seen.append((h.shape, module))
        return h.relu()

    experts = FusedExpertsNetwork(8, 12, 2, activation_fn_with_self=activation)
    experts(torch.randn(2, 3, 8))
    assert seen == [((2, 3, 12), experts)]


def test_state_dicts_come_back_with_names_shapes_and_values():
    layer = layer_of()
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {
        "_num_global_experts": (), "experts.batched_fc1_w": (4, 12, 8), "experts.batched_fc2_w": (4, 12, 8),
        "experts.batched_fc1_bias": (4, 12), "experts.batched_fc2_bias": (4, 8), "gates.0.wg.weight": (4, 8),
    }
    other = moe.moe_layer({"type": "top", "k": 2}, 8, ffn())
    x = torch.randn(6, 8)
    assert not torch.equal(layer(x), other(x))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(layer(x), other(x))
    layer(x).sum().backward()
    grad, weight = layer.experts.batched_fc2_w.grad, layer.experts.batched_fc2_w
    assert grad.stride() == weight.stride() and weight.mT.is_contiguous()
    flat = {name: value.reshape(-1) if "experts.b" in name else value for name, value in layer.state_dict().items()}
    del flat["_num_global_experts"]
    other.load_state_dict(flat)
    assert torch.equal(layer(x), other(x))
    two = layer_of(experts=ffn(2))
    raises(ValueError, "4 experts, and the layer 2", lambda: two.load_state_dict(layer.state_dict()))


def test_types_and_autocast():
    x = torch.randn(6, 8)
    for dtype, bound in ((torch.bfloat16, 3e-2), (torch.float16, 3e-3), (torch.float64, 1e-6)):
        layer = layer_of({"fp32_gate": True})
        wanted = layer(x)
        layer = layer.to(dtype)
        found = layer(x.to(dtype))
        assert found.dtype == dtype and (found - wanted).abs().max() < bound
        found.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (layer_of()(x) - layer_of()(x)).abs().max() == 0


def test_one_process_gets_back_what_it_sends():
    x = torch.randn(4, 6)
    for function in (net.simple_all_reduce, net.simple_all_gather, net.simple_split, net.simple_reduce_scatter,
                     net.simple_broadcast, net.simple_all_to_all, net.all_to_all_single, net.allreduce_forward,
                     net.allreduce_backward):
        assert torch.equal(function(x), x), function
    for function in (net.all_gather, net.reduce_scatter, net.spatial_split):
        assert torch.equal(function(x, 1), x), function
    assert torch.equal(net.all_to_all(x, 1, 0), x) and torch.equal(net.all_to_all(x, 1, 0, background=True)(), x)
    assert net.zero_gather(x.view(-1), (2, 3, 4)).shape == (2, 3, 4)
    rows, shape = net.zero_scatter(x, net.simple_split)
    assert rows.shape == (24,) and shape == x.shape
    assert net.batch_all_to_all_v([x], [4])[1].tolist() == [4] and net.batch_all_gather_v([x])[1].tolist() == [24]
    net.barrier()
    assert net.get_world_size() == 1 and net.get_world_rank() == 0
    with contextlib.redirect_stdout(io.StringIO()):
        assert system.perform(lambda: None, 3) > 0
    with tempfile.TemporaryDirectory() as folder:
        path = system.apply_rank_size_from_pattern(f"{folder}/new/{{rank}}-{{size}}.pt", 0, 1)
        assert path == f"{folder}/new/0-1.pt" and Path(path).parent.is_dir()


def test_the_dispatcher_of_deepspeed_and_fairseq():
    moeworks.tutel.install()
    moeworks.tutel.install()
    from tutel import moe as tutel_moe

    ids = torch.tensor([0, 1, 1, 1])
    places = (tutel_moe.fast_cumsum_sub_one(F.one_hot(ids, 2)) * F.one_hot(ids, 2)).sum(1)
    assert places.tolist() == [0, 0, 1, 2]
    dispatcher = tutel_moe.fast_dispatcher(2, 2, 3, torch.float32)
    dispatcher.update([ids.int()], [places.int()], [torch.tensor([1.0, 2.0, 3.0, 4.0])], capacity=2)
    x = torch.arange(12.0).view(4, 3)
    assert torch.equal(dispatcher.encode(x), torch.stack([x[0], torch.zeros(3), x[1], x[2]]))
    assert torch.equal(dispatcher.decode(dispatcher.encode(x)), x * torch.tensor([[1.0], [2.0], [3.0], [0.0]]))


def test_wrong_arguments_raise_clear_exceptions():
    x = torch.randn(4, 8)
    raises(ValueError, "unknown argument 'top'", lambda: layer_of(top=1))
    raises(ValueError, "unknown type 'mlp'", lambda: layer_of(experts={"type": "mlp"}))
    raises(ValueError, "unknown option 'bias'", lambda: layer_of(experts=ffn(bias=True)))
    raises(ValueError, "unknown option 'noise'", lambda: layer_of({"noise": 1.0}))
    raises(ValueError, "unknown type 'best'", lambda: moe.moe_layer({"type": "best"}, 8, ffn()))
    raises(ValueError, "parallel_type 'both'", lambda: layer_of(parallel_type="both"))
    raises(ValueError, "num_experts_per_device -2", lambda: layer_of(experts=ffn(-2)))
    raises(ValueError, "needs a class", lambda: layer_of(experts={"type": "custom"}))
    raises(ValueError, "end with the model size, 8", lambda: layer_of()(torch.randn(4, 7)))
    raises(ValueError, "more than 1 dims", lambda: layer_of()(torch.randn(8)))
    raises(TypeError, "input: must be a tensor", lambda: layer_of()([1.0]))
    raises(ValueError, "gate_index 1", lambda: layer_of()(x, gate_index=1))
    raises(ValueError, "adaptive_r 2", lambda: layer_of()(x, adaptive_r=2))
    raises(ValueError, "a2a_ffn_overlap_degree 0", lambda: layer_of()(x, a2a_ffn_overlap_degree=0))
    raises(ValueError, "group_count 2", lambda: system.init_data_model_parallel(2, "gloo"))
    raises(ValueError, "backend 'mpi'", lambda: system.init_data_model_parallel(1, "mpi"))
    os.environ["WORLD_SIZE"] = "2"
    try:
        raises(RuntimeError, "one process, and WORLD_SIZE is 2", lambda: layer_of())
        raises(RuntimeError, "one process", lambda: net.simple_all_reduce(x))
    finally:
        del os.environ["WORLD_SIZE"]
