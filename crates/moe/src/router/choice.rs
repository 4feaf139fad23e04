//! The selection of one token's experts by scores, groups and bias.

use super::config::GroupScore;
use crate::NO_EXPERT;

/// Writes the experts with the highest `scores` to `ids`, highest first; the lower index wins a tie. Negative
/// infinity is never chosen; unused entries are [`NO_EXPERT`].
pub(crate) fn top_k(scores: &[f32], ids: &mut [u32]) {
    let (mut count, mut least) = (0, f32::NEG_INFINITY);
    for (expert, &score) in scores.iter().enumerate() {
        // A NaN takes a free place but displaces no other score.
        let is_wanted = if count < ids.len() { score != f32::NEG_INFINITY } else { score > least };
        if !is_wanted {
            continue;
        }
        let mut at = count.min(ids.len() - 1);
        while at > 0 && score > scores[ids[at - 1] as usize] {
            ids[at] = ids[at - 1];
            at -= 1;
        }
        ids[at] = expert as u32;
        count = (count + 1).min(ids.len());
        if count == ids.len() {
            least = scores[ids[count - 1] as usize];
        }
    }
    ids[count..].fill(NO_EXPERT);
}

/// Writes the fewest experts whose probabilities sum to at least `p` to `ids`, likeliest first, the lower index at a
/// tie (2403.07652): at least one, at most `ids.len()`.
pub(crate) fn top_p(probs: &[f32], p: f32, ids: &mut [u32]) {
    top_k(probs, ids);
    let mut sum = 0.0;
    for (i, id) in ids.iter_mut().enumerate() {
        let prob = probs.get(*id as usize).copied().unwrap_or(0.0);
        let is_enough = sum >= p || prob == 0.0;
        if i > 0 && is_enough {
            *id = NO_EXPERT;
        }
        sum += prob;
    }
}

/// Writes the experts with a positive gate to `ids`, largest first, the lower index at a tie.
pub(crate) fn positive(gates: &[f32], ids: &mut [u32]) {
    top_k(gates, ids);
    ids.iter_mut().filter(|id| **id != NO_EXPERT && gates[**id as usize] <= 0.0).for_each(|id| *id = NO_EXPERT);
}

/// Cuts the rows of `ids [T, from]` to the longest one. Returns `[T, K]` and K, at least 1. [`NO_EXPERT`] must come
/// last in a row.
pub(crate) fn compact(ids: &[u32], from: usize) -> (Vec<u32>, usize) {
    let count = |ids: &[u32]| ids.iter().take_while(|&&id| id != NO_EXPERT).count();
    let longest = ids.chunks(from).map(count).max().unwrap_or(1).max(1);
    (ids.chunks(from).flat_map(|ids| &ids[..longest]).copied().collect(), longest)
}

/// Inverts the tokens of each expert to the experts of each token, best-scored first, the lower index at a tie.
/// Returns `[T, K]` and K, like [`compact`].
pub(crate) fn invert(tokens: &[Vec<u32>], scores: &[f32]) -> (Vec<u32>, usize) {
    let e = tokens.len();
    let mut of_token = vec![Vec::new(); scores.len() / e.max(1)];
    for (expert, tokens) in tokens.iter().enumerate() {
        tokens.iter().for_each(|&t| of_token[t as usize].push(expert as u32));
    }
    let longest = of_token.iter().map(Vec::len).max().unwrap_or(1).max(1);
    let mut ids = Vec::with_capacity(of_token.len() * longest);
    for (t, experts) in of_token.iter_mut().enumerate() {
        let score = |e: u32| scores[t * tokens.len() + e as usize];
        experts.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
        ids.extend_from_slice(experts);
        ids.resize((t + 1) * longest, NO_EXPERT);
    }
    (ids, longest)
}

/// Sets the `scores` of all experts outside the `top_groups` best of `num_groups` groups to negative infinity.
pub(crate) fn limit_groups(scores: &mut [f32], num_groups: usize, top_groups: usize, by: GroupScore) {
    if top_groups >= num_groups {
        return;
    }
    let size = scores.len() / num_groups;
    let of_group: Vec<f32> = scores.chunks(size).map(|scores| group_score(scores, by)).collect();
    let mut best = vec![NO_EXPERT; top_groups];
    top_k(&of_group, &mut best);
    for (group, scores) in scores.chunks_mut(size).enumerate() {
        if !best.contains(&(group as u32)) {
            scores.fill(f32::NEG_INFINITY);
        }
    }
}

fn group_score(scores: &[f32], by: GroupScore) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &score in scores {
        if score > first {
            (first, second) = (score, first);
        } else if score > second {
            second = score;
        }
    }
    match by {
        GroupScore::TopTwo if scores.len() > 1 => first + second,
        GroupScore::TopTwo | GroupScore::Max => first,
    }
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
