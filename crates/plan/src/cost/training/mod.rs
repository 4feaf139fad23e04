//! The cost of a training step under a layout in all dimensions: memory of the hottest rank, bytes by level, seconds.
//!
//! A microbatch passes each pipeline rank in F, B and W. Their seconds are products at the rate that products reach
//! (or the time to read the weights, if that is longer), causal attention, and the memory traffic of what is no
//! product. Collectives are added where they stand, at the bandwidth of the levels that their groups cross. The
//! pipeline's bubble is that of the schedule's closed form.

mod bubble;
mod memory;
mod pass;
mod stages;

pub use bubble::{PassTimes, bubble_seconds, message_seconds, peak_microbatches};

use super::fabric::{Fabric, LinkCost, MAX_LEVELS, Members};
use super::memory::RankMemory;
use crate::skew::HotRank;
use crate::{Algorithm, Mesh, ModelParts, Precision, ScheduleKind, Skew};

/// Bytes that the update of a weight reads (weight, gradient, two moments) and writes (weight, two moments).
const UPDATE_BYTES: f64 = 28.0;

/// The share of an H100's multiprocessors that an all-to-all holds in DeepSeek-V3 (2412.19437, section 3.2.2), and by
/// default in DeepEP: 20 of 132.
pub(crate) const DEEP_EP_UNITS: f64 = 20.0 / 132.0;

/// The habits of a training program: what it overlaps, and what it retains.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Practice {
    /// Bytes of a number in the sums of tensor parallelism.
    pub sum_bytes: f64,
    /// Bytes of a number of the residual stream.
    pub residual_bytes: f64,
    /// Bytes of a weight on every rank that holds it.
    pub weight_bytes: f64,
    /// Bytes of a weight's optimizer state, which ZeRO 1 divides.
    pub optimizer_bytes: f64,
    /// Bytes of a number of a dispatched row; None for those of the precision.
    pub dispatch_bytes: Option<f64>,
    /// True if sums of gradients go on beside the backward of the last microbatch.
    pub overlaps_gradients: bool,
    /// True if norms and the residual stream are divided among tensor-parallel ranks (sequence parallelism).
    pub divides_residual: bool,
    /// True if the outputs of activation functions are kept for the backward.
    pub keeps_outputs: bool,
    /// The paths of all-to-alls that it has.
    pub paths: &'static [Algorithm],
    /// The most chunks of an all-to-all that overlap with experts; 1 for none.
    pub max_chunks: usize,
    /// The share of a device's computing units that an all-to-all holds while it passes beside products: its kernels
    /// run on them. 0 where a link needs none.
    pub exchange_units: f64,
}

impl Practice {
    /// The trainer of Moeworks in a precision: f32 weights beside their bf16 copies, f32 sums.
    #[must_use]
    pub fn moeworks(precision: Precision) -> Self {
        Self {
            sum_bytes: 4.0,
            residual_bytes: 4.0,
            weight_bytes: precision.weight_bytes() as f64,
            optimizer_bytes: 8.0,
            dispatch_bytes: None,
            overlaps_gradients: false,
            divides_residual: false,
            keeps_outputs: false,
            paths: &Algorithm::ALL,
            max_chunks: 8,
            exchange_units: DEEP_EP_UNITS,
        }
    }

    /// Megatron-Core with its distributed optimizer: `6 + 12/d` bytes a parameter, sequence parallelism, and
    /// gradients that are summed beside the backward. Tokens go straight to their experts.
    pub const MEGATRON: Self = Self {
        sum_bytes: 2.0,
        residual_bytes: 2.0,
        weight_bytes: 2.0,
        optimizer_bytes: 12.0,
        dispatch_bytes: None,
        overlaps_gradients: true,
        divides_residual: true,
        keeps_outputs: true,
        paths: &[Algorithm::Linear],
        max_chunks: 1,
        exchange_units: 0.0,
    };
}

/// A training run to plan for.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingJob {
    /// The model.
    pub parts: ModelParts,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Sequences of a step.
    pub global_batch: usize,
    /// The number format of products.
    pub precision: Precision,
    /// Bytes of a gradient of an expert's weight.
    pub expert_gradient_bytes: usize,
    /// The load of the experts.
    pub skew: Skew,
    /// The habits of the training program.
    pub practice: Practice,
    /// The layers of each pipeline stage, if they are fixed; otherwise shared out as evenly as they allow.
    pub stage_layers: Option<Vec<usize>>,
}

impl TrainingJob {
    /// Makes a job of Moeworks' trainer with even load.
    #[must_use]
    pub fn new(parts: ModelParts, seq_len: usize, global_batch: usize, precision: Precision) -> Self {
        let practice = Practice::moeworks(precision);
        Self {
            parts,
            seq_len,
            global_batch,
            precision,
            expert_gradient_bytes: 4,
            skew: Skew::Even,
            practice,
            stage_layers: None,
        }
    }

    /// Returns the tokens of a step.
    #[must_use]
    pub fn tokens_per_step(&self) -> f64 {
        self.global_batch as f64 * self.seq_len as f64
    }
}

/// The seconds of a step, by what the hottest rank spends them on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepSeconds {
    /// Matrix products, those of recomputation included.
    pub products: f64,
    /// Causal attention.
    pub attention: f64,
    /// Memory traffic of norms, activations, permutations and the like.
    pub elementwise: f64,
    /// All-to-alls of experts that nothing hides, and collectives of expert-tensor parallelism.
    pub experts: f64,
    /// Collectives of tensor parallelism.
    pub tensor: f64,
    /// Keys and values of context parallelism that attention does not hide.
    pub context: f64,
    /// Messages between pipeline ranks.
    pub messages: f64,
    /// The pipeline's bubble.
    pub bubble: f64,
    /// Sums of gradients and gathers of weights that nothing hides.
    pub gradients: f64,
    /// The update of the weights.
    pub optimizer: f64,
}

impl StepSeconds {
    /// Returns the parts with their names.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, f64); 10] {
        [
            ("products", self.products),
            ("attention", self.attention),
            ("elementwise", self.elementwise),
            ("expert all-to-all", self.experts),
            ("tensor-parallel sums", self.tensor),
            ("context-parallel exchange", self.context),
            ("pipeline messages", self.messages),
            ("pipeline bubble", self.bubble),
            ("gradient sums", self.gradients),
            ("weight update", self.optimizer),
        ]
    }

    /// Returns the sum.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.parts().iter().map(|(_, seconds)| seconds).sum()
    }

    /// Returns the parts that are communication.
    #[must_use]
    pub fn communication(&self) -> f64 {
        self.experts + self.tensor + self.context + self.messages + self.gradients
    }
}

/// A layout with its costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeshCost {
    /// The layout.
    pub mesh: Mesh,
    /// The path of the all-to-all.
    pub path: Algorithm,
    /// The number of chunks of the all-to-all.
    pub chunks: usize,
    /// The number of microbatches of a step.
    pub microbatches: usize,
    /// The load of the hottest rank of experts over the mean.
    pub hot: HotRank,
    /// Memory of the rank that needs the most.
    pub memory: RankMemory,
    /// The seconds of a step.
    pub time: StepSeconds,
    /// Bytes that a rank sends at each level in a step.
    pub sent_bytes: [f64; MAX_LEVELS],
    /// Tokens per second of all ranks.
    pub tokens_per_s: f64,
    /// Operations per second and rank, recomputation not counted.
    pub flops_per_rank: f64,
    /// `flops_per_rank` over the peak of bf16 products.
    pub mfu: f64,
    /// True if the memory suffices.
    pub fits: bool,
}

/// Returns the costs of `mesh`, whose sizes must be valid ([`Mesh::is_valid`]) and give the ranks of `fabric`.
#[must_use]
pub fn mesh_cost(job: &TrainingJob, fabric: &Fabric, mesh: &Mesh) -> MeshCost {
    mesh_cost_with(job, fabric, mesh, job.skew.hot_rank(job.parts.num_experts, mesh.ep))
}

/// Returns the costs of `mesh` with a given hottest rank.
pub(crate) fn mesh_cost_with(job: &TrainingJob, fabric: &Fabric, mesh: &Mesh, hot: HotRank) -> MeshCost {
    let microbatches = job.global_batch.div_ceil(mesh.dp * mesh.microbatch).max(1);
    Step { job, fabric, mesh, hot, microbatches }.cost()
}

/// A rank's share of a step.
pub(super) struct Step<'a> {
    job: &'a TrainingJob,
    fabric: &'a Fabric,
    mesh: &'a Mesh,
    hot: HotRank,
    microbatches: usize,
}

impl Step<'_> {
    /// Returns the tokens of a microbatch in a tensor-parallel group.
    fn tokens(&self) -> f64 {
        let tokens = (self.mesh.microbatch * self.job.seq_len) as f64;
        tokens * self.job.parts.token_share / self.mesh.cp as f64
    }

    /// Returns the ranks that hold the experts between them.
    fn expert_group(&self) -> Members {
        let stride = if self.mesh.is_folded { self.mesh.etp } else { self.mesh.tp * self.mesh.cp };
        Members { num: self.mesh.ep, stride }
    }

    fn cost(&self) -> MeshCost {
        let (job, mesh, m) = (self.job, self.mesh, self.microbatches as f64);
        let passes = self.passes();
        let times = passes.times();
        let mut sent = passes.links.times(m);
        let hop = self.fabric.send(Members { num: mesh.pp, stride: mesh.stage_group_size() }, self.message_bytes());
        let bubble = bubble_seconds(mesh, self.microbatches, &times);
        let messages = message_seconds(mesh, self.microbatches, hop.total());
        sent += hop.times(2.0 * m * mesh.virtual_stages as f64);
        let (sums, exposed) = self.gradients(&times);
        sent += sums;
        let memory = self.memory();
        let time = StepSeconds {
            products: m * passes.products,
            attention: m * passes.attention,
            elementwise: m * passes.elementwise,
            experts: m * self.exposed_experts(&passes, &times),
            tensor: m * passes.tensor,
            context: m * passes.context,
            messages,
            bubble,
            gradients: exposed,
            optimizer: self.updated_params() * UPDATE_BYTES / self.fabric.rates.pass_bytes_per_s,
        };
        let tokens_per_s = job.tokens_per_step() / time.total();
        let flops_per_rank = tokens_per_s * job.parts.training_flops(job.seq_len) / mesh.num_ranks() as f64;
        MeshCost {
            mesh: *mesh,
            path: passes.path,
            chunks: passes.chunks,
            microbatches: self.microbatches,
            hot: self.hot,
            memory,
            time,
            sent_bytes: sent.bytes,
            tokens_per_s,
            flops_per_rank,
            mfu: flops_per_rank / self.fabric.rates.peak_flops,
            fits: memory.total() <= self.fabric.rates.memory_bytes,
        }
    }

    /// Returns the seconds that a microbatch's all-to-alls cost. Schedules of pairs compute one microbatch while the
    /// tokens of another travel, on the computing units that the all-to-all leaves.
    fn exposed_experts(&self, passes: &pass::Passes, times: &PassTimes) -> f64 {
        if !is_paired(self.mesh) {
            return passes.exposed_experts;
        }
        let computed = times.forward + times.input_grad + times.weight_grad - passes.exposed_experts;
        let hidden = passes.raw_experts.min(computed);
        passes.raw_experts - hidden + self.job.practice.exchange_units * hidden
    }

    fn message_bytes(&self) -> f64 {
        self.tokens() * self.job.parts.width as f64 * self.job.precision.bytes() as f64 / self.mesh.tp as f64
    }

    /// Returns the cost of summing gradients and gathering weights in a step, and its seconds that nothing hides.
    fn gradients(&self, times: &PassTimes) -> (LinkCost, f64) {
        let (params, mesh, job) = (self.params(), self.mesh, self.job);
        let copies = Members { num: mesh.dp * mesh.cp, stride: mesh.tp };
        let of_experts = Members { num: mesh.edp(), stride: mesh.ep * mesh.etp };
        let all = Members { num: mesh.stage_group_size(), stride: 1 };
        let gather = |bytes: f64, expert_bytes: f64| {
            self.fabric.all_gather(copies, params.cut * bytes)
                + self.fabric.all_gather(all, params.whole * bytes)
                + self.fabric.all_gather(of_experts, params.experts * expert_bytes)
        };
        let sums = gather(4.0, job.expert_gradient_bytes as f64);
        let weights = gather(job.precision.bytes() as f64, job.precision.bytes() as f64);
        let backward = times.input_grad + times.weight_grad;
        let hidden = |seconds: f64, under: f64| {
            if job.practice.overlaps_gradients { (seconds - under).max(0.0) } else { seconds }
        };
        match mesh.zero {
            0 => (sums.times(2.0), hidden(2.0 * sums.total(), backward)),
            1 | 2 => (sums + weights, hidden(sums.total() + weights.total(), backward)),
            _ => {
                let m = self.microbatches as f64;
                let exposed = hidden(weights.total(), times.forward) + hidden(weights.total() + sums.total(), backward);
                (sums.times(m) + weights.times(2.0 * m), m * exposed)
            }
        }
    }
}

/// Returns whether the schedule computes a forward beside a backward, so that one hides the all-to-alls of the other.
pub(crate) fn is_paired(mesh: &Mesh) -> bool {
    use ScheduleKind::{DualPipe, DualPipeV, InterleavedOverlap, OneFOneBOverlap};
    mesh.pp > 1 && matches!(mesh.schedule, DualPipe | DualPipeV | InterleavedOverlap | OneFOneBOverlap)
}
