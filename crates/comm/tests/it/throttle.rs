//! Paths of an all-to-all on throttled links: their speeds differ by the factor that the cost model predicts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use moeworks_comm::{
    CommError, Communicator, Cuts, Hierarchy, Meter, Metered, RankOptions, RowPlan, Span, Throttled, run_ranks,
};
use moeworks_plan::cost::collectives::{Rows, all_to_all, fastest_path};
use moeworks_plan::{Algorithm, Group, Link, Links, Topology, Wire};
use moeworks_tensor::{DType, MemoryPool, Tensor};

/// Eight ranks on four nodes.
const NODES: [usize; 8] = [0, 0, 1, 1, 2, 2, 3, 3];

/// Links as between hosts: 1 Gbit/s, with a high latency.
fn links() -> Links {
    let node = Link { latency_s: 20e-6, bytes_per_s: 5e9 };
    Links { node, cluster: Link { latency_s: 4e-3, bytes_per_s: 125e6 } }
}

fn topology() -> Topology {
    let Links { node, cluster } = links();
    Topology { node_sizes: vec![2; 4], node_link: node, cluster_link: cluster, ..Topology::example_cluster(1) }
}

/// The tokens of each rank, with experts on K = 8 different ranks of the eight: each goes everywhere.
fn rows(tokens: usize) -> Rows {
    Rows { tokens, top_k: 8, num_experts: 8, row_bytes: 4 * WIDTH }
}

const WIDTH: usize = 256;

/// Returns the seconds that a dispatch occupies a line of the slowest rank, without making its plan.
fn occupied(algorithm: Algorithm, tokens: usize) -> f64 {
    let results = run_ranks(&RankOptions::new(0).with_nodes(&NODES), |comm| {
        let throttled = Throttled::new(comm.split(Some(0), comm.rank())?.expect("a part"), links());
        let lines = throttled.lines();
        let hierarchy = Hierarchy::from_comm(Box::new(throttled))?;
        let everywhere: Vec<usize> = (0..8).collect();
        let plan = RowPlan::new(&hierarchy, algorithm, &vec![everywhere.as_slice(); tokens])?;
        let before = lines.seconds();
        let pool = MemoryPool::new();
        let rows = Tensor::zeros(&pool, &[tokens, WIDTH], DType::F32);
        let start = Instant::now();
        plan.dispatch(&hierarchy, &rows, Wire::F32, &pool)?;
        let after = lines.seconds();
        let seconds = (after[0] - before[0]).max(after[1] - before[1]);
        assert!(start.elapsed().as_secs_f64() >= seconds, "it takes the time that it occupies the lines");
        Ok::<_, CommError>(seconds)
    });
    results.into_iter().map(Result::unwrap).fold(0.0, f64::max)
}

#[test]
fn paths_differ_by_the_factor_that_their_costs_say() {
    let group = Group::of(&topology(), &(0..8).collect::<Vec<_>>());
    // With few bytes messages count, with many bytes do.
    for tokens in [1, 600] {
        let cost = |algorithm| all_to_all(&topology(), group, algorithm, &rows(tokens)).seconds;
        let linear = occupied(Algorithm::Linear, tokens);
        for algorithm in [Algorithm::Hierarchical, Algorithm::TwoHop] {
            let (factor, expected) = (linear / occupied(algorithm, tokens), cost(Algorithm::Linear) / cost(algorithm));
            assert!((factor / expected - 1.0).abs() < 0.1, "{algorithm:?}, {tokens} tokens: {factor}, not {expected}");
        }
        assert_eq!(fastest_path(&topology(), group, &rows(tokens)), Algorithm::TwoHop);
    }
}

#[test]
fn work_under_a_slow_message_hides_it() {
    let link = Link { latency_s: 20e-3, bytes_per_s: 1e9 };
    let attempt = |_| {
        let blocked = run_ranks(&RankOptions::new(2), |comm| {
            let meter = Arc::new(Meter::new(false));
            let throttled =
                Throttled::new(comm.split(Some(0), comm.rank())?.expect("a part"), Links { node: link, cluster: link });
            let comm: Box<dyn Communicator> = Box::new(Metered::new(Box::new(throttled), meter.clone()));
            let exchange = || comm.start_all_to_all_v(vec![0_u8; 8], &[4, 4], vec![0_u8; 8], &[4, 4]);
            let pending = exchange()?;
            std::thread::sleep(Duration::from_millis(25));
            pending.finish()?;
            let hidden = meter.take_totals().blocked_s;
            exchange()?.finish()?;
            Ok::<_, CommError>((hidden, meter.take_totals().blocked_s))
        });
        blocked.into_iter().map(Result::unwrap).all(|(hidden, whole)| hidden < 10e-3 && whole > 19e-3)
    };
    // On a busy machine a rank may be late.
    assert!((0..20).any(attempt), "the message is not hidden, or takes no time");
}

/// The seconds of each hop of a dispatch between four ranks on two nodes.
const HOP_S: f64 = 0.2;

/// The spans of a dispatch and of a combine in flight, and their seconds.
struct TwoHops {
    spans: [Vec<Span>; 2],
    seconds: [f64; 2],
}

/// Sends rows to all ranks and back on the two-hop path, in parts, over links of their own inside and between nodes.
/// Both hops take [`HOP_S`] in all.
fn two_hops(num_parts: usize) -> Vec<TwoHops> {
    const ROWS: usize = 64;
    let bytes = (ROWS * WIDTH * size_of::<f32>()) as f64;
    let link = |bytes: f64| Link { latency_s: 0.0, bytes_per_s: bytes / HOP_S };
    // A relay hands its own rows and those of its partner to the other rank of its node.
    let links = Links { node: link(2.0 * bytes), cluster: link(bytes) };
    let results = run_ranks(&RankOptions::new(0).with_nodes(&[0, 0, 1, 1]), |comm| {
        let meter = Arc::new(Meter::new(true));
        let part = comm.split(Some(0), comm.rank())?.expect("a part");
        let throttled = Throttled::new(part, links).with_node_lines();
        let hierarchy = Hierarchy::from_comm(Box::new(Metered::new(Box::new(throttled), Arc::clone(&meter))))?;
        let cuts = Cuts { ends: &[ROWS], num_parts };
        let plan = RowPlan::in_chunks(&hierarchy, Algorithm::TwoHop, &[&[0, 1, 2, 3][..]; ROWS], cuts)?.swap_remove(0);
        let pool = MemoryPool::new();
        let rows = Tensor::zeros(&pool, &[ROWS, WIDTH], DType::F32);
        comm.barrier()?;
        meter.take_spans();
        let start = Instant::now();
        let received = plan.dispatch(&hierarchy, &rows, Wire::F32, &pool)?;
        let (there_s, there) = (start.elapsed().as_secs_f64(), meter.take_spans());
        comm.barrier()?;
        let start = Instant::now();
        plan.combine(&hierarchy, &received, Wire::F32, &pool)?;
        Ok::<_, CommError>(TwoHops {
            spans: [there, meter.take_spans()],
            seconds: [there_s, start.elapsed().as_secs_f64()],
        })
    });
    results.into_iter().map(Result::unwrap).collect()
}

/// Returns the spans in flight of one hop: those that send so many bytes, in the order of their ends.
fn in_flight(spans: &[Span], bytes: usize) -> Vec<&Span> {
    spans.iter().filter(|span| span.is_in_flight && span.bytes == bytes as u64).collect()
}

/// Returns how long two spans run at once.
fn overlap(a: &Span, b: &Span) -> Duration {
    (a.start + a.length).min(b.start + b.length).saturating_sub(a.start.max(b.start))
}

#[test]
fn the_hop_inside_a_node_of_one_part_runs_under_the_hop_between_nodes_of_the_next() {
    let attempt = |_| {
        two_hops(4).iter().all(|TwoHops { spans, seconds }| {
            let bytes = 64 / 4 * WIDTH * size_of::<f32>();
            let [there, back] = spans;
            let (between, inside) = (in_flight(there, bytes), in_flight(there, 2 * bytes));
            let (returns, back_inside) = (in_flight(back, bytes), in_flight(back, 2 * bytes));
            let lens = [between.len(), inside.len(), returns.len(), back_inside.len()];
            assert_eq!(lens, [4; 4], "a message of each part on each hop");
            // Of the quarter that a part takes, half and more.
            let is_long = |a: &&Span, b: &&Span| overlap(a, b).as_secs_f64() > HOP_S / 4.0 * 0.5;
            let is_under = inside.iter().zip(&between[1..]).all(|(a, b)| is_long(a, b));
            let is_under_back = returns.iter().zip(&back_inside[1..]).all(|(a, b)| is_long(a, b));
            // Five quarters of a hop, not two hops.
            is_under && is_under_back && seconds.iter().all(|&seconds| seconds < 1.6 * HOP_S)
        })
    };
    // On a busy machine a rank may be late.
    assert!((0..10).any(attempt), "the hops do not overlap");
    assert!(two_hops(1).iter().all(|hops| hops.seconds.iter().all(|&seconds| seconds >= 1.99 * HOP_S)));
}
