//! Random layers, loads and capacities against the reference, and bit equality for every number of threads.
//!
//! Inputs and router weights are multiples of a coarse unit, so that logits are exact in f32 and the choices, ties
//! included, must equal those of the reference.

use moeworks_moe::{
    BackwardInput, GroupScore, LayerStats, LossGrad, MoeConfig, MoeLayer, MoeWeights, Overflow, RouterConfig,
    RouterInput, ScoreFunction, ScoreOrder, WgradTarget,
};
use moeworks_ops::elementwise::cast;
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context};
use moeworks_tensor::{DType, Purpose, Random, Tensor};
use proptest::prelude::*;

use crate::reference::{RefLoss, RefShared, RefWeights, Reference};
use crate::{Tolerance, assert_within, layer_weights, tensor};

const F32: Tolerance = Tolerance { relative: 2e-5, least: 0.01 };
const BF16: Tolerance = Tolerance { relative: 0.04, least: 0.25 };

#[derive(Clone, Copy, Debug, PartialEq)]
enum Load {
    Random,
    AllToOne,
    SomeDead,
    /// Small logits, nearly all distinct, so that f32 scores order experts and tokens as f64 scores do.
    Scheme,
}

#[derive(Clone, Debug)]
struct Case {
    config: MoeConfig,
    num_tokens: usize,
    load: Load,
    z: f64,
    has_balance: bool,
    sequence: f64,
    seq_len: usize,
    seed: u64,
}

struct Inputs {
    weights: RefWeights,
    x: Vec<f64>,
    dy: Vec<f64>,
    balance: Vec<f64>,
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = (0_usize..70, 1_usize..40, 1_usize..40, 1_usize..=12);
    let shape =
        shape.prop_flat_map(|(t, d, f, e)| (Just((t, d, f, e)), 1..=e, prop_oneof![Just(0_usize), 1_usize..20]));
    let activation = prop_oneof![Just(Activation::SwiGlu), Just(Activation::Gelu), Just(Activation::Relu)];
    let order = prop_oneof![Just(ScoreOrder::SoftmaxThenTopK), Just(ScoreOrder::TopKThenSoftmax)];
    let factors = vec![0.0_f32, 0.0, 0.25, 0.5, 1.0, 1.25, 2.0, -0.5, -1.0, -2.0];
    let rules = (activation, order, any::<bool>(), proptest::sample::select(factors));
    let load = prop_oneof![Just(Load::Random), Just(Load::AllToOne), Just(Load::SomeDead)];
    let losses = (prop_oneof![Just(0.0), 0.1..1.0], any::<bool>());
    (shape, rules, load, losses, any::<u64>()).prop_map(|(shape, rules, load, losses, seed)| {
        let ((num_tokens, d, f, e), top_k, shared_width) = shape;
        let mut config = crate::config(d, f, e, top_k);
        (config.activation, config.score_order, config.normalize_weights, config.capacity_factor) = rules;
        config.shared_width = shared_width;
        Case { config, num_tokens, load, z: losses.0, has_balance: losses.1, sequence: 0.0, seq_len: 0, seed }
    })
}

/// Returns cases with all settings of a router that scores each expert: sigmoid, bias, groups, scale, overflow,
/// losses.
fn schemes() -> impl Strategy<Value = Case> {
    let scores = prop_oneof![Just(ScoreFunction::Softmax), Just(ScoreFunction::Sigmoid)];
    let overflow = prop_oneof![Just(Overflow::Drop), Just(Overflow::Priority), Just(Overflow::Reroute)];
    let groups = (1_usize..=4, 1_usize..=4, prop_oneof![Just(GroupScore::Max), Just(GroupScore::TopTwo)]);
    let settings = (scores, any::<bool>(), groups, prop_oneof![Just(1.0_f32), Just(2.5)], overflow);
    let lengths = (prop_oneof![Just(0_usize), 1_usize..30], prop_oneof![Just(0_usize), 1_usize..30]);
    (cases(), settings, lengths).prop_map(|(mut case, settings, (local_group, seq_len))| {
        let (scores, expert_bias, (num_groups, top_groups, group_score), routed_scale, overflow) = settings;
        let e = case.config.num_experts;
        let num_groups = if e.is_multiple_of(num_groups) { num_groups } else { 1 };
        // At least as many groups as K needs.
        let top_groups = top_groups.min(num_groups).max(case.config.top_k.div_ceil(e / num_groups));
        case.config.router = RouterConfig {
            scores,
            expert_bias,
            num_groups,
            top_groups,
            group_score,
            routed_scale,
            overflow,
            local_group,
            ..RouterConfig::default()
        };
        (case.sequence, case.seq_len, case.load) = (if seq_len > 0 { 0.6 } else { 0.0 }, seq_len, Load::Scheme);
        case
    })
}

/// Returns normal numbers that are exact in f32.
fn normals(seed: u64, stream: u64, count: usize) -> Vec<f64> {
    let random = Random::new(seed, Purpose::Test, stream);
    (0..count as u64).map(|i| f64::from(0.5 * random.normal(i))).collect()
}

/// Returns multiples of `unit`, from `-half unit` to `half unit`.
fn grid(seed: u64, stream: u64, count: usize, half: u64, unit: f64) -> Vec<f64> {
    let random = Random::new(seed, Purpose::Test, stream);
    (0..count as u64).map(|i| (random.below(i, 2 * half + 1) as f64 - half as f64) * unit).collect()
}

fn inputs(case: &Case) -> Inputs {
    let Case { config, num_tokens, load, seed, .. } = case;
    let (e, d, f, s, a) =
        (config.num_experts, config.width, config.expert_width, config.shared_width, config.activation.num_inputs());
    let mut x = grid(*seed, 0, num_tokens * d, 8, 0.25);
    let mut router = grid(*seed, 1, e * d, 4, 0.125);
    // The first element of every token is 2: its weight moves an expert's logit for all tokens.
    x.iter_mut().step_by(d).for_each(|x| *x = 2.0);
    match load {
        Load::Random => {}
        Load::Scheme => {
            x = grid(*seed, 0, num_tokens * d, 4096, 1.0 / 4096.0);
            router.iter_mut().for_each(|w| *w *= 0.5);
        }
        Load::AllToOne => router[(*seed as usize % e) * d] += 8.0,
        Load::SomeDead => (0..e / 2).for_each(|dead| router[dead * d] -= 8.0),
    }
    let shared = (s > 0).then(|| RefShared { gate_up: normals(*seed, 4, a * s * d), down: normals(*seed, 5, d * s) });
    let bias = if config.router.expert_bias { grid(*seed, 8, e, 16, 1.0 / 64.0) } else { Vec::new() };
    let weights = RefWeights {
        router,
        gate_up: normals(*seed, 2, e * a * f * d),
        down: normals(*seed, 3, e * d * f),
        shared,
        bias,
    };
    let balance = if case.has_balance { normals(*seed, 7, e) } else { vec![0.0; e] };
    Inputs { weights, x, dy: normals(*seed, 6, num_tokens * d), balance }
}

struct Run {
    y: Tensor,
    dx: Tensor,
    grads: MoeWeights,
    stats: LayerStats,
}

fn run(ctx: &Context, case: &Case, inputs: &Inputs, dtype: DType) -> Run {
    let Case { config, num_tokens, .. } = case;
    let layer = MoeLayer::new(config.clone()).unwrap();
    let mut weights = layer_weights(ctx, config, &inputs.weights);
    for weight in weights.tensors_mut().into_iter().skip(1) {
        *weight = cast(ctx, weight, dtype);
    }
    let shape = [*num_tokens, config.width];
    let input = RouterInput { seq_len: case.seq_len, ..RouterInput::default() };
    let (y, saved) = layer.forward(ctx, &weights, &cast(ctx, &tensor(ctx, &shape, &inputs.x), dtype), &input);
    let balance = inputs.balance.iter().map(|&b| b as f32).collect();
    let balance = if case.has_balance { balance } else { Vec::new() };
    let losses = LossGrad { balance, z: case.z as f32, sequence: case.sequence as f32, ..LossGrad::default() };
    let (dy, mut grads) = (tensor(ctx, &shape, &inputs.dy), MoeWeights::zeros(ctx, config, DType::F32));
    // Half of the cases compute the experts' weight gradients within backward.
    let is_now = num_tokens.is_multiple_of(2);
    let wgrad = is_now.then_some(WgradTarget::new(Write::Replace, &mut grads));
    let (dx, task) =
        layer.backward(ctx, &weights, &saved, &dy, BackwardInput { wgrad, ..BackwardInput::from(&losses) });
    task.run(ctx, WgradTarget::new(Write::Replace, &mut grads));
    Run { y, dx, grads, stats: saved.stats() }
}

/// Returns whether the reference's result stays within `tolerance` when its inputs move by four units of f32's last
/// place (the router's weights by more, because scores of small logits round more coarsely). If it does not, a choice
/// between experts, a ReLU or a sum that cancels depends on f32 rounding, and the case proves nothing. Equal values
/// stay equal, so that ties remain and logits of coarse units stay exact.
fn is_settled(case: &Case, inputs: &Inputs, tolerance: Tolerance) -> bool {
    let reference = Reference { config: &case.config, noise: None };
    let loss =
        RefLoss { dy: &inputs.dy, balance: &inputs.balance, z: case.z, sequence: case.sequence, seq_len: case.seq_len };
    // Each value moves up or down, depending on some of its bits.
    let results = |bits: u64, by: f64| {
        let nudge = |list: &mut Vec<f64>, by: f64| {
            let side = |v: f64| if (v.to_bits() & bits).count_ones().is_multiple_of(2) { by } else { -by };
            list.iter_mut().for_each(|v| *v *= 1.0 + side(*v));
        };
        let (mut weights, mut x) = (inputs.weights.clone(), inputs.x.clone());
        weights.lists_mut().into_iter().skip(1).for_each(|list| nudge(list, by));
        if case.load == Load::Scheme {
            nudge(&mut weights.router, 16.0 * by);
            nudge(&mut x, by);
        }
        let mut backward = reference.backward(&weights, &x, &loss);
        let grads: Vec<Vec<f64>> = backward.grads.lists_mut().into_iter().map(std::mem::take).collect();
        [vec![reference.forward(&weights, &x).y, backward.dx], grads].concat()
    };
    let still = results(0, 0.0);
    let size = 2_f64.powi(-22);
    [(u64::MAX, size), (u64::MAX, -size), (0x5555 << 48, size), (0x5555 << 48, -size)].iter().all(|&(bits, by)| {
        still.iter().zip(&results(bits, by)).all(|(still, moved)| {
            let scale = still.iter().fold(tolerance.least, |max, x| max.max(x.abs()));
            still.iter().zip(moved).all(|(still, moved)| (still - moved).abs() <= tolerance.relative * scale)
        })
    })
}

fn check(case: &Case, inputs: &Inputs, run: &Run, tolerance: Tolerance) {
    let reference = Reference { config: &case.config, noise: None };
    let forward = reference.forward(&inputs.weights, &inputs.x);
    assert_within("y", &run.y, &forward.y, tolerance);
    let loss =
        RefLoss { dy: &inputs.dy, balance: &inputs.balance, z: case.z, sequence: case.sequence, seq_len: case.seq_len };
    let mut backward = reference.backward(&inputs.weights, &inputs.x, &loss);
    assert_within("dx", &run.dx, &backward.dx, tolerance);
    for (i, (gradient, expected)) in run.grads.tensors().iter().zip(backward.grads.lists_mut()).enumerate() {
        let tolerance = tolerance.of_sum(case.num_tokens);
        assert_within(&format!("gradient of weight {i}"), gradient, expected, tolerance);
    }

    let (d, e) = (case.config.width, case.config.num_experts);
    let mut counts = (vec![0; e], vec![0; e]);
    for (token, y) in forward.tokens.iter().zip(run.y.f32s().chunks(d)) {
        for (&id, &is_kept) in token.ids.iter().zip(&token.is_kept) {
            counts.0[id] += 1;
            counts.1[id] += u32::from(is_kept);
        }
        if !token.is_kept.contains(&true) && case.config.shared_width == 0 {
            assert!(y.iter().all(|&y| y == 0.0), "a dropped token contributes exactly zero");
        }
    }
    assert_eq!((&run.stats.tokens_per_expert, &run.stats.kept_per_expert), (&counts.0, &counts.1));
    assert_eq!(run.stats.num_dropped, (counts.0.iter().sum::<u32>() - counts.1.iter().sum::<u32>()) as usize);
    for (expert, _) in counts.1.iter().enumerate().filter(|(_, kept)| **kept == 0) {
        let gradient = &run.grads.down.f32s()[expert * d * case.config.expert_width..][..d * case.config.expert_width];
        assert!(gradient.iter().all(|&g| g == 0.0), "an expert without tokens gets a zero gradient");
    }
    let n = forward.tokens.len().max(1) as f64;
    let sequence = reference.sequence_loss(&forward.tokens, case.seq_len);
    assert!((run.stats.sequence_loss - sequence).abs() < 1e-4 * (1.0 + sequence), "{}", run.stats.sequence_loss);
    let z = forward.tokens.iter().map(|token| token.lse.powi(2)).sum::<f64>() / n;
    assert!((run.stats.z - z).abs() <= 1e-5 * (1.0 + z), "z {} {z}", run.stats.z);
    let entropy = |probs: &[f64]| probs.iter().map(|&p| if p > 0.0 { -p * p.ln() } else { 0.0 }).sum::<f64>();
    let mean_entropy = forward.tokens.iter().map(|token| entropy(&token.probs)).sum::<f64>() / n;
    assert!((run.stats.mean_entropy - mean_entropy).abs() < 1e-5);
    for (expert, &mean) in run.stats.mean_prob.iter().enumerate() {
        let expected = forward.tokens.iter().map(|token| token.probs[expert]).sum::<f64>() / n;
        assert!((f64::from(mean) - expected).abs() < 1e-5);
    }
}

fn assert_same_bits(a: &Run, b: &Run) {
    assert_eq!(a.y.f32s(), b.y.f32s());
    assert_eq!(a.dx.f32s(), b.dx.f32s());
    assert_eq!(a.stats, b.stats);
    for (a, b) in a.grads.tensors().iter().zip(b.grads.tensors()) {
        assert_eq!(a.f32s(), b.f32s());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_layer_is_the_reference_on_any_number_of_threads(case in cases()) {
        let inputs = inputs(&case);
        prop_assume!(is_settled(&case, &inputs, F32));
        let first = run(&Context::cpu(1), &case, &inputs, DType::F32);
        check(&case, &inputs, &first, F32);
        for num_threads in [2, 3] {
            assert_same_bits(&run(&Context::cpu(num_threads), &case, &inputs, DType::F32), &first);
        }
    }

    #[test]
    fn any_scheme_of_scores_is_the_reference_on_any_number_of_threads(case in schemes()) {
        let inputs = inputs(&case);
        prop_assume!(is_settled(&case, &inputs, F32));
        let first = run(&Context::cpu(1), &case, &inputs, DType::F32);
        check(&case, &inputs, &first, F32);
        for num_threads in [2, 3] {
            assert_same_bits(&run(&Context::cpu(num_threads), &case, &inputs, DType::F32), &first);
        }
    }

    /// Router, routing and losses are computed in f32; GEMMs round to bf16's 8 bits.
    #[test]
    fn a_layer_in_bf16_routes_as_in_f32(case in cases()) {
        let mut inputs = inputs(&case);
        let ctx = Context::cpu(2);
        for weights in inputs.weights.lists_mut().into_iter().skip(1) {
            let rounded = cast(&ctx, &tensor(&ctx, &[weights.len()], weights), DType::BF16).to_f32_vec();
            *weights = rounded.into_iter().map(f64::from).collect();
        }
        check(&case, &inputs, &run(&ctx, &case, &inputs, DType::BF16), BF16);
    }
}

/// Enough tokens for several blocks of the router and of the counting sort on every thread.
#[test]
fn many_tokens_are_the_reference_on_any_number_of_threads() {
    let mut config = crate::config(12, 4, 9, 3);
    config.capacity_factor = 1.25;
    for load in [Load::Random, Load::AllToOne, Load::SomeDead] {
        let case = Case {
            config: config.clone(),
            num_tokens: 1100,
            load,
            z: 0.5,
            has_balance: true,
            sequence: 0.0,
            seq_len: 0,
            seed: 5,
        };
        let inputs = inputs(&case);
        let first = run(&Context::cpu(1), &case, &inputs, DType::F32);
        check(&case, &inputs, &first, F32);
        for num_threads in [2, 3] {
            assert_same_bits(&run(&Context::cpu(num_threads), &case, &inputs, DType::F32), &first);
        }
    }
}
