//! Measured links between ranks, for the choice of a layout.

use moeworks_comm::{RankOptions, try_run_ranks};
use moeworks_plan::{RankSpec, Topology};
use moeworks_train::auto_layout::measured_topology;

#[test]
fn all_ranks_measure_the_same_cluster_with_the_speed_of_the_slowest() {
    let topologies = try_run_ranks(&RankOptions::new(3), |comm| {
        let speed = 1e9 * (1 + comm.rank()) as f64;
        let own = RankSpec { flops: speed, memory_bytes: 4e9, memory_bytes_per_s: 1e10 };
        measured_topology(comm, own)
    })
    .unwrap();
    assert!(topologies.iter().all(|topology| *topology == topologies[0]), "{topologies:?}");
    let Topology { node_sizes, rank, node_link, cluster_link, .. } = &topologies[0];
    assert_eq!((node_sizes.iter().sum::<usize>(), rank.flops), (3, 1e9));
    for link in [node_link, cluster_link] {
        assert!(link.latency_s > 0.0 && link.bytes_per_s > 0.0 && link.bytes_per_s.is_finite(), "{link:?}");
    }
    Topology::parse(&topologies[0].to_toml()).unwrap();
}
