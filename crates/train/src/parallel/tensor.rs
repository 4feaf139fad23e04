//! Tensor parallelism: the groups of a rank, its shards, and the ranks that hold the same shards.

use std::sync::Arc;

use moeworks_comm::{CommError, Communicator, Meter, Metered, Totals};
use moeworks_model::{ModelConfig, ParamSet, TensorRanks, TensorSplit, WeightSpec, WeightTable};

use super::{Ranks, fingerprint};
use crate::config::ConfigError;
use crate::error::TrainError;

/// The tensor-parallel groups of a rank.
pub(super) struct TensorGroups {
    /// The ranks that pass the same sequences and hold different shards.
    group: Arc<dyn Communicator>,
    /// The ranks with the same index in such groups.
    peers: Box<dyn Communicator>,
    /// The meter of communication in the group.
    meter: Arc<Meter>,
}

/// The ranks of a stage group that hold a tensor alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holding {
    /// All of them.
    All,
    /// The ranks with the same experts.
    Experts,
    /// The ranks at the same place of tensor-parallel groups.
    SamePlace,
    /// The ranks with the same heads of keys and values.
    SameKeys,
}

/// The tensor-parallel shards of a model.
pub(super) struct TensorPart {
    ranks: TensorRanks,
    /// The split of each rank of the group.
    splits: Vec<TensorSplit>,
    /// The ranks of the stage group that hold the same heads of keys and values.
    kv_holders: Box<dyn Communicator>,
}

impl TensorGroups {
    /// Creates the groups of the rank with index `at` in group `number`. All ranks call this.
    pub(super) fn new(comm: &dyn Communicator, number: usize, at: usize) -> Result<Self, CommError> {
        let (group, peers) = (super::part(comm, number, at)?, super::part(comm, at, number)?);
        let meter = Arc::new(Meter::new(false));
        Ok(Self { group: Arc::new(Metered::new(group, Arc::clone(&meter))), peers, meter })
    }
}

impl Ranks {
    /// Splits the tensors of `table`, of a model of `config`, over the tensor-parallel ranks, if there are several.
    /// All ranks call this before they [hold](Self::hold) their parts; a second model of the same shape shares the
    /// groups of the first.
    pub(crate) fn cut_tensors(
        &self,
        config: &ModelConfig,
        table: &WeightTable,
    ) -> Result<Option<&TensorRanks>, TrainError> {
        let Some(TensorGroups { group, .. }) = &self.tensor else { return Ok(None) };
        let experts = self.experts.clone();
        let ranks = TensorRanks::new(config, table, Arc::clone(group), experts).map_err(ConfigError::from)?;
        let size = ranks.split().size();
        let splits = (0..size).map(|rank| TensorSplit::new(config, table, rank, size));
        let splits = splits.collect::<Result<_, _>>().map_err(ConfigError::from)?;
        let of_keys = ranks.split().kv_ranks().start;
        let kv_holders = super::part(&*self.stage_group, of_keys, self.stage_group.rank())?;
        let part = self.tensor_part.get_or_init(|| TensorPart { ranks, splits, kv_holders });
        Ok(Some(&part.ranks))
    }

    /// Returns this rank's tensor-parallel handle, if it has one.
    pub(super) fn tensor_ranks(&self) -> Option<&TensorRanks> {
        self.tensor_part.get().map(|part| &part.ranks)
    }

    /// Returns the split of each rank of the group.
    pub(super) fn tensor_splits(&self) -> &[TensorSplit] {
        self.tensor_part.get().map_or(&[], |part| &part.splits)
    }

    /// Returns the communication totals of the tensor-parallel group since the last call.
    pub(crate) fn take_tensor_totals(&self) -> Totals {
        self.tensor.as_ref().map_or_else(Totals::default, |groups| groups.meter.take_totals())
    }

    /// Returns the ranks that hold the same part of `spec`, over which its gradient is summed.
    pub(super) fn holders(&self, spec: &WeightSpec) -> &dyn Communicator {
        let kind = self.holding(spec);
        if let Some(shared) = self.shared_holders(spec) {
            return shared.holders(kind);
        }
        match (kind, &self.tensor, self.tensor_part.get()) {
            (Holding::Experts, ..) => &*self.copies,
            (Holding::SamePlace, Some(groups), _) => &*groups.peers,
            (Holding::SameKeys, _, Some(part)) => &*part.kv_holders,
            _ => &*self.stage_group,
        }
    }

    /// Returns which ranks of a stage group hold the tensor of `spec` as this one does.
    fn holding(&self, spec: &WeightSpec) -> Holding {
        if spec.role.is_of_experts() {
            return Holding::Experts;
        }
        let Some(part) = self.tensor_part.get() else { return Holding::All };
        let share = part.ranks.split().share(spec);
        match (share.is_summed, share.cut) {
            (false, _) => Holding::SamePlace,
            (true, None) => Holding::All,
            (true, Some(_)) => Holding::SameKeys,
        }
    }

    /// Returns the places of the tensors that every rank of a tensor-parallel group holds and computes whole, and
    /// whose bits on this rank are not those of the group's first rank. All ranks call this.
    pub(crate) fn places_unlike_first(&self, tensors: &dyn ParamSet) -> Result<Vec<usize>, TrainError> {
        let Some(ranks) = self.tensor_ranks() else { return Ok(Vec::new()) };
        let mut places = Vec::new();
        for (spec, tensor) in self.table().specs().iter().zip(tensors.params()) {
            let share = ranks.split().share(spec);
            if !self.holds(spec) || spec.role.is_of_experts() || share.cut.is_some() || share.is_summed {
                continue;
            }
            let own = fingerprint(tensor.bytes());
            let mut first = own;
            ranks.group().broadcast(&mut first, 0)?;
            if first != own {
                places.push(spec.index);
            }
        }
        Ok(places)
    }

    /// Returns whether this is the first rank of its tensor-parallel group that holds this part of `spec`, a
    /// non-expert tensor.
    pub(super) fn is_first_holder(&self, spec: &WeightSpec) -> bool {
        self.tensor_ranks().is_none_or(|ranks| ranks.split().share(spec).ranks.start == ranks.split().rank())
    }

    /// Returns whether no other rank holds this rank's slice of `spec`.
    pub(super) fn is_only_slice(&self, spec: &WeightSpec) -> bool {
        let is_summed = || self.tensor_ranks().is_some_and(|ranks| ranks.split().share(spec).is_summed);
        spec.role.is_of_experts() || self.is_first_holder(spec) || is_summed()
    }
}
