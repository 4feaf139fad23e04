"""The examples, and the code of the manual's recipes, run as they stand."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import SkipTest

try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    raise SkipTest(str(error)) from error

HERE = Path(__file__).parents[1]
MANUAL = Path(__file__).parents[3] / "docs/python.md"
E, D, WIDTH, K, T = 4, 24, 16, 2, 9


def losses(command):
    """Runs an example and returns the losses that it prints."""
    output = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert output.returncode == 0, output.stdout + output.stderr
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output.stdout)]


def test_a_layer_trains_under_inductor():
    if shutil.which("c++") is None and shutil.which("g++") is None:
        raise SkipTest("inductor needs a C++ compiler")
    found = losses([HERE / "examples/compiled.py", "--steps", "10"])
    eager = losses([HERE / "examples/compiled.py", "--steps", "10", "--backend", "eager"])
    assert len(found) == 2 and found[1] < 0.8 * found[0], found
    assert all(abs(a - b) <= 0.002 for a, b in zip(found, eager, strict=True)), (found, eager)


def test_two_processes_train_as_one():
    example = HERE / "examples/data_parallel.py"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    one, two = (losses([*launch, str(count), example, "--steps", "10"]) for count in (1, 2))
    assert len(two) == 2 and two[1] < 0.8 * two[0], two
    # The balance losses of the parts of a batch are not that of the whole.
    assert all(abs(a - b) <= 0.01 for a, b in zip(one, two, strict=True)), (one, two)


def shown(words):
    """Returns the example of the manual that contains the words, and the output that the manual shows for it."""
    found = re.findall(r"^```python\n((?:(?!```).)*)```\n\n```text\n((?:(?!```).)*)```", MANUAL.read_text(), re.M | re.S)
    (pair,) = (pair for pair in found if words in pair[0])
    return pair


def assert_prints_what_the_manual_shows(words, command=()):
    code, wanted = shown(words)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "hello.py"
        script.write_text(code)
        done = subprocess.run([sys.executable, *command, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = "".join(line for line in wanted.splitlines(True) if not line.startswith("$"))
    number = r"\d+\.\d+"
    assert re.split(number, done.stdout) == re.split(number, wanted), done.stdout
    # Other instruction sets round differently.
    for a, b in zip(re.findall(number, done.stdout), re.findall(number, wanted), strict=True):
        assert abs(float(a) - float(b)) <= 0.01 * max(1.0, float(b)), done.stdout


def test_the_manuals_layer_trains_as_it_shows():
    assert_prints_what_the_manual_shows("from moeworks.nn import MoE")


def test_the_manuals_script_for_tutel_trains_as_it_shows():
    assert_prints_what_the_manual_shows("from tutel import", ["-m", "moeworks.tutel"])


def test_the_manuals_model_of_transformers_computes_what_it_shows():
    if importlib.util.find_spec("transformers") is None:
        raise SkipTest("transformers is not installed")
    assert_prints_what_the_manual_shows("import moeworks.transformers")


def recipe(name):
    """Returns the functions of a recipe in the manual."""
    text = MANUAL.read_text()
    code = re.search(rf"^#### {name}$.*?```python\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    assert code, f"the manual has no recipe for {name}"
    scope = {"torch": torch, "F": F}
    exec(code[1], scope)
    return scope


def numbers(*shape):
    return torch.randn(shape) * 0.3


def mixed(x, logits, expert, normalizes=True):
    """A plain layer: softmax, the K best, and ``expert(e, rows)`` for each of these."""
    weights, ids = logits.softmax(-1).topk(K, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True) if normalizes else weights
    y = torch.zeros_like(x)
    for t in range(T):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            y[t] += weight * expert(e, x[t])
    return y


def assert_close(found, wanted):
    assert torch.allclose(found, wanted, atol=1e-5), (found - wanted).abs().max()


def test_the_recipe_for_deepspeed():
    torch.manual_seed(0)
    state, x = {"moe.deepspeed_moe.gate.wg.weight": numbers(E, D)}, numbers(T, D)
    for e in range(E):
        prefix = f"moe.deepspeed_moe.experts.deepspeed_experts.{e}."
        state |= {f"{prefix}fc1.weight": numbers(WIDTH, D), f"{prefix}fc1.bias": numbers(WIDTH)}
        state |= {f"{prefix}fc2.weight": numbers(D, WIDTH), f"{prefix}fc2.bias": numbers(D)}

    def expert(e, row):
        w = [state[f"moe.deepspeed_moe.experts.deepspeed_experts.{e}.{name}"] for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")]
        return w[2] @ F.gelu(w[0] @ row + w[1]) + w[3]

    layer = recipe("DeepSpeed")["from_deepspeed"](state, "moe.deepspeed_moe.", K)
    assert_close(layer(x), mixed(x, x @ state["moe.deepspeed_moe.gate.wg.weight"].T, expert))


def test_the_recipe_for_fastmoe():
    torch.manual_seed(0)
    state = {
        "gate.gate.weight": numbers(E, D),
        "gate.gate.bias": numbers(E),
        "experts.htoh4.weight": numbers(E, WIDTH, D),
        "experts.htoh4.bias": numbers(E, WIDTH),
        "experts.h4toh.weight": numbers(E, D, WIDTH),
        "experts.h4toh.bias": numbers(E, D),
    }
    x = numbers(T, D)

    def expert(e, row):
        h = F.gelu(state["experts.htoh4.weight"][e] @ row + state["experts.htoh4.bias"][e])
        return state["experts.h4toh.weight"][e] @ h + state["experts.h4toh.bias"][e]

    layer = recipe("FastMoE")["FastMoE"](state, K)
    assert_close(layer(x), mixed(x, x @ state["gate.gate.weight"].T + state["gate.gate.bias"], expert))


def test_the_recipe_for_megablocks():
    torch.manual_seed(0)
    x, router = numbers(T, D), numbers(E, D)
    w1, v1, w2 = (numbers(E * WIDTH, D) for _ in range(3))
    state = {"router.layer.weight": router, "experts.mlp.w1": w1, "experts.mlp.w2": w2}
    parts = [part.view(E, WIDTH, D) for part in (w1, v1, w2)]

    def plain(e, row):
        return F.gelu(parts[0][e] @ row, approximate="tanh") @ parts[2][e]

    def gated(e, row):
        return (F.gelu(parts[0][e] @ row, approximate="tanh") * (parts[1][e] @ row)) @ parts[2][e]

    convert = recipe("MegaBlocks")["from_megablocks"]
    assert_close(convert(state, E, K)(x), mixed(x, x @ router.T, plain, normalizes=False))
    state["experts.mlp.v1"] = v1
    assert_close(convert(state, E, K)(x), mixed(x, x @ router.T, gated, normalizes=False))


def test_the_recipe_for_fairseq():
    torch.manual_seed(0)
    state, x = {"moe_layer.gate.wg.weight": numbers(E, D)}, numbers(T, D)
    for e in range(E):
        state |= {f"moe_layer.experts.{e}.fc1.weight": numbers(WIDTH, D), f"moe_layer.experts.{e}.fc1.bias": numbers(WIDTH)}
        state |= {f"moe_layer.experts.{e}.fc2.weight": numbers(D, WIDTH), f"moe_layer.experts.{e}.fc2.bias": numbers(D)}

    def expert(e, row):
        w = [state[f"moe_layer.experts.{e}.{name}"] for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")]
        return w[2] @ F.relu(w[0] @ row + w[1]) + w[3]

    layer = recipe("fairseq")["from_fairseq"](state, "moe_layer.")
    assert_close(layer(x), mixed(x, x @ state["moe_layer.gate.wg.weight"].T, expert))
