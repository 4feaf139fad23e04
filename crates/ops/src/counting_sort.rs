//! Rows sorted by expert: a stable counting sort of the choices of all tokens, with a limit for each expert.
//!
//! Experts serve choices by rank: the first choices of all tokens in the order of the tokens, then all second choices,
//! and so on (GShard, algorithm 1), and what comes after the limit is dropped. Two passes over blocks of tokens: count
//! the choices of each (block, rank, expert), turn counts into first positions, give each choice the next position of its
//! own cell. Work and memory are O(T K + E); no block depends on another within a pass.

use moeworks_tensor::{DType, Tensor};

use crate::Context;
use crate::cuda::{self, On};
use crate::experts::{ExpertRows, NO_ROW};
use crate::parallel::{Lent, piece_range};

/// Least number of tokens of a block; with many experts a block is as long as there are experts, which bounds the counts
/// by the number of choices.
const MIN_TOKENS: usize = 256;

/// Choices sorted by expert. R is the number of choices that were kept.
#[derive(Clone)]
pub struct SortedChoices {
    /// `[E]` u32: choices of each expert, before any is dropped.
    pub counts: Tensor,
    /// `[E + 1]` u32: expert e has rows `offsets[e]..offsets[e + 1]`; the last entry is R.
    pub offsets: Tensor,
    /// `[R]` u32: the token of each row.
    pub tokens: Tensor,
    /// `[R]` f32: the weight of each row.
    pub weights: Tensor,
    /// `[T, K]` u32: the row of each choice, [`NO_ROW`] if it was dropped or is none.
    pub token_rows: Tensor,
    /// The tiles of rows that a GPU listed with the sort of few choices.
    pub few_tiles: Option<Tensor>,
}

impl SortedChoices {
    /// Room for the rows of `choices` `[T, K]` that are kept of `counts` `[E]`, at most `limit` of each; `empty` makes tensors.
    pub(crate) fn with_room(
        ctx: &Context,
        counts: Tensor,
        limit: u32,
        choices: (usize, usize),
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
            token_rows: empty(&[choices.0, choices.1], DType::U32),
            few_tiles: None,
        }
    }

    /// What the operations on experts take.
    #[must_use]
    pub fn rows(&self) -> ExpertRows<'_> {
        let rows =
            ExpertRows::new(&self.offsets, &self.tokens, &self.weights, &self.token_rows, self.token_rows.cols());
        ExpertRows { few_tiles: self.few_tiles.as_ref(), ..rows }
    }
}

/// Sorts the choices `ids` `[T, K]` (u32) with their `weights` `[T, K]` (f32) by expert; an expert keeps its first
/// `limit`, all with `None`. An id that is not below `num_experts` is no choice: it is not counted and has no row.
#[must_use]
pub fn sort_choices(
    ctx: &Context,
    ids: &Tensor,
    weights: &Tensor,
    num_experts: usize,
    limit: Option<u32>,
) -> SortedChoices {
    sort(ctx, (ids, weights), num_experts, Some(limit.unwrap_or(NO_ROW)))
}

/// As [`sort_choices`] without a limit where every id is below `num_experts`, as a top-k's are: that there are T K rows is then known
/// beforehand, and nothing waits for a GPU. (There, any other id is taken for the last expert's.)
#[must_use]
pub fn sort_all_choices(ctx: &Context, ids: &Tensor, weights: &Tensor, num_experts: usize) -> SortedChoices {
    sort(ctx, (ids, weights), num_experts, None)
}

/// With no limit at all every id is an expert's.
fn sort(ctx: &Context, (ids, weights): (&Tensor, &Tensor), num_experts: usize, limit: Option<u32>) -> SortedChoices {
    assert_eq!(weights.shape(), ids.shape(), "sort_choices: weights {:?}, ids {:?}", weights.shape(), ids.shape());
    assert!(ids.len() < NO_ROW as usize, "{} choices are more than rows can be numbered", ids.len());
    match On::of(ctx).filter(|_| cuda::router::sorts(num_experts)) {
        Some(on) => cuda::router::sort_choices(on, (ids, weights), num_experts, limit),
        None => sort_in_host(ctx, (ids, weights), num_experts, limit.unwrap_or(NO_ROW)),
    }
}

fn sort_in_host(ctx: &Context, (ids, weights): (&Tensor, &Tensor), num_experts: usize, limit: u32) -> SortedChoices {
    let (num_tokens, k) = (ids.rows(), ids.cols());
    let (ids, weights) = (ids.u32s(), weights.f32s());
    let block_tokens = MIN_TOKENS.max(num_experts);
    let num_blocks = num_tokens.div_ceil(block_tokens);

    let mut cells = count_cells(ctx, ids, (num_tokens, k, num_experts), block_tokens);
    let counts = first_positions(cells.u32s_mut(), num_blocks, k, num_experts);
    let counts = Tensor::from_slice(ctx.pool(), &[num_experts], &counts);
    let empty = |shape: &[usize], dtype| ctx.empty(shape, dtype);
    let mut sorted = SortedChoices::with_room(ctx, counts, limit, (num_tokens, k), empty);
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
                // SAFETY: the cells' positions were counted from the same choices, so no two choices get the same row.
                unsafe {
                    row_tokens.range(at..at + 1)[0] = token as u32;
                    row_weights.range(at..at + 1)[0] = weights[token * k + choice];
                }
            }
        }
    });
    sorted
}

/// `[blocks, K, E]`: how often each expert is the choice of each rank in each block of tokens.
fn count_cells(
    ctx: &Context,
    ids: &[u32],
    (num_tokens, k, num_experts): (usize, usize, usize),
    block_tokens: usize,
) -> Tensor {
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

/// Replaces the counts of the cells `[blocks, K, E]` by the position among the expert's choices of the cell's first one:
/// ranks in order, within a rank the blocks in order. Returns the experts' totals.
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
