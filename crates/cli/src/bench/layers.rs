//! `moeworks bench layers`: whole MoE layers of four published shapes from one token to thousands, forward and both passes, in f32 and
//! bf16, each against the limit that binds it: the peak of products, or what reading the touched weights takes at the rate of reading
//! memory meanwhile, and with both passes reading them again and writing their gradients at that of copying.

use std::time::Instant;

use moeworks_moe::RouterConfig;
use moeworks_ops::measure::{BenchResult, Cost};
use moeworks_ops::peak::{Memory, Peaks};
use moeworks_ops::{Activation, Context};
use moeworks_tensor::DType;

use super::median;
use super::moe::{Layer, Shape};
use crate::failure::Failure;

/// A layer's name, D, F, E, K and activation: those that `bench/compare/run moe` holds beside PyTorch.
type Named = (&'static str, (usize, usize, usize, usize), Activation);

const LAYERS: [Named; 4] = [
    ("a", (2048, 1024, 64, 8), Activation::SwiGlu),
    ("b", (1024, 3584, 8, 2), Activation::SwiGlu),
    ("c", (768, 3072, 64, 1), Activation::Gelu),
    ("d", (1024, 384, 128, 8), Activation::SwiGlu),
];

const TOKENS: [usize; 4] = [1, 16, 512, 4096];

/// Few tokens come in so many sets, each for other experts, so that weights come from memory as those of a model's many layers do.
const SETS: usize = 8;
const MAX_TOKENS_IN_SETS: usize = 16;

/// Times of a case go on for so long, and are so many at least.
const SECONDS: f64 = 0.4;
const MIN_TIMES: usize = 3;

/// Seconds of a case between two measurements of memory, whose rate is another from one second to the next where machines are shared.
const SECONDS_APART: f64 = 0.02;

/// What a pass of `tokens` tokens through a layer has to do when they touch `num_used` experts.
pub(super) fn cost(shape: Shape, (tokens, num_used): (usize, usize), is_both: bool) -> Cost {
    let Shape { d, f, e, k, activation, dtype, gradients } = shape;
    let of_expert = (activation.num_inputs() + 1) * d * f;
    let (weights, rows) = (num_used * of_expert, tokens * d);
    let (size, wide) = (dtype.size(), DType::F32.size());
    let flops = 2 * tokens * (k * of_expert + e * d);
    let forward = Cost { flops: flops as f64, dtype, ..Cost::of_bytes(weights * size + rows * size, rows * wide) };
    if !is_both {
        return forward;
    }
    // Backward reads the weights once more, writes gradients of them, and reads and writes those of rows.
    let backward = Cost::of_bytes(weights * size + rows * wide, weights * gradients.size() + rows * wide);
    forward + Cost { flops: 2.0 * forward.flops, ..backward }
}

/// Hands each case whose name contains `filter` to `report` as it comes. All of them take about two minutes.
pub(super) fn measure(
    ctx: &Context,
    peaks: &Peaks,
    filter: &str,
    mut report: impl FnMut(&BenchResult),
) -> Result<(), Failure> {
    let mut memory = ctx.gpu().is_none().then(Memory::default);
    for (name, (d, f, e, k), activation) in LAYERS {
        for dtype in [DType::F32, DType::BF16] {
            let shape = Shape { d, f, e, k, activation, dtype, gradients: dtype };
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
            let mut layer = Layer::new(ctx, shape, &RouterConfig::default())?;
            for (name, tokens, is_both) in cases {
                let (cost, seconds, peaks) = time(ctx, &mut layer, (tokens, is_both), (memory.as_mut(), *peaks));
                report(&BenchResult::new(name, cost, seconds, &peaks));
            }
            drop(layer);
            // The next layer's tensors are of other sizes.
            ctx.pool().trim();
        }
    }
    Ok(())
}

/// What a pass has to do, the median of its seconds, and the peaks with medians of the memory's rates meanwhile.
fn time(
    ctx: &Context,
    layer: &mut Layer,
    (tokens, is_both): (usize, bool),
    (mut memory, mut peaks): (Option<&mut Memory>, Peaks),
) -> (Cost, f64, Peaks) {
    let num_sets = if tokens > MAX_TOKENS_IN_SETS { 1 } else { SETS };
    let sets: Vec<_> = (0..num_sets).map(|set| layer.tokens(ctx, tokens, set)).collect();
    let num_used = sets.iter().map(|(x, _)| layer.num_used(ctx, x)).sum::<usize>();
    let cost = cost(layer.shape, (num_sets * tokens, num_used), is_both);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// One token and two of eight experts with three matrices of 4 x 6.
    #[test]
    fn the_cost_of_a_pass_counts_products_of_choices_and_weights_that_are_touched() {
        let (activation, dtype, gradients) = (Activation::SwiGlu, DType::BF16, DType::F32);
        let shape = Shape { d: 4, f: 6, e: 8, k: 2, activation, dtype, gradients };
        let weights = 2 * 3 * 4 * 6;
        let forward = cost(shape, (1, 2), false);
        let counted = |cost: &Cost| [cost.flops, cost.bytes, cost.written].map(|count| count as usize);
        assert_eq!(counted(&forward), [2 * (weights + 8 * 4), 2 * weights + 4 * 6, 4 * 4]);
        let both = counted(&cost(shape, (1, 2), true));
        let backward = [4 * (weights + 8 * 4), (2 + 4) * weights + 4 * 8, 4 * weights + 4 * 4];
        assert_eq!(both.to_vec(), counted(&forward).iter().zip(backward).map(|(a, b)| a + b).collect::<Vec<usize>>());
    }
}
