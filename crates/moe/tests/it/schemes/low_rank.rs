//! Checks of the low-rank router.

use proptest::prelude::*;

use super::*;

fn low_rank(dim: usize, normalize: bool, top_k: usize) -> MoeConfig {
    let mut config = with(RouterKind::LowRank, top_k);
    let settings = &mut config.router.schemes.low_rank;
    (settings.dim, settings.normalize) = (dim, normalize);
    config
}

#[test]
fn low_rank_logits_are_those_of_the_projection() {
    for normalize in [false, true] {
        // Normalising a token of one dimension would leave only its sign.
        for (dim, k) in [(1, 1), (2, 2), (3, 3), (4, 1)].into_iter().filter(|(dim, _)| *dim > 1 || !normalize) {
            let mut config = low_rank(dim, normalize, k);
            config.normalize_weights = k == 2;
            check("low rank", &config, quiet(), &best(k));
        }
        let mut config = low_rank(3, normalize, 2);
        (config.jitter, config.router.noise_std) = (Ramp::constant(0.2), Ramp::constant(0.4));
        config.router.temperature = Ramp::constant(0.7);
        check("low rank, noisy", &config, noisy(), &best(2));
    }
}

#[test]
fn low_rank_takes_half_the_experts_as_dimensions_unless_it_is_told() {
    assert_eq!(low_rank(0, false, 2).router_shape(), [E, E / 2]);
    assert_eq!(low_rank(0, false, 2).extra_shapes()[0].shape, [E / 2, D]);
    assert_eq!(low_rank(4, false, 2).router_shape(), [E, 4]);
    let mut large = low_rank(0, false, 2);
    (large.num_experts, large.width) = (64, 256);
    assert_eq!(large.router_products(), 32 + 64 * 32 / 256, "fewer than the 64 of a plain router");
}

#[test]
fn low_rank_refuses_to_normalise_one_dimension() {
    let mut few = low_rank(0, true, 1);
    few.num_experts = 3;
    for config in [low_rank(1, true, 1), few] {
        let error = MoeLayer::new(config).unwrap_err().to_string();
        assert!(error.starts_with("router.low_rank_normalize = true: must be false"), "{error}");
    }
    assert!(MoeLayer::new(low_rank(1, false, 1)).is_ok());
}

#[test]
fn a_projection_that_changes_nothing_makes_low_rank_the_plain_router() {
    let ctx = Context::cpu(2);
    let (low, plain) = (low_rank(D, false, 2), with(RouterKind::TopK, 2));
    let numbers = numbers(&plain);
    let mut weights = layer_weights(&ctx, &plain, &numbers);
    let x = tensor(&ctx, &[T, D], &numbers.x);
    let expected = MoeLayer::new(plain).unwrap().route(&ctx, &weights, &x, &quiet()).unwrap();
    weights.extras = MoeWeights::zeros(&ctx, &low, DType::F32).extras;
    (0..D).for_each(|i| weights.extras[0].tensor.f32s_mut()[i * D + i] = 1.0);
    let found = MoeLayer::new(low).unwrap().route(&ctx, &weights, &x, &quiet()).unwrap();
    assert_eq!(found.expert_ids(), expected.expert_ids());
    for (a, b) in found.expert_weights().iter().zip(expected.expert_weights()) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
}

proptest! {
    /// With the norm a token's length does not affect its choice.
    #[test]
    fn a_normalised_low_rank_router_looks_at_directions_alone(scale in 0.25_f64..4096.0, seed in 0_u64..50) {
        let ctx = Context::cpu(1);
        let config = low_rank(3, true, 2);
        let layer = MoeLayer::new(config.clone()).unwrap();
        let weights = MoeWeights::random(&ctx, &config, seed, 1.0);
        let values = draw(30 + seed, T * D);
        let scaled: Vec<f64> = values.iter().map(|x| x * scale).collect();
        let probs = |x: &[f64]| layer.forward(&ctx, &weights, &tensor(&ctx, &[T, D], x), &quiet()).1.probs().to_vec();
        for (a, b) in probs(&values).iter().zip(probs(&scaled)) {
            prop_assert!((a - b).abs() < 1e-3, "{a} {b}");
        }
    }
}
