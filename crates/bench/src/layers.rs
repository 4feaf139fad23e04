//! Times whole MoE layers of four published shapes with one to thousands of tokens, forward and with backward, in f32
//! and bf16.
//!
//! The limit is the peak of products, or the time of reading the used weights at the rate of memory measured in
//! between. With backward, the weights are read again and their gradients written at the rate of copying.

use std::time::Instant;

use moeworks_moe::{ConfigError, LossGrad, RouterConfig, RouterInput, WgradTarget};
use moeworks_ops::linear::Write;
use moeworks_ops::peak::{Memory, Peaks};
use moeworks_ops::{Activation, Context};
use moeworks_tensor::DType;

use crate::case::{CaseResult, Cost};
use crate::moe_layer::{LayerShape, TimedLayer};
use crate::timing::{best_seconds_of_many, median};

/// The shape of a published MoE layer.
struct PublishedLayer {
    name: &'static str,
    width: usize,
    expert_width: usize,
    num_experts: usize,
    top_k: usize,
    activation: Activation,
}

/// The layers that `bench/compare/run moe` compares with PyTorch.
const LAYERS: [PublishedLayer; 4] = [
    PublishedLayer {
        name: "a",
        width: 2048,
        expert_width: 1024,
        num_experts: 64,
        top_k: 8,
        activation: Activation::SwiGlu,
    },
    PublishedLayer {
        name: "b",
        width: 1024,
        expert_width: 3584,
        num_experts: 8,
        top_k: 2,
        activation: Activation::SwiGlu,
    },
    PublishedLayer {
        name: "c",
        width: 768,
        expert_width: 3072,
        num_experts: 64,
        top_k: 1,
        activation: Activation::Gelu,
    },
    PublishedLayer {
        name: "d",
        width: 1024,
        expert_width: 384,
        num_experts: 128,
        top_k: 8,
        activation: Activation::SwiGlu,
    },
];

const TOKENS: [usize; 4] = [1, 16, 512, 4096];

/// The number of sets of few tokens. Each set uses other experts, so that weights are read from memory as in a model
/// of many layers.
const SETS: usize = 8;
const MAX_TOKENS_IN_SETS: usize = 16;

/// The measurement time of a case in seconds, and its smallest number of runs.
const SECONDS: f64 = 0.4;
const MIN_TIMES: usize = 3;

/// The time between two measurements of memory in seconds. Its rate changes within seconds on a shared machine.
const SECONDS_APART: f64 = 0.02;

/// Returns the minimal work of a pass of `tokens` tokens through a layer in which they use `num_used` experts.
fn cost(shape: LayerShape, tokens: usize, num_used: usize, is_both: bool) -> Cost {
    let LayerShape { d, f, e, k, activation, dtype, gradients } = shape;
    let of_expert = (activation.num_inputs() + 1) * d * f;
    let (weights, rows) = (num_used * of_expert, tokens * d);
    let (size, wide) = (dtype.size(), DType::F32.size());
    let flops = 2 * tokens * (k * of_expert + e * d);
    let forward = Cost { flops: flops as f64, dtype, ..Cost::from_bytes(weights * size + rows * size, rows * wide) };
    if !is_both {
        return forward;
    }
    // Backward reads the weights again, writes their gradients, and reads and writes the gradients of rows.
    let backward = Cost::from_bytes(weights * size + rows * wide, weights * gradients.size() + rows * wide);
    forward + Cost { flops: 2.0 * forward.flops, ..backward }
}

/// Times each case whose name contains `filter` and passes it to `report`. All of them take about two minutes.
///
/// # Errors
/// [`ConfigError`] where a layer cannot have its shape.
pub fn measure(
    ctx: &Context,
    peaks: &Peaks,
    filter: &str,
    mut report: impl FnMut(&CaseResult),
) -> Result<(), ConfigError> {
    let mut memory = ctx.gpu().is_none().then(Memory::default);
    for PublishedLayer { name, width: d, expert_width: f, num_experts: e, top_k: k, activation } in LAYERS {
        for dtype in [DType::F32, DType::BF16] {
            let shape = LayerShape { d, f, e, k, activation, dtype, gradients: dtype };
            let passes = |tokens: usize| [false, true].map(|is_both| (tokens, is_both));
            let cases: Vec<(String, usize, bool)> = TOKENS
                .into_iter()
                .flat_map(passes)
                .map(|(tokens, is_both)| {
                    let pass = if is_both { "both" } else { "forward" };
                    (format!("layer {name} D {d} F {f} E {e} K {k} T {tokens} {pass}, {dtype:?}"), tokens, is_both)
                })
                .filter(|(name, ..)| name.contains(filter))
                .collect();
            if cases.is_empty() {
                continue;
            }
            let mut layer = TimedLayer::new(ctx, shape, &RouterConfig::default())?;
            for (name, tokens, is_both) in cases {
                let (cost, seconds, peaks) = time(ctx, &mut layer, tokens, is_both, memory.as_mut(), *peaks);
                report(&CaseResult::new(name, cost, seconds, &peaks));
            }
            drop(layer);
            // The next layer's tensors have other sizes, so the pool's memory is freed.
            ctx.pool().trim();
        }
    }
    Ok(())
}

/// Returns the work of a pass, its median time in seconds, and the peaks with the median rates of memory measured in
/// between.
fn time(
    ctx: &Context,
    layer: &mut TimedLayer,
    tokens: usize,
    is_both: bool,
    mut memory: Option<&mut Memory>,
    mut peaks: Peaks,
) -> (Cost, f64, Peaks) {
    let num_sets = if tokens > MAX_TOKENS_IN_SETS { 1 } else { SETS };
    let sets: Vec<_> = (0..num_sets).map(|set| layer.tokens(ctx, tokens, set)).collect();
    let num_used = sets.iter().map(|(x, _)| layer.num_used(ctx, x)).sum::<usize>();
    let cost = cost(layer.shape, num_sets * tokens, num_used, is_both);
    let (mut times, mut reads, mut copies) = (Vec::new(), Vec::new(), Vec::new());
    let (mut passed, mut measured_at) = (0.0, 0.0);
    while times.len() < MIN_TIMES || passed < SECONDS {
        if let Some(memory) = &mut memory
            && (reads.is_empty() || passed - measured_at >= SECONDS_APART)
        {
            reads.push(memory.read(ctx));
            copies.push(memory.copy(ctx));
            measured_at = passed;
        }
        let start = Instant::now();
        for (x, dy) in &sets {
            layer.pass(ctx, x, dy, is_both);
        }
        ctx.wait();
        let seconds = start.elapsed().as_secs_f64();
        passed += seconds;
        times.push(seconds / num_sets as f64);
    }
    if !reads.is_empty() {
        (peaks.read_bytes_per_s, peaks.copy_bytes_per_s) = (median(reads), Some(median(copies)));
    }
    (cost.times(1.0 / num_sets as f64), median(times), peaks)
}

/// Times one whole MoE layer, forward and backward with weight gradients, router, dispatch and combine included.
/// Returns nothing if the name of the case does not contain `filter`.
///
/// # Errors
/// [`ConfigError`] where the layer cannot have its shape.
pub fn measure_backward(
    ctx: &Context,
    peaks: &Peaks,
    dtype: DType,
    filter: &str,
) -> Result<Option<CaseResult>, ConfigError> {
    let (t, d, f, e, k) = (1024, 1024, 512, 32, 4);
    let name = format!("MoE layer forward and backward T {t} D {d} F {f} E {e} K {k}, {dtype:?}");
    if !name.contains(filter) {
        return Ok(None);
    }
    let shape = LayerShape { d, f, e, k, activation: Activation::SwiGlu, dtype, gradients: DType::F32 };
    let cost = cost(shape, t, e, true);
    let mut made = TimedLayer::new(ctx, shape, &RouterConfig::default())?;
    let (x, dy) = made.tokens(ctx, t, 0);
    let losses = LossGrad { balance: vec![1e-5; e], z: 1e-3, ..LossGrad::default() };
    let seconds = best_seconds_of_many(ctx, || {
        let (layer, weights, grads) = made.parts(ctx);
        let (_, saved) = layer.forward(ctx, weights, &x, &RouterInput::default());
        let (_, task) = layer.backward(ctx, weights, &saved, &dy, &losses);
        task.run(ctx, WgradTarget::new(Write::Replace, grads));
    });
    Ok(Some(CaseResult::new(name, cost, seconds, peaks)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One token and two of eight experts with three matrices of 4 x 6.
    #[test]
    fn the_cost_of_a_pass_counts_products_of_choices_and_weights_that_are_touched() {
        let (activation, dtype, gradients) = (Activation::SwiGlu, DType::BF16, DType::F32);
        let shape = LayerShape { d: 4, f: 6, e: 8, k: 2, activation, dtype, gradients };
        let weights = 2 * 3 * 4 * 6;
        let forward = cost(shape, 1, 2, false);
        let counted = |cost: &Cost| [cost.flops, cost.bytes, cost.written].map(|count| count as usize);
        assert_eq!(counted(&forward), [2 * (weights + 8 * 4), 2 * weights + 4 * 6, 4 * 4]);
        let both = counted(&cost(shape, 1, 2, true));
        let backward = [4 * (weights + 8 * 4), (2 + 4) * weights + 4 * 8, 4 * weights + 4 * 4];
        assert_eq!(both.to_vec(), counted(&forward).iter().zip(backward).map(|(a, b)| a + b).collect::<Vec<usize>>());
    }
}
