//! Clusters of several levels, their TOML form, and topologies.

use moeworks_plan::{
    Cluster, Fabric, Level, Mesh, Model, ModelParts, Precision, Routing, Topology, TrainingJob, mesh_cost,
};
use proptest::prelude::*;

const THREE_LEVELS: &str = "\
name = \"two racks\"

[device]
flops = { f32 = 1e12, bf16 = 8e12 }
efficiency = 0.5
memory_bytes = 16e9
memory_bytes_per_s = 50e9

[[level]]
name = \"node\"
size = 4
latency_s = 2e-6
bytes_per_s = 10e9

[[level]]
name = \"rack\"
size = 3
latency_s = 5e-6
bytes_per_s = 5e9
rails = 2
shared_by = 4
routing = \"adaptive\"

[[level]]
name = \"site\"
size = 2
latency_s = 1e-3
bytes_per_s = 1e9
shared_by = 12
oversubscription = 2.0
";

fn three_levels() -> Cluster {
    Cluster::parse(THREE_LEVELS).unwrap()
}

#[test]
fn a_file_gives_the_levels_with_the_defaults_of_what_it_leaves_out() {
    let cluster = three_levels();
    assert_eq!((cluster.num_ranks(), cluster.levels.len()), (24, 3));
    assert_eq!(cluster.device.fp8_flops, cluster.device.bf16_flops);
    assert_eq!(cluster.device.flops(Precision::Bf16), 4e12);
    let [node, rack, site] = &cluster.levels[..] else { panic!("three levels") };
    assert_eq!(node, &Level::new("node", 4, 2e-6, 10e9));
    assert_eq!((rack.routing, rack.carries_outer, site.carries_outer), (Routing::Adaptive, true, true));
    assert_eq!((rack.port_bytes_per_s(), rack.share_bytes_per_s()), (10e9, 2.5e9));
    assert_eq!(site.share_bytes_per_s(), 1e9 / 24.0);
}

#[test]
fn ranks_know_the_units_that_they_are_in() {
    let cluster = three_levels();
    assert_eq!([0, 3, 4, 11, 12, 23].map(|rank| cluster.unit_of(0, rank)), [0, 0, 1, 2, 3, 5]);
    assert_eq!([0, 11, 12, 23].map(|rank| cluster.unit_of(1, rank)), [0, 0, 1, 1]);
    let between = [(5, 5), (0, 3), (3, 4), (11, 12)].map(|(a, b)| cluster.level_between(a, b));
    assert_eq!(between, [None, Some(0), Some(1), Some(2)]);
}

#[test]
fn a_resized_cluster_has_as_many_outer_units_as_it_needs() {
    let ranks = |num| three_levels().resized(num).num_ranks();
    assert_eq!([0, 1, 12, 13, 1000].map(ranks), [12, 12, 12, 24, 1008]);
    let uneven = Cluster::from(&Topology { node_sizes: vec![4, 2], ..Topology::example_cluster(1) });
    assert_eq!([1, 8, 9].map(|num| uneven.resized(num).num_ranks()), [4, 8, 12]);
}

#[test]
fn every_bundled_cluster_reads_back_and_cites_its_sources() {
    for (name, text) in Cluster::NAMES {
        let cluster = Cluster::named(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(cluster.name, name);
        assert_eq!(Cluster::parse(&cluster.to_toml()), Ok(cluster));
        assert!(text.contains("# Sources") && Cluster::summary(text).len() > 20, "{name}");
    }
    assert_eq!(Cluster::parse(&three_levels().to_toml()), Ok(three_levels()));
}

#[test]
fn the_bundled_clusters_have_the_published_figures() {
    let a100 = Cluster::named("a100-ndm-v4").unwrap();
    assert_eq!((a100.device.memory_bytes, a100.levels[0].size), (80e9, 8));
    assert_eq!(8.0 * a100.levels[1].share_bytes_per_s(), 8.0 * 200e9 / 8.0);
    assert_eq!(Cluster::named("h800").unwrap().num_ranks(), 2048);
    assert_eq!(Cluster::named("h800").unwrap().levels[0].rail_bytes_per_s(), 160e9);
    assert_eq!(Cluster::named("gb200").unwrap().levels[0].size, 72);
    let tpu = Cluster::named("tpu-v3").unwrap();
    assert_eq!(tpu.num_ranks(), 2048);
    // A torus of 32 x 32 carries an eighth part of a link's bandwidth a chip for each unit of its side.
    assert!((2.0 * tpu.levels[1].share_bytes_per_s() / (8.0 * 70e9 / 32.0) - 1.0).abs() < 1e-12);
    assert_eq!(Cluster::named("two-sites").unwrap().levels[1].port_bytes_per_s(), 10e9 / 8.0);
    let centres = Cluster::named("1000-datacentres").unwrap();
    assert_eq!((centres.num_ranks(), centres.levels[1].size), (8000, 1000));
    let error = Cluster::named("h900").unwrap_err().to_string();
    assert!(error.contains("unknown cluster \"h900\"") && error.contains("gb200"), "{error}");
}

#[test]
fn bad_clusters_are_refused_in_one_line_with_field_and_range() {
    for (from, to, part) in [
        ("size = 3", "size = 0", "level 2 (rack): size = 0: must be from 1 to 1048576"),
        ("size = 3", "size = 1000000", "must be at most 1048576 ranks in all"),
        ("size = 3", "size = 9223372036854775807", "level 2 (rack): size"),
        ("size = 3", "sizes = [1, 2]", "level 2 (rack): sizes = [1, 2]: must be left out"),
        ("size = 3", "", "level 2 (rack): size: must be given"),
        ("size = 4", "sizes = [4, 2]", "level 1 (node): sizes = [4, 2]: must be a number for each of the 6 units"),
        ("size = 4", "sizes = []", "level 1 (node): sizes = []"),
        ("rails = 2", "rails = 0", "level 2 (rack): rails = 0: must be from 1 to 4096"),
        ("shared_by = 4", "shared_by = 8", "level 2 (rack): shared_by = 8: must divide the 4 devices"),
        ("shared_by = 12", "shared_by = 5", "level 3 (site): shared_by = 5: must divide the 12 devices"),
        ("routing = \"adaptive\"", "routing = \"best\"", "unknown variant `best`, expected `fixed` or `adaptive`"),
        ("bytes_per_s = 5e9", "bytes_per_s = 0.0", "level 2 (rack): bytes_per_s = 0: must be a finite number above 0"),
        (
            "latency_s = 1e-3",
            "latency_s = -1.0",
            "level 3 (site): latency_s = -1: must be a finite number of at least 0",
        ),
        ("efficiency = 0.5", "efficiency = 1.5", "device.efficiency = 1.5: must be a number above 0 and at most 1"),
        ("oversubscription = 2.0", "oversubscription = 0.5", "level 3 (site): oversubscription = 0.5"),
        ("oversubscription = 2.0", "torus = 9", "level 3 (site): torus = 9"),
        ("bf16 = 8e12", "bf16 = inf", "device.flops.bf16 = inf"),
        ("name = \"rack\"", "name = \"node\"", "level 2 (node): name = node: is the name of a level before"),
        ("name = \"rack\"", "name = \"\"", "level 2: name = \"\": must be a name on one line"),
        ("rails = 2", "rail = 2", "line 20: unknown field `rail`"),
        ("memory_bytes = 16e9", "", "missing field `memory_bytes`"),
    ] {
        assert!(THREE_LEVELS.contains(from), "{from}");
        let message = Cluster::parse(&THREE_LEVELS.replace(from, to)).unwrap_err().to_string();
        assert!(message.contains(part) && !message.contains('\n'), "{to:?}: {message}");
    }
    let device = THREE_LEVELS.split("[[level]]").next().unwrap();
    assert!(Cluster::parse(device).unwrap_err().to_string().contains("level = 0: must be 1 to 8 [[level]] tables"));
}

#[test]
fn a_topology_becomes_a_cluster_and_comes_back() {
    for node_sizes in [vec![1], vec![8], vec![4, 4, 4], vec![4, 2, 3]] {
        let topology = Topology { node_sizes, ..Topology::example_cluster(1) };
        let cluster = Cluster::from(&topology);
        assert_eq!(cluster.check(), Ok(()));
        assert_eq!(cluster.num_ranks(), topology.num_ranks());
        for rank in 0..topology.num_ranks() {
            assert_eq!(cluster.unit_of(0, rank), topology.node_of(rank));
        }
        assert_eq!(cluster.to_topology(Precision::Bf16), Ok(topology.clone()));
        assert_eq!(Cluster::parse(&topology.to_toml()), Ok(cluster));
    }
    let error = three_levels().to_topology(Precision::Bf16).unwrap_err().to_string();
    assert_eq!(error, "cluster two racks has 3 levels: a topology has two, that of a node and that between nodes");
    let error = Cluster::parse("node_link = { latency_s = 1.0 }").unwrap_err().to_string();
    assert!(error.contains("missing field"), "{error}");
}

proptest! {
    #[test]
    fn any_text_is_refused_or_read_without_a_panic(text in ".{0,200}", cut in 0..THREE_LEVELS.len(), number in any::<u64>()) {
        let _ = Cluster::parse(&text);
        let _ = Cluster::parse(&THREE_LEVELS[..cut]);
        let _ = Cluster::parse(&THREE_LEVELS.replace("= 4", &format!("= {number}")));
    }
}

const MACHINE: &str = "name = \"four cores\"\ncores = 4\nmemory_bytes = 8e9\nmemory_bytes_per_s = 2e10\n\
    [link]\nlatency_s = 1e-6\nbytes_per_s = 4e9\n[overhead]\nlayer_s = 1e-4\npasses = 3.0\n\
    [[products]]\nprecision = \"f32\"\nthreads = 1\nrows = 16\nwidth = 64\nflops = 1e9\n\
    [[products]]\nprecision = \"f32\"\nthreads = 1\nrows = 1024\nwidth = 64\nflops = 1e10\n\
    [[products]]\nprecision = \"f32\"\nthreads = 2\nrows = 16\nwidth = 64\nflops = 1e9\n\
    [[products]]\nprecision = \"f32\"\nthreads = 2\nrows = 1024\nwidth = 64\nflops = 2e10\n";

#[test]
fn a_measured_machine_is_a_cluster_whose_ranks_share_its_cores() {
    let cluster = Cluster::parse(MACHINE).unwrap();
    assert_eq!((cluster.num_ranks(), cluster.levels.len(), cluster.device.memory_bytes), (4, 1, 2e9));
    let near = |cluster: &Cluster, flops: f64| (cluster.device.flops(Precision::F32) / flops - 1.0).abs() < 1e-9;
    assert!(near(&cluster, 1e10), "the best rate of a core");
    let two = cluster.resized(2);
    assert!(near(&two, 2e10));
    assert_eq!((two.num_ranks(), two.device.memory_bytes_per_s), (2, 1e10));
    assert_eq!(two.levels[0].bytes_per_s, 4e9);
    let error = Cluster::parse(&MACHINE.replace("cores = 4", "cores = 0")).unwrap_err().to_string();
    assert_eq!(error, "cores = 0: must be a finite number above 0");
}

#[test]
fn products_of_few_rows_take_their_measured_time_in_a_plan() {
    let model = "width = 64\nvocabulary = 64\nsequence = 64\n[[layers]]\nnum = 2\n\
                 attention = { heads = 4, head_dim = 16 }\nexperts = { num = 64, top_k = 1, width = 64 }\n";
    let parts = ModelParts::from(&Model::parse(model).unwrap());
    let job = TrainingJob::new(parts, 64, 4, Precision::F32);
    let products = |text: &str| {
        let fabric = Fabric::new(&Cluster::parse(text).unwrap(), 2, Precision::F32);
        mesh_cost(&job, &fabric, &Mesh::new(1, 2, 2)).time
    };
    // The experts of a rank get a row or two each: a higher rate of large products leaves most of their time.
    let (slow, fast) = (products(MACHINE), products(&MACHINE.replace("flops = 2e10", "flops = 2e11")));
    assert!(fast.products < slow.products && fast.products > 0.2 * slow.products, "{slow:?} {fast:?}");
    assert!(slow.elementwise > 0.0 && slow.experts > 0.0);
}
