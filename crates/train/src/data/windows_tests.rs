use proptest::prelude::*;

use super::*;

fn ranges(windows: &Windows) -> Vec<Range<u64>> {
    (0..windows.len()).map(|i| windows.tokens(i)).collect()
}

proptest! {
    #[test]
    fn no_token_is_both_trained_on_and_held_out(
        num_tokens in 0u64..60_000,
        seq_len in 1u64..600,
        fraction in 0.0f64..=0.5,
        seed: u64,
    ) {
        let split = Split::new(num_tokens, seq_len, fraction, seed);
        let mut used = vec![0u8; num_tokens as usize];
        for (windows, mark) in [(&split.train, 1u8), (&split.validation, 2)] {
            for range in ranges(windows) {
                prop_assert_eq!(range.end - range.start, seq_len + 1);
                prop_assert!(range.end <= num_tokens);
                used[range.start as usize..range.end as usize].iter_mut().for_each(|token| *token |= mark);
            }
        }
        prop_assert!(!used.contains(&3));
        // Whatever fits must be used: training first, validation if there is room for both.
        prop_assert_eq!(split.train.is_empty(), num_tokens < seq_len + 1);
        prop_assert_eq!(split.validation.is_empty(), fraction == 0.0 || num_tokens < 2 * (seq_len + 1));
    }

    #[test]
    fn the_share_held_out_is_the_fraction(num_tokens in 200_000u64..5_000_000, fraction in 0.02f64..=0.5, seed: u64) {
        let split = Split::new(num_tokens, 256, fraction, seed);
        let share = split.validation.len() as f64 / (split.train.len() + split.validation.len()) as f64;
        prop_assert!((share - fraction).abs() < 0.15 * fraction + 0.01, "{share} for {fraction}");
    }
}

#[test]
fn the_split_is_a_function_of_the_seed() {
    assert_eq!(Split::new(100_000, 64, 0.1, 5), Split::new(100_000, 64, 0.1, 5));
    assert_ne!(Split::new(100_000, 64, 0.1, 5), Split::new(100_000, 64, 0.1, 6));
}

#[test]
fn neighbouring_windows_share_one_token_so_that_every_token_is_a_target() {
    let split = Split::new(10, 3, 0.0, 0);
    assert_eq!(ranges(&split.train), [0..4, 3..7, 6..10]);
}
