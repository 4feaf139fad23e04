//! A step on several ranks equals that of one rank: losses, statistics and the gradient of every weight.

use moeworks_comm::{RankOptions, try_run_ranks};
use moeworks_infer::generation::ModelRef;
use moeworks_model::KvCache;
use moeworks_model::{
    BalanceKind, GradTarget, LatentAttention, LayerDone, ModelConfig, PassOptions, PassOrder, PassStats, QkNorm,
    RouterNoise, TokenBatch, Variant,
};
use moeworks_moe::{EntropyRule, ExpertIds, Overflow, Ramp, RouterConfig, RouterKind, ScoreFunction};
use moeworks_ops::linear::Write;
use moeworks_plan::{Algorithm, Exchange, Moving, Placement, RankOrder, Wire};
use moeworks_tensor::{DType, Purpose, Random};

use super::gather::Held;
use super::*;
use crate::language_model::decoder_on_ranks;
use crate::optimizer::global_norm;
use moeworks_model::{Decoder, DecoderWeights, ParamSet, Sharding, WeightTable};
use moeworks_ops::Context;

#[path = "agreement_tests.rs"]
mod agreement;
#[path = "placement_tests.rs"]
mod placement;
#[path = "text_tests.rs"]
mod text;
#[path = "weight_tests.rs"]
mod weights;

const SEQ_LEN: usize = 6;
const VOCABULARY: usize = 31;
/// The tolerance relative to the largest value of a tensor.
const TOLERANCE: f32 = 1e-5;

struct Case {
    model: ModelConfig,
    num_sequences: usize,
    layout: Layout,
    placements: Placements,
    exchange: Exchange,
    moving: Moving,
    /// The node of each rank.
    nodes: Vec<usize>,
    checkpoint_layers: bool,
    /// True if expert ids are passed to routers.
    hands_in_ids: bool,
    /// True if the gradients of a layer are summed while lower layers are computed.
    is_overlapped: bool,
    balance: BalanceKind,
    /// The stage of ZeRO.
    zero: u8,
    /// Sharding rules, and patterns of frozen weights.
    sharding: Vec<String>,
    freeze: Vec<String>,
}

impl Case {
    fn ep_options(&self) -> EpOptions {
        EpOptions { moving: self.moving, ..self.exchange.into() }
    }

    fn table(&self) -> WeightTable {
        let mut table = WeightTable::new(&self.model);
        table.set_sharding(&self.sharding).expect("rules that can be carried out");
        table.freeze(&self.freeze).expect("patterns of names");
        table
    }
}

/// The results of a step: statistics, the norm, and every gradient by name.
struct Step {
    stats: PassStats,
    norm: f64,
    grads: Named,
}

/// Tensors by name.
type Named = Vec<(String, Vec<f32>)>;

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

/// Returns a case of `model` on dp x ep x tp ranks.
fn sliced((dp, ep, tp): (usize, usize, usize), model: ModelConfig) -> Case {
    let layout = Layout::new(dp, ep, tp);
    let placements = Placement::sharded(model.num_experts, layout.num_expert_ranks()).into();
    let (exchange, nodes) = (Exchange::plain(Wire::F32), vec![0; layout.num_ranks()]);
    Case {
        model,
        num_sequences: 5,
        layout,
        placements,
        exchange,
        moving: Moving::Tokens,
        nodes,
        checkpoint_layers: false,
        hands_in_ids: false,
        is_overlapped: true,
        balance: BalanceKind::Pooled,
        zero: 0,
        sharding: Vec::new(),
        freeze: Vec::new(),
    }
}

fn options(case: &Case, first_token: usize) -> PassOptions {
    PassOptions {
        balance: case.balance,
        balance_coef: 0.1,
        device_coef: 0.2,
        communication_coef: 0.3,
        load_coef: 0.1,
        l1_scale: 1.0,
        progress: 0.3,
        z_coef: 0.05,
        sequence_coef: 0.1,
        importance_coef: 0.1,
        entropy: EntropyRule { local: 0.02, global: 0.03, min_entropy: 2.0 },
        noise: Some(RouterNoise { seed: 3, step: 4 }),
        first_token,
        checkpoint_layers: case.checkpoint_layers,
        order: PassOrder::default(),
        grad_scale: 1.0 / (case.num_sequences * SEQ_LEN) as f32,
    }
}

fn ids(case: &Case, stream: u64, sequences: Range<usize>) -> Vec<u32> {
    let random = Random::new(5, Purpose::Test, stream);
    let all: Vec<u32> =
        (0..case.num_sequences * SEQ_LEN).map(|i| random.below(i as u64, VOCABULARY as u64) as u32).collect();
    all[sequences.start * SEQ_LEN..sequences.end * SEQ_LEN].to_vec()
}

/// Returns expert ids of some sequences, different ones for each MoE layer; none unless the case passes them.
fn expert_ids(case: &Case, ctx: &Context, decoder: &Decoder, sequences: Range<usize>) -> Vec<ExpertIds> {
    if !case.hands_in_ids {
        return Vec::new();
    }
    let (model, random) = (&case.model, Random::new(5, Purpose::Test, 2));
    let tokens = sequences.start * SEQ_LEN..sequences.end * SEQ_LEN;
    let of_token = |layer: usize, token: usize| {
        let place = (layer * case.num_sequences * SEQ_LEN + token) as u64;
        let first = random.below(place, model.num_experts as u64) as u32;
        (0..model.top_k as u32).map(move |k| (first + k) % model.num_experts as u32)
    };
    let of_layer = |layer| tokens.clone().flat_map(|token| of_token(layer, token)).collect();
    let lists: Vec<Vec<u32>> = model.moe_layers().into_iter().map(|(_, layer)| of_layer(layer)).collect();
    decoder.expert_ids(ctx, tokens.len(), &lists).expect("lists that fit the model")
}

/// Runs a pass over some sequences. Returns its statistics; `grads` receives its gradients only.
fn pass(
    case: &Case,
    (ctx, decoder, weights): (&Context, &Decoder, &DecoderWeights),
    sequences: Range<usize>,
    done: LayerDone<'_>,
    grads: &mut DecoderWeights,
) -> PassStats {
    let (inputs, targets) = (ids(case, 0, sequences.clone()), ids(case, 1, sequences.clone()));
    let expert_ids = expert_ids(case, ctx, decoder, sequences.clone());
    let batch = TokenBatch {
        expert_ids: &expert_ids,
        inputs: &inputs,
        targets: &targets,
        num_sequences: sequences.len(),
        seq_len: SEQ_LEN,
        ..TokenBatch::default()
    };
    let options = options(case, sequences.start * SEQ_LEN);
    let target = GradTarget { done: Some(done), ..GradTarget::new(Write::Replace, grads) };
    decoder.forward_backward(ctx, weights, &[batch], &options, target).unwrap().remove(0)
}

fn named(grads: &DecoderWeights) -> Named {
    grads.tensors().into_iter().map(|(name, tensor)| (name, tensor.f32s().to_vec())).collect()
}

fn step_on_one(case: &Case) -> Step {
    let ctx = Context::cpu(1);
    let decoder = Decoder::new(case.model.clone()).unwrap();
    let weights = decoder.init(&ctx, 7, None);
    let mut grads = weights.zeros_like(&ctx);
    let stats = pass(case, (&ctx, &decoder, &weights), 0..case.num_sequences, &mut |_, _| (), &mut grads);
    Step { stats, norm: global_norm(&ctx, decoder.weight_table(), &grads), grads: named(&grads) }
}

/// Finishes the sums and returns the norm of the gradients, which are whole afterwards.
fn finish_sums(
    ranks: &Ranks,
    ctx: &Context,
    weights: &DecoderWeights,
    grads: &mut DecoderWeights,
    mut sums: SumsUnderWay,
) -> Result<f64, TrainError> {
    let Some(slices) = &mut sums.slices else {
        ranks.sum_gradients(grads, sums)?;
        return ranks.global_norm(ctx, grads);
    };
    slices.end_pass(ranks, ctx, grads);
    let of_layers = grads.tensors().into_iter().filter(|(name, _)| name.starts_with("model.layers."));
    assert_eq!(of_layers.map(|(_, tensor)| tensor.len()).sum::<usize>(), 0, "no layer's gradients are left");
    let own = ranks.sum_to_slices(ctx, grads, sums)?;
    let norm = ranks.norm_of_slices(ctx, &own)?;
    *grads = weights.zeros_like(ctx);
    ranks.join_slices(ctx, &own, grads)?;
    Ok(norm)
}

/// Returns a rank's slice of every tensor of its part.
fn slices(ranks: &Ranks, ctx: &Context, part: &DecoderWeights) -> DecoderWeights {
    part.map_params(ranks.table().weights(), |spec, tensor| ranks.slice(ctx, spec.index, tensor))
}

/// Gathers all ranks' `part` on the root.
fn whole_on_root(ranks: &Ranks, ctx: &Context, part: &DecoderWeights) -> Result<Option<Named>, TrainError> {
    if !ranks.is_root() {
        return ranks
            .give_tensors(ctx, Held { tensors: part, are_slices: false, only_trainable: false })
            .map(|()| None);
    }
    let names = ranks.table().specs().iter().map(|spec| spec.name.clone());
    let wholes = ranks
        .whole_one_by_one(ctx, Held { tensors: part, are_slices: false, only_trainable: false })
        .map(|whole| whole.expect("a tensor").f32s().to_vec());
    Ok(Some(names.zip(wholes).collect()))
}

fn step_on_ranks(case: &Case) -> Step {
    let steps = try_run_ranks(&RankOptions::new(0).with_nodes(&case.nodes), |comm: &dyn Communicator| {
        let ranks = Ranks::new(comm, case.layout, case.placements.clone(), case.ep_options())?;
        let ranks = Arc::new(ranks.with_zero(case.zero));
        let ctx = Context::cpu(1);
        let decoder = decoder_on_ranks(&ranks, case.model.clone(), case.table())?;
        let part = decoder.init(&ctx, 7, Some(&mut |spec, tensor| ranks.part(&ctx, spec, &tensor)));
        let weights = if case.zero == 3 { slices(&ranks, &ctx, &part) } else { part.compute_copy(&ctx, DType::F32) };
        let (mut sums, mut grads) = (ranks.begin_sums(&ctx), ranks.first_grads(&ctx, &weights));
        if let Some(slices) = &sums.slices {
            slices.begin_pass(&ranks, &ctx, &mut grads);
        }
        let mut done = |layer, grads: &mut DecoderWeights| {
            if case.is_overlapped {
                ranks.start_sums(&ctx, layer, grads, &mut sums);
            }
        };
        let share = ranks.share(case.num_sequences);
        let stats = pass(case, (&ctx, &decoder, &weights), share, &mut done, &mut grads);
        ranks.check()?;
        let norm = finish_sums(&ranks, &ctx, &part, &mut grads, sums)?;
        let grads = whole_on_root(&ranks, &ctx, &grads)?;
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
        assert_eq!(many.kept_per_expert, one.kept_per_expert);
        assert_eq!(many.num_rerouted, one.num_rerouted);
        assert_eq!(many.num_choices, one.num_choices);
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
    // Two heads of keys and values, fewer than the three or four ranks, which then share them.
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
fn a_norm_over_all_heads_is_that_of_one_rank() {
    let model = ModelConfig { qk_norm: QkNorm::Whole, num_heads: 4, num_kv_heads: 2, ..model() };
    // With more ranks than heads of keys and values, several ranks normalise the same heads.
    for (layout, num_kv_heads) in [((1, 1, 2), 2), ((2, 1, 2), 1), ((1, 1, 3), 4), ((1, 2, 4), 2), ((1, 1, 4), 1)] {
        check(&sliced(layout, ModelConfig { num_kv_heads, ..model.clone() }));
    }
    check(&Case { zero: 3, checkpoint_layers: true, ..sliced((2, 1, 2), model) });
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
    apart.layout.order = RankOrder::DpInner;
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

/// Returns for each rank of `layout` the used and the peak bytes of its pool when it has its initial weights, and the
/// bytes of the largest tensor of the whole model.
fn memory_at_the_start(layout: Layout, zero: u8) -> (Vec<[usize; 2]>, usize) {
    let model = ModelConfig { num_layers: 6, num_experts: 8, expert_width: 64, ..model() };
    let placement = Placement::sharded(model.num_experts, layout.num_expert_ranks());
    let ranks = try_run_ranks(&RankOptions::new(layout.num_ranks()), |comm: &dyn Communicator| {
        let ranks = Ranks::new(comm, layout, placement.clone(), Exchange::plain(Wire::F32))?.with_zero(zero);
        let (ranks, ctx) = (Arc::new(ranks), Context::cpu(1));
        let decoder = decoder_on_ranks(&ranks, model.clone(), WeightTable::new(&model))?;
        let largest = decoder.tensor_shapes().iter().map(|(_, shape)| 4 * shape.iter().product::<usize>()).max();
        let mut keep = ranks.keeper(&ctx, ranks.shards_weights());
        let _weights = decoder.init(&ctx, 7, Some(&mut |spec, tensor| keep(spec, &tensor)));
        let stats = ctx.pool().stats();
        Ok::<_, TrainError>(([stats.used_bytes, stats.peak_bytes], largest))
    });
    let ranks = ranks.expect("the ranks talk");
    let largest = ranks[0].1.expect("a tensor");
    (ranks.into_iter().map(|(stats, _)| stats).collect(), largest)
}

#[test]
fn a_rank_begins_with_its_part_and_a_tensor_at_a_time() {
    let whole = memory_at_the_start(Layout::new(1, 1, 1), 0).0[0][0];
    for (layout, zero) in
        [(Layout::new(1, 4, 1), 0), (Layout::new(1, 1, 2), 0), (Layout::new(4, 1, 1), 3), (Layout::new(2, 2, 1), 3)]
    {
        let (ranks, largest) = memory_at_the_start(layout, zero);
        for [kept, peak] in ranks {
            assert!(kept < whole * 2 / 3, "{layout}: {kept} of {whole}");
            assert!(peak <= kept + 2 * largest, "{layout}: {peak}, {kept} kept, {largest} a tensor");
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
fn gradients_and_weights_that_ranks_share_out_are_those_of_one_rank() {
    let model = ModelConfig { num_layers: 4, moe_every: 2, dense_width: 20, ..model() };
    for zero in [2, 3] {
        for (dp, ep, num_sequences) in [(1, 1, 5), (2, 1, 5), (1, 3, 5), (2, 2, 5), (8, 1, 5), (3, 2, 2)] {
            check(&Case { model: model.clone(), num_sequences, zero, ..case(dp, ep) });
        }
        for num_sequences in [5, 1] {
            check(&Case { zero, num_sequences, checkpoint_layers: true, ..sliced((2, 1, 2), model.clone()) });
        }
        // ZeRO does not depend on the exchange.
        for (algorithm, chunks) in [(Algorithm::Hierarchical, 2), (Algorithm::TwoHop, 3)] {
            let exchange = Exchange { algorithm, chunks, ..Exchange::plain(Wire::F32) };
            check(&Case { exchange, zero, nodes: vec![0, 1, 0, 1, 0, 1], ..case(2, 3) });
        }
        let tied = ModelConfig { tie_embeddings: true, qk_norm: QkNorm::Head, ..model.clone() };
        check(&Case { zero, ..sliced((3, 1, 1), tied) });
    }
}

#[test]
fn groups_that_lie_apart_give_the_step_of_one_rank() {
    let mut case = case(2, 3);
    case.layout.order = RankOrder::DpInner;
    check(&case);
}

#[test]
fn experts_on_some_or_all_ranks_give_the_step_of_one_rank() {
    let mut placement = Placement::sharded(model().num_experts, 3);
    placement.replicate(0, &[2]);
    placement.replicate(4, &[0, 1, 2]);
    check(&Case { placements: placement.into(), ..case(2, 3) });
    check(&Case { placements: Placement::everywhere(6, 4).into(), ..case(1, 4) });
}

/// Returns a model with a router and a capacity factor.
fn of_router(router: RouterConfig, capacity_factor: f32) -> ModelConfig {
    let top_k = match router.kind {
        RouterKind::Switch | RouterKind::Base => 1,
        _ => 2,
    };
    ModelConfig { router, capacity_factor, top_k, ..model() }
}

/// Returns every kind of router, and every other setting that affects an expert's tokens, with capacity factors of
/// both signs.
fn schemes() -> Vec<ModelConfig> {
    use RouterKind::*;
    let plain = RouterConfig::default();
    let mut schemes = Vec::new();
    for capacity_factor in [0.0, 0.6, -0.6] {
        let of_kind = |kind| {
            let mut router = RouterConfig { kind, ..plain.clone() };
            router.schemes.cosine.dim = 8;
            router.schemes.dense_to_sparse.share = 0.6;
            of_router(router, capacity_factor)
        };
        schemes.extend(RouterKind::ALL.iter().map(|&kind| of_kind(kind)));
        for (overflow, local_group) in [
            (Overflow::Priority, 0),
            (Overflow::Reroute, 0),
            (Overflow::Drop, 7),
            (Overflow::Reroute, 10),
            (Overflow::Priority, 50),
        ] {
            // Expert choice and the like do not reroute.
            let kinds =
                if overflow == Overflow::Reroute { &[TopK, TopP, Gshard][..] } else { &[TopK, ExpertChoice, Relu] };
            schemes.extend(kinds.iter().map(|&kind| {
                of_router(RouterConfig { kind, overflow, local_group, ..plain.clone() }, capacity_factor)
            }));
        }
    }
    schemes.extend([
        of_router(RouterConfig { expert_bias: true, scores: ScoreFunction::Sigmoid, ..plain.clone() }, 0.7),
        of_router(RouterConfig { num_groups: 3, top_groups: 2, ..plain.clone() }, 0.7),
        of_router(RouterConfig { noise_std: Ramp::constant(0.3), ..plain.clone() }, 0.7),
        of_router(RouterConfig { random_share: 0.2, random_fade: 0.5, ..plain.clone() }, 0.7),
        of_router(RouterConfig { sparsemixer_jitter: 0.1, ..plain.clone() }, 0.7),
        of_router(RouterConfig { zero_experts: 1, copy_experts: 1, constant_experts: 1, ..plain.clone() }, 0.7),
        of_router(RouterConfig { null_experts: 2, gate_residual: true, ..plain.clone() }, 0.7),
        of_router(RouterConfig { modality_boundaries: "11".into(), modality_experts: "2, 2".into(), ..plain }, 0.7),
    ]);
    schemes
}

#[test]
fn every_scheme_decides_on_ranks_what_it_decides_on_one() {
    for (index, model) in schemes().into_iter().enumerate() {
        // Each scheme is tested with two of the layouts, and each layout with many schemes.
        let layouts = [(1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (1, 8), (8, 1), (2, 4)];
        let balances = [BalanceKind::Layer, BalanceKind::Gshard, BalanceKind::Pooled];
        for (turn, &(dp, ep)) in layouts.iter().cycle().skip(index * 2).take(2).enumerate() {
            let checkpoint_layers = (index + turn).is_multiple_of(3);
            let balance = balances[(index + turn) % 3];
            check(&Case { model: model.clone(), checkpoint_layers, balance, ..case(dp, ep) });
        }
    }
}

#[test]
fn gshards_loss_is_that_of_all_tokens() {
    for (local_group, num_sequences) in [(0, 5), (7, 5), (6, 3), (13, 4), (100, 2)] {
        for (dp, ep) in [(1, 2), (2, 1), (1, 3), (2, 2), (2, 4)] {
            let router = RouterConfig { local_group, ..RouterConfig::default() };
            let model = of_router(router, 0.0);
            check(&Case { model, num_sequences, balance: BalanceKind::Gshard, ..case(dp, ep) });
        }
    }
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
fn expert_ids_that_are_handed_in_give_the_step_of_one_rank() {
    // With five sequences on eight ranks some ranks have none.
    for (dp, ep, tp) in [(1, 2, 1), (2, 2, 1), (1, 8, 1), (1, 1, 2), (1, 2, 2)] {
        let moe_every = ModelConfig { num_layers: 3, moe_every: 2, dense_width: 20, num_heads: 4, ..model() };
        for checkpoint_layers in [false, true] {
            let case = Case { hands_in_ids: true, checkpoint_layers, ..sliced((dp, ep, tp), moe_every.clone()) };
            check(&case);
        }
    }
    // A scheme whose own choice is made by all ranks together.
    let router = RouterConfig { kind: RouterKind::Base, ..RouterConfig::default() };
    let base = ModelConfig { top_k: 1, router, ..model() };
    check(&Case { hands_in_ids: true, ..sliced((1, 3, 1), base) });
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
