//! Expert parallelism: an MoE layer whose experts are spread over several ranks.
//!
//! Each rank routes its own tokens and sends them to the ranks that hold their experts ([`EpDispatch`]). Those ranks
//! compute the experts for the tokens of all ranks and return weighted sums, which the tokens' ranks add up. Backward
//! sends output gradients the same way and gets back the gradients of the inputs and of the choices' weights. An
//! [`Exchange`] holds the algorithm, the wire format and the number of chunks. The algorithm does not change a bit of
//! the result; the number of chunks changes its rounding, because GEMMs of few rows and of many sum in different
//! orders.
//!
//! The routing equals that of one rank with all tokens. Decisions that depend on many tokens are taken over those of
//! all ranks ([`CrossRank`]), and losses are computed from merged statistics ([`ExpertRanks::merge_stats`]).

mod cross_rank;
mod domains;
mod ep_dispatch;
mod experts;
mod merge_chunks;
mod mover;
mod remote;
mod remote_message;
mod remote_move;
mod shadow;
mod stats;
mod tuning;
mod turns;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use moeworks_comm::{CommError, Communicator, Hierarchy, Meter, PendingCombine, PendingDispatch, Reduce, RowPlan};
use moeworks_ops::Context;
use moeworks_plan::{Exchange, Moving, Nodes, Placement, Placements, Wire};
use moeworks_tensor::Tensor;

use crate::LayerStats;
pub(crate) use cross_rank::{ChoiceIds, CrossRank};
pub(crate) use domains::{Arriving, DomainPass};
use domains::{Bytes, Domain, DomainRoute, Traffic};
pub use domains::{DomainBase, DomainOptions, LevelDomain, SeenTraffic};
use ep_dispatch::EpDispatch;
pub(crate) use experts::{ExpertsInput, RanksBackwardInput, RanksSaved, RanksTask};
pub(crate) use merge_chunks::MergedChunks;
pub use mover::{ExpertRows, PendingExperts};
pub use remote::{HeldLayer, RemoteExperts, RemoteLayer, serve_experts, serve_owned_experts};
pub use remote_move::{OwnedLayer, bytes_of_expert, can_move};
use tuning::Tuning;
use turns::Turns;

/// The fewest tokens of a part on the two-hop path, so that messages stay long beside their latency, and the most
/// parts: with four, three quarters of the shorter hop are hidden.
const PART_TOKENS: usize = 2048;
const MOST_PARTS: usize = 4;

/// One rank's handle to all expert-parallel layers. Clones share it.
///
/// A failed communication does not end a pass: its rows are zeros and the rest of the pass communicates no more. The
/// caller checks [`failure`](Self::failure) after each pass.
#[derive(Clone)]
pub struct ExpertRanks {
    inner: Arc<Inner>,
}

/// One rank's handle to one expert-parallel layer: the ranks and the placement that the layer had when the handle was
/// made. Clones share it.
#[derive(Clone)]
pub struct LayerRanks {
    ranks: ExpertRanks,
    layer: usize,
    placed: LayerPlacement,
}

/// A layer's placement, and the experts that this rank holds by it.
#[derive(Clone)]
struct LayerPlacement {
    placement: Arc<Placement>,
    held: Arc<[usize]>,
    /// The rule by which tokens find experts, if that is not the placement's own.
    route: Option<DomainRoute>,
}

/// The placements that are in force.
struct Placed {
    placements: Arc<Placements>,
    /// The layers that were asked for.
    of_layers: HashMap<usize, LayerPlacement>,
}

impl Placed {
    fn new(placements: Placements) -> Self {
        Self { placements: Arc::new(placements), of_layers: HashMap::new() }
    }
}

/// The seconds of exchanges of tokens, dispatches and combines.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExchangeTimes {
    /// The time from the start of each exchange to its end.
    pub under_way_s: f64,
    /// The part of it in which the rank waited for the end and did nothing else.
    pub waited_s: f64,
}

impl ExchangeTimes {
    /// Returns the share of the time that was hidden under computations; none without exchanges.
    #[must_use]
    pub fn hidden(&self) -> Option<f64> {
        (self.under_way_s > 0.0).then(|| 1.0 - self.waited_s / self.under_way_s)
    }
}

/// Waits of a MoE layer and the attention before it that stand for their computations, in seconds: they measure how
/// passes overlap where ranks outnumber cores.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    /// Forward of attention and router.
    pub attention_forward_s: f64,
    /// Forward of the experts.
    pub experts_forward_s: f64,
    /// The gradient of the input of attention and router.
    pub attention_backward_s: f64,
    /// The gradient of the input of the experts.
    pub experts_backward_s: f64,
    /// The gradients of the weights of attention and router.
    pub attention_weights_s: f64,
    /// The gradients of the weights of the experts.
    pub experts_weights_s: f64,
    /// Forward of the shared experts.
    pub shared_forward_s: f64,
    /// The gradient of the input of the shared experts.
    pub shared_backward_s: f64,
    /// Forward of a row of an expert.
    pub row_forward_s: f64,
    /// Backward of a row of an expert.
    pub row_backward_s: f64,
}

/// The options of expert parallelism.
#[derive(Clone)]
pub struct EpOptions {
    /// The algorithm, wire format and chunks of the exchange of tokens.
    pub exchange: Exchange,
    /// The rule by which tokens or experts move. It must be equal on all ranks of the group.
    pub moving: Moving,
    /// A meter for the time of the layers' parts.
    pub meter: Option<Arc<Meter>>,
    /// Waits that stand for computations; none but in measurements.
    pub pace: Option<Pace>,
    /// The parts of a chunk on the two-hop path: the hop of one inside the node overlaps that of the next between
    /// nodes. 0 takes a number that suits the tokens. It must be equal on all ranks of the group.
    pub hop_parts: usize,
    /// True to compute shared experts while tokens travel, false to compute them afterwards. On a GPU they are
    /// computed afterwards, together with the sum of the outputs.
    pub shared_under_dispatch: bool,
    /// The domains in which ranks gather each other's experts; none without. Equal on all ranks of the group.
    pub domain: Option<DomainOptions>,
    /// The wire format of gradients of tokens and sums, if not that of the tokens.
    pub backward_wire: Option<Wire>,
}

impl From<Exchange> for EpOptions {
    /// Moves tokens by `exchange`, without a meter.
    fn from(exchange: Exchange) -> Self {
        Self {
            exchange,
            moving: Moving::Tokens,
            meter: None,
            pace: None,
            hop_parts: 0,
            shared_under_dispatch: true,
            domain: None,
            backward_wire: None,
        }
    }
}

struct Inner {
    world: Box<dyn Communicator>,
    /// The group of ranks that hold the experts between them.
    hierarchy: Hierarchy,
    /// This rank's domain, if there are any.
    domain: Mutex<Option<Arc<Domain>>>,
    /// By layer, the experts that coming passes have asked for.
    arriving: Mutex<HashMap<usize, VecDeque<Arriving>>>,
    traffic: Traffic,
    placed: Mutex<Placed>,
    options: EpOptions,
    tuning: Mutex<Tuning>,
    failure: Mutex<Option<CommError>>,
    /// The turns of two passes that overlap, while they do.
    turns: Mutex<Option<Arc<Turns>>>,
    exchange_times: Mutex<ExchangeTimes>,
}

impl ExpertRanks {
    /// Creates the handle. `world` has all ranks that have tokens, `group` the ranks that hold the experts between
    /// them. `placements` has one placement for all layers or one for each. All ranks of the group make this call.
    /// Panics if the placements are for another number of ranks, or if domains do not divide the group.
    ///
    /// # Errors
    /// [`CommError`] if a rank died, hangs, or made another call.
    pub fn new(
        world: Box<dyn Communicator>,
        group: Box<dyn Communicator>,
        placements: impl Into<Placements>,
        options: impl Into<EpOptions>,
    ) -> Result<Self, CommError> {
        let (placements, options) = (placements.into(), options.into());
        assert_eq!(placements.num_ranks(), group.size(), "ranks of a placement");
        let domain = options.domain.clone();
        let inner = Inner {
            domain: Mutex::default(),
            arriving: Mutex::default(),
            traffic: Traffic::default(),
            world,
            hierarchy: Hierarchy::from_comm(group)?,
            placed: Mutex::new(Placed::new(placements)),
            options,
            tuning: Mutex::default(),
            failure: Mutex::default(),
            turns: Mutex::default(),
            exchange_times: Mutex::default(),
        };
        let ranks = Self { inner: Arc::new(inner) };
        ranks.set_domain(domain)?;
        Ok(ranks)
    }

    /// Returns the handle to the layer of index `layer` by the placement that is in force. Panics if the layer has no
    /// placement.
    #[must_use]
    pub fn layer(&self, layer: usize) -> LayerRanks {
        let rank = self.group().rank();
        let mut placed = self.placed();
        let Placed { placements, of_layers } = &mut *placed;
        let placed = of_layers.entry(layer).or_insert_with(|| {
            let placement = placements.layer(layer);
            let placement = placement.unwrap_or_else(|| panic!("a placement of layer {layer}")).clone();
            LayerPlacement { held: placement.experts_of(rank).into(), placement: Arc::new(placement), route: None }
        });
        LayerRanks { ranks: self.clone(), layer, placed: placed.clone() }
    }

    /// Returns the placements of all layers that are in force.
    #[must_use]
    pub fn placements(&self) -> Arc<Placements> {
        Arc::clone(&self.placed().placements)
    }

    /// Puts other placements in force, for the passes that begin from now on. All ranks of the group do so between
    /// the same passes, when their weights are those of these placements. Panics if they are for another number of
    /// ranks.
    pub fn set_placements(&self, placements: Placements) {
        assert_eq!(placements.num_ranks(), self.group().size(), "ranks of a placement");
        *self.placed() = Placed::new(placements);
    }

    fn placed(&self) -> MutexGuard<'_, Placed> {
        self.inner.placed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn moving(&self) -> Moving {
        self.inner.options.moving
    }

    /// Runs `work` and reports its time as `name` to the meter, if there is one.
    pub fn time<R>(&self, name: &'static str, work: impl FnOnce() -> R) -> R {
        match &self.inner.options.meter {
            Some(meter) => meter.time(name, work),
            None => work(),
        }
    }

    /// Returns the parts of a chunk on the two-hop path, for a rank of the group with the most tokens in a chunk.
    fn hop_parts(&self, most_tokens: usize) -> usize {
        match self.inner.options.hop_parts {
            0 => (most_tokens / PART_TOKENS).clamp(1, MOST_PARTS),
            parts => parts,
        }
    }

    /// Returns whether shared experts are computed while tokens travel.
    pub(crate) fn computes_shared_under_dispatch(&self) -> bool {
        self.inner.options.shared_under_dispatch
    }

    /// Waits for one of `num_parts` equal parts of a time, where waits stand for computations.
    pub(crate) fn wait_as_for(&self, num_parts: usize, seconds: impl FnOnce(&Pace) -> f64) {
        if let Some(pace) = &self.inner.options.pace {
            let seconds = (seconds(pace) / num_parts.max(1) as f64).max(0.0);
            std::thread::sleep(Duration::try_from_secs_f64(seconds).unwrap_or_default());
        }
    }

    /// Waits as long as `num_rows` rows of experts take, where waits stand for computations.
    pub(crate) fn wait_as_for_rows(&self, num_rows: impl FnOnce() -> usize, seconds: impl FnOnce(&Pace) -> f64) {
        if self.inner.options.pace.is_some() {
            let num_rows = num_rows() as f64;
            self.wait_as_for(1, |pace| seconds(pace) * num_rows);
        }
    }

    /// Returns the communicator of all ranks that have tokens.
    #[must_use]
    pub fn world(&self) -> &dyn Communicator {
        &*self.inner.world
    }

    /// Returns the communicator of the ranks that hold the experts between them.
    #[must_use]
    pub fn group(&self) -> &dyn Communicator {
        self.inner.hierarchy.comm()
    }

    /// Returns the nodes of the group's ranks.
    #[must_use]
    pub fn nodes(&self) -> &Nodes {
        self.hierarchy().nodes()
    }

    /// Returns the algorithm, wire format and chunks of the exchange of tokens.
    #[must_use]
    pub fn exchange(&self) -> &Exchange {
        &self.inner.options.exchange
    }

    /// Returns the wire format of gradients.
    pub(crate) fn backward_wire(&self) -> Wire {
        self.inner.options.backward_wire.unwrap_or(self.exchange().wire).of_sums()
    }

    pub(crate) fn hierarchy(&self) -> &Hierarchy {
        &self.inner.hierarchy
    }

    /// Returns the first communication error, if any.
    #[must_use]
    pub fn failure(&self) -> Option<CommError> {
        locked(&self.inner.failure).clone()
    }

    /// Merges the statistics of all ranks' tokens into `layers`, with the same bits on all ranks.
    pub fn merge_stats(&self, layers: &mut [LayerStats]) {
        self.attempt((), || stats::merge(self.world(), layers));
        self.tune(layers);
    }

    /// Sums `values` over all ranks.
    pub fn sum(&self, values: &mut [f64]) {
        self.attempt((), || self.world().all_reduce(values, Reduce::Sum));
    }

    pub(crate) fn start_dispatch(&self, plan: &RowPlan, rows: &Tensor, wire: Wire) -> Option<PendingDispatch> {
        // Rows in bf16 are not widened for the wire.
        let wire = if rows.dtype() == moeworks_tensor::DType::BF16 && wire == Wire::F32 { Wire::Bf16 } else { wire };
        self.time("dispatch", || self.attempt(None, || plan.start_dispatch(self.hierarchy(), rows, wire).map(Some)))
    }

    pub(crate) fn finish_dispatch(
        &self,
        ctx: &Context,
        plan: &RowPlan,
        started: Option<PendingDispatch>,
    ) -> Option<Tensor> {
        let started = started?;
        let finish = || plan.finish_dispatch(self.hierarchy(), started, ctx.pool()).map(Some);
        self.time("dispatch", || self.attempt(None, finish))
    }

    pub(crate) fn start_combine(&self, plan: &RowPlan, rows: &Tensor, wire: Wire) -> Option<PendingCombine> {
        self.time("combine", || self.attempt(None, || plan.start_combine(self.hierarchy(), rows, wire).map(Some)))
    }

    pub(crate) fn finish_combine(
        &self,
        ctx: &Context,
        plan: &RowPlan,
        started: Option<PendingCombine>,
    ) -> Option<Tensor> {
        let started = started?;
        let finish = || plan.finish_combine(self.hierarchy(), started, ctx.pool()).map(Some);
        self.time("combine", || self.attempt(None, finish))
    }

    /// Runs two passes that take turns: each gives its turn away where it would wait for an exchange of tokens, which
    /// then travels while the other computes. `first` begins. Results are those of the passes one after the other,
    /// to the bit. All ranks of the group call this with the same passes.
    pub fn take_turns<A, B: Send>(&self, first: impl FnOnce() -> A, second: impl FnOnce() -> B + Send) -> (A, B) {
        let turns = Arc::new(Turns::new());
        *locked(&self.inner.turns) = Some(Arc::clone(&turns));
        let results = turns.run(first, second);
        *locked(&self.inner.turns) = None;
        results
    }

    /// Gives the turn to the other of two passes, if there are two.
    fn yield_turn(&self) {
        let turns = locked(&self.inner.turns).clone();
        if let Some(turns) = turns {
            turns.yield_turn();
        }
    }

    /// Returns the times of exchanges since the last call.
    #[must_use]
    pub fn take_exchange_times(&self) -> ExchangeTimes {
        std::mem::take(&mut *locked(&self.inner.exchange_times))
    }

    /// Finishes an exchange of `bytes` that started at `start` by `finish`, after the turn of another pass, and
    /// counts its time.
    fn finish_exchange<R>(&self, start: Instant, bytes: Bytes, finish: impl FnOnce() -> R) -> R {
        self.yield_turn();
        let waiting = Instant::now();
        let result = finish();
        self.inner.traffic.note(bytes, start.elapsed());
        let mut times = locked(&self.inner.exchange_times);
        times.waited_s += waiting.elapsed().as_secs_f64();
        times.under_way_s += start.elapsed().as_secs_f64();
        result
    }

    /// Runs `call`. Returns `otherwise` if it fails or if a communication failed before.
    pub fn attempt<R>(&self, otherwise: R, call: impl FnOnce() -> Result<R, CommError>) -> R {
        if self.failure().is_some() {
            return otherwise;
        }
        call().unwrap_or_else(|error| {
            *locked(&self.inner.failure) = Some(error);
            otherwise
        })
    }
}

/// Locks a mutex, also after a panic: the guarded values are valid between any two statements.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for ExpertRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.group().rank(), self.group().size())
    }
}

impl LayerRanks {
    /// Returns the layer's placement: the ranks of the group that hold each expert.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placed.placement
    }

    /// Returns the layer's experts that this rank holds, ascending.
    #[must_use]
    pub fn held(&self) -> &[usize] {
        &self.placed.held
    }

    /// Returns the handle to this layer by the placement that is in force now.
    #[must_use]
    pub fn in_force(&self) -> Self {
        self.ranks.layer(self.layer)
    }
}

impl Deref for LayerRanks {
    type Target = ExpertRanks;

    fn deref(&self) -> &ExpertRanks {
        &self.ranks
    }
}

impl fmt::Debug for LayerRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, experts {:?}", self.ranks, self.held())
    }
}

impl PartialEq for LayerRanks {
    /// Returns whether both are handles to the same layer of the same ranks.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.ranks.inner, &other.ranks.inner) && self.placed.placement == other.placed.placement
    }
}
