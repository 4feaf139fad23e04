//! Rows sorted by expert: a stable counting sort of the choices of all tokens, with a limit for each expert.
//!
//! Experts serve choices by rank: the first choices of all tokens in the order of the tokens, then all second
//! choices, and so on (GShard, algorithm 1). Choices after the limit are dropped. Two passes over blocks of tokens:
//! count the choices of each cell (block, rank, expert) and turn counts into first positions; then give each choice
//! the next position of its cell. Work and memory are O(T K + E); blocks are independent within a pass.

use moeworks_tensor::{DType, Tensor};

use crate::Context;
use crate::cuda::{self, On};
use crate::experts::{ExpertRows, NO_ROW};
use crate::parallel::{Lent, piece_range};

/// Fewest tokens of a block. With many experts a block has as many tokens as there are experts, which bounds the
/// counts by the number of choices.
const MIN_TOKENS: usize = 256;

/// Choices sorted by expert. R is the number of choices that were kept.
#[derive(Clone)]
pub struct SortedChoices {
    /// `[E]` u32: choices of each expert, including dropped ones.
    pub counts: Tensor,
    /// `[E + 1]` u32: expert e has rows `offsets[e]..offsets[e + 1]`; the last entry is R.
    pub offsets: Tensor,
    /// `[R]` u32: the token of each row.
    pub tokens: Tensor,
    /// `[R]` f32: the weight of each row.
    pub weights: Tensor,
    /// `[T, K]` u32: the row of each choice; [`NO_ROW`] if it was dropped or is not an expert.
    pub token_rows: Tensor,
    /// The tiles of rows that a GPU listed while it sorted few choices.
    pub few_tiles: Option<Tensor>,
}

impl SortedChoices {
    /// Allocates the rows of `num_tokens` times `k` choices that are kept of `counts` `[E]`, at most `limit` per
    /// expert; `empty` makes tensors.
    pub(crate) fn with_room(
        ctx: &Context,
        counts: Tensor,
        limit: u32,
        num_tokens: usize,
        k: usize,
        empty: impl Fn(&[usize], DType) -> Tensor,
    ) -> Self {
        let mut offsets = ctx.zeros(&[counts.len() + 1], DType::U32);
        let mut num_rows = 0;
        for (&count, offset) in counts.u32s().iter().zip(&mut offsets.u32s_mut()[1..]) {
            num_rows += count.min(limit);
            *offset = num_rows;
        }
        Self {
            counts,
            offsets,
            tokens: empty(&[num_rows as usize], DType::U32),
            weights: empty(&[num_rows as usize], DType::F32),
            token_rows: empty(&[num_tokens, k], DType::U32),
            few_tiles: None,
        }
    }

    /// Returns the rows as operations on experts take them.
    #[must_use]
    pub fn rows(&self) -> ExpertRows<'_> {
        let rows =
            ExpertRows::new(&self.offsets, &self.tokens, &self.weights, &self.token_rows, self.token_rows.cols());
        ExpertRows { few_tiles: self.few_tiles.as_ref(), ..rows }
    }
}

/// Sorts the choices `ids` `[T, K]` (u32) with their `weights` `[T, K]` (f32) by expert. An expert keeps its first
/// `limit` choices, or all with `None`. An id that is not below `num_experts` is not counted and has no row.
#[must_use]
pub fn sort_choices(
    ctx: &Context,
    ids: &Tensor,
    weights: &Tensor,
    num_experts: usize,
    limit: Option<u32>,
) -> SortedChoices {
    sort(ctx, ids, weights, num_experts, Some(limit.unwrap_or(NO_ROW)))
}

/// Sorts choices without a limit where every id is below `num_experts`, as those of a top-k are. The number of rows
/// is then T K, known without waiting for a GPU. (There, any other id counts as the last expert's.)
#[must_use]
pub fn sort_all_choices(ctx: &Context, ids: &Tensor, weights: &Tensor, num_experts: usize) -> SortedChoices {
    sort(ctx, ids, weights, num_experts, None)
}

/// Sorts choices; without a limit every id must be an expert's.
fn sort(ctx: &Context, ids: &Tensor, weights: &Tensor, num_experts: usize, limit: Option<u32>) -> SortedChoices {
    assert_eq!(weights.shape(), ids.shape(), "sort_choices: weights {:?}, ids {:?}", weights.shape(), ids.shape());
    assert!(ids.len() < NO_ROW as usize, "too many choices to number as rows: {}", ids.len());
    match On::of(ctx).filter(|_| cuda::router::sorts(num_experts)) {
        Some(on) => cuda::router::sort_choices(on, ids, weights, num_experts, limit),
        None => sort_on_host(ctx, ids, weights, num_experts, limit.unwrap_or(NO_ROW)),
    }
}

fn sort_on_host(ctx: &Context, ids: &Tensor, weights: &Tensor, num_experts: usize, limit: u32) -> SortedChoices {
    let (num_tokens, k) = (ids.rows(), ids.cols());
    let (ids, weights) = (ids.u32s(), weights.f32s());
    let block_tokens = MIN_TOKENS.max(num_experts);
    let num_blocks = num_tokens.div_ceil(block_tokens);

    let mut cells = count_cells(ctx, ids, k, num_experts, block_tokens);
    let counts = first_positions(cells.u32s_mut(), num_blocks, k, num_experts);
    let counts = Tensor::from_slice(ctx.pool(), &[num_experts], &counts);
    let empty = |shape: &[usize], dtype| ctx.empty(shape, dtype);
    let mut sorted = SortedChoices::with_room(ctx, counts, limit, num_tokens, k, empty);
    let (offsets, cells) = (sorted.offsets.u32s(), Lent::new(cells.u32s_mut()));
    let (row_tokens, row_weights) = (Lent::new(sorted.tokens.u32s_mut()), Lent::new(sorted.weights.f32s_mut()));
    ctx.threads().run_pieces(sorted.token_rows.u32s_mut(), block_tokens * k, |block, token_rows| {
        let tokens = piece_range(block, block_tokens, num_tokens);
        // SAFETY: each block has cells of its own.
        let cells = unsafe { cells.range(block * k * num_experts..(block + 1) * k * num_experts) };
        for (token, rows) in tokens.zip(token_rows.chunks_exact_mut(k)) {
            for (choice, (row, cells)) in rows.iter_mut().zip(cells.chunks_exact_mut(num_experts)).enumerate() {
                *row = NO_ROW;
                let expert = ids[token * k + choice] as usize;
                let Some(cell) = cells.get_mut(expert) else { continue };
                let position = *cell;
                *cell += 1;
                if position >= limit {
                    continue;
                }
                *row = offsets[expert] + position;
                let at = *row as usize;
                // SAFETY: the cells' positions were counted from the same choices, so no two choices get the same
                // row.
                unsafe {
                    row_tokens.range(at..at + 1)[0] = token as u32;
                    row_weights.range(at..at + 1)[0] = weights[token * k + choice];
                }
            }
        }
    });
    sorted
}

/// Counts, `[blocks, K, E]`, how often each expert is the choice of each rank in each block of tokens.
fn count_cells(ctx: &Context, ids: &[u32], k: usize, num_experts: usize, block_tokens: usize) -> Tensor {
    let num_tokens = ids.len().checked_div(k).unwrap_or(0);
    let mut cells = ctx.zeros(&[num_tokens.div_ceil(block_tokens), k, num_experts], DType::U32);
    ctx.threads().run_pieces(cells.u32s_mut(), k * num_experts, |block, cells| {
        let tokens = piece_range(block, block_tokens, num_tokens);
        for ids in ids[tokens.start * k..tokens.end * k].chunks_exact(k) {
            for (&id, cells) in ids.iter().zip(cells.chunks_exact_mut(num_experts)) {
                if let Some(cell) = cells.get_mut(id as usize) {
                    *cell += 1;
                }
            }
        }
    });
    cells
}

/// Replaces the counts of the cells `[blocks, K, E]` by the position of each cell's first choice among the expert's:
/// ranks in order, and within a rank the blocks in order. Returns the experts' totals.
fn first_positions(cells: &mut [u32], num_blocks: usize, k: usize, num_experts: usize) -> Vec<u32> {
    let mut totals = vec![0; num_experts];
    for rank in 0..k {
        for block in 0..num_blocks {
            let cells = &mut cells[(block * k + rank) * num_experts..][..num_experts];
            for (cell, total) in cells.iter_mut().zip(&mut totals) {
                let first = *total;
                *total += *cell;
                *cell = first;
            }
        }
    }
    totals
}

#[cfg(test)]
#[path = "counting_sort_tests.rs"]
mod tests;
