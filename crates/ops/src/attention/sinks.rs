//! The gradient of attention's sinks.

use moeworks_tensor::Tensor;

use super::sequences::{AttentionHeads, OwnedTask, Sequence, TaskList};
use crate::Context;
use crate::linear::Write;
use crate::simd::{Float, with_float};

/// Tokens of a task.
const TOKENS: usize = 64;

/// The inputs of the gradients: the gradient of the outputs, the outputs, the log-sums of softmaxes and the sinks.
#[derive(Clone, Copy)]
pub(super) struct SinkInputs<'a> {
    pub(super) d_o: &'a Tensor,
    pub(super) o: &'a Tensor,
    pub(super) lse: &'a Tensor,
    pub(super) sinks: &'a [f32],
}

/// Returns for each head `-sum over queries of p (d_o . o)` in f64, with `p` the sink's share of the softmax. Tasks
/// sum over pieces of the queries, and their sums are added in order, so that the bits do not depend on the number of
/// threads. Queries of consecutive sequences are consecutive rows.
pub(super) fn grads(
    ctx: &Context,
    inputs: SinkInputs<'_>,
    heads: &AttentionHeads,
    sequences: &[Sequence<'_>],
) -> Vec<f64> {
    let num_heads = heads.num_heads;
    let tokens = TaskList::new(sequences.iter().map(|sequence| sequence.num_queries));
    let mut sums = vec![0.0; tokens.len().div_ceil(TOKENS) * num_heads];
    with_float!(inputs.d_o.dtype(), D => with_float!(inputs.o.dtype(), O => {
        ctx.threads().run_pieces(&mut sums, num_heads, |task, sums| {
            for token in task * TOKENS..((task + 1) * TOKENS).min(tokens.len()) {
                let OwnedTask { owner, index: query } = tokens.find(token);
                add_query::<D, O>(inputs, &sequences[owner], query, sums);
            }
        });
    }));
    let of_tasks = || sums.chunks_exact(num_heads);
    (0..num_heads).map(|head| of_tasks().map(|sums| sums[head]).sum()).collect()
}

/// Writes gradients of sinks, or adds them to those in `d_sinks`.
pub(super) fn write(grads: Vec<f64>, write: Write, d_sinks: &mut Tensor) {
    for (to, grad) in d_sinks.f32s_mut().iter_mut().zip(grads) {
        *to = if write == Write::Add { *to + grad as f32 } else { grad as f32 };
    }
}

/// Adds the contribution of a query of a sequence to each head's sum.
fn add_query<D: Float, O: Float>(inputs: SinkInputs<'_>, sequence: &Sequence<'_>, query: usize, sums: &mut [f64]) {
    let AttentionHeads { num_heads, value_dim: dim, .. } = sequence.heads;
    let (d_o, o, lse) = (inputs.d_o.slice::<D>(), inputs.o.slice::<O>(), inputs.lse.f32s());
    let token = sequence.first_query + query;
    for (head, sum) in sums.iter_mut().enumerate() {
        let row = (token * num_heads + head) * dim..(token * num_heads + head + 1) * dim;
        let products = d_o[row.clone()].iter().zip(&o[row]).map(|(d, o)| f64::from(d.load()) * f64::from(o.load()));
        let log_sum = lse[sequence.statistic(query, head)];
        *sum -= f64::from(inputs.sinks[head] - log_sum).exp() * products.sum::<f64>();
    }
}
