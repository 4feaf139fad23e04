//! The load that a placement gives each rank.

use crate::{Nodes, Placement};

/// Loads or sizes that no placement can be made for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BalanceError {
    /// The loads are of another number of experts.
    #[error("loads of {found} experts: must be {expected}")]
    Loads {
        /// Loads given.
        found: usize,
        /// Experts of the placement.
        expected: usize,
    },
    /// A load that is negative or not finite.
    #[error("the load of expert {expert} is {load}: must be a number of at least 0")]
    Load {
        /// The expert.
        expert: usize,
        /// Its load, as text.
        load: String,
    },
    /// Sizes that do not go together.
    #[error("{what} = {value}: {expected}")]
    Size {
        /// The name of the size.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The values that would be right.
        expected: String,
    },
}

/// The load of each rank: the sum over its experts of the expert's load, shared out evenly among the ranks that hold
/// the expert.
#[derive(Clone, Debug, PartialEq)]
pub struct RankLoads {
    loads: Vec<f64>,
}

impl RankLoads {
    /// The loads of the ranks of `placement` where expert e has `expert_loads[e]` (tokens, or any other measure).
    ///
    /// # Errors
    /// If there is not one load for each expert, or one is negative or not finite.
    pub fn new(placement: &Placement, expert_loads: &[f64]) -> Result<Self, BalanceError> {
        check_loads(expert_loads, placement.num_experts())?;
        let mut loads = vec![0.0; placement.num_ranks()];
        for (expert, load) in expert_loads.iter().enumerate() {
            let ranks = placement.ranks_of(expert);
            ranks.iter().for_each(|&rank| loads[rank] += load / ranks.len() as f64);
        }
        Ok(Self { loads })
    }

    /// Computes the loads of the ranks where each rank has as many tokens, and an expert on several ranks is computed
    /// by the one that [serves](Placement::serving_rank) a token's rank. Ranks that hold an expert have equal shares
    /// of it only if their number divides that of the ranks.
    ///
    /// # Errors
    /// See [`RankLoads::new`].
    pub fn by_source(placement: &Placement, expert_loads: &[f64], nodes: &Nodes) -> Result<Self, BalanceError> {
        check_loads(expert_loads, placement.num_experts())?;
        let num_ranks = placement.num_ranks();
        let mut loads = vec![0.0; num_ranks];
        for (expert, load) in expert_loads.iter().enumerate() {
            match placement.ranks_of(expert) {
                [only] => loads[*only] += load,
                _ => (0..num_ranks).for_each(|source| {
                    loads[placement.serving_rank(nodes, source, expert)] += load / num_ranks as f64;
                }),
            }
        }
        Ok(Self { loads })
    }

    /// `[ranks]`: the loads.
    #[must_use]
    pub fn loads(&self) -> &[f64] {
        &self.loads
    }

    /// The largest load.
    #[must_use]
    pub fn max(&self) -> f64 {
        self.loads.iter().copied().fold(0.0, f64::max)
    }

    /// The mean load.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.loads.iter().sum::<f64>() / self.loads.len() as f64
    }

    /// `(max - mean) / mean`: how much longer the hottest rank takes than all would if they had the same; 0 without
    /// any load.
    #[must_use]
    pub fn imbalance(&self) -> f64 {
        let mean = self.mean();
        if mean == 0.0 { 0.0 } else { self.max() / mean - 1.0 }
    }
}

/// Checks that there are `num_experts` loads, all numbers of at least 0.
pub(super) fn check_loads(loads: &[f64], num_experts: usize) -> Result<(), BalanceError> {
    if loads.len() != num_experts {
        return Err(BalanceError::Loads { found: loads.len(), expected: num_experts });
    }
    match loads.iter().position(|load| !(load.is_finite() && *load >= 0.0)) {
        Some(expert) => Err(BalanceError::Load { expert, load: loads[expert].to_string() }),
        None => Ok(()),
    }
}
