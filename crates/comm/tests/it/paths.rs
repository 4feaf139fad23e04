//! The paths of an all-to-all and of rows between ranks give the same results, on nodes of any sizes in any order.

use moeworks_comm::{CommError, Communicator, Cuts, Hierarchy, RankOptions, RowPlan, run_ranks};
use moeworks_plan::{Algorithm, Wire};
use moeworks_tensor::{DType, MemoryPool, Tensor};
use proptest::prelude::*;

use crate::collectives::{column, counts, received_by, sent_by};

const ALGORITHMS: [Algorithm; 3] = [Algorithm::Linear, Algorithm::Hierarchical, Algorithm::TwoHop];

fn on_nodes<R: Send>(nodes: &[usize], rank: impl Fn(&dyn Communicator) -> Result<R, CommError> + Sync) -> Vec<R> {
    run_ranks(&RankOptions::new(0).with_nodes(nodes), rank).into_iter().map(Result::unwrap).collect()
}

/// The node of each of up to eight ranks.
fn nodes(num_ranks: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0..4_usize, num_ranks)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn all_to_all_v_by_way_of_nodes_brings_the_same(
        (counts, nodes) in counts().prop_flat_map(|counts| { let n = counts.len(); (Just(counts), nodes(n)) }),
    ) {
        let results = on_nodes(&nodes, |comm| {
            let hierarchy = Hierarchy::new(comm)?;
            let recv_counts = column(&counts, comm.rank());
            let sent = sent_by(comm.rank(), &counts);
            let mut all = Vec::new();
            for algorithm in ALGORITHMS {
                let mut recv = vec![0_u32; recv_counts.iter().sum()];
                hierarchy.all_to_all_v(algorithm, &sent, &counts[comm.rank()], &mut recv, &recv_counts)?;
                all.push(recv);
            }
            Ok(all)
        });
        for (to, all) in results.iter().enumerate() {
            prop_assert!(all.iter().all(|recv| *recv == received_by(to, &counts)));
        }
    }

    #[test]
    fn node_collectives_give_the_same_results_as_plain_ones(
        (counts, nodes) in (1..9_usize).prop_flat_map(|n| (prop::collection::vec(0..6_usize, n), nodes(n))),
    ) {
        on_nodes(&nodes, |comm| check_node_collectives(comm, &counts));
    }

    #[test]
    fn rows_arrive_and_come_back_as_the_same_bits_on_every_path(
        (nodes, lists) in (1..9_usize).prop_flat_map(|n| (nodes(n), lists(n))),
    ) {
        let width = 5;
        let results = on_nodes(&nodes, |comm| {
            let hierarchy = Hierarchy::new(comm)?;
            let cuts = [(1, 1), (2, 1), (3, 1), (1, 2), (1, 4), (2, 3)];
            let ways = ALGORITHMS.iter().flat_map(|&algorithm| cuts.map(|(chunks, parts)| Way { algorithm, chunks, parts }));
            ways.map(|way| there_and_back(&hierarchy, way, &lists, width)).collect::<Result<Vec<_>, _>>()
        });
        for (rank, paths) in results.iter().enumerate() {
            let received = rows_for(rank, &lists, width);
            let sums: Vec<f32> = lists[rank].iter().enumerate().flat_map(|(row, list)| sum(rank, row, list, &nodes, width)).collect();
            for (there, back) in paths {
                prop_assert_eq!(there, &received);
                prop_assert_eq!(back, &sums);
            }
        }
    }
}

/// For each rank, for each of its rows, the ranks that it goes to.
fn lists(num_ranks: usize) -> impl Strategy<Value = Vec<Vec<Vec<usize>>>> {
    let list = prop::collection::btree_set(0..num_ranks, 0..=num_ranks.min(4));
    let rows = prop::collection::vec(list.prop_map(|set| set.into_iter().collect()), 0..20);
    prop::collection::vec(rows, num_ranks)
}

fn value(rank: usize, row: usize, column: usize) -> f32 {
    ((rank * 7919 + row * 104_729 + column * 31) % 1000) as f32 * 10_f32.powi((row % 7) as i32 - 3) / 7.0
}

/// Returns the number that rank `by` makes of `x` before it goes back.
fn worked(by: usize, x: f32) -> f32 {
    x * (by as f32 + 0.3) + 0.1
}

fn rows_for(rank: usize, lists: &[Vec<Vec<usize>>], width: usize) -> Vec<f32> {
    let mut rows = Vec::new();
    for (source, of_source) in lists.iter().enumerate() {
        for (row, list) in of_source.iter().enumerate() {
            if list.contains(&rank) {
                rows.extend((0..width).map(|column| value(source, row, column)));
            }
        }
    }
    rows
}

/// Returns the sum over the ranks of each node, then over nodes.
fn sum(rank: usize, row: usize, list: &[usize], nodes: &[usize], width: usize) -> Vec<f32> {
    let mut order: Vec<usize> = Vec::new();
    nodes.iter().for_each(|node| {
        if !order.contains(node) {
            order.push(*node);
        }
    });
    let of_column = |column: usize| {
        let of_node = |node: &usize| {
            let parts = list.iter().filter(|&&by| nodes[by] == *node).map(|&by| worked(by, value(rank, row, column)));
            parts.reduce(|a, b| a + b)
        };
        order.iter().filter_map(of_node).reduce(|a, b| a + b).unwrap_or(0.0)
    };
    (0..width).map(of_column).collect()
}

/// Checks that pieces of `counts` numbers of each rank are gathered, and that sums of as many are taken in the order
/// of ranks and then of nodes.
fn check_node_collectives(comm: &dyn Communicator, counts: &[usize]) -> Result<(), CommError> {
    let (hierarchy, rank, nodes) = (Hierarchy::new(comm)?, comm.rank(), comm.nodes());
    let piece = |rank: usize| (0..counts[rank]).map(move |i| value(rank, i, 0));
    let mut all = vec![0.0; counts.iter().sum()];
    hierarchy.all_gather_v(&piece(rank).collect::<Vec<_>>(), &mut all, counts)?;
    assert_eq!(all, (0..comm.size()).flat_map(piece).collect::<Vec<_>>());
    let send: Vec<f32> = (0..all.len()).map(|i| value(rank, i, 1)).collect();
    let mut share = vec![0.0; counts[rank]];
    hierarchy.sum_scatter(&send, counts, &mut share)?;
    let first: usize = counts[..rank].iter().sum();
    let sum = |i: usize| {
        let of_node = |node| {
            (0..comm.size()).filter(|&from| nodes[from] == node).map(|from| value(from, i, 1)).reduce(|a, b| a + b)
        };
        (0..comm.size()).filter_map(of_node).reduce(|a, b| a + b).unwrap_or(0.0)
    };
    assert_eq!(share, (first..first + counts[rank]).map(sum).collect::<Vec<_>>());
    Ok(())
}

/// Checks all paths among processes, with rows that go to many, few and no ranks.
pub(crate) fn check_paths(comm: &dyn Communicator) -> Result<(), CommError> {
    let (size, nodes) = (comm.size(), comm.nodes());
    let list =
        |from: usize, row: usize| (0..size).filter(|to| (from * 5 + row * 3 + to * (row + 1)) % 4 < row % 3).collect();
    let lists: Vec<Vec<Vec<usize>>> =
        (0..size).map(|from| (0..from * 4 % 7).map(|row| list(from, row)).collect()).collect();
    let hierarchy = Hierarchy::new(comm)?;
    for algorithm in ALGORITHMS {
        let way = Way { algorithm, chunks: 1 + size % 3, parts: 1 + size % 2 };
        let (there, back) = there_and_back(&hierarchy, way, &lists, 300)?;
        assert_eq!(there, rows_for(comm.rank(), &lists, 300), "{algorithm:?}");
        let rows = lists[comm.rank()].iter().enumerate();
        let sums: Vec<f32> = rows.flat_map(|(row, list)| sum(comm.rank(), row, list, nodes, 300)).collect();
        assert_eq!(back, sums, "{algorithm:?}");
    }
    check_node_collectives(comm, &(0..size).map(|rank| rank * 900 % 4000).collect::<Vec<_>>())
}

/// A path, with the chunks of the rows and the parts of a chunk.
#[derive(Clone, Copy)]
struct Way {
    algorithm: Algorithm,
    chunks: usize,
    parts: usize,
}

fn there_and_back(
    hierarchy: &Hierarchy,
    Way { algorithm, chunks: num_chunks, parts }: Way,
    lists: &[Vec<Vec<usize>>],
    width: usize,
) -> Result<(Vec<f32>, Vec<f32>), CommError> {
    let pool = MemoryPool::new();
    let rank = hierarchy.comm().rank();
    let own: Vec<&[usize]> = lists[rank].iter().map(Vec::as_slice).collect();
    let ends: Vec<usize> = (1..=num_chunks).map(|chunk| own.len() * chunk / num_chunks).collect();
    let plans = RowPlan::in_chunks(hierarchy, algorithm, &own, Cuts { ends: &ends, num_parts: parts })?;
    let values: Vec<f32> = (0..own.len()).flat_map(|row| (0..width).map(move |c| value(rank, row, c))).collect();
    let rows = Tensor::from_slice(&pool, &[own.len(), width], &values);
    // All are in flight before the first is finished; on the way back the last is finished first.
    let there =
        plans.iter().map(|plan| plan.start_dispatch(hierarchy, &rows, Wire::F32)).collect::<Result<Vec<_>, _>>()?;
    let received = plans.iter().zip(there).map(|(plan, started)| plan.finish_dispatch(hierarchy, started, &pool));
    let received = received.collect::<Result<Vec<_>, _>>()?;
    let back = plans.iter().zip(&received).map(|(plan, received)| {
        assert_eq!(received.rows(), plan.num_received());
        let done: Vec<f32> = received.f32s().iter().map(|&x| worked(rank, x)).collect();
        plan.start_combine(hierarchy, &Tensor::from_slice(&pool, received.shape(), &done), Wire::F32)
    });
    let back = back.collect::<Result<Vec<_>, _>>()?;
    let mut sums = Vec::new();
    for (plan, started) in plans.iter().zip(back).rev() {
        sums.splice(0..0, plan.finish_combine(hierarchy, started, &pool)?.f32s().iter().copied());
    }
    Ok((by_source(&plans, &received, width), sums))
}

/// Returns the rows of all chunks, ordered by source.
fn by_source(plans: &[RowPlan], received: &[Tensor], width: usize) -> Vec<f32> {
    let of_source = |source: usize| {
        plans.iter().zip(received).flat_map(move |(plan, received)| {
            let first: usize = plan.recv_counts()[..source].iter().sum();
            received.f32s()[first * width..(first + plan.recv_counts()[source]) * width].to_vec()
        })
    };
    (0..plans[0].recv_counts().len()).flat_map(of_source).collect()
}

#[test]
fn a_row_goes_once_to_each_node_on_the_two_hop_path() {
    let sent = |algorithm| {
        on_nodes(&[0, 0, 0, 1, 1, 1], move |comm| {
            let hierarchy = Hierarchy::new(comm)?;
            // Ten rows go to all three ranks of the other node.
            let others: Vec<usize> = (0..6).filter(|&rank| comm.nodes()[rank] != comm.nodes()[comm.rank()]).collect();
            let plan = RowPlan::new(&hierarchy, algorithm, &[others.as_slice(); 10])?;
            Ok(plan.num_sent())
        })
    };
    assert_eq!(sent(Algorithm::Linear), [30; 6]);
    assert_eq!(sent(Algorithm::TwoHop), [10 + 30; 6], "ten between nodes, thirty inside");
}

#[test]
fn compressed_rows_are_as_near_as_their_form_allows() {
    for (wire, near) in [(Wire::Bf16, 1.0 / 256.0), (Wire::F16, 1.0 / 2048.0), (Wire::Byte { block: 64 }, 1.0 / 254.0)]
    {
        for algorithm in ALGORITHMS {
            let errors = on_nodes(&[0, 1, 1, 0, 1], |comm| {
                let pool = MemoryPool::new();
                let hierarchy = Hierarchy::new(comm)?;
                let plan = RowPlan::new(&hierarchy, algorithm, &[&[0, 2, 3][..], &[][..], &[1, 2][..]])?;
                let values: Vec<f32> =
                    (0..3 * 128).map(|i| ((i * 37 + comm.rank() * 11) % 201) as f32 / 1.01 - 99.0).collect();
                let rows = Tensor::from_slice(&pool, &[3, 128], &values);
                let received = plan.dispatch(&hierarchy, &rows, wire, &pool)?;
                // Each rank sends back the rows that it got: the sum is a multiple of the row, in f32 as in the wire
                // format.
                let back = plan.combine(&hierarchy, &received, wire, &pool)?;
                let times = |row: usize| [3.0, 0.0, 2.0][row];
                let error = |i: usize| (back.f32s()[i] - times(i / 128) * values[i]).abs();
                Ok((0..values.len()).map(error).fold(0.0, f32::max))
            });
            // At most three roundings: there, back, and back from the relay of a node, of sums up to 300.
            let bound = 300.0 * 3.0 * near;
            assert!(errors.iter().all(|&error| error <= bound && error > 0.0), "{wire:?}: {errors:?} within {bound}");
        }
    }
}

#[test]
fn rows_of_bf16_stay_bf16_and_faults_stay_visible() {
    let results = on_nodes(&[0, 1], |comm| {
        let pool = MemoryPool::new();
        let hierarchy = Hierarchy::new(comm)?;
        let plan = RowPlan::new(&hierarchy, Algorithm::TwoHop, &[&[0, 1]])?;
        let row: Vec<_> = [1.5, -2.0, f32::NAN, 4.0].map(moeworks_tensor::bf16::from_f32).to_vec();
        let rows = Tensor::from_slice(&pool, &[1, 4], &row);
        let exact = plan.dispatch(&hierarchy, &rows, Wire::Bf16, &pool)?;
        let in_bytes = plan.dispatch(&hierarchy, &rows, Wire::Byte { block: 2 }, &pool)?;
        assert_eq!((exact.dtype(), exact.shape()), (DType::BF16, &[2, 4][..]));
        let back = plan.combine(&hierarchy, &exact, Wire::Bf16, &pool)?;
        Ok((exact.to_f32_vec(), in_bytes.to_f32_vec(), back.to_f32_vec()))
    });
    for (exact, in_bytes, back) in results {
        assert_eq!((exact[0], exact[1], exact[3]), (1.5, -2.0, 4.0));
        assert!(exact[2].is_nan() && in_bytes[2].is_nan() && in_bytes[0].is_finite() && back[2].is_nan());
        assert_eq!((back[0], back[3]), (3.0, 8.0));
    }
}

#[test]
fn a_row_for_a_rank_that_is_not_there_is_refused() {
    let results = run_ranks(&RankOptions::new(2), |comm| {
        let hierarchy = Hierarchy::new(comm)?;
        RowPlan::new(&hierarchy, Algorithm::Linear, &[&[0, 1], &[2]]).map(drop)
    });
    let text = results[0].as_ref().unwrap_err().to_string();
    assert!(text.contains("row 1 goes to ranks [2]: they must be ascending and below 2"), "{text}");
}
