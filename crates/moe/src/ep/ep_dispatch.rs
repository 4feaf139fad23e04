//! Expert-parallel dispatch and combine: sends tokens to the ranks of their experts and brings the results back, in
//! chunks.
//!
//! A token is sent once to each rank that holds some of its experts, together with its choices. That rank computes
//! the experts' outputs and returns their weighted sum. A chunk is a run of tokens. All chunks are dispatched before
//! the first is combined, and each is in flight while another is computed.

use std::ops::Range;
use std::time::Instant;

use moeworks_comm::{Cuts, PendingCombine, Reduce, RowPlan};
use moeworks_ops::Context;
use moeworks_ops::counting_sort::{SortedChoices, sort_choices};
use moeworks_ops::experts::NO_ROW;
use moeworks_plan::Wire;
use moeworks_tensor::{DType, Tensor};

use super::{Bytes, LayerRanks};
use crate::{Dispatch, NO_EXPERT};

/// The ranks that this rank's tokens go to, and the tokens that arrive from other ranks.
pub(crate) struct EpDispatch {
    ranks: LayerRanks,
    /// Empty if no token moves, or if the ranks could not agree.
    chunks: Vec<Chunk>,
    num_choices: usize,
}

/// A run of this rank's tokens, and the A tokens that arrive from all ranks in the same chunk.
pub(crate) struct Chunk {
    plan: RowPlan,
    /// The choices `[A, K]` of the arrived tokens. Only choices of experts held here have a row.
    arrived: SortedChoices,
    /// The tokens that other ranks get or give, whichever are more.
    remote_tokens: Bytes,
}

/// Rows `[T, D]` to send to the ranks of their experts, and their format on the wire.
#[derive(Clone, Copy)]
pub(crate) struct SentRows<'a> {
    pub(crate) rows: &'a Tensor,
    pub(crate) wire: Wire,
}

/// The tensors that a chunk's work sends back, each with its format on the wire.
pub(crate) type Outcome = Vec<(Tensor, Wire)>;

/// The expert number of a choice without a row, in the f32 rows (expert numbers, then weights) that describe a
/// token's choices.
const NOWHERE: f32 = -1.0;

/// An exchange under way, and the time at which it began.
struct Started<T> {
    at: Instant,
    exchange: T,
}

/// Combines under way.
pub(crate) struct Returning<'a> {
    chunks: Vec<(&'a Chunk, Started<Vec<ReturningTensor>>)>,
}

/// A tensor on its way back to the ranks of its tokens, and that of their sums.
struct ReturningTensor {
    started: Option<PendingCombine>,
    shape: [usize; 2],
    dtype: DType,
    /// Bytes of a row on the wire.
    row_bytes: usize,
}

impl Chunk {
    /// Returns the arrived choices in the form that the operations on experts take.
    pub(crate) fn arrived(&self) -> &SortedChoices {
        &self.arrived
    }

    /// Counts the rows that the experts held here compute.
    pub(crate) fn num_rows(&self) -> usize {
        self.arrived.rows().offsets.last().map_or(0, |&end| end as usize)
    }

    /// Returns A, the number of arrived tokens.
    pub(crate) fn num_arrived(&self) -> usize {
        self.plan.num_received()
    }
}

impl EpDispatch {
    /// Plans the dispatch of the tokens of `dispatch`, with `num_choices` choices each, in `num_chunks` chunks.
    /// Tokens go to all experts except those fetched to this rank (`is_fetched`). The ranks exchange the numbers of
    /// tokens and their choices.
    pub(crate) fn new(
        ctx: &Context,
        ranks: &LayerRanks,
        dispatch: &Dispatch,
        num_choices: usize,
        num_chunks: usize,
        is_fetched: impl Fn(usize) -> bool,
    ) -> Self {
        if num_chunks == 0 {
            return Self { ranks: ranks.clone(), chunks: Vec::new(), num_choices };
        }
        // With some routers K depends on the tokens, so the ranks agree on the largest.
        let num_own_tokens = dispatch.token_rows().len() / num_choices.max(1);
        let mut largest = [num_choices, num_own_tokens].map(|count| count as u32);
        ranks.attempt((), || ranks.group().all_reduce(&mut largest, Reduce::Max));
        let (num_own, [num_choices, most_tokens]) = (num_choices, largest.map(|count| count as usize));
        let choices = choices(ctx, dispatch, num_own, num_choices, is_fetched);
        let num_tokens = choices.rows();
        let ends: Vec<usize> = (1..=num_chunks).map(|chunk| num_tokens * chunk / num_chunks).collect();
        let targets = Targets::new(ranks, &choices);
        let lists: Vec<&[usize]> = (0..num_tokens).map(|token| targets.token(token)).collect();
        let algorithm = ranks.exchange().algorithm;
        let cuts = Cuts { ends: &ends, num_parts: ranks.hop_parts(most_tokens / num_chunks) };
        let plans = ranks.attempt(Vec::new(), || RowPlan::in_chunks(ranks.hierarchy(), algorithm, &lists, cuts));
        let started: Vec<_> = plans.iter().map(|plan| ranks.start_dispatch(plan, &choices, Wire::F32)).collect();
        let told = plans.iter().zip(started).map(|(plan, started)| {
            let nothing = || {
                let mut nothing = ctx.empty(&[plan.num_received(), 2 * num_choices], DType::F32);
                nothing.f32s_mut().fill(NOWHERE);
                nothing
            };
            ranks.finish_dispatch(ctx, plan, started).unwrap_or_else(nothing)
        });
        let told: Vec<Tensor> = told.collect();
        let chunk = |(plan, told): (RowPlan, Tensor)| {
            let arrived = own_choices(ctx, ranks, plan.recv_counts(), &told);
            let remote_tokens = remote_tokens(ranks, &plan, &lists);
            Chunk { plan, arrived, remote_tokens }
        };
        Self { ranks: ranks.clone(), chunks: plans.into_iter().zip(told).map(chunk).collect(), num_choices }
    }

    /// Returns the chunks, in the order of tokens.
    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Dispatches `rows [T, D]` in the format of `wire` and computes, chunk by chunk. `meanwhile` runs while the
    /// first chunk is in flight. `work` turns the arrived rows `[A, D]` of a chunk into the tensors to send back.
    /// Returns the combines, which are under way.
    pub(crate) fn dispatch(
        &self,
        ctx: &Context,
        SentRows { rows, wire }: SentRows<'_>,
        meanwhile: impl FnOnce(),
        mut work: impl FnMut(usize, &Chunk, Tensor) -> Outcome,
    ) -> Returning<'_> {
        let ranks = &self.ranks;
        let start_dispatch =
            |chunk: &Chunk| Started { at: Instant::now(), exchange: ranks.start_dispatch(&chunk.plan, rows, wire) };
        let mut next = self.chunks.first().map(start_dispatch);
        meanwhile();
        let mut returning = Vec::with_capacity(self.chunks.len());
        for (index, chunk) in self.chunks.iter().enumerate() {
            let started = next.take();
            next = self.chunks.get(index + 1).map(start_dispatch);
            let zeros = || ctx.zeros(&[chunk.num_arrived(), rows.cols()], rows.dtype());
            let arrived = started.and_then(|Started { at, exchange }| {
                let bytes = chunk.remote_tokens.times(wire.row_bytes(rows.cols()));
                ranks.finish_exchange(at, bytes, || ranks.finish_dispatch(ctx, &chunk.plan, exchange))
            });
            let done = work(index, chunk, arrived.unwrap_or_else(zeros));
            let at = Instant::now();
            let started = done.into_iter().map(|(part, wire)| {
                let shape = [chunk.plan.rows().len(), part.cols()];
                let started = ranks.start_combine(&chunk.plan, &part, wire);
                ReturningTensor { started, shape, dtype: part.dtype(), row_bytes: wire.row_bytes(part.cols()) }
            });
            returning.push((chunk, Started { at, exchange: started.collect::<Vec<_>>() }));
        }
        Returning { chunks: returning }
    }

    /// Finishes the combines. `home` receives each chunk's range of tokens and, for each of the tensors sent back,
    /// the sums that came, `[tokens, ..]`.
    pub(crate) fn combine(
        &self,
        ctx: &Context,
        returning: Returning<'_>,
        mut home: impl FnMut(Range<usize>, Vec<Tensor>),
    ) {
        let ranks = &self.ranks;
        for (chunk, Started { at, exchange: parts }) in returning.chunks {
            let bytes = chunk.remote_tokens.times(parts.iter().map(|part| part.row_bytes).sum());
            let sum = |ReturningTensor { started, shape, dtype, .. }| {
                ranks.finish_combine(ctx, &chunk.plan, started).unwrap_or_else(|| ctx.zeros(&shape, dtype))
            };
            let sums = ranks.finish_exchange(at, bytes, || parts.into_iter().map(sum).collect());
            home(chunk.plan.rows(), sums);
        }
    }

    /// Returns K: the most choices that a token of any rank has.
    pub(crate) fn num_choices(&self) -> usize {
        self.num_choices
    }

    /// Returns for each chunk the position of each arrived token in a single merged chunk, which is ordered by source
    /// rank, then by token.
    pub(crate) fn places(&self) -> Vec<Vec<u32>> {
        let num_sources = self.ranks.group().size();
        let mut places: Vec<Vec<u32>> =
            self.chunks.iter().map(|chunk| Vec::with_capacity(chunk.num_arrived())).collect();
        let mut next = 0;
        for source in 0..num_sources {
            for (chunk, places) in self.chunks.iter().zip(&mut places) {
                let count = chunk.plan.recv_counts()[source] as u32;
                places.extend(next..next + count);
                next += count;
            }
        }
        places
    }
}

/// The ranks that each token goes to.
struct Targets {
    ranks: Vec<usize>,
    /// Offsets of each token's ranks, and the end.
    starts: Vec<usize>,
}

impl Targets {
    fn new(ranks: &LayerRanks, choices: &Tensor) -> Self {
        let own = ranks.group().rank();
        let mut targets = Self { ranks: Vec::with_capacity(choices.rows()), starts: vec![0] };
        for token in choices.f32s().chunks_exact(choices.cols()) {
            let start = targets.ranks.len();
            for &expert in token[..token.len() / 2].iter().filter(|&&expert| expert != NOWHERE) {
                let rank = ranks.serving_rank(own, expert as usize);
                if !targets.ranks[start..].contains(&rank) {
                    targets.ranks.push(rank);
                }
            }
            targets.ranks[start..].sort_unstable();
            targets.starts.push(targets.ranks.len());
        }
        targets
    }

    fn token(&self, token: usize) -> &[usize] {
        &self.ranks[self.starts[token]..self.starts[token + 1]]
    }
}

/// Counts the tokens of a chunk that go to other ranks, or come from them, whichever are more. `lists` has the ranks
/// of every token.
fn remote_tokens(ranks: &LayerRanks, plan: &RowPlan, lists: &[&[usize]]) -> Bytes {
    let (nodes, own) = (ranks.hierarchy().nodes(), ranks.group().rank());
    let is_near = |rank: usize| nodes.of(rank) == nodes.of(own);
    let (mut sent, mut received) = ([0; 2], [0; 2]);
    for &to in lists[plan.rows()].iter().copied().flatten().filter(|&&to| to != own) {
        sent[usize::from(is_near(to))] += 1;
    }
    for (from, count) in plan.recv_counts().iter().enumerate().filter(|(from, _)| *from != own) {
        received[usize::from(is_near(from))] += count;
    }
    Bytes { node: sent[1].max(received[1]), cluster: sent[0].max(received[0]) }
}

/// Returns `[T, 2 K]`: each token's choices, as expert numbers and weights, padded from `num_own` to K. Expert
/// numbers are exact in f32, because there are at most 2^24 experts.
fn choices(
    ctx: &Context,
    dispatch: &Dispatch,
    num_own: usize,
    num_choices: usize,
    is_fetched: impl Fn(usize) -> bool,
) -> Tensor {
    let token_rows = dispatch.token_rows();
    let mut experts = vec![NOWHERE; dispatch.num_rows()];
    for (expert, pair) in dispatch.offsets().windows(2).enumerate().filter(|(expert, _)| !is_fetched(*expert)) {
        experts[pair[0] as usize..pair[1] as usize].fill(expert as f32);
    }
    let num_tokens = token_rows.len() / num_own.max(1);
    let mut choices = ctx.empty(&[num_tokens, 2 * num_choices], DType::F32);
    let tokens = choices.f32s_mut().chunks_exact_mut(2 * num_choices.max(1));
    for (choices, rows) in tokens.zip(token_rows.chunks_exact(num_own.max(1))) {
        let (ids, weights) = choices.split_at_mut(num_choices);
        ids[num_own..].fill(NOWHERE);
        weights[num_own..].fill(0.0);
        for ((id, weight), &row) in ids.iter_mut().zip(weights).zip(rows) {
            let row = (row != NO_ROW).then_some(row as usize);
            (*id, *weight) = row.map_or((NOWHERE, 0.0), |row| (experts[row], dispatch.row_weights()[row]));
        }
    }
    choices
}

/// Sorts the choices that are for this rank among `told [A, 2 K]`, the choices of the tokens that arrived from each
/// rank.
fn own_choices(ctx: &Context, ranks: &LayerRanks, recv_counts: &[usize], told: &Tensor) -> SortedChoices {
    let (num_choices, num_held) = (told.cols() / 2, ranks.held().len());
    let shape = [told.rows(), num_choices];
    let (mut ids, mut weights) = (ctx.empty(&shape, DType::U32), ctx.empty(&shape, DType::F32));
    let sources = recv_counts.iter().enumerate().flat_map(|(source, &count)| std::iter::repeat_n(source, count));
    let own = ranks.group().rank();
    let mut slots = ids.u32s_mut().iter_mut().zip(weights.f32s_mut());
    for (source, told) in sources.zip(told.f32s().chunks_exact(2 * num_choices.max(1))) {
        let (experts, of_token) = told.split_at(num_choices);
        for ((&expert, &weight), (id, slot)) in experts.iter().zip(of_token).zip(&mut slots) {
            let is_here = expert != NOWHERE && ranks.serving_rank(source, expert as usize) == own;
            let place = is_here.then(|| ranks.held().binary_search(&(expert as usize)).ok()).flatten();
            (*id, *slot) = (place.map_or(NO_EXPERT, |place| place as u32), weight);
        }
    }
    if num_held == 0 {
        return without_experts(ctx, &shape);
    }
    sort_choices(ctx, &ids, &weights, num_held, None)
}

/// Returns the sorted choices of a rank that holds no expert.
fn without_experts(ctx: &Context, shape: &[usize; 2]) -> SortedChoices {
    let mut token_rows = ctx.empty(shape, DType::U32);
    token_rows.u32s_mut().fill(NO_ROW);
    let (tokens, weights) = (ctx.empty(&[0], DType::U32), ctx.empty(&[0], DType::F32));
    let (counts, offsets) = (ctx.empty(&[0], DType::U32), ctx.zeros(&[1], DType::U32));
    SortedChoices { counts, offsets, tokens, weights, token_rows, few_tiles: None }
}
