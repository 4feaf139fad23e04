//! Steps of a pipeline with random weights and tokens, timed: the measured counterpart of a schedule's timeline.

use std::sync::Arc;
use std::time::Instant;

use moeworks_comm::{Communicator, Span};
use moeworks_infer::data::Batch;
use moeworks_model::{PassOptions, WeightTable};
use moeworks_moe::{EpOptions, ExchangeTimes};
use moeworks_ops::Context;
use moeworks_plan::{Layout, Placement};
use moeworks_tensor::{Purpose, Random};

use super::{Pipeline, PipelinePlan, StageView, StepBatch};
use crate::config::RunConfig;
use crate::error::TrainError;
use crate::parallel::Ranks;

/// The seed of weights and tokens.
const SEED: u64 = 1;

/// A pipeline whose steps are timed.
#[derive(Clone)]
pub struct TimedPipeline<'a> {
    /// The model, `model.vocab_size` included, the layout, and sequences and microbatches of a step.
    pub config: &'a RunConfig,
    /// The schedule and the stages.
    pub plan: &'a PipelinePlan,
    /// The exchange of tokens, and waits that stand for computations, if any do.
    pub options: EpOptions,
    /// False to compute the two of a pair one after the other.
    pub overlaps_pairs: bool,
    /// The number of steps, after one that is not counted.
    pub num_steps: usize,
}

/// The times of a rank's steps.
#[derive(Clone, Debug, Default)]
pub struct StepTimes {
    /// The seconds of each step, until all ranks have ended it.
    pub steps_s: Vec<f64>,
    /// The times of all exchanges of tokens in these steps.
    pub exchanges: ExchangeTimes,
    /// The median seconds of this rank's computations that the schedule has.
    pub actions: ActionTimes,
}

/// The median seconds of the computations of a stage and microbatch; zero for those that a schedule does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ActionTimes {
    /// F.
    pub forward_s: f64,
    /// B: the gradient of the input.
    pub input_grad_s: f64,
    /// W: the gradients of the weights.
    pub weight_grad_s: f64,
    /// BW: both.
    pub backward_s: f64,
}

impl ActionTimes {
    fn new(spans: &[Span]) -> Self {
        let median = |name: &str| {
            let mut lengths: Vec<f64> =
                spans.iter().filter(|span| span.name == name).map(|span| span.length.as_secs_f64()).collect();
            lengths.sort_unstable_by(f64::total_cmp);
            lengths.get(lengths.len() / 2).copied().unwrap_or(0.0)
        };
        Self { forward_s: median("F"), input_grad_s: median("B"), weight_grad_s: median("W"), backward_s: median("BW") }
    }
}

/// Times steps on the ranks of `comm`, which all call this. Each computes with one thread.
///
/// # Errors
/// If ranks cannot communicate, or the model cannot be made.
pub fn time_steps(comm: &dyn Communicator, timed: &TimedPipeline<'_>) -> Result<StepTimes, TrainError> {
    let TimedPipeline { config, plan, options, overlaps_pairs, num_steps } = timed;
    let layout = config.parallel.layout();
    let ranks = Arc::new(ranks(comm, config, layout, options)?);
    let ctx = Context::cpu(1);
    let (mut pipeline, decoder) =
        Pipeline::on_ranks(&ranks, &config.model, WeightTable::new(&config.model), (*plan).clone())?;
    pipeline.overlaps_pairs = *overlaps_pairs;
    let part = decoder.init(&ctx, SEED, Some(&mut |spec, tensor| ranks.part(&ctx, spec, &tensor)));
    let mut grads = ranks.first_grads(&ctx, &part);
    let microbatches: Vec<StepBatch> =
        (0..config.train.grad_accumulation).map(|number| microbatch(config, &ranks, number)).collect();
    let view = StageView { ctx: &ctx, ranks: &ranks, weights: &part };
    let mut times = StepTimes::default();
    for step in 0..=*num_steps {
        ranks.world().barrier()?;
        if step == 1 {
            let _warm_up = (ranks.experts().take_exchange_times(), ranks.meter().take_spans());
        }
        let start = Instant::now();
        pipeline.step(view, &microbatches, &mut grads, &mut ranks.begin_sums(&ctx))?;
        ranks.world().barrier()?;
        if step > 0 {
            times.steps_s.push(start.elapsed().as_secs_f64());
        }
    }
    times.exchanges = ranks.experts().take_exchange_times();
    times.actions = ActionTimes::new(&ranks.meter().take_spans());
    Ok(times)
}

fn ranks(
    comm: &dyn Communicator,
    config: &RunConfig,
    layout: Layout,
    options: &EpOptions,
) -> Result<Ranks, TrainError> {
    let placement = match config.model.num_experts {
        0 => Placement::sharded(layout.num_expert_ranks(), layout.num_expert_ranks()),
        num_experts => Placement::sharded(num_experts, layout.num_expert_ranks()),
    };
    let ranks = Ranks::metered(comm, layout, placement.into(), options.clone(), true)?;
    ranks.begin_steps()?;
    Ok(ranks)
}

/// A microbatch of random tokens: this rank's sequences.
fn microbatch(config: &RunConfig, ranks: &Ranks, number: usize) -> StepBatch {
    let (seq_len, num_sequences) = (config.train.seq_len, config.train.batch_size);
    let share = ranks.share(num_sequences);
    let ids = |stream: u64| -> Vec<u32> {
        let random = Random::new(SEED, Purpose::Test, 2 * number as u64 + stream);
        let own = share.start * seq_len..share.end * seq_len;
        own.map(|place| random.below(place as u64, config.model.vocab_size as u64) as u32).collect()
    };
    let batch = Batch { inputs: ids(0), targets: ids(1), num_sequences: share.len(), seq_len, ..Batch::default() };
    let num_tokens = config.train.grad_accumulation * num_sequences * seq_len;
    let options = PassOptions {
        first_token: share.start * seq_len,
        grad_scale: 1.0 / num_tokens as f32,
        ..PassOptions::default()
    };
    StepBatch { batch, options }
}
