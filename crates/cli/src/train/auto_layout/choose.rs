//! The choice of a layout: each of the planner's best few makes some steps, and the fastest is kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moeworks_bench::training::{memory_bytes_per_s, tokens_per_second};
use moeworks_comm::{Communicator, share_cores};
use moeworks_infer::data::DataError;
use moeworks_infer::store::Store;
use moeworks_model::model_cost::training_flops_per_token;
use moeworks_plan::{Layout, RankOrder, RankSpec, Topology};
use moeworks_train::auto_layout::{
    Candidate, Measured, Monitor, Probe, candidates, decision_line, fastest, measured_topology,
};
use moeworks_train::config::RunConfig;
use moeworks_train::{Requests, TrainError, machine_bytes};
use serde::{Deserialize, Serialize};

use super::{AutoLayout, Chosen, Follow, Place};
use crate::environment;
use crate::estimate::vocabulary;
use crate::failure::Failure;
use crate::reading;
use crate::train::Start;

/// The memory assumed for a machine that does not report its own.
const UNKNOWN_MEMORY: u64 = 16 << 30;

/// The end of a trial.
enum Tried {
    Measured(Measured),
    /// All ranks found that the layout cannot be carried out.
    LeftOut(Failure),
    /// The user stopped it.
    Stopped,
}

/// A layout as it is sent to other processes.
#[derive(Serialize, Deserialize)]
struct Sizes {
    dp: usize,
    ep: usize,
    tp: usize,
    pp: usize,
    order: RankOrder,
}

impl From<Layout> for Sizes {
    fn from(layout: Layout) -> Self {
        let Layout { dp, ep, tp, pp, order } = layout;
        Self { dp, ep, tp, pp, order }
    }
}

impl From<Sizes> for Layout {
    fn from(sizes: Sizes) -> Self {
        let Sizes { dp, ep, tp, pp, order } = sizes;
        Self { order, ..Self::new(dp, ep, tp).with_pipeline(pp) }
    }
}

impl AutoLayout<'_> {
    /// Makes some steps in each layout and returns the start of the run in the fastest; `None` if the user stopped
    /// it.
    pub(super) fn choose(&self, start: Start, reason: &str, is_last: bool) -> Result<Option<Chosen>, Failure> {
        let present = start.config().parallel.layout();
        let scratch = Scratch::beside(start.folder(), &self.place)?;
        let (mut tried, mut measured, mut first_failure) = (Vec::new(), Vec::new(), None);
        for (index, candidate) in self.candidates(start.config())?.into_iter().enumerate() {
            match self.probe(&start, &candidate, &scratch.path.join(index.to_string()))? {
                Tried::Stopped => return Ok(None),
                Tried::Measured(figures) => {
                    self.log(|| tracing::info!("layout {}: {:?}", figures.layout, figures.figures));
                    tried.push(candidate);
                    measured.push(figures);
                }
                Tried::LeftOut(failure) => {
                    self.log(|| tracing::warn!("layout {} is left out: {failure}", candidate.layout()));
                    first_failure = first_failure.or(Some(failure));
                }
            }
        }
        let has_present = measured.first().is_some_and(|first: &Measured| first.layout == present);
        let Some(kept) = self.place.agree(|| Ok(fastest(&measured, has_present)))? else {
            return Err(first_failure.unwrap_or_else(|| Failure::input("--auto-layout: no layout could be measured")));
        };
        let times: Vec<String> = measured.iter().map(|of| format!("{} {:.1} ms", of.layout, of.step_ms)).collect();
        self.log(|| notice!("Layout:     {} ({})", measured[kept].layout, times.join(", ")));
        let monitor = (!is_last).then(|| Monitor::new(measured[kept].step_ms, self.args.layout_tolerance));
        let lines = decision_line(start.step(), reason, &measured, kept);
        let config = tried.swap_remove(kept).config;
        let start = match start {
            Start::New { folder, from, .. } => Start::New { config, folder, from },
            Start::Resumed { run_dir, .. } => Start::Resumed { config, run_dir },
        };
        Ok(Some(Chosen { start, follow: Follow::new(lines, monitor) }))
    }

    /// Calls `say` where it is printed: on the root.
    fn log(&self, say: impl FnOnce()) {
        if self.place.is_root() {
            say();
        }
    }

    /// Returns the layouts to try, by the planner's costs. The root chooses them.
    fn candidates(&self, config: &RunConfig) -> Result<Vec<Candidate>, Failure> {
        let mut sized = config.clone();
        sized.model.vocab_size = vocabulary(config);
        let topology = self.topology(&sized)?;
        let mut found = Vec::new();
        let layouts: Vec<Sizes> = self.place.agree(|| {
            found = candidates(&sized, &topology)?;
            Ok(found.iter().map(|candidate| candidate.layout().into()).collect())
        })?;
        if !self.place.is_root() {
            found = layouts.into_iter().map(|sizes| Candidate::in_layout(config, sizes.into())).collect();
        }
        // The vocabulary of a new run is that of its tokenizer.
        found.iter_mut().for_each(|candidate| candidate.config.model.vocab_size = config.model.vocab_size);
        Ok(found)
    }

    /// Measures the speed of the ranks, and of the links between processes. All processes call this.
    fn topology(&self, sized: &RunConfig) -> Result<Topology, Failure> {
        match self.place {
            Place::Threads(_) => Ok(Topology::one_machine(self.num_ranks, speed(sized)?)),
            Place::Process(comm) => {
                let cores = share_cores(comm, sized.parallel.pin)?;
                let mut of_rank = sized.clone();
                if of_rank.train.threads == 0 {
                    of_rank.train.threads = (cores as usize).max(1);
                }
                comm.barrier()?;
                let own = speed(&of_rank)?;
                let memory_bytes = own.memory_bytes / num_neighbours(comm) as f64;
                Ok(measured_topology(comm, RankSpec { memory_bytes, ..own })?)
            }
        }
    }

    /// Makes the steps of one layout.
    fn probe(&self, start: &Start, candidate: &Candidate, dir: &Path) -> Result<Tried, Failure> {
        let probe = match self.prepare(start, candidate, dir)? {
            Ok(probe) => probe,
            Err(failure) => return Ok(Tried::LeftOut(failure)),
        };
        let requests = Requests::default();
        let _receiving = self.call.give_signals_to(&requests)?;
        let watch = reading::watch(Arc::clone(&requests.stop));
        let make = |ranks| probe.train(ranks, environment::machine(), &watch, &requests);
        match self.place.on_ranks(probe.config(), make) {
            Ok(None) => Ok(Tried::Stopped),
            Ok(Some(times)) if self.place.is_root() => Ok(Tried::Measured(probe.measured(candidate, &times)?)),
            Ok(Some(_)) => Ok(Tried::Measured(Measured::elsewhere(candidate.layout()))),
            Err(TrainError::Data(DataError::Stopped)) if matches!(self.place, Place::Threads(_)) => Ok(Tried::Stopped),
            Err(error) if self.is_found_by_all(&error) => Ok(Tried::LeftOut(error.into())),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes the folder of a probe, where it goes on from a checkpoint. An error is known to all ranks.
    fn prepare(&self, start: &Start, candidate: &Candidate, dir: &Path) -> Result<Result<Probe, Failure>, Failure> {
        let has_checkpoint = |run_dir: &Path| Store::open(run_dir).is_empty().is_ok_and(|is_empty| !is_empty);
        let resumed = match start {
            Start::New { .. } => None,
            Start::Resumed { run_dir, config } => {
                self.place.agree(|| Ok(has_checkpoint(run_dir)))?.then_some((run_dir, config))
            }
        };
        let Some((run_dir, settings)) = resumed else {
            let Start::New { from, .. } = start else { return Ok(Ok(Probe::new_run(candidate, dir, None))) };
            return Ok(Ok(Probe::new_run(candidate, dir, from.as_deref())));
        };
        let written = self.place.agree(|| {
            let written = Probe::write(candidate, dir, run_dir, settings);
            Ok(written.map_err(|error| Failure::from(error).message))
        })?;
        if let Err(message) = written {
            return Ok(Err(Failure::input(message)));
        }
        Ok(Ok(Probe::of_run(candidate, dir, run_dir, settings)?))
    }

    /// Returns whether every rank comes to the error by itself, so that all can go on with the next layout: among
    /// threads the first error ends the others, among processes some might still wait for this one.
    fn is_found_by_all(&self, error: &TrainError) -> bool {
        match self.place {
            Place::Threads(_) => true,
            Place::Process(comm) => match error {
                TrainError::Config(_) | TrainError::Ranks { .. } => true,
                TrainError::Memory { .. } => num_neighbours(comm) == comm.size(),
                _ => false,
            },
        }
    }
}

/// Measures how fast this process trains, and its memory.
fn speed(sized: &RunConfig) -> Result<RankSpec, Failure> {
    let machine = environment::machine();
    let speed = tokens_per_second(sized, &machine)?;
    Ok(RankSpec {
        flops: speed.tokens_per_s * training_flops_per_token(&sized.model, sized.train.seq_len),
        memory_bytes: machine_bytes().unwrap_or(UNKNOWN_MEMORY) as f64,
        memory_bytes_per_s: memory_bytes_per_s(sized, &machine)?,
    })
}

/// Returns the number of ranks on this rank's node.
fn num_neighbours(comm: &dyn Communicator) -> usize {
    let nodes = comm.nodes();
    nodes.iter().filter(|&&node| node == nodes[comm.rank()]).count()
}

/// A folder for trials beside a run, removed when the root drops it.
struct Scratch {
    path: PathBuf,
    is_own: bool,
}

impl Scratch {
    /// Chooses a name that is free. The root chooses.
    fn beside(run_dir: &Path, place: &Place<'_>) -> Result<Self, Failure> {
        let named = |number: u64| {
            let mut name = run_dir.as_os_str().to_owned();
            name.push(format!(".layouts-{number}"));
            PathBuf::from(name)
        };
        let free = || (1..).map(named).find(|path| !path.exists()).unwrap_or_else(|| named(0));
        Ok(Self { path: place.agree_on_path(free)?, is_own: place.is_root() })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.is_own
            && self.path.exists()
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            tracing::warn!("{}: cannot remove: {error}", self.path.display());
        }
    }
}
