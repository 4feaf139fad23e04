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
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use moeworks_comm::{Combining, CommError, Communicator, Dispatching, Hierarchy, Meter, Reduce, RowPlan};
use moeworks_ops::Context;
use moeworks_plan::{Exchange, Moving, Placement, Placements, Wire};
use moeworks_tensor::Tensor;

use crate::LayerStats;
pub(crate) use cross_rank::{ChoiceIds, CrossRank};
use ep_dispatch::EpDispatch;
pub(crate) use experts::{ExpertsInput, RanksSaved, RanksTask};
pub(crate) use merge_chunks::MergedChunks;
use tuning::Tuning;

/// One rank's part in all layers whose experts live on several ranks. Cloning shares it.
///
/// A communication that fails does not end a pass: its rows are zeros, the rest of the pass communicates no more, and
/// [`failure`](Self::failure) says what happened. The caller looks there after each pass.
#[derive(Clone)]
pub struct ExpertRanks {
    inner: Arc<Inner>,
}

/// One rank's part in one layer: the ranks, and the layer's placement. Cloning shares it.
#[derive(Clone)]
pub struct LayerRanks {
    ranks: ExpertRanks,
    placement: Arc<Placement>,
    held: Arc<[usize]>,
}

/// The ways in which tokens and experts meet, and who listens.
#[derive(Clone)]
pub struct EpOptions {
    /// The way of tokens.
    pub exchange: Exchange,
    /// The choice of what moves, tokens or experts; the same on all ranks of the group.
    pub moving: Moving,
    /// A meter of the work of layers with experts.
    pub meter: Option<Arc<Meter>>,
}

impl From<Exchange> for EpOptions {
    /// Tokens move, by `exchange`, and nobody listens.
    fn from(exchange: Exchange) -> Self {
        Self { exchange, moving: Moving::Tokens, meter: None }
    }
}

struct Inner {
    world: Box<dyn Communicator>,
    /// Of the ranks that hold the experts between them.
    hierarchy: Hierarchy,
    placements: Placements,
    options: EpOptions,
    tuning: Mutex<Tuning>,
    failure: Mutex<Option<CommError>>,
}

impl ExpertRanks {
    /// `world` are all ranks that have tokens, `group` those that hold the experts between them, as `placements` says: one
    /// placement for all layers or one for each. A call that all ranks of the group make. Panics if the placements are of another
    /// number of ranks.
    ///
    /// # Errors
    /// [`CommError`]: a rank died, hangs, or called something else.
    pub fn new(
        world: Box<dyn Communicator>,
        group: Box<dyn Communicator>,
        placements: impl Into<Placements>,
        options: impl Into<EpOptions>,
    ) -> Result<Self, CommError> {
        let (placements, options) = (placements.into(), options.into());
        assert_eq!(placements.num_ranks(), group.size(), "ranks of a placement");
        let (hierarchy, tuning, failure) = (Hierarchy::of(group)?, Mutex::default(), Mutex::default());
        Ok(Self { inner: Arc::new(Inner { world, hierarchy, placements, options, tuning, failure }) })
    }

    /// The part in layer number `layer`. Panics if the layer has no placement.
    #[must_use]
    pub fn layer(&self, layer: usize) -> LayerRanks {
        let placement = self.placements().layer(layer);
        let placement = placement.unwrap_or_else(|| panic!("a placement of layer {layer}")).clone();
        let held = placement.experts_of(self.group().rank()).into();
        LayerRanks { ranks: self.clone(), placement: Arc::new(placement), held }
    }

    /// The placements of all layers.
    #[must_use]
    pub fn placements(&self) -> &Placements {
        &self.inner.placements
    }

    pub(crate) fn moving(&self) -> Moving {
        self.inner.options.moving
    }

    /// Does `work`, which a meter that listens calls `name`.
    pub fn time<R>(&self, name: &'static str, work: impl FnOnce() -> R) -> R {
        match &self.inner.options.meter {
            Some(meter) => meter.time(name, work),
            None => work(),
        }
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
        &self.inner.options.exchange
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
        write!(f, "rank {} of {}", self.group().rank(), self.group().size())
    }
}

impl LayerRanks {
    /// The ranks of the group that hold each expert of the layer.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The layer's experts that this rank holds, ascending.
    #[must_use]
    pub fn held(&self) -> &[usize] {
        &self.held
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
    /// Whether both are the same part.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.ranks.inner, &other.ranks.inner) && self.placement == other.placement
    }
}
