//! The stage groups of a pipeline, the ranks with one pp index: which of them hold a tensor, and the communicators of
//! the ranks that hold one in several stage groups.
//!
//! A tensor is in several stage groups where schedules keep two copies of the weights (DualPipe), and where the
//! output projection is the embedding, which both ends then hold. Its gradient is summed over all of them, so that
//! the copies stay equal.

use std::collections::BTreeSet;

use moeworks_comm::{CommError, Communicator};
use moeworks_model::{WeightSpec, WeightTable};

use super::tensor::Holding;
use super::{Ranks, part};
use crate::pipeline::PipelinePlan;

/// The stage groups that hold each tensor, and this rank's groups over several of them.
pub(super) struct StageGroups {
    /// By the numbers of tensors.
    of_tensors: Vec<Vec<usize>>,
    /// This rank's groups, one for each set of several stage groups that its stage group is in.
    shared: Vec<SharedHolders>,
}

/// The groups of this rank among the ranks of several stage groups.
pub(super) struct SharedHolders {
    /// The pp indices of the stage groups.
    pp_ranks: Vec<usize>,
    /// All their ranks.
    all: Box<dyn Communicator>,
    /// The ranks with the same experts.
    experts: Box<dyn Communicator>,
    /// The ranks at the same place of tensor-parallel groups.
    same_place: Box<dyn Communicator>,
    /// The ranks with the same heads of keys and values.
    same_keys: Box<dyn Communicator>,
}

impl SharedHolders {
    /// The ranks that hold a tensor alike.
    pub(super) fn holders(&self, holding: Holding) -> &dyn Communicator {
        match holding {
            Holding::All => &*self.all,
            Holding::Experts => &*self.experts,
            Holding::SamePlace => &*self.same_place,
            Holding::SameKeys => &*self.same_keys,
        }
    }
}

/// The way of a tensor that the root's stage group does not hold to the root.
pub(super) enum WayToRoot<'a> {
    /// This rank is of the root's stage group: the root receives it from the rank of another stage group.
    Receive {
        /// The ranks at this rank's place in each stage group.
        pipeline_group: &'a dyn Communicator,
        /// The pp index of the stage group that has it.
        from: usize,
    },
    /// This rank's stage group puts it together, and its first rank sends it.
    Send {
        /// The ranks at this rank's place in each stage group.
        pipeline_group: &'a dyn Communicator,
    },
    /// It goes between other stage groups.
    Elsewhere,
}

impl Ranks {
    /// The ranks at this rank's place in each stage group of a pipeline, if there is one.
    pub(crate) fn pipeline_group(&self) -> Option<&dyn Communicator> {
        self.pipeline_group.as_deref()
    }

    /// The ranks of this rank's stage group.
    pub(crate) fn stage_group(&self) -> &dyn Communicator {
        &*self.stage_group
    }

    /// Returns this rank's pp index, which is that of its stage group.
    pub(crate) fn pp_rank(&self) -> usize {
        self.layout.stage_group(self.world.rank())
    }

    /// Lets the stage groups hold the stages that `plan` gives them of the weights of `table`. All ranks call this,
    /// after tensors are [cut](Self::cut_tensors) and before they [hold](Self::hold) their parts.
    pub(crate) fn share_out_stages(&self, plan: &PipelinePlan, table: &WeightTable) -> Result<(), CommError> {
        let of_tensors: Vec<Vec<usize>> =
            table.specs().iter().map(|spec| plan.pp_ranks(spec, table.is_tied())).collect();
        let sets: BTreeSet<&Vec<usize>> = of_tensors.iter().filter(|pp_ranks| pp_ranks.len() > 1).collect();
        let mut shared = Vec::new();
        for pp_ranks in sets {
            let is_in = pp_ranks.contains(&self.pp_rank());
            if let Some(all) = self.world.split(is_in.then_some(0), self.rank())? {
                shared.push(self.shared_groups(pp_ranks.clone(), all)?);
            }
        }
        // A second model of the same shape shares the groups of the first.
        self.stage_groups.get_or_init(|| StageGroups { of_tensors, shared });
        Ok(())
    }

    /// This rank's groups among `all` ranks of some stage groups, which all call this.
    fn shared_groups(&self, pp_ranks: Vec<usize>, all: Box<dyn Communicator>) -> Result<SharedHolders, CommError> {
        let rank = self.rank();
        let (_, ep, tp) = self.layout.place(rank);
        let keys = self.tensor_ranks().map_or(0, |ranks| ranks.split().kv_ranks().start);
        let experts = part(&*all, ep * self.layout.tp + tp, rank)?;
        let (same_place, same_keys) = (part(&*all, tp, rank)?, part(&*all, keys, rank)?);
        Ok(SharedHolders { pp_ranks, all, experts, same_place, same_keys })
    }

    /// The stage groups that hold the tensor of `spec`; none without a pipeline, whose ranks are one stage group.
    fn pp_ranks_of(&self, spec: &WeightSpec) -> Option<&[usize]> {
        self.stage_groups.get().map(|pp_ranks| &*pp_ranks.of_tensors[spec.index])
    }

    /// Returns whether this rank's stage group holds the tensor of `spec`.
    pub(crate) fn holds(&self, spec: &WeightSpec) -> bool {
        self.pp_ranks_of(spec).is_none_or(|pp_ranks| pp_ranks.contains(&self.pp_rank()))
    }

    /// Returns whether this rank's stage group is the first that holds the tensor of `spec`.
    pub(super) fn is_first_pp_rank(&self, spec: &WeightSpec) -> bool {
        self.pp_ranks_of(spec).is_none_or(|pp_ranks| pp_ranks.first() == Some(&self.pp_rank()))
    }

    /// The groups that hold the tensor of `spec`, if ranks of several stage groups do.
    pub(super) fn shared_holders(&self, spec: &WeightSpec) -> Option<&SharedHolders> {
        let pp_ranks = self.pp_ranks_of(spec).filter(|pp_ranks| pp_ranks.len() > 1)?;
        self.stage_groups.get()?.shared.iter().find(|shared| shared.pp_ranks == pp_ranks)
    }

    /// All ranks of the stage groups that hold the tensor of `spec`, of which this rank's is one.
    pub(super) fn all_with(&self, spec: &WeightSpec) -> &dyn Communicator {
        self.shared_holders(spec).map_or(&*self.stage_group, |shared| &*shared.all)
    }

    /// The way of the tensor of `spec` to the root; none where the root's stage group holds it, or all ranks are one.
    pub(super) fn way_to_root(&self, spec: &WeightSpec) -> Option<WayToRoot<'_>> {
        let first = *self.pp_ranks_of(spec)?.first()?;
        let (own, pipeline_group) = (self.pp_rank(), self.pipeline_group()?);
        match (own, first) {
            (0, 0) => None,
            (0, _) => Some(WayToRoot::Receive { pipeline_group, from: first }),
            _ if own == first => Some(WayToRoot::Send { pipeline_group }),
            _ => Some(WayToRoot::Elsewhere),
        }
    }
}
