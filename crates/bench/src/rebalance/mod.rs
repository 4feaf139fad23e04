//! Tokens a second of training whose load changes after some steps, with experts that stay, that are placed once for
//! the first load, and that move while training goes on; and the time of a step that decisions foretold, beside the
//! time that was measured.
//!
//! With more ranks than cores a rank waits for each row of its experts instead of computing it, so that ranks do not
//! lend each other cores, and messages take as long as over a shaped link. Everything else is that of training.

mod foretold;
mod task;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use moeworks_comm::{CommError, Communicator, Throttled, share_cores};
use moeworks_moe::{EpOptions, Pace};
use moeworks_ops::Context;
use moeworks_plan::{EplbSizes, Exchange, Layout, Link, Links, Placement, RankLoads, RebalancePolicy, Wire, eplb};
use moeworks_train::lr_schedule::{Decay, LrSchedule};
use moeworks_train::metrics::{LayerRecord, Record};
use moeworks_train::rebalance::{REBALANCE_JSONL, RebalanceSettings, RebalanceSource};
use moeworks_train::{Event, Ranks, Requests, RunFolder, StartOptions, TrainError, Trainer, TrainerSettings};
use serde_json::{Value, json};

pub use foretold::Foretold;
use foretold::{Steps, foretold};
use task::{LayerSizes, ZipfTask};

use crate::error::BenchError;
use crate::ranks::on_ranks;

/// Experts of a rank where each is on one.
const EXPERTS_A_RANK: usize = 4;
/// The part of a row's time that its forward pass takes.
const FORWARD_PART: f64 = 1.0 / 3.0;
/// The layer whose rows are waits: quick to compute beside them.
const WAITING: LayerSizes = LayerSizes { width: 16, expert_width: 16 };
/// The layer that is computed.
const COMPUTED: LayerSizes = LayerSizes { width: 128, expert_width: 512 };

/// The way in which experts are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Sharded in their order.
    Off,
    /// By EPLB for the load of the first steps, and then left there.
    Static,
    /// Moved online by few moves.
    Moves,
    /// Moved online to placements made anew.
    Anew,
    /// Moved online by the policy that a bandit chooses.
    Auto,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 5] = [Self::Off, Self::Static, Self::Moves, Self::Anew, Self::Auto];

    /// Returns the name in tables and options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Static => "static",
            Self::Moves => "moves",
            Self::Anew => "anew",
            Self::Auto => "auto",
        }
    }
}

/// A load by Zipf's law over experts whose order of popularity changes.
#[derive(Clone, Copy, Debug)]
pub struct MadeLoad {
    /// The number of experts.
    pub num_experts: usize,
    /// Tokens of a step, of all ranks.
    pub num_tokens: usize,
    /// The exponent of Zipf's law.
    pub exponent: f64,
    /// Steps after which other experts are popular.
    pub period: u64,
    /// The places by which the popular experts move on.
    pub shift: usize,
}

impl MadeLoad {
    /// Returns the share of each expert in step `step`, counted from 0. Neighbours of the most popular expert are the
    /// next popular ones, so that sharded experts are uneven.
    #[must_use]
    pub fn shares(&self, step: u64) -> Vec<f64> {
        let first = (step / self.period) as usize * self.shift;
        let weight = |expert: usize| {
            let place = (expert + self.num_experts - first % self.num_experts) % self.num_experts;
            ((place + 1) as f64).powf(-self.exponent)
        };
        let weights: Vec<f64> = (0..self.num_experts).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / sum).collect()
    }
}

/// The settings of a measurement.
#[derive(Clone, Debug)]
pub struct RebalanceBench {
    /// Ranks; 0 for one on each core.
    pub num_ranks: usize,
    /// The modes, each a run.
    pub modes: Vec<Mode>,
    /// Steps of a run.
    pub num_steps: u64,
    /// Steps after which the load changes.
    pub period: u64,
    /// Steps between decisions.
    pub every: u64,
    /// Spare slots of a rank where experts may have copies.
    pub spare: usize,
    /// Tokens of a rank in a step.
    pub tokens_per_rank: usize,
    /// The exponent of Zipf's law.
    pub exponent: f64,
    /// The seconds that stand for a row of an expert, forward and backward; none to compute it.
    pub row_s: Option<f64>,
    /// The link over which ranks exchange messages; none for that of the machine.
    pub link: Option<Link>,
}

/// A run that was measured.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The mode.
    pub mode: Mode,
    /// The number of ranks.
    pub num_ranks: usize,
    /// Tokens a second over the whole run.
    pub tokens_per_s: f64,
    /// The mean over steps of the imbalance of ranks.
    pub imbalance: f64,
    /// Copies of experts that moved.
    pub num_copies: usize,
    /// The longest pause as a share of its step.
    pub max_pause: f64,
    /// The decisions that changed placements, beside their outcomes.
    pub foretold: Vec<Foretold>,
}

impl Measured {
    /// Returns the mean of the absolute errors of foretold times, and the largest; none without a decision.
    #[must_use]
    pub fn errors(&self) -> Option<[f64; 2]> {
        let errors: Vec<f64> = self.foretold.iter().map(|decision| decision.error().abs()).collect();
        let max = errors.iter().copied().reduce(f64::max)?;
        Some([errors.iter().sum::<f64>() / errors.len() as f64, max])
    }

    /// Returns the figures as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        let decision = |decision: &Foretold| {
            json!({
                "step": decision.step, "policy": decision.policy, "imbalance_before": decision.imbalance[0],
                "imbalance_after": decision.imbalance[1], "before_s": decision.before_s,
                "foretold_s": decision.foretold_s, "after_s": decision.after_s, "error": decision.error(),
            })
        };
        json!({
            "mode": self.mode.name(), "ranks": self.num_ranks, "tokens_per_s": self.tokens_per_s,
            "imbalance": self.imbalance, "copies": self.num_copies, "max_pause": self.max_pause,
            "decisions": self.foretold.iter().map(decision).collect::<Vec<_>>(),
        })
    }
}

/// Trains once in each mode, on threads of this process or on the ranks of an MPI launcher. `tell` gets each
/// measurement on rank 0 as soon as it is made.
///
/// # Errors
/// [`BenchError`] where a rank fails.
pub fn measure(bench: &RebalanceBench, mut tell: impl FnMut(Measured)) -> Result<(), BenchError> {
    for &mode in &bench.modes {
        on_ranks(bench.num_ranks, |comm| bench.run(mode, comm))?.into_iter().for_each(&mut tell);
    }
    Ok(())
}

/// The records and the time of a run.
struct Course {
    records: Vec<Record>,
    seconds: f64,
    log: String,
}

impl RebalanceBench {
    fn load(&self, num_ranks: usize) -> MadeLoad {
        MadeLoad {
            num_experts: EXPERTS_A_RANK * num_ranks,
            num_tokens: self.tokens_per_rank * num_ranks,
            exponent: self.exponent,
            period: self.period,
            shift: EXPERTS_A_RANK + 1,
        }
    }

    /// Returns the settings by which experts move.
    fn settings(&self, mode: Mode, num_ranks: usize) -> Result<RebalanceSettings, BenchError> {
        let online = |policies: &[RebalancePolicy], spare: usize| RebalanceSettings {
            source: RebalanceSource::Online,
            every: self.every,
            spare,
            policies: policies.to_vec(),
            ..RebalanceSettings::default()
        };
        Ok(match mode {
            Mode::Off => RebalanceSettings::default(),
            Mode::Static => {
                let load = self.load(num_ranks);
                let slots_per_rank = EXPERTS_A_RANK.saturating_add(self.spare).min(load.num_experts);
                let num_slots = slots_per_rank * num_ranks;
                let sizes = EplbSizes { num_slots, num_groups: 1, num_nodes: 1, num_ranks };
                let placement = eplb(&load.shares(0), sizes).map_err(|error| BenchError::Request(error.to_string()))?;
                let source = RebalanceSource::File { placements: placement.into(), at_step: self.every };
                RebalanceSettings { source, ..RebalanceSettings::default() }
            }
            Mode::Moves => online(&[RebalancePolicy::Moves], 0),
            Mode::Anew => online(&[RebalancePolicy::Anew], self.spare),
            Mode::Auto => online(&RebalancePolicy::ALL, self.spare),
        })
    }

    /// Trains on all ranks; the root gets the measurement.
    fn run(&self, mode: Mode, comm: &dyn Communicator) -> Result<Option<Measured>, CommError> {
        // The folder of the root, which other processes only name.
        let mut owner = [u64::from(std::process::id())];
        comm.broadcast(&mut owner, 0)?;
        let folder = std::env::temp_dir().join(format!("moeworks-bench-rebalance-{}", owner[0]));
        let course = self.train(mode, comm, &folder).map_err(|error| match error {
            BenchError::Comm(error) | BenchError::Train(TrainError::Comm(error)) => error,
            other => comm.abort(&other.to_string()),
        })?;
        comm.barrier()?;
        if comm.rank() != 0 {
            return Ok(None);
        }
        // What is left of a folder that cannot be removed harms nothing.
        let _ = fs::remove_dir_all(&folder);
        Ok(Some(self.measured(mode, comm.size(), &course)))
    }

    /// Creates this rank's handle to the run.
    fn ranks(&self, comm: &dyn Communicator) -> Result<Ranks, CommError> {
        let num_ranks = comm.size();
        let all = comm.split(Some(0), comm.rank())?.expect("a rank with a color is in a group");
        let all: Box<dyn Communicator> = match self.link {
            Some(link) => Box::new(Throttled::new(all, Links { node: link, cluster: link })),
            None => all,
        };
        let pace = self.row_s.map(|row_s| Pace {
            row_forward_s: row_s * FORWARD_PART,
            row_backward_s: row_s * (1.0 - FORWARD_PART),
            ..Pace::default()
        });
        if pace.is_none() {
            share_cores(comm, true)?;
        }
        let options = EpOptions { pace, ..Exchange::plain(Wire::F32).into() };
        let placement = Placement::sharded(self.load(num_ranks).num_experts, num_ranks);
        Ranks::new(&*all, Layout::new(1, num_ranks, 1), placement, options)
    }

    fn train(&self, mode: Mode, comm: &dyn Communicator, folder: &Path) -> Result<Course, BenchError> {
        let (num_ranks, steps) = (comm.size(), self.num_steps);
        let ranks = Arc::new(self.ranks(comm)?);
        let sizes = if self.row_s.is_some() { WAITING } else { COMPUTED };
        let task = ZipfTask::new(sizes, self.load(num_ranks), &ranks);
        let lr = LrSchedule { peak: 1e-3, min_ratio: 1.0, warmup_steps: 0, total_steps: steps, decay: Decay::Constant };
        let rebalance = self.settings(mode, num_ranks)?;
        let settings = TrainerSettings { steps, lr, rebalance, ..TrainerSettings::default() };
        let (folder_of_run, ctx) = (RunFolder::from(folder.to_owned()), Context::cpu(1));
        let start = StartOptions { folder: folder_of_run, settings, ctx, ranks: Some(ranks) };
        let mut trainer = Trainer::start(task, start)?;
        let mut records = Vec::new();
        let began = Instant::now();
        trainer.run(&Requests::default(), &mut |event| {
            if let Event::Step { record, .. } = event {
                records.push(record.clone());
            }
        })?;
        let seconds = began.elapsed().as_secs_f64();
        // Only the root has the file, and only where experts move.
        let log = fs::read_to_string(folder.join(REBALANCE_JSONL)).unwrap_or_default();
        Ok(Course { records, seconds, log })
    }

    fn measured(&self, mode: Mode, num_ranks: usize, course: &Course) -> Measured {
        let Course { records, seconds, log } = course;
        let values = |name: &'static str| {
            records.iter().flat_map(|record| &record.metrics).filter(move |metric| metric.name == name)
        };
        let sum = |name| values(name).map(|metric| metric.value).sum::<f64>();
        let times: Vec<f64> = records.iter().map(|record| record.step_ms / 1e3).collect();
        let imbalance = match mode {
            Mode::Off => records.iter().map(|record| self.imbalance_of_sharded(record, num_ranks)).sum(),
            _ => sum("rebalance/imbalance"),
        };
        Measured {
            mode,
            num_ranks,
            tokens_per_s: (records.len() * self.tokens_per_rank * num_ranks) as f64 / seconds,
            imbalance: imbalance / records.len().max(1) as f64,
            num_copies: sum("rebalance/copies") as usize,
            max_pause: values("rebalance/pause_share").map(|metric| metric.value).fold(0.0, f64::max),
            foretold: foretold(log, &Steps { seconds: &times, period: self.period }),
        }
    }

    /// Computes the imbalance of a step whose experts are sharded in their order.
    fn imbalance_of_sharded(&self, record: &Record, num_ranks: usize) -> f64 {
        let placement = Placement::sharded(self.load(num_ranks).num_experts, num_ranks);
        let of_layer = |layer: &LayerRecord| {
            let loads: Vec<f64> = layer.tokens_per_expert.iter().map(|&load| load as f64).collect();
            RankLoads::new(&placement, &loads).map_or(0.0, |loads| loads.imbalance())
        };
        record.layers.iter().map(of_layer).sum::<f64>() / record.layers.len().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_experts_are_popular_after_each_period() {
        let load = MadeLoad { num_experts: 8, num_tokens: 4, exponent: 1.0, period: 10, shift: 5 };
        let hottest = |step| {
            let shares = load.shares(step);
            assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-12);
            (0..8).max_by(|&a, &b| shares[a].total_cmp(&shares[b]))
        };
        assert_eq!([0, 9, 10, 20].map(hottest), [Some(0), Some(0), Some(5), Some(2)]);
    }
}
