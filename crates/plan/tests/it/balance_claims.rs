//! Published claims of balancing, on made loads: the figures of docs/balance-claims.md that follow from formulas.

use moeworks_plan::cost::pipeline::overlapped_seconds;
use moeworks_plan::{
    Algorithm, EplbSizes, LayerLoad, LayerLoads, Link, Links, MoveCosts, Nodes, Placement, RankLoads, RebalancePolicy,
    RebalanceRates, RebalanceRules, ReplicaSharing, eplb, experts_to_fetch, pass_seconds, rebalance_layer,
};

/// Loads by Zipf's law, in an order that hides it.
fn zipf(num_experts: usize, exponent: f64) -> Vec<f64> {
    (0..num_experts).map(|expert| 1e6 / ((expert * 37 % num_experts + 1) as f64).powf(exponent)).collect()
}

fn assert_figure(value: f64, expected: f64, what: &str) {
    assert!((value - expected).abs() < 5e-4, "{what}: {value:.4}, the page says {expected}");
}

/// The largest load of a copy over the mean of all copies, less 1.
fn slot_imbalance(placement: &Placement, loads: &[f64]) -> f64 {
    let copies = |expert: usize| placement.ranks_of(expert).len();
    let num_slots: usize = (0..loads.len()).map(copies).sum();
    let most = loads.iter().enumerate().map(|(expert, load)| load / copies(expert) as f64).fold(0.0, f64::max);
    most / (loads.iter().sum::<f64>() / num_slots as f64) - 1.0
}

/// TensorRT-LLM's table for DeepSeek-R1: 1.564 by rank and 10.948 by slot without copies on 32 ranks; 0.109 and 1.792
/// with nine slots a rank; 0.115 and 1.791 on 36 ranks of eight slots.
#[test]
fn spare_slots_even_out_ranks_as_tensorrt_llm_publishes() {
    let loads = zipf(256, 0.57);
    let sharded = Placement::sharded(256, 32);
    let of_ranks = |placement: &Placement| RankLoads::new(placement, &loads).expect("valid").imbalance();
    let with = |num_ranks: usize| {
        let sizes = EplbSizes { num_slots: 288, num_groups: 1, num_nodes: 1, num_ranks };
        eplb(&loads, sizes).expect("valid")
    };
    let found =
        [&sharded, &with(32), &with(36)].map(|placement| [of_ranks(placement), slot_imbalance(placement, &loads)]);
    for (found, expected) in found.iter().flatten().zip(TENSORRT.iter().flatten()) {
        assert_figure(*found, *expected, "imbalance by rank, then by slot");
    }
    assert!(found[0][0] > 1.5 && found[1][0] < 0.15 && found[2][0] < 0.15);
}

/// By rank and by slot: without copies, 32 ranks with nine slots, 36 ranks with eight.
const TENSORRT: [[f64; 2]; 3] = [[1.572, 9.903], [0.001, 1.106], [0.002, 1.106]];

/// Returns the seconds of tokens over those of experts, and 1 if experts move, where each rank has `tokens` tokens of
/// one choice, spread evenly over `experts` experts of each rank, and bytes alone cost time.
fn bytes_alone(num_ranks: usize, tokens: u32, experts: usize, width: f64) -> [f64; 2] {
    let nodes = Nodes::new(&(0..num_ranks).collect::<Vec<_>>());
    let placement = Placement::sharded(num_ranks * experts, num_ranks);
    let rows = vec![vec![tokens / (num_ranks * experts) as u32; num_ranks * experts]; num_ranks];
    let load = LayerLoad { nodes: &nodes, placement: &placement, tokens: &vec![tokens; num_ranks], rows: &rows };
    let link = Link { latency_s: 0.0, bytes_per_s: 1e9 };
    let costs = MoveCosts {
        algorithm: Algorithm::Linear,
        links: Links { node: link, cluster: link },
        row_bytes: 2.0 * width,
        expert_bytes: [2.0 * 8.0 * width * width; 2],
        row_compute_s: 0.0,
    };
    let all: Vec<usize> = (0..num_ranks * experts).collect();
    let chosen = experts_to_fetch(&load, &costs);
    assert!(chosen.is_empty() || chosen.len() == all.len(), "all or none: {chosen:?}");
    [pass_seconds(&load, &[], &costs) / pass_seconds(&load, &all, &costs), if chosen.is_empty() { 0.0 } else { 1.0 }]
}

/// Janus: experts move instead of tokens where R = B S k / (4 n H E_g) is above 1, which is the ratio of the bytes.
#[test]
fn experts_move_where_the_ratio_of_janus_is_above_one() {
    for (num_ranks, tokens, experts, width) in [(4, 65_536, 1, 512.0), (4, 8192, 2, 512.0), (8, 65_536, 2, 768.0)] {
        let expected = f64::from(tokens) / (4.0 * num_ranks as f64 * width * experts as f64);
        let [ratio, is_fetched] = bytes_alone(num_ranks, tokens, experts, width);
        assert!((ratio / expected - 1.0).abs() < 1e-9, "{ratio} for {expected}");
        assert_eq!(is_fetched > 0.5, expected > 1.0);
    }
}

/// FasterMoE, 1.37 to 17.87 times as fast: shadowing alone, by the model of `expert_fetch`, for 16 and 64 ranks of a
/// skewed load.
#[test]
fn fetching_popular_experts_pays_where_few_have_most_tokens() {
    let speedup = |num_ranks: usize, exponent: f64| {
        let nodes = Nodes::new(&(0..num_ranks).map(|rank| rank / 8).collect::<Vec<_>>());
        let placement = Placement::sharded(num_ranks, num_ranks);
        let loads = zipf(num_ranks, exponent);
        let sum: f64 = loads.iter().sum();
        let of_rank: Vec<u32> = loads.iter().map(|load| (load / sum * 8192.0) as u32).collect();
        let (rows, tokens) = (vec![of_rank.clone(); num_ranks], vec![of_rank.iter().sum(); num_ranks]);
        let load = LayerLoad { nodes: &nodes, placement: &placement, tokens: &tokens, rows: &rows };
        // V100s: 60 TFLOP/s of products, NVLink, and 100 Gbit/s between nodes; experts of 1024 x 4096 in f16.
        let link = |bytes_per_s| Link { latency_s: 1e-5, bytes_per_s };
        let expert = 2.0 * 1024.0 * 4096.0;
        let costs = MoveCosts {
            algorithm: Algorithm::Linear,
            links: Links { node: link(1.2e11), cluster: link(1.25e10) },
            row_bytes: 2048.0,
            expert_bytes: [2.0 * expert; 2],
            row_compute_s: 6.0 * expert / 6e13,
        };
        pass_seconds(&load, &[], &costs) / pass_seconds(&load, &experts_to_fetch(&load, &costs), &costs)
    };
    assert_figure(speedup(16, 0.5), 1.771, "16 ranks");
    assert!(speedup(16, 1.0) > 1.0 && speedup(64, 1.0) > 1.0);
}

/// SmartMoE places experts greedily, by descending load on the emptiest device: here beside the best of all
/// placements of 12 experts on four ranks.
#[test]
fn packing_by_descending_load_is_near_the_best_of_all_placements() {
    let (mut worst, mut sum) = (1.0_f64, 0.0);
    for seed in 0..40_u64 {
        let load = |e: u64| ((seed * 7919 + e * 104_729 + 31 * e * e) % 97 + 3) as f64;
        let loads: Vec<f64> = (0..12).map(load).collect();
        let sizes = EplbSizes { num_slots: 12, num_groups: 1, num_nodes: 1, num_ranks: 4 };
        let greedy = RankLoads::new(&eplb(&loads, sizes).expect("valid"), &loads).expect("valid").max();
        let ratio = greedy / best_triples(&loads);
        (worst, sum) = (worst.max(ratio), sum + ratio);
    }
    assert_figure(sum / 40.0, 1.026, "mean over the best");
    assert_figure(worst, 1.053, "worst over the best");
}

/// Returns the least largest load of ranks of three experts each.
fn best_triples(loads: &[f64]) -> f64 {
    let Some((first, rest)) = loads.split_first() else { return 0.0 };
    let pairs = (0..rest.len()).flat_map(|a| (a + 1..rest.len()).map(move |b| [a, b]));
    pairs.fold(f64::INFINITY, |best, pair| {
        let here = first + rest[pair[0]] + rest[pair[1]];
        if here >= best {
            return best;
        }
        let others: Vec<f64> = (0..rest.len()).filter(|i| !pair.contains(i)).map(|i| rest[i]).collect();
        best.min(here.max(best_triples(&others)))
    })
}

/// FlexMoE copies hot experts and takes copies of cold ones away as long as the estimated time falls.
#[test]
fn copies_of_hot_experts_lower_the_expected_time_of_a_step() {
    let loads = zipf(64, 1.0);
    let placement = Placement::sharded(64, 16);
    let layer = LayerLoads { placement: &placement, loads: &loads, steps: &[], expert_bytes: 1.0, gradient_bytes: 1.0 };
    let rules = |may_replicate, slots_per_rank| RebalanceRules {
        slots_per_rank,
        max_moves: 64,
        may_replicate,
        num_steps: 1,
        min_gain: 0.0,
        sharing: ReplicaSharing::Even,
    };
    let rates = RebalanceRates { row_s: 1.0, bytes_per_s: 1.0, sum_bytes_per_s: 1.0 };
    let nodes = Nodes::new(&[0; 16]);
    let imbalance = |policy, rules: RebalanceRules| {
        rebalance_layer(layer, policy, &rules, &rates, &nodes).expect("valid").expect("a change").imbalance
    };
    let [before, moved] = imbalance(RebalancePolicy::Moves, rules(false, 4));
    let [_, copied] = imbalance(RebalancePolicy::Anew, rules(true, 5));
    for (value, expected) in [before, moved, copied].into_iter().zip([2.838, 2.533, 0.028]) {
        assert_figure(value, expected, "imbalance");
    }
}

/// ScheMoE: all dispatches, then each combine as soon as it can is the best order of a layer's chunks. Compared with
/// every order of dispatches and combines on one link.
#[test]
fn no_order_of_chunks_is_faster_than_that_of_schemoe() {
    for chunks in 1..5 {
        for (transfer, compute) in [(1.0, 1.0), (1.0, 2.5), (2.0, 0.5), (1.0, 1.6), (0.3, 4.0)] {
            let best = best_order(chunks, transfer, compute);
            let ours = overlapped_seconds(chunks, transfer, compute);
            assert!((ours - best).abs() < 1e-12, "{chunks} chunks of {transfer} and {compute}: {ours}, {best}");
        }
    }
}

/// Returns the least time over all orders in which a link carries `chunks` dispatches and combines.
fn best_order(chunks: usize, transfer: f64, compute: f64) -> f64 {
    let orders = (0..1_usize << (2 * chunks)).filter(|bits| bits.count_ones() as usize == chunks);
    let seconds = |bits: usize| {
        let (mut link, mut device, mut computed, mut combined) = (0.0_f64, 0.0_f64, Vec::new(), 0);
        for place in 0..2 * chunks {
            if bits >> place & 1 == 1 {
                link += transfer;
                device = device.max(link) + compute;
                computed.push(device);
            } else {
                let Some(&done) = computed.get(combined) else { return f64::INFINITY };
                link = link.max(done) + transfer;
                combined += 1;
            }
        }
        link
    };
    orders.map(seconds).fold(f64::INFINITY, f64::min)
}
