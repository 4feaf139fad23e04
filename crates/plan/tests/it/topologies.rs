//! Topologies and their TOML form.

use moeworks_plan::{Link, LinkClass, RankSpec, Topology};

const CLUSTER: &str = include_str!("golden/cluster.toml");

fn cluster() -> Topology {
    Topology {
        node_sizes: vec![4, 2],
        rank: RankSpec { flops: 1e12, memory_bytes: 16e9, memory_bytes_per_s: 50e9 },
        node_link: Link { latency_s: 2e-6, bytes_per_s: 10e9 },
        cluster_link: Link { latency_s: 1e-3, bytes_per_s: 125e6 },
        numa_cores: Vec::new(),
    }
}

#[test]
fn the_toml_form_is_that_of_the_golden_file() {
    assert_eq!(Topology::parse(CLUSTER), Ok(cluster()));
    assert_eq!(Topology::parse(&cluster().to_toml()), Ok(cluster()));
    assert_eq!(cluster().to_toml(), CLUSTER);
    let of_two_sockets = Topology { numa_cores: vec![16, 16], ..cluster() };
    assert_eq!(Topology::parse(&of_two_sockets.to_toml()), Ok(of_two_sockets));
}

#[test]
fn ranks_know_their_node_and_their_link() {
    let topology = cluster();
    assert_eq!((0..6).map(|rank| topology.node_of(rank)).collect::<Vec<_>>(), [0, 0, 0, 0, 1, 1]);
    assert_eq!(topology.link_class(3, 3), LinkClass::Own);
    assert_eq!(topology.link_class(0, 3), LinkClass::Node);
    assert_eq!(topology.link_class(3, 4), LinkClass::Cluster);
    assert_eq!(topology.resized(10).node_sizes, [4, 4, 2]);
}

#[test]
fn bad_topologies_are_refused_in_one_line() {
    let replaced = |from: &str, to: &str| Topology::parse(&CLUSTER.replace(from, to)).unwrap_err().to_string();
    for (from, to, part) in [
        ("node_sizes = [4, 2]", "node_sizes = []", "node_sizes = []: must be numbers of at least 1"),
        ("[4, 2]", "[4, 0]", "node_sizes = [4, 0]"),
        ("[4, 2]", "[9223372036854775807, 9223372036854775807]", "at most 1048576 ranks"),
        ("node_sizes = [4, 2]", "num_nodes = 2", "either num_nodes and ranks_per_node or node_sizes"),
        ("node_sizes = [4, 2]", "num_nodes = 4294967296\nranks_per_node = 4294967296", "at most 1048576"),
        ("125000000.0", "0.0", "cluster_link.bytes_per_s = 0.0: must be a finite number above 0"),
        ("0.001", "-1.0", "cluster_link.latency_s = -1.0"),
        ("1000000000000.0", "nan", "rank.flops = NaN"),
        ("latency_s = 0.001", "", "missing field `latency_s`"),
        ("latency_s = 0.001", "latency = 0.001", "line 13: unknown field `latency`"),
        ("[rank]", "[rank", "line 3"),
    ] {
        let message = replaced(from, to);
        assert!(message.contains(part) && !message.contains('\n'), "{to:?}: {message}");
    }
}
