//! DeepSeek's rules against the expected figures: balance by a bias, and experts limited to groups.

use std::collections::BTreeSet;

use moeworks_moe::{
    BalanceLoss, ConfigError, GroupScore, MoeConfig, MoeLayer, MoeWeights, Ramp, RouterConfig, RouterInput,
    ScoreFunction, communication_loss, e_max_violation, group_balance_loss, next_state,
};
use moeworks_ops::Context;
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::config;

/// Creates a layer whose input is its logits.
fn identity(ctx: &Context, config: &MoeConfig) -> (MoeLayer, MoeWeights) {
    let mut weights = MoeWeights::zeros(ctx, config, DType::F32);
    let e = config.num_experts;
    (0..e).for_each(|i| weights.router.f32s_mut()[i * e + i] = 1.0);
    (MoeLayer::new(config.clone()).unwrap(), weights)
}

/// With 32 experts, 4 per token, 512 tokens a step and logits with a skew N(0, 0.5), the busiest expert has almost
/// four times the mean load without a bias. A rate of 0.005 reduces that to what sampling leaves.
#[test]
fn a_bias_moved_by_the_load_balances_the_experts() {
    let ctx = Context::cpu(2);
    let (t, e) = (512, 32);
    let mut config = config(e, 1, e, 4);
    let (scores, bias_update_rate) = (ScoreFunction::Sigmoid, Ramp::constant(0.005));
    config.router = RouterConfig { scores, expert_bias: true, bias_update_rate, ..RouterConfig::default() };
    let (layer, mut weights) = identity(&ctx, &config);
    let skew = Random::new(3, Purpose::Test, 0);
    let mut violation = |step: u64| {
        let noise = Random::new(4, Purpose::Test, step);
        let logit = |i: u64| noise.normal(i) + 0.5 * skew.normal(i % e as u64);
        let x: Vec<f32> = (0..(t * e) as u64).map(logit).collect();
        let x = Tensor::from_slice(ctx.pool(), &[t, e], &x);
        let stats = layer.forward(&ctx, &weights, &x, &RouterInput::default()).1.stats();
        next_state(&config, &mut weights.state, std::slice::from_ref(&stats), 0, 0.5);
        e_max_violation(&stats.tokens_per_expert)
    };
    assert!(violation(0) > 1.5);
    let late: f64 = (1..150).map(&mut violation).skip(100).sum::<f64>() / 49.0;
    assert!(late < 0.4, "{late}");
    let bias = weights.state[0].tensor.f32s();
    assert!(bias.iter().all(|bias| (bias / 0.005 - (bias / 0.005).round()).abs() < 1e-2), "whole steps of the rate");
}

/// Returns the mean and the maximum of groups that the 8 of 256 experts of a token touch when logits are random.
fn mean_groups(num_groups: usize, top_groups: usize) -> (f64, usize) {
    let ctx = Context::cpu(2);
    let (t, e) = (2000, 256);
    let mut config = config(e, 1, e, 8);
    let (scores, group_score) = (ScoreFunction::Sigmoid, GroupScore::TopTwo);
    config.router = RouterConfig { scores, num_groups, top_groups, group_score, ..RouterConfig::default() };
    let (layer, weights) = identity(&ctx, &config);
    let random = Random::new(5, Purpose::Test, 1);
    let x: Vec<f32> = (0..(t * e) as u64).map(|i| random.normal(i)).collect();
    let x = Tensor::from_slice(ctx.pool(), &[t, e], &x);
    let routing = layer.route(&ctx, &weights, &x, &RouterInput::default()).unwrap();
    let groups: Vec<usize> = (0..t)
        .map(|t| routing.choices(t).map(|(id, _)| id as usize / (e / num_groups)).collect::<BTreeSet<_>>().len())
        .collect();
    (groups.iter().sum::<usize>() as f64 / t as f64, groups.into_iter().max().unwrap())
}

#[test]
fn groups_limit_the_nodes_that_a_token_goes_to() {
    // The mean of a hypergeometric distribution: for 8 groups 8 (1 - C(224, 8) / C(256, 8)).
    for (num_groups, expected) in [(4, 3.614), (8, 5.295), (16, 6.524), (32, 7.267)] {
        let (mean, _) = mean_groups(num_groups, num_groups);
        assert!((mean - expected).abs() < 0.06, "{num_groups} groups: {mean}");
    }
    let (mean, most) = mean_groups(8, 4);
    assert!(most <= 4 && mean > 3.0, "{mean}, at most {most}");
}

/// Compares with equations 26 to 31 of DeepSeek-V2 (2405.04434), computed from the routing. Zero-computation experts
/// are in no group.
#[test]
fn the_losses_over_groups_are_those_of_their_equations() {
    let ctx = Context::cpu(1);
    let (t, d, e, g) = (40, 8, 6, 3);
    let random = Random::new(6, Purpose::Test, 0);
    let x: Vec<f32> = (0..(t * d) as u64).map(|i| random.normal(i)).collect();
    let x = Tensor::from_slice(ctx.pool(), &[t, d], &x);
    for (top_groups, zero_experts) in [(1, 0), (2, 0), (3, 0), (3, 2)] {
        let mut config = config(d, 4, e, 2);
        config.router = RouterConfig { num_groups: g, top_groups, zero_experts, ..RouterConfig::default() };
        let weights = MoeWeights::random(&ctx, &config, 3, 1.0);
        let (_, saved) = MoeLayer::new(config.clone()).unwrap().forward(&ctx, &weights, &x, &RouterInput::default());
        let (mut chosen, mut sent, mut probs) = ([0.0; 3], [0.0; 3], [0.0; 3]);
        for (token, of_token) in saved.probs().chunks(config.num_choosable()).enumerate() {
            let ids: Vec<u32> = saved.routing().choices(token).map(|(id, _)| id).collect();
            for group in 0..g {
                let count = ids.iter().filter(|id| **id as usize / 2 == group).count();
                chosen[group] += count as f64;
                sent[group] += f64::from(u8::from(count > 0));
                probs[group] += f64::from(of_token[2 * group] + of_token[2 * group + 1]) / t as f64;
            }
        }
        let stats = saved.stats();
        let check = |name: &str, loss: &BalanceLoss, loads: [f64; 3]| {
            let expected: f64 = loads.iter().zip(probs).map(|(load, p)| load * p).sum();
            assert!((loss.value - expected).abs() < 1e-6, "{name}: {}, expected {expected}", loss.value);
            for (i, gradient) in loss.gradients[0].iter().enumerate() {
                let expected = loads.get(i / 2).unwrap_or(&0.0) * 0.5 / t as f64;
                assert!((f64::from(*gradient) - expected).abs() < 1e-7, "{name}, expert {i}: {gradient}, {expected}");
            }
        };
        let all: f64 = chosen.iter().sum();
        check("devices", &group_balance_loss(&[&stats], g, 0.5), chosen.map(|n| n * g as f64 / all));
        let share = g as f64 / (top_groups * t) as f64;
        check("communication", &communication_loss(&[&stats], g, top_groups, 0.5), sent.map(|n| n * share));
    }
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let error = |change: &dyn Fn(&mut RouterConfig)| {
        let mut config = config(4, 2, 8, 3);
        change(&mut config.router);
        let ConfigError { setting, value, expected } = MoeLayer::new(config).unwrap_err();
        format!("{setting} = {value}: {expected}")
    };
    assert_eq!(error(&|r| r.num_groups = 3), "router.num_groups = 3: must divide the number of experts, 8");
    assert_eq!(error(&|r| r.num_groups = 0), "router.num_groups = 0: must be from 1 to 1048576");
    assert_eq!(error(&|r| r.top_groups = 2), "router.top_groups = 2: must be from 1 to router.num_groups, 1");
    assert_eq!(
        error(&|r| r.num_groups = 4),
        "router.top_groups = 1: must leave a token at least top_k = 3 experts, but leaves 2"
    );
    assert_eq!(error(&|r| r.routed_scale = 0.0), "router.routed_scale = 0: must be a number above 0");
    assert_eq!(
        error(&|r| r.bias_update_rate = Ramp::constant(-1.0)),
        "router.bias_update_rate = -1: must be a number of at least 0"
    );
}

/// The schedule of DeepSeek-V3: gamma 0.001 for 14.3 of 14.8 trillion tokens, then 0.
#[test]
fn the_bias_rests_when_its_rate_has_fallen_to_0() {
    let ctx = Context::cpu(1);
    let mut config = config(4, 1, 4, 1);
    let bias_update_rate = "step 0.001 to 0 over 0.966".parse().unwrap();
    config.router = RouterConfig { expert_bias: true, bias_update_rate, ..RouterConfig::default() };
    let mut weights = MoeWeights::zeros(&ctx, &config, DType::F32);
    let stats = moeworks_moe::LayerStats { tokens_per_expert: vec![4, 0, 2, 2], ..moeworks_moe::LayerStats::empty(4) };
    for (progress, expected) in
        [(0.0, [-1e-3, 1e-3, 0.0, 0.0]), (0.965, [-2e-3, 2e-3, 0.0, 0.0]), (0.97, [-2e-3, 2e-3, 0.0, 0.0])]
    {
        next_state(&config, &mut weights.state, std::slice::from_ref(&stats), 0, progress);
        assert_eq!(weights.state[0].tensor.f32s(), expected, "{progress}");
    }
}
