//! Times of collectives and links: there are figures for each, and they are the same on all ranks.

use moeworks_bench::collectives::{Collective, links, time};
use moeworks_comm::{CommError, RankOptions, run_ranks};

#[test]
fn every_collective_and_link_gets_a_time_that_all_ranks_agree_on() {
    let options = RankOptions::new(0).with_nodes(&[0, 0, 1]);
    let results = run_ranks(&options, |comm| {
        let mut timings = Vec::new();
        for collective in Collective::ALL {
            timings.push(time(comm, None, collective, 1000)?);
        }
        Ok::<_, CommError>((timings, links(comm)?))
    });
    let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert!(results.iter().all(|other| *other == results[0]));
    let (timings, links) = &results[0];
    for timing in timings {
        assert!(timing.seconds > 0.0 && timing.seconds < 1.0 && timing.raw_seconds.is_none(), "{timing:?}");
        assert_eq!(timing.bytes, 1008, "whole shares of f32 for three ranks");
    }
    for link in [links.node.unwrap(), links.cluster.unwrap()] {
        assert!(link.latency_s > 0.0 && link.bytes_per_s > 1e6, "{link:?}");
    }
}
