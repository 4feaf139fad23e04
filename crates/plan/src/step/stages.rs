//! The layers of each stage, and what they compute and keep.

use super::StepRequest;
use crate::models::LayerCost;
use crate::network::{Loads, Places, distinct_groups};
use crate::{Precision, StageTimes, split_layers};

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
    /// The rows of a token for experts, in numbers: experts a token times width, on average over its layers.
    pub(super) row_widths: Vec<(usize, f64)>,
}

impl StepRequest<'_> {
    /// Returns the stages, whose layers are shared out so that the costliest computes least. The last one has the layers
    /// that predict further tokens and the head.
    pub(super) fn stages(&self, num_stages: usize, hottest: f64, places: &Places<'_>) -> Vec<Stage> {
        let layers = self.model.layers(self.precision);
        let further = self.model.mtp_layer(self.precision);
        let further = further.map_or_else(Vec::new, |layer| vec![layer; self.model.mtp_layers]);
        let mut costs: Vec<f64> = layers.iter().map(LayerCost::forward_flops).collect();
        if let Some(last) = costs.last_mut() {
            *last = self.model.forward_flops()
                - layers[..layers.len() - 1].iter().map(LayerCost::forward_flops).sum::<f64>();
        }
        let sum = self.tensor_parallel_sum(places);
        let mut rest = &layers[..];
        let of = |(stage, num): (usize, usize)| {
            let is_last = stage + 1 == num_stages;
            let (mut own, others) = (rest[..num].to_vec(), &rest[num..]);
            rest = others;
            own.extend(if is_last { &further[..] } else { &[] });
            let mut of = self.stage(&own, hottest, sum);
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
    fn stage(&self, layers: &[LayerCost], hottest: f64, sum: f64) -> Stage {
        let total = |of: &dyn Fn(&LayerCost) -> f64| layers.iter().map(of).sum::<f64>();
        let tokens = self.tokens as f64;
        let speed = self.cluster.device.flops(self.precision);
        // Scores of attention are computed in bf16 even if other products are in FP8.
        let attention_speed =
            self.cluster.device.flops(if self.precision == Precision::Fp8 { Precision::Bf16 } else { self.precision });
        let dense = tokens * total(&|layer| layer.dense_flops) / speed;
        let experts = tokens * total(&|layer| layer.expert_flops) / speed * hottest;
        let attention = tokens * total(&|layer| layer.attention_flops) / attention_speed;
        // Attention and a feed-forward without experts sum once each, a layer with experts gathers (half a sum).
        let sums = total(&|layer| if layer.num_experts > 0 { 1.5 } else { 2.0 }) * sum;
        let again = if self.checkpoint_layers { dense + experts + attention + sums } else { 0.0 };
        let forward = dense + experts + attention + sums;
        let activation = self.activation(layers);
        let share = if forward > 0.0 { experts / forward } else { 0.0 };
        Stage {
            times: StageTimes {
                expert_share: share,
                activation,
                weight_grad_input: activation * KEPT_FOR_WEIGHTS,
                ..StageTimes::new(forward, dense + experts + 2.0 * attention + sums + again, dense + experts)
            },
            moe_layers: layers.iter().filter(|layer| layer.num_experts > 0).count().try_into().unwrap_or(u16::MAX),
            num_layers: layers.len(),
            cut_params: total(&|layer| (layer.dense_params - layer.whole_params) as f64),
            whole_params: total(&|layer| layer.whole_params as f64),
            expert_params: total(&|layer| layer.expert_params as f64),
            tensor_parallel_s: sums,
            row_widths: layers
                .iter()
                .filter(|layer| layer.num_experts > 0)
                .map(|layer| (layer.width, layer.top_k as f64 * layer.token_share))
                .collect(),
        }
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
            let seconds = self.tokens as f64 * heads * share * self.model.head_flops()
                / self.cluster.device.flops(if self.precision == Precision::Fp8 {
                    Precision::Bf16
                } else {
                    self.precision
                });
            let times = &mut stage.times;
            let experts = times.expert_share * times.forward;
            times.forward += seconds;
            times.input_grad += seconds;
            times.weight_grad += seconds;
            times.expert_share = if times.forward > 0.0 { experts / times.forward } else { 0.0 };
        }
    }
}
