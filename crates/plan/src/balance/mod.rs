//! Placements that balance the load of experts over ranks, as pure functions of recorded loads.
//!
//! [`eplb`](fn@eplb) makes a placement anew: it copies hot experts to spare slots and packs the copies on ranks
//! (DeepSeek's EPLB). [`improve`] goes on from a placement that is there, by few moves. [`RankLoads`] says what a
//! placement gives.

mod eplb;
mod improve;
mod loads;

pub use eplb::{EplbSizes, eplb, eplb_slots};
pub use improve::{ExpertMove, improve};
pub use loads::{BalanceError, RankLoads};

#[cfg(test)]
mod tests;
