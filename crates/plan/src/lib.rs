//! The plan of a distributed Mixture-of-Experts model as plain values: the layout on ranks, and its costs.
//!
//! Nothing here runs anything or knows a device. [`Topology`] describes ranks, nodes and the links between them.
//! [`Layout`] divides the ranks into groups, [`Placement`] gives the ranks that hold each expert of a layer, and
//! [`Exchange`] the path of tokens between them. [`cost`] computes the bytes and the seconds of each,
//! [`propose`](fn@propose) compares layouts, and [`weak_scaling`] makes the table of a growing cluster.
//!
//! ```
//! use moeworks_plan::{ModelShape, Precision, Tokens, Topology, Workload, propose};
//!
//! let topology = Topology::example_cluster(4); // four nodes of eight ranks
//! let shape = ModelShape::example();
//! let tokens = Tokens::OfEachRank(8192);
//! let workload = Workload { tokens, precision: Precision::Bf16, zero: 0, expert_gradient_bytes: 4 };
//! let proposals = propose(&shape, &workload, &topology);
//! assert!(proposals.iter().any(|estimate| estimate.fits));
//! ```
//!
//! Letters: T tokens of a rank, D width, E experts, K experts a token, n ranks of a group, m of them on a node.

mod balance;
pub mod cost;
mod exchange;
mod expert_fetch;
mod hybrid_ep;
mod layout;
pub mod machine;
mod nodes;
mod placement;
mod placements;
mod propose;
pub mod schedule;
mod shape;
mod simulate;
mod topology;
mod tune;

pub use balance::{BalanceError, EplbSizes, ExpertMove, RankLoads, eplb, eplb_slots, improve};
pub use cost::estimate::{Estimate, StepTime, Traffic};
pub use cost::memory::{RankMemory, rank_memory};
pub use exchange::{Algorithm, Exchange, Moving, Wire};
pub use expert_fetch::{LayerLoad, MoveCosts, experts_to_fetch, pass_seconds};
pub use hybrid_ep::{Migration, Peer, domain_transfers, peer, token_share};
pub use layout::{Group, Layout, LayoutError, RankOrder};
pub use nodes::Nodes;
pub use placement::{Placement, PlacementError};
pub use placements::Placements;
pub use propose::propose;
pub use schedule::{Schedule, ScheduleError, ScheduleKind, ScheduleRequest, StageTimes, Times};
pub use shape::{ModelShape, Precision, Tokens, Workload};
pub use simulate::{ScalingRow, weak_scaling};
pub use topology::{Link, LinkClass, Links, RankSpec, Topology, TopologyError};
pub use tune::ChunkTuner;
