//! Losses that take their means over parts of the tokens: the sequence-wise one over sequences, GShard's over local groups.

use crate::NO_EXPERT;
use crate::ep::CrossRank;

/// The choices of the tokens of each part: `sum_i shares_i P_i` is a part's loss, with `P_i` the mean probability of expert i there.
pub(crate) struct TokenGroups {
    /// `[parts that these tokens are in, E]`: each expert's share of the choices of the whole part.
    shares: Vec<f64>,
    /// Tokens of each of these parts, those of other ranks included.
    sizes: Vec<usize>,
    /// Tokens of a part; the last of all may have fewer.
    len: usize,
    /// Tokens of the first of these parts that come before these tokens.
    before: usize,
    /// All parts that the mean is taken over, and these tokens' share of all tokens.
    num_parts: usize,
    share: f64,
}

/// The choices that parts are told apart by.
#[derive(Clone, Copy)]
pub(crate) struct CountedChoices<'a> {
    /// `[T, K]`
    pub(crate) ids: &'a [u32],
    pub(crate) top_k: usize,
    /// The first choices of a token that count.
    pub(crate) first_k: usize,
    pub(crate) num_experts: usize,
}

impl TokenGroups {
    /// Parts of `len` tokens, 0 for all, by `choices`. With `cross_rank` the parts are those of the tokens of all ranks.
    pub(crate) fn of(choices: CountedChoices<'_>, len: usize, cross_rank: Option<&CrossRank<'_>>) -> Self {
        let CountedChoices { ids, top_k, first_k, num_experts } = choices;
        let own = cross_rank.map_or(0..ids.len() / top_k, CrossRank::own);
        let num_tokens = cross_rank.map_or(own.len(), CrossRank::num_tokens);
        let len = if len == 0 { num_tokens } else { len }.max(1);
        let first = own.start / len;
        let parts = first..if own.is_empty() { first } else { own.end.div_ceil(len) };
        let mut counts = vec![0_u32; parts.len() * num_experts];
        for (token, ids) in own.clone().zip(ids.chunks(top_k)) {
            let counts = &mut counts[(token / len - first) * num_experts..];
            ids[..first_k].iter().filter(|id| **id != NO_EXPERT).for_each(|&id| counts[id as usize] += 1);
        }
        if let Some(cross_rank) = cross_rank {
            cross_rank.join_counts(&mut counts, first, num_experts);
        }
        let sizes = parts.map(|part| len.min(num_tokens - part * len)).collect();
        let share = own.len() as f64 / num_tokens.max(1) as f64;
        let num_parts = num_tokens.div_ceil(len);
        Self { shares: shares(&counts, num_experts), sizes, len, before: own.start % len, num_parts, share }
    }

    /// The mean of the parts' losses for tokens of distributions `probs [T, E]`. Of several ranks it is what these tokens add, so
    /// that the mean over ranks by their tokens is the whole.
    pub(crate) fn loss(&self, probs: &[f32], num_experts: usize) -> f64 {
        self.loss_of(probs.chunks(num_experts).enumerate(), num_experts)
    }

    /// The mean of the parts' losses from sums of distributions, each with the first of the tokens that it is of, which are all of one part.
    pub(crate) fn loss_of<'a>(&self, sums: impl Iterator<Item = (usize, &'a [f32])>, num_experts: usize) -> f64 {
        let loss = |(token, sums): (usize, &[f32])| {
            let part = self.part_of(token);
            let shares = &self.shares[part * num_experts..];
            shares.iter().zip(sums).map(|(&f, &p)| f * f64::from(p)).sum::<f64>() / self.sizes[part] as f64
        };
        let sum: f64 = sums.map(loss).sum();
        if self.share == 0.0 { 0.0 } else { sum / (self.num_parts as f64 * self.share) }
    }

    /// The gradients of the tokens' distributions by this loss times `scale`.
    pub(crate) fn grads(&self, num_experts: usize, scale: f64) -> TokenGroupGrads {
        let scaled = |(shares, &size): (&[f64], &usize)| {
            let scale = scale / (self.num_parts * size) as f64;
            shares.iter().map(|share| (share * scale) as f32).collect::<Vec<_>>()
        };
        let rows = self.shares.chunks(num_experts).zip(&self.sizes).flat_map(scaled).collect();
        TokenGroupGrads { rows, len: self.len, before: self.before }
    }

    fn part_of(&self, token: usize) -> usize {
        (self.before + token) / self.len
    }
}

/// The gradients of the tokens' distributions, the same for all tokens of a part.
pub(crate) struct TokenGroupGrads {
    /// `[parts, E]`
    rows: Vec<f32>,
    len: usize,
    before: usize,
}

impl TokenGroupGrads {
    /// `[parts, E]`, the tokens of a part, and those of the first part that come before these tokens.
    pub(crate) fn rows(self) -> (Vec<f32>, (usize, usize)) {
        (self.rows, (self.len, self.before))
    }

    /// The gradients of `token`, of at least E elements.
    pub(crate) fn of(&self, token: usize, num_experts: usize) -> &[f32] {
        &self.rows[(self.before + token) / self.len * num_experts..]
    }
}

/// Each expert's share of `counts [parts, E]` in its part.
fn shares(counts: &[u32], num_experts: usize) -> Vec<f64> {
    let share = |counts: &[u32]| {
        let total: u32 = counts.iter().sum();
        counts.iter().map(|&n| f64::from(n) / f64::from(total.max(1))).collect::<Vec<_>>()
    };
    counts.chunks(num_experts).flat_map(share).collect()
}
