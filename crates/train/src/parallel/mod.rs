//! One rank's place in a run: its groups, its share of the sequences, and what the ranks sum or put together.
//!
//! Rank 0 is the root: it alone reads what only one may (a fresh token cache), writes (checkpoints, records, the report) and
//! shows. A checkpoint is that of one rank: the root puts the experts together, so that any layout goes on from it.

mod exchange;
mod gather;
mod gradients;
mod placements;
mod rank_records;
mod table;
mod tensor;
mod zero;
mod zero_shards;

use std::fs;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytemuck::Pod;
use moeworks_comm::{CommError, Communicator, Meter, Metered, Reduce, share_cores};
use moeworks_model::{WeightSpec, WeightTable};
use moeworks_moe::{EpOptions, ExpertRanks, LayerRanks};
use moeworks_plan::{Layout, Placements};

use crate::config::RunConfig;
use crate::error::TrainError;
pub(crate) use gradients::SumsUnderWay;
pub use placements::placements;
use table::PartTable;
use tensor::{TensorGroups, TensorPart};
pub(crate) use zero_shards::PendingWhole;

/// How long ranks wait for one that reads data or writes a checkpoint.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);
/// How long they wait for one within a step, unless told.
const STEP_TIMEOUT: Duration = Duration::from_secs(25);

/// One rank's place in a run.
pub struct Ranks {
    layout: Layout,
    /// All ranks.
    world: Box<dyn Communicator>,
    /// Those that hold the same experts.
    copies: Box<dyn Communicator>,
    experts: ExpertRanks,
    /// Where several ranks hold what is no expert between them.
    tensor: Option<TensorGroups>,
    /// And what they hold, once the model is known.
    tensor_part: OnceLock<TensorPart>,
    /// What goes through all of these.
    meter: Arc<Meter>,
    /// How many cores of its node are this rank's; less than one where it shares them.
    cores: f64,
    /// How long ranks wait for one within a step before they take it for hung.
    step_timeout: Duration,
    /// What ranks that hold the same weights share out: from 1 on their optimizer state, from 2 on gradients, from 3 on the weights
    /// themselves (ZeRO's stages).
    zero: u8,
    /// The tensors of this rank's part of the model, once it is known.
    table: OnceLock<PartTable>,
}

impl Ranks {
    /// The place of the rank of `comm`, whose ranks lie as `layout` says; `placements` say which rank of a group holds which
    /// expert of each layer, `options` how tokens meet them. All ranks call this.
    pub fn new(
        comm: &dyn Communicator,
        layout: Layout,
        placements: impl Into<Placements>,
        options: impl Into<EpOptions>,
    ) -> Result<Self, CommError> {
        comm.set_timeout(PATIENCE);
        let rank = comm.rank();
        let (dp, ep, tp) = layout.place(rank);
        let place = ep * layout.tp + tp;
        let (world, of_experts) = (part(comm, 0, rank)?, part(comm, 0, rank)?);
        let (copies, group) = (part(comm, place, dp)?, part(comm, dp, place)?);
        let experts = ExpertRanks::new(of_experts, group, placements, options)?;
        let tensor = || TensorGroups::new(comm, rank / layout.tp, tp);
        let tensor = (layout.tp > 1).then(tensor).transpose()?;
        Ok(Self {
            layout,
            world,
            copies,
            experts,
            tensor,
            tensor_part: OnceLock::new(),
            meter: Arc::new(Meter::new(false)),
            cores: 1.0,
            step_timeout: STEP_TIMEOUT,
            zero: 0,
            table: OnceLock::new(),
        })
    }

    /// As [`new`](Self::new), with an account of what goes through the communicators; a trace of it can be written where it keeps
    /// spans.
    fn metered(
        comm: &dyn Communicator,
        layout: Layout,
        placements: Placements,
        options: EpOptions,
        keeps_spans: bool,
    ) -> Result<Self, CommError> {
        let all = comm.split(Some(0), comm.rank())?.expect("a rank with a color is in a group");
        // Clocks of different machines begin together.
        comm.barrier()?;
        let meter = Arc::new(Meter::new(keeps_spans));
        let metered = Metered::new(all, Arc::clone(&meter));
        let options = EpOptions { meter: Some(Arc::clone(&meter)), ..options };
        let ranks = Self::new(&metered, layout, placements, options)?;
        Ok(Self { meter, ..ranks })
    }

    /// The place of the rank of `comm` that `config` gives it; `is_traced` says whether a trace will be written. All ranks call
    /// this.
    pub fn of_config(comm: &dyn Communicator, config: &RunConfig, is_traced: bool) -> Result<Self, TrainError> {
        let parallel = &config.parallel;
        if parallel.num_ranks() != comm.size() {
            return Err(TrainError::Ranks { layout: parallel.layout(), num_ranks: comm.size() });
        }
        let cores = share_cores(comm, parallel.pin)?;
        let exchange = exchange::of_config(comm, config)?;
        let options = EpOptions { moving: exchange::moving(comm, config)?, ..exchange.into() };
        let ranks = Self::metered(comm, parallel.layout(), placements(config)?, options, is_traced)?;
        let ranks = Self { cores, ..ranks.with_timeout(Duration::from_secs(parallel.timeout_s)) };
        Ok(ranks.with_zero(parallel.zero))
    }

    /// Refuses processes that run another program than that of rank 0. All ranks call this.
    pub fn check_program(comm: &dyn Communicator) -> Result<(), TrainError> {
        let program = std::env::current_exe().and_then(|path| fs::read(&path));
        let program = program.map_err(|error| comm.abort(&format!("its program cannot be read: {error}")))?;
        Ok(comm.check_same("program", &fingerprint(&program))?)
    }

    /// Sets how long ranks wait for one within a step before they take it for hung.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.step_timeout = timeout;
        self
    }

    /// Sets what ranks that hold the same weights share out: 0 nothing, 1 their optimizer state, 2 gradients, too, 3 and the weights
    /// (the stages of ZeRO). Panics where a group holds an expert more than once.
    #[must_use]
    pub fn with_zero(mut self, zero: u8) -> Self {
        assert!(zero == 0 || !self.experts.placements().has_replicas(), "replicas have whole optimizer states");
        self.zero = zero;
        self
    }

    /// Whether ranks that hold the same weights share their optimizer state out.
    pub(crate) fn shards_optimizer(&self) -> bool {
        self.zero >= 1
    }

    /// Whether they share gradients out, too.
    pub(crate) fn shards_gradients(&self) -> bool {
        self.zero >= 2
    }

    /// Whether they share the weights themselves out.
    pub(crate) fn shards_weights(&self) -> bool {
        self.zero >= 3
    }

    /// The tensors of this rank's part of the model, known when it [holds](Self::hold) them.
    pub(crate) fn table(&self) -> &PartTable {
        self.table.get().expect("the table is known before its tensors are shared out")
    }

    /// Lets this rank hold its part of the weights of `table`. [`cut_tensors`](Self::cut_tensors) comes first where tensors are cut.
    pub(crate) fn hold(&self, table: &Arc<WeightTable>) {
        self.table.get_or_init(|| PartTable::new(table, |spec| self.part_shape(spec)));
    }

    /// All ranks.
    pub(crate) fn world(&self) -> &dyn Communicator {
        &*self.world
    }

    /// The layout of the ranks.
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// This rank's number.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// The ranks that hold tensor `place` as this one does.
    fn holders_of(&self, place: usize) -> &dyn Communicator {
        self.holders(self.table().spec(place))
    }

    /// Whether this is the rank that writes and shows.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.world.rank() == 0
    }

    /// How many ranks there are.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.world.size()
    }

    /// How many of them run on this rank's node.
    pub(crate) fn num_neighbours(&self) -> usize {
        self.neighbours_among(self.num_ranks())
    }

    /// Which of those on its node this rank is.
    pub(crate) fn place_on_node(&self) -> usize {
        self.neighbours_among(self.world.rank())
    }

    /// How many of the first ranks run on this rank's node.
    fn neighbours_among(&self, first: usize) -> usize {
        let nodes = self.world.nodes();
        nodes[..first].iter().filter(|&&node| node == nodes[self.world.rank()]).count()
    }

    /// How many cores of its node are this rank's; less than one where it shares them.
    pub(crate) fn num_cores(&self) -> f64 {
        self.cores
    }

    /// This rank's part in layers with experts.
    #[must_use]
    pub fn experts(&self) -> &ExpertRanks {
        &self.experts
    }

    /// The part in the layer that the tensor of `spec`, which is of experts, belongs to; of experts outside the layers in layer 0.
    fn layer_of(&self, spec: &WeightSpec) -> LayerRanks {
        self.experts.layer(spec.place.layer().unwrap_or(0))
    }

    /// This rank's sequences of `num`: neighbouring ones, the first ranks have one more where they do not divide. Those that hold what
    /// is no expert between them have the same.
    #[must_use]
    pub fn share(&self, num: usize) -> Range<usize> {
        let tp = self.layout.tp;
        let (n, rank) = (self.world.size() / tp, self.world.rank() / tp);
        let start = |rank: usize| num / n * rank + rank.min(num % n);
        start(rank)..start(rank + 1)
    }

    /// Fails if a communication of the layers failed.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        self.experts.failure().map_or(Ok(()), |error| Err(error.into()))
    }

    /// Lets the root do `work` first, the others when it is done.
    pub(crate) fn root_first<R>(&self, work: impl FnOnce() -> Result<R, TrainError>) -> Result<R, TrainError> {
        if self.is_root() {
            let result = work()?;
            self.world.barrier()?;
            return Ok(result);
        }
        self.world.barrier()?;
        work()
    }

    /// Refuses ranks that were started with other settings: `text` is what all must have alike.
    pub(crate) fn check_same(&self, what: &str, text: &str) -> Result<(), TrainError> {
        Ok(self.world.check_same(what, &fingerprint(text.as_bytes()))?)
    }

    /// Waits for all ranks, as long as it takes, and from then on no longer than a step may take.
    pub(crate) fn begin_steps(&self) -> Result<(), TrainError> {
        self.world.barrier()?;
        self.world.set_timeout(self.step_timeout);
        Ok(())
    }

    /// Lets everybody wait for `work`, of which the root has more than others.
    pub(crate) fn patiently<R>(&self, work: impl FnOnce() -> Result<R, TrainError>) -> Result<R, TrainError> {
        self.world.set_timeout(PATIENCE);
        let result = work()?;
        self.begin_steps()?;
        Ok(result)
    }

    /// Whether any rank says so, for each of `flags`.
    pub(crate) fn any<const N: usize>(&self, flags: [bool; N]) -> Result<[bool; N], TrainError> {
        let mut numbers = flags.map(u32::from);
        self.world.all_reduce(&mut numbers, Reduce::Max)?;
        Ok(numbers.map(|number| number > 0))
    }

    /// This rank's account.
    pub(crate) fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Everybody's `values`, in the order of ranks.
    pub(crate) fn all_values<T: Pod>(&self, values: &[T]) -> Result<Vec<T>, TrainError> {
        let mut lens = vec![0_u64; self.world.size()];
        self.world.all_gather(&[values.len() as u64], &mut lens)?;
        let lens: Vec<usize> = lens.into_iter().map(|len| len as usize).collect();
        let mut all = vec![T::zeroed(); lens.iter().sum()];
        self.world.all_gather_v(values, &mut all, &lens)?;
        Ok(all)
    }
}

/// The ranks of `comm` that give the same `color`, in the order of `key`.
fn part(comm: &dyn Communicator, color: usize, key: usize) -> Result<Box<dyn Communicator>, CommError> {
    let part = comm.split(Some(color as u32), key)?;
    Ok(part.expect("a rank with a color is in a group"))
}

/// What stands for `bytes` when ranks compare them.
fn fingerprint(bytes: &[u8]) -> [u8; 32] {
    let mut fingerprint = [0; 32];
    fingerprint[..16].copy_from_slice(&xxhash_rust::xxh3::xxh3_128(bytes).to_le_bytes());
    fingerprint
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
