//! A rank's meter counts the traffic of its communicators.

use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use moeworks_comm::{CommError, Communicator, Meter, Metered, RankOptions, Reduce, Totals, run_ranks};

/// Runs `work` on a metered communicator on each of four ranks on two nodes, and returns the meters.
fn metered(work: impl Fn(&dyn Communicator) -> Result<(), CommError> + Sync) -> Vec<Meter> {
    let options = RankOptions::new(0).with_nodes(&[0, 0, 1, 1]);
    let results = run_ranks(&options, |comm| {
        let meter = Arc::new(Meter::new(true));
        let part = comm.split(Some(0), comm.rank())?.expect("a part");
        work(&Metered::new(part, Arc::clone(&meter)))?;
        Ok::<_, CommError>(Arc::into_inner(meter).expect("nothing is in flight"))
    });
    results.into_iter().map(Result::unwrap).collect()
}

fn bytes(meter: &Meter) -> (u64, u64) {
    let Totals { node_bytes, cluster_bytes, .. } = meter.take_totals();
    (node_bytes, cluster_bytes)
}

#[test]
fn bytes_are_counted_by_link_and_not_to_oneself() {
    let meters = metered(|comm| {
        let mut received = [0_u32; 10];
        let counts = [[1, 2, 3, 4], [2, 2, 3, 3], [3, 3, 2, 2], [4, 3, 2, 1]];
        let recv_counts: Vec<usize> = counts.iter().map(|row| row[comm.rank()]).collect();
        comm.all_to_all_v(&[7; 10], &counts[comm.rank()], &mut received[..recv_counts.iter().sum()], &recv_counts)
    });
    let all: Vec<_> = meters.iter().map(bytes).collect();
    assert_eq!(all, [(8, 28), (8, 24), (8, 24), (8, 28)], "four bytes a number, in the node and between nodes");
    assert!(meters.iter().all(|meter| bytes(meter) == (0, 0)), "taken is taken");
}

#[test]
fn parts_and_every_kind_of_call_are_counted() {
    let meters = metered(|comm| {
        let part = comm.split(Some((comm.rank() % 2) as u32), 0)?.expect("a part");
        part.all_gather(&[1_u64], &mut [0; 2])?;
        comm.broadcast(&mut [0_u8; 5], 1)?;
        comm.all_reduce(&mut [1.0_f32; 8], Reduce::Sum)?;
        let (mut sum, counts) = ([0.0_f64; 1], [1; 4]);
        comm.reduce_scatter(&[1.0_f64; 4], &counts, &mut sum, Reduce::Sum)?;
        match comm.rank() {
            0 => comm.send(&[0_u8; 3], 3, 1),
            3 => comm.receive(&mut [0_u8; 3], 0, 1),
            _ => Ok(()),
        }
    });
    // One message to the other rank of the part, on the other node; 16 bytes to each of three ranks for the
    // all-reduce, 8 to each for the shares.
    let all: Vec<_> = meters.iter().map(bytes).collect();
    assert_eq!(all, [(24, 8 + 48 + 3), (24 + 5, 8 + 48 + 10), (24, 8 + 48), (24, 8 + 48)]);
    let names: Vec<_> = meters[0].take_spans().into_iter().map(|span| span.name).collect();
    assert_eq!(names, ["all-gather", "broadcast", "all-reduce", "reduce-scatter", "send"]);
}

#[test]
fn a_communication_hidden_under_work_is_not_counted_as_waiting() {
    const WORK: Duration = Duration::from_millis(30);
    let attempt = |_| {
        let meters = metered(|comm| {
            let pending = comm.start_all_reduce(vec![1.0_f32; 1000], Reduce::Sum)?;
            // The others have joined long before this.
            sleep(WORK);
            pending.finish().map(drop)
        });
        meters.iter().all(|meter| {
            let spans = meter.take_spans();
            let in_flight = spans.iter().find(|span| span.is_in_flight).expect("the sum was in flight");
            assert!(in_flight.length >= WORK, "{spans:?}");
            meter.take_totals().blocked_s < 0.5 * WORK.as_secs_f64()
        })
    };
    // On a busy machine a rank may be late.
    assert!((0..20).any(attempt), "the work is counted as waiting");
}

#[test]
fn work_has_the_name_that_it_is_given_and_spans_are_kept_only_if_asked_for() {
    for keeps_spans in [true, false] {
        let meter = Meter::new(keeps_spans);
        assert_eq!(meter.time("experts", || 7), 7);
        let names: Vec<_> = meter.take_spans().into_iter().map(|span| span.name).collect();
        assert_eq!(names, if keeps_spans { vec!["experts"] } else { vec![] });
    }
}
