//! The time of a training step on a measured machine.

use super::{LayerRest, Machine, MachineShare, PassRates};
use crate::cost::collectives::{Rows, all_reduce, all_to_all};
use crate::{Algorithm, Group, Layout, ModelShape, Precision, Topology, split_layers};

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
    /// The sizes of the model's layers.
    pub layers: LayerSizes,
}

/// The sizes of a model's layers that [`ModelShape`] does not tell apart; averages if layers differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerSizes {
    /// Parameters of the products of attention in a layer.
    pub attention_params: f64,
    /// Elements of a token's queries and of its attended values in a layer.
    pub score_elements: f64,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens that a token attends to at most; none without a limit.
    pub window: Option<usize>,
    /// The width of an expert.
    pub expert_width: usize,
    /// Parameters of a dense feed-forward.
    pub dense_params: f64,
    /// The width of a dense feed-forward.
    pub dense_width: usize,
    /// Parameters of the shared experts of a layer.
    pub shared_params: f64,
    /// The width of the shared experts of a layer.
    pub shared_width: usize,
    /// V, the vocabulary.
    pub vocabulary: usize,
}

/// The seconds of a step, by parts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PredictedStep {
    /// Products of attention and of routers.
    pub products: f64,
    /// Scores of attention.
    pub attention: f64,
    /// Experts, shared experts and dense feed-forwards.
    pub experts: f64,
    /// The output layer with its loss.
    pub output_layer: f64,
    /// Passes over values that are kept, weights, choices of experts, and layers whatever their size.
    pub layers: f64,
    /// The norm of the gradients and the update of the weights.
    pub update: f64,
    /// The step, whatever its size.
    pub step: f64,
    /// Communication: tokens, gradients, and tensor-parallel sums.
    pub communication: f64,
    /// Idle time of a pipeline.
    pub bubble: f64,
}

impl PredictedStep {
    /// Returns the parts with their names.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, f64); 9] {
        let Self { products, attention, experts, output_layer, layers, update, step, communication, bubble } = *self;
        [
            ("products", products),
            ("attention", attention),
            ("experts", experts),
            ("output_layer", output_layer),
            ("layers", layers),
            ("update", update),
            ("step", step),
            ("communication", communication),
            ("bubble", bubble),
        ]
    }

    /// Returns the sum.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.parts().iter().map(|(_, seconds)| seconds).sum()
    }
}

/// Predicts a step of a model on ranks that are threads of `machine` and share its cores.
#[must_use]
pub fn predict_step(machine: &Machine, shape: &ModelShape, sizes: StepSizes, layout: &Layout) -> PredictedStep {
    let share = MachineShare::new(machine, layout.num_ranks());
    let part = Part { machine, shape, sizes, layout, share };
    // A microbatch of all layers, on one rank of each stage group.
    let PassParts { products, attention, experts, layers, communication } = part.layers();
    let output_layer = part.output_layer();
    let of_layers = products + attention + experts + layers + communication;
    let stages = part.stages(of_layers, output_layer);
    let (slowest, all) = (stages.iter().copied().fold(0.0, f64::max), stages.iter().sum::<f64>());
    let (columns, microbatches) = (layout.pp as f64, sizes.microbatches as f64);
    // The mean rank's share of the work; the slowest stage paces all microbatches, and the others fill and drain.
    let mean = microbatches / columns;
    PredictedStep {
        products: mean * products,
        attention: mean * attention,
        experts: mean * experts,
        output_layer: mean * output_layer,
        layers: mean * layers,
        update: part.share.update_seconds(sizes.precision, part.params_of_rank()),
        step: part.step(),
        communication: mean * communication + part.gradients(),
        bubble: microbatches * (slowest - all / columns) + all - slowest,
    }
}

/// The seconds of all layers of a microbatch.
struct PassParts {
    products: f64,
    attention: f64,
    experts: f64,
    layers: f64,
    communication: f64,
}

struct Part<'a> {
    machine: &'a Machine,
    shape: &'a ModelShape,
    sizes: StepSizes,
    layout: &'a Layout,
    share: MachineShare,
}

impl Part<'_> {
    /// Returns the tokens of a tensor-parallel group in a microbatch.
    fn tokens(&self) -> f64 {
        let groups = self.layout.dp * self.layout.ep;
        (self.sizes.sequences.div_ceil(groups) * self.sizes.seq_len) as f64
    }

    /// Returns the seconds of work of a layer whose forward pass has `flops` operations: forward, backward, and
    /// forward once more if it is computed again.
    fn seconds(&self, rates: PassRates, flops: f64) -> f64 {
        let again = if self.sizes.checkpoint_layers { rates.forward_seconds(flops) } else { 0.0 };
        rates.training_seconds(flops) + again
    }

    fn layers(&self) -> PassParts {
        PassParts {
            products: self.products(),
            attention: self.attention(),
            experts: self.feed_forwards(),
            layers: self.rest(),
            communication: self.tokens_under_way(),
        }
    }

    fn products(&self) -> f64 {
        let (tokens, tp, width) = (self.tokens(), self.layout.tp as f64, self.shape.width as f64);
        let params = self.sizes.layers.attention_params / tp;
        // Four matrices, of which each rank has some columns or rows.
        let rates = self.share.products(self.sizes.precision, [tokens, (params / 4.0).sqrt().max(1.0)]);
        let attention = self.seconds(rates, 2.0 * tokens * params) * self.shape.num_layers as f64;
        let experts = self.shape.num_experts as f64;
        let (rows, scores) = (tokens / tp, (width * experts).sqrt().max(1.0));
        let router = self.share.products(Precision::F32, [rows, scores]);
        attention + self.seconds(router, 2.0 * rows * width * experts) * self.shape.num_moe_layers as f64
    }

    fn attention(&self) -> f64 {
        let (tokens, layers) = (self.tokens(), &self.sizes.layers);
        let context = layers.window.map_or(self.sizes.seq_len, |window| window.min(self.sizes.seq_len)) as f64;
        let flops = tokens * context * layers.score_elements / self.layout.tp as f64;
        let rates = self
            .share
            .attention(self.sizes.precision, [context, layers.head_dim as f64])
            .unwrap_or_else(|| self.share.products(self.sizes.precision, [tokens, self.shape.width as f64]));
        self.seconds(rates, flops) * self.shape.num_layers as f64
    }

    /// Returns the seconds of experts and dense feed-forwards.
    fn feed_forwards(&self) -> f64 {
        let (tokens, tp, layers) = (self.tokens(), self.layout.tp as f64, &self.sizes.layers);
        let dense_layers = self.shape.num_layers.saturating_sub(self.shape.num_moe_layers) as f64;
        let moe_layers = self.shape.num_moe_layers as f64;
        let of = |rows: f64, hidden: f64, flops: f64| {
            let size = [rows.max(1.0), self.shape.width as f64, hidden.max(1.0)];
            self.seconds(self.share.experts(self.sizes.precision, size), flops)
        };
        let dense = of(tokens, layers.dense_width as f64 / tp, 2.0 * tokens * layers.dense_params / tp);
        let shared = of(tokens / tp, layers.shared_width as f64, 2.0 * tokens / tp * layers.shared_params);
        let mut experts = 0.0;
        if self.shape.num_experts > 0 {
            // The experts of a group get the tokens of all of it.
            let choices = tokens * self.shape.top_k as f64;
            let rows = choices * self.layout.ep as f64 / self.shape.num_experts as f64;
            let flops = 2.0 * self.shape.expert_params as f64 * choices / tp;
            experts = of(rows, layers.expert_width as f64, flops);
        }
        dense_layers * dense + moe_layers * (shared + experts)
    }

    /// Returns the seconds of what remains of all layers of a microbatch.
    fn rest(&self) -> f64 {
        let (layers, rows) = (self.shape.num_layers as f64, self.tokens() / self.layout.tp as f64);
        let moe_share = self.shape.num_moe_layers as f64 / layers.max(1.0);
        let of_layer = self.share.layer_seconds(LayerRest {
            kept_bytes: rows * self.shape.activation_bytes / layers.max(1.0),
            choices: moe_share * rows * self.shape.top_k as f64,
            scores: moe_share * rows * self.shape.num_experts as f64,
            weights: (self.params_of_layers() + self.expert_params()) / layers.max(1.0),
        });
        layers * of_layer * if self.sizes.checkpoint_layers { 4.0 } else { 3.0 }
    }

    fn output_layer(&self) -> f64 {
        let (tokens, width) = (self.tokens(), self.shape.width as f64);
        let vocabulary = self.sizes.layers.vocabulary as f64 / self.layout.tp as f64;
        let rate = self
            .share
            .output_layer(self.sizes.precision, [width, vocabulary])
            .unwrap_or_else(|| self.share.products(self.sizes.precision, [tokens, width]).training);
        6.0 * tokens * width * vocabulary / rate
    }

    /// Returns the seconds of the stages of a pipeline for a microbatch; the last one has the output layer.
    fn stages(&self, of_layers: f64, output_layer: f64) -> Vec<f64> {
        let num_layers = self.shape.num_layers;
        if self.layout.pp == 1 || num_layers < self.layout.pp {
            return vec![(of_layers + output_layer) / self.layout.pp as f64; self.layout.pp];
        }
        let mut costs = vec![of_layers / num_layers as f64; num_layers];
        costs[num_layers - 1] += output_layer;
        let mut rest = &costs[..];
        let of = |num: usize| {
            let (own, others) = rest.split_at(num);
            rest = others;
            own.iter().sum()
        };
        split_layers(&costs, self.layout.pp).into_iter().map(of).collect()
    }

    fn step(&self) -> f64 {
        let overhead = self.machine.overhead;
        let of_ranks = if self.layout.num_ranks() > 1 { overhead.ranks_s } else { 0.0 };
        overhead.step_s + of_ranks
    }

    /// Returns the parameters whose update this rank computes.
    fn params_of_rank(&self) -> f64 {
        let whole = self.shape.whole_params.min(self.shape.dense_params) as f64;
        let dense = (self.shape.dense_params as f64 - whole) / self.layout.tp as f64 + whole;
        (dense + self.expert_params()) / self.layout.pp as f64
    }

    /// Returns the parameters of all layers, outside experts, that a rank of a column holds.
    fn params_of_layers(&self) -> f64 {
        self.shape.dense_params.saturating_sub(self.shape.outside_params) as f64 / self.layout.tp as f64
    }

    /// Returns the parameters of the experts that a rank of a column holds.
    fn expert_params(&self) -> f64 {
        let held = self.shape.num_experts.div_ceil(self.layout.num_expert_ranks()) * self.shape.num_moe_layers;
        held as f64 * self.shape.expert_params as f64
    }

    fn topology(&self) -> Topology {
        let size = [self.tokens(), self.shape.width as f64];
        let mut topology = self.machine.topology(self.layout.num_ranks(), self.sizes.precision, size);
        for link in [&mut topology.node_link, &mut topology.cluster_link] {
            link.bytes_per_s /= self.machine.overhead.link_share.max(1e-9);
        }
        topology
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
        let wait = |group: usize| if group > 1 { self.machine.overhead.wait_s } else { 0.0 };
        let experts = Group::of(&topology, &self.layout.ep_group(0));
        let dispatch = all_to_all(&topology, experts, Algorithm::Linear, &rows).seconds + wait(experts.ranks);
        let sums = Group::of(&topology, &self.layout.tp_group(0));
        let bytes = self.tokens() * row_bytes as f64;
        let sum = all_reduce(&topology, sums, bytes).seconds + wait(sums.ranks);
        // Each stage but the first receives a microbatch and sends back its gradient.
        let streams = (self.layout.pp - 1) as f64;
        let stream = topology.node_link.seconds(1, bytes) + self.machine.overhead.wait_s;
        4.0 * self.shape.num_moe_layers as f64 * dispatch
            + (4.0 * self.shape.num_layers as f64 + 2.0) * sum
            + 2.0 * streams * stream
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
