//! The way of one dispatch's rows to the ranks of their experts and back.

use moeworks_ops::Context;
use moeworks_ops::experts::{ExpertRows, NO_ROW};
use moeworks_tensor::Tensor;

use super::ExpertRanks;
use crate::Dispatch;

/// Which rows go to which rank, and which come from where: R sent, A arrived.
pub(crate) struct Travel {
    ranks: ExpertRanks,
    sent: Sent,
    arrived: Arrived,
}

/// This rank's rows, those for one rank after those for another, and for one rank by expert.
struct Sent {
    /// Rows for each rank.
    counts: Vec<usize>,
    /// `[R]`: the token of each row.
    tokens: Vec<u32>,
    /// `[R]`: its weight.
    weights: Vec<f32>,
    /// `[T, K]`: the row of each choice of each token, [`NO_ROW`] where it has none.
    token_rows: Vec<u32>,
    num_choices: usize,
}

/// The rows that others sent, as they lie behind one another, and the same by expert.
struct Arrived {
    /// Rows from each rank.
    counts: Vec<usize>,
    /// `[held + 1]`: expert i of those held has rows `offsets[i]..offsets[i + 1]` of the sorted ones.
    offsets: Vec<u32>,
    /// `[A]`: where each sorted row lies.
    rows: Vec<u32>,
    /// `[A]`: which sorted row lies there.
    sorted: Vec<u32>,
}

impl Travel {
    /// The way of the rows of `dispatch`, whose tokens have `num_choices` choices each. The ranks tell each other how many
    /// rows they send.
    pub(crate) fn of(ranks: &ExpertRanks, dispatch: &Dispatch, num_choices: usize) -> Self {
        let (sent, expert_counts) = Sent::of(ranks, dispatch, num_choices);
        let placement = ranks.placement();
        let n = placement.num_ranks();
        let told: Vec<usize> = (0..n).map(|rank| placement.experts_of(rank).len()).collect();
        let heard = vec![ranks.held().len(); n];
        let silence = vec![0_u32; ranks.held().len() * n];
        let counts = ranks.attempt(silence.clone(), || {
            let mut counts = silence;
            ranks.group().all_to_all_v(&expert_counts, &told, &mut counts, &heard)?;
            Ok(counts)
        });
        Self { ranks: ranks.clone(), sent, arrived: Arrived::of(&counts, ranks.held().len(), n) }
    }

    /// Takes one row of `rows` `[R, ..]` for each row sent to its expert's rank: `[A, ..]`.
    pub(crate) fn there(&self, ctx: &Context, rows: &Tensor) -> Tensor {
        self.carry(ctx, rows, &self.sent.counts, &self.arrived.counts)
    }

    /// Takes rows `[A, ..]` back to where they came from: `[R, ..]`.
    pub(crate) fn back(&self, ctx: &Context, rows: &Tensor) -> Tensor {
        self.carry(ctx, rows, &self.arrived.counts, &self.sent.counts)
    }

    fn carry(&self, ctx: &Context, rows: &Tensor, from: &[usize], to: &[usize]) -> Tensor {
        let row_bytes = rows.cols() * rows.dtype().size();
        let in_bytes = |counts: &[usize]| counts.iter().map(|count| count * row_bytes).collect::<Vec<usize>>();
        let shape = [to.iter().sum::<usize>(), rows.cols()];
        let zeros = || ctx.zeros(&shape, rows.dtype());
        let carried = self.ranks.attempt(None, || {
            let mut carried = ctx.empty(&shape, rows.dtype());
            let (from, to) = (in_bytes(from), in_bytes(to));
            self.ranks.group().all_to_all_v(rows.bytes(), &from, carried.bytes_mut(), &to)?;
            Ok(Some(carried))
        });
        carried.unwrap_or_else(zeros)
    }

    /// `[R]`: the token of each row sent.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.sent.tokens
    }

    /// `[R]`: the weight of each row sent.
    pub(crate) fn weights(&self) -> &[f32] {
        &self.sent.weights
    }

    /// The rows sent, for what operations do by token; by expert they do not lie.
    pub(crate) fn sent_rows(&self) -> ExpertRows<'_> {
        let Sent { tokens, weights, token_rows, num_choices, .. } = &self.sent;
        ExpertRows { offsets: &[0], tokens, weights, token_rows, num_choices: *num_choices }
    }

    /// The arrived rows by expert, each its own token, with `weights` in the order of [`sorted`](Self::sorted).
    pub(crate) fn arrived_rows<'a>(&'a self, weights: &'a [f32]) -> ExpertRows<'a> {
        let Arrived { offsets, rows, sorted, .. } = &self.arrived;
        ExpertRows { offsets, tokens: rows, weights, token_rows: sorted, num_choices: 1 }
    }

    /// A.
    pub(crate) fn num_arrived(&self) -> usize {
        self.arrived.rows.len()
    }

    /// Values of the arrived rows in the order in which rows lie by expert.
    pub(crate) fn sorted(&self, values: &[f32]) -> Vec<f32> {
        self.arrived.rows.iter().map(|&row| values[row as usize]).collect()
    }

    /// Values in the order of experts in the order in which the rows arrived.
    pub(crate) fn unsorted(&self, values: &[f32]) -> Vec<f32> {
        self.arrived.sorted.iter().map(|&row| values[row as usize]).collect()
    }
}

impl Sent {
    /// The rows in the order in which they are sent, and for each rank the rows for each of its experts.
    fn of(ranks: &ExpertRanks, dispatch: &Dispatch, num_choices: usize) -> (Self, Vec<u32>) {
        let (placement, own) = (ranks.placement(), ranks.group().rank());
        let offsets = dispatch.offsets();
        let mut expert_counts = Vec::new();
        let mut counts = Vec::with_capacity(placement.num_ranks());
        let mut order: Vec<u32> = Vec::with_capacity(dispatch.num_rows());
        for rank in 0..placement.num_ranks() {
            let before = order.len();
            for expert in placement.experts_of(rank) {
                let is_served = placement.serving_rank(own, expert) == rank;
                let rows = if is_served { offsets[expert]..offsets[expert + 1] } else { 0..0 };
                expert_counts.push(rows.len() as u32);
                order.extend(rows);
            }
            counts.push(order.len() - before);
        }
        let mut places = vec![NO_ROW; order.len()];
        order.iter().zip(0..).for_each(|(&row, place)| places[row as usize] = place);
        let place = |&row: &u32| if row == NO_ROW { NO_ROW } else { places[row as usize] };
        let sent = Self {
            counts,
            tokens: order.iter().map(|&row| dispatch.row_tokens()[row as usize]).collect(),
            weights: order.iter().map(|&row| dispatch.row_weights()[row as usize]).collect(),
            token_rows: dispatch.token_rows().iter().map(place).collect(),
            num_choices,
        };
        (sent, expert_counts)
    }
}

impl Arrived {
    /// From `counts[rank][expert]`, the rows that each rank sends for each expert that is held here.
    fn of(counts: &[u32], num_held: usize, num_ranks: usize) -> Self {
        let of_rank = |rank: usize| &counts[rank * num_held..(rank + 1) * num_held];
        let mut firsts = vec![0; counts.len()];
        let mut next = 0;
        for (first, &count) in firsts.iter_mut().zip(counts) {
            *first = next;
            next += count;
        }
        let mut offsets = vec![0];
        let mut rows: Vec<u32> = Vec::with_capacity(next as usize);
        for expert in 0..num_held {
            for rank in 0..num_ranks {
                let at = rank * num_held + expert;
                rows.extend(firsts[at]..firsts[at] + counts[at]);
            }
            offsets.push(rows.len() as u32);
        }
        let mut sorted = vec![0; rows.len()];
        rows.iter().zip(0..).for_each(|(&row, place)| sorted[row as usize] = place);
        let counts = (0..num_ranks).map(|rank| of_rank(rank).iter().map(|&n| n as usize).sum()).collect();
        Self { counts, offsets, rows, sorted }
    }
}
