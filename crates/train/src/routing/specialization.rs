//! Specialisation: the mutual information of a token's id and its expert.
//!
//! The plain estimate of mutual information is biased upwards: a token seen only once seems to decide its expert. So
//! the mean that the same counts would give by chance is subtracted. Let n_te be the number of tokens with id t at
//! expert e, a_t its sum over experts, b_e its sum over ids, and N the number of tokens.
//!
//! `I = sum_te n_te / N ln(N n_te / (a_t b_e))`, and `E[I]` is its mean over all assignments of the N experts to the
//! N tokens with the same a_t and b_e (n_te is then hypergeometric): Vinh, Epps & Bailey, "Information theoretic
//! measures for clusterings comparison", JMLR 11 (2010), equation 24a. `I - E[I]` is in nats. Divided by `H(expert) -
//! E[I]` it is their adjusted mutual information with the entropy of the experts as its upper bound: 0 for a routing
//! that ignores the id, 1 for one that depends on nothing else. Both can be slightly negative by chance.

use std::collections::BTreeMap;

/// The information that a token's id gives about its expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Specialization {
    /// The mutual information in nats, minus its mean by chance.
    pub nats: f64,
    /// The ratio of `nats` to its largest possible value: 0 is none, 1 means that the id decides the expert.
    pub share: f64,
}

/// Computes the specialisation of `(token id, expert)` pairs, one for each token: its first choice. The order of the
/// pairs does not matter. Returns `None` where it is undefined: only one expert is used, or no token id occurs twice.
#[must_use]
pub fn specialization(mut pairs: Vec<(u32, u32)>) -> Option<Specialization> {
    pairs.sort_unstable();
    let total = pairs.len() as u64;
    let mut experts = BTreeMap::new();
    pairs.iter().for_each(|&(_, expert)| *experts.entry(expert).or_insert(0_u64) += 1);
    let entropy = experts.values().map(|&b| -share(b, total) * share(b, total).ln()).sum::<f64>();
    // The number of token ids by their number of occurrences.
    let mut frequencies = BTreeMap::new();
    let mut information = 0.0;
    for same_id in pairs.chunk_by(|a, b| a.0 == b.0) {
        let a = same_id.len() as u64;
        *frequencies.entry(a).or_insert(0_u64) += 1;
        for cell in same_id.chunk_by(|a, b| a.1 == b.1) {
            information += term(cell.len() as u64, Margins { id: a, expert: experts[&cell[0].1], total });
        }
    }
    let ln_factorials = ln_factorials(total);
    let mut by_chance = 0.0;
    for (&a, &num_ids) in &frequencies {
        let of_one_id: f64 =
            experts.values().map(|&b| expected_term(Margins { id: a, expert: b, total }, &ln_factorials)).sum();
        by_chance += num_ids as f64 * of_one_id;
    }
    let possible = entropy - by_chance;
    let nats = information - by_chance;
    (possible > 1e-9).then(|| Specialization { nats, share: nats / possible })
}

/// The number of tokens with an id, of tokens at an expert, and of all tokens: a_t, b_e and N.
#[derive(Clone, Copy)]
struct Margins {
    id: u64,
    expert: u64,
    total: u64,
}

fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

/// Computes one summand of I: `n / N ln(N n / (a b))`.
fn term(n: u64, margins: Margins) -> f64 {
    let Margins { id, expert, total } = margins;
    share(n, total) * (total as f64 * n as f64 / (id as f64 * expert as f64)).ln()
}

/// Computes the mean of [`term`] for a hypergeometric n. The sum starts at the likeliest n and goes in both
/// directions until the probabilities are negligible.
fn expected_term(margins: Margins, ln_factorials: &[f64]) -> f64 {
    let Margins { id: a, expert: b, total } = margins;
    let (low, high) = ((a + b).saturating_sub(total), a.min(b));
    let mode = (((a + 1) as f64 * (b + 1) as f64 / (total + 2) as f64) as u64).clamp(low, high);
    let ln = |n: u64| ln_factorials[n as usize];
    let at_mode = ln(a) + ln(b) + ln(total - a) + ln(total - b)
        - ln(total)
        - ln(mode)
        - ln(a - mode)
        - ln(b - mode)
        - ln(total + mode - a - b);
    let weighted = |n: u64, probability: f64| if n == 0 { 0.0 } else { probability * term(n, margins) };
    // The ratio P(n + 1) / P(n).
    let ratio = |n: u64| (a - n) as f64 * (b - n) as f64 / ((n + 1) as f64 * (total + n + 1 - a - b) as f64);
    let is_relevant = |probability: &f64| *probability > 1e-18;
    let at_mode = at_mode.exp();
    let mut sum = weighted(mode, at_mode);
    let (mut n, mut probability) = (mode, at_mode);
    while n < high && is_relevant(&probability) {
        probability *= ratio(n);
        n += 1;
        sum += weighted(n, probability);
    }
    (n, probability) = (mode, at_mode);
    while n > low && is_relevant(&probability) {
        n -= 1;
        probability /= ratio(n);
        sum += weighted(n, probability);
    }
    sum
}

/// Tabulates `ln n!` for n from 0 to `max`.
fn ln_factorials(max: u64) -> Vec<f64> {
    let sum = |sum: &mut f64, n: u64| {
        *sum += if n == 0 { 0.0 } else { (n as f64).ln() };
        Some(*sum)
    };
    (0..=max).scan(0.0, sum).collect()
}

#[cfg(test)]
#[path = "specialization_tests.rs"]
mod tests;
