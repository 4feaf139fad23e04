use moeworks_tensor::{Purpose, Random};
use proptest::prelude::*;

use super::{SpanPair, SpanRule, leave_out_spans, random_lengths};

const EOS: u32 = 1;

fn pair(tokens: &[u32], sentinels: &[u32], seed: u64) -> SpanPair {
    let rule = SpanRule { sentinels: sentinels.to_vec(), eos: EOS, start: 0 };
    let pair = leave_out_spans(tokens, &rule, &random(seed));
    let lengths = rule.lengths(tokens.len());
    assert_eq!((pair.source.len(), pair.answer.len()), (lengths.source, lengths.answer));
    pair
}

/// Returns sentinels as T5 numbers them, from the end of the vocabulary down.
fn sentinels(count: u32) -> Vec<u32> {
    (0..count).map(|i| 1_000_000 - i).collect()
}

fn random(seed: u64) -> Random {
    Random::new(seed, Purpose::Spans, 0)
}

/// Restores the text of a pair.
fn joined(pair: &SpanPair, sentinels: &[u32]) -> Vec<u32> {
    let mut answer = &pair.answer[..pair.answer.len() - 1];
    let mut text = Vec::new();
    for &id in &pair.source[..pair.source.len() - 1] {
        if !sentinels.contains(&id) {
            text.push(id);
            continue;
        }
        assert_eq!(answer[0], id, "spans are answered in their order");
        let end = answer[1..].iter().position(|id| sentinels.contains(id)).map_or(answer.len(), |at| at + 1);
        text.extend(&answer[1..end]);
        answer = &answer[end..];
    }
    assert!(answer.is_empty());
    text
}

/// T5's own numbers for a text of 512 tokens: 77 removed in 26 spans.
#[test]
fn as_many_tokens_are_left_out_as_in_t5() {
    let tokens: Vec<u32> = (10..522).collect();
    let found = pair(&tokens, &sentinels(100), 0);
    assert_eq!((found.source.len(), found.answer.len()), (512 - 77 + 26 + 1, 77 + 26 + 1));
    assert_ne!(found, pair(&tokens, &sentinels(100), 1));
}

#[test]
fn every_division_is_as_likely() {
    let mut counts = std::collections::BTreeMap::new();
    for seed in 0..6000 {
        *counts.entry(random_lengths(5, 3, &random(seed), 0)).or_insert(0) += 1;
    }
    assert_eq!(counts.len(), 6);
    assert!(counts.values().all(|count| (850..1150).contains(count)), "{counts:?}");
}

proptest! {
    #[test]
    fn nothing_is_lost_and_lengths_depend_on_the_length_alone(len in 2_usize..300, count in 1_u32..20, seed: u64) {
        let (tokens, sentinels): (Vec<u32>, _) = ((10..10 + len as u32).collect(), sentinels(count));
        let found = pair(&tokens, &sentinels, seed);
        prop_assert_eq!(joined(&found, &sentinels), &tokens[..]);
        prop_assert_eq!((found.source.last(), found.answer.last()), (Some(&EOS), Some(&EOS)));
        let other = pair(&tokens, &sentinels, seed ^ 1);
        prop_assert_eq!((found.source.len(), found.answer.len()), (other.source.len(), other.answer.len()));
    }
}
