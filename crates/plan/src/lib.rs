//! The plan of a distributed Mixture-of-Experts model as plain values: the layout on ranks, and its costs.
//!
//! Nothing here runs anything or knows a device. [`Cluster`] describes devices and the links between them at any
//! number of levels, [`Topology`] those of ranks and nodes, and [`Model`] a model on paper. [`Layout`] divides the
//! ranks into groups, [`Placement`] gives the ranks that hold each expert of a layer, and [`Exchange`] the path of
//! tokens between them. [`cost`] computes the bytes and the seconds of each, [`propose`](fn@propose) compares
//! layouts, and [`weak_scaling`] makes the table of a growing cluster. [`StepRequest`] simulates a step of a model on
//! a cluster event by event.
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
mod bill;
pub mod cluster;
pub mod cost;
mod domain_tuner;
mod exchange;
mod expert_fetch;
mod hybrid_ep;
mod layer_split;
mod layout;
pub mod machine;
mod mesh;
pub mod models;
pub mod network;
mod nodes;
mod parts;
mod placement;
mod placements;
mod propose;
mod reasons;
mod rebalance;
pub mod schedule;
mod search;
mod serving;
mod shape;
mod simulate;
mod skew;
mod step;
mod topology;
mod tune;

pub use balance::{
    BalanceError, BeamOptions, Coactivation, EplbSizes, ExpertMove, ForecastError, ForecastMethod, ForecastOptions,
    LoadForecast, NodeSizes, RankLoads, Replication, ReplicationLimits, RowShare, RowSplit, SplitOptions, eplb,
    eplb_slots, improve, improve_by_beam, place_by_coactivation, replicate_by_importance, sampling_error, share_error,
    split_rows, windows_to_follow,
};
pub use bill::{Bill, Rate};
pub use cluster::{Cluster, ClusterError, Device, Level, Routing};
pub use cost::estimate::{Estimate, StepTime, Traffic};
pub use cost::fabric::{Fabric, FabricLevel, Members, Rates};
pub use cost::memory::{RankMemory, rank_memory};
pub use cost::training::{MeshCost, Practice, StepSeconds, TrainingJob, mesh_cost};
pub use domain_tuner::{DomainChange, DomainTuner, DomainWindow};
pub use exchange::{Algorithm, Exchange, Moving, Wire};
pub use expert_fetch::{LayerLoad, MoveCosts, experts_to_fetch, pass_seconds};
pub use hybrid_ep::{
    DomainLevel, DomainWork, Migration, Peer, choose_domains, domain_seconds, domain_transfers, peer, token_share,
};
pub use layer_split::split_layers;
pub use layout::{Group, Layout, LayoutError, RankOrder};
pub use mesh::{Mesh, Recompute};
pub use models::{Model, ModelError};
pub use nodes::Nodes;
pub use parts::ModelParts;
pub use placement::{Placement, PlacementError};
pub use placements::Placements;
pub use propose::propose;
pub use reasons::{Alternative, Gain, Verdict, verdict};
pub use rebalance::{
    Bandit, ExpertTransfer, LayerChange, LayerLoads, RebalancePolicy, RebalanceRates, RebalanceRules, ReplicaSharing,
    expert_transfers, most_copies, placement_step, rebalance_layer,
};
pub use schedule::{Schedule, ScheduleError, ScheduleKind, ScheduleRequest, StageTimes, Times};
pub use search::{Pins, Search, search};
pub use serving::{Phase, PhaseCost, ServingJob, ServingPlan, serving_plan};
pub use shape::{ModelShape, Precision, Tokens, Workload};
pub use simulate::{ScalingRow, weak_scaling};
pub use skew::{HotRank, Skew};
pub use step::{StepCosts, StepError, StepReport, StepRequest};
pub use topology::{Link, LinkClass, Links, RankSpec, Topology, TopologyError};
pub use tune::ChunkTuner;
