//! The links of a cluster, what a transfer puts on each of them, and how transfers that pass at the same time share
//! them.
//!
//! A transfer is what all ranks of a stage group of the pipeline send at a time: an all-to-all, or the messages to
//! the next stage group. It proceeds on all its links in proportion and is done when the last byte has arrived, so
//! that the link with the most to do sets its speed. [`Loads`] collects the bytes of a transfer on each link,
//! [`Traffic`] joins links that are alike for all transfers, and the shares of those that pass at a time are max-min
//! fair (`shares`): no link carries more than its bandwidth, and none of a transfer's links has room left where it is
//! slowed.

mod loads;
mod places;
mod shares;
mod traffic;
mod transfers;

pub use loads::Loads;
pub use places::Places;
pub(crate) use shares::{LinkUse, Shares};
pub use traffic::{LevelBytes, Phase, Traffic, TransferId};
pub(crate) use transfers::distinct_groups;
pub use transfers::{ExpertShares, Rows};
