//! Figures from papers and from simple mathematics.

use moeworks_moe::{
    Dispatch, LayerStats, MoeLayer, MoeWeights, RouterInput, Routing, balance_loss_per_layer, balance_loss_pooled,
    z_loss,
};
use moeworks_ops::Context;
use moeworks_tensor::{DType, Purpose, Random};

use crate::{config, tensor};

/// Drop rates of uniformly random top-1 routing, in percent: the mean excess of a binomial load over the capacity.
#[test]
fn random_top_1_routing_drops_as_the_binomial_says() {
    let published = [
        (2048, 128, 1.0, 9.883),
        (2048, 128, 1.25, 2.269),
        (2048, 128, 1.5, 0.313),
        (2048, 128, 2.0, 0.001),
        (1024, 8, 1.0, 3.296),
        (1024, 8, 1.25, 0.004),
        (4096, 64, 1.0, 4.941),
        (4096, 64, 1.25, 0.127),
    ];
    let ctx = Context::cpu(1);
    for (case, (num_tokens, num_experts, factor, expected)) in published.into_iter().enumerate() {
        let random = Random::new(case as u64, Purpose::Test, 0);
        let rates: Vec<f64> = (0..200_u64)
            .map(|trial| {
                let expert = |t| random.below(trial * num_tokens + t, num_experts) as u32;
                let ids: Vec<u32> = (0..num_tokens).map(expert).collect();
                let weights = vec![1.0; ids.len()];
                let routing = Routing::new(&ctx, num_experts as usize, 1, &ids, &weights).unwrap();
                let dispatch = Dispatch::new(&ctx, &routing, factor);
                100.0 * dispatch.num_dropped() as f64 / num_tokens as f64
            })
            .collect();
        let count = rates.len() as f64;
        let mean = rates.iter().sum::<f64>() / count;
        let variance = rates.iter().map(|rate| (rate - mean).powi(2)).sum::<f64>() / (count - 1.0);
        let rounding = 0.0005;
        let bound = 3.0 * (variance / count).sqrt() + rounding;
        assert!((mean - expected).abs() < bound, "T {num_tokens}, E {num_experts}, {factor}: {mean} not {expected}");
    }
}

/// Returns the statistics of 6 tokens with the given logits.
fn stats(num_experts: usize, top_k: usize, logit: impl Fn(usize, usize) -> f64) -> LayerStats {
    let ctx = Context::cpu(1);
    let config = config(6, 1, num_experts, top_k);
    let mut weights = MoeWeights::zeros(&ctx, &config, DType::F32);
    for e in 0..num_experts {
        for t in 0..6 {
            weights.router.f32s_mut()[e * 6 + t] = logit(t, e) as f32;
        }
    }
    let unit: Vec<f64> = (0..36).map(|i| f64::from(u8::from(i / 6 == i % 6))).collect();
    let layer = MoeLayer::new(config).unwrap();
    layer.forward(&ctx, &weights, &tensor(&ctx, &[6, 6], &unit), &RouterInput::default()).1.stats()
}

#[test]
fn the_balance_loss_is_1_when_uniform_and_e_at_collapse() {
    let uniform = stats(8, 1, |_, _| 0.0);
    assert!((balance_loss_per_layer(&[&uniform], 1.0).value - 1.0).abs() < 1e-6);
    let collapsed = stats(8, 1, |_, e| if e == 3 { 100.0 } else { 0.0 });
    assert!((balance_loss_per_layer(&[&collapsed, &collapsed], 1.0).value - 16.0).abs() < 1e-5);
    assert!((balance_loss_pooled(&[&collapsed, &collapsed], 1.0).value - 8.0).abs() < 1e-5);
    // Pooled as in transformers, a balanced layer gives K.
    let balanced = stats(6, 2, |t, e| if e == t || e == (t + 1) % 6 { 50.0 } else { 0.0 });
    assert_eq!(balanced.tokens_per_expert, [2; 6]);
    assert!((balance_loss_pooled(&[&balanced], 1.0).value - 2.0).abs() < 1e-6);
    assert!((balance_loss_per_layer(&[&balanced], 1.0).value - 1.0).abs() < 1e-6);
}

#[test]
fn the_scale_of_the_logits_is_their_root_mean_square() {
    let mean_square = 30.0_f64.powi(2) / 6.0 / 8.0 + (0..6).map(|t| f64::from(t).powi(2)).sum::<f64>() / 6.0;
    let stats = stats(8, 1, |t, e| if (t, e) == (0, 5) { 30.0 } else { -(t as f64) });
    assert!((stats.logit_rms() - mean_square.sqrt()).abs() < 1e-5, "{}", stats.logit_rms());
    assert_eq!((stats.num_rerouted, stats.reroute_rate()), (0, 0.0));
}

#[test]
fn zero_logits_give_the_squared_logarithm_of_e() {
    for (num_experts, expected) in [(8, 4.3241), (64, 17.2963), (128, 23.5422)] {
        assert!((z_loss(&[&stats(num_experts, 1, |_, _| 0.0)]) - expected).abs() < 1e-4);
    }
}
