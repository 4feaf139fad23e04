"""Every class of experts in transformers: the same outputs and gradients as its own eager code."""

import importlib
import inspect
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import SkipTest

try:
    import torch
    import transformers
except ImportError as error:
    raise SkipTest(str(error)) from error

import moeworks.transformers as backend
from transformers.integrations import moe as transformers_moe

EXPERTS, TOKENS, CHOICES = 4, 9, 2
SIZES = {
    "hidden_size": 16,
    "moe_hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "moe_latent_size": None,
}
# Classes that take two grouped products (this one has a norm behind each expert). All others are fused.
TWO_PRODUCTS = {"MuseSparkExperts"}


def all_classes():
    """Returns the module's name and the class of all decorated classes."""
    found = []
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in re.findall(r"^@use_experts_implementation[^\n]*\nclass (\w+)", file.read_text(), re.MULTILINE):
            found.append((file.parent.name, name))
    return found


def experts_class(family, name):
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def knows(config, key):
    try:
        return hasattr(config, key)
    except Exception:  # Sizes that may differ between layers are there, but refuse to be read.
        return True


def config_of(family, cls):
    """Returns a small configuration with the family's own activation."""
    wanted = set(re.findall(r"config\.(\w+)", inspect.getsource(cls.__init__.__wrapped__)))
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    usual_configs = []
    for name, config in vars(module).items():
        if inspect.isclass(config) and name.endswith("Config") and name != "PreTrainedConfig":
            try:
                usual_configs.append(config())
            except Exception:
                continue
    # Of a family with several models that of the experts comes first, which knows most of what they ask for.
    usual_configs.sort(key=lambda usual: -sum(knows(usual, key) for key in wanted))
    values = {}
    for usual in usual_configs:
        others = wanted - values.keys() - SIZES.keys()
        values.update({key: getattr(usual, key) for key in others if hasattr(usual, key)})
        # Activations of some families take the configuration, too.
        values = vars(usual) | values
    values.update({key: SIZES[key] for key in wanted if key in SIZES})
    missing = wanted - values.keys()
    assert not missing, f"{family}: {missing}"
    return SimpleNamespace(**values, _experts_implementation="moeworks")


def experts_of(family, name, dtype=torch.float32):
    cls = experts_class(family, name)
    torch.manual_seed(0)
    module = cls(config_of(family, cls))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return module.to(dtype)


def inputs_of(module, dtype=torch.float32, num_tokens=TOKENS):
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:CHOICES] for _ in range(num_tokens)])
    x = (torch.randn(num_tokens, 16) * 2).to(dtype).requires_grad_()
    weights = torch.rand(num_tokens, CHOICES).to(dtype).requires_grad_()
    return x, ids, weights


def outcome(call, module, inputs, dy):
    """Returns the output and all gradients; zeros for what has none."""
    x, ids, weights = inputs
    wanted = [x, weights, *module.parameters()]
    y = call(x, ids, weights)
    grads = torch.autograd.grad(y, wanted, dy.to(y.dtype), allow_unused=True)
    return [y] + [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, grads, strict=True)]


def assert_close(found, wanted, bound, what):
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{what}, tensor {index}: {a.dtype}, {b.dtype}"
        error = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        limit = bound * max(1.0, b.double().abs().max().item() if b.numel() else 0.0)
        assert error <= limit, f"{what}, tensor {index}: {error:.2e} is over {limit:.2e}"


def test_all_classes_match_their_eager_code_in_f32():
    classes = all_classes()
    assert len(classes) >= 60, len(classes)
    for family, name in classes:
        module = experts_of(family, name)
        inputs, dy = inputs_of(module), torch.randn(TOKENS, 16)
        eager = type(module).forward.__wrapped__
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = outcome(module, module, inputs, dy)
        wanted = outcome(lambda *args: eager(module, *args), module, inputs, dy)
        assert_close(found, wanted, 1e-4, name)


def test_all_classes_match_their_eager_code_without_gradients():
    for family, name in all_classes():
        module = experts_of(family, name)
        eager = type(module).forward.__wrapped__
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for num_tokens in (1, TOKENS):
                inputs = inputs_of(module, num_tokens=num_tokens)
                assert_close([module(*inputs)], [eager(module, *inputs)], 1e-4, name)


def test_bf16_is_as_close_to_f64_as_eager_bf16():
    grouped_mm = transformers_moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    for family, name in all_classes():
        exact_module = experts_of(family, name, torch.bfloat16).double()
        module = experts_of(family, name, torch.bfloat16)
        inputs = inputs_of(module, torch.bfloat16)
        dy = torch.randn(TOKENS, 16).bfloat16()
        eager = type(module).forward.__wrapped__
        exact_inputs = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = outcome(module, module, inputs, dy)
        # This class computes in f32 whatever the weights' type: what is compared with it is transformers' own products.
        reference = grouped_mm if name == "OpenAIPrivacyFilterExperts" else eager
        wanted = outcome(lambda *args, call=reference: call(module, *args), module, inputs, dy)
        exact = outcome(lambda *args: eager(exact_module, *args), exact_module, exact_inputs, dy.double())
        for index, (a, b, c) in enumerate(zip(found, wanted, exact, strict=True)):
            assert a.dtype == b.dtype, f"{name}, tensor {index}"
            ours, theirs = ((t.double() - c).norm().item() for t in (a, b))
            floor = 2e-3 * c.norm().item()
            assert ours <= 1.5 * theirs + floor, f"{name}, tensor {index}: {ours:.2e}, eager {theirs:.2e}"


def test_the_list_of_fused_classes_is_as_pinned():
    found = set()
    for family, name in all_classes():
        if backend.fused_settings(experts_of(family, name)) is None:
            found.add(name)
    assert found == TWO_PRODUCTS, f"new: {found - TWO_PRODUCTS}, gone: {TWO_PRODUCTS - found}"


def test_fused_classes_take_the_kernels_in_both_passes():
    import moeworks.ops as ops

    def refuse(*args, **settings):
        raise AssertionError("took two products")

    two_products, fused = ops.two_products, 0
    ops.two_products = refuse
    try:
        for family, name in all_classes():
            if name in TWO_PRODUCTS:
                continue
            for dtype in (torch.float32, torch.bfloat16):
                module = experts_of(family, name, dtype)
                inputs = inputs_of(module, dtype)
                outcome(module, module, inputs, torch.randn(TOKENS, 16))
                with torch.no_grad():
                    module(*inputs)
            fused += 1
    finally:
        ops.two_products = two_products
    assert fused >= 60, fused


def test_a_changed_gate_or_activation_is_noticed():
    module = experts_of("mixtral", "MixtralExperts")
    assert backend.fused_settings(module) == {"activation": "swiglu", "layout": "stacked"}
    module.act_fn = torch.nn.Tanh()
    assert backend.fused_settings(module) is None
    oss = experts_of("gpt_oss", "GptOssExperts")
    assert backend.fused_settings(oss)["limit"] == 7.0
    oss.limit = 3.0
    assert backend.fused_settings(oss)["limit"] == 3.0


def test_ids_of_other_ranks_add_nothing():
    # The fixture of transformers' own test of expert parallelism.
    module = experts_of("mixtral", "MixtralExperts")
    x = torch.randn(3, 16).requires_grad_()
    ids = torch.tensor([[0, 4], [1, 2], [4, 3]])
    weights = torch.tensor([[0.7, 0.0], [0.4, 0.6], [0.0, 0.9]]).requires_grad_()
    eager = type(module).forward.__wrapped__
    inputs, dy = (x, ids, weights), torch.randn(3, 16)
    found = outcome(module, module, inputs, dy)
    assert_close(found, outcome(lambda *args: eager(module, *args), module, inputs, dy), 1e-4, "sentinels")
    is_foreign = ids == 4
    assert (found[2][is_foreign] == 0).all() and (found[2][~is_foreign] != 0).all()


def tiny_model(implementation):
    config = transformers.OlmoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)


def test_a_model_generates_the_tokens_of_eager_and_trains_alike():
    eager, ours = tiny_model("eager"), tiny_model("moeworks")
    ids = torch.arange(1, 13).view(2, 6)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(eager.eval().generate(ids, **options), ours.eval().generate(ids, **options))
    grads = []
    for model in (eager, ours):
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert_close(grads[1], grads[0], 1e-4, "a training step")


def test_a_loaded_model_switches_and_its_files_stay():
    import tempfile

    model = tiny_model("eager").eval()
    ids = torch.arange(1, 7).view(1, 6)
    wanted = model(ids).logits
    assert torch.allclose(backend.enable(model)(ids).logits, wanted, atol=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="moeworks").eval()
        assert torch.allclose(again(ids).logits, wanted, atol=1e-4)


def test_gradient_checkpointing_gives_the_same_gradients():
    plain, checkpointed = tiny_model("moeworks").train(), tiny_model("moeworks").train()
    checkpointed.gradient_checkpointing_enable()
    ids = torch.arange(1, 13).view(2, 6)
    for model in (plain, checkpointed):
        model(input_ids=ids, labels=ids).loss.backward()
    pairs = zip(plain.parameters(), checkpointed.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_both_registries_know_the_name():
    from transformers.integrations import finegrained_fp8, moe

    backend.register()
    assert "moeworks" in moe.ALL_EXPERTS_FUNCTIONS
    assert "moeworks" in finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS


def test_one_warning_for_a_class_without_a_kernel():
    module = experts_of("muse_spark", "MuseSparkExperts")
    backend._WARNED.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            module(*inputs_of(module))
    messages = [str(warning.message) for warning in caught if "moeworks" in str(warning.message)]
    assert len(messages) == 1 and "MuseSparkExperts" in messages[0], messages
