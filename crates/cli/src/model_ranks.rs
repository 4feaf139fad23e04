//! The ranks that hold a model in use: threads of this process, or the processes of an MPI launcher.
//!
//! Rank 0 carries the command out; the other ranks compute their layers and experts for it.

use std::any::Any;
use std::fmt::Display;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moeworks_comm::{Communicator, RankOptions, share_cores, try_run_ranks};
use moeworks_gpu::DeviceChoice;
use moeworks_infer::InferError;
use moeworks_infer::model_ranks::{ModelSpread, SpreadLayout};
use moeworks_infer::open::{Model, Source};
use moeworks_ops::Context;
use moeworks_plan::Placements;
use moeworks_serve::server::StopSignal;

use crate::args::{ComputeArgs, MachineArgs, RankArgs};
use crate::exit_code::ExitCode;
use crate::failure::{Failure, say_error};
use crate::host::Call;
use crate::model::{context, open, open_options};
use crate::ranks::{FAILED, GRACE, MAX_THREADS, is_one_of_many, too_many_ranks};

/// The time after which a process that stands still counts as lost: requests are to end within 30 s.
const TIMEOUT: Duration = Duration::from_secs(15);

/// The time in which rank 0 tells others of a lost rank, before the processes of the ranks are ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A callback of rank 0 with the error of a failed run, before its processes are ended.
pub(crate) type LastWords = Arc<dyn Fn(&dyn Display) + Send + Sync>;

/// The options of a command that uses a model.
#[derive(Clone, Copy)]
pub(crate) struct ModelOptions<'a> {
    pub(crate) compute: &'a ComputeArgs,
    pub(crate) ranks: &'a RankArgs,
}

/// A rank of a command that uses a model.
#[derive(Clone, Copy)]
pub(crate) struct ModelRank<'a> {
    options: ModelOptions<'a>,
    /// This rank among all; none if there is only one.
    among: Option<AmongRanks<'a>>,
}

/// A rank among several.
#[derive(Clone, Copy)]
struct AmongRanks<'a> {
    comm: &'a dyn Communicator,
    layout: SpreadLayout,
}

/// Runs `work` on rank 0 of the ranks that the options ask for, while the others compute their part of the model at
/// `path` for it. Returns the exit code of rank 0, and of a process that is another rank.
pub(crate) fn on_model_ranks(
    call: &Call<'_>,
    path: &Path,
    options: ModelOptions<'_>,
    last_words: Option<LastWords>,
    work: impl Fn(ModelRank<'_>) -> Result<ExitCode, Failure> + Sync,
) -> Result<ExitCode, Failure> {
    let RankArgs { ep, pp, ref placement } = *options.ranks;
    for (option, number) in [("--ep", ep), ("--pp", pp)] {
        if number == Some(0) {
            return Err(Failure::input(format!("{option} 0: must be at least 1")));
        }
    }
    let as_rank = |comm: &dyn Communicator, layout: SpreadLayout| {
        let rank = ModelRank { options, among: Some(AmongRanks { comm, layout }) };
        if comm.rank() == 0 {
            return work(rank);
        }
        if is_one_of_many() {
            // What a first signal means is up to rank 0. The claim is never given back: a signal on the way to the
            // end of the process would look like a lost rank, and a process is a rank only once.
            std::mem::forget(call.interrupts().give_to_server(&StopSignal::default()));
        }
        rank.serve_root(path)
    };
    #[cfg(unix)]
    if is_one_of_many() {
        return on_processes(options.ranks, last_words, as_rank);
    }
    let layout = SpreadLayout { pp: pp.unwrap_or(1), ep: ep.unwrap_or(1) };
    if layout.ep == 1 && placement.is_some() {
        return Err(Failure::input("--placement: there is one rank; it needs --ep above 1, or mpirun"));
    }
    let num_ranks = layout.pp.saturating_mul(layout.ep);
    if num_ranks == 1 {
        return work(ModelRank { options, among: None });
    }
    if num_ranks > MAX_THREADS {
        return Err(Failure::input(format!("{}: {}", asked(options.ranks), too_many_ranks())));
    }
    on_threads(call, num_ranks, |comm| as_rank(comm, layout))
}

/// Returns the options of ranks as they were typed.
fn asked(ranks: &RankArgs) -> String {
    let option = |name: &str, number: Option<usize>| number.map(|number| format!("--{name} {number}"));
    let options: Vec<String> = [option("pp", ranks.pp), option("ep", ranks.ep)].into_iter().flatten().collect();
    options.join(" ")
}

/// Runs the ranks as threads. A panic of rank 0 is passed on: it may mean that nobody reads the output.
fn on_threads(
    call: &Call<'_>,
    num_ranks: usize,
    as_rank: impl Fn(&dyn Communicator) -> Result<ExitCode, Failure> + Sync,
) -> Result<ExitCode, Failure> {
    let mut options = RankOptions::new(num_ranks).with_timeout(TIMEOUT);
    if let Some(end) = call.end() {
        options = options.on_stuck(GRACE, move |error| {
            say_error(error);
            end(FAILED);
        });
    }
    let panicked: Mutex<Option<Box<dyn Any + Send>>> = Mutex::default();
    let result = try_run_ranks(&options, |comm| {
        if comm.rank() != 0 {
            return as_rank(comm);
        }
        panic::catch_unwind(AssertUnwindSafe(|| as_rank(comm))).unwrap_or_else(|payload| {
            *panicked.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
            Err(Failure::input("rank 0 ended"))
        })
    });
    if let Some(payload) = panicked.into_inner().unwrap_or_else(PoisonError::into_inner) {
        panic::resume_unwind(payload);
    }
    Ok(result?.swap_remove(0))
}

/// Runs this process' rank of those that a launcher started.
#[cfg(unix)]
fn on_processes(
    ranks: &RankArgs,
    last_words: Option<LastWords>,
    as_rank: impl Fn(&dyn Communicator, SpreadLayout) -> Result<ExitCode, Failure>,
) -> Result<ExitCode, Failure> {
    use std::sync::atomic::{AtomicBool, Ordering};

    use moeworks_comm::mpi::{MpiOptions, run_mpi};

    use crate::ranks::say_of_rank;

    let (mut options, has_said) = (MpiOptions::default().with_timeout(TIMEOUT), Arc::new(AtomicBool::new(false)));
    if let Some(last_words) = last_words {
        let has_said = Arc::clone(&has_said);
        // Rank 0 speaks first, and at once: the launcher, too, ends processes when one has died.
        options = options.before_abort(move |rank, error| {
            if rank == 0 {
                last_words(error);
                say_of_rank(rank, error);
                has_said.store(true, Ordering::SeqCst);
            }
            std::thread::sleep(if rank == 0 { LAST_WORDS } else { 2 * LAST_WORDS });
        });
    }
    let report = move |rank: usize, error: &dyn Display| {
        if !has_said.load(Ordering::SeqCst) {
            say_of_rank(rank, error);
        }
    };
    run_mpi(&options, report, |comm| {
        let layout = layout_of_processes(ranks, comm.size())?;
        moeworks_train::Ranks::check_program(comm)?;
        as_rank(comm, layout)
    })
}

/// Lays so many processes out as the options ask; ranks of experts that are not given are those that are left.
#[cfg(unix)]
fn layout_of_processes(ranks: &RankArgs, num_ranks: usize) -> Result<SpreadLayout, Failure> {
    let pp = ranks.pp.unwrap_or(1);
    let layout = SpreadLayout { pp, ep: ranks.ep.unwrap_or(num_ranks / pp) };
    if layout.pp.checked_mul(layout.ep) == Some(num_ranks) {
        return Ok(layout);
    }
    let right = match (ranks.pp, ranks.ep) {
        (None, _) => "leave it out".to_owned(),
        (Some(_), None) => "their number must be a multiple".to_owned(),
        (Some(pp), Some(ep)) => format!("they must be {}", pp.saturating_mul(ep)),
    };
    Err(Failure::input(format!("{}: mpirun started {num_ranks} processes; {right}", asked(ranks))))
}

impl ModelRank<'_> {
    /// Opens the model of `source`, with the part of this rank alone if there are others.
    pub(crate) fn open(&self, source: &Source) -> Result<Model, Failure> {
        let ModelOptions { compute, .. } = self.options;
        match self.among {
            None => open(source, compute),
            Some(among) => {
                let spread = self.spread(among, source)?;
                Ok(spread.open(self.context(among)?, source, open_options(compute)?)?)
            }
        }
    }

    /// Computes another rank's part for rank 0.
    fn serve_root(&self, path: &Path) -> Result<ExitCode, Failure> {
        let Some(among) = self.among else { return Ok(ExitCode::SUCCESS) };
        let source = Source::open(path)?;
        let spread = self.spread(among, &source)?;
        spread.serve_root(&self.context(among)?, &source, open_options(self.options.compute)?)?;
        Ok(ExitCode::SUCCESS)
    }

    fn spread<'c>(&self, among: AmongRanks<'c>, source: &Source) -> Result<ModelSpread<'c>, Failure> {
        let placement = &self.options.ranks.placement;
        let given = placement.as_deref().map(|file| read_placements("--placement", file)).transpose()?;
        let path = source.path().display();
        ModelSpread::new(among.comm, among.layout, source, given).map_err(|error| match (error, placement) {
            (InferError::Placement { problem }, Some(file)) => {
                Failure::input(format!("--placement {}: {problem}", file.display()))
            }
            (InferError::NoExperts { num_ranks }, _) => Failure::input(format!(
                "{path}: the model is dense: it has no experts to spread over {num_ranks} ranks; use one rank, without \
                 --ep, or --pp"
            )),
            (InferError::NoStages { num_stages }, _) => Failure::input(format!(
                "{path}: --pp {num_stages}: a model with an encoder, relative positions or a capacity of its experts is \
                 not spread over stages; leave it out"
            )),
            (InferError::FewLayers { num_stages, num_layers }, _) => Failure::input(format!(
                "{path}: --pp {num_stages}: must be at most {num_layers}, the number of the model's layers"
            )),
            (error, _) => error.into(),
        })
    }

    /// Makes the compute context of a rank: with its share of the cores, unless threads are given. Stages on one
    /// machine share their cores, because one waits while another computes.
    fn context(&self, AmongRanks { comm, layout }: AmongRanks<'_>) -> Result<Context, Failure> {
        let MachineArgs { threads, device, .. } = self.options.compute.machine;
        if !matches!(device, DeviceChoice::Cpu | DeviceChoice::Auto) {
            return Err(Failure::input(format!(
                "--device {device}: a model on ranks is computed on the CPU; leave out --device, or use one rank"
            )));
        }
        let cores = share_cores(comm, false)?;
        let (nodes, rank) = (comm.nodes(), comm.rank());
        let is_beside = |other: &usize| nodes[*other] == nodes[rank] && other % layout.ep == rank % layout.ep;
        let num_stages = (0..comm.size()).filter(is_beside).count();
        let cores = (cores * num_stages as f64) as usize;
        let threads = if threads == 0 { cores.max(1) } else { threads };
        context(&MachineArgs { threads, device: DeviceChoice::Cpu, ..self.options.compute.machine })
    }
}

/// Reads the placements in a file that `option` names.
pub(crate) fn read_placements(option: &str, file: &Path) -> Result<Placements, Failure> {
    let wrong = |problem: String| Failure::input(format!("{option} {}: {problem}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    text.parse().map_err(|error| wrong(format!("{error}")))
}
