//! One rank's handle to a run: its groups, its share of the sequences, and the collectives of training.
//!
//! Rank 0 is the root. Only the root reads what a single rank may read (a new token cache), writes checkpoints,
//! records and the report, and prints. A checkpoint does not depend on the layout: the root gathers the whole model,
//! so that any layout can resume from it.

mod domains;
mod exchange;
mod gather;
mod gradients;
mod link_probe;
mod mover;
mod placements;
mod rank_records;
mod slice_move;
mod stage_groups;
mod table;
mod tensor;
mod whole_layers;
mod zero;
mod zero_shards;

use std::fs;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytemuck::Pod;
use moeworks_comm::{CommError, Communicator, Meter, Metered, Reduce, share_cores};
use moeworks_model::{WeightSpec, WeightTable};
use moeworks_moe::{EpOptions, ExpertRanks, LayerRanks};
use moeworks_plan::{Layout, Placements};

use crate::config::{RunConfig, WireChoice};
use crate::error::TrainError;
use domains::DomainTuning;
use gradients::ReplicaSums;
pub(crate) use gradients::SumsUnderWay;
pub(crate) use link_probe::time_all_to_all;
pub(crate) use mover::{ExpertState, LayerMove, LayerOnItsWay, MomentsOnTheirWay};
pub use placements::placements;
use placements::placements_of;
pub(crate) use placements::{placements_in_checkpoint, rebalance_target};
use stage_groups::StageGroups;
use table::PartTable;
use tensor::{TensorGroups, TensorPart};
pub(crate) use whole_layers::WholeLayers;
pub(crate) use zero::GradSlices;

/// The timeout of ranks that wait for one that reads data or writes a checkpoint.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);
/// The default timeout within a step.
const STEP_TIMEOUT: Duration = Duration::from_secs(25);

/// One rank's handle to a run on several ranks.
pub struct Ranks {
    /// The layout as this rank's stage group has it.
    layout: Layout,
    /// All ranks.
    world: Box<dyn Communicator>,
    /// The stage group: the ranks with this rank's pp index. All ranks without a pipeline.
    stage_group: Box<dyn Communicator>,
    /// The pipeline group: the ranks at this rank's place in each stage group. None without a pipeline.
    pipeline_group: Option<Box<dyn Communicator>>,
    /// The stage groups that hold each tensor, and this rank's groups over several of them, once the model is known.
    stage_groups: OnceLock<StageGroups>,
    /// The ranks of this stage group that hold the same experts.
    copies: Box<dyn Communicator>,
    experts: ExpertRanks,
    /// The tensor-parallel groups; none without tensor parallelism.
    tensor: Option<TensorGroups>,
    /// This rank's tensor-parallel parts, once the model is known.
    tensor_part: OnceLock<TensorPart>,
    /// The meter of all communication.
    meter: Arc<Meter>,
    /// The number of cores that this rank may use; below one if ranks share a core.
    cores: f64,
    /// The time within a step after which a rank counts as hung.
    step_timeout: Duration,
    /// The stage of ZeRO over ranks that hold the same weights: 1 shards the optimizer state, 2 gradients as well, 3
    /// weights as well.
    zero: u8,
    /// The tensors of this rank's part of the model, once it is known.
    table: OnceLock<PartTable>,
    /// The sums of gradients of replicas that were not asked for yet.
    replica_sums: Mutex<ReplicaSums>,
    /// The choice of domains by bandwidth; none where their sizes are set.
    domain_tuning: Option<Mutex<DomainTuning>>,
}

impl Ranks {
    /// Creates the handle of `comm`'s rank in `layout`. `placements` has the experts of each rank of a group, for
    /// each layer; `options` are those of expert parallelism. All ranks call this.
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
        let (world, stage_group) = (part(comm, 0, rank)?, part(comm, layout.stage_group(rank), rank)?);
        let pipeline_group = || part(comm, rank % layout.stage_group_size(), layout.stage_group(rank));
        let pipeline_group = (layout.pp > 1).then(pipeline_group).transpose()?;
        let (of_experts, copies, group) =
            (part(&*stage_group, 0, rank)?, part(&*stage_group, place, dp)?, part(&*stage_group, dp, place)?);
        let experts = ExpertRanks::new(of_experts, group, placements, options)?;
        let tensor = || TensorGroups::new(&*stage_group, stage_group.rank() / layout.tp, tp);
        let tensor = (layout.tp > 1).then(tensor).transpose()?;
        Ok(Self {
            layout,
            world,
            stage_group,
            pipeline_group,
            stage_groups: OnceLock::new(),
            copies,
            experts,
            tensor,
            tensor_part: OnceLock::new(),
            meter: Arc::new(Meter::new(false)),
            cores: 1.0,
            step_timeout: STEP_TIMEOUT,
            zero: 0,
            table: OnceLock::new(),
            replica_sums: Mutex::default(),
            domain_tuning: None,
        })
    }

    /// Creates the handle like [`new`](Self::new), with a meter of all communication. With `keeps_spans` a trace can
    /// be written.
    pub(crate) fn metered(
        comm: &dyn Communicator,
        layout: Layout,
        placements: Placements,
        options: EpOptions,
        keeps_spans: bool,
    ) -> Result<Self, CommError> {
        let all = comm.split(Some(0), comm.rank())?.expect("a rank with a color is in a group");
        // The barrier aligns the start times of different machines.
        comm.barrier()?;
        let meter = Arc::new(Meter::new(keeps_spans));
        let metered = Metered::new(all, Arc::clone(&meter));
        let options = EpOptions { meter: Some(Arc::clone(&meter)), ..options };
        let ranks = Self::new(&metered, layout, placements, options)?;
        Ok(Self { meter, ..ranks })
    }

    /// Creates the handle of `comm`'s rank according to `config`; `is_traced` is true if a trace will be written. All
    /// ranks call this.
    pub fn of_config(comm: &dyn Communicator, config: &RunConfig, is_traced: bool) -> Result<Self, TrainError> {
        let parallel = &config.parallel;
        if parallel.num_ranks() != comm.size() {
            return Err(TrainError::Ranks { layout: parallel.layout(), num_ranks: comm.size() });
        }
        let cores = share_cores(comm, parallel.pin)?;
        let exchange = exchange::of_config(comm, config)?;
        let moving = exchange::moving(comm, config)?;
        let layout = parallel.layout_of_stage_group(parallel.layout().stage_group(comm.rank()));
        let nodes: Vec<usize> = layout.ep_group(comm.rank()).into_iter().map(|rank| comm.nodes()[rank]).collect();
        let domain = domains::of_config(config, &nodes)?.filter(|_| !parallel.domain.is_auto());
        let backward_wire = parallel.wire_backward.0.map(WireChoice::wire);
        let options = EpOptions { moving, domain, backward_wire, ..exchange.into() };
        let ranks = Self::metered(comm, layout, placements_of(config, &layout)?, options, is_traced)?;
        let ranks = Self { cores, ..ranks.with_timeout(Duration::from_secs(parallel.timeout_s)) };
        ranks.with_zero(parallel.zero).with_domain_tuning(config)
    }

    /// Refuses processes that run another program than rank 0. All ranks call this.
    pub fn check_program(comm: &dyn Communicator) -> Result<(), TrainError> {
        let program = std::env::current_exe().and_then(|path| fs::read(&path));
        let program = program.map_err(|error| comm.abort(&format!("its program cannot be read: {error}")))?;
        Ok(comm.check_same("program", &fingerprint(&program))?)
    }

    /// Sets the time within a step after which a rank counts as hung.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.step_timeout = timeout;
        self
    }

    /// Sets the stage of ZeRO: 0 shards nothing, 1 the optimizer state, 2 gradients as well, 3 weights as well.
    #[must_use]
    pub fn with_zero(mut self, zero: u8) -> Self {
        self.zero = zero;
        self
    }

    /// Returns whether the optimizer state is sharded.
    pub(crate) fn shards_optimizer(&self) -> bool {
        self.zero >= 1
    }

    /// Returns whether gradients are sharded.
    pub(crate) fn shards_gradients(&self) -> bool {
        self.zero >= 2
    }

    /// Returns whether weights are sharded.
    pub(crate) fn shards_weights(&self) -> bool {
        self.zero >= 3
    }

    /// Returns the table of this rank's part of the model. Panics before [`hold`](Self::hold).
    pub(crate) fn table(&self) -> &PartTable {
        self.table.get().expect("the table is known before its tensors are shared out")
    }

    /// Sets the table of this rank's part of the weights. With tensor parallelism [`cut_tensors`](Self::cut_tensors)
    /// must come first.
    pub(crate) fn hold(&self, table: &Arc<WeightTable>) {
        self.table.get_or_init(|| PartTable::new(table, |spec| self.part_shape(spec)));
    }

    /// Returns the communicator of all ranks.
    pub(crate) fn world(&self) -> &dyn Communicator {
        &*self.world
    }

    /// Returns the layout of the ranks.
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns this rank's number.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// Returns the communicator of the ranks that hold the same part of tensor `place`.
    fn holders_of(&self, place: usize) -> &dyn Communicator {
        self.holders(self.table().spec(place))
    }

    /// Returns whether this is the rank that writes and prints.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.world.rank() == 0
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.world.size()
    }

    /// Returns the number of ranks on this rank's node.
    pub(crate) fn num_neighbours(&self) -> usize {
        self.neighbours_among(self.num_ranks())
    }

    /// Returns this rank's index on its node.
    pub(crate) fn place_on_node(&self) -> usize {
        self.neighbours_among(self.world.rank())
    }

    /// Returns how many of the first `first` ranks are on this rank's node.
    fn neighbours_among(&self, first: usize) -> usize {
        let nodes = self.world.nodes();
        nodes[..first].iter().filter(|&&node| node == nodes[self.world.rank()]).count()
    }

    /// Returns the number of cores that this rank may use; below one if ranks share a core.
    pub(crate) fn num_cores(&self) -> f64 {
        self.cores
    }

    /// Returns this rank's handle to expert-parallel layers.
    #[must_use]
    pub fn experts(&self) -> &ExpertRanks {
        &self.experts
    }

    /// Returns the handle to the layer of `spec`, a tensor of experts; layer 0 for experts outside the layers.
    fn layer_of(&self, spec: &WeightSpec) -> LayerRanks {
        self.experts.layer(spec.place.layer().unwrap_or(0))
    }

    /// Returns this rank's share of `num` sequences: consecutive ones; the first ranks have one more if they do not
    /// divide evenly. Tensor-parallel ranks of one group have the same share.
    #[must_use]
    pub fn share(&self, num: usize) -> Range<usize> {
        let tp = self.layout.tp;
        let (n, rank) = (self.stage_group.size() / tp, self.stage_group.rank() / tp);
        let start = |rank: usize| num / n * rank + rank.min(num % n);
        start(rank)..start(rank + 1)
    }

    /// Returns the first communication error of the layers, if any.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        self.experts.failure().map_or(Ok(()), |error| Err(error.into()))
    }

    /// Runs `work` on the root first, then on the other ranks.
    pub(crate) fn root_first<R>(&self, work: impl FnOnce() -> Result<R, TrainError>) -> Result<R, TrainError> {
        if self.is_root() {
            let result = work()?;
            self.world.barrier()?;
            return Ok(result);
        }
        self.world.barrier()?;
        work()
    }

    /// Refuses ranks that were started with another `text`, such as that of the settings.
    pub(crate) fn check_same(&self, what: &str, text: &str) -> Result<(), TrainError> {
        Ok(self.world.check_same(what, &fingerprint(text.as_bytes()))?)
    }

    /// Waits for all ranks without a limit, then sets the timeout of steps.
    pub(crate) fn begin_steps(&self) -> Result<(), TrainError> {
        self.world.barrier()?;
        self.world.set_timeout(self.step_timeout);
        Ok(())
    }

    /// Runs `work` without the timeout of steps, because it takes longer on the root.
    pub(crate) fn patiently<R>(&self, work: impl FnOnce() -> Result<R, TrainError>) -> Result<R, TrainError> {
        self.world.set_timeout(PATIENCE);
        let result = work()?;
        self.begin_steps()?;
        Ok(result)
    }

    /// Returns for each of `flags` whether it is true on any rank.
    pub(crate) fn any<const N: usize>(&self, flags: [bool; N]) -> Result<[bool; N], TrainError> {
        let mut numbers = flags.map(u32::from);
        self.world.all_reduce(&mut numbers, Reduce::Max)?;
        Ok(numbers.map(|number| number > 0))
    }

    /// Returns this rank's meter.
    pub(crate) fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Gathers the `values` of every rank, in the order of ranks.
    pub(crate) fn all_values<T: Pod>(&self, values: &[T]) -> Result<Vec<T>, TrainError> {
        Ok(all_values(&*self.world, values)?)
    }
}

/// The `values` of all ranks of `comm`, in the order of ranks.
pub(crate) fn all_values<T: Pod>(comm: &dyn Communicator, values: &[T]) -> Result<Vec<T>, CommError> {
    let mut lens = vec![0_u64; comm.size()];
    comm.all_gather(&[values.len() as u64], &mut lens)?;
    let lens: Vec<usize> = lens.into_iter().map(|len| len as usize).collect();
    let mut all = vec![T::zeroed(); lens.iter().sum()];
    comm.all_gather_v(values, &mut all, &lens)?;
    Ok(all)
}

/// Splits off the ranks of `comm` with the same `color`, in the order of `key`.
fn part(comm: &dyn Communicator, color: usize, key: usize) -> Result<Box<dyn Communicator>, CommError> {
    let part = comm.split(Some(color as u32), key)?;
    Ok(part.expect("a rank with a color is in a group"))
}

/// Returns a hash of `bytes` by which ranks compare them.
fn fingerprint(bytes: &[u8]) -> [u8; 32] {
    let mut fingerprint = [0; 32];
    fingerprint[..16].copy_from_slice(&xxhash_rust::xxh3::xxh3_128(bytes).to_le_bytes());
    fingerprint
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
