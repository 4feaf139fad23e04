"""Losses that Tutel recorded (its tests/test_baseline.json), to the three decimals that it compares.

They are older than its present first weights: experts are those of ``torch.nn.Linear``, with random biases, and the
learning rate is 1e-5.
"""

from unittest import SkipTest

try:
    import torch
except ImportError as error:
    raise SkipTest(str(error)) from error

import torch.nn.functional as F

from moeworks.tutel import moe


def golden(count, top, batch, num_steps, dtype):
    """Returns the losses of Tutel's helloworld with the old first weights and learning rate."""
    torch.set_default_dtype(dtype)
    try:
        experts = {
            "type": "ffn",
            "num_experts_per_device": count,
            "hidden_size_per_expert": 2048,
            "activation_fn": lambda v: F.relu(v),
        }
        layer = moe.moe_layer({"type": "top", "k": top}, 2048, experts, parallel_type="data")
        torch.manual_seed(1)
        old = {"_num_global_experts": torch.tensor(count)}
        pairs = [(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 2048)) for _ in range(count)]
        for number in (1, 2):
            parts = [pair[number - 1] for pair in pairs]
            weights = [part.weight if number == 1 else part.weight.T for part in parts]
            old[f"experts.batched_fc{number}_w"] = torch.stack(weights).detach()
            old[f"experts.batched_fc{number}_bias"] = torch.stack([part.bias for part in parts]).detach()
        torch.manual_seed(1)
        old["gates.0.wg.weight"] = torch.nn.Linear(2048, count, bias=False).weight.detach()
        layer.load_state_dict(old)
        torch.manual_seed(0)
        x = torch.randn(batch, 1024, 2048, dtype=torch.float32).to(dtype)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-5)
        found = []
        for step in range(num_steps):
            with torch.set_grad_enabled(num_steps > 1):
                y = F.log_softmax(layer(x).sum(2), 1)
                loss = F.nll_loss(y, torch.zeros(batch, dtype=torch.int64))
            found.append(loss.item())
            if step + 1 < num_steps:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return found
    finally:
        torch.set_default_dtype(torch.float32)


def assert_golden(found, wanted):
    assert [f"{loss:.3f}" for loss in found] == [f"{loss:.3f}" for loss in wanted], found


def test_golden_losses_of_four_steps_in_f64():
    assert_golden(golden(2, 2, 1, 4, torch.float64), [27.448386, 16.627041, 7.467061, 0.576225])


def test_golden_loss_of_one_expert():
    # One expert is the choice of every token, for one choice (case 2) as for two (case 6): the losses are the same.
    for top in (1, 2):
        assert_golden(golden(1, top, 16, 1, torch.float32), [29.985006])


def test_golden_losses_of_two_experts_that_drop_tokens():
    # The second loss has passed a gradient of the fused kernels.
    assert_golden(golden(2, 1, 16, 2, torch.float32), [22.076483, 21.387951])


def test_golden_loss_of_two_choices():
    assert_golden(golden(2, 2, 16, 1, torch.float32), [24.080132])
