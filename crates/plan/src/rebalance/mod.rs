//! Rebalancing while a model runs: whether to change the placement of a layer, and by which steps.
//!
//! A decision is a pure function of the load of the last steps, the placement in force and measured rates
//! ([`rebalance_layer`]). A [`Bandit`] chooses among policies by the step times that they gave. A change is carried
//! out in steps of few copies each ([`placement_step`]), and [`expert_transfers`] lists what travels in a step.

mod bandit;
mod decide;
mod transition;

pub use bandit::Bandit;
pub use decide::{
    LayerChange, LayerLoads, RebalancePolicy, RebalanceRates, RebalanceRules, ReplicaSharing, rebalance_layer,
};
pub use transition::{ExpertTransfer, expert_transfers, most_copies, placement_step};

#[cfg(test)]
mod tests;
