//! The choice of one token: which experts, by scores, groups and bias.

use super::config::GroupScore;
use crate::NO_EXPERT;

/// Writes the experts with the highest `scores` to `ids`, highest first; the lower index wins a tie. Negative infinity is
/// never chosen: what is left over is [`NO_EXPERT`].
pub(crate) fn top_k(scores: &[f32], ids: &mut [u32]) {
    let mut count = 0;
    for (expert, &score) in scores.iter().enumerate() {
        let is_better = |count: usize, ids: &[u32]| count == 0 || score > scores[ids[count - 1] as usize];
        if score == f32::NEG_INFINITY || (count == ids.len() && !is_better(count, ids)) {
            continue;
        }
        let mut at = if count < ids.len() { count } else { count - 1 };
        while at > 0 && is_better(at, ids) {
            ids[at] = ids[at - 1];
            at -= 1;
        }
        ids[at] = expert as u32;
        count = (count + 1).min(ids.len());
    }
    ids[count..].fill(NO_EXPERT);
}

/// Puts the `scores` of all experts outside the `top_groups` best of `num_groups` groups out of reach.
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
