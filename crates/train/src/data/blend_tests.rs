use proptest::prelude::*;

use super::*;

fn order(blend: &Blend, first: u64, num: usize) -> Vec<(usize, u64)> {
    let mut cursor = blend.at(first);
    (0..num).map(|_| cursor.advance()).collect()
}

#[test]
fn one_source_has_every_item() {
    assert_eq!(order(&Blend::new(&[0.3]), 5, 3), [(0, 5), (0, 6), (0, 7)]);
    assert_eq!(Blend::new(&[0.3]).at(1 << 50).counts(), [1 << 50]);
}

#[test]
fn items_come_in_the_order_of_their_times() {
    let sources: Vec<usize> = order(&Blend::new(&[0.5, 0.25, 0.25]), 0, 8).iter().map(|item| item.0).collect();
    assert_eq!(sources, [0, 1, 2, 0, 0, 1, 2, 0]);
}

#[test]
fn weights_of_any_size_make_shares() {
    for weights in [[1e300, 3e300], [1e-300, 3e-300], [1.0, 3.0]] {
        let blend = Blend::new(&weights);
        assert!((blend.share(1) - 0.75).abs() < 1e-9, "{weights:?}");
    }
    assert!(Blend::new(&[1.0, 1e300]).share(0) > 0.0);
}

proptest! {
    #[test]
    fn every_position_is_found_at_once(
        weights in prop::collection::vec(0.001f64..10.0, 1..9),
        first in 0u64..3000,
    ) {
        let blend = Blend::new(&weights);
        prop_assert_eq!(order(&blend, first, 20), order(&blend, 0, first as usize + 20)[first as usize..].to_vec());
    }

    #[test]
    fn each_source_has_had_its_share_at_any_position(
        weights in prop::collection::vec(0.001f64..10.0, 1..9),
        position in 0u64..1 << 50,
    ) {
        let blend = Blend::new(&weights);
        let cursor = blend.at(position);
        prop_assert_eq!(cursor.counts().iter().sum::<u64>(), position);
        for (source, &count) in cursor.counts().iter().enumerate() {
            let share = blend.share(source);
            let bound = 0.5 + share * weights.len() as f64 / 2.0 + position as f64 * 1e-14;
            prop_assert!((count as f64 - position as f64 * share).abs() <= bound + 1e-6);
        }
    }

    #[test]
    fn sources_that_end_leave_their_places_to_others(lens in prop::collection::vec(0u64..20, 1..5)) {
        let blend = Blend::new(&vec![1.0; lens.len()]);
        let mut cursor = blend.at(0);
        let mut seen = vec![0; lens.len()];
        while let Some((source, item)) = cursor.advance_within(&lens) {
            prop_assert_eq!(item, seen[source]);
            seen[source] += 1;
        }
        prop_assert_eq!(seen, lens);
    }
}
