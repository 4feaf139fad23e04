use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn every_position_has_its_own_value(size in 1u64..3000, seed: u64, epoch in 0u64..1000) {
        let order = Permutation::new(size, seed, epoch);
        let values: HashSet<u64> = (0..size).map(|i| order.at(i)).collect();
        prop_assert_eq!(values.len() as u64, size);
        prop_assert!(values.iter().all(|&value| value < size));
    }

    #[test]
    fn large_sizes_stay_in_range(size in 1u64 << 40..1 << 62, seed: u64, position: u64) {
        prop_assert!(Permutation::new(size, seed, 0).at(position % size) < size);
    }
}

#[test]
fn epochs_and_seeds_differ() {
    let order = |seed, epoch| (0..100).map(|i| Permutation::new(100, seed, epoch).at(i)).collect::<Vec<_>>();
    assert_eq!(order(1, 0), order(1, 0));
    assert_ne!(order(1, 0), order(1, 1));
    assert_ne!(order(1, 0), order(2, 0));
}

/// In a good permutation each value is first about equally often: 6,000 draws of 6 values, within 5 standard
/// deviations.
#[test]
fn small_sizes_are_mixed() {
    let mut counts = [0u32; 6];
    for epoch in 0..6000 {
        counts[Permutation::new(6, 3, epoch).at(0) as usize] += 1;
    }
    assert!(counts.iter().all(|count| count.abs_diff(1000) < 145), "{counts:?}");
}
