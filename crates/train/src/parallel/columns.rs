//! The columns of a pipeline: which of them hold a tensor, and the groups of ranks that hold one in several columns.
//!
//! A tensor is in several columns where schedules keep two copies of the weights (DualPipe), and where the output
//! projection is the embedding, which both ends then hold. Its gradient is summed over all of them, so that the
//! copies stay equal.

use std::collections::BTreeSet;

use moeworks_comm::{CommError, Communicator};
use moeworks_model::{WeightSpec, WeightTable};

use super::tensor::Holding;
use super::{Ranks, part};
use crate::pipeline::PipelinePlan;

/// The columns that hold each tensor, and this rank's groups over several of them.
pub(super) struct Columns {
    /// By the numbers of tensors.
    of_tensors: Vec<Vec<usize>>,
    /// This rank's groups, one for each set of several columns that its column is in.
    shared: Vec<SharedHolders>,
}

/// The groups of this rank among the ranks of several columns.
pub(super) struct SharedHolders {
    /// The columns.
    columns: Vec<usize>,
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

/// The way of a tensor that the root's column does not hold to the root.
pub(super) enum WayToRoot<'a> {
    /// This rank is of the root's column: the root receives it from the rank of another column.
    Receive {
        /// The ranks at this rank's place in each column.
        line: &'a dyn Communicator,
        /// The column that has it.
        column: usize,
    },
    /// This rank's column puts it together, and its first rank sends it.
    Send {
        /// The ranks at this rank's place in each column.
        line: &'a dyn Communicator,
    },
    /// It goes between other columns.
    Elsewhere,
}

impl Ranks {
    /// The ranks at this rank's place in each column of a pipeline, if there is one.
    pub(crate) fn line(&self) -> Option<&dyn Communicator> {
        self.line.as_deref()
    }

    /// The ranks of this rank's column.
    pub(crate) fn column(&self) -> &dyn Communicator {
        &*self.column
    }

    /// The number of this rank's column.
    pub(crate) fn column_number(&self) -> usize {
        self.layout.column(self.world.rank())
    }

    /// Lets the columns hold the stages that `plan` gives them of the weights of `table`. All ranks call this,
    /// after tensors are [cut](Self::cut_tensors) and before they [hold](Self::hold) their parts.
    pub(crate) fn share_out_stages(&self, plan: &PipelinePlan, table: &WeightTable) -> Result<(), CommError> {
        let of_tensors: Vec<Vec<usize>> =
            table.specs().iter().map(|spec| plan.columns(spec, table.is_tied())).collect();
        let sets: BTreeSet<&Vec<usize>> = of_tensors.iter().filter(|columns| columns.len() > 1).collect();
        let mut shared = Vec::new();
        for columns in sets {
            let is_in = columns.contains(&self.column_number());
            if let Some(all) = self.world.split(is_in.then_some(0), self.rank())? {
                shared.push(self.shared_groups(columns.clone(), all)?);
            }
        }
        // A second model of the same shape shares the groups of the first.
        self.columns.get_or_init(|| Columns { of_tensors, shared });
        Ok(())
    }

    /// This rank's groups among `all` ranks of some columns, which all call this.
    fn shared_groups(&self, columns: Vec<usize>, all: Box<dyn Communicator>) -> Result<SharedHolders, CommError> {
        let rank = self.rank();
        let (_, ep, tp) = self.layout.place(rank);
        let keys = self.tensor_ranks().map_or(0, |ranks| ranks.split().kv_ranks().start);
        let experts = part(&*all, ep * self.layout.tp + tp, rank)?;
        let (same_place, same_keys) = (part(&*all, tp, rank)?, part(&*all, keys, rank)?);
        Ok(SharedHolders { columns, all, experts, same_place, same_keys })
    }

    /// The columns that hold the tensor of `spec`; none without a pipeline, whose ranks are one column.
    fn columns_of(&self, spec: &WeightSpec) -> Option<&[usize]> {
        self.columns.get().map(|columns| &*columns.of_tensors[spec.index])
    }

    /// Returns whether this rank's column holds the tensor of `spec`.
    pub(crate) fn holds(&self, spec: &WeightSpec) -> bool {
        self.columns_of(spec).is_none_or(|columns| columns.contains(&self.column_number()))
    }

    /// Returns whether this rank's column is the first that holds the tensor of `spec`.
    pub(super) fn is_first_column(&self, spec: &WeightSpec) -> bool {
        self.columns_of(spec).is_none_or(|columns| columns.first() == Some(&self.column_number()))
    }

    /// The groups that hold the tensor of `spec`, if ranks of several columns do.
    pub(super) fn shared_holders(&self, spec: &WeightSpec) -> Option<&SharedHolders> {
        let columns = self.columns_of(spec).filter(|columns| columns.len() > 1)?;
        self.columns.get()?.shared.iter().find(|shared| shared.columns == columns)
    }

    /// The way of the tensor of `spec` to the root; none where the root's column holds it, or all ranks are one.
    pub(super) fn way_to_root(&self, spec: &WeightSpec) -> Option<WayToRoot<'_>> {
        let first = *self.columns_of(spec)?.first()?;
        let (own, line) = (self.column_number(), self.line()?);
        match (own, first) {
            (0, 0) => None,
            (0, _) => Some(WayToRoot::Receive { line, column: first }),
            _ if own == first => Some(WayToRoot::Send { line }),
            _ => Some(WayToRoot::Elsewhere),
        }
    }
}
