//! Paths of rows between hosts that are network namespaces of one machine: their speeds differ by the factor that the
//! cost model predicts. The tests need Linux, root and Open MPI; where one is missing they say so and pass.

use std::time::{Duration, Instant};

use moeworks_comm::{CommError, Communicator, Hierarchy, Reduce, RowPlan};
use moeworks_plan::cost::collectives::{Rows, all_to_all, fastest_path};
use moeworks_plan::{Algorithm, Group, Wire};
use moeworks_tensor::{DType, MemoryPool, Tensor};

use crate::launcher::text;
use crate::namespaces::{run_on_hosts, succeed_on_hosts, topology};

/// The tokens of a rank, each with experts on all four ranks.
const TOKENS: usize = 256;
const WIDTH: usize = 256;
/// The number of times that each path is timed. The minimum counts, since other load only adds time.
const REPEATS: usize = 3;

#[test]
fn between_hosts_paths_differ_by_the_factor_that_their_costs_say() {
    succeed_on_hosts("mpi::plays_a_rank", "hosts");
}

#[test]
fn a_host_that_stands_still_is_missed_by_the_next() {
    if let Some(output) = run_on_hosts("mpi::plays_a_rank", "stop of a host") {
        let said = text(&output);
        assert!(!output.status.success() && said.contains("rank 2 hung: nothing from it for 5.0 s"), "{said}");
    }
}

/// Plays a rank: times each path and compares with the costs.
pub(crate) fn play(comm: &dyn Communicator) -> Result<(), CommError> {
    assert_eq!(comm.nodes(), [0, 0, 1, 1], "who is on which host");
    let ranks: Vec<usize> = (0..comm.size()).collect();
    let rows = Rows { tokens: TOKENS, top_k: ranks.len(), num_experts: ranks.len(), row_bytes: 4 * WIDTH };
    let group = Group::of(&topology(), &ranks);
    let cost = |algorithm| all_to_all(&topology(), group, algorithm, &rows).seconds;
    let linear = seconds(comm, Algorithm::Linear)?;
    for algorithm in [Algorithm::Hierarchical, Algorithm::TwoHop] {
        let factor = linear / seconds(comm, algorithm)?;
        let expected = cost(Algorithm::Linear) / cost(algorithm);
        if comm.rank() == 0 {
            println!(
                "linear {linear:.3} s takes {factor:.2} times as long as {algorithm:?}, by its costs {expected:.2} times"
            );
        }
        assert!((factor / expected - 1.0).abs() < 0.25, "{algorithm:?}: {factor}, not {expected}");
    }
    assert_eq!(
        fastest_path(&topology(), group, &rows),
        Algorithm::TwoHop,
        "what is chosen by cost is what was fastest"
    );
    Ok(())
}

/// Returns the seconds of the slowest rank to send all tokens to all ranks, the minimum of a few repeats.
fn seconds(comm: &dyn Communicator, algorithm: Algorithm) -> Result<f64, CommError> {
    let hierarchy = Hierarchy::new(comm)?;
    let everywhere: Vec<usize> = (0..comm.size()).collect();
    let plan = RowPlan::new(&hierarchy, algorithm, &vec![everywhere.as_slice(); TOKENS])?;
    let pool = MemoryPool::new();
    let rows = Tensor::zeros(&pool, &[TOKENS, WIDTH], DType::F32);
    let mut times = Vec::new();
    for _ in 0..=REPEATS {
        comm.barrier()?;
        let start = Instant::now();
        plan.dispatch(&hierarchy, &rows, Wire::F32, &pool)?;
        let mut slowest = [start.elapsed().as_secs_f64()];
        comm.all_reduce(&mut slowest, Reduce::Max)?;
        times.push(slowest[0]);
    }
    // The first one opens connections.
    Ok(times[1..].iter().copied().fold(f64::INFINITY, f64::min))
}

/// The timeout of ranks on links as slow as these.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
