//! The blocks of a layer, each in explicit phases: forward, backward, weight gradient.
//!
//! A block is pre-norm and residual: `y = x + f(norm(x))`. Forward gives `y` and what backward needs; backward gives the
//! gradient of `x` at once, writes the (small) gradients of norm weights, and leaves the matrices' gradients as a task.

pub(crate) mod attention;
pub(crate) mod cross;
pub(crate) mod feed_forward;
mod heads;
mod latent;
pub(crate) mod norm;
mod projection;
pub(crate) mod relative;
pub(crate) mod stack;
pub(crate) mod training;

use std::sync::Arc;

use moeworks_ops::Context;
use moeworks_ops::experts::AllRows;
use moeworks_ops::linear::Write;
use moeworks_ops::rope::RopeTable;
use moeworks_tensor::{DType, Tensor};

pub use cross::Memory;
use relative::Relative;
use training::Flow;

use crate::tensor_ranks::TensorRanks;

/// What all layers of one pass share.
pub(crate) struct Pass<'a> {
    pub(crate) ctx: &'a Context,
    /// None without a rotary embedding.
    pub(crate) rope: Option<Arc<RopeTable>>,
    /// What is added to scores by distance, where positions are relative.
    pub(crate) relative: Option<Relative>,
    /// What the decoder's layers attend to besides.
    pub(crate) memory: Option<&'a Memory>,
    /// `[T]` u32: the position of each token in its sequence.
    pub(crate) positions: Tensor,
    /// The first of these positions.
    pub(crate) start: usize,
    pub(crate) num_sequences: usize,
    pub(crate) seq_len: usize,
    /// The ranks that hold the matrices between them and make the same pass, if there are several.
    pub(crate) tensor: Option<&'a TensorRanks>,
    /// A dense feed-forward as one expert that takes every row.
    pub(crate) all_rows: AllRows,
}

impl<'a> Pass<'a> {
    /// A pass over `num_sequences` sequences of `seq_len` tokens, the first of which is at position `start`.
    pub(crate) fn new(
        ctx: &'a Context,
        rope: Option<Arc<RopeTable>>,
        num_sequences: usize,
        seq_len: usize,
        start: usize,
    ) -> Self {
        let tokens = num_sequences * seq_len;
        let mut positions = ctx.empty(&[tokens], DType::U32);
        for (t, position) in positions.u32s_mut().iter_mut().enumerate() {
            *position = (start + t % seq_len) as u32;
        }
        let (all_rows, tensor) = (AllRows::new(ctx, tokens), None);
        Self { ctx, rope, relative: None, memory: None, positions, start, num_sequences, seq_len, tensor, all_rows }
    }

    /// The gradient of the weights of relative positions, where there are such, from what went back through the layers.
    pub(crate) fn relative_backward(&self, flow: &Flow, write: Write, grads: Option<&mut Tensor>) {
        if let (Some(relative), Some(d_bias), Some(grads)) = (&self.relative, &flow.d_bias, grads) {
            relative.backward(d_bias, write, grads);
        }
    }
}
