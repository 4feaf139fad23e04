//! The layers of each stage, and what they compute and keep.

use super::StepRequest;
use super::memory::GRADIENT;
use crate::cost::passes::{OperandBytes, SORT_PASSES};
use crate::machine::{LayerRest, MachineShare};
use crate::models::LayerCost;
use crate::network::{Loads, Places, distinct_groups};
use crate::{StageTimes, split_layers};

/// The share of the activations of a layer that W needs after B: 32 of 34 parts, without the scores of attention
/// (Zero Bubble, 2401.10241, table 2).
const KEPT_FOR_WEIGHTS: f64 = 32.0 / 34.0;

/// A stage of the model.
#[derive(Clone, Debug)]
pub(super) struct Stage {
    /// Seconds and bytes of a microbatch on one rank.
    pub(super) times: StageTimes,
    /// The layers with experts.
    pub(super) moe_layers: u16,
    /// All layers, with those that predict further tokens.
    pub(super) num_layers: usize,
    /// The number of parameters that tensor parallelism cuts.
    pub(super) cut_params: f64,
    /// The number of those that it replicates.
    pub(super) whole_params: f64,
    /// The parameters of one expert of each layer, together.
    pub(super) expert_params: f64,
    /// Seconds of the sums of tensor parallelism in a forward, and in a backward.
    pub(super) tensor_parallel_s: f64,
    /// Seconds in a forward in which keys and values are under way and attention is done; twice as many in a
    /// backward.
    pub(super) context_s: f64,
    /// The rows of a token for experts, in numbers: experts a token times width, on average over its layers.
    pub(super) row_widths: Vec<(usize, f64)>,
}

/// Operations a second of a rank.
struct Speeds {
    dense: f64,
    experts: f64,
    attention: f64,
}

/// Seconds of passes over memory in a microbatch.
struct Passes {
    /// Between products, in a forward; twice as many in a backward.
    between: f64,
    /// Operands of products, in a forward and in an input gradient.
    operands: f64,
    /// Operands and gradients of weights, in W.
    weight_grads: f64,
}

impl StepRequest<'_> {
    /// Returns the stages, whose layers are shared out so that the costliest computes least. The last one has the
    /// layers that predict further tokens and the head.
    pub(super) fn stages(&self, num_stages: usize, hottest: f64, places: &Places<'_>) -> Vec<Stage> {
        let layers = self.model.layers(self.precision);
        let further = self.model.mtp_layer(self.precision);
        let further = further.map_or_else(Vec::new, |layer| vec![layer; self.model.mtp_layers]);
        let mut costs: Vec<f64> = layers.iter().map(LayerCost::forward_flops).collect();
        if let Some(last) = costs.last_mut() {
            *last = self.model.forward_flops()
                - layers[..layers.len() - 1].iter().map(LayerCost::forward_flops).sum::<f64>();
        }
        let mut rest = &layers[..];
        let of = |(stage, num): (usize, usize)| {
            let is_last = stage + 1 == num_stages;
            let (mut own, others) = (rest[..num].to_vec(), &rest[num..]);
            rest = others;
            own.extend(if is_last { &further[..] } else { &[] });
            let mut of = self.stage(&own, hottest, places);
            self.add_ends(&mut of, stage == 0, is_last);
            of
        };
        split_layers(&costs, num_stages).into_iter().enumerate().map(of).collect()
    }

    /// Returns the seconds of an all-reduce of the residual stream of a microbatch over ranks that cut matrices.
    fn tensor_parallel_sum(&self, places: &Places<'_>) -> f64 {
        if self.layout.tp == 1 {
            return 0.0;
        }
        let groups = distinct_groups(&self.layout, 0, |rank| self.layout.tp_group(rank));
        let bytes = self.tokens * self.layout.tp * self.model.width * self.precision.bytes();
        places.all_reduce(&groups, bytes as f64).iter().map(Loads::seconds).sum()
    }

    /// Returns a stage of `layers`, without embedding and head.
    fn stage(&self, layers: &[LayerCost], hottest: f64, places: &Places<'_>) -> Stage {
        let sum = self.tensor_parallel_sum(places);
        let total = |of: &dyn Fn(&LayerCost) -> f64| layers.iter().map(of).sum::<f64>();
        let tokens = self.tokens as f64;
        let speeds = self.speeds(layers);
        let dense = tokens * total(&|layer| layer.dense_flops) / speeds.dense;
        let experts = tokens * total(&|layer| layer.expert_flops) / speeds.experts * hottest;
        let attention = tokens * total(&|layer| layer.attention_flops) / speeds.attention;
        let passes = self.passes(layers);
        let context_s = (self.context_seconds(layers, places) - attention).max(0.0);
        let num_moe = layers.iter().filter(|layer| layer.num_experts > 0).count();
        // Attention and a feed-forward without experts sum once each, a layer with experts gathers (half a sum).
        let sums = total(&|layer| if layer.num_experts > 0 { 1.5 } else { 2.0 }) * sum;
        let forward = dense + experts + attention + sums + passes.between + passes.operands + context_s;
        let again = if self.checkpoint_layers { forward } else { 0.0 };
        let input_grad =
            dense + experts + 2.0 * (attention + passes.between + context_s) + sums + passes.operands + again;
        let activation = self.activation(layers);
        let share = if forward > 0.0 { experts / forward } else { 0.0 };
        Stage {
            times: StageTimes {
                expert_share: share,
                activation,
                weight_grad_input: activation * KEPT_FOR_WEIGHTS,
                ..StageTimes::new(forward, input_grad, dense + experts + passes.weight_grads)
            },
            moe_layers: num_moe.try_into().unwrap_or(u16::MAX),
            num_layers: layers.len(),
            cut_params: total(&|layer| (layer.dense_params - layer.whole_params) as f64),
            whole_params: total(&|layer| layer.whole_params as f64),
            expert_params: total(&|layer| layer.expert_params as f64),
            tensor_parallel_s: sums,
            context_s,
            row_widths: layers
                .iter()
                .filter(|layer| layer.num_experts > 0)
                .map(|layer| (layer.width, layer.top_k as f64 * layer.token_share))
                .collect(),
        }
    }

    /// Returns the seconds in which the keys and values of a sequence go around the ranks that share it.
    fn context_seconds(&self, layers: &[LayerCost], places: &Places<'_>) -> f64 {
        if self.context == 1 {
            return 0.0;
        }
        let group = self.layout.dense_group(0)[..self.context].to_vec();
        let numbers = layers.iter().map(|layer| layer.key_values).sum::<f64>();
        // Each rank has its own, and receives those of the others: half of an all-reduce of all.
        let bytes = (self.context * self.tokens * self.precision.bytes()) as f64 * numbers;
        0.5 * places.all_reduce(&[group], bytes).iter().map(Loads::seconds).sum::<f64>()
    }

    /// Returns the rates of a rank's products. On a measured machine they depend on the rows, of which each expert of
    /// a rank has its share.
    fn speeds(&self, layers: &[LayerCost]) -> Speeds {
        let device = &self.cluster.device;
        let Some(machine) = self.machine_share() else {
            let flops = device.flops(self.precision);
            return Speeds { dense: flops, experts: flops, attention: device.attention_flops(self.precision) };
        };
        let width = self.model.width as f64;
        let rows = (self.tokens * self.layout.tp) as f64;
        let dense = machine.product_rate(self.precision, [rows, width]);
        let of_experts = layers.iter().find(|layer| layer.num_experts > 0).map(|layer| {
            let rows = rows * (self.layout.ep * layer.top_k) as f64 / layer.num_experts as f64;
            // Gated experts have three matrices.
            let expert_width = layer.expert_params as f64 / (3.0 * width);
            machine.experts(self.precision, [rows, width, expert_width]).forward
        });
        Speeds { dense, experts: of_experts.unwrap_or(dense), attention: dense }
    }

    /// Returns the rate of the output projection, which stays in bf16 beside FP8 products.
    fn head_speed(&self) -> f64 {
        match self.cluster.machine {
            Some(_) => self.speeds(&[]).dense,
            None => self.cluster.device.flops(self.precision.beside_fp8()),
        }
    }

    /// Returns the seconds of passes over memory in a forward, with those of products' operands apart. Products of a
    /// measured machine have their operands in them.
    fn passes(&self, layers: &[LayerCost]) -> Passes {
        let total = |of: &dyn Fn(&LayerCost) -> f64| layers.iter().map(of).sum::<f64>();
        let (tokens, tp) = (self.tokens as f64, self.layout.tp as f64);
        if let Some(machine) = self.machine_share() {
            let rest = |layer: &LayerCost| LayerRest {
                kept_bytes: tokens * layer.activation_bytes,
                choices: tokens * layer.top_k as f64,
                scores: tokens * layer.num_experts as f64,
                weights: layer.dense_params as f64 / tp
                    + layer.num_experts.div_ceil(self.layout.num_expert_ranks().max(1)) as f64
                        * layer.expert_params as f64,
            };
            let between = total(&|layer| machine.layer_seconds(rest(layer)));
            return Passes { between, operands: 0.0, weight_grads: 0.0 };
        }
        let rate = self.cluster.device.memory_rate();
        let held = |layer: &LayerCost| layer.num_experts.div_ceil(self.layout.num_expert_ranks().max(1)) as f64;
        let sorted =
            |layer: &LayerCost| if held(layer) > 1.0 { SORT_PASSES * (layer.top_k * layer.width) as f64 } else { 0.0 };
        let between = tokens * total(&|layer| layer.passed + layer.token_share * sorted(layer));
        let params = total(&|layer| {
            let whole = layer.whole_params as f64;
            (layer.dense_params as f64 - whole) / tp + whole + held(layer) * layer.expert_params as f64
        });
        let operands = tokens * total(&|layer| layer.operands);
        let bytes = OperandBytes::new(self.precision);
        Passes {
            between: between * self.precision.bytes() as f64 / rate,
            operands: (params * bytes.weight + operands * bytes.forward) / rate,
            weight_grads: (2.0 * GRADIENT * params + operands * bytes.weight_grad) / rate,
        }
    }

    fn machine_share(&self) -> Option<MachineShare> {
        self.cluster.machine.as_ref().map(|machine| MachineShare::new(machine, self.layout.num_ranks()))
    }

    /// Returns the bytes that a rank keeps of a microbatch for backward, with rows that it received.
    fn activation(&self, layers: &[LayerCost]) -> f64 {
        let tokens = self.tokens as f64;
        let is_sent = self.layout.num_expert_ranks() > 1;
        let tp = self.layout.tp as f64;
        let bytes = self.precision.bytes() as f64;
        let of = |layer: &LayerCost| {
            let residual = 4.0 * layer.width as f64 * layer.token_share;
            if self.checkpoint_layers {
                return residual * tp;
            }
            // Residual stream and outputs of norms are whole on each rank of a tensor-parallel group.
            let whole = ((8.0 + 2.0 * bytes) * layer.width as f64 * layer.token_share).min(layer.activation_bytes);
            let rows = if is_sent { layer.top_k as f64 * layer.width as f64 * bytes * layer.token_share } else { 0.0 };
            whole * tp + (layer.activation_bytes - whole) + rows
        };
        tokens * layers.iter().map(of).sum::<f64>()
    }

    /// Adds the embedding to the first stage and the head to the last.
    fn add_ends(&self, stage: &mut Stage, is_first: bool, is_last: bool) {
        let matrix = (self.model.vocabulary * self.model.width) as f64;
        if is_first {
            stage.cut_params += if self.model.has_embedding { matrix } else { 0.0 } + self.model.other_params as f64;
        }
        if is_last {
            let is_held = is_first && self.model.is_tied && self.model.has_embedding;
            stage.cut_params += if is_held { 0.0 } else { matrix };
            stage.whole_params += self.model.width as f64;
            let heads = 1.0 + self.model.mtp_layers as f64;
            let share = if self.model.has_embedding { 1.0 } else { 1.0 / self.model.sequence as f64 };
            let seconds = self.tokens as f64 * heads * share * self.model.head_flops() / self.head_speed();
            let times = &mut stage.times;
            let experts = times.expert_share * times.forward;
            times.forward += seconds;
            times.input_grad += seconds;
            times.weight_grad += seconds;
            times.expert_share = if times.forward > 0.0 { experts / times.forward } else { 0.0 };
        }
    }
}
