//! A step of a pipeline is that of one rank, whatever the schedule: losses, statistics and the gradient of every
//! weight.

use std::time::{Duration, Instant};

use moeworks_comm::{Communicator, RankOptions, try_run_ranks};
use moeworks_infer::data::Batch;
use moeworks_model::{GradTarget, RouterNoise};
use moeworks_moe::Ramp;
use moeworks_ops::linear::Write;
use moeworks_plan::{Exchange, Layout, Placement, ScheduleKind, Wire};
use moeworks_tensor::{Purpose, Random};

use super::*;
use crate::config::RunConfig;
use crate::optimizer::global_norm;

const SEQ_LEN: usize = 6;
const VOCABULARY: usize = 31;
/// Sequences of a microbatch.
const SEQUENCES: usize = 4;
/// The share of the largest value of a tensor.
const TOLERANCE: f32 = 1e-5;

/// Tensors by name.
type Named = Vec<(String, Vec<f32>)>;

struct Case {
    model: ModelConfig,
    layout: Layout,
    /// A name, or the path of a file.
    schedule: String,
    stages: &'static str,
    num_microbatches: usize,
    checkpoint_layers: bool,
    zero: u8,
    /// The ranks that each stage group spreads its experts over, if these differ.
    stage_ep: &'static str,
}

struct Step {
    stats: Vec<PassStats>,
    norm: f64,
    grads: Named,
}

/// A model with experts in every other layer, whose embedding is the output projection.
fn model(num_layers: usize) -> ModelConfig {
    ModelConfig {
        vocab_size: VOCABULARY,
        width: 16,
        num_layers,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 8,
        moe_every: 2,
        num_experts: 4,
        top_k: 2,
        expert_width: 12,
        shared_width: 8,
        dense_width: 20,
        jitter: Ramp::constant(0.01),
        max_seq_len: 16,
        init_std: 0.2,
        tie_embeddings: true,
        ..ModelConfig::default()
    }
}

fn dense(num_layers: usize) -> ModelConfig {
    ModelConfig { num_experts: 0, shared_width: 0, tie_embeddings: false, ..model(num_layers) }
}

fn case(pp: usize, schedule: &str) -> Case {
    Case {
        model: model(4),
        layout: Layout::new(1, 1, 1).with_pipeline(pp),
        schedule: schedule.to_owned(),
        stages: "",
        num_microbatches: 4,
        checkpoint_layers: false,
        zero: 0,
        stage_ep: "",
    }
}

impl Case {
    fn config(&self) -> RunConfig {
        let mut config = RunConfig { model: self.model.clone(), ..RunConfig::default() };
        config.train.seq_len = SEQ_LEN;
        config.train.grad_accumulation = self.num_microbatches;
        config.parallel.pp = self.layout.pp;
        config.parallel.schedule.clone_from(&self.schedule);
        self.stages.clone_into(&mut config.parallel.stages);
        self.stage_ep.clone_into(&mut config.parallel.stage_ep);
        (config.parallel.dp, config.parallel.ep, config.parallel.tp) = (self.layout.dp, self.layout.ep, self.layout.tp);
        config
    }

    fn plan(&self) -> PipelinePlan {
        PipelinePlan::new(&self.config()).expect("a pipeline").expect("several ranks")
    }

    /// The sequences `range` of a microbatch.
    fn batch(&self, microbatch: usize, range: std::ops::Range<usize>) -> StepBatch {
        let ids = |stream: u64| -> Vec<u32> {
            let random = Random::new(5, Purpose::Test, 2 * microbatch as u64 + stream);
            let all = (0..SEQUENCES * SEQ_LEN).map(|i| random.below(i as u64, VOCABULARY as u64) as u32);
            all.skip(range.start * SEQ_LEN).take(range.len() * SEQ_LEN).collect()
        };
        let batch =
            Batch { inputs: ids(0), targets: ids(1), num_sequences: range.len(), seq_len: SEQ_LEN, ..Batch::default() };
        let options = PassOptions {
            balance_coef: 0.1,
            z_coef: 0.05,
            sequence_coef: 0.1,
            importance_coef: 0.1,
            noise: Some(RouterNoise { seed: 3, step: microbatch as u64 }),
            first_token: range.start * SEQ_LEN,
            checkpoint_layers: self.checkpoint_layers,
            grad_scale: 1.0 / (self.num_microbatches * SEQUENCES * SEQ_LEN) as f32,
            ..PassOptions::default()
        };
        StepBatch { batch, options }
    }
}

fn step_on_one(case: &Case) -> Step {
    let ctx = Context::cpu(1);
    let decoder = Decoder::new(case.model.clone()).unwrap();
    let weights = decoder.init(&ctx, 7, None);
    let mut grads = weights.zeros_like(&ctx);
    let mut stats = Vec::new();
    for microbatch in 0..case.num_microbatches {
        let StepBatch { batch, options } = case.batch(microbatch, 0..SEQUENCES);
        let target = GradTarget::new(if microbatch == 0 { Write::Replace } else { Write::Add }, &mut grads);
        stats.extend(decoder.forward_backward(&ctx, &weights, &[batch.tokens()], &options, target).unwrap());
    }
    let norm = global_norm(&ctx, decoder.weight_table(), &grads);
    let grads = grads.tensors().into_iter().map(|(name, tensor)| (name, tensor.f32s().to_vec())).collect();
    Step { stats, norm, grads }
}

/// The norm of the gradients, which are then those of all ranks.
fn finish_sums(
    ranks: &Ranks,
    ctx: &Context,
    part: &DecoderWeights,
    grads: &mut DecoderWeights,
    sums: SumsUnderWay,
) -> Result<f64, TrainError> {
    if !ranks.shards_optimizer() {
        ranks.sum_gradients(grads, sums)?;
        return ranks.global_norm(ctx, grads);
    }
    let own = ranks.sum_to_slices(ctx, grads, sums)?;
    let norm = ranks.norm_of_slices(ctx, &own)?;
    *grads = part.zeros_like(ctx);
    ranks.join_slices(ctx, &own, grads)?;
    Ok(norm)
}

/// The whole of what all ranks have of `part`, on the root.
fn whole_on_root(ranks: &Ranks, ctx: &Context, part: &DecoderWeights) -> Result<Option<Named>, TrainError> {
    if !ranks.is_root() {
        return ranks.give_tensors(ctx, ranks.held_parts(part)).map(|()| None);
    }
    let names = ranks.table().weights().specs().iter().map(|spec| spec.name.clone());
    let wholes = ranks.whole_one_by_one(ctx, ranks.held_parts(part));
    Ok(Some(names.zip(wholes.map(|whole| whole.expect("a tensor").f32s().to_vec())).collect()))
}

/// A rank with its stages and its microbatches.
struct Rank {
    ranks: Arc<Ranks>,
    ctx: Context,
    pipeline: Pipeline,
    /// This rank's part of the weights.
    part: DecoderWeights,
    /// The slices of it, if ranks keep these.
    slices: Option<DecoderWeights>,
    grads: DecoderWeights,
    microbatches: Vec<StepBatch>,
}

impl Rank {
    fn new(case: &Case, plan: &PipelinePlan, comm: &dyn Communicator) -> Result<Self, TrainError> {
        let layout = case.config().parallel.layout_of_stage_group(case.layout.stage_group(comm.rank()));
        let placement = Placement::sharded(case.model.num_experts, layout.num_expert_ranks());
        let ranks = Ranks::new(comm, layout, placement, Exchange::plain(Wire::F32))?.with_zero(case.zero);
        let (ranks, ctx) = (Arc::new(ranks), Context::cpu(1));
        let table = WeightTable::new(&case.model);
        let (pipeline, decoder) = Pipeline::on_ranks(&ranks, &case.model, table, plan.clone())?;
        let part = decoder.init(&ctx, 7, Some(&mut |spec, tensor| ranks.part(&ctx, spec, &tensor)));
        let slices = ranks.shards_weights().then(|| ranks.slices_of(&ctx, &part));
        let grads = ranks.first_grads(&ctx, slices.as_ref().unwrap_or(&part));
        let share = ranks.share(SEQUENCES);
        let microbatch = |microbatch| case.batch(microbatch, share.clone());
        let microbatches = (0..case.num_microbatches).map(microbatch).collect();
        Ok(Self { ranks, ctx, pipeline, part, slices, grads, microbatches })
    }
}

fn step_on_ranks(case: &Case) -> Step {
    step_with(case, true)
}

/// A step whose pairs take turns, or are computed one after the other.
fn step_with(case: &Case, overlaps_pairs: bool) -> Step {
    let plan = case.plan();
    let steps = try_run_ranks(&RankOptions::new(case.layout.num_ranks()), |comm: &dyn Communicator| {
        let Rank { ranks, ctx, mut pipeline, part, slices, mut grads, microbatches } = Rank::new(case, &plan, comm)?;
        pipeline.overlaps_pairs = overlaps_pairs;
        let view = StageView { ctx: &ctx, ranks: &ranks, weights: slices.as_ref().unwrap_or(&part) };
        let mut sums = ranks.begin_sums(&ctx);
        let outcome = pipeline.step(view, &microbatches, &mut grads, &mut sums)?;
        if ranks.shards_gradients() {
            let in_layers = grads.layers.iter().map(|layer| layer.attention.o.weight.len());
            assert_eq!(in_layers.sum::<usize>(), 0, "matrices have no gradients after the step");
        }
        let norm = finish_sums(&ranks, &ctx, &part, &mut grads, sums)?;
        ranks.check_copies(&grads)?;
        let grads = whole_on_root(&ranks, &ctx, &grads)?;
        Ok::<_, TrainError>((outcome, norm, grads, ranks.pp_rank()))
    })
    .expect("the ranks talk");
    let checked = plan.schedule.check().expect("it can be carried out");
    for (outcome, norm, _, pp_rank) in &steps {
        // A stage whose parts are actions is computed with one of them, and so holds what it holds for no longer.
        if plan.schedule.moe_layers.is_empty() {
            assert_eq!(outcome.peaks, checked.peaks()[*pp_rank], "{}: pipeline rank {pp_rank}", case.schedule);
        }
        let losses = |stats: &[PassStats]| stats.iter().map(|stats| stats.loss_sum).collect::<Vec<_>>();
        let first = (steps[0].1, losses(&steps[0].0.stats));
        assert_eq!((*norm, losses(&outcome.stats)), first, "all ranks know the same");
    }
    assert!(steps[1..].iter().all(|step| step.2.is_none()), "one has the whole");
    let (outcome, norm, grads, _) = steps.into_iter().next().unwrap();
    Step { stats: outcome.stats, norm, grads: grads.expect("the root's") }
}

fn check(case: &Case) {
    let what = format!("{}, {}", case.schedule, case.layout);
    let (one, many) = (step_on_one(case), step_on_ranks(case));
    let near = |figure: &str, value: f64, expected: f64| {
        assert!((value - expected).abs() <= 1e-5 * expected.abs(), "{what}: {figure} {value}, not {expected}");
    };
    assert_eq!(many.stats.len(), one.stats.len());
    for (many, one) in many.stats.iter().zip(&one.stats) {
        near("loss", many.loss_sum, one.loss_sum);
        near("balance loss", many.balance_loss, one.balance_loss);
        near("z-loss", many.z_loss, one.z_loss);
        assert_eq!((many.num_targets, many.num_correct), (one.num_targets, one.num_correct), "{what}");
        assert_eq!(many.layers.len(), one.layers.len());
        for (many, one) in many.layers.iter().zip(&one.layers) {
            assert_eq!(many.kept_per_expert, one.kept_per_expert, "{what}");
        }
    }
    near("norm", many.norm, one.norm);
    for ((name, many), (_, one)) in many.grads.iter().zip(&one.grads) {
        let scale = one.iter().fold(1e-6_f32, |max, x| max.max(x.abs()));
        assert_eq!(many.len(), one.len(), "{what}: {name}");
        for (many, one) in many.iter().zip(one) {
            assert!((many - one).abs() <= TOLERANCE * scale, "{what}: {name} {many}, not {one}");
        }
    }
}

#[test]
fn every_schedule_over_two_stage_groups_gives_the_step_of_one_rank() {
    for kind in ScheduleKind::ALL {
        check(&case(2, kind.name()));
        check(&Case { model: dense(4), ..case(2, kind.name()) });
    }
}

#[test]
fn every_schedule_over_four_stage_groups_gives_the_step_of_one_rank() {
    for kind in ScheduleKind::ALL {
        check(&Case { model: model(8), num_microbatches: 8, ..case(4, kind.name()) });
    }
}

#[test]
fn untied_ends_and_layers_that_are_computed_again_give_the_step_of_one_rank() {
    for schedule in ["1f1b", "zb_v", "dualpipe"] {
        let model = ModelConfig { tie_embeddings: false, ..model(4) };
        check(&Case { model, checkpoint_layers: true, ..case(2, schedule) });
    }
}

#[test]
fn stages_of_any_length_give_the_step_of_one_rank() {
    for (schedule, stages) in
        [("1f1b", "1,3"), ("zb_h1", "3,1"), ("interleaved", "1,2,1,1"), ("interleaved", "1,1,1,1,1,1")]
    {
        let num_layers = stages.split(',').map(|count| count.parse::<usize>().unwrap()).sum();
        check(&Case { model: model(num_layers), stages, ..case(2, schedule) });
    }
}

#[test]
fn a_pipeline_goes_with_copies_experts_and_matrices_over_ranks() {
    for (dp, ep, tp) in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)] {
        let layout = Layout::new(dp, ep, tp).with_pipeline(2);
        for schedule in ["1f1b", "zb_h1", "dualpipe", "dualpipe_v"] {
            check(&Case { layout, ..case(2, schedule) });
        }
    }
}

#[test]
fn pairs_that_take_turns_give_the_bits_of_one_after_the_other() {
    for (dp, ep, tp) in [(1, 2, 1), (2, 1, 1), (1, 3, 1), (1, 1, 2)] {
        let layout = Layout::new(dp, ep, tp).with_pipeline(2);
        for schedule in ["dualpipe", "dualpipe_v", "1f1b_overlap", "interleaved_overlap"] {
            let case = Case { layout, model: ModelConfig { num_experts: 6, ..model(4) }, ..case(2, schedule) };
            let (overlapped, plain) = (step_with(&case, true), step_with(&case, false));
            let what = format!("{schedule}, {layout}");
            assert_eq!(overlapped.norm.to_bits(), plain.norm.to_bits(), "{what}");
            assert_eq!(format!("{:?}", overlapped.stats), format!("{:?}", plain.stats), "{what}");
            for ((name, ours), (_, theirs)) in overlapped.grads.iter().zip(&plain.grads) {
                assert!(ours.iter().map(|x| x.to_bits()).eq(theirs.iter().map(|x| x.to_bits())), "{what}: {name}");
            }
        }
    }
}

#[test]
fn optimizer_state_that_ranks_share_out_gives_the_step_of_one_rank() {
    for (dp, ep) in [(2, 1), (1, 2)] {
        for schedule in ["1f1b", "dualpipe"] {
            let layout = Layout::new(dp, ep, 1).with_pipeline(2);
            check(&Case { layout, zero: 1, ..case(2, schedule) });
        }
    }
}

#[test]
fn gradients_and_weights_that_ranks_share_out_give_the_step_of_one_rank() {
    for (dp, ep, tp) in [(2, 1, 1), (1, 2, 1), (2, 1, 2)] {
        let layout = Layout::new(dp, ep, tp).with_pipeline(2);
        for schedule in ["gpipe", "1f1b", "zb_h1", "zb_v", "interleaved_overlap", "dualpipe_v"] {
            for zero in [2, 3] {
                check(&Case { layout, zero, ..case(2, schedule) });
            }
        }
    }
    let model = ModelConfig { tie_embeddings: false, ..model(4) };
    let layout = Layout::new(2, 1, 1).with_pipeline(4);
    check(&Case { model, layout, zero: 3, checkpoint_layers: true, ..case(4, "zb_h2") });
}

#[test]
fn stage_groups_with_layouts_of_their_own_give_the_step_of_one_rank() {
    for (dp, ep, tp) in [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2)] {
        let layout = Layout::new(dp, ep, tp).with_pipeline(2);
        for (schedule, stage_ep, zero) in
            [("1f1b", "1,2", 0), ("zb_v", "2,1", 1), ("interleaved_overlap", "1,2", 2), ("zb_h1", "2,1", 3)]
        {
            check(&Case { layout, stage_ep, zero, ..case(2, schedule) });
        }
    }
    let layout = Layout::new(4, 1, 1).with_pipeline(3);
    check(&Case { model: model(6), layout, stage_ep: "1,2,4", stages: "1,1,4", ..case(3, "1f1b") });
}

/// A schedule in a file.
fn in_file(schedule: &moeworks_plan::Schedule) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("by_hand.schedule");
    std::fs::write(&path, schedule.to_string()).expect("written");
    let path = path.display().to_string();
    (folder, path)
}

#[test]
fn a_schedule_written_by_hand_is_carried_out() {
    // The second stage takes its microbatches in another order than the first sends them.
    let text = "schedule by hand\n\
                microbatches 0..3: stages on ranks 0 1\n\
                rank 0: 0F0, 0F1, 0F2, 0B2, 0BW0, 0B1, 0W1, 0W2\n\
                rank 1: 1F2, 1F1, 1B2, 1F0, 1BW0, 1W2, 1B1, 1W1\n";
    let (_folder, schedule) = in_file(&text.parse().expect("a schedule"));
    check(&Case { num_microbatches: 3, ..case(2, &schedule) });
}

#[test]
fn sends_receives_and_parts_of_layers_are_carried_out() {
    let times = moeworks_plan::Times::uniform(1.0, 1.0, 1.0);
    let request = moeworks_plan::ScheduleRequest::new(2, 4, &times);
    let schedule = ScheduleKind::OneFOneBOverlap.generate(&request).expect("a schedule");
    let checked = schedule.check().expect("a right schedule");
    let parts = checked.with_all_to_alls(&[1, 1]).expect("a number for each stage");
    let both = parts.check().expect("an expanded schedule is right").with_messages();
    for schedule in [checked.with_messages(), parts.clone(), both] {
        let (_folder, path) = in_file(&schedule);
        check(&case(2, &path));
    }
}

#[test]
fn a_rank_that_dies_in_the_middle_of_a_schedule_is_named_by_the_others() {
    for (schedule, pp) in [("1f1b", 3), ("zb_v", 3), ("dualpipe", 2)] {
        let case = Case { model: model(6), num_microbatches: 6, ..case(pp, schedule) };
        let (plan, start) = (case.plan(), Instant::now());
        let failed = try_run_ranks(&RankOptions::new(pp), |comm: &dyn Communicator| {
            let Rank { ranks, ctx, pipeline, part, mut grads, microbatches, .. } = Rank::new(&case, &plan, comm)?;
            let view = StageView { ctx: &ctx, ranks: &ranks, weights: &part };
            let grads = StepGrads { grads: &mut grads, slices: None };
            let mut execution = Execution::new(&pipeline, view, &microbatches, grads);
            for (place, entry) in plan.schedule.ranks[comm.rank()].iter().enumerate() {
                assert!((comm.rank(), place) != (1, 5), "out of paper");
                entry.actions().try_for_each(|action| execution.carry_out(action))?;
            }
            execution.finish().map(drop)
        });
        let said = failed.expect_err("a step that lost a rank has failed").to_string();
        assert!(said.starts_with("rank 1 died: panicked:") && said.contains("out of paper"), "{schedule}: {said}");
        assert!(start.elapsed() < Duration::from_secs(20), "the others ended after {:?}", start.elapsed());
    }
}
