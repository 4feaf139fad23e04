use moeworks_tensor::{Purpose, Random};

use super::*;

/// Computes the plain mutual information and the entropy of the experts, directly from the definitions.
fn plain(pairs: &[(u32, u32)]) -> (f64, f64) {
    let share =
        |is: &dyn Fn(&(u32, u32)) -> bool| pairs.iter().filter(|pair| is(pair)).count() as f64 / pairs.len() as f64;
    let information = pairs.iter().map(|&(id, expert)| {
        let joint = share(&|pair| *pair == (id, expert));
        // The mean over pairs weighs each distinct pair by its frequency.
        (joint / (share(&|pair| pair.0 == id) * share(&|pair| pair.1 == expert))).ln() / pairs.len() as f64
    });
    let entropy = pairs.iter().map(|&(_, expert)| -share(&|pair| pair.1 == expert).ln() / pairs.len() as f64);
    (information.sum(), entropy.sum())
}

/// Lists every order of `items`.
fn permutations(items: &[u32]) -> Vec<Vec<u32>> {
    if items.is_empty() {
        return vec![Vec::new()];
    }
    let with_first = |first: usize| {
        let mut rest = items.to_vec();
        let first = rest.remove(first);
        permutations(&rest).into_iter().map(move |rest| [&[first][..], &rest].concat())
    };
    (0..items.len()).flat_map(with_first).collect()
}

#[test]
fn chance_is_the_mean_over_all_ways_to_deal_the_experts_out() {
    for (ids, experts) in [
        ([0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 2, 0]),
        ([5, 5, 5, 5, 5, 5, 1], [3, 3, 3, 9, 9, 9, 9]),
        ([0, 1, 2, 3, 4, 4, 4], [1, 1, 1, 0, 0, 0, 2]),
    ] {
        let dealt = |experts: &[u32]| -> Vec<(u32, u32)> { ids.iter().copied().zip(experts.iter().copied()).collect() };
        let all = permutations(&experts);
        assert_eq!(all.len(), 5040);
        let chance = all.iter().map(|experts| plain(&dealt(experts)).0).sum::<f64>() / 5040.0;
        let (information, entropy) = plain(&dealt(&experts));
        let found = specialization(dealt(&experts)).unwrap();
        assert!((found.nats - (information - chance)).abs() < 1e-12, "{found:?}");
        assert!((found.share - (information - chance) / (entropy - chance)).abs() < 1e-12, "{found:?}");
    }
}

#[test]
fn a_routing_by_the_id_alone_is_1_and_one_that_does_not_look_at_it_0() {
    let by_id: Vec<(u32, u32)> = (0..4000).map(|i| (i % 50, i % 50 % 8)).collect();
    let found = specialization(by_id).unwrap();
    assert!((found.share - 1.0).abs() < 1e-9 && found.nats > 1.9, "{found:?}");
    let random = Random::new(1, Purpose::Test, 0);
    let blind: Vec<(u32, u32)> = (0..20_000).map(|i| (i as u32 % 211, random.below(i, 8) as u32)).collect();
    let (information, _) = plain(&blind[..2000]);
    assert!(information > 0.2, "the plain estimate is far from 0: {information}");
    let found = specialization(blind[..2000].to_vec()).unwrap();
    assert!(found.share.abs() < 0.05, "{found:?}");
    let found = specialization(blind).unwrap();
    assert!(found.share.abs() < 0.01, "{found:?}");
}

#[test]
fn the_order_of_the_pairs_does_not_matter_to_a_bit() {
    let pairs: Vec<(u32, u32)> = (0..999_u32).map(|i| (i * i % 31, i * 7 % 5)).collect();
    let reversed = pairs.iter().copied().rev().collect();
    assert_eq!(specialization(pairs), specialization(reversed));
}

#[test]
fn what_tells_nothing_is_none() {
    assert_eq!(specialization(Vec::new()), None);
    assert_eq!(specialization(vec![(1, 1)]), None);
    assert_eq!(specialization((0..99).map(|i| (i % 7, 4)).collect()), None, "one expert");
    assert_eq!(specialization((0..99).map(|i| (i, i % 4)).collect()), None, "no id twice");
}
