//! The time of a training step on a measured machine.

use super::{Machine, MachineShare};
use crate::cost::collectives::{Rows, all_reduce, all_to_all};
use crate::{Algorithm, Group, Layout, ModelShape, Precision, Topology};

/// Bytes that the update of a weight reads and writes.
const UPDATE_BYTES: f64 = 28.0;

/// The sizes of a training step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepSizes {
    /// Sequences of a microbatch, of all ranks.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Microbatches of a step.
    pub microbatches: usize,
    /// The number format of products.
    pub precision: Precision,
    /// True if forward is computed again in backward.
    pub checkpoint_layers: bool,
}

/// The seconds of a step, by parts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PredictedStep {
    /// Matrix products.
    pub products: f64,
    /// Passes over values that are kept.
    pub passes: f64,
    /// Layers, whatever their size.
    pub layers: f64,
    /// The update of the weights.
    pub update: f64,
    /// Communication: tokens, gradients, and tensor-parallel sums.
    pub communication: f64,
    /// Idle time of a pipeline.
    pub bubble: f64,
}

impl PredictedStep {
    /// Returns the sum.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.products + self.passes + self.layers + self.update + self.communication + self.bubble
    }
}

/// Predicts a step of a model on ranks that are threads of `machine` and share its cores.
#[must_use]
pub fn predict_step(machine: &Machine, shape: &ModelShape, sizes: StepSizes, layout: &Layout) -> PredictedStep {
    let num_ranks = layout.num_ranks();
    let cores = machine.cores as f64 / num_ranks as f64;
    let part = Part { machine, shape, sizes, layout, cores };
    let microbatches = sizes.microbatches as f64;
    // Work of one rank for a microbatch, if layers are shared out evenly over the columns of a pipeline.
    let columns = layout.pp as f64;
    let (products, passes) = (part.products() / columns, part.passes() / columns);
    let layers = part.layers() / columns;
    let communication = part.tokens_under_way() / columns;
    let one = products + passes + layers + communication;
    PredictedStep {
        products: microbatches * products,
        passes: microbatches * passes,
        layers: microbatches * layers,
        update: part.params_of_rank() * UPDATE_BYTES / (machine.memory_bytes_per_s / num_ranks as f64),
        communication: microbatches * communication + part.gradients(),
        bubble: (columns - 1.0) * one,
    }
}

struct Part<'a> {
    machine: &'a Machine,
    shape: &'a ModelShape,
    sizes: StepSizes,
    layout: &'a Layout,
    /// Cores of a rank; below one if ranks share a core.
    cores: f64,
}

impl Part<'_> {
    /// Returns the tokens of a tensor-parallel group in a microbatch.
    fn tokens(&self) -> f64 {
        let groups = self.layout.dp * self.layout.ep;
        (self.sizes.sequences.div_ceil(groups) * self.sizes.seq_len) as f64
    }

    /// Returns forward passes of a step: three, and one more if forward is computed again.
    fn forwards(&self) -> f64 {
        if self.sizes.checkpoint_layers { 4.0 } else { 3.0 }
    }

    /// Returns the operations a second of this rank's products with `rows` rows.
    fn rate(&self, rows: f64) -> f64 {
        let share = MachineShare::new(self.machine, self.layout.num_ranks());
        share.product_rate(self.sizes.precision, [rows, self.shape.width as f64])
    }

    fn products(&self) -> f64 {
        let (tokens, tp) = (self.tokens(), self.layout.tp as f64);
        let dense = tokens * self.shape.dense_flops / tp / self.rate(tokens);
        if self.shape.num_moe_layers == 0 {
            return self.forwards() * dense;
        }
        // The experts of a group get the tokens of all of it.
        let rows = tokens * (self.layout.ep * self.shape.top_k) as f64 / self.shape.num_experts as f64;
        let experts = tokens * self.shape.expert_flops() / tp / self.rate(rows);
        self.forwards() * (dense + experts)
    }

    fn passes(&self) -> f64 {
        let bytes = self.tokens() * self.shape.activation_bytes / self.layout.tp as f64;
        let again = self.forwards() / 3.0;
        self.machine.overhead.passes * again * bytes
            / (self.machine.memory_bytes_per_s / self.machine.cores as f64 * self.cores)
    }

    fn layers(&self) -> f64 {
        // Ranks that share a core wait for each other.
        self.machine.overhead.layer_s * self.shape.num_layers as f64 / self.cores.min(1.0)
    }

    /// Returns the parameters whose update this rank computes.
    fn params_of_rank(&self) -> f64 {
        let whole = self.shape.whole_params.min(self.shape.dense_params) as f64;
        let dense = (self.shape.dense_params as f64 - whole) / self.layout.tp as f64 + whole;
        (dense + self.expert_params()) / self.layout.pp as f64
    }

    /// Returns the parameters of the experts that a rank of a column holds.
    fn expert_params(&self) -> f64 {
        let held = self.shape.num_experts.div_ceil(self.layout.num_expert_ranks()) * self.shape.num_moe_layers;
        held as f64 * self.shape.expert_params as f64
    }

    fn topology(&self) -> Topology {
        let size = [self.tokens(), self.shape.width as f64];
        self.machine.topology(self.layout.num_ranks(), self.sizes.precision, size)
    }

    /// Returns the seconds in which tokens and tensor-parallel sums of a microbatch are under way.
    fn tokens_under_way(&self) -> f64 {
        let (topology, row_bytes) = (self.topology(), 4 * self.shape.width);
        let rows = Rows {
            tokens: (self.tokens() / self.layout.tp as f64).ceil() as usize,
            top_k: self.shape.top_k,
            num_experts: self.shape.num_experts,
            row_bytes,
        };
        let experts = Group::of(&topology, &self.layout.ep_group(0));
        let dispatch = all_to_all(&topology, experts, Algorithm::Linear, &rows).seconds;
        let sums = Group::of(&topology, &self.layout.tp_group(0));
        let sum = all_reduce(&topology, sums, self.tokens() * row_bytes as f64).seconds;
        4.0 * self.shape.num_moe_layers as f64 * dispatch + (4.0 * self.shape.num_layers as f64 + 2.0) * sum
    }

    /// Returns the seconds of summing gradients once.
    fn gradients(&self) -> f64 {
        let (topology, columns) = (self.topology(), self.layout.pp as f64);
        let of =
            |ranks: Vec<usize>, params: f64| all_reduce(&topology, Group::of(&topology, &ranks), 4.0 * params).seconds;
        let dense = self.shape.dense_params as f64 / self.layout.tp as f64;
        (of(self.layout.dense_group(0), dense) + of(self.layout.dp_group(0), self.expert_params())) / columns
    }
}
