"""LoRA adapters of PEFT on stacked experts: the gradients of eager, without the whole weight."""

from unittest import SkipTest

try:
    import peft
    import torch
    import transformers
except ImportError as error:
    raise SkipTest(str(error)) from error

import moeworks.transformers
from moeworks import ops

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def config():
    return transformers.OlmoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=None,
    )


def adapted(implementation, targets=TARGETS):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(), experts_implementation=implementation)
    lora = peft.LoraConfig(r=4, lora_alpha=12, target_modules=[], target_parameters=targets)
    model = peft.get_peft_model(model, lora)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return model


IDS = torch.arange(1, 13).view(2, 6)


def gradients(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def test_the_gradients_of_both_factors_are_those_of_eager():
    for targets in (TARGETS, TARGETS[:1], TARGETS[1:]):
        wanted_loss, wanted = gradients(adapted("eager", targets))
        loss, found = gradients(adapted("moeworks", targets))
        assert abs(loss - wanted_loss) < 1e-5 and found.keys() == wanted.keys() and found
        for name, grad in found.items():
            assert "lora_" in name
            error = (grad - wanted[name]).abs().max().item()
            assert error <= 1e-4 * max(1.0, wanted[name].abs().max().item()), f"{name}: {error:.2e}"
            assert grad.abs().max() > 0, name


def test_the_whole_weight_is_not_made():
    model = adapted("moeworks")
    seen, product = [], ops.grouped_mm

    def watched(a, b, *, offs):
        seen.append(b)
        return product(a, b, offs=offs)

    ops.grouped_mm = watched
    try:
        gradients(model)
    finally:
        ops.grouped_mm = product
    # Each of two layers multiplies by two frozen stacks and two pairs of factors.
    assert len(seen) == 12 and sum(not b.requires_grad for b in seen) == 4


def test_an_adapter_can_be_off_and_merged():
    eager, ours = adapted("eager").eval(), adapted("moeworks").eval()
    with torch.no_grad():
        wanted = eager(IDS).logits
        assert torch.allclose(ours(IDS).logits, wanted, atol=1e-4)
        with ours.disable_adapter(), eager.disable_adapter():
            base = eager(IDS).logits
            assert torch.allclose(ours(IDS).logits, base, atol=1e-4) and not torch.allclose(base, wanted, atol=1e-3)
        assert torch.allclose(ours.merge_and_unload()(IDS).logits, wanted, atol=1e-4)
