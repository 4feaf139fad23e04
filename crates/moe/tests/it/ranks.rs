//! An expert-parallel layer gives the same as on one rank: output, statistics of the losses and all gradients.

use moeworks_comm::{CommError, Communicator, RankOptions, try_run_ranks};
use moeworks_moe::{
    EpOptions, ExpertRanks, LayerStats, LossGrad, MoeConfig, MoeLayer, MoeWeights, Overflow, RouterConfig, RouterInput,
    RouterKind, WgradTarget, balance_loss_per_layer,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context};
use moeworks_plan::{Algorithm, Exchange, Link, Links, Moving, Placement, Wire};
use moeworks_tensor::{DType, Purpose, Random, Tensor};
use proptest::prelude::*;

use crate::config;

/// The tolerance relative to the largest value of a tensor.
const TOLERANCE: f32 = 1e-5;

const ALGORITHMS: [Algorithm; 3] = [Algorithm::Linear, Algorithm::Hierarchical, Algorithm::TwoHop];

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) config: MoeConfig,
    /// The number of tokens of each rank.
    pub(crate) tokens: Vec<usize>,
    pub(crate) placement: Placement,
    exchange: Exchange,
    moving: Moving,
    /// The node of each rank.
    nodes: Vec<usize>,
    has_biases: bool,
    seed: u64,
}

impl Case {
    /// Creates a case with experts spread over the ranks of one node and a single chunk.
    fn plain(config: MoeConfig, tokens: Vec<usize>, seed: u64) -> Self {
        let (placement, nodes) = (Placement::sharded(config.num_experts, tokens.len()), vec![0; tokens.len()]);
        let (exchange, moving) = (Exchange::plain(Wire::F32), Moving::Tokens);
        Self { config, tokens, placement, exchange, moving, nodes, has_biases: true, seed }
    }
}

/// Returns the handle of `comm`'s rank; its group is all ranks.
pub(crate) fn part_of(case: &Case, comm: &dyn Communicator) -> Result<ExpertRanks, CommError> {
    let part = || comm.split(Some(0), comm.rank()).map(|part| part.expect("a part"));
    let options = EpOptions { moving: case.moving, ..case.exchange.into() };
    ExpertRanks::new(part()?, part()?, case.placement.clone(), options)
}

/// The results of a layer's step over all tokens, in their order.
pub(crate) struct Step {
    pub(crate) y: Vec<f32>,
    pub(crate) dx: Vec<f32>,
    pub(crate) stats: LayerStats,
    /// The gradients with the names of their tensors; those of experts have all experts.
    pub(crate) grads: Vec<(&'static str, Vec<f32>)>,
}

fn random(ctx: &Context, shape: &[usize], stream: u64, seed: u64) -> Tensor {
    let random = Random::new(seed, Purpose::Test, stream);
    let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| 0.5 * random.normal(i as u64)).collect();
    Tensor::from_slice(ctx.pool(), shape, &values)
}

fn weights(ctx: &Context, case: &Case) -> MoeWeights {
    let config = &case.config;
    let mut weights = MoeWeights::random(ctx, config, case.seed, 0.5);
    if case.has_biases {
        let (e, af) = (config.num_experts, config.activation.num_inputs() * config.expert_width);
        let gate_up = random(ctx, &[e, af], 10, case.seed);
        weights.biases = Some((gate_up, random(ctx, &[e, config.width], 11, case.seed)));
    }
    weights
}

fn zeros_like(ctx: &Context, weights: &MoeWeights) -> MoeWeights {
    let mut zeros = weights.clone();
    for tensor in zeros.tensors_mut() {
        *tensor = ctx.zeros(tensor.shape(), DType::F32);
    }
    zeros
}

fn named(grads: &MoeWeights) -> Vec<(&'static str, Vec<f32>)> {
    let mut named = vec![
        ("router", grads.router.f32s().to_vec()),
        ("gate_up", grads.gate_up.f32s().to_vec()),
        ("down", grads.down.f32s().to_vec()),
    ];
    if let Some((gate_up, down)) = &grads.biases {
        named.extend([("gate_up bias", gate_up.f32s().to_vec()), ("down bias", down.f32s().to_vec())]);
    }
    if let Some(shared) = &grads.shared {
        named
            .extend([("shared gate_up", shared.gate_up.f32s().to_vec()), ("shared down", shared.down.f32s().to_vec())]);
    }
    named
}

/// Returns the losses' gradients for a pass that has `share` of all tokens.
fn losses(stats: &LayerStats, share: f32) -> LossGrad {
    let balance = balance_loss_per_layer(&[stats], 0.3).gradients[0].clone();
    LossGrad { balance, z: 0.2 * share, gshard: 0.4, ..LossGrad::default() }
}

/// Runs a training step on the tokens `range` of the case.
pub(crate) fn step(case: &Case, range: std::ops::Range<usize>, ranks: Option<&ExpertRanks>) -> Step {
    let ctx = Context::cpu(1);
    let (d, total) = (case.config.width, case.tokens.iter().sum::<usize>());
    let of = |stream| {
        let all = random(&ctx, &[total, d], stream, case.seed);
        Tensor::from_slice(ctx.pool(), &[range.len(), d], &all.f32s()[range.start * d..range.end * d])
    };
    let (x, dy) = (of(1), of(2));
    let whole = weights(&ctx, case);
    let (layer, weights) = match ranks {
        None => (MoeLayer::new(case.config.clone()).unwrap(), whole),
        Some(ranks) => {
            let layer = MoeLayer::expert_parallel(case.config.clone(), ranks.layer(0)).unwrap();
            (layer, whole.select_experts(&ctx, ranks.layer(0).held()))
        }
    };
    let input = RouterInput { has_gshard_loss: true, ..RouterInput::default() };
    let (y, saved) = layer.forward(&ctx, &weights, &x, &input);
    let (y_alone, _) = layer.forward(&ctx, &weights, &x, &RouterInput { is_forward_only: true, ..input });
    if ranks.is_none_or(|ranks| ranks.failure().is_none()) {
        assert!(y.f32s() == y_alone.f32s(), "a pass that is forward only gives the same bits");
    }
    let mut stats = [saved.stats()];
    if let Some(ranks) = ranks {
        ranks.merge_stats(&mut stats);
    }
    let [stats] = stats;
    let share = range.len() as f32 / stats.num_tokens.max(1) as f32;
    let (dx, task) = layer.backward(&ctx, &weights, &saved, &dy, &losses(&stats, share));
    let mut grads = zeros_like(&ctx, &weights);
    task.run(&ctx, WgradTarget::new(Write::Replace, &mut grads));
    Step { y: y.f32s().to_vec(), dx: dx.f32s().to_vec(), stats, grads: named(&grads) }
}

/// Runs the same step on the ranks of the case and merges the results.
fn step_on_ranks(case: &Case) -> Result<Step, CommError> {
    let steps = try_run_ranks(&RankOptions::new(0).with_nodes(&case.nodes), |comm: &dyn Communicator| {
        let ranks = part_of(case, comm)?;
        let start = case.tokens[..comm.rank()].iter().sum();
        let step = step(case, start..start + case.tokens[comm.rank()], Some(&ranks));
        ranks.failure().map_or(Ok(step), Err)
    })?;
    let stats = steps[0].stats.clone();
    assert!(steps.iter().all(|step| step.stats == stats), "all ranks have the same statistics");
    let joined = |part: fn(&Step) -> &[f32]| steps.iter().flat_map(|step| part(step).to_vec()).collect();
    let (y, dx) = (joined(|step| &step.y), joined(|step| &step.dx));
    let grads = (0..steps[0].grads.len()).map(|i| join_grads(case, &steps, i)).collect();
    Ok(Step { y, dx, stats, grads })
}

/// Merges gradient `i` of all ranks. Gradients of experts are ordered by the experts that each rank holds.
fn join_grads(case: &Case, steps: &[Step], i: usize) -> (&'static str, Vec<f32>) {
    let name = steps[0].grads[i].0;
    let is_dense = name == "router" || name.starts_with("shared");
    let held = |rank: usize| {
        if is_dense { vec![0] } else { case.placement.experts_of(rank) }
    };
    let size = (0..steps.len()).map(|rank| steps[rank].grads[i].1.len() / held(rank).len().max(1)).max().unwrap();
    let mut sum = vec![0.0; size * if is_dense { 1 } else { case.config.num_experts }];
    for (rank, step) in steps.iter().enumerate() {
        for (at, expert) in held(rank).into_iter().enumerate() {
            let own = &step.grads[i].1[at * size..(at + 1) * size];
            sum[expert * size..(expert + 1) * size].iter_mut().zip(own).for_each(|(sum, x)| *sum += x);
        }
    }
    (name, sum)
}

pub(crate) fn assert_close(name: &str, values: &[f32], expected: &[f32]) {
    assert_eq!(values.len(), expected.len(), "{name}");
    let scale = expected.iter().fold(1e-3_f32, |max, x| max.max(x.abs()));
    for (i, (value, expected)) in values.iter().zip(expected).enumerate() {
        assert!((value - expected).abs() <= TOLERANCE * scale, "{name}[{i}]: {value}, expected {expected}");
    }
}

fn check(case: &Case) {
    let one = step(case, 0..case.tokens.iter().sum(), None);
    let many = step_on_ranks(case).expect("the ranks talk");
    assert_close("y", &many.y, &one.y);
    assert_close("dx", &many.dx, &one.dx);
    for ((name, many), (_, one)) in many.grads.iter().zip(&one.grads) {
        assert_close(name, many, one);
    }
    assert_eq!(many.stats.num_tokens, one.stats.num_tokens);
    assert_eq!(many.stats.tokens_per_expert, one.stats.tokens_per_expert);
    assert_eq!(many.stats.kept_per_expert, one.stats.kept_per_expert);
    assert_eq!(many.stats.tokens_per_group, one.stats.tokens_per_group);
    assert_eq!(many.stats.num_rerouted, one.stats.num_rerouted);
    assert!((many.stats.gshard_loss - one.stats.gshard_loss).abs() <= 1e-6 * one.stats.gshard_loss.max(1e-3));
    assert_close("mean probabilities", &many.stats.mean_prob, &one.stats.mean_prob);
    assert!((many.stats.z - one.stats.z).abs() <= 1e-5 * one.stats.z.max(1.0));
}

fn cases() -> impl Strategy<Value = Case> {
    prop::sample::select(vec![1_usize, 2, 3, 4, 8]).prop_flat_map(cases_of)
}

/// Returns cases for `num_ranks` ranks.
pub(crate) fn cases_of(num_ranks: usize) -> impl Strategy<Value = Case> {
    let sizes = (2..10_usize, 1..8_usize, 1..9_usize, 0..3_usize, 0..3_usize);
    let tokens = prop::collection::vec(prop_oneof![Just(0_usize), 1..9_usize], num_ranks);
    let replicas = prop::collection::vec((0..64_usize, 0..64_usize), 0..6);
    let ways = (prop::sample::select(ALGORITHMS.to_vec()), 0..6_usize, prop::collection::vec(0..3_usize, 8), moving());
    (sizes, tokens, replicas, ways, any::<(bool, bool)>(), any::<u64>()).prop_map(
        |(
            (d, f, e, k, shared),
            tokens,
            replicas,
            (algorithm, chunks, mut nodes, moving),
            (has_biases, is_everywhere),
            seed,
        )| {
            let mut config = config(d, f, e, 1 + k.min(e - 1));
            config.shared_width = shared;
            config.activation = if seed.is_multiple_of(3) { Activation::Gelu } else { Activation::SwiGlu };
            config.normalize_weights = seed.is_multiple_of(2);
            let n = tokens.len();
            let mut placement = Placement::sharded(e, n);
            replicas.into_iter().for_each(|(expert, rank)| placement.replicate(expert % e, &[rank % n]));
            if is_everywhere && seed.is_multiple_of(5) {
                placement = Placement::everywhere(e, n);
            }
            nodes.truncate(n);
            let exchange = Exchange { algorithm, chunks, ..Exchange::plain(Wire::F32) };
            Case { config, tokens, placement, exchange, moving, nodes, has_biases, seed }
        },
    )
}

/// Returns rules of moving; with the third one some experts are worth fetching in these small layers, and some are
/// not.
fn moving() -> impl Strategy<Value = Moving> {
    prop_oneof![Just(Moving::Tokens), Just(Moving::Weights), (1e5..1e9).prop_map(cheapest)]
}

/// Returns the rule of the cheapest move, for links of `bytes_per_s` in a node and a fifth of it between nodes.
fn cheapest(bytes_per_s: f64) -> Moving {
    let node = Link { latency_s: 1e-6, bytes_per_s };
    let cluster = Link { latency_s: 1e-5, bytes_per_s: bytes_per_s / 5.0 };
    Moving::Cheapest { links: Links { node, cluster }, flops: 1e9 }
}

/// Returns routers whose decisions depend on many tokens, with capacity factors of both signs.
fn routers() -> impl Strategy<Value = (RouterConfig, f32)> {
    use RouterKind::*;
    let kinds = prop::sample::select(vec![TopK, Gshard, TopP, ExpertChoice, Base, Sinkhorn]);
    let overflow = prop::sample::select(vec![Overflow::Drop, Overflow::Priority, Overflow::Reroute]);
    let capacities = prop::sample::select(vec![0.0_f32, 0.5, -0.5, 1.0, 1.5]);
    (kinds, overflow, 0..12_usize, capacities).prop_map(|(kind, overflow, local_group, capacity)| {
        let joint = matches!(kind, ExpertChoice | Base | Sinkhorn);
        let overflow = if joint { Overflow::Drop } else { overflow };
        (RouterConfig { kind, overflow, local_group, ..RouterConfig::default() }, capacity)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn ranks_decide_what_one_decides(mut case in cases(), (mut router, capacity) in routers()) {
        match router.kind {
            RouterKind::Base => case.config.top_k = 1,
            // GShard needs a second expert.
            RouterKind::Gshard if case.config.num_experts == 1 => router.kind = RouterKind::TopK,
            RouterKind::Gshard => case.config.top_k = 2,
            _ => {}
        }
        (case.config.router, case.config.capacity_factor) = (router, capacity);
        check(&case);
    }

    #[test]
    fn ranks_give_what_one_gives(case in cases()) {
        check(&case);
    }
}

#[test]
fn every_number_of_ranks_gives_what_one_gives() {
    for n in [1, 2, 3, 4, 8] {
        let mut config = config(16, 12, 6, 2);
        config.router = RouterConfig { num_groups: 2, top_groups: 1, ..RouterConfig::default() };
        let tokens = (0..n).map(|rank| 24 / n + usize::from(rank < 24 % n)).collect();
        check(&Case::plain(config, tokens, 7));
    }
}

#[test]
fn the_path_changes_no_bit() {
    let mut case = Case::plain(config(24, 20, 7, 3), vec![37, 0, 64, 5], 11);
    case.nodes = vec![0, 1, 1, 0];
    for chunks in [1, 3, 100] {
        let step = |algorithm| {
            let exchange = Exchange { algorithm, chunks, ..case.exchange };
            step_on_ranks(&Case { exchange, ..case.clone() }).expect("the ranks talk")
        };
        let linear = step(Algorithm::Linear);
        for algorithm in [Algorithm::Hierarchical, Algorithm::TwoHop] {
            let step = step(algorithm);
            assert!(step.y == linear.y && step.dx == linear.dx, "{algorithm:?}, {chunks} chunks");
            assert!(step.grads == linear.grads, "{algorithm:?}, {chunks} chunks: gradients");
        }
    }
}

#[test]
fn the_weights_of_experts_come_to_their_tokens() {
    let mut case = Case::plain(config(12, 10, 7, 3), vec![30, 0, 25], 3);
    case.placement.replicate(1, &[2]);
    case.placement.replicate(5, &[0, 1, 2]);
    // All experts are fetched, then only the popular ones, by a link that makes this worth it, then none.
    for moving in [Moving::Weights, cheapest(1e6), Moving::Tokens] {
        for chunks in [1, 2] {
            let exchange = Exchange { chunks, ..case.exchange };
            check(&Case { moving, exchange, ..case.clone() });
        }
    }
}

#[test]
fn compressed_tokens_make_nearly_the_same_step() {
    let plain = Case::plain(config(64, 32, 6, 2), vec![20, 33, 7], 5);
    let expected = step_on_ranks(&plain).expect("the ranks talk");
    let largest = |values: &[f32]| values.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let wires = [(Wire::Bf16, 0.02), (Wire::F16, 0.002), (Wire::Byte { block: 32 }, 0.03)];
    for (wire, near) in wires.into_iter().chain([(Wire::TopK { per_mille: 900 }, 0.2)]) {
        let case = Case { exchange: Exchange { wire, chunks: 2, ..plain.exchange }, ..plain.clone() };
        let step = step_on_ranks(&case).expect("the ranks talk");
        for (name, values, expected) in [("y", &step.y, &expected.y), ("dx", &step.dx, &expected.dx)] {
            let error: Vec<f32> = values.iter().zip(expected).map(|(a, b)| a - b).collect();
            let error = largest(&error) / largest(expected);
            assert!(error > 0.0 && error < near, "{wire:?}, {name}: {error}");
        }
    }
}

#[test]
fn a_rank_that_dies_leaves_the_others_with_an_error_that_names_it() {
    let case = Case::plain(config(4, 4, 4, 2), vec![3; 4], 1);
    let results = moeworks_comm::run_ranks(&RankOptions::new(4), |comm: &dyn Communicator| {
        let ranks = part_of(&case, comm)?;
        if comm.rank() == 2 {
            return Err(comm.abort("the power failed"));
        }
        let step = step(&case, 0..3, Some(&ranks));
        assert!(step.y.iter().all(|y| y.is_finite()), "the pass goes on with zeros");
        ranks.failure().map_or(Ok(()), Err)
    });
    for result in results {
        let message = result.expect_err("no rank goes on").to_string();
        assert!(message.contains("rank 2") && message.contains("the power failed"), "{message}");
    }
}
