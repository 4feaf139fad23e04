//! Edge cases: no tokens, non-finite numbers, jitter, accumulated gradients, memory in steady state.

use moeworks_moe::{LossGrad, MoeConfig, MoeLayer, MoeWeights, Ramp, RouterInput, RoutingError, WgradTarget};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::reference::{RefLoss, RefWeights, Reference};
use crate::{assert_close, config, jitter_factor, layer_weights, tensor};

fn values(seed: u64, count: usize) -> Vec<f64> {
    let random = Random::new(seed, Purpose::Test, 0);
    (0..count as u64).map(|i| f64::from(random.normal(i))).collect()
}

fn weights(config: &MoeConfig) -> RefWeights {
    let (e, d, f) = (config.num_experts, config.width, config.expert_width);
    RefWeights {
        router: values(1, e * d),
        gate_up: values(2, e * 2 * f * d),
        down: values(3, e * d * f),
        shared: None,
        bias: Vec::new(),
    }
}

#[test]
fn no_token_is_no_work() {
    let ctx = Context::cpu(2);
    let mut config = config(4, 3, 5, 2);
    config.shared_width = 2;
    config.capacity_factor = 1.0;
    let layer = MoeLayer::new(config.clone()).unwrap();
    let weights = MoeWeights::random(&ctx, &config, 1, 0.1);
    let none = ctx.zeros(&[0, 4], DType::F32);
    let (y, saved) = layer.forward(&ctx, &weights, &none, &RouterInput::default());
    assert_eq!(y.shape(), [0, 4]);
    let stats = saved.stats();
    assert_eq!((stats.num_tokens, stats.z, stats.mean_entropy, &stats.mean_prob[..]), (0, 0.0, 0.0, &[0.0; 5][..]));
    let losses = LossGrad { balance: vec![1.0; 5], z: 1.0, ..LossGrad::default() };
    let (dx, task) = layer.backward(&ctx, &weights, &saved, &none, &losses);
    assert_eq!(dx.shape(), [0, 4]);
    let mut grads = MoeWeights::random(&ctx, &config, 2, 0.1);
    task.run(&ctx, WgradTarget::new(Write::Replace, &mut grads));
    assert!(grads.tensors().iter().all(|gradient| gradient.f32s().iter().all(|&g| g == 0.0)));
}

/// A non-finite token spoils its own row, no other row, and no expert id.
#[test]
fn a_token_that_is_not_finite_spoils_itself_alone() {
    let ctx = Context::cpu(2);
    let config = config(4, 3, 5, 2);
    let layer = MoeLayer::new(config.clone()).unwrap();
    let weights = layer_weights(&ctx, &config, &weights(&config));
    let good = values(4, 24);
    let (expected, _) = layer.forward(&ctx, &weights, &tensor(&ctx, &[6, 4], &good), &RouterInput::default());
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e38] {
        let mut x = good.clone();
        x[9] = bad; // token 2
        let x = tensor(&ctx, &[6, 4], &x);
        let (y, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
        assert!(saved.routing().expert_ids().iter().all(|&id| id < 5));
        for t in [0, 1, 3, 4, 5] {
            assert_eq!(y.f32s()[t * 4..][..4], expected.f32s()[t * 4..][..4], "token {t} beside {bad}");
        }
        if !bad.is_finite() {
            assert!(y.f32s()[8..12].iter().any(|y| y.is_nan()), "{bad} does not vanish");
        }
        let losses = LossGrad { balance: vec![0.1; 5], z: 0.1, ..LossGrad::default() };
        let (_, task) = layer.backward(&ctx, &weights, &saved, &x, &losses);
        task.run(&ctx, WgradTarget::new(Write::Replace, &mut MoeWeights::zeros(&ctx, &config, DType::F32)));
    }
}

#[test]
fn all_logits_nan_choose_the_first_experts() {
    let ctx = Context::cpu(1);
    let config = config(3, 2, 5, 3);
    let layer = MoeLayer::new(config.clone()).unwrap();
    let mut weights = MoeWeights::zeros(&ctx, &config, DType::F32);
    weights.router.f32s_mut().fill(f32::NAN);
    let x = tensor(&ctx, &[1, 3], &[1.0, 2.0, 3.0]);
    let (_, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
    assert_eq!(saved.routing().expert_ids(), [0, 1, 2]);
}

#[test]
fn a_decision_by_logits_that_are_not_finite_is_refused() {
    let ctx = Context::cpu(1);
    let layer = MoeLayer::new(config(3, 2, 5, 3)).unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut weights = MoeWeights::zeros(&ctx, layer.config(), DType::F32);
        weights.router.f32s_mut()[3 * 3 + 1] = bad;
        let x = tensor(&ctx, &[2, 3], &[1.0, 0.0, 3.0, 1.0, 2.0, 3.0]);
        let error = layer.route(&ctx, &weights, &x, &RouterInput::default()).unwrap_err();
        // The first token's logit is 0 times a non-finite weight.
        assert!(matches!(error, RoutingError::NotFinite { token: 0, expert: 3, .. }), "{error}");
    }
    let error = RoutingError::NotFinite { token: 4, expert: 1, logit: f32::INFINITY };
    assert_eq!(error.to_string(), "the router's logit of token 4 for expert 1 is inf: must be a finite number");
}

#[test]
fn jitter_is_on_the_routers_input_alone() {
    let ctx = Context::cpu(2);
    let (t, d) = (9, 4);
    let mut config = config(d, 3, 5, 2);
    config.jitter = Ramp::constant(0.25);
    let layer = MoeLayer::new(config.clone()).unwrap();
    let random = Random::new(7, Purpose::Router, 3);
    let noise: Vec<f64> = (0..(t * d) as u64).map(|i| jitter_factor(&random, i, 0.25)).collect();
    assert!(noise.iter().all(|factor| (0.75..=1.25).contains(factor)));
    let (ref_weights, x, dy) = (weights(&config), values(4, t * d), values(5, t * d));
    let weights = layer_weights(&ctx, &config, &ref_weights);
    for noise in [Some(noise), None] {
        let reference = Reference { config: &config, noise: noise.as_deref() };
        let input = tensor(&ctx, &[t, d], &x);
        let (y, saved) = layer.forward(
            &ctx,
            &weights,
            &input,
            &RouterInput { noise: noise.is_some().then_some(random), ..RouterInput::default() },
        );
        assert_close("y", &y, &reference.forward(&ref_weights, &x).y, 1e-5);
        let loss = RefLoss { dy: &dy, balance: &[0.3, -0.2, 0.0, 0.1, 0.5], z: 0.2, sequence: 0.0, seq_len: 0 };
        let losses = LossGrad { balance: vec![0.3, -0.2, 0.0, 0.1, 0.5], z: 0.2, ..LossGrad::default() };
        let (dx, task) = layer.backward(&ctx, &weights, &saved, &tensor(&ctx, &[t, d], &dy), &losses);
        let expected = reference.backward(&ref_weights, &x, &loss);
        assert_close("dx", &dx, &expected.dx, 1e-5);
        let mut grads = MoeWeights::zeros(&ctx, &config, DType::F32);
        task.run(&ctx, WgradTarget::new(Write::Replace, &mut grads));
        assert_close("router", &grads.router, &expected.grads.router, 1e-5);
    }
}

#[test]
fn gradients_are_added_when_asked() {
    let ctx = Context::cpu(2);
    let mut config = config(5, 4, 6, 2);
    config.shared_width = 3;
    let layer = MoeLayer::new(config.clone()).unwrap();
    let weights = MoeWeights::random(&ctx, &config, 3, 0.5);
    let (x, dy) = (tensor(&ctx, &[8, 5], &values(1, 40)), tensor(&ctx, &[8, 5], &values(2, 40)));
    let (_, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
    let run = |write: Write, grads: &mut MoeWeights| {
        let (_, task) = layer.backward(&ctx, &weights, &saved, &dy, &LossGrad::default());
        task.run(&ctx, WgradTarget::new(write, grads));
    };
    let mut once = MoeWeights::random(&ctx, &config, 9, 1.0);
    run(Write::Replace, &mut once);
    let mut twice = MoeWeights::zeros(&ctx, &config, DType::F32);
    run(Write::Add, &mut twice);
    run(Write::Add, &mut twice);
    for (twice, once) in twice.tensors().iter().zip(once.tensors()) {
        let expected: Vec<f64> = once.f32s().iter().map(|&g| 2.0 * f64::from(g)).collect();
        assert_close("twice the gradient", twice, &expected, 1e-5);
    }
}

#[test]
fn a_step_in_steady_state_takes_no_memory_from_the_system() {
    // With several threads the first steps may run fewer tasks at once than a later one, each with its own memory.
    let ctx = Context::cpu(1);
    let mut config = config(16, 8, 6, 2);
    config.shared_width = 8;
    config.jitter = Ramp::constant(0.01);
    let layer = MoeLayer::new(config.clone()).unwrap();
    let weights = MoeWeights::random(&ctx, &config, 3, 0.5);
    let mut grads = MoeWeights::zeros(&ctx, &config, DType::F32);
    let x: Tensor = tensor(&ctx, &[300, 16], &values(1, 4800));
    let mut step = |number| {
        let noise = Random::new(1, Purpose::Router, number);
        let (y, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::with_noise(noise));
        let (_, task) = layer.backward(&ctx, &weights, &saved, &y, &LossGrad::default());
        task.run(&ctx, WgradTarget::new(Write::Add, &mut grads));
        ctx.pool().stats().system_allocations
    };
    // Packing memory depends on how many rows an expert has, which differs a little from step to step.
    let warm = (0..4).map(&mut step).max();
    assert_eq!([0, 1, 2].map(|number| Some(step(number))), [warm; 3]);
}
