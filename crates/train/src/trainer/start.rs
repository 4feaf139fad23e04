//! The start of a trainer: a new run or a resumed one, on one or several ranks.

use std::path::PathBuf;
use std::sync::Arc;

use moeworks_infer::store::{Checkpoint, Store};
use moeworks_model::{ParamSet, WeightSpec};
use moeworks_ops::{Context, peak};
use moeworks_tensor::{DType, Tensor};

use super::folder::{RunFiles, RunFolder};
use super::{Output, Trainer, TrainerSettings};
use crate::checkpoint::{self, Progress};
use crate::error::TrainError;
use crate::optimizer::Optimizer;
use crate::parallel::Ranks;
use crate::rebalance::Rebalancer;
use crate::task::{KeepPart, Task};

/// The options of a new run.
pub struct StartOptions {
    /// The folder of the run.
    pub folder: RunFolder,
    /// The settings.
    pub settings: TrainerSettings,
    /// The device and the threads that compute.
    pub ctx: Context,
    /// This rank's handle; none for a single rank. All ranks start the run.
    pub ranks: Option<Arc<Ranks>>,
}

/// The options of a resumed run.
pub struct ResumeOptions {
    /// The folder of the run.
    pub run_dir: PathBuf,
    /// The settings.
    pub settings: TrainerSettings,
    /// The device and the threads that compute.
    pub ctx: Context,
    /// This rank's handle; none for a single rank. All ranks resume the run. Their number may differ from before.
    pub ranks: Option<Arc<Ranks>>,
}

/// A run to resume, and its checkpoint.
pub(crate) struct ResumePoint {
    run_dir: PathBuf,
    /// The store, on the rank that writes.
    store: Option<Store>,
    /// The checkpoint; none if the run stopped before its first one.
    pub(crate) checkpoint: Option<Checkpoint>,
}

impl ResumePoint {
    /// Finds the newest complete checkpoint of the run in `run_dir`. On the rank that writes, the run is then locked.
    pub(crate) fn find(run_dir: PathBuf, ranks: Option<&Ranks>) -> Result<Self, TrainError> {
        let is_root = is_root(ranks);
        let find = || {
            let store = if is_root { Store::open_to_write(&run_dir)? } else { Store::open(&run_dir) };
            let checkpoint = store.latest()?;
            if checkpoint.is_none() && !store.is_empty()? {
                let problem = "the run has no complete checkpoint to go on from".to_owned();
                return Err(TrainError::State { path: run_dir.clone(), problem });
            }
            Ok((is_root.then_some(store), checkpoint))
        };
        let (store, checkpoint) = root_first(ranks, find)?;
        if store.is_some() && checkpoint.is_none() {
            tracing::warn!("{}: has no checkpoint yet, and begins again", run_dir.display());
        }
        Ok(Self { run_dir, store, checkpoint })
    }
}

/// Runs `work`; on several ranks first on the root, then on the others.
pub(crate) fn root_first<R>(
    ranks: Option<&Ranks>,
    work: impl FnOnce() -> Result<R, TrainError>,
) -> Result<R, TrainError> {
    match ranks {
        None => work(),
        Some(ranks) => ranks.root_first(work),
    }
}

/// Returns whether this is the rank that writes.
pub(crate) fn is_root(ranks: Option<&Ranks>) -> bool {
    ranks.is_none_or(Ranks::is_root)
}

/// Returns a function that reduces each whole tensor to this rank's part: all of it on one rank, and only a slice of
/// the part if `are_shared` is true of the ranks.
fn keeper<'a>(ctx: &'a Context, ranks: Option<&'a Ranks>, are_shared: impl Fn(&Ranks) -> bool) -> Box<KeepPart<'a>> {
    match ranks {
        None => Box::new(|_: &WeightSpec, tensor: &Tensor| tensor.clone()),
        Some(ranks) => Box::new(ranks.keeper(ctx, are_shared(ranks))),
    }
}

/// The parts of a trainer that the caller provides.
struct Setup<T: Task> {
    task: T,
    ctx: Context,
    settings: TrainerSettings,
    ranks: Option<Arc<Ranks>>,
}

/// The parts of a trainer that a new or resumed run provides.
struct Begun<P> {
    run_dir: PathBuf,
    params: P,
    optimizer: Optimizer,
    progress: Progress,
    output: Option<Output>,
}

/// The files of a run, on the rank that writes, and its folder.
type BegunOutput = (Option<Output>, PathBuf);

impl<T: Task> Trainer<T> {
    /// Starts a new run of `task`. Nothing is written before its initial weights exist.
    ///
    /// # Errors
    /// If the folder is taken, the ranks cannot hold the model, or a file cannot be written.
    pub fn start(task: T, options: StartOptions) -> Result<Self, TrainError> {
        let StartOptions { folder, settings, ctx, ranks } = options;
        if is_root(ranks.as_deref()) {
            folder.check()?;
        }
        Setup { task, ctx, settings, ranks }.begin(|is_root, files| {
            if !is_root {
                return Ok((None, folder.path().to_owned()));
            }
            Output::create(&folder, files).map(|(output, run_dir)| (Some(output), run_dir))
        })
    }

    /// Resumes a run of `task` from its newest complete checkpoint, or starts it again if it has none.
    ///
    /// # Errors
    /// If the checkpoint is damaged or of another model, or a file cannot be written.
    pub fn resume(task: T, options: ResumeOptions) -> Result<Self, TrainError> {
        let point = ResumePoint::find(options.run_dir.clone(), options.ranks.as_deref())?;
        Self::resume_from(task, point, options)
    }

    /// Resumes from a checkpoint that was found.
    pub(crate) fn resume_from(task: T, point: ResumePoint, options: ResumeOptions) -> Result<Self, TrainError> {
        let ResumeOptions { settings, ctx, ranks, .. } = options;
        let ResumePoint { run_dir, store, checkpoint } = point;
        let setup = Setup { task, ctx, settings, ranks };
        match checkpoint {
            Some(checkpoint) => setup.go_on(run_dir, store, checkpoint),
            None => setup.begin(|_, files| {
                let output = store.map(|store| Output::begin(store, &run_dir, files)).transpose()?;
                Ok((output, run_dir.clone()))
            }),
        }
    }
}

impl<T: Task> Setup<T> {
    /// Starts a run. `output` creates the files of the run, on the rank that writes, and its folder.
    fn begin(
        mut self,
        output: impl FnOnce(bool, &RunFiles<'_>) -> Result<BegunOutput, TrainError>,
    ) -> Result<Trainer<T>, TrainError> {
        self.share_out()?;
        let Self { task, ctx, settings, ranks } = &mut self;
        let ranks = ranks.as_deref();
        let params = task.first_params(ctx, settings.seed, &mut *keeper(ctx, ranks, Ranks::shards_weights))?;
        let table = task.table();
        let optimizer = match ranks.filter(|ranks| ranks.shards_optimizer() && !ranks.shards_weights()) {
            Some(ranks) => Optimizer::new(ctx, settings.adamw, table, &ranks.trainable_slices(ctx, &params)),
            None => Optimizer::new(ctx, settings.adamw, table, &params),
        };
        let (output, run_dir) = output(is_root(ranks), &RunFiles::new(task))?;
        let progress = Progress { data_hash: task.data_hash(), ..Progress::default() };
        self.finish(Begun { run_dir, params, optimizer, progress, output })
    }

    /// Resumes from a checkpoint; `store` is that of the rank that writes.
    fn go_on(
        mut self,
        run_dir: PathBuf,
        store: Option<Store>,
        checkpoint: Checkpoint,
    ) -> Result<Trainer<T>, TrainError> {
        self.share_out()?;
        let Self { task, ctx, settings, ranks } = &mut self;
        let ranks = ranks.as_deref();
        let progress = checkpoint::progress(&checkpoint)?;
        let params = task.load_model(ctx, &checkpoint.path, &mut *keeper(ctx, ranks, Ranks::shards_weights))?;
        let mut keep = keeper(ctx, ranks, Ranks::shards_optimizer);
        let table = task.table();
        let moments = checkpoint::load_moments(ctx, table, &checkpoint, &mut *keep)?;
        drop(keep);
        let optimizer = Optimizer::from_moments(settings.adamw, table, moments, progress.updates);
        if progress.data_hash != task.data_hash() {
            tracing::warn!("the data is not what this run began with: its steps will not be those of an unbroken run");
        }
        let output = match store {
            Some(store) => Some(Output::go_on(store, &run_dir, &RunFiles::new(task), checkpoint)?),
            None => None,
        };
        self.finish(Begun { run_dir, params, optimizer, progress, output })
    }

    /// Sets the tables of the tensors that the ranks hold. Fails if ranks were started with other settings, or if the
    /// task does not support their parallelism.
    fn share_out(&self) -> Result<(), TrainError> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        let possible = self.task.parallelism();
        if ranks.layout().tp > 1 && !possible.tensor {
            return Err(TrainError::Parallelism { what: "tensor-parallel ranks (tp above 1)" });
        }
        if ranks.shards_weights() && !possible.sharded_weights {
            return Err(TrainError::Parallelism { what: "sharded weights (ZeRO 3)" });
        }
        if ranks.layout().pp > 1 && !possible.pipeline {
            return Err(TrainError::Parallelism { what: "a pipeline (pp above 1)" });
        }
        ranks.check_same("configuration", &self.task.config_text())?;
        ranks.hold(self.task.table());
        Ok(())
    }

    fn finish(self, begun: Begun<T::Params>) -> Result<Trainer<T>, TrainError> {
        let Self { task, ctx, settings, ranks } = self;
        let Begun { run_dir, params, optimizer, progress, output } = begun;
        let is_mixed = settings.products != DType::F32;
        let at = settings.optimizer_context(&ctx);
        let copy = is_mixed.then(|| params.copy_for_products(&at, task.table(), settings.products));
        let is_measured = output.is_some() && task.flops_per_target().is_some();
        let peak_flops = if is_measured { peak_flops(&ctx, settings.products, ranks.as_deref()) } else { 1.0 };
        let grads = match &ranks {
            Some(ranks) => ranks.first_grads(&ctx, &params),
            None => params.gradients(&ctx, task.table(), settings.expert_gradients),
        };
        let rebalancer = match &ranks {
            Some(ranks) => {
                let log_dir = output.is_some().then_some(&*run_dir);
                Rebalancer::new(&settings.rebalance, ranks, task.moe_layers(), log_dir, progress.step)?
            }
            None => None,
        };
        let trainer = Trainer {
            ctx,
            task,
            settings,
            run_dir,
            params,
            copy,
            grads,
            optimizer,
            progress,
            output,
            peak_flops,
            ranks,
            rebalancer,
        };
        trainer.ctx.pool().restart();
        trainer.ranks.as_ref().map_or(Ok(()), |ranks| ranks.begin_steps())?;
        Ok(trainer)
    }
}

/// Returns the operations a second of all ranks: this rank's times their number, limited by the cores of a node.
fn peak_flops(ctx: &Context, products: DType, ranks: Option<&Ranks>) -> f64 {
    let own = peak::measure(ctx).flops(products);
    ranks.map_or(own, |ranks| {
        own * ranks.num_ranks() as f64 * (ranks.num_cores() / ctx.threads().count() as f64).min(1.0)
    })
}
