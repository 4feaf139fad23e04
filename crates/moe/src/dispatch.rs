//! The dispatch: the choices of a [`Routing`] sorted by expert, within each expert's capacity.
//!
//! An expert serves the first choices of all tokens, in the order of the tokens, before any second choice, and so on
//! (GShard, algorithm 1). An expert's rows are stored in that order, and choices beyond the capacity are dropped.
//! [`DispatchRule`] has other orders of service; they decide which choices are dropped, but not the order of the
//! rows. A dropped choice has no row and contributes exactly zero; the weights of the token's other choices stay.

use std::borrow::Cow;
use std::fmt;

use moeworks_ops::Context;
use moeworks_ops::counting_sort::{SortedChoices, sort_all_choices, sort_choices};
use moeworks_ops::experts::{ExpertRows, NO_ROW};
use moeworks_tensor::{DType, Tensor};

use crate::overflow::{self, RemainingCapacity};
use crate::{NO_EXPERT, Routing, WithinCapacity};

/// Returns the number of rows that an expert may take, `ceil(|factor| K T / E)`, or `None` (no limit) for factor 0.
/// See [`MoeConfig::capacity_factor`](crate::MoeConfig::capacity_factor).
///
/// The factor is read as the decimal number that is printed for it, so that 1.1 times 10 is 11 and not 12.
#[must_use]
pub fn capacity(factor: f32, num_tokens: usize, top_k: usize, num_experts: usize) -> Option<usize> {
    share_capacity(factor, num_tokens as f64 * top_k as f64 / num_experts as f64)
}

/// Returns `ceil(|factor| share)`, or `None` for factor 0.
fn share_capacity(factor: f32, share: f64) -> Option<usize> {
    if factor == 0.0 {
        return None;
    }
    let factor: f64 = factor.abs().to_string().parse().unwrap_or(f64::INFINITY);
    Some((factor * share * (1.0 - 1e-12)).ceil() as usize)
}

/// The rules by which choices become rows.
#[derive(Clone, Copy, Debug)]
pub struct DispatchRule<'a> {
    /// The capacity factor; see [`MoeConfig::capacity_factor`](crate::MoeConfig::capacity_factor).
    pub capacity_factor: f32,
    /// K in the formula of the capacity.
    pub top_k: usize,
    /// The number of zero-computation experts, which come last. Their choices have no rows.
    pub num_zero_computation: usize,
    /// MoE++'s tau: the capacity of a computing expert over that of a zero-computation expert.
    pub zero_computation_ratio: f32,
    /// Tokens per group. Each group has its own counters (GShard's local groups); 0 for a single group of all tokens.
    pub group_tokens: usize,
    /// `[T]`: priorities of the tokens, highest served first; none for the order of the tokens.
    pub priority: Option<&'a [f32]>,
    /// A fixed number of rows that every expert may take of a group; it overrides `capacity_factor`.
    pub fixed: Option<u32>,
    /// `[T, K]`: the choices that advance the experts' counters, where they differ from those of the routing; none
    /// for the routing's own. GShard counts a second choice whether or not it is dispatched (2006.16668, algorithm
    /// 1).
    pub capacity_ids: Option<&'a [u32]>,
    /// The choices within the capacity, where that was decided over the tokens of all ranks.
    pub shared: Option<&'a WithinCapacity>,
}

impl DispatchRule<'_> {
    /// Creates the plain rule for `routing`: `capacity_factor`, one group, tokens in their order.
    #[must_use]
    pub fn new(routing: &Routing, capacity_factor: f32) -> Self {
        let top_k = routing.top_k();
        Self {
            capacity_factor,
            top_k,
            num_zero_computation: 0,
            zero_computation_ratio: 1.0,
            group_tokens: 0,
            priority: None,
            fixed: None,
            capacity_ids: None,
            shared: None,
        }
    }

    /// Returns whether the tokens of all ranks share the capacity.
    pub(crate) fn is_shared(&self) -> bool {
        self.capacity_factor != 0.0 && self.fixed.is_none()
    }

    fn is_plain(&self, num_tokens: usize) -> bool {
        let is_one_group = self.group_tokens == 0 || self.group_tokens >= num_tokens;
        // A token names an expert at most once, so an expert never needs more rows than a group has tokens.
        let is_enough = self.fixed.is_none_or(|rows| rows as usize >= self.group_size(num_tokens));
        self.num_zero_computation == 0
            && self.shared.is_none()
            && is_enough
            && (self.capacity_factor == 0.0 || (is_one_group && self.priority.is_none() && self.capacity_ids.is_none()))
    }

    /// Returns the number of tokens in a group.
    pub(crate) fn group_size(&self, num_tokens: usize) -> usize {
        if self.group_tokens == 0 { num_tokens } else { self.group_tokens.min(num_tokens) }
    }

    /// Returns `[E]`: the rows that each expert may take of one group of S tokens. With Z zero-computation and N
    /// computing experts a computing expert has `ceil(factor tau K S / (tau N + Z))` and a zero-computation expert
    /// `ceil(factor K S / (tau N + Z))` (MoE++, 2410.07348, equation 8, with K S choices in place of its T).
    pub(crate) fn capacities(&self, num_tokens: usize, num_experts: usize) -> Vec<u32> {
        if let Some(rows) = self.fixed {
            return vec![rows; num_experts];
        }
        let size = self.group_size(num_tokens);
        let num_zero_computation = self.num_zero_computation.min(num_experts);
        let computing = num_experts - num_zero_computation;
        if num_zero_computation == 0 {
            let limit = capacity(self.capacity_factor, size, self.top_k, num_experts);
            return vec![rows_limit(limit); num_experts];
        }
        let tau = f64::from(self.zero_computation_ratio);
        let share = (size * self.top_k) as f64 / (tau * computing as f64 + num_zero_computation as f64);
        let limit = |share: f64| rows_limit(share_capacity(self.capacity_factor, share));
        let mut limits = vec![limit(tau * share); computing];
        limits.resize(num_experts, limit(share));
        limits
    }
}

fn rows_limit(limit: Option<usize>) -> u32 {
    limit.map_or(u32::MAX, |limit| u32::try_from(limit).unwrap_or(u32::MAX))
}

/// A dispatch: rows sorted by expert, the offsets of each expert's rows, and the row of each of a token's choices.
#[derive(Clone)]
pub struct Dispatch {
    sorted: SortedChoices,
    /// Rows that an expert may take of a group.
    limit: u32,
    /// True if the capacity is `limit` even where fewer rows are needed.
    is_fixed: bool,
    /// The number of experts that compute.
    num_computing: usize,
    /// Counts that differ from those of `sorted` because the rule is not the plain one.
    ruled: Option<Ruled>,
}

#[derive(Clone)]
struct Ruled {
    /// `[E]`: choices that name each expert, zero-computation experts included.
    counts: Vec<u32>,
    /// `[E]`: choices within the capacity, zero-computation experts included.
    kept: Vec<u32>,
    /// `[T, K]` u32: the index, from 0, of the zero-computation expert of each kept choice; [`NO_EXPERT`] elsewhere.
    zero_computation: Option<Tensor>,
}

impl Dispatch {
    /// Dispatches `routing` with the capacity that `capacity_factor` gives: a counting sort, O(T K + E).
    #[must_use]
    pub fn new(ctx: &Context, routing: &Routing, capacity_factor: f32) -> Self {
        Self::with_rule(ctx, routing, &DispatchRule::new(routing, capacity_factor))
    }

    /// Dispatches `routing` by `rule`.
    #[must_use]
    pub fn with_rule(ctx: &Context, routing: &Routing, rule: &DispatchRule<'_>) -> Self {
        let (num_tokens, num_experts) = (routing.num_tokens(), routing.num_experts());
        let sharing = rule.shared.map_or(num_tokens, |shared| shared.num_tokens);
        let limits = rule.capacities(sharing, num_experts);
        let limit = limits.first().copied().unwrap_or(0);
        let (ids, weights) = routing.tensors();
        let (sorted, ruled) = if rule.is_plain(num_tokens) {
            let limit = (rule.capacity_factor != 0.0 && rule.fixed.is_none()).then_some(limit);
            let sorted = match limit {
                None if routing.is_whole() => {
                    let sort = || sort_all_choices(ctx, ids, weights, num_experts);
                    routing.sorted().cloned().unwrap_or_else(sort)
                }
                _ => sort_choices(ctx, ids, weights, num_experts, limit),
            };
            (sorted, None)
        } else {
            let remaining =
                RemainingCapacity { capacity: &limits, group_tokens: rule.group_size(num_tokens), before: None };
            let capacity_ids = rule.capacity_ids.unwrap_or(ids.u32s());
            let alone =
                || Cow::Owned(overflow::within_capacity(capacity_ids, routing.top_k(), remaining, rule.priority));
            let is_within = rule.shared.map_or_else(alone, |shared| Cow::Borrowed(&shared.is_within));
            let (masked, ruled) = Ruled::new(ctx, routing, &is_within, num_experts - rule.num_zero_computation);
            (sort_choices(ctx, &masked, weights, num_experts - rule.num_zero_computation, None), Some(ruled))
        };
        let is_fixed = rule.capacity_factor > 0.0 || rule.fixed.is_some();
        let num_computing = num_experts - rule.num_zero_computation;
        Self { sorted, limit, is_fixed, num_computing, ruled }
    }

    /// Returns C: the rows an expert may take of a group. Without a positive capacity factor this is at most the rows
    /// of the fullest expert.
    #[must_use]
    pub fn capacity(&self) -> usize {
        let needed = || self.tokens_per_expert()[..self.num_computing].iter().max().copied().unwrap_or(0);
        match self.limit {
            u32::MAX if self.is_fixed => usize::MAX,
            limit if self.is_fixed => limit as usize,
            limit => limit.min(needed()) as usize,
        }
    }

    /// Returns `[E]`: the number of choices that name each expert, dropped ones and zero-computation experts
    /// included.
    #[must_use]
    pub fn tokens_per_expert(&self) -> &[u32] {
        self.ruled.as_ref().map_or_else(|| self.sorted.counts.u32s(), |ruled| &ruled.counts)
    }

    /// Returns `[E]`: the number of choices that each expert keeps, zero-computation experts included.
    #[must_use]
    pub fn kept_per_expert(&self) -> Vec<u32> {
        match &self.ruled {
            Some(ruled) => ruled.kept.clone(),
            // Every choice has a row, so the counts are the answer and the offsets need not be read.
            None if self.num_rows() == self.sorted.token_rows.len() => self.sorted.counts.u32s().to_vec(),
            None => self.rows_per_expert().collect(),
        }
    }

    /// Returns `[T, K]`: the index, from 0, of the zero-computation expert of each kept choice and [`NO_EXPERT`]
    /// elsewhere; `None` if there are no zero-computation experts.
    #[must_use]
    pub fn zero_computation_choices(&self) -> Option<&[u32]> {
        self.ruled.as_ref()?.zero_computation.as_ref().map(Tensor::u32s)
    }

    /// Returns `[E + 1]`: expert e has rows `offsets[e]..offsets[e + 1]`; the last entry is R, the number of rows.
    #[must_use]
    pub fn offsets(&self) -> &[u32] {
        self.sorted.offsets.u32s()
    }

    /// Returns `[R]`: the token of each row.
    #[must_use]
    pub fn row_tokens(&self) -> &[u32] {
        self.sorted.tokens.u32s()
    }

    /// Returns `[R]`: the weight of each row in its token's sum.
    #[must_use]
    pub fn row_weights(&self) -> &[f32] {
        self.sorted.weights.f32s()
    }

    /// Returns `[T, K]`: the row of each choice of each token, [`NO_ROW`] where it was dropped.
    #[must_use]
    pub fn token_rows(&self) -> &[u32] {
        self.sorted.token_rows.u32s()
    }

    /// Returns R, the number of rows.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.sorted.tokens.len()
    }

    /// Returns the number of choices, dropped ones included.
    #[must_use]
    pub fn num_choices(&self) -> usize {
        self.tokens_per_expert().iter().map(|&n| n as usize).sum()
    }

    /// Returns the number of choices beyond their experts' capacity.
    #[must_use]
    pub fn num_dropped(&self) -> usize {
        self.num_choices() - self.kept_per_expert().iter().map(|&n| n as usize).sum::<usize>()
    }

    /// Returns the number of rows of each expert that computes.
    pub fn rows_per_expert(&self) -> impl Iterator<Item = u32> + '_ {
        self.offsets().windows(2).map(|pair| pair[1] - pair[0])
    }

    /// Returns the rows in the form that the operations on experts take.
    #[must_use]
    pub fn rows(&self) -> ExpertRows<'_> {
        self.sorted.rows()
    }
}

impl Ruled {
    /// Returns the ids to sort and the counts of all choices. A choice is sorted if it is within the capacity and
    /// names one of the first `computing` experts.
    fn new(ctx: &Context, routing: &Routing, is_within: &[bool], computing: usize) -> (Tensor, Self) {
        let (ids, num_experts) = (routing.tensors().0, routing.num_experts());
        let (mut counts, mut kept) = (vec![0; num_experts], vec![0; num_experts]);
        let mut masked = ctx.empty(ids.shape(), DType::U32);
        let mut zero_computation = (computing < num_experts).then(|| ctx.empty(ids.shape(), DType::U32));
        let choices = masked.u32s_mut().iter_mut().zip(ids.u32s()).zip(is_within);
        for (i, ((masked, &id), &is_within)) in choices.enumerate() {
            let (expert, is_kept) = (id as usize, is_within && id != NO_EXPERT);
            if id != NO_EXPERT {
                counts[expert] += 1;
                kept[expert] += u32::from(is_kept);
            }
            *masked = if is_kept && expert < computing { id } else { NO_EXPERT };
            if let Some(indices) = &mut zero_computation {
                indices.u32s_mut()[i] = if is_kept && expert >= computing { id - computing as u32 } else { NO_EXPERT };
            }
        }
        (masked, Self { counts, kept, zero_computation })
    }
}

impl PartialEq for Dispatch {
    fn eq(&self, other: &Self) -> bool {
        self.capacity() == other.capacity()
            && self.tokens_per_expert() == other.tokens_per_expert()
            && self.offsets() == other.offsets()
            && self.sorted.token_rows.shape() == other.sorted.token_rows.shape()
            && self.token_rows() == other.token_rows()
            && self.row_tokens() == other.row_tokens()
            && self.row_weights() == other.row_weights()
            && self.zero_computation_choices() == other.zero_computation_choices()
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
            .field("capacity", &self.capacity())
            .field("tokens_per_expert", &self.tokens_per_expert())
            .field("offsets", &self.offsets())
            .field("row_tokens", &self.row_tokens())
            .field("row_weights", &self.row_weights())
            .field("token_rows", &token_rows)
            .finish()
    }
}

/// Prints a line for each expert with the tokens of its rows: `expert 2: 0 (0.2500), 5 (0.6000), 1 dropped`.
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
