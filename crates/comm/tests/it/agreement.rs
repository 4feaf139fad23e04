//! Ranks that make different calls, or calls with sizes that do not fit, are named instead of waited for.

use moeworks_comm::{CommError, Communicator, RankOptions, Reduce, run_ranks};

fn errors(num_ranks: usize, rank: impl Fn(&dyn Communicator) -> Result<(), CommError> + Sync) -> Vec<String> {
    let results = run_ranks(&RankOptions::new(num_ranks), rank);
    results.into_iter().map(|result| result.expect_err("nobody gets through").to_string()).collect()
}

fn assert_all(errors: &[String], part: &str) {
    assert!(errors.iter().all(|text| text.contains(part)), "{part} in {errors:?}");
}

#[test]
fn the_rank_that_calls_something_else_is_named() {
    let errors = errors(4, |comm| match comm.rank() {
        2 => comm.all_reduce(&mut [1.0_f32; 4], Reduce::Sum),
        _ => comm.barrier(),
    });
    assert_all(&errors, "rank 2 disagrees with the others");
    assert_all(&errors, "rank 2 calls all-reduce of 16 bytes (Sum of F32)");
}

#[test]
fn another_length_root_or_type_is_a_disagreement() {
    let lengths = errors(3, |comm| comm.all_reduce(&mut vec![0_u32; 4 + comm.rank() / 2], Reduce::Sum));
    assert_all(&lengths, "rank 2 disagrees");
    // Rank 2 may have its data and be gone before rank 1 comes.
    let roots = run_ranks(&RankOptions::new(3), |comm| comm.broadcast(&mut [0_u8; 3], usize::from(comm.rank() == 1)));
    let roots: Vec<_> =
        roots.into_iter().take(2).map(|root| root.expect_err("no root gets through").to_string()).collect();
    assert_all(&roots, "rank 1 disagrees");
    let types = errors(3, |comm| match comm.rank() {
        0 => comm.all_reduce(&mut [0_u32], Reduce::Sum),
        _ => comm.all_reduce(&mut [0_f32], Reduce::Sum),
    });
    assert_all(&types, "rank 0 disagrees");
    let counts = errors(3, |comm| {
        let counts = if comm.rank() == 1 { [1, 2, 1] } else { [1, 1, 2] };
        comm.all_gather_v(&vec![0_u8; counts[comm.rank()]], &mut [0; 4], &counts)
    });
    assert_all(&counts, "rank 1 disagrees");
}

#[test]
fn two_ranks_that_expect_different_sizes_are_both_named() {
    let pieces = errors(3, |comm| {
        let send_counts = if comm.rank() == 2 { [1, 3, 1] } else { [1; 3] };
        comm.all_to_all_v(&vec![0_u32; send_counts.iter().sum()], &send_counts, &mut [0; 3], &[1; 3])
    });
    assert_all(&pieces, "rank 2 sends 12 bytes to rank 1, which expects 4");
    let messages = errors(2, |comm| match comm.rank() {
        0 => comm.send(&[0_u8; 5], 1, 0),
        _ => comm.receive(&mut [0_u8; 6], 0, 0),
    });
    assert_all(&messages, "rank 0 sends 5 bytes to rank 1, which expects 6");
}

#[test]
fn a_call_that_contradicts_itself_is_refused_at_once() {
    let sums = errors(2, |comm| comm.all_to_all_v(&[0_u8; 3], &[1, 1], &mut [0_u8; 2], &[1, 1]));
    assert_all(&sums, "the send counts add up to 2 bytes, but the memory has 3");
    let lens = errors(2, |comm| comm.all_to_all_v(&[0_u8; 3], &[3], &mut [0_u8; 2], &[1, 1]));
    assert_all(&lens, "1 send counts, but the group has 2 ranks");
    let huge = errors(2, |comm| comm.all_to_all_v(&[0_u64; 2], &[usize::MAX, 3], &mut [0_u64; 2], &[1, 1]));
    assert_all(&huge, "the sum of the send counts overflows");
    let own = errors(2, |comm| comm.all_gather_v(&[0_u8; 3], &mut [0_u8; 4], &[2, 2]));
    assert_all(&own, "this rank gives 3 bytes, but its count is 2");
    let share = errors(2, |comm| comm.reduce_scatter(&[0_f32; 4], &[2, 2], &mut [0_f32; 1], Reduce::Sum));
    assert_all(&share, "this rank's share is 8 bytes, but its memory has 4");
    let root = errors(2, |comm| comm.broadcast(&mut [0_u8], 2));
    assert_all(&root, "rank 2 is out of range: the group has 2 ranks");
}
