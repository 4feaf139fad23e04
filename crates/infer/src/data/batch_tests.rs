use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn evaluation_counts_every_token_but_the_first_once(num_tokens in 0u32..300, batch_size in 1usize..5) {
        let store = TokenStore::from((0..num_tokens).collect::<Vec<_>>());
        let mut counts = BTreeMap::new();
        for batch in evaluation_batches(&store, 7, batch_size) {
            prop_assert_eq!(batch.inputs.len(), batch.num_sequences * 7);
            for (&input, &target) in batch.inputs.iter().zip(&batch.targets) {
                if target != IGNORE {
                    prop_assert_eq!(input + 1, target);
                    *counts.entry(target).or_insert(0) += 1;
                }
            }
        }
        prop_assert!(counts.values().all(|&count| count == 1));
        prop_assert_eq!(counts.len() as u32, num_tokens.saturating_sub(1));
    }
}

#[test]
fn the_beginnings_of_documents_have_no_loss() {
    // Two documents of one text token each, begun by 8 and 9, ended by 7, cut into sequences of four.
    let ids = [8, 9, 1, 7, 8, 9, 2, 7, 8];
    let batch = |eos| {
        let mut batch = Batch {
            inputs: ids[..8].to_vec(),
            targets: ids[1..].to_vec(),
            num_sequences: 2,
            seq_len: 4,
            ..Batch::default()
        };
        let num_ignored = batch.ignore_text_starts(&[8, 9], eos);
        (num_ignored, batch.targets)
    };
    // The token before the first one is unknown, so the second is not recognised as part of a beginning.
    assert_eq!(batch(Some(7)), (2, vec![9, 1, 7, IGNORE, 9, 2, 7, IGNORE]));
    let mut plain = Batch { inputs: vec![7, 8], targets: vec![8, 9], num_sequences: 1, seq_len: 2, ..Batch::default() };
    assert_eq!((plain.ignore_text_starts(&[], None), &plain.targets[..]), (0, &[8, 9][..]));
    assert_eq!((plain.ignore_text_starts(&[8, 9], Some(7)), &plain.targets[..]), (2, &[IGNORE, IGNORE][..]));
    // The token begins texts and also ends them: the end counts.
    let mut one = Batch { inputs: vec![1, 7], targets: vec![7, 7], num_sequences: 1, seq_len: 2, ..Batch::default() };
    assert_eq!((one.ignore_text_starts(&[7], Some(7)), &one.targets[..]), (1, &[7, IGNORE][..]));
}

/// The id that ends documents.
const EOS: u32 = 9;

#[test]
fn a_document_ends_with_its_separator_which_predicts_nothing() {
    // Two sequences: the end of a document, a whole one, the beginning of a third; that one's end, and an empty
    // document.
    let ids = [1, EOS, 2, 3, EOS, 4, 5, EOS, EOS, 6, 7, 8, 1];
    let mut batch =
        Batch { inputs: ids[..12].into(), targets: ids[1..].into(), num_sequences: 2, seq_len: 6, ..Batch::default() };
    batch.separate_documents(EOS);
    assert_eq!(batch.segments, [2, 3, 1, 2, 1, 3]);
    let targets = [EOS, IGNORE, 3, EOS, IGNORE, 5, EOS, IGNORE, IGNORE, 7, 8, 1];
    assert_eq!(batch.targets, targets);
    assert_eq!(batch.num_targets(), 8);
    batch.tokens().check_segments().unwrap();
    batch.keep(1..2);
    assert_eq!((&batch.segments[..], batch.num_sequences), (&[2, 1, 3][..], 1));
    batch.tokens().check_segments().unwrap();
}

proptest! {
    #[test]
    fn pieces_add_up_and_begin_where_documents_or_sequences_do(
        ids in prop::collection::vec(0_u32..12, 2..120),
        seq_len in 1_usize..20,
        kept in (0_usize..9, 0_usize..9),
    ) {
        let store = TokenStore::from(ids.clone());
        let num_sequences = (ids.len() - 1) / seq_len;
        let mut batch = Batch::default();
        batch.clear(seq_len);
        (0..num_sequences).for_each(|i| batch.push(&store, (i * seq_len) as u64));
        batch.separate_documents(EOS);
        prop_assert_eq!(batch.tokens().check_segments(), Ok(()));
        let mut start = 0;
        for &len in &batch.segments {
            prop_assert!(start % seq_len == 0 || ids[start - 1] == EOS, "a piece begins within a document");
            prop_assert!(!ids[start..start + len - 1].contains(&EOS), "a piece holds two documents");
            let predicted = |at: usize| batch.targets[at] != IGNORE;
            prop_assert!((start..start + len).all(|at| predicted(at) == (ids[at] != EOS)));
            start += len;
        }
        let (first, last) = (kept.0.min(kept.1).min(num_sequences), kept.0.max(kept.1).min(num_sequences));
        let whole = batch.clone();
        batch.keep(first..last);
        prop_assert_eq!(batch.tokens().check_segments(), Ok(()));
        let before: usize = first * seq_len;
        prop_assert_eq!(&batch.inputs[..], &whole.inputs[before..last * seq_len]);
        let pieces: usize = batch.segments.iter().sum();
        prop_assert_eq!(pieces, (last - first) * seq_len);
    }
}
