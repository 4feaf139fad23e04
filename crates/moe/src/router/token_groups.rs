//! Balance losses over groups of tokens: the sequence-wise loss over sequences, GShard's over local groups.

use crate::NO_EXPERT;
use crate::ep::CrossRank;

/// Groups of tokens with the statistics of their choices. The loss of a group is `sum_i shares_i P_i`, with `P_i` the
/// mean probability of expert i in it.
pub(crate) struct TokenGroups {
    /// `[groups with tokens of this pass, E]`: each expert's share of the choices of the whole group.
    shares: Vec<f64>,
    /// The number of tokens of each of these groups, those of other ranks included.
    sizes: Vec<usize>,
    /// Tokens per group; the last one may have fewer.
    len: usize,
    /// Tokens of the first group that come before this pass's first token.
    before: usize,
    /// The number of all groups, over which the mean is taken. `share` is this pass's share of all tokens.
    num_parts: usize,
    share: f64,
}

/// The choices that count in the groups' shares.
#[derive(Clone, Copy)]
pub(crate) struct CountedChoices<'a> {
    /// `[T, K]`: the experts.
    pub(crate) ids: &'a [u32],
    pub(crate) top_k: usize,
    /// The number of choices of a token that count, first choices first.
    pub(crate) first_k: usize,
    pub(crate) num_experts: usize,
}

impl TokenGroups {
    /// Groups `choices` by `len` consecutive tokens, 0 for all tokens. With `cross_rank` the groups are of the tokens
    /// of all ranks.
    pub(crate) fn new(choices: CountedChoices<'_>, len: usize, cross_rank: Option<&CrossRank<'_>>) -> Self {
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
            cross_rank.sum_counts(&mut counts, first, num_experts);
        }
        let sizes = parts.map(|part| len.min(num_tokens - part * len)).collect();
        let share = own.len() as f64 / num_tokens.max(1) as f64;
        let num_parts = num_tokens.div_ceil(len);
        Self { shares: shares(&counts, num_experts), sizes, len, before: own.start % len, num_parts, share }
    }

    /// Returns the mean of the groups' losses for distributions `probs [T, E]`. On several ranks each returns its
    /// tokens' part, so that the mean over ranks, weighted by their tokens, is the loss.
    pub(crate) fn loss(&self, probs: &[f32], num_experts: usize) -> f64 {
        self.loss_of(probs.chunks(num_experts).enumerate(), num_experts)
    }

    /// Returns the mean of the groups' losses from partial sums of distributions. Each comes with its first token,
    /// and its tokens are all in one group.
    pub(crate) fn loss_of<'a>(&self, sums: impl Iterator<Item = (usize, &'a [f32])>, num_experts: usize) -> f64 {
        let loss = |(token, sums): (usize, &[f32])| {
            let part = self.part_of(token);
            let shares = &self.shares[part * num_experts..];
            shares.iter().zip(sums).map(|(&f, &p)| f * f64::from(p)).sum::<f64>() / self.sizes[part] as f64
        };
        let sum: f64 = sums.map(loss).sum();
        if self.share == 0.0 { 0.0 } else { sum / (self.num_parts as f64 * self.share) }
    }

    /// Returns the gradients of the tokens' distributions by this loss times `scale`.
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

/// The gradients of the tokens' distributions, equal for all tokens of a group.
pub(crate) struct TokenGroupGrads {
    /// `[groups, E]`: the gradients.
    rows: Vec<f32>,
    len: usize,
    before: usize,
}

impl TokenGroupGrads {
    /// Returns the gradients `[groups, E]`, the tokens per group, and the tokens of the first group that come before
    /// this pass's first.
    pub(crate) fn rows(self) -> (Vec<f32>, (usize, usize)) {
        (self.rows, (self.len, self.before))
    }

    /// Returns the gradients of `token`, in a slice of at least E elements.
    pub(crate) fn token(&self, token: usize, num_experts: usize) -> &[f32] {
        &self.rows[(self.before + token) / self.len * num_experts..]
    }
}

/// Divides `counts [groups, E]` by the total of each group.
fn shares(counts: &[u32], num_experts: usize) -> Vec<f64> {
    let share = |counts: &[u32]| {
        let total: u32 = counts.iter().sum();
        counts.iter().map(|&n| f64::from(n) / f64::from(total.max(1))).collect::<Vec<_>>()
    };
    counts.chunks(num_experts).flat_map(share).collect()
}
