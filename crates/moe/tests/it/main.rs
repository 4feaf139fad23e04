//! Tests of the MoE layer against a plain reference, fixtures of other implementations, and published figures.

mod capacity;
mod decisions;
mod deepseek;
mod domains;
mod edges;
mod fixtures;
mod gpu;
mod gpu_large;
#[cfg(target_os = "linux")]
#[path = "../../../comm/tests/it/launcher.rs"]
mod launcher;
mod moving;
#[cfg(target_os = "linux")]
#[path = "../../../comm/tests/it/namespaces.rs"]
mod namespaces;
mod pages;
#[cfg(target_os = "linux")]
mod processes;
mod properties;
mod published;
mod ranks;
mod reference;
mod remote;
mod replay;
mod schemes;
mod travel;
mod values;

use moeworks_moe::{MoeConfig, MoeWeights, NamedTensor, RouterKind, SharedWeights};
use moeworks_ops::Context;
use moeworks_tensor::{DType, Random, Tensor};

use crate::reference::{RefShared, RefWeights};

/// Returns the jitter factor of the element at `position`.
fn jitter_factor(random: &Random, position: u64, eps: f64) -> f64 {
    let byte = f64::from(random.byte(position) * 256.0);
    1.0 + eps * ((byte + 0.5) / 128.0 - 1.0)
}

/// Returns every scheme with a number of experts per token.
fn kinds() -> impl Iterator<Item = (RouterKind, usize)> {
    let plain = |kind| if kind == RouterKind::TopK { 3 } else { 2 };
    RouterKind::ALL.iter().map(move |&kind| (kind, kind.fixed_top_k().unwrap_or(plain(kind))))
}

/// Returns the configuration of a small SwiGLU layer, which tests modify.
fn config(width: usize, expert_width: usize, num_experts: usize, top_k: usize) -> MoeConfig {
    MoeConfig { normalize_weights: false, ..MoeConfig::plain(width, expert_width, num_experts, top_k) }
}

fn tensor(ctx: &Context, shape: &[usize], values: &[f64]) -> Tensor {
    Tensor::from_slice(ctx.pool(), shape, &values.iter().map(|&x| x as f32).collect::<Vec<f32>>())
}

/// Converts the reference's weights to the layer's.
fn layer_weights(ctx: &Context, config: &MoeConfig, weights: &RefWeights) -> MoeWeights {
    let a = config.activation.num_inputs();
    let (e, d, f, s) = (config.num_experts, config.width, config.expert_width, config.shared_width);
    MoeWeights {
        router: tensor(ctx, &[e, d], &weights.router),
        router_bias: None,
        gate_up: tensor(ctx, &[e, a * f, d], &weights.gate_up),
        down: tensor(ctx, &[e, d, f], &weights.down),
        biases: None,
        shared: weights.shared.as_ref().map(|RefShared { gate_up, down }| SharedWeights {
            gate_up: tensor(ctx, &[a * s, d], gate_up),
            down: tensor(ctx, &[d, s], down),
            gate: None,
        }),
        extras: Vec::new(),
        state: states(ctx, config, weights),
    }
}

fn states(ctx: &Context, config: &MoeConfig, weights: &RefWeights) -> Vec<NamedTensor> {
    let mut states = config.first_state(ctx);
    for state in states.iter_mut().filter(|state| state.name == "e_score_correction_bias") {
        state.tensor.f32s_mut().iter_mut().zip(&weights.bias).for_each(|(to, &bias)| *to = bias as f32);
    }
    states
}

/// The largest distance of a result from the reference.
#[derive(Clone, Copy)]
struct Tolerance {
    /// The bound as a share of the largest value of a tensor.
    relative: f64,
    /// A lower bound for that largest value, because sums that cancel keep the rounding errors of their terms.
    least: f64,
}

impl Tolerance {
    /// Widens the tolerance for sums of `num_terms` terms that may cancel: independent rounding errors add up as the
    /// square root of their number.
    fn of_sum(self, num_terms: usize) -> Self {
        Self { least: self.least * (num_terms as f64).sqrt().max(1.0), ..self }
    }
}

/// Asserts that `values` equal `expected` up to `relative` times the largest of them.
fn assert_close(name: &str, values: &Tensor, expected: &[f64], relative: f64) {
    assert_within(name, values, expected, Tolerance { relative, least: 0.01 });
}

fn assert_within(name: &str, values: &Tensor, expected: &[f64], tolerance: Tolerance) {
    assert_eq!(values.dtype(), DType::F32, "{name}");
    assert_eq!(values.len(), expected.len(), "{name}");
    let scale = expected.iter().fold(tolerance.least, |max, x| max.max(x.abs()));
    for (i, (&value, &expected)) in values.f32s().iter().zip(expected).enumerate() {
        let error = (f64::from(value) - expected).abs();
        assert!(error <= tolerance.relative * scale, "{name}[{i}]: {value}, expected {expected}");
    }
}
