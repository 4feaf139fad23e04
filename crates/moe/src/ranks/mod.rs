//! An MoE layer whose experts live on several ranks.
//!
//! Each rank has tokens of its own and decides for them alone. The rows of its dispatch then travel to the ranks that hold
//! their experts ([`Travel`]), are computed there together with those of other ranks, and come back to be weighed and summed
//! where they started. Backward takes the same ways: gradients of outputs go there, those of inputs and of the weights of
//! choices come back.
//!
//! The routing is that of one rank with all tokens, up to two things that look at many tokens at once: a capacity, and
//! schemes in which experts choose, hold for the tokens of each rank by themselves (GShard's local groups). What losses say
//! looks at all tokens: [`ExpertRanks::merge_stats`].

mod experts;
mod stats;
mod travel;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use moeworks_comm::{CommError, Communicator, Reduce};
use moeworks_plan::Placement;

use crate::LayerStats;
pub(crate) use experts::{RanksSaved, RanksTask};
use travel::Travel;

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
    group: Box<dyn Communicator>,
    placement: Placement,
    held: Vec<usize>,
    failure: Mutex<Option<CommError>>,
}

impl ExpertRanks {
    /// `world` are all ranks that have tokens, `group` those that hold the experts between them, as `placement` says. Panics
    /// if the placement is of another number of ranks.
    #[must_use]
    pub fn new(world: Box<dyn Communicator>, group: Box<dyn Communicator>, placement: Placement) -> Self {
        assert_eq!(placement.num_ranks(), group.size(), "ranks of a placement");
        let held = placement.experts_of(group.rank());
        Self { inner: Arc::new(Inner { world, group, placement, held, failure: Mutex::default() }) }
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
        &*self.inner.group
    }

    /// The first communication that failed.
    #[must_use]
    pub fn failure(&self) -> Option<CommError> {
        self.inner.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes of the statistics of this rank's tokens those of all ranks' tokens, the same bits on all ranks.
    pub fn merge_stats(&self, layers: &mut [LayerStats]) {
        self.attempt((), || stats::merge(self.world(), layers));
    }

    /// Sums `values` over all ranks.
    pub fn sum(&self, values: &mut [f64]) {
        self.attempt((), || self.world().all_reduce(values, Reduce::Sum));
    }

    /// What `call` gives; `otherwise` if it fails, or anything failed before.
    pub(crate) fn attempt<R>(&self, otherwise: R, call: impl FnOnce() -> Result<R, CommError>) -> R {
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
