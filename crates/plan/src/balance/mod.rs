//! Placements that balance the load of experts over ranks, as pure functions of recorded loads.
//!
//! [`eplb`](fn@eplb) makes a placement anew: it copies hot experts to spare slots and packs the copies on ranks
//! (DeepSeek's EPLB). [`improve`](fn@improve) goes on from a placement that is there, by few moves, and
//! [`improve_by_beam`] searches more widely. [`place_by_coactivation`] keeps experts chosen together on a node.
//! [`replicate_by_importance`] gives slots of experts that matter least to copies of hot ones. [`split_rows`] shares
//! the rows of one step out. [`LoadForecast`] foretells the loads of the coming window. [`RankLoads`] says what a
//! placement gives.

mod beam;
mod coactivation;
mod eplb;
mod forecast;
mod importance;
mod improve;
mod loads;
mod split;

pub use beam::{BeamOptions, improve_by_beam};
pub use coactivation::{Coactivation, NodeSizes, place_by_coactivation};
pub use eplb::{EplbSizes, eplb, eplb_slots};
pub use forecast::{
    ForecastError, ForecastMethod, ForecastOptions, LoadForecast, sampling_error, share_error, windows_to_follow,
};
pub use importance::{Replication, ReplicationLimits, replicate_by_importance};
pub use improve::{ExpertMove, improve};
pub use loads::{BalanceError, RankLoads};
pub use split::{RowShare, RowSplit, SplitOptions, split_rows};

#[cfg(test)]
mod policy_tests;
#[cfg(test)]
mod tests;
