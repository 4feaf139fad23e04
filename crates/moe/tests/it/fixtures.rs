//! Comparison with `transformers`: whole sparse blocks with their gradients, and losses (fixtures/make.py).

use moeworks_moe::{
    LossGrad, MoeConfig, MoeLayer, MoeWeights, RouterInput, ScoreOrder, WgradTarget, balance_loss_per_layer,
    balance_loss_pooled, z_loss,
};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Tensor};
use serde_json::Value;

use crate::reference::{RefShared, RefWeights};
use crate::{assert_close, config, layer_weights, tensor};

fn read(name: &str) -> Value {
    let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn size(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn weights(value: &Value) -> RefWeights {
    let list = |key: &str| numbers(&value[key]);
    let shared =
        value.get("shared_down").map(|_| RefShared { gate_up: list("shared_gate_up"), down: list("shared_down") });
    RefWeights { router: list("router"), gate_up: list("gate_up"), down: list("down"), shared, bias: Vec::new() }
}

#[test]
fn blocks_of_five_families_give_their_outputs_and_gradients() {
    let file = read("blocks.json");
    for case in file["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let reference = weights(&case["weights"]);
        let shape = ["width", "expert_width", "num_experts", "top_k"].map(|key| size(&file[key]));
        let mut config = config(shape[0], shape[1], shape[2], shape[3]);
        config.normalize_weights = case["normalize_weights"].as_bool().unwrap();
        if case["score_order"] == "top_k_then_softmax" {
            config.score_order = ScoreOrder::TopKThenSoftmax;
        }
        config.shared_width = if reference.shared.is_some() { size(&file["shared_width"]) } else { 0 };
        let coefs = ["balance_coef", "z_coef"].map(|key| file[key].as_f64().unwrap() as f32);
        check_block(name, &config, &reference, case, coefs);
    }
}

fn check_block(name: &str, config: &MoeConfig, reference: &RefWeights, case: &Value, [balance_coef, z_coef]: [f32; 2]) {
    let ctx = Context::cpu(2);
    let layer = MoeLayer::new(config.clone()).unwrap();
    let weights = layer_weights(&ctx, config, reference);
    let input = |key: &str| {
        let values = numbers(&case[key]);
        tensor(&ctx, &[values.len() / config.width, config.width], &values)
    };
    let (y, saved) = layer.forward(&ctx, &weights, &input("x"), &RouterInput::default());
    assert_close(&format!("{name}: y"), &y, &numbers(&case["y"]), 1e-5);
    let stats = saved.stats();
    let mut balance = balance_loss_pooled(&[&stats], balance_coef);
    assert!((balance.value - case["balance"].as_f64().unwrap()).abs() < 1e-5, "{name}: balance");
    assert!((z_loss(&[&stats]) - case["z"].as_f64().unwrap()).abs() < 1e-4, "{name}: z");
    let losses = LossGrad { balance: balance.gradients.remove(0), z: z_coef, ..LossGrad::default() };
    let (dx, task) = layer.backward(&ctx, &weights, &saved, &input("dy"), &losses);
    assert_close(&format!("{name}: dx"), &dx, &numbers(&case["dx"]), 1e-5);
    let mut grads = MoeWeights::zeros(&ctx, config, DType::F32);
    task.run(&ctx, WgradTarget::new(Write::Replace, &mut grads));
    let mut expected = self::weights(&case["grads"]);
    for (i, (gradient, expected)) in grads.tensors().iter().zip(expected.lists_mut()).enumerate() {
        assert_close(&format!("{name}: gradient of weight {i}"), gradient, expected, 1e-5);
    }
}

/// Creates a layer whose router is the identity, so that its input is the logits. Without a gradient of the output
/// the input's gradient is the logits' gradient.
fn logits_layer(num_experts: usize, top_k: usize) -> (MoeLayer, impl Fn(&Context) -> MoeWeights) {
    let config = config(num_experts, 1, num_experts, top_k);
    let weights = {
        let config = config.clone();
        move |ctx: &Context| {
            let mut weights = MoeWeights::zeros(ctx, &config, DType::F32);
            let router = weights.router.f32s_mut();
            (0..num_experts).for_each(|e| router[e * num_experts + e] = 1.0);
            weights
        }
    };
    (MoeLayer::new(config).unwrap(), weights)
}

fn logit_grads(layer: &MoeLayer, ctx: &Context, weights: &MoeWeights, x: &Tensor, losses: &LossGrad) -> Tensor {
    let (_, saved) = layer.forward(ctx, weights, x, &RouterInput::default());
    let dy = ctx.zeros(x.shape(), DType::F32);
    layer.backward(ctx, weights, &saved, &dy, losses).0
}

#[test]
fn losses_and_their_gradients_are_those_of_transformers() {
    let file = read("losses.json");
    let (num_experts, top_k) = (size(&file["num_experts"]), size(&file["top_k"]));
    let ctx = Context::cpu(2);
    let inputs: Vec<Tensor> = file["logits"]
        .as_array()
        .unwrap()
        .iter()
        .map(numbers)
        .map(|logits| tensor(&ctx, &[logits.len() / num_experts, num_experts], &logits))
        .collect();
    let value = |key: &str| file[key].as_f64().unwrap();

    let (layer, weights) = logits_layer(num_experts, top_k);
    let weights = weights(&ctx);
    let stats: Vec<_> =
        inputs.iter().map(|x| layer.forward(&ctx, &weights, x, &RouterInput::default()).1.stats()).collect();
    let pooled = balance_loss_pooled(&stats.iter().collect::<Vec<_>>(), 1.0);
    assert!((pooled.value - value("pooled")).abs() < 1e-6);
    for ((x, balance), expected) in inputs.iter().zip(pooled.gradients).zip(file["pooled_grads"].as_array().unwrap()) {
        let dx = logit_grads(&layer, &ctx, &weights, x, &LossGrad { balance, z: 0.0, ..LossGrad::default() });
        assert_close("pooled", &dx, &numbers(expected), 1e-5);
    }

    assert!((z_loss(&[&stats[0]]) - value("z")).abs() < 1e-5);
    let dx = logit_grads(
        &layer,
        &ctx,
        &weights,
        &inputs[0],
        &LossGrad { balance: Vec::new(), z: 1.0, ..LossGrad::default() },
    );
    assert_close("z", &dx, &numbers(&file["z_grad"]), 1e-5);

    let (layer, _) = logits_layer(num_experts, 1);
    let stats = layer.forward(&ctx, &weights, &inputs[0], &RouterInput::default()).1.stats();
    let mut switch = balance_loss_per_layer(&[&stats], 1.0);
    assert!((switch.value - value("switch_top_1")).abs() < 1e-6);
    let losses = LossGrad { balance: switch.gradients.remove(0), z: 0.0, ..LossGrad::default() };
    let dx = logit_grads(&layer, &ctx, &weights, &inputs[0], &losses);
    assert_close("switch", &dx, &numbers(&file["switch_top_1_grad"]), 1e-5);
}
