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
    // What stands before the first token is not known, so that its second is not known for one.
    assert_eq!(batch(Some(7)), (2, vec![9, 1, 7, IGNORE, 9, 2, 7, IGNORE]));
    let mut plain = Batch { inputs: vec![7, 8], targets: vec![8, 9], num_sequences: 1, seq_len: 2, ..Batch::default() };
    assert_eq!((plain.ignore_text_starts(&[], None), &plain.targets[..]), (0, &[8, 9][..]));
    assert_eq!((plain.ignore_text_starts(&[8, 9], Some(7)), &plain.targets[..]), (2, &[IGNORE, IGNORE][..]));
    // A beginning that is also the end of texts: the end counts.
    let mut one = Batch { inputs: vec![1, 7], targets: vec![7, 7], num_sequences: 1, seq_len: 2, ..Batch::default() };
    assert_eq!((one.ignore_text_starts(&[7], Some(7)), &one.targets[..]), (1, &[7, IGNORE][..]));
}
