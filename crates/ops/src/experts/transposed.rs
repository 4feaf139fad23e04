//! Experts whose matrices a file stores transposed, `[E, D, 2 F]` and `[E, F, D]`, the columns of gate and up
//! interleaved (GPT-OSS in floats). They are multiplied as they are stored.

use moeworks_tensor::{DType, Tensor};

use super::{Expert, groups};
use crate::activation::activate;
use crate::gemm::source::Source;
use crate::gemm::store::Store;
use crate::gemm::{self, Compute, Finish, Form, Group, Product};
use crate::linear::Write;
use crate::parallel::{Lent, piece_range};
use crate::simd::{Float, kernel};
use crate::{Activation, Context};

/// Multiplies each expert's rows of `a` by its matrix of a transposed stack `[E, K, N]`. With `tokens` the rows are
/// gathered by token, otherwise they are consecutive.
pub(super) fn product(
    ctx: &Context,
    a: &Tensor,
    tokens: Option<&[u32]>,
    base: &Tensor,
    experts: &[Expert],
    epilogue: &dyn Finish,
) {
    let (depth, columns) = (a.cols(), base.cols());
    let groups = groups(experts, |e, range| Group {
        a: tokens.map_or_else(|| Source::rows(a, range.start), |tokens| Source::gathered(a, &tokens[range.clone()])),
        b: Source::rows(base, e * depth),
        rows: range.len(),
        columns,
        depth,
    });
    let compute = Compute::from_dtype(base.dtype());
    gemm::run(ctx, &Product { form: Form::Nn, compute, groups: &groups, is_paired: false }, epilogue);
}

/// The activation between the two products, with the bias before it.
pub(super) struct Between<'a> {
    pub(super) activation: Activation,
    /// `[E, 2 F]`, the gate's first.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) experts: &'a [Expert],
}

/// Computes `h [R, 2 F]`, the gate's F columns first, and its activation `a [R, F]` from the first product, whose
/// columns are interleaved.
pub(super) fn activate_interleaved<T: Float>(
    ctx: &Context,
    x: &Tensor,
    tokens: Option<&[u32]>,
    base: &Tensor,
    between: &Between<'_>,
    h: &mut Tensor,
    a: &mut Tensor,
) {
    let (rows, af) = (h.rows(), h.cols());
    let mut sums = ctx.empty(&[rows, af], DType::F32);
    let offsets: Vec<_> = between.experts.iter().map(|(_, range)| range.start * af).collect();
    let store = Store { to: Lent::new(sums.f32s_mut()), offsets: &offsets, stride: af, write: Write::Replace };
    product(ctx, x, tokens, base, between.experts, &store);
    let (h, a, sums) = (Lent::new(h.slice_mut::<T>()), Lent::new(a.slice_mut::<T>()), sums.f32s());
    ctx.threads().run(rows.div_ceil(ROWS), |task| {
        for row in piece_range(task, ROWS, rows) {
            let (expert, _) = between.experts[between.experts.partition_point(|(_, range)| range.end <= row)];
            let bias = between.bias.map(|bias| &bias[expert * af..][..af]);
            // SAFETY: each row is one call's alone.
            let (h, a) = unsafe { (h.range(row * af..(row + 1) * af), a.range(row * af / 2..(row + 1) * af / 2)) };
            row_kernel::<T>(ctx.isa(), &sums[row * af..][..af], between.activation, bias, h, a);
        }
    });
}

/// Rows that a task activates.
const ROWS: usize = 4;

/// Columns that are activated at a time.
const PART: usize = 64;

kernel! {
    fn row_kernel<S: Level, T: Float>(
        sums: &[f32],
        activation: Activation,
        bias: Option<&[f32]>,
        h: &mut [T],
        a: &mut [T],
    ) {
        let f = a.len();
        let (gate_to, up_to) = h.split_at_mut(f);
        for start in (0..f).step_by(PART) {
            let end = (start + PART).min(f);
            let mut parts = [[0.0; PART]; 2];
            for (half, part) in parts.iter_mut().enumerate() {
                for (to, pair) in part.iter_mut().zip(sums[2 * start..2 * end].as_chunks::<2>().0) {
                    *to = pair[half];
                }
                if let Some(bias) = bias {
                    part.iter_mut().zip(&bias[half * f + start..half * f + end]).for_each(|(x, bias)| *x += bias);
                }
            }
            let [mut gate, mut up] = parts;
            // As in the other way the activation is taken of what is saved.
            for (to, part) in [(&mut gate_to[start..end], &mut gate), (&mut up_to[start..end], &mut up)] {
                for (to, x) in to.iter_mut().zip(part) {
                    *to = T::store(*x);
                    *x = to.load();
                }
            }
            activate::<S>(activation, &mut gate, &up);
            a[start..end].iter_mut().zip(&gate).for_each(|(to, x)| *to = T::store(*x));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::experts::{ExpertBiases, ExpertRows, ExpertWeights, ForwardOptions, experts_forward_with};
    use crate::test_data::{contexts, numbers, tensor};

    use super::*;

    /// Returns outputs and `h` of experts whose stacks are transposed, and of the same stacks in the usual order.
    fn both_ways(ctx: &Context, num_tokens: usize, dtype: DType, activation: Activation) -> [(Tensor, Tensor); 2] {
        let (d, f, e) = (36, 70, 3);
        let x = tensor(ctx, &[num_tokens, d], &numbers(num_tokens * d, 1), DType::F32);
        let base = |shape: [usize; 3], seed| tensor(ctx, &shape, &numbers(shape.iter().product(), seed), dtype);
        let gate_up = Tensor::transposed(ctx.pool(), base([e, d, 2 * f], 2), true).expect("a stack");
        let down = Tensor::transposed(ctx.pool(), base([e, f, d], 3), false).expect("a stack");
        let copies = [&gate_up, &down].map(|stack| stack.clone().copied(ctx.pool()));
        let biases =
            [(2 * f, 4), (d, 5)].map(|(len, seed)| tensor(ctx, &[e, len], &numbers(e * len, seed), DType::F32));
        let biases = Some(ExpertBiases { gate_up: &biases[0], down: &biases[1] });
        // Expert 0 gets every other token, expert 2 the others, expert 1 none.
        let half = num_tokens.div_ceil(2) as u32;
        let tokens: Vec<u32> = (0..num_tokens as u32).step_by(2).chain((1..num_tokens as u32).step_by(2)).collect();
        let mut token_rows = vec![0; num_tokens];
        tokens.iter().zip(0..).for_each(|(&token, row)| token_rows[token as usize] = row);
        let (weights, offsets) = (vec![0.5; num_tokens], [0, half, half, num_tokens as u32]);
        let rows = ExpertRows::new(&offsets, &tokens, &weights, &token_rows, 1);
        [[&gate_up, &down], [&copies[0], &copies[1]]].map(|[gate_up, down]| {
            let weights = ExpertWeights { gate_up, down, activation };
            let options = ForwardOptions { biases, ..ForwardOptions::default() };
            let (y, saved) = experts_forward_with(ctx, &x, weights, rows, options);
            let saved = saved.expect("what a backward pass needs");
            (y, saved.h)
        })
    }

    #[test]
    fn experts_that_are_turned_give_what_they_give_in_the_usual_order() {
        for ctx in contexts() {
            for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 1e-5), (DType::BF16, 2e-2)] {
                for num_tokens in [1, 2, 9, 40, 200] {
                    let clamped = Activation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
                    let [(y, h), (exact, exact_h)] = both_ways(&ctx, num_tokens, dtype, clamped);
                    for (found, exact) in [(y, exact), (h, exact_h)] {
                        let (found, exact) = (found.to_f32_vec(), exact.to_f32_vec());
                        let largest = exact.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
                        let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= tolerance * largest;
                        assert!(found.iter().zip(&exact).all(is_close), "{dtype:?}, {num_tokens}, {:?}", ctx.isa());
                    }
                }
            }
        }
    }
}
