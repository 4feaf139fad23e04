//! A step with random weights and tokens, on one rank or on several.

use std::sync::Arc;

use moeworks_comm::{Communicator, RankOptions, try_run_ranks};
use moeworks_infer::data::Batch;
use moeworks_model::{Decoder, DecoderWeights, GradTarget, ParamSet, PassStats};
use moeworks_moe::{TableSource, balanced_hash};
use moeworks_ops::Context;
use moeworks_ops::elementwise::scale_assign;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::config::{ConfigError, RunConfig};
use crate::error::TrainError;
use crate::language_model::{check_memory, decoder_on_ranks, pass_options};
use crate::parallel::{Ranks, SumsUnderWay};
use crate::pipeline::{Pipeline, PipelinePlan, StageView, StepBatch};
use crate::task::Microbatch;

/// The tag of messages with copies of gradients for the root.
const COPY_TAG: u32 = 2;

/// A fault to put in: the last rank that holds some of a tensor doubles its gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The name of the tensor.
    pub tensor: String,
}

/// The losses and gradients of a step, under their names.
pub(super) struct StepResult {
    /// The losses of each microbatch.
    pub(super) losses: Vec<(String, Vec<f64>)>,
    pub(super) grads: Vec<(String, Vec<f32>)>,
    /// Gradients on ranks that should have the bits of their tensor-parallel group's first rank, and have not.
    pub(super) copies: Vec<GradCopy>,
}

/// A rank's own copy of a gradient.
pub(super) struct GradCopy {
    pub(super) rank: usize,
    /// The place of the tensor in the table.
    pub(super) place: usize,
    pub(super) values: Vec<f32>,
}

impl StepResult {
    fn new(stats: &[PassStats], grads: Vec<(String, Vec<f32>)>) -> Self {
        let of_each =
            |name: &str, value: fn(&PassStats) -> f64| (name.to_owned(), stats.iter().map(value).collect::<Vec<_>>());
        let losses = vec![
            of_each("the loss", |stats| stats.loss_sum / stats.num_targets.max(1) as f64),
            of_each("the balance loss", |stats| stats.balance_loss),
            of_each("the z-loss", |stats| stats.z_loss),
        ];
        Self { losses, grads, copies: Vec::new() }
    }

    /// Returns the mean loss.
    pub(super) fn loss(&self) -> f64 {
        let losses = &self.losses[0].1;
        losses.iter().sum::<f64>() / losses.len().max(1) as f64
    }
}

/// Takes a step on one rank.
pub(super) fn on_one(config: &RunConfig) -> Result<StepResult, TrainError> {
    let ctx = Context::cpu_all_cores();
    check_memory(&ctx, config, None)?;
    let decoder = Decoder::with_table(config.model.clone(), config.weight_table()?).map_err(ConfigError::from)?;
    let mut weights = decoder.init(&ctx, config.train.seed, None);
    set_hash_tables(config, &mut weights);
    let mut grads = weights.zeros_like(&ctx);
    let mut stats = Vec::new();
    for index in 0..config.train.grad_accumulation {
        let StepBatch { batch, options } = microbatch(config, None, index);
        let target = GradTarget::new(if index == 0 { Write::Replace } else { Write::Add }, &mut grads);
        stats.extend(decoder.forward_backward(&ctx, &weights, &[batch.tokens()], &options, target)?);
    }
    let named = |(name, tensor): (String, &Tensor)| (name, tensor.f32s().to_vec());
    Ok(StepResult::new(&stats, grads.tensors().into_iter().map(named).collect()))
}

/// Takes a step on as many ranks as `config` asks for, threads of this process.
pub(super) fn on_ranks(config: &RunConfig, fault: Option<&Fault>) -> Result<StepResult, TrainError> {
    let num_ranks = config.parallel.num_ranks();
    let results = try_run_ranks(&RankOptions::new(num_ranks), |comm: &dyn Communicator| {
        RankStep::new(comm, config)?.run(config, fault)
    })?;
    let result = results.into_iter().next().flatten();
    Ok(result.expect("the root has what all ranks computed"))
}

/// One rank before its step.
struct RankStep {
    ranks: Arc<Ranks>,
    ctx: Context,
    decoder: Decoder,
    pipeline: Option<Pipeline>,
    /// This rank's part of the weights; that of its slices where ranks keep these.
    part: DecoderWeights,
    weights: DecoderWeights,
}

impl RankStep {
    fn new(comm: &dyn Communicator, config: &RunConfig) -> Result<Self, TrainError> {
        let (ranks, ctx) = (Arc::new(Ranks::of_config(comm, config, false)?), Context::cpu(1));
        check_memory(&ctx, config, Some(&ranks))?;
        let (model, table) = (config.model.clone(), config.weight_table()?);
        let (pipeline, decoder) = match PipelinePlan::new(config)? {
            None => (None, decoder_on_ranks(&ranks, model, table)?),
            Some(plan) => {
                let (pipeline, decoder) = Pipeline::on_ranks(&ranks, &model, table, plan)?;
                (Some(pipeline), decoder)
            }
        };
        let mut part = decoder.init(&ctx, config.train.seed, Some(&mut |spec, tensor| ranks.part(&ctx, spec, &tensor)));
        set_hash_tables(config, &mut part);
        let weights =
            if ranks.shards_weights() { ranks.slices_of(&ctx, &part) } else { part.compute_copy(&ctx, DType::F32) };
        ranks.begin_steps()?;
        Ok(Self { ranks, ctx, decoder, pipeline, part, weights })
    }

    /// Takes the step. Returns the whole result on the root.
    fn run(self, config: &RunConfig, fault: Option<&Fault>) -> Result<Option<StepResult>, TrainError> {
        let Self { ranks, ctx, decoder, pipeline, part, weights } = self;
        let (mut sums, mut grads) = (ranks.begin_sums(&ctx), ranks.first_grads(&ctx, &weights));
        let microbatches = (0..config.train.grad_accumulation).map(|index| microbatch(config, Some(&ranks), index));
        let stats = match pipeline {
            Some(pipeline) => {
                let view = StageView { ctx: &ctx, ranks: &ranks, weights: &weights };
                pipeline.step(view, &microbatches.collect::<Vec<_>>(), &mut grads, &mut sums)?.stats
            }
            None => {
                let model = RankModel { ranks: &ranks, ctx: &ctx, decoder: &decoder, weights: &weights };
                let microbatches: Vec<StepBatch> = microbatches.collect();
                let mut stats = Vec::new();
                for (index, microbatch) in microbatches.iter().enumerate() {
                    let write = if index == 0 { Write::Replace } else { Write::Add };
                    stats.extend(model.pass(microbatch, write, &mut sums, &mut grads)?);
                }
                stats
            }
        };
        ranks.check()?;
        let fault = fault.and_then(|fault| fault.place(&ranks));
        let grads = summed(&ranks, &ctx, PartGrads { part: &part, grads, sums, fault })?;
        ranks.check_copies(&grads)?;
        let copies = unlike_copies(&ranks, &ctx, &grads)?;
        let held = ranks.held_parts(&grads);
        if !ranks.is_root() {
            ranks.give_tensors(&ctx, held)?;
            return Ok(None);
        }
        let names = ranks.table().weights().specs().iter().map(|spec| spec.name.clone());
        let mut named = Vec::new();
        for (name, whole) in names.zip(ranks.whole_one_by_one(&ctx, held)) {
            let whole = whole.map_err(|error| TrainError::Comm(ranks.world().abort(&error.to_string())))?;
            named.push((name, whole.f32s().to_vec()));
        }
        Ok(Some(StepResult { copies, ..StepResult::new(&stats, named) }))
    }
}

/// Brings to the root the gradients that tensor-parallel ranks should hold alike and do not. All ranks call this.
fn unlike_copies(ranks: &Ranks, ctx: &Context, grads: &DecoderWeights) -> Result<Vec<GradCopy>, TrainError> {
    let own = ranks.places_unlike_first(grads)?;
    let own: Vec<[u32; 2]> = own.into_iter().map(|place| [ranks.rank() as u32, place as u32]).collect();
    let (mut copies, params) = (Vec::new(), grads.params());
    for [rank, place] in ranks.all_values(&own)?.into_iter().map(|pair| pair.map(|number| number as usize)) {
        if rank == ranks.rank() {
            ranks.world().send(params[place].f32s(), 0, COPY_TAG)?;
        } else if ranks.is_root() {
            let mut copy = ctx.zeros(&ranks.table().weights().specs()[place].shape, DType::F32);
            ranks.world().receive(copy.f32s_mut(), rank, COPY_TAG)?;
            copies.push(GradCopy { rank, place, values: copy.f32s().to_vec() });
        }
    }
    Ok(copies)
}

/// A rank's model without a pipeline.
struct RankModel<'a> {
    ranks: &'a Ranks,
    ctx: &'a Context,
    decoder: &'a Decoder,
    weights: &'a DecoderWeights,
}

impl RankModel<'_> {
    /// Passes a microbatch, as the trainer does. Sharded gradients are accumulated in their slices.
    fn pass(
        &self,
        microbatch: &StepBatch,
        write: Write,
        sums: &mut SumsUnderWay,
        grads: &mut DecoderWeights,
    ) -> Result<Vec<PassStats>, TrainError> {
        let Self { ranks, ctx, decoder, weights } = *self;
        let write = if sums.slices.is_some() { Write::Replace } else { write };
        if let Some(slices) = &sums.slices {
            slices.begin_pass(ranks, ctx, grads);
        }
        let mut done = |layer: usize, grads: &mut DecoderWeights| {
            if ranks.shards_gradients() {
                ranks.start_sums(ctx, layer, grads, sums);
            }
        };
        let target = GradTarget { done: Some(&mut done), ..GradTarget::new(write, grads) };
        let StepBatch { batch, options } = microbatch;
        let stats = decoder.forward_backward(ctx, weights, &[batch.tokens()], options, target)?;
        if let Some(slices) = &mut sums.slices {
            slices.end_pass(ranks, ctx, grads);
        }
        Ok(stats)
    }
}

/// A rank's gradients before they are summed.
struct PartGrads<'a> {
    /// This rank's part of the weights.
    part: &'a DecoderWeights,
    grads: DecoderWeights,
    sums: SumsUnderWay,
    /// The place in the table of a tensor to put a fault in.
    fault: Option<usize>,
}

/// Returns this rank's part of the gradients of all ranks.
fn summed(ranks: &Ranks, ctx: &Context, own: PartGrads<'_>) -> Result<DecoderWeights, TrainError> {
    let PartGrads { part, mut grads, sums, fault } = own;
    if !ranks.shards_optimizer() {
        if let Some(place) = fault {
            put_in(ranks, ctx, grads.params_mut().swap_remove(place))?;
        }
        ranks.sum_gradients(&mut grads, sums)?;
        return Ok(grads);
    }
    let mut slices = ranks.sum_to_slices(ctx, &grads, sums)?;
    if let Some(place) = fault {
        put_in(ranks, ctx, &mut slices[place])?;
    }
    let mut whole = part.zeros_like(ctx);
    ranks.join_slices(ctx, &slices, &mut whole)?;
    Ok(whole)
}

impl Fault {
    /// Returns the place of the tensor in the table.
    fn place(&self, ranks: &Ranks) -> Option<usize> {
        ranks.table().weights().specs().iter().position(|spec| spec.name == self.tensor)
    }
}

/// Doubles a gradient on the last rank that holds some of it. All ranks call this.
fn put_in(ranks: &Ranks, ctx: &Context, tensor: &mut Tensor) -> Result<(), TrainError> {
    let holders = ranks.all_values(&[u32::from(!tensor.is_empty())])?;
    if holders.iter().rposition(|&holds| holds == 1) == Some(ranks.rank()) {
        scale_assign(ctx, tensor, 2.0);
    }
    Ok(())
}

/// Gives routers that choose by token ids a table.
fn set_hash_tables(config: &RunConfig, weights: &mut DecoderWeights) {
    let model = &config.model;
    if model.router.table_source() == Some(TableSource::TokenCounts) {
        let counts = vec![1; model.vocab_size];
        weights.set_hash_tables(&balanced_hash(&counts, model.num_experts, model.top_k));
    }
}

/// A microbatch of random tokens: all of its sequences, or a rank's share of them.
fn microbatch(config: &RunConfig, ranks: Option<&Ranks>, index: usize) -> StepBatch {
    let (train, num) = (&config.train, config.train.grad_accumulation);
    let share = ranks.map_or(0..train.batch_size, |ranks| ranks.share(train.batch_size));
    let ids = |stream: u64| -> Vec<u32> {
        let random = Random::new(train.seed, Purpose::Test, 2 * index as u64 + stream);
        let own = share.start * train.seq_len..share.end * train.seq_len;
        own.map(|place| random.below(place as u64, config.model.vocab_size as u64) as u32).collect()
    };
    let batch = Batch {
        inputs: ids(0),
        targets: ids(1),
        num_sequences: share.len(),
        seq_len: train.seq_len,
        ..Batch::default()
    };
    let num_targets = num * train.batch_size * train.seq_len;
    let mut options = pass_options(config, num_targets, Microbatch { step: 0, index, num, progress: 0.0 });
    options.first_token = share.start * train.seq_len;
    StepBatch { batch, options }
}
