//! The gradient of attention's sinks.

use moeworks_tensor::Tensor;

use super::AttentionShape;
use crate::Context;
use crate::simd::{Float, with_float};

/// Tokens of a task.
const TOKENS: usize = 64;

/// Of each head, `-sum over queries of p (d_o . o)` with `p` the sink's share of the softmax, in f64: added up by tasks, and these in
/// their order.
pub(super) fn grads(
    ctx: &Context,
    d_o: &Tensor,
    (o, lse): (&Tensor, &Tensor),
    sinks: &[f32],
    shape: &AttentionShape,
) -> Vec<f64> {
    let num_heads = shape.num_heads;
    let mut sums = vec![0.0; (shape.batch * shape.seq_len).div_ceil(TOKENS) * num_heads];
    with_float!(d_o.dtype(), D => with_float!(o.dtype(), O => {
        let (d_o, o, lse) = (d_o.slice::<D>(), o.slice::<O>(), lse.f32s());
        ctx.threads().run_pieces(&mut sums, num_heads, |task, sums| {
            add_tokens(task * TOKENS, (d_o, o), (lse, sinks), shape, sums);
        });
    }));
    let of_tasks = || sums.chunks_exact(num_heads);
    (0..num_heads).map(|head| of_tasks().map(|sums| sums[head]).sum()).collect()
}

/// Adds what [`TOKENS`] tokens from `first` on give to each head.
fn add_tokens<D: Float, O: Float>(
    first: usize,
    (d_o, o): (&[D], &[O]),
    (lse, sinks): (&[f32], &[f32]),
    shape: &AttentionShape,
    sums: &mut [f64],
) {
    let (num_heads, dim) = (shape.num_heads, shape.value_dim);
    for token in first..(first + TOKENS).min(shape.batch * shape.seq_len) {
        let (batch, query) = (token / shape.seq_len, token % shape.seq_len);
        for (head, sum) in sums.iter_mut().enumerate() {
            let row = (token * num_heads + head) * dim..(token * num_heads + head + 1) * dim;
            let products = d_o[row.clone()].iter().zip(&o[row]).map(|(d, o)| f64::from(d.load()) * f64::from(o.load()));
            let log_sum = lse[(batch * num_heads + head) * shape.seq_len + query];
            *sum -= f64::from(sinks[head] - log_sum).exp() * products.sum::<f64>();
        }
    }
}
