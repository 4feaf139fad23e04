//! The proposed layouts, and how they change with the size of the cluster.

use moeworks_plan::cost::estimate::estimate;
use moeworks_plan::{
    Exchange, Layout, ModelShape, Precision, RankOrder, Tokens, Topology, Wire, Workload, propose, weak_scaling,
};

const WORKLOAD: Workload =
    Workload { tokens: Tokens::OfEachRank(8192), precision: Precision::Bf16, zero: 0, expert_gradient_bytes: 4 };

#[test]
fn tokens_stay_in_the_node_where_that_is_possible() {
    let topology = Topology::example_cluster(2);
    let shape = ModelShape::example();
    let of = |order| {
        let layout = Layout { order, ..Layout::new(2, 8, 1) };
        estimate(&shape, &WORKLOAD, &topology, &layout, &Exchange::plain(Wire::Bf16))
    };
    let (together, apart) = (of(RankOrder::EpInner), of(RankOrder::DpInner));
    assert!(together.time.all_to_all < apart.time.all_to_all / 4.0, "{together:?}");
    assert!(together.traffic.cluster_bytes < apart.traffic.cluster_bytes);
}

#[test]
fn what_does_not_fit_comes_last_and_more_ranks_for_experts_save_memory() {
    let topology = Topology::example_cluster(8);
    let shape = ModelShape { num_experts: 128, ..ModelShape::example() };
    let proposals = propose(&shape, &WORKLOAD, &topology);
    assert!(proposals[0].fits);
    let alone = proposals.iter().find(|estimate| estimate.layout.ep == 1).unwrap();
    assert!(!alone.fits, "all experts on each rank need {}", alone.memory.total());
    assert!(proposals.iter().skip_while(|e| e.fits).all(|e| !e.fits), "those that fit come first");
    for pair in proposals.windows(2).filter(|pair| pair[0].fits == pair[1].fits) {
        assert!(pair[0].time.total() <= pair[1].time.total());
    }
}

#[test]
fn a_model_that_every_rank_can_hold_and_whose_tokens_are_many_is_not_cut() {
    let mut topology = Topology::example_cluster(1);
    topology.rank.memory_bytes = 1e12;
    topology.node_link.bytes_per_s = 1e9;
    let shape = ModelShape { expert_params: 1000, ..ModelShape::example() };
    assert_eq!(propose(&shape, &WORKLOAD, &topology)[0].layout.ep, 1);
}

#[test]
fn the_memory_of_a_rank_is_that_of_its_parameters() {
    let shape = ModelShape {
        width: 4,
        num_layers: 2,
        num_moe_layers: 2,
        num_experts: 7,
        top_k: 2,
        expert_params: 100,
        dense_params: 1000,
        whole_params: 100,
        outside_params: 200,
        max_tp: 2,
        trained_dense: 1.0,
        trained_experts: 1.0,
        dense_flops: 0.0,
        activation_bytes: 10.0,
    };
    let workload =
        Workload { tokens: Tokens::OfEachRank(5), precision: Precision::F32, zero: 1, expert_gradient_bytes: 4 };
    let topology = Topology::example_cluster(1).resized(6);
    let exchange = Exchange::plain(Wire::F32);
    let memory = estimate(&shape, &workload, &topology, &Layout::new(2, 3, 1), &exchange).memory;
    // Three of seven experts on the first of three ranks, in each of two layers.
    assert_eq!(memory.weights, 1600.0 * 4.0);
    assert_eq!(memory.gradients, 1600.0 * 4.0);
    assert_eq!(memory.optimizer, 8.0 * (1000.0 / 6.0 + 600.0 / 2.0));
    assert_eq!(memory.activations, 50.0);
    // Cut in two, with the experts on six ranks, two of seven on the first; ten tokens of two ranks.
    let cut = estimate(&shape, &workload, &topology, &Layout::new(1, 3, 2), &exchange).memory;
    assert_eq!(cut.weights, 4.0 * (900.0 / 2.0 + 100.0 + 400.0));
    assert_eq!((cut.activations, cut.received), (100.0, memory.received));
    assert_eq!(memory.received, f64::from(5 * 2 * 2 * 4 * 4));
}

#[test]
fn what_copies_share_out_is_there_in_slices_and_two_layers_at_a_time() {
    let shape = ModelShape {
        num_layers: 20,
        num_moe_layers: 20,
        num_experts: 6,
        expert_params: 100,
        dense_params: 1000,
        outside_params: 200,
        ..ModelShape::example()
    };
    let topology = Topology::example_cluster(1).resized(6);
    let of = |zero, precision| {
        let workload = Workload { zero, precision, ..WORKLOAD };
        estimate(&shape, &workload, &topology, &Layout::new(2, 3, 1), &Exchange::plain(Wire::F32))
    };
    let (slices, passing) = (1000.0 / 6.0 + 4000.0 / 2.0, 200.0 + 800.0 / 10.0 + 4000.0 / 10.0);
    let [none, gradients, weights] = [0, 2, 3].map(|zero| of(zero, Precision::F32));
    assert_eq!((none.memory.weights, none.memory.gradients), (20_000.0, 20_000.0));
    assert_eq!(gradients.memory.weights, 20_000.0);
    assert_eq!(gradients.memory.gradients, 4.0 * (slices + passing));
    assert_eq!(weights.memory.weights, 4.0 * (slices + passing));
    assert_eq!(of(3, Precision::Bf16).memory.weights, 6.0 * slices + 2.0 * passing);
    // Put together twice in place of once, in bf16 with half the bytes.
    assert!((weights.time.all_reduce / none.time.all_reduce - 1.5).abs() < 1e-9);
    assert!((of(3, Precision::Bf16).time.all_reduce / none.time.all_reduce - 1.0).abs() < 1e-9);
}

#[test]
fn matrices_are_cut_where_there_are_fewer_sequences_than_ranks() {
    let topology = Topology::example_cluster(1);
    let shape = ModelShape { num_experts: 8, ..ModelShape::example() };
    let best = |num| {
        let workload = Workload { tokens: Tokens::Sequences { num, len: 4096 }, ..WORKLOAD };
        propose(&shape, &workload, &topology)[0]
    };
    assert_eq!(best(64).layout.tp, 1, "sums of tokens cost more than they give");
    let few = best(2);
    assert!(few.layout.tp >= 4 && few.time.tensor_parallel > 0.0, "{few:?}");
}

#[test]
fn sums_over_cut_matrices_cost_what_megatron_says() {
    let topology = Topology::example_cluster(1).resized(4);
    let shape = ModelShape { num_moe_layers: 0, num_experts: 0, ..ModelShape::example() };
    let of = |tp| {
        let workload = Workload { tokens: Tokens::OfEachRank(1000), ..WORKLOAD };
        estimate(&shape, &workload, &topology, &Layout::new(4 / tp, 1, tp), &Exchange::plain(Wire::Bf16))
    };
    // Two sums a layer forward and two backward (1909.08053, section 3), each sending 2 (n - 1) / n of the group's
    // f32 rows, and two for embedding and output projection; the gradients of what is not cut.
    let rows = 4.0 * 1000.0 * 2048.0 * 4.0;
    let bytes = f64::from(4 * 24 + 2) * 1.5 * rows + 1.5 * 4.0 * shape.whole_params as f64;
    assert!((of(4).traffic.node_bytes / bytes - 1.0).abs() < 1e-9);
    assert_eq!(of(1).time.tensor_parallel, 0.0);
    assert!(of(4).memory.weights < 0.3 * of(1).memory.weights);
}

#[test]
fn each_measure_takes_time_away_and_a_larger_cluster_adds_it() {
    let rows = weak_scaling(&ModelShape::example(), &WORKLOAD, &Topology::example_cluster(1), 2048);
    assert_eq!(rows.iter().map(|row| row.num_ranks).collect::<Vec<_>>(), [8, 16, 32, 64, 128, 256, 512, 1024, 2048]);
    for row in &rows {
        let steps = [row.linear, row.hierarchical, row.overlapped, row.compressed].map(|e| e.time.total());
        assert!(steps.windows(2).all(|pair| pair[1] <= pair[0]), "{}: {steps:?}", row.num_ranks);
    }
    let share = |row: &moeworks_plan::ScalingRow| row.linear.time.all_to_all / row.linear.time.total();
    assert!(rows[..4].windows(2).all(|pair| share(&pair[0]) <= share(&pair[1])), "while expert-parallel groups grow");
    let last = rows.last().unwrap();
    assert!(last.compressed.time.total() < last.linear.time.total());
}
