//! What a router keeps from step to step that is no weight: it has no gradient, and the optimizer never sees it.

use moeworks_ops::Context;
use moeworks_tensor::DType;

use super::config::RouterConfig;
use crate::LayerStats;
use crate::weights::NamedTensor;

/// In the state of a router: `[E]`, the bias on the experts' scores. The name is that of DeepSeek-V3's files.
pub(crate) const EXPERT_BIAS: &str = "e_score_correction_bias";

/// Moves the state of a router by what one whole step's tokens did: `b += gamma sign(mean load - load)` for the bias of
/// each expert (2408.15664, algorithm 1), with the loads before any choice is dropped.
pub fn next_state(config: &RouterConfig, state: &mut [NamedTensor], stats: &LayerStats) {
    for NamedTensor { name, tensor } in state {
        if *name == EXPERT_BIAS {
            let bias = tensor.f32s_mut();
            let total: f64 = stats.tokens_per_expert.iter().map(|&n| f64::from(n)).sum();
            let mean = total / bias.len() as f64;
            for (bias, &load) in bias.iter_mut().zip(&stats.tokens_per_expert) {
                let below = mean - f64::from(load);
                *bias += config.bias_update_rate * if below == 0.0 { 0.0 } else { below.signum() as f32 };
            }
        }
    }
}

impl RouterConfig {
    /// The names and shapes of the state that a router of `num_experts` experts keeps.
    #[must_use]
    pub fn state_shapes(&self, num_experts: usize) -> Vec<(&'static str, Vec<usize>)> {
        if self.expert_bias { vec![(EXPERT_BIAS, vec![num_experts])] } else { Vec::new() }
    }

    /// The state before the first step.
    #[must_use]
    pub fn first_state(&self, ctx: &Context, num_experts: usize) -> Vec<NamedTensor> {
        let zeros = |(name, shape): (_, Vec<usize>)| NamedTensor { name, tensor: ctx.zeros(&shape, DType::F32) };
        self.state_shapes(num_experts).into_iter().map(zeros).collect()
    }
}
