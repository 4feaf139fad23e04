//! Merges the chunks of a layer into one, for the gradients of the weights.

use moeworks_ops::Context;
use moeworks_ops::counting_sort::{SortedChoices, sort_choices};
use moeworks_ops::experts::{ExpertRows, ExpertsSaved, NO_ROW, WeightGradInputs};
use moeworks_tensor::{DType, Tensor};

use super::EpDispatch;
use crate::NO_EXPERT;

/// All arrived tokens: inputs and output gradients `[A, D]` by source rank and token, and pre-activations and their
/// gradients `[R, A F]` by expert.
pub(crate) struct MergedChunks {
    x: Tensor,
    dy: Tensor,
    saved: ExpertsSaved,
    dh: Tensor,
    rows: SortedChoices,
}

/// The tensors of a chunk: inputs and output gradients of the arrived tokens, pre-activations and their gradients.
pub(super) struct ChunkTensors {
    pub(super) x: Tensor,
    pub(super) dy: Tensor,
    pub(super) h: Tensor,
    pub(super) dh: Tensor,
}

impl MergedChunks {
    /// Returns the inputs of the weight gradients.
    pub(crate) fn inputs(&self) -> (WeightGradInputs<'_>, ExpertRows<'_>) {
        let inputs = WeightGradInputs { x: &self.x, dy: &self.dy, saved: &self.saved, dh: &self.dh, weighed: None };
        (inputs, self.rows.rows())
    }

    /// Merges the tensors of the chunks of `ep_dispatch`. Without chunks the result is empty.
    pub(super) fn new(
        ctx: &Context,
        ep_dispatch: &EpDispatch,
        num_held: usize,
        width: usize,
        mut chunks: Vec<ChunkTensors>,
    ) -> Self {
        if chunks.len() == 1 {
            let ChunkTensors { x, dy, h, dh } = chunks.swap_remove(0);
            return Self { x, dy, saved: ExpertsSaved { h }, dh, rows: ep_dispatch.chunks()[0].arrived().clone() };
        }
        if chunks.is_empty() {
            return Self::empty(ctx, ep_dispatch, num_held, width);
        }
        let places = ep_dispatch.places();
        let rows = Self::sorted(ctx, ep_dispatch, &places, num_held);
        let moved: Vec<Vec<u32>> =
            ep_dispatch.chunks().iter().zip(&places).map(|(c, at)| moves(c.arrived(), at, &rows)).collect();
        let num_rows = rows.tokens.len();
        let num_arrived: usize = places.iter().map(Vec::len).sum();
        let merge = |tensor: fn(&ChunkTensors) -> &Tensor, num_rows: usize, to: &[Vec<u32>]| {
            let like = tensor(&chunks[0]);
            let mut whole = ctx.empty(&[num_rows, like.cols()], like.dtype());
            let bytes = like.cols() * like.dtype().size();
            for (chunk, to) in chunks.iter().zip(to) {
                for (row, &place) in tensor(chunk).bytes().chunks_exact(bytes.max(1)).zip(to) {
                    whole.bytes_mut()[place as usize * bytes..][..bytes].copy_from_slice(row);
                }
            }
            whole
        };
        let saved = ExpertsSaved { h: merge(|chunk| &chunk.h, num_rows, &moved) };
        let x = merge(|chunk| &chunk.x, num_arrived, &places);
        let dy = merge(|chunk| &chunk.dy, num_arrived, &places);
        Self { x, dy, saved, dh: merge(|chunk| &chunk.dh, num_rows, &moved), rows }
    }

    /// Sorts the choices of all chunks as if they had been one chunk.
    fn sorted(ctx: &Context, ep_dispatch: &EpDispatch, places: &[Vec<u32>], num_held: usize) -> SortedChoices {
        let k = ep_dispatch.num_choices();
        let shape = [places.iter().map(Vec::len).sum::<usize>(), k];
        let (mut ids, mut weights) = (ctx.empty(&shape, DType::U32), ctx.empty(&shape, DType::F32));
        ids.u32s_mut().fill(NO_EXPERT);
        for (chunk, places) in ep_dispatch.chunks().iter().zip(places) {
            let arrived = chunk.arrived();
            let experts =
                arrived.offsets.u32s().windows(2).zip(0..).flat_map(|(pair, e)| (pair[0]..pair[1]).map(move |_| e));
            let experts: Vec<u32> = experts.collect();
            for (slot, &row) in arrived.token_rows.u32s().iter().enumerate().filter(|(_, row)| **row != NO_ROW) {
                let at = places[slot / k] as usize * k + slot % k;
                ids.u32s_mut()[at] = experts[row as usize];
                weights.f32s_mut()[at] = arrived.weights.f32s()[row as usize];
            }
        }
        if num_held == 0 {
            return ep_dispatch.chunks()[0].arrived().clone();
        }
        sort_choices(ctx, &ids, &weights, num_held, None)
    }

    fn empty(ctx: &Context, ep_dispatch: &EpDispatch, num_held: usize, width: usize) -> Self {
        let nothing = |cols: usize, dtype| ctx.empty(&[0, cols], dtype);
        let rows = SortedChoices {
            counts: ctx.zeros(&[num_held], DType::U32),
            offsets: ctx.zeros(&[num_held + 1], DType::U32),
            tokens: ctx.empty(&[0], DType::U32),
            weights: ctx.empty(&[0], DType::F32),
            token_rows: nothing(ep_dispatch.num_choices(), DType::U32),
            few_tiles: None,
        };
        let none = nothing(width, DType::F32);
        let saved = ExpertsSaved { h: nothing(1, DType::F32) };
        Self { x: none.clone(), dy: none, dh: saved.h.clone(), saved, rows }
    }
}

/// Returns the position of each row of a chunk among the rows of all chunks.
fn moves(chunk: &SortedChoices, places: &[u32], all: &SortedChoices) -> Vec<u32> {
    let k = chunk.token_rows.cols();
    let mut to = vec![0; chunk.tokens.len()];
    for (slot, &row) in chunk.token_rows.u32s().iter().enumerate().filter(|(_, row)| **row != NO_ROW) {
        to[row as usize] = all.token_rows.u32s()[places[slot / k] as usize * k + slot % k];
    }
    to
}
