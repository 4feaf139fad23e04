//! A rank's place where several hold what is no expert between them, and who holds the same as it.

use std::sync::Arc;

use moeworks_comm::{CommError, Communicator, Meter, Metered, Totals};
use moeworks_model::{ModelConfig, TensorRanks, TensorSplit, WeightSpec, WeightTable};

use super::Ranks;
use crate::config::ConfigError;
use crate::error::TrainError;

/// The groups of a rank that passes the same sequences as others.
pub(super) struct TensorGroups {
    /// The ranks that pass the same sequences.
    group: Arc<dyn Communicator>,
    /// The ranks at the same place of such groups.
    peers: Box<dyn Communicator>,
    /// The account of communication in the group.
    meter: Arc<Meter>,
}

/// The parts of a model that these ranks hold between them.
pub(super) struct TensorPart {
    ranks: TensorRanks,
    /// The part of each rank of the group.
    splits: Vec<TensorSplit>,
    /// The ranks of the whole run that have the same heads of keys and values.
    kv_holders: Box<dyn Communicator>,
}

impl TensorGroups {
    /// The groups of the rank at place `at` of group `number` among those of `comm`. All ranks call this.
    pub(super) fn new(comm: &dyn Communicator, number: usize, at: usize) -> Result<Self, CommError> {
        let (group, peers) = (super::part(comm, number, at)?, super::part(comm, at, number)?);
        let meter = Arc::new(Meter::new(false));
        Ok(Self { group: Arc::new(Metered::new(group, Arc::clone(&meter))), peers, meter })
    }
}

impl Ranks {
    /// Cuts the tensors of `table`, of a model of `config`, over the ranks with the same tokens, if there are several of these. All ranks
    /// call this before they [hold](Self::hold) their parts; a second model of the same shape shares the groups of the first.
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
        let kv_holders = super::part(&*self.world, of_keys, self.world.rank())?;
        let part = self.tensor_part.get_or_init(|| TensorPart { ranks, splits, kv_holders });
        Ok(Some(&part.ranks))
    }

    /// This rank's part in the group, if it has one.
    pub(super) fn tensor_ranks(&self) -> Option<&TensorRanks> {
        self.tensor_part.get().map(|part| &part.ranks)
    }

    /// The part of each rank of the group.
    pub(super) fn tensor_splits(&self) -> &[TensorSplit] {
        self.tensor_part.get().map_or(&[], |part| &part.splits)
    }

    /// Returns the account of the group of ranks with the same sequences since the last call.
    pub(crate) fn take_tensor_totals(&self) -> Totals {
        self.tensor.as_ref().map_or_else(Totals::default, |groups| groups.meter.take_totals())
    }

    /// The ranks that hold the tensor of `spec` as this one does, and over which its gradient is summed.
    pub(super) fn holders(&self, spec: &WeightSpec) -> &dyn Communicator {
        if spec.role.is_of_experts() {
            return &*self.copies;
        }
        let (Some(part), Some(groups)) = (self.tensor_part.get(), &self.tensor) else { return &*self.world };
        let share = part.ranks.split().share(spec);
        match (share.is_summed, share.cut) {
            (false, _) => &*groups.peers,
            (true, None) => &*self.world,
            (true, Some(_)) => &*part.kv_holders,
        }
    }

    /// Whether this is the first of the ranks with the same sequences that have the tensor of `spec`, which is of no expert, as it does.
    pub(super) fn is_first_holder(&self, spec: &WeightSpec) -> bool {
        self.tensor_ranks().is_none_or(|ranks| ranks.split().share(spec).ranks.start == ranks.split().rank())
    }

    /// Whether this rank's slice of the tensor of `spec` is on no other rank.
    pub(super) fn is_only_slice(&self, spec: &WeightSpec) -> bool {
        let is_summed = || self.tensor_ranks().is_some_and(|ranks| ranks.split().share(spec).is_summed);
        spec.role.is_of_experts() || self.is_first_holder(spec) || is_summed()
    }
}
