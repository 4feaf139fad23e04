//! Checks of dense-to-sparse gating.

use moeworks_moe::RampShape;
use proptest::prelude::*;

use super::*;

fn falling(start: usize, top_k: usize) -> MoeConfig {
    let mut config = with(RouterKind::DenseToSparse, top_k);
    let settings = &mut config.router.schemes.dense_to_sparse;
    (settings.start, settings.share) = (start, 0.5);
    config
}

#[test]
fn dense_to_sparse_draws_by_gumbel_noise_while_k_falls() {
    for (progress, k) in [(0.0, 6), (0.2, 5), (0.45, 3), (0.5, 2), (1.0, 2)] {
        for is_normalized in [false, true] {
            let mut config = falling(0, 2);
            (config.normalize_weights, config.router.temperature) =
                (is_normalized, "linear 2 to 1 over 0.5".parse().unwrap());
            let input = RouterInput { progress, ..noisy() };
            let outcome = check("dense to sparse", &config, input, &best(k));
            assert_eq!(outcome.saved.routing().top_k(), k, "at {progress}");
            assert_eq!(outcome.stats.num_choices, k * T);
        }
    }
}

#[test]
fn a_dense_pass_weighs_every_expert_and_drops_nothing() {
    let mut config = falling(0, 1);
    config.capacity_factor = 1.0;
    let outcome = check("dense", &config, RouterInput { progress: 0.0, ..quiet() }, &best(E));
    assert_eq!((outcome.stats.num_dropped, &outcome.stats.tokens_per_expert[..]), (0, &[T as u32; E][..]));
    for weights in outcome.saved.routing().expert_weights().chunks(E) {
        assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }
}

#[test]
fn the_capacity_is_that_of_the_k_of_the_moment() {
    let mut config = falling(0, 1);
    config.capacity_factor = 1.0;
    let ctx = Context::cpu(2);
    let numbers = numbers(&config);
    for (progress, k) in [(0.2, 4), (0.5, 1)] {
        let input = RouterInput { progress, ..quiet() };
        let outcome = run(&ctx, &config, &input, &numbers, &draw(9, T * D));
        let capacity = (k * T).div_ceil(E) as u32;
        assert!(outcome.stats.kept_per_expert.iter().all(|&kept| kept <= capacity), "{:?}", outcome.stats);
        assert!(outcome.stats.kept_per_expert.contains(&capacity));
    }
}

#[test]
fn a_start_below_top_k_or_above_the_experts_is_refused() {
    for (start, top_k) in [(1, 2), (7, 2)] {
        let error = MoeLayer::new(falling(start, top_k)).unwrap_err().to_string();
        assert!(error.contains("router.dense_start"), "{error}");
    }
    let mut config = falling(0, 2);
    config.router.schemes.dense_to_sparse.share = 0.0;
    assert!(MoeLayer::new(config).unwrap_err().to_string().contains("router.dense_share"));
}

proptest! {
    /// After the fall, and in inference at any time, it equals plain top-k routing bit for bit.
    #[test]
    fn the_end_state_is_top_k(k in 1_usize..4, late in 0.5_f64..1.0, in_use in any::<bool>(), seed in 0_u64..100) {
        let ctx = Context::cpu(1);
        let (sparse, plain) = (falling(0, k), with(RouterKind::TopK, k));
        let weights = MoeWeights::random(&ctx, &plain, seed, 1.0);
        let x = tensor(&ctx, &[T, D], &draw(40 + seed, T * D));
        let progress = if in_use { 0.1 } else { late };
        let input = RouterInput { progress, is_inference: in_use, ..noisy() };
        let route = |config: &MoeConfig| MoeLayer::new(config.clone()).unwrap().forward(&ctx, &weights, &x, &input);
        let ((y, saved), (expected, plain)) = (route(&sparse), route(&plain));
        prop_assert_eq!(saved.routing(), plain.routing());
        prop_assert_eq!(y.f32s(), expected.f32s());
        prop_assert_eq!(saved.stats(), plain.stats());
    }

    /// K never rises, starts at its configured value and ends at its final one.
    #[test]
    fn k_only_falls(start in 2_usize..6, shape in 0_usize..4, share in 0.05_f64..1.0) {
        let ctx = Context::cpu(1);
        let mut config = falling(start, 2);
        let settings = &mut config.router.schemes.dense_to_sparse;
        settings.shape = [RampShape::Linear, RampShape::Cosine, RampShape::Exponential, RampShape::Step][shape];
        settings.share = share;
        let layer = MoeLayer::new(config.clone()).unwrap();
        let weights = MoeWeights::random(&ctx, &config, 1, 1.0);
        let x = tensor(&ctx, &[2, D], &draw(50, 2 * D));
        let k = |i: u32| {
            let input = RouterInput { progress: f64::from(i) / 20.0, ..quiet() };
            layer.route(&ctx, &weights, &x, &input).unwrap().top_k()
        };
        let all: Vec<usize> = (0..=20).map(k).collect();
        prop_assert!(all[0] == start && all[20] == 2 && all.is_sorted_by(|a, b| a >= b), "{all:?}");
    }
}
