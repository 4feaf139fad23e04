//! A step on several ranks is that of one: losses, statistics and the gradient of every weight.

use moeworks_comm::{RankOptions, try_run_ranks};
use moeworks_model::{
    LatentAttention, LayerDone, ModelConfig, PassOptions, PassStats, QkNorm, RouterNoise, TokenBatch, Variant,
};
use moeworks_moe::{EntropyRule, Ramp, RouterConfig, RouterKind};
use moeworks_ops::linear::Write;
use moeworks_plan::{Algorithm, Order, Wire};
use moeworks_tensor::{Purpose, Random};

use super::*;
use crate::optimizer::global_norm;
use moeworks_model::{Decoder, DecoderWeights};
use moeworks_ops::Context;

const SEQ_LEN: usize = 6;
const VOCABULARY: usize = 31;
/// Of the largest value of a tensor.
const TOLERANCE: f32 = 1e-5;

struct Case {
    model: ModelConfig,
    num_sequences: usize,
    layout: Layout,
    placement: Placement,
    exchange: Exchange,
    /// Which node each rank stands on.
    nodes: Vec<usize>,
    checkpoint_layers: bool,
    /// Whether the gradients of a layer are summed while those below are computed.
    is_overlapped: bool,
}

/// What a step gives: the account, the norm, and every gradient by name.
struct Step {
    stats: PassStats,
    norm: f64,
    grads: Vec<(String, Vec<f32>)>,
}

fn model() -> ModelConfig {
    ModelConfig {
        vocab_size: VOCABULARY,
        width: 16,
        num_layers: 2,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 8,
        num_experts: 6,
        top_k: 2,
        expert_width: 12,
        shared_width: 8,
        jitter: Ramp::constant(0.01),
        max_seq_len: 16,
        init_std: 0.2,
        ..ModelConfig::default()
    }
}

fn case(dp: usize, ep: usize) -> Case {
    sliced((dp, ep, 1), model())
}

/// The step of `model` on dp x ep x tp ranks.
fn sliced((dp, ep, tp): (usize, usize, usize), model: ModelConfig) -> Case {
    let layout = Layout::new(dp, ep, tp);
    let placement = Placement::sharded(model.num_experts, layout.num_expert_ranks());
    let (exchange, nodes) = (Exchange::plain(Wire::F32), vec![0; layout.num_ranks()]);
    Case { model, num_sequences: 5, layout, placement, exchange, nodes, checkpoint_layers: false, is_overlapped: true }
}

fn options(case: &Case, first_token: usize) -> PassOptions {
    PassOptions {
        balance_coef: 0.1,
        z_coef: 0.05,
        sequence_coef: 0.1,
        importance_coef: 0.1,
        entropy: EntropyRule { local: 0.02, global: 0.03, min_entropy: 2.0 },
        noise: Some(RouterNoise { seed: 3, step: 4 }),
        first_token,
        checkpoint_layers: case.checkpoint_layers,
        grad_scale: 1.0 / (case.num_sequences * SEQ_LEN) as f32,
        ..PassOptions::default()
    }
}

fn ids(case: &Case, stream: u64, sequences: Range<usize>) -> Vec<u32> {
    let random = Random::new(5, Purpose::Test, stream);
    let all: Vec<u32> =
        (0..case.num_sequences * SEQ_LEN).map(|i| random.below(i as u64, VOCABULARY as u64) as u32).collect();
    all[sequences.start * SEQ_LEN..sequences.end * SEQ_LEN].to_vec()
}

/// The pass of some sequences: the account and the gradients of it alone.
fn pass(
    case: &Case,
    (ctx, decoder, weights): (&Context, &Decoder, &DecoderWeights),
    sequences: Range<usize>,
    done: LayerDone<'_>,
) -> (PassStats, DecoderWeights) {
    let (inputs, targets) = (ids(case, 0, sequences.clone()), ids(case, 1, sequences.clone()));
    let batch = TokenBatch { inputs: &inputs, targets: &targets, num_sequences: sequences.len(), seq_len: SEQ_LEN };
    let mut grads = weights.zeros_like(ctx);
    let options = options(case, sequences.start * SEQ_LEN);
    let write = (Write::Replace, done);
    let stats = decoder.forward_backward_watched(ctx, weights, &batch, &options, write, &mut grads).unwrap();
    (stats, grads)
}

fn named(grads: &DecoderWeights) -> Vec<(String, Vec<f32>)> {
    grads.tensors().into_iter().map(|(name, tensor)| (name, tensor.f32s().to_vec())).collect()
}

fn step_on_one(case: &Case) -> Step {
    let ctx = Context::cpu(1);
    let decoder = Decoder::new(case.model.clone()).unwrap();
    let weights = decoder.init(&ctx, 7);
    let (stats, grads) = pass(case, (&ctx, &decoder, &weights), 0..case.num_sequences, &mut |_, _| ());
    Step { stats, norm: global_norm(&ctx, &grads), grads: named(&grads) }
}

fn step_on_ranks(case: &Case) -> Step {
    let steps = try_run_ranks(&RankOptions::new(0).with_nodes(&case.nodes), |comm: &dyn Communicator| {
        let ranks = Ranks::new(comm, case.layout, case.placement.clone(), case.exchange)?;
        let ctx = Context::cpu(1);
        let decoder = ranks.decoder(case.model.clone())?;
        let weights = ranks.part(&ctx, &decoder.init(&ctx, 7));
        let mut sums = SumsUnderWay::default();
        let mut done = |layer, grads: &mut DecoderWeights| {
            if case.is_overlapped {
                ranks.start_sums(&ctx, layer, grads, &mut sums);
            }
        };
        let share = ranks.share(case.num_sequences);
        let (stats, mut grads) = pass(case, (&ctx, &decoder, &weights), share, &mut done);
        ranks.check()?;
        ranks.sum_gradients(&mut grads, sums)?;
        let norm = ranks.global_norm(&ctx, &grads)?;
        let grads = ranks.whole(&ctx, &decoder, &grads)?.map(|grads| named(&grads));
        Ok::<_, TrainError>((stats, norm, grads))
    })
    .expect("the ranks talk");
    let (loss_sum, norm) = (steps[0].0.loss_sum, steps[0].1);
    assert!(steps.iter().all(|step| step.0.loss_sum == loss_sum && step.1 == norm), "all ranks know the same");
    assert!(steps[1..].iter().all(|step| step.2.is_none()), "one has the whole");
    let (stats, norm, grads) = steps.into_iter().next().unwrap();
    Step { stats, norm, grads: grads.expect("the root's") }
}

fn check(case: &Case) {
    let (one, many) = (step_on_one(case), step_on_ranks(case));
    let near = |what: &str, value: f64, expected: f64| {
        assert!((value - expected).abs() <= 1e-5 * expected.abs(), "{}: {what} {value}, not {expected}", case.layout);
    };
    near("loss", many.stats.loss_sum, one.stats.loss_sum);
    near("balance loss", many.stats.balance_loss, one.stats.balance_loss);
    near("z-loss", many.stats.z_loss, one.stats.z_loss);
    near("norm", many.norm, one.norm);
    assert_eq!(many.stats.num_targets, one.stats.num_targets);
    for (many, one) in many.stats.layers.iter().zip(&one.stats.layers) {
        assert_eq!(many.tokens_per_expert, one.tokens_per_expert);
        near("sequence loss", many.sequence_loss, one.sequence_loss);
    }
    for ((name, many), (_, one)) in many.grads.iter().zip(&one.grads) {
        let scale = one.iter().fold(1e-6_f32, |max, x| max.max(x.abs()));
        for (many, one) in many.iter().zip(one) {
            assert!((many - one).abs() <= TOLERANCE * scale, "{}: {name} {many}, not {one}", case.layout);
        }
    }
}

#[test]
fn every_layout_gives_the_step_of_one_rank() {
    for (dp, ep) in [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (8, 1)] {
        check(&case(dp, ep));
    }
}

#[test]
fn matrices_cut_across_ranks_give_the_step_of_one_rank() {
    // Two heads of keys and values: fewer than three or four ranks, which then share them.
    let dense = ModelConfig { num_layers: 3, moe_every: 2, dense_width: 21, num_heads: 4, num_kv_heads: 2, ..model() };
    for (dp, ep, tp) in
        [(1, 1, 2), (1, 1, 3), (1, 1, 4), (2, 1, 2), (1, 2, 2), (3, 1, 2), (1, 3, 2), (2, 2, 2), (1, 2, 3), (2, 1, 4)]
    {
        check(&sliced((dp, ep, tp), dense.clone()));
    }
}

#[test]
fn every_kind_of_weight_is_cut_right() {
    let variant = Variant {
        qkv_bias: true,
        output_bias: true,
        feed_forward_bias: true,
        sinks: true,
        head_bias: true,
        shared_gate: true,
        router_bias: true,
        ..Variant::default()
    };
    let model = ModelConfig {
        variant,
        num_layers: 2,
        moe_every: 2,
        dense_width: 7,
        num_heads: 5,
        qk_norm: QkNorm::Head,
        tie_embeddings: false,
        ..model()
    };
    check(&sliced((1, 2, 2), model.clone()));
    check(&sliced((1, 1, 4), ModelConfig { tie_embeddings: true, num_kv_heads: 5, ..model }));
}

#[test]
fn latent_attention_is_cut_by_heads() {
    let sizes = LatentAttention { query_rank: 10, kv_rank: 6, plain_dim: 4, rotary_dim: 4 };
    for query_rank in [10, 0] {
        let latent = Some(LatentAttention { query_rank, ..sizes });
        let variant = Variant { latent, value_dim: 6, ..Variant::default() };
        let model = ModelConfig { variant, num_heads: 3, num_kv_heads: 3, head_dim: 8, ..model() };
        check(&sliced((1, 1, 3), model.clone()));
        check(&sliced((2, 1, 2), model));
    }
}

#[test]
fn tokens_of_a_group_go_to_experts_in_runs_of_any_length() {
    for num_sequences in [1, 2] {
        check(&Case { num_sequences, ..sliced((3, 1, 2), model()) });
        check(&Case { num_sequences, checkpoint_layers: true, ..sliced((1, 2, 2), model()) });
    }
    let mut apart = sliced((2, 2, 2), model());
    apart.layout.order = Order::Apart;
    check(&apart);
    for kind in [RouterKind::NoisyTopK, RouterKind::Hash] {
        check(&sliced((1, 1, 2), ModelConfig { router: RouterConfig { kind, ..RouterConfig::default() }, ..model() }));
    }
    let router = RouterConfig { gate_residual: true, ..RouterConfig::default() };
    check(&sliced((1, 2, 2), ModelConfig { router, num_layers: 3, ..model() }));
}

#[test]
fn every_path_and_number_of_chunks_gives_the_step_of_one_rank() {
    for ((dp, ep), nodes) in
        [((1, 4), vec![0, 1, 0, 1]), ((2, 3), vec![0, 0, 1, 1, 2, 2]), ((1, 8), vec![0, 0, 0, 0, 0, 1, 1, 1])]
    {
        for (algorithm, chunks) in [(Algorithm::Linear, 3), (Algorithm::Hierarchical, 2), (Algorithm::TwoHop, 0)] {
            let exchange = Exchange { algorithm, chunks, ..Exchange::plain(Wire::F32) };
            check(&Case { exchange, nodes: nodes.clone(), checkpoint_layers: chunks == 2, ..case(dp, ep) });
        }
    }
}

#[test]
fn sums_that_run_under_backward_are_those_that_come_after_it() {
    let mut model = model();
    (model.num_layers, model.moe_every, model.dense_width) = (4, 2, 20);
    for num_sequences in [5, 2] {
        let one = Case { model: model.clone(), num_sequences, is_overlapped: false, ..case(2, 2) };
        let (after, under) = (step_on_ranks(&one), step_on_ranks(&Case { is_overlapped: true, ..one }));
        assert!(after.grads == under.grads && after.norm == under.norm, "the same bits");
    }
}

#[test]
fn groups_that_lie_apart_give_the_step_of_one_rank() {
    let mut case = case(2, 3);
    case.layout.order = Order::Apart;
    check(&case);
}

#[test]
fn experts_on_some_or_all_ranks_give_the_step_of_one_rank() {
    let mut replicated = case(2, 3);
    replicated.placement.replicate(0, &[2]);
    replicated.placement.replicate(4, &[0, 1, 2]);
    check(&replicated);
    check(&Case { placement: Placement::everywhere(6, 4), ..case(1, 4) });
}

#[test]
fn layers_that_are_computed_again_and_other_routers_give_the_step_of_one_rank() {
    check(&Case { checkpoint_layers: true, ..case(1, 4) });
    for kind in [RouterKind::NoisyTopK, RouterKind::Gumbel, RouterKind::TopP, RouterKind::Relu, RouterKind::Hash] {
        let mut case = case(1, 3);
        case.model.router = RouterConfig { kind, ..RouterConfig::default() };
        check(&case);
    }
}

#[test]
fn shares_of_sequences_are_neighbours_and_cover_all() {
    let shares = try_run_ranks(&RankOptions::new(3), |comm: &dyn Communicator| {
        let ranks = Ranks::new(comm, Layout::new(3, 1, 1), Placement::sharded(1, 1), Exchange::plain(Wire::F32))?;
        Ok::<_, TrainError>([7, 2, 0].map(|num| ranks.share(num)))
    })
    .unwrap();
    assert_eq!(shares, [[0..3, 0..1, 0..0], [3..5, 1..2, 0..0], [5..7, 2..2, 0..0]]);
}

#[test]
fn ranks_with_other_settings_are_refused() {
    let results = moeworks_comm::run_ranks(&RankOptions::new(3), |comm: &dyn Communicator| {
        let ranks = Ranks::new(comm, Layout::new(3, 1, 1), Placement::sharded(1, 1), Exchange::plain(Wire::F32))?;
        ranks.check_same("configuration", if ranks.world.rank() == 1 { "lr = 1" } else { "lr = 2" })
    });
    for result in results {
        let message = result.expect_err("refused").to_string();
        assert!(message.contains("rank 1") && message.contains("configuration"), "{message}");
    }
}
