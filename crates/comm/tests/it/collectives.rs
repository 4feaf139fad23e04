//! Every collective against its definition, on 1 to 8 ranks, with pieces of any length and empty ones.

use half::bf16;
use moeworks_comm::{CommError, Communicator, RankOptions, Reduce, run_ranks};
use proptest::prelude::*;

/// Runs `rank` on all ranks and returns the results. A rank's failure fails the test.
pub(crate) fn on_ranks<R: Send>(
    num_ranks: usize,
    rank: impl Fn(&dyn Communicator) -> Result<R, CommError> + Sync,
) -> Vec<R> {
    run_ranks(&RankOptions::new(num_ranks), rank).into_iter().map(Result::unwrap).collect()
}

/// A value that tells its sender, its receiver and its place in the piece.
pub(crate) fn word(from: usize, to: usize, index: usize) -> u32 {
    (from * 100_000 + to * 10_000 + index) as u32
}

/// `counts[from][to]`.
pub(crate) fn counts() -> impl Strategy<Value = Vec<Vec<usize>>> {
    let count = prop_oneof![Just(0_usize), 1..40_usize, 1000..3000_usize];
    (1..9_usize).prop_flat_map(move |n| prop::collection::vec(prop::collection::vec(count.clone(), n), n))
}

pub(crate) fn sent_by(from: usize, counts: &[Vec<usize>]) -> Vec<u32> {
    (0..counts.len()).flat_map(|to| (0..counts[from][to]).map(move |i| word(from, to, i))).collect()
}

pub(crate) fn received_by(to: usize, counts: &[Vec<usize>]) -> Vec<u32> {
    (0..counts.len()).flat_map(|from| (0..counts[from][to]).map(move |i| word(from, to, i))).collect()
}

pub(crate) fn column(counts: &[Vec<usize>], to: usize) -> Vec<usize> {
    counts.iter().map(|row| row[to]).collect()
}

/// Numbers whose sum depends on the order in which they are added.
fn rough(rank: usize, index: usize) -> f32 {
    let bits = (rank * 7919 + index * 104_729) % 1000;
    (bits as f32 - 500.0) * 10_f32.powi((bits % 7) as i32 - 3)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn all_to_all_v_brings_each_piece_to_its_rank(counts in counts()) {
        let results = on_ranks(counts.len(), |comm| {
            let recv_counts = column(&counts, comm.rank());
            let mut recv = vec![0_u32; recv_counts.iter().sum()];
            comm.all_to_all_v(&sent_by(comm.rank(), &counts), &counts[comm.rank()], &mut recv, &recv_counts)?;
            Ok(recv)
        });
        for (to, result) in results.iter().enumerate() {
            prop_assert_eq!(result, &received_by(to, &counts));
        }
    }

    #[test]
    fn all_gather_v_gives_all_pieces_to_all(lens in prop::collection::vec(0..2000_usize, 1..9)) {
        let piece = |rank: usize| (0..lens[rank]).map(move |i| word(rank, 0, i));
        let all: Vec<u32> = (0..lens.len()).flat_map(piece).collect();
        let results = on_ranks(lens.len(), |comm| {
            let mut recv = vec![0; all.len()];
            comm.all_gather_v(&piece(comm.rank()).collect::<Vec<_>>(), &mut recv, &lens)?;
            Ok(recv)
        });
        for result in results {
            prop_assert_eq!(&result, &all);
        }
    }

    #[test]
    fn reductions_sum_in_the_order_of_ranks(lens in prop::collection::vec(0..9000_usize, 1..9)) {
        let (num_ranks, len) = (lens.len(), lens.iter().sum::<usize>());
        let sum = |i| (1..num_ranks).fold(rough(0, i), |sum, rank| sum + rough(rank, i));
        let expected: Vec<f32> = (0..len).map(sum).collect();
        let results = on_ranks(num_ranks, |comm| {
            let mut data: Vec<f32> = (0..len).map(|i| rough(comm.rank(), i)).collect();
            let mut share = vec![0.0; lens[comm.rank()]];
            comm.reduce_scatter(&data, &lens, &mut share, Reduce::Sum)?;
            comm.all_reduce(&mut data, Reduce::Sum)?;
            Ok((data, share))
        });
        let shares: Vec<f32> = results.iter().flat_map(|(_, share)| share.clone()).collect();
        prop_assert!(results.iter().all(|(all, _)| *all == expected), "the same bits on every rank");
        prop_assert_eq!(shares, expected);
    }

    #[test]
    fn broadcast_gives_the_roots_data(num_ranks in 1..9_usize, root in 0..8_usize, len in 0..5000_usize) {
        let root = root % num_ranks;
        let results = on_ranks(num_ranks, |comm| {
            let mut data: Vec<u32> = (0..len).map(|i| word(comm.rank(), 0, i)).collect();
            comm.broadcast(&mut data, root)?;
            Ok(data)
        });
        let expected: Vec<u32> = (0..len).map(|i| word(root, 0, i)).collect();
        prop_assert!(results.iter().all(|data| *data == expected));
    }
}

#[test]
fn sums_of_bf16_are_taken_in_f32_and_rounded_once() {
    // In bf16 256 + 1 is 256 again, whatever often it is added.
    let results = on_ranks(5, |comm| {
        let mut data = vec![bf16::from_f32(if comm.rank() == 0 { 256.0 } else { 1.0 }); 9];
        comm.all_reduce(&mut data, Reduce::Sum)?;
        Ok(data)
    });
    assert!(results.iter().flatten().all(|x| x.to_f32() == 260.0));
}

#[test]
fn greatest_and_least_let_through_what_is_no_number() {
    let results = on_ranks(3, |comm| {
        let rank = comm.rank() as f64;
        let mut greatest = [rank, if comm.rank() == 1 { f64::NAN } else { rank }];
        let mut least = greatest;
        comm.all_reduce(&mut greatest, Reduce::Max)?;
        comm.all_reduce(&mut least, Reduce::Min)?;
        let mut counts = [1_u64 << 40];
        comm.all_reduce(&mut counts, Reduce::Sum)?;
        Ok((greatest, least, counts))
    });
    for (greatest, least, counts) in results {
        assert!(greatest[0] == 2.0 && least[0] == 0.0 && counts == [3 << 40]);
        assert!(greatest[1].is_nan() && least[1].is_nan());
    }
}

#[test]
fn messages_between_two_ranks_are_told_apart_by_tag_and_order() {
    let results = on_ranks(3, |comm| {
        let next = (comm.rank() + 1) % 3;
        let before = (comm.rank() + 2) % 3;
        let first = comm.start_send(vec![comm.rank() as u32; 4], next, 1)?;
        let second = comm.start_send(vec![10 + comm.rank() as u32; 4], next, 1)?;
        let other = comm.start_send(vec![20 + comm.rank() as u32; 2], next, 2)?;
        let (mut a, mut b, mut c) = ([0_u32; 4], [0_u32; 4], [0_u32; 2]);
        comm.receive(&mut c, before, 2)?;
        comm.receive(&mut a, before, 1)?;
        comm.receive(&mut b, before, 1)?;
        for pending in [first, second, other] {
            pending.finish()?;
        }
        Ok((a[0], b[3], c[1]))
    });
    assert_eq!(results, [(2, 12, 22), (0, 10, 20), (1, 11, 21)]);
}

#[test]
fn groups_of_a_split_talk_among_themselves_in_the_order_of_keys() {
    let nodes = [0, 0, 1, 1, 2, 2, 2];
    let options = RankOptions::new(7).with_nodes(&nodes);
    let results = run_ranks(&options, |comm| {
        // Ranks 0, 2, 4, 6 in reverse; 1, 3 as they are; 5 alone outside.
        let color = if comm.rank() == 5 { None } else { Some((comm.rank() % 2) as u32) };
        let key = if comm.rank().is_multiple_of(2) { 10 - comm.rank() } else { 0 };
        let Some(part) = comm.split(color, key)? else { return Ok::<_, CommError>((vec![], vec![], vec![])) };
        let mut all = vec![0; part.size()];
        part.all_gather(&[comm.rank() as u32], &mut all)?;
        let inner = part.split(Some(0), part.rank())?.expect("a colour was given");
        inner.barrier()?;
        Ok((all, part.world_ranks().to_vec(), part.nodes().to_vec()))
    });
    let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(results[4], (vec![6, 4, 2, 0], vec![6, 4, 2, 0], vec![0, 0, 1, 2]));
    assert_eq!(results[3], (vec![1, 3], vec![1, 3], vec![0, 1]));
    assert!(results[5].0.is_empty());
}
