//! An MoE layer whose experts live on several ranks.
//!
//! Each rank has tokens of its own and decides for them alone. They are then sent to the ranks that hold their experts
//! ([`EpDispatch`]), are computed there together with those of other ranks, weighed and summed, and the sums come back to where the
//! tokens started, to be summed over ranks. Backward takes the same ways: gradients of outputs go there, those of inputs and of
//! the weights of choices come back. By which hops, in which form and in how many chunks is an [`Exchange`]. The hops change no
//! bit of the result, the number of chunks its rounding (products of few rows and of many sum in different orders).
//!
//! The routing is that of one rank with all tokens: what looks at many tokens at once is decided over those of all ranks
//! ([`CrossRank`]), and so is what losses say ([`ExpertRanks::merge_stats`]).

mod cross_rank;
mod ep_dispatch;
mod experts;
mod merge_chunks;
mod shadow;
mod stats;
mod tuning;

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use moeworks_comm::{Combining, CommError, Communicator, Dispatching, Hierarchy, Meter, Reduce, RowPlan};
use moeworks_ops::Context;
use moeworks_plan::{Exchange, Moving, Placement, Wire};
use moeworks_tensor::Tensor;

use crate::LayerStats;
pub(crate) use cross_rank::CrossRank;
pub use cross_rank::SharedRoom;
use ep_dispatch::EpDispatch;
pub(crate) use experts::{RanksSaved, RanksTask};
pub(crate) use merge_chunks::MergedChunks;
use tuning::Tuning;

/// One rank's part in layers whose experts live on several ranks. Cloning shares it.
///
/// A communication that fails does not end a pass: its rows are zeros, the rest of the pass communicates no more, and
/// [`failure`](Self::failure) says what happened. The caller looks there after each pass.
#[derive(Clone)]
pub struct ExpertRanks {
    inner: Arc<Inner>,
}

struct Inner {
    world: Box<dyn Communicator>,
    /// Of the ranks that hold the experts between them.
    hierarchy: Hierarchy,
    placement: Placement,
    held: Vec<usize>,
    exchange: Exchange,
    moving: OnceLock<Moving>,
    tuning: Mutex<Tuning>,
    meter: OnceLock<Arc<Meter>>,
    failure: Mutex<Option<CommError>>,
}

impl ExpertRanks {
    /// `world` are all ranks that have tokens, `group` those that hold the experts between them, as `placement` says; tokens go
    /// as `exchange` says. A call that all ranks of the group make. Panics if the placement is of another number of ranks.
    ///
    /// # Errors
    /// [`CommError`]: a rank died, hangs, or called something else.
    pub fn new(
        world: Box<dyn Communicator>,
        group: Box<dyn Communicator>,
        placement: Placement,
        exchange: Exchange,
    ) -> Result<Self, CommError> {
        assert_eq!(placement.num_ranks(), group.size(), "ranks of a placement");
        let held = placement.experts_of(group.rank());
        let (hierarchy, tuning, failure) = (Hierarchy::of(group)?, Mutex::default(), Mutex::default());
        let (meter, moving) = (OnceLock::new(), OnceLock::new());
        let inner = Inner { world, hierarchy, placement, held, exchange, moving, tuning, meter, failure };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Lets experts move to their tokens as `moving` says, the same on all ranks of the group; without this call tokens move. Only
    /// the first call counts.
    pub fn let_move(&self, moving: Moving) {
        let _ = self.inner.moving.set(moving);
    }

    pub(crate) fn moving(&self) -> Moving {
        self.inner.moving.get().copied().unwrap_or_default()
    }

    /// Lets `meter` know of the work of layers with experts from now on. Only the first call counts.
    pub fn measure_with(&self, meter: &Arc<Meter>) {
        let _ = self.inner.meter.set(Arc::clone(meter));
    }

    /// Does `work`, which a meter that listens calls `name`.
    pub fn time<R>(&self, name: &'static str, work: impl FnOnce() -> R) -> R {
        match self.inner.meter.get() {
            Some(meter) => meter.time(name, work),
            None => work(),
        }
    }

    /// Which ranks of the group hold which expert.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.inner.placement
    }

    /// The experts that this rank holds, ascending.
    #[must_use]
    pub fn held(&self) -> &[usize] {
        &self.inner.held
    }

    /// All ranks that have tokens.
    #[must_use]
    pub fn world(&self) -> &dyn Communicator {
        &*self.inner.world
    }

    /// The ranks that hold the experts between them.
    #[must_use]
    pub fn group(&self) -> &dyn Communicator {
        self.inner.hierarchy.comm()
    }

    /// How tokens go.
    #[must_use]
    pub fn exchange(&self) -> &Exchange {
        &self.inner.exchange
    }

    pub(crate) fn hierarchy(&self) -> &Hierarchy {
        &self.inner.hierarchy
    }

    /// The first communication that failed.
    #[must_use]
    pub fn failure(&self) -> Option<CommError> {
        self.inner.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes of the statistics of this rank's tokens those of all ranks' tokens, the same bits on all ranks.
    pub fn merge_stats(&self, layers: &mut [LayerStats]) {
        self.attempt((), || stats::merge(self.world(), layers));
        self.tune(layers);
    }

    /// Sums `values` over all ranks.
    pub fn sum(&self, values: &mut [f64]) {
        self.attempt((), || self.world().all_reduce(values, Reduce::Sum));
    }

    pub(crate) fn start_dispatch(&self, plan: &RowPlan, rows: &Tensor, wire: Wire) -> Option<Dispatching> {
        // What is of two bytes a number already is not made longer.
        let wire = if rows.dtype() == moeworks_tensor::DType::BF16 && wire == Wire::F32 { Wire::Bf16 } else { wire };
        self.time("dispatch", || self.attempt(None, || plan.start_dispatch(self.hierarchy(), rows, wire).map(Some)))
    }

    pub(crate) fn finish_dispatch(
        &self,
        ctx: &Context,
        plan: &RowPlan,
        started: Option<Dispatching>,
    ) -> Option<Tensor> {
        let started = started?;
        let finish = || plan.finish_dispatch(self.hierarchy(), started, ctx.pool()).map(Some);
        self.time("dispatch", || self.attempt(None, finish))
    }

    pub(crate) fn start_combine(&self, plan: &RowPlan, rows: &Tensor, wire: Wire) -> Option<Combining> {
        self.time("combine", || self.attempt(None, || plan.start_combine(self.hierarchy(), rows, wire).map(Some)))
    }

    pub(crate) fn finish_combine(&self, ctx: &Context, plan: &RowPlan, started: Option<Combining>) -> Option<Tensor> {
        let started = started?;
        let finish = || plan.finish_combine(self.hierarchy(), started, ctx.pool()).map(Some);
        self.time("combine", || self.attempt(None, finish))
    }

    /// What `call` gives; `otherwise` if it fails, or anything failed before.
    pub fn attempt<R>(&self, otherwise: R, call: impl FnOnce() -> Result<R, CommError>) -> R {
        if self.failure().is_some() {
            return otherwise;
        }
        call().unwrap_or_else(|error| {
            *self.inner.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            otherwise
        })
    }
}

impl fmt::Debug for ExpertRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}, experts {:?}", self.group().rank(), self.group().size(), self.held())
    }
}

impl PartialEq for ExpertRanks {
    /// Whether both are the same part.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}
