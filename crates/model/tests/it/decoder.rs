//! The decoder compared with itself: changes that must not affect results, and inputs that it must refuse.

use moeworks_model::KvCache;
use moeworks_model::{
    ActivationKind, BalanceKind, BatchError, Decoder, DecoderWeights, FeedForwardWeights, GradTarget, Mode,
    ModelConfig, PassOptions, PassStats, QkNorm, RouterNoise, TokenBatch,
};
use moeworks_moe::{EntropyRule, LayerStats, Ramp, RouterConfig, RouterKind, ScoreOrder};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::DType;
use proptest::prelude::*;

use crate::common::{assert_close, assert_same_bits, batch, model, next_ids, random_ids, small_config};

const SEQ_LEN: usize = 13;

fn step(
    ctx: &Context,
    decoder: &Decoder,
    weights: &DecoderWeights,
    options: &PassOptions,
) -> (PassStats, DecoderWeights) {
    let ids = random_ids(decoder.config().vocab_size, 4 * SEQ_LEN, 1);
    let targets = next_ids(&ids, SEQ_LEN);
    let mut grads = weights.zeros_like(ctx);
    let batch = batch(&ids, &targets, SEQ_LEN);
    let target = GradTarget::new(Write::Replace, &mut grads);
    let stats = decoder.forward_backward(ctx, weights, &[batch], options, target).unwrap().remove(0);
    (stats, grads)
}

fn options() -> PassOptions {
    PassOptions {
        balance_coef: 0.01,
        z_coef: 0.001,
        noise: Some(RouterNoise { seed: 5, step: 9 }),
        grad_scale: 0.02,
        ..PassOptions::default()
    }
}

fn noisy_config() -> ModelConfig {
    ModelConfig { jitter: Ramp::constant(0.05), capacity_factor: 1.0, shared_width: 8, ..small_config() }
}

/// Gives weights that start at zero, such as those of gating residuals, an effect on the result.
pub(crate) fn fill_residuals(weights: &mut DecoderWeights) {
    for (name, tensor) in weights.tensors_mut() {
        if name.ends_with("residual.weight") {
            tensor.f32s_mut().iter_mut().enumerate().for_each(|(i, w)| *w = 0.2 * ((i % 7) as f32 - 3.0));
        }
    }
}

#[test]
fn checkpointing_gives_the_same_bits() {
    let ctx = Context::cpu(2);
    for gate_residual in [false, true] {
        let config = noisy_config();
        let router = RouterConfig { gate_residual, ..config.router };
        let (decoder, mut weights) = model(&ctx, ModelConfig { router, ..config });
        fill_residuals(&mut weights);
        let (stats, grads) = step(&ctx, &decoder, &weights, &options());
        let options = PassOptions { checkpoint_layers: true, ..options() };
        let (again, same) = step(&ctx, &decoder, &weights, &options);
        assert_eq!((stats.loss_sum, stats.layers), (again.loss_sum, again.layers));
        assert_same_bits(&grads, &same);
        let is_residual = |name: &str| name.ends_with("residual.weight");
        let learned = grads.tensors().iter().filter(|(name, _)| is_residual(name)).count();
        assert_eq!(learned > 0, gate_residual);
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    for dtype in [DType::F32, DType::BF16] {
        let run = |threads| {
            let ctx = Context::cpu(threads);
            let (decoder, weights) = model(&ctx, noisy_config());
            let weights = weights.compute_copy(&ctx, dtype);
            step(&ctx, &decoder, &weights, &options())
        };
        let (stats, grads) = run(1);
        for threads in [2, 3] {
            let (other, same) = run(threads);
            assert_eq!((stats.loss_sum, &stats.layers), (other.loss_sum, &other.layers), "{threads} threads");
            assert_same_bits(&grads, &same);
        }
    }
}

#[test]
fn mixed_precision_is_close_to_f32() {
    let ctx = Context::cpu(2);
    // All experts for every token: a choice that rounding changes would be a jump.
    let config = ModelConfig { top_k: 5, normalize_weights: false, ..small_config() };
    let (decoder, weights) = model(&ctx, config);
    let options = PassOptions { noise: None, ..options() };
    let (exact, grads) = step(&ctx, &decoder, &weights, &options);
    let (mixed, mixed_grads) = step(&ctx, &decoder, &weights.compute_copy(&ctx, DType::BF16), &options);
    assert!((exact.mean_loss() - mixed.mean_loss()).abs() < 0.01 * exact.mean_loss());
    for ((name, exact), (_, mixed)) in grads.tensors().into_iter().zip(mixed_grads.tensors()) {
        assert_close(&name, mixed.f32s(), exact.f32s(), 0.06);
    }
}

#[test]
fn gradients_add_up_over_batches() {
    let ctx = Context::cpu(2);
    for tie_embeddings in [false, true] {
        let (decoder, weights) = model(&ctx, ModelConfig { tie_embeddings, ..small_config() });
        let (_, mut grads) = step(&ctx, &decoder, &weights, &options());
        let (_, once) = step(&ctx, &decoder, &weights, &options());
        let ids = random_ids(decoder.config().vocab_size, 4 * SEQ_LEN, 1);
        let targets = next_ids(&ids, SEQ_LEN);
        let batch = batch(&ids, &targets, SEQ_LEN);
        decoder
            .forward_backward(&ctx, &weights, &[batch], &options(), GradTarget::new(Write::Add, &mut grads))
            .unwrap();
        for ((name, twice), (_, once)) in grads.tensors().into_iter().zip(once.tensors()) {
            let doubled: Vec<f32> = once.f32s().iter().map(|x| 2.0 * x).collect();
            assert_close(&name, twice.f32s(), &doubled, 1e-5);
        }
    }
}

#[test]
fn a_step_against_the_gradient_lowers_the_loss_by_what_the_gradient_says() {
    let ctx = Context::cpu(2);
    for (balance, activation, gate_residual) in [
        (BalanceKind::Layer, ActivationKind::Gelu, false),
        (BalanceKind::Pooled, ActivationKind::Swiglu, false),
        (BalanceKind::Layer, ActivationKind::Swiglu, true),
    ] {
        // All experts for every token, so that the loss has no jumps.
        let config = ModelConfig { top_k: 5, activation, shared_width: 8, qk_norm: QkNorm::Whole, ..small_config() };
        let router = RouterConfig { gate_residual, ..config.router };
        let (decoder, mut weights) = model(&ctx, ModelConfig { router, ..config });
        fill_residuals(&mut weights);
        let options =
            PassOptions { balance, noise: None, grad_scale: 1.0, balance_coef: 3.0, z_coef: 0.5, ..options() };
        let total = |stats: &PassStats| stats.loss_sum + 3.0 * stats.balance_loss + 0.5 * stats.z_loss;
        let (before, grads) = step(&ctx, &decoder, &weights, &options);
        let slope: f64 = grads.tensors().iter().flat_map(|(_, g)| g.f32s()).map(|&g| f64::from(g) * f64::from(g)).sum();
        let rate = 1e-4 / slope.sqrt();
        let mut shifted = |sign: f64| {
            for ((_, w), (_, g)) in weights.tensors_mut().into_iter().zip(grads.tensors()) {
                w.f32s_mut().iter_mut().zip(g.f32s()).for_each(|(w, g)| *w -= (sign * rate) as f32 * g);
            }
            total(&step(&ctx, &decoder, &weights, &options).0)
        };
        // A step of 1e-4 of the gradient's length down, and 2e-4 up from there: their mean is the slope at the start.
        let (down, up) = (shifted(100.0), shifted(-200.0));
        let found = (up - down) / (200.0 * rate);
        assert!((found / slope - 1.0).abs() < 0.02, "{found}, expected {slope} at {}", total(&before));
    }
}

#[test]
fn a_step_after_the_first_asks_the_system_for_no_memory() {
    // With more threads the first step may run fewer tasks at a time than a later one.
    let ctx = Context::cpu(1);
    let (decoder, weights) = model(&ctx, small_config());
    let weights = weights.compute_copy(&ctx, DType::BF16);
    let ids = random_ids(decoder.config().vocab_size, 4 * SEQ_LEN, 1);
    let targets = next_ids(&ids, SEQ_LEN);
    let batch = batch(&ids, &targets, SEQ_LEN);
    let mut grads = weights.zeros_like(&ctx);
    let mut allocations = Vec::new();
    for _ in 0..4 {
        decoder
            .forward_backward(&ctx, &weights, &[batch], &options(), GradTarget::new(Write::Replace, &mut grads))
            .unwrap();
        allocations.push(ctx.pool().stats().system_allocations);
    }
    assert_eq!(allocations[1], allocations[3], "{allocations:?}");
}

#[test]
fn an_expert_without_tokens_gets_zero_gradients() {
    let ctx = Context::cpu(2);
    let config = ModelConfig { num_experts: 64, top_k: 1, moe_every: 1, ..small_config() };
    let (decoder, weights) = model(&ctx, config);
    let options = PassOptions { noise: None, ..options() };
    let (stats, grads) = step(&ctx, &decoder, &weights, &options);
    let expert = stats.layers[0].tokens_per_expert.iter().position(|&n| n == 0).unwrap();
    let tensors = grads.tensors();
    let (_, down) = tensors.iter().find(|(name, _)| name == "model.layers.0.mlp.experts.down_proj").unwrap();
    let size = down.len() / 64;
    assert!(down.f32s()[expert * size..(expert + 1) * size].iter().all(|&g| g == 0.0));
}

#[test]
fn evaluation_is_the_loss_of_training_where_no_token_is_dropped() {
    let ctx = Context::cpu(2);
    let (decoder, weights) = model(&ctx, small_config());
    let ids = random_ids(50, 4 * SEQ_LEN, 1);
    let targets = next_ids(&ids, SEQ_LEN);
    let found = decoder.evaluate(&ctx, &weights, &batch(&ids, &targets, SEQ_LEN), None).unwrap();
    let (expected, _) = step(&ctx, &decoder, &weights, &PassOptions::default());
    assert!((found.loss_sum - expected.loss_sum).abs() < 1e-5 * expected.loss_sum);
    assert_eq!((found.num_targets, found.num_correct), (expected.num_targets, expected.num_correct));
    assert_eq!(found.layers, expected.layers);
}

#[test]
fn evaluation_drops_no_token_whatever_the_capacity() {
    let ctx = Context::cpu(2);
    let (decoder, weights) = model(&ctx, ModelConfig { capacity_factor: 0.1, ..small_config() });
    let ids = random_ids(50, 4 * SEQ_LEN, 1);
    let stats = decoder.evaluate(&ctx, &weights, &batch(&ids, &ids, SEQ_LEN), None).unwrap();
    assert!(stats.layers.iter().all(|layer| layer.num_dropped == 0));
    let (training, _) = step(&ctx, &decoder, &weights, &PassOptions::default());
    assert!(training.layers.iter().all(|layer| layer.num_dropped > 0));
}

/// Compares the logits after each prefix of `ids`, passed in these pieces, with those of one full pass.
#[test]
fn who_watches_sees_the_routing_of_every_moe_layer_by_the_rules_asked_for() {
    let ctx = Context::cpu(2);
    let (decoder, weights) = model(&ctx, ModelConfig { capacity_factor: 0.5, moe_every: 1, ..small_config() });
    let ids = random_ids(50, 4 * SEQ_LEN, 2);
    let targets = next_ids(&ids, SEQ_LEN);
    let mut seen = Vec::new();
    let watched = decoder.evaluate(
        &ctx,
        &weights,
        &batch(&ids, &targets, SEQ_LEN),
        Some(&mut |layer, saved| {
            seen.push((layer, saved.routing().clone(), saved.stats()));
        }),
    );
    let stats = watched.unwrap();
    assert_eq!(
        stats.loss_sum,
        decoder.evaluate(&ctx, &weights, &batch(&ids, &targets, SEQ_LEN), None).unwrap().loss_sum
    );
    assert_eq!(seen.iter().map(|(layer, ..)| *layer).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(seen.iter().map(|(.., stats)| stats.clone()).collect::<Vec<_>>(), stats.layers);
    let route = |mode| {
        let mut found = Vec::new();
        decoder
            .route(&ctx, &weights, &TokenBatch::without_targets(&ids, 4), mode, &mut |_, saved| {
                found.push((saved.routing().clone(), saved.dispatch().num_dropped()));
            })
            .unwrap();
        found
    };
    let inference = route(Mode::Infer);
    assert!(inference.iter().zip(&seen).all(|((routing, dropped), (_, same, _))| routing == same && *dropped == 0));
    // The first layer sees the same input by either rule; the others notice what it drops.
    let training = route(Mode::TrainForward);
    assert_eq!(training[0].0, inference[0].0);
    // Each of 5 experts keeps at most ceil(0.5 2 52 / 5) = 11 of the 104 choices.
    assert!(training.iter().all(|(_, dropped)| *dropped >= 104 - 5 * 11), "{training:?}");
    let error = decoder
        .route(&ctx, &weights, &TokenBatch::without_targets(&[50], 1), Mode::TrainForward, &mut |_, _| ())
        .unwrap_err();
    assert!(matches!(error, BatchError::Id { id: 50, .. }), "{error}");
}

/// Checks that decoding in pieces gives the logits of the full pass.
pub(crate) fn check_cache(config: ModelConfig, dtype: DType, pieces: &[usize], tolerance: f32) {
    let ctx = Context::cpu(2);
    let (decoder, weights) = model(&ctx, config);
    let weights = weights.compute_copy(&ctx, dtype);
    let ids = random_ids(decoder.config().vocab_size, pieces.iter().sum(), 3);
    let full = decoder.logits(&ctx, &weights, &ids, 1, None).unwrap();
    let mut cache = KvCache::new(decoder.config());
    for &piece in pieces {
        let start = cache.len();
        let logits = decoder.forward_cached(&ctx, &weights, &mut cache, &ids[start..start + piece], None).unwrap();
        let row = &full.f32s()[(start + piece - 1) * logits.len()..][..logits.len()];
        assert_close("logits", logits.f32s(), row, tolerance);
    }
}

#[test]
fn decoding_with_a_cache_equals_the_full_pass() {
    check_cache(small_config(), DType::F32, &[7, 1, 1, 1, 5, 1], 1e-5);
    check_cache(ModelConfig { max_seq_len: 300, ..small_config() }, DType::F32, &[60, 1, 1, 1, 1, 1, 200, 1], 1e-5);
    check_cache(small_config(), DType::BF16, &[7, 1, 1, 1, 5, 1], 0.05);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_shape_trains_and_decodes(
        (groups, kv_heads, half_dim) in (1_usize..4, 1_usize..3, 1_usize..5),
        (experts, top_k, moe_every) in (0_usize..5, 1_usize..5, 1_usize..3),
        (width, expert_width, vocab) in (1_usize..20, 1_usize..20, 1_usize..40),
        (norm, activation, tie, before, normalize) in (0_usize..3, 0_usize..3, any::<bool>(), any::<bool>(), any::<bool>()),
        (shared_width, capacity_factor) in (0_usize..6, -2.0_f32..2.0),
    ) {
        let config = ModelConfig {
            vocab_size: vocab,
            width,
            num_layers: 2,
            num_heads: groups * kv_heads,
            num_kv_heads: kv_heads,
            head_dim: 2 * half_dim,
            qk_norm: [QkNorm::None, QkNorm::Head, QkNorm::Whole][norm],
            activation: [ActivationKind::Swiglu, ActivationKind::Gelu, ActivationKind::Relu][activation],
            num_experts: experts,
            top_k: top_k.min(experts.max(1)),
            expert_width,
            shared_width,
            moe_every,
            dense_width: expert_width,
            score_order: [ScoreOrder::TopKThenSoftmax, ScoreOrder::SoftmaxThenTopK][usize::from(before)],
            normalize_weights: normalize,
            capacity_factor,
            tie_embeddings: tie,
            max_seq_len: 64,
            init_std: 0.2,
            ..ModelConfig::default()
        };
        let ctx = Context::cpu(2);
        let (decoder, weights) = model(&ctx, config.clone());
        let (stats, grads) = step(&ctx, &decoder, &weights, &options());
        prop_assert!(stats.loss_sum.is_finite());
        prop_assert!(grads.tensors().iter().all(|(_, g)| g.f32s().iter().all(|g| g.is_finite())));
        check_cache(config, DType::F32, &[3, 1, 2], 1e-4);
    }
}

#[test]
fn a_batch_that_the_model_cannot_take_is_refused() {
    let ctx = Context::cpu(1);
    let (decoder, weights) = model(&ctx, small_config());
    let evaluate = |inputs: &[u32], targets: &[u32], num_sequences, seq_len| {
        decoder
            .evaluate(
                &ctx,
                &weights,
                &TokenBatch { inputs, targets, num_sequences, seq_len, ..TokenBatch::default() },
                None,
            )
            .unwrap_err()
    };
    assert!(matches!(evaluate(&[1, 2], &[1], 1, 2), BatchError::Length { what: "targets", len: 1, .. }));
    assert!(matches!(evaluate(&[1, 2], &[1, 2], 2, usize::MAX), BatchError::Length { .. }));
    assert!(matches!(evaluate(&[], &[], 0, 2), BatchError::Empty));
    assert!(matches!(evaluate(&[1, 50], &[1, 2], 1, 2), BatchError::Id { what: "inputs", index: 1, id: 50, .. }));
    assert!(matches!(evaluate(&[1, 2], &[1, 99], 1, 2), BatchError::Id { what: "targets", index: 1, .. }));
    let long = vec![0; 65];
    assert_eq!(evaluate(&long, &long, 1, 65), BatchError::TooLong { len: 65, max_seq_len: 64 });
}

#[test]
fn absurd_configurations_are_refused() {
    let huge = usize::MAX / 2;
    for config in [
        ModelConfig { num_layers: huge, ..small_config() },
        ModelConfig { width: huge, ..small_config() },
        ModelConfig { num_experts: huge, ..small_config() },
        ModelConfig { vocab_size: huge, ..small_config() },
        ModelConfig { max_seq_len: huge, ..small_config() },
        ModelConfig { vocab_size: 0, ..small_config() },
        ModelConfig { top_k: 6, ..small_config() },
        ModelConfig { num_kv_heads: 3, ..small_config() },
        ModelConfig { head_dim: 7, ..small_config() },
    ] {
        assert!(Decoder::new(config.clone()).is_err(), "{config:?}");
    }
}

/// The balance losses over experts, devices and communication, each with its own weight (DeepSeek-V2).
#[test]
fn losses_over_experts_and_over_groups_add_up() {
    let ctx = Context::cpu(2);
    let mut config = ModelConfig { num_experts: 6, ..small_config() };
    (config.router.num_groups, config.router.top_groups) = (3, 2);
    let (decoder, weights) = model(&ctx, config);
    let router = |balance, [balance_coef, device_coef, communication_coef]: [f32; 3]| {
        let options = PassOptions { balance, balance_coef, device_coef, communication_coef, ..options() };
        let (_, grads) = step(&ctx, &decoder, &weights, &options);
        let FeedForwardWeights::Moe(moe) = &grads.layers[1].feed_forward else { panic!("layer 1 has experts") };
        moe.router.f32s().to_vec()
    };
    for balance in [BalanceKind::Layer, BalanceKind::Gshard] {
        let none = router(balance, [0.0; 3]);
        let parts = [[3.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 2.0]].map(|coefs| router(balance, coefs));
        for (i, whole) in router(balance, [3.0, 5.0, 2.0]).into_iter().enumerate() {
            let expected = parts.iter().fold(none[i], |sum, part| sum + part[i] - none[i]);
            assert!((whole - expected).abs() < 1e-5, "{balance:?}, {i}: {whole}, expected {expected}");
        }
        assert!(parts.iter().all(|part| *part != none), "{balance:?}: each counts");
    }
}

/// Every loss on routers is reported by its definition over the layers' statistics, or left out if it has no meaning.
#[test]
fn the_losses_on_routers_are_those_of_their_definitions() {
    let ctx = Context::cpu(2);
    let mut config = ModelConfig { num_experts: 6, ..small_config() };
    let plain = {
        let (decoder, weights) = model(&ctx, config.clone());
        step(&ctx, &decoder, &weights, &options()).0.router_losses
    };
    assert_eq!((plain.device, plain.sequence, plain.load, plain.l1), (None, None, None, None));
    (config.router.num_groups, config.router.noise_std) = (3, Ramp::constant(0.3));
    let (decoder, weights) = model(&ctx, config.clone());
    let entropy = EntropyRule { min_entropy: 3.0, ..EntropyRule::default() };
    let (stats, _) = step(&ctx, &decoder, &weights, &PassOptions { sequence_coef: 0.1, entropy, ..options() });
    let losses = stats.router_losses;
    let close = |loss: Option<f64>, expected: &dyn Fn(&LayerStats) -> f64| {
        let expected: f64 = stats.layers.iter().map(expected).sum();
        assert!((loss.unwrap() - expected).abs() < 1e-6 * expected.abs(), "{loss:?}, expected {expected}");
    };
    let cv_squared = |values: &[f64]| {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        values.iter().map(|x| x * x).sum::<f64>() / n / (mean * mean) - 1.0
    };
    close(losses.device, &|layer| {
        let choices: f64 = layer.tokens_per_expert.iter().map(|&n| f64::from(n)).sum();
        let pairs = layer.tokens_per_expert.chunks(2).zip(layer.mean_prob.chunks(2));
        // Three groups of two experts: their share of the choices times three, times their probability.
        pairs.map(|(n, p)| f64::from(n[0] + n[1]) / choices * 3.0 * f64::from(p[0] + p[1])).sum()
    });
    close(losses.communication, &|layer| {
        let pairs = layer.tokens_per_group.iter().zip(layer.mean_prob.chunks(2));
        // Three groups, of which a token may be in one.
        pairs.map(|(&n, p)| 3.0 * f64::from(n) / layer.num_tokens as f64 * f64::from(p[0] + p[1])).sum()
    });
    close(losses.sequence, &|layer| layer.sequence_loss);
    close(losses.importance, &|layer| cv_squared(&layer.importance));
    close(losses.load, &|layer| cv_squared(&layer.smooth_load));
    close(losses.local_entropy, &|layer| layer.mean_entropy);
    close(losses.global_entropy, &|layer| 3.0 - layer.mean_prob_entropy());
    config.router = RouterConfig { kind: RouterKind::Relu, ..RouterConfig::default() };
    let (decoder, weights) = model(&ctx, config);
    let l1 = step(&ctx, &decoder, &weights, &options()).0.router_losses.l1.unwrap();
    assert!(l1 > 0.0 && l1 < 10.0, "{l1}");
}
