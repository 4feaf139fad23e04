use proptest::prelude::*;

use super::*;

const OPTIONS: DatasetOptions = DatasetOptions {
    seq_len: 7,
    batch_size: 3,
    grad_accumulation: 2,
    validation_fraction: 0.1,
    validation_seed: 3,
    seed: 4,
};

/// Returns a data set of the tokens 0, 1, 2, ..., so that a sequence is identified by its first token.
fn dataset(num_tokens: u32, options: DatasetOptions) -> Dataset {
    let tokens: Vec<u32> = (0..num_tokens).collect();
    Dataset::new(Arc::new(TokenStore::from(tokens)), options, "here").unwrap()
}

fn first_tokens(batch: &Batch) -> Vec<u32> {
    batch.inputs.iter().copied().step_by(batch.seq_len).collect()
}

#[test]
fn targets_follow_their_inputs() {
    let batch = dataset(1000, OPTIONS).train_batch(5, 1);
    assert_eq!((batch.num_sequences, batch.seq_len, batch.inputs.len()), (3, 7, 21));
    for (i, (input, target)) in batch.inputs.iter().zip(&batch.targets).enumerate() {
        assert_eq!(input + 1, *target);
        assert!(i % 7 == 0 || batch.inputs[i - 1] + 1 == *input);
    }
}

#[test]
fn ids_are_counted_in_the_training_windows_alone() {
    let tokens: Vec<u32> = (0..4000).map(|t| t % 5).collect();
    let data = Dataset::new(Arc::new(TokenStore::from(tokens)), OPTIONS, "here").unwrap();
    let counts = data.token_counts(6);
    assert_eq!(counts.iter().sum::<u64>(), data.parts()[0].train().len() * 7);
    assert!(counts[..5].iter().all(|n| n.abs_diff(counts[0]) < 100) && counts[5] == 0, "{counts:?}");
}

proptest! {
    #[test]
    fn each_epoch_passes_every_window_once(num_tokens in 20u32..2000, seed: u64, first in 0u64..4) {
        let data = dataset(num_tokens, DatasetOptions { seed, ..OPTIONS });
        let per_epoch = data.parts()[0].train().len();
        let mut batch = Batch::default();
        data.fill_sequences(first * per_epoch, per_epoch as usize, &mut batch);
        let mut seen = first_tokens(&batch);
        seen.sort_unstable();
        let expected: Vec<u32> = (0..per_epoch).map(|i| data.parts()[0].train().tokens(i).start as u32).collect();
        prop_assert_eq!(seen, expected);
    }

    #[test]
    fn the_order_is_the_same_whatever_the_size_of_batches(
        num_tokens in 20u32..2000,
        batch_size in 1usize..9,
        grad_accumulation in 1usize..4,
    ) {
        let data = dataset(num_tokens, DatasetOptions { batch_size, grad_accumulation, ..OPTIONS });
        let stepwise: Vec<u32> = (0..6)
            .flat_map(|step| (0..grad_accumulation).map(move |micro| (step, micro)))
            .flat_map(|(step, micro)| first_tokens(&data.train_batch(step, micro)))
            .collect();
        let mut whole = Batch::default();
        data.fill_sequences(0, stepwise.len(), &mut whole);
        prop_assert_eq!(stepwise, first_tokens(&whole));
    }
}

#[test]
fn epochs_come_in_different_orders() {
    let data = dataset(2000, OPTIONS);
    let per_epoch = data.parts()[0].train().len();
    let mut epochs = [Batch::default(), Batch::default()];
    for (epoch, batch) in epochs.iter_mut().enumerate() {
        data.fill_sequences(epoch as u64 * per_epoch, per_epoch as usize, batch);
    }
    assert_ne!(first_tokens(&epochs[0]), first_tokens(&epochs[1]));
}

#[test]
fn a_far_step_costs_what_a_near_one_costs() {
    let data = dataset(2000, OPTIONS);
    let far = (1u64 << 48) - 1;
    assert_eq!(data.train_batch(far, 1), data.train_batch(far, 1));
}

#[test]
fn held_out_batches_are_the_held_out_windows() {
    let data = dataset(2000, OPTIONS);
    let batches: Vec<Batch> = data.validation_batches(0).collect();
    let mut seen: Vec<u32> = batches.iter().flat_map(first_tokens).collect();
    seen.sort_unstable();
    let windows = data.parts()[0].validation();
    assert_eq!(seen, (0..windows.len()).map(|i| windows.tokens(i).start as u32).collect::<Vec<_>>());
    assert_eq!(data.validation_batches(2).collect::<Vec<_>>(), batches[..2]);
    assert_eq!(data.validation_batches(1000).count(), batches.len());
    assert_eq!(dataset(2000, DatasetOptions { validation_fraction: 0.0, ..OPTIONS }).validation_batches(0).count(), 0);
}

#[test]
fn the_seed_of_training_changes_its_order_and_nothing_that_is_held_out() {
    let (data, other) = (dataset(2000, OPTIONS), dataset(2000, DatasetOptions { seed: 5, ..OPTIONS }));
    assert_eq!(data.validation_batches(0).collect::<Vec<_>>(), other.validation_batches(0).collect::<Vec<_>>());
    assert_ne!(data.train_batch(0, 0), other.train_batch(0, 0));
    let elsewhere = dataset(2000, DatasetOptions { validation_seed: 5, ..OPTIONS });
    assert_ne!(data.parts()[0].validation(), elsewhere.parts()[0].validation());
}

#[test]
fn data_shorter_than_a_sequence_says_what_there_is_and_what_is_needed() {
    let error = Dataset::new(Arc::new(TokenStore::from(vec![0; 7])), OPTIONS, "a.txt").unwrap_err();
    let expected = "a.txt: 7 tokens, but a sequence needs 8 (train.seq_len + 1); give more data or lower train.seq_len";
    assert_eq!(error.to_string(), expected);
    assert_eq!(dataset(8, OPTIONS).parts()[0].train().len(), 1);
}

/// The token that ends documents.
const EOS: u32 = 5;

/// Returns documents of the given lengths, each ended by [`EOS`].
fn documents(lens: &[u64]) -> Dataset {
    let mut tokens = Vec::new();
    for (i, &len) in lens.iter().enumerate() {
        tokens.extend((0..len).map(|at| 10 + (i as u32 * 31 + at as u32) % 90));
        tokens.push(EOS);
    }
    Dataset::new(Arc::new(TokenStore::from(tokens)), OPTIONS, "here").unwrap().with_separate_documents(EOS)
}

proptest! {
    #[test]
    fn the_pieces_of_a_batch_are_its_documents(lens in prop::collection::vec(1_u64..30, 10..60), step in 0_u64..9) {
        let data = documents(&lens);
        let batches = (0..2).map(|micro| data.train_batch(step, micro)).chain(data.validation_batches(0));
        let batches: Vec<Batch> = batches.collect();
        prop_assert!(batches.len() > 2, "some are held out");
        for batch in &batches {
            prop_assert_eq!(batch.tokens().check_segments(), Ok(()));
            let ends = batch.inputs.iter().filter(|&&id| id == EOS).count();
            prop_assert!(batch.segments.len() >= ends.max(batch.num_sequences));
            prop_assert_eq!(batch.num_targets(), batch.inputs.len() - ends);
        }
        prop_assert_eq!(data.targets_of_step(step), batches[..2].iter().map(Batch::num_targets).sum::<usize>());
    }

    /// A resumed run reads the batch of a step at any size; a rank takes its share of the sequences.
    #[test]
    fn resumed_runs_and_ranks_take_the_same_pieces(lens in prop::collection::vec(1_u64..30, 10..60), num_ranks in 1_usize..4) {
        let data = documents(&lens);
        let mut whole = Batch::default();
        data.fill_sequences(0, 12, &mut whole);
        let steps = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(step, micro)| data.train_batch(step, micro));
        let pieces = |batches: &[Batch]| batches.iter().flat_map(|batch| batch.segments.clone()).collect::<Vec<_>>();
        prop_assert_eq!(pieces(&steps), &whole.segments[..]);
        let shares: Vec<Batch> = (0..num_ranks).map(|rank| {
            let mut share = whole.clone();
            share.keep(12 * rank / num_ranks..12 * (rank + 1) / num_ranks);
            share
        }).collect();
        prop_assert_eq!(pieces(&shares), &whole.segments[..]);
        prop_assert!(shares.iter().all(|share| share.tokens().check_segments().is_ok()));
    }
}

#[test]
fn without_separate_documents_a_sequence_is_one_piece_and_all_its_tokens_have_a_target() {
    let data = dataset(1000, OPTIONS);
    assert!(data.train_batch(0, 0).segments.is_empty());
    assert_eq!(data.targets_of_step(3), 3 * 7 * 2);
}

#[test]
fn separate_documents_need_a_tokenizer_that_ends_them() {
    struct Endless;
    impl Encode for Endless {
        fn encode(&self, _: &str, _: &mut Vec<u32>) -> Result<(), String> {
            Ok(())
        }

        fn eos(&self) -> Option<u32> {
            None
        }

        fn vocab_size(&self) -> usize {
            256
        }

        fn fingerprint(&self) -> u128 {
            0
        }
    }
    let mut config = RunConfig::default();
    assert_eq!(separator(&config, &Endless).unwrap(), None);
    config.data.separate_documents = true;
    let error = separator(&config, &Endless).unwrap_err().to_string();
    assert!(error.starts_with("data.separate_documents = true: the tokenizer has no token that ends"), "{error}");
    assert_eq!(separator(&config, &moeworks_model::Tokenizer::bytes()).unwrap(), Some(256));
}
