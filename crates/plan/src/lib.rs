//! How a Mixture-of-Experts model is laid out on ranks, as plain values, and what a layout costs.
//!
//! Nothing here runs anything or knows a device. [`Topology`] says what there is: ranks, nodes and the links between
//! them. [`Layout`] cuts the ranks into groups, [`Placement`] says which ranks hold which expert of a layer,
//! [`Exchange`] what moves between them and by which hops. [`cost`] gives the bytes and the seconds of each,
//! [`propose`](fn@propose) compares layouts, and [`weak_scaling`] draws the table of a cluster that grows.
//!
//! ```
//! use moeworks_plan::{ModelShape, Precision, Tokens, Topology, Workload, propose};
//!
//! let topology = Topology::example_cluster(4); // four nodes of eight ranks
//! let shape = ModelShape::example();
//! let workload = Workload { tokens: Tokens::OfEachRank(8192), precision: Precision::Bf16, zero: 0, expert_gradient_bytes: 4 };
//! let proposals = propose(&shape, &workload, &topology);
//! assert!(proposals.iter().any(|estimate| estimate.fits));
//! ```
//!
//! Letters: T tokens of a rank, D width, E experts, K experts a token, n ranks of a group, m of them in a node.

pub mod cost;
mod exchange;
mod expert_fetch;
mod hybrid_ep;
mod layout;
mod nodes;
mod placement;
mod placements;
mod propose;
pub mod schedule;
mod shape;
mod simulate;
mod topology;
mod tune;

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
