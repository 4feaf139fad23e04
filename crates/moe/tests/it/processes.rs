//! Steps of expert-parallel layers among processes, under every installed MPI launcher, compared with one rank.

use moeworks_comm::mpi::{MpiOptions, run_mpi};
use moeworks_comm::{CommError, Communicator, Reduce};
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;

use crate::launcher::{launchers, text};
use crate::ranks::{Case, Step, assert_close, cases_of, part_of, step};

/// Random cases for each number of ranks, equal on all ranks.
const NUM_CASES: usize = 4;

#[test]
fn processes_give_what_one_rank_gives() {
    // Only launchers that use their own library.
    for launcher in launchers("processes::plays_a_rank").into_iter().filter(|launcher| launcher.library.is_none()) {
        for num_ranks in [1, 2, 3, 4, 8] {
            let output = launcher.run(num_ranks, "steps", std::path::Path::new("/dev/null"));
            assert!(output.status.success(), "{num_ranks} ranks, {}: {}", launcher.program.display(), text(&output));
        }
    }
}

#[test]
#[ignore = "a rank: started by a launcher"]
fn plays_a_rank() {
    let options = MpiOptions::default().with_ranks_per_node(2).with_timeout(std::time::Duration::from_secs(60));
    let report = |rank: usize, error: &dyn std::fmt::Display| eprintln!("rank {rank}: {error}");
    run_mpi(&options, report, play).expect("only a run of one rank fails here");
}

fn play(comm: &dyn Communicator) -> Result<(), CommError> {
    let mut runner = TestRunner::deterministic();
    for _ in 0..NUM_CASES {
        let case = cases_of(comm.size()).new_tree(&mut runner).expect("a case").current();
        check(comm, &case)?;
    }
    Ok(())
}

/// Compares this rank's part of a step with a single rank's whole step.
fn check(comm: &dyn Communicator, case: &Case) -> Result<(), CommError> {
    let one = step(case, 0..case.tokens.iter().sum(), None);
    let start: usize = case.tokens[..comm.rank()].iter().sum();
    let range = start..start + case.tokens[comm.rank()];
    let ranks = part_of(case, comm)?;
    let own = step(case, range.clone(), Some(&ranks));
    ranks.failure().map_or(Ok(()), Err)?;
    let rows = |values: &[f32]| values[range.start * case.config.width..range.end * case.config.width].to_vec();
    let scaled = |name: &str, own: &[f32], one: &[f32]| {
        // Relative to the largest value of all ranks' rows.
        let (mut own, mut expected) = (own.to_vec(), rows(one));
        let largest = one.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
        own.push(largest);
        expected.push(largest);
        assert_close(name, &own, &expected);
    };
    scaled("y", &own.y, &one.y);
    scaled("dx", &own.dx, &one.dx);
    assert_eq!(own.stats.kept_per_expert, one.stats.kept_per_expert);
    compare_grads(comm, case, own, one)
}

/// Compares gradients: those of experts are summed over the ranks that hold them, all others over all ranks.
fn compare_grads(comm: &dyn Communicator, case: &Case, own: Step, one: Step) -> Result<(), CommError> {
    for ((name, own), (_, one)) in own.grads.into_iter().zip(one.grads) {
        let mut sum = vec![0.0; one.len()];
        let is_dense = name == "router" || name.starts_with("shared");
        let size = one.len() / if is_dense { 1 } else { case.config.num_experts };
        let held = if is_dense { vec![0] } else { case.placement.experts_of(comm.rank()) };
        for (values, expert) in own.chunks(size.max(1)).zip(held) {
            sum[expert * size..(expert + 1) * size].copy_from_slice(values);
        }
        comm.all_reduce(&mut sum, Reduce::Sum)?;
        assert_close(name, &sum, &one);
    }
    Ok(())
}
