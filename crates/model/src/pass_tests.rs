use proptest::prelude::*;

use super::*;

fn checked(segments: &[usize], num_sequences: usize, seq_len: usize) -> Result<(), BatchError> {
    TokenBatch { segments, num_sequences, seq_len, ..TokenBatch::default() }.check_segments()
}

#[test]
fn pieces_fill_their_sequences() {
    for segments in [&[][..], &[4, 4], &[1, 3, 4], &[4, 2, 1, 1]] {
        assert_eq!(checked(segments, 2, 4), Ok(()), "{segments:?}");
    }
    assert_eq!(checked(&[], 0, 4), Ok(()));
}

#[test]
fn pieces_that_do_not_fit_are_named() {
    let cases: [(&[usize], BatchError, &str); 5] = [
        (&[3, 0, 1, 4], BatchError::EmptySegment { index: 1 }, "segments[1] = 0"),
        (
            &[3, 2, 3],
            BatchError::SegmentCrosses { index: 1, len: 2, room: 1 },
            "segments[1] = 2: its sequence has only 1",
        ),
        (&[usize::MAX, 1], BatchError::SegmentCrosses { index: 0, len: usize::MAX, room: 4 }, "segments[0] = "),
        (&[4, 3], BatchError::SegmentSum { sum: 7, num_tokens: 8 }, "have 7 tokens in all, but the batch has 8"),
        (&[4, 4, 1], BatchError::SegmentSum { sum: 9, num_tokens: 8 }, "have 9 tokens in all"),
    ];
    for (segments, error, text) in cases {
        assert_eq!(checked(segments, 2, 4), Err(error.clone()), "{segments:?}");
        assert!(error.to_string().contains(text), "{error}");
    }
    assert!(checked(&[1], 1, 0).is_err());
}

proptest! {
    #[test]
    fn any_pieces_are_checked_without_a_panic(
        segments in prop::collection::vec(0_usize..9, 0..12),
        num_sequences in 0_usize..4,
        seq_len in 0_usize..9,
    ) {
        if checked(&segments, num_sequences, seq_len).is_ok() && !segments.is_empty() {
            prop_assert_eq!(segments.iter().sum::<usize>(), num_sequences * seq_len);
        }
    }
}
