//! The cost of a training step for a rank under a layout: memory, bytes and seconds.

use super::collectives::{Cost, Rows, all_reduce, all_to_all};
use super::memory::{RankMemory, Share, rank_memory};
use super::pipeline::overlapped_seconds;
use crate::{Exchange, Group, Layout, ModelShape, Topology, Workload};

/// Bytes that the update of a weight reads (weight, gradient, two moments) and writes (weight, two moments).
const UPDATE_BYTES: f64 = 28.0;

/// Bytes that a rank sends in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Bytes to ranks of its node.
    pub node_bytes: f64,
    /// Bytes to ranks of other nodes.
    pub cluster_bytes: f64,
}

/// The seconds of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    /// Forward and backward computation.
    pub compute: f64,
    /// All-to-alls that no computation hides.
    pub all_to_all: f64,
    /// All-reduces of gradients, and all-gathers of weights.
    pub all_reduce: f64,
    /// All-reduces of tensor parallelism.
    pub tensor_parallel: f64,
    /// The update of the weights.
    pub optimizer: f64,
}

impl StepTime {
    /// Returns the sum.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.compute + self.all_to_all + self.all_reduce + self.tensor_parallel + self.optimizer
    }
}

/// A layout with its costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The layout.
    pub layout: Layout,
    /// The exchange of tokens.
    pub exchange: Exchange,
    /// Memory of the rank that holds the most.
    pub memory: RankMemory,
    /// Bytes that a rank sends in a step.
    pub traffic: Traffic,
    /// Seconds of a step.
    pub time: StepTime,
    /// True if the memory suffices.
    pub fits: bool,
}

/// Returns the costs of one step of `shape` under `layout`, whose sizes give the ranks of `topology`.
#[must_use]
pub fn estimate(
    shape: &ModelShape,
    workload: &Workload,
    topology: &Topology,
    layout: &Layout,
    exchange: &Exchange,
) -> Estimate {
    let step = Step { share: Share { shape, workload, layout }, shape, topology, layout, exchange };
    let memory = rank_memory(shape, workload, layout);
    let (dispatch, all_to_all) = step.all_to_all();
    let (sums, of_parts) = (step.all_reduce(), step.tensor_parallel());
    let time = StepTime {
        compute: step.compute(shape.training_flops()),
        all_to_all,
        all_reduce: sums.seconds,
        tensor_parallel: of_parts.seconds,
        optimizer: step.share.updated_params() * UPDATE_BYTES / topology.rank.memory_bytes_per_s,
    };
    let all = dispatch + sums + of_parts;
    Estimate {
        layout: *layout,
        exchange: *exchange,
        memory,
        traffic: Traffic { node_bytes: all.node_bytes, cluster_bytes: all.cluster_bytes },
        time,
        fits: memory.total() <= topology.rank.memory_bytes,
    }
}

struct Step<'a> {
    share: Share<'a>,
    shape: &'a ModelShape,
    topology: &'a Topology,
    layout: &'a Layout,
    exchange: &'a Exchange,
}

impl Step<'_> {
    /// Returns the seconds of `flops` operations for each token.
    fn compute(&self, flops: f64) -> f64 {
        self.share.tokens() * flops / self.layout.tp as f64 / self.topology.rank.flops
    }

    /// Returns the cost of the all-to-alls of a step, and their seconds that no expert hides: dispatch and combine of
    /// each layer, forward and backward, which computes twice as much.
    fn all_to_all(&self) -> (Cost, f64) {
        let (shape, exchange) = (self.shape, self.exchange);
        let rows = Rows {
            tokens: (self.share.tokens() / self.layout.tp as f64).ceil() as usize,
            top_k: shape.top_k,
            num_experts: shape.num_experts,
            row_bytes: exchange.wire.row_bytes(shape.width),
        };
        let layers = shape.num_moe_layers as f64;
        let group = Group::of(self.topology, &self.layout.ep_group(0));
        let one = all_to_all(self.topology, group, exchange.algorithm, &rows);
        let r = exchange.chunks.max(1);
        // Each chunk pays the latencies again.
        let empty = all_to_all(self.topology, group, exchange.algorithm, &Rows { tokens: 0, ..rows }).seconds;
        let transfer = empty + (one.seconds - empty) / r as f64;
        let forward = self.compute(shape.expert_flops()) / layers.max(1.0);
        let exposed = |compute: f64| overlapped_seconds(r, transfer, compute / r as f64) - compute;
        (one.times(4.0 * layers), layers * (exposed(forward) + exposed(2.0 * forward)))
    }

    /// Returns the cost of summing gradients over the ranks that hold the same weights: a reduce-scatter and an
    /// all-gather, half an all-reduce each. Under ZeRO 3 the weights are gathered twice instead, in the format of the
    /// products.
    fn all_reduce(&self) -> Cost {
        let workload = self.share.workload;
        let gathers = if workload.zero >= 3 { 2.0 * workload.precision.bytes() as f64 / 4.0 } else { 1.0 };
        self.sums().times(0.5 * (1.0 + gathers))
    }

    /// Returns the cost of an all-reduce of all gradients.
    fn sums(&self) -> Cost {
        let experts = self.share.params().experts;
        let (cut, whole) = self.share.dense_params();
        let of =
            |ranks: Vec<usize>, params: f64| all_reduce(self.topology, Group::of(self.topology, &ranks), 4.0 * params);
        if self.layout.tp == 1 {
            return of(self.layout.dense_group(0), cut + whole) + of(self.layout.dp_group(0), experts);
        }
        let all = (0..self.layout.num_ranks()).collect();
        of(self.layout.dense_group(0), cut) + of(all, whole) + of(self.layout.dp_group(0), experts)
    }

    /// Returns the cost of tensor parallelism, on the f32 rows of a group's tokens, forward and backward: an
    /// all-reduce for each attention and each dense feed-forward, an all-gather (half an all-reduce) for each layer
    /// with experts, and two all-reduces for embedding and output projection.
    fn tensor_parallel(&self) -> Cost {
        let group = Group::of(self.topology, &self.layout.tp_group(0));
        let sum = all_reduce(self.topology, group, self.share.tokens() * (4 * self.shape.width) as f64);
        let (layers, with_experts) = (self.shape.num_layers as f64, self.shape.num_moe_layers as f64);
        sum.times(2.0 * (layers + (layers - with_experts) + 0.5 * with_experts) + 2.0)
    }
}
