//! The decision which row goes where: the choices of a [`Routing`] sorted by expert, within each expert's capacity.
//!
//! An expert serves the first choices of all tokens, in the order of the tokens, before any second choice, and so on
//! (GShard, algorithm 1); the rows of an expert stand in that order, and what exceeds the capacity is dropped. A dropped
//! choice has no row and contributes exactly zero; the weights of the token's other choices stay as they were.

use std::fmt;

use moeworks_ops::Context;
use moeworks_ops::counting_sort::{SortedChoices, sort_choices};
use moeworks_ops::experts::{ExpertRows, NO_ROW};

use crate::Routing;

/// The rows that an expert may take, as [`MoeConfig::capacity_factor`](crate::MoeConfig::capacity_factor) says:
/// `ceil(|factor| K T / E)`, or `None` for factor 0: as many as there are.
///
/// The factor counts as the decimal number that is written, so that 1.1 times 10 is 11 and not a little more.
#[must_use]
pub fn capacity(factor: f32, num_tokens: usize, top_k: usize, num_experts: usize) -> Option<usize> {
    if factor == 0.0 {
        return None;
    }
    let factor: f64 = factor.abs().to_string().parse().unwrap_or(f64::INFINITY);
    let share = factor * (num_tokens as f64 * top_k as f64) / num_experts as f64;
    Some((share * (1.0 - 1e-12)).ceil() as usize)
}

/// Rows sorted by expert, offsets for each expert, and the way back from a token's choices to its rows: a plain value.
#[derive(Clone)]
pub struct Dispatch {
    sorted: SortedChoices,
    capacity: usize,
}

impl Dispatch {
    /// The dispatch of `routing` with the capacity that `capacity_factor` gives: a counting sort, O(T K + E).
    #[must_use]
    pub fn new(ctx: &Context, routing: &Routing, capacity_factor: f32) -> Self {
        let (num_tokens, top_k, num_experts) = (routing.num_tokens(), routing.top_k(), routing.num_experts());
        let limit = capacity(capacity_factor, num_tokens, top_k, num_experts);
        let limit_rows = limit.map(|limit| u32::try_from(limit).unwrap_or(u32::MAX));
        let (ids, weights) = routing.tensors();
        let sorted = sort_choices(ctx, ids, weights, num_experts, limit_rows);
        let needed = sorted.counts.iter().max().copied().unwrap_or(0) as usize;
        let capacity = match limit {
            Some(limit) if capacity_factor > 0.0 => limit,
            Some(limit) => limit.min(needed),
            None => needed,
        };
        Self { sorted, capacity }
    }

    /// C: the rows an expert may take. Without a positive capacity factor no more than the fullest expert needs.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// `[E]`: how many choices name each expert, before any is dropped.
    #[must_use]
    pub fn tokens_per_expert(&self) -> &[u32] {
        &self.sorted.counts
    }

    /// `[E + 1]`: expert e has rows `offsets[e]..offsets[e + 1]`; the last entry is R, the number of rows.
    #[must_use]
    pub fn offsets(&self) -> &[u32] {
        &self.sorted.offsets
    }

    /// `[R]`: the token of each row.
    #[must_use]
    pub fn row_tokens(&self) -> &[u32] {
        self.sorted.tokens.u32s()
    }

    /// `[R]`: the weight of each row in its token's sum.
    #[must_use]
    pub fn row_weights(&self) -> &[f32] {
        self.sorted.weights.f32s()
    }

    /// `[T, K]`: the row of each choice of each token, [`NO_ROW`] where it was dropped.
    #[must_use]
    pub fn token_rows(&self) -> &[u32] {
        self.sorted.token_rows.u32s()
    }

    /// R.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.row_tokens().len()
    }

    /// Choices that got no row.
    #[must_use]
    pub fn num_dropped(&self) -> usize {
        self.token_rows().len() - self.num_rows()
    }

    /// The rows of each expert.
    pub fn rows_per_expert(&self) -> impl Iterator<Item = u32> + '_ {
        self.offsets().windows(2).map(|pair| pair[1] - pair[0])
    }

    /// What the operations on experts take.
    #[must_use]
    pub fn rows(&self) -> ExpertRows<'_> {
        self.sorted.rows()
    }
}

impl PartialEq for Dispatch {
    fn eq(&self, other: &Self) -> bool {
        self.capacity == other.capacity
            && self.tokens_per_expert() == other.tokens_per_expert()
            && self.offsets() == other.offsets()
            && self.sorted.token_rows.shape() == other.sorted.token_rows.shape()
            && self.token_rows() == other.token_rows()
            && self.row_tokens() == other.row_tokens()
            && self.row_weights() == other.row_weights()
    }
}

impl fmt::Debug for Dispatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |&row: &u32| (row != NO_ROW).then_some(row);
        let token_rows: Vec<Vec<Option<u32>>> = self
            .token_rows()
            .chunks(self.sorted.token_rows.cols())
            .map(|rows| rows.iter().map(row).collect())
            .collect();
        f.debug_struct("Dispatch")
            .field("capacity", &self.capacity)
            .field("tokens_per_expert", &self.tokens_per_expert())
            .field("offsets", &self.offsets())
            .field("row_tokens", &self.row_tokens())
            .field("row_weights", &self.row_weights())
            .field("token_rows", &token_rows)
            .finish()
    }
}

/// A line for each expert with the tokens of its rows: `expert 2: 0 (0.2500), 5 (0.6000), 1 dropped`.
impl fmt::Display for Dispatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (e, pair) in self.offsets().windows(2).enumerate() {
            write!(f, "expert {e}:")?;
            for row in pair[0]..pair[1] {
                let (token, weight) = (self.row_tokens()[row as usize], self.row_weights()[row as usize]);
                write!(f, "{} {token} ({weight:.4})", if row == pair[0] { "" } else { "," })?;
            }
            let dropped = self.tokens_per_expert()[e] - (pair[1] - pair[0]);
            if dropped > 0 {
                write!(f, "{} {dropped} dropped", if pair[0] == pair[1] { "" } else { "," })?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
