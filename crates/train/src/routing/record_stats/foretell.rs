//! The next layer's choices foretold from those of a layer, by how often experts of both were chosen by one token.

use moeworks_infer::routing_record::NONE;

/// The tokens that are foretold at most.
const MAX_TESTED: u64 = 20_000;

/// The accuracy of foretelling the experts of the next layer, on tokens that were not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NextLayer {
    /// Tokens on which it was measured.
    pub num_tokens: u64,
    /// The share of tokens whose likeliest next expert is among those that they chose.
    pub top_1: f64,
    /// The base of `top_1`: that with the commonest expert, whatever the layer before says.
    pub top_1_base: f64,
    /// The share of a token's next experts that are among as many likeliest ones.
    pub recall: f64,
    /// The base of `recall`: that with the commonest experts.
    pub recall_base: f64,
}

/// Counts of the experts of two consecutive MoE layers.
#[derive(Clone, Debug)]
pub(super) struct LayerPair {
    num_experts: usize,
    /// `[E, E]`: tokens that chose an expert of the layer (row) and one of the next layer (column).
    counts: Vec<u32>,
    /// `[E]`: choices of each expert of the next layer.
    next: Vec<u64>,
    /// The experts of the next layer by these, most first.
    base: Vec<usize>,
    hits: Hits,
}

#[derive(Clone, Copy, Debug, Default)]
struct Hits {
    num_tokens: u64,
    num_choices: u64,
    top_1: u64,
    top_1_base: u64,
    recalled: u64,
    recalled_base: u64,
}

impl LayerPair {
    pub(super) fn new(num_experts: usize) -> Self {
        let (counts, next) = (vec![0; num_experts * num_experts], vec![0; num_experts]);
        Self { num_experts, counts, next, base: Vec::new(), hits: Hits::default() }
    }

    /// Counts a token with these experts in the layer and in the next one.
    pub(super) fn count(&mut self, here: &[u32], next: &[u32]) {
        for &to in next.iter().filter(|&&to| to != NONE) {
            self.next[to as usize] += 1;
            for &from in here.iter().filter(|&&from| from != NONE) {
                let count = &mut self.counts[from as usize * self.num_experts + to as usize];
                *count = count.saturating_add(1);
            }
        }
    }

    /// Ends the counting.
    pub(super) fn finish(&mut self) {
        self.base = most_first(&self.next, self.num_experts);
    }

    /// Foretells a token that was not counted; nothing more once enough of them are.
    pub(super) fn test(&mut self, here: &[u32], next: &[u32]) {
        let chosen: Vec<usize> = next.iter().filter(|&&to| to != NONE).map(|&to| to as usize).collect();
        if chosen.is_empty() || self.hits.num_tokens >= MAX_TESTED {
            return;
        }
        let mut scores = vec![0_u64; self.num_experts];
        for &from in here.iter().filter(|&&from| from != NONE) {
            let row = &self.counts[from as usize * self.num_experts..][..self.num_experts];
            scores.iter_mut().zip(row).for_each(|(score, &count)| *score += u64::from(count));
        }
        let foretold = most_first(&scores, chosen.len());
        let base = &self.base[..chosen.len().min(self.base.len())];
        let hits = |order: &[usize]| chosen.iter().filter(|expert| order.contains(expert)).count() as u64;
        let first = |order: &[usize]| u64::from(order.first().is_some_and(|expert| chosen.contains(expert)));
        let found = &mut self.hits;
        found.num_tokens += 1;
        found.num_choices += chosen.len() as u64;
        found.top_1 += first(&foretold);
        found.top_1_base += first(base);
        found.recalled += hits(&foretold);
        found.recalled_base += hits(base);
    }

    /// Returns the accuracy; none without a token to test.
    pub(super) fn accuracy(&self) -> Option<NextLayer> {
        let Hits { num_tokens, num_choices, top_1, top_1_base, recalled, recalled_base } = self.hits;
        let of = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        (num_tokens > 0).then(|| NextLayer {
            num_tokens,
            top_1: of(top_1, num_tokens),
            top_1_base: of(top_1_base, num_tokens),
            recall: of(recalled, num_choices),
            recall_base: of(recalled_base, num_choices),
        })
    }
}

/// Lists the `count` experts with the largest numbers, most first; the lower index of equal ones.
fn most_first(counts: &[u64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..counts.len()).collect();
    let key = |&expert: &usize| (std::cmp::Reverse(counts[expert]), expert);
    if count < order.len() {
        order.select_nth_unstable_by_key(count, key);
        order.truncate(count);
    }
    order.sort_by_key(key);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_that_decides_the_next_is_foretold_and_its_base_rate_is_that_of_the_commonest() {
        let mut pair = LayerPair::new(4);
        // Expert e goes to e + 1; expert 0 has half of the tokens.
        let token = |t: u32| if t.is_multiple_of(2) { 0 } else { 1 + t / 2 % 3 };
        (0..60).for_each(|t| pair.count(&[token(t), NONE], &[(token(t) + 1) % 4, NONE]));
        pair.finish();
        (0..60).for_each(|t| pair.test(&[token(t), NONE], &[(token(t) + 1) % 4, NONE]));
        let found = pair.accuracy().unwrap();
        let expected = NextLayer { num_tokens: 60, top_1: 1.0, top_1_base: 0.5, recall: 1.0, recall_base: 0.5 };
        assert_eq!(found, expected);
        assert_eq!(LayerPair::new(4).accuracy(), None);
    }
}
