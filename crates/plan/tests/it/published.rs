//! Figures that papers and repositories publish, from their formulas.

use moeworks_plan::cost::collectives::{Rows, all_reduce, all_to_all, parts_hit};
use moeworks_plan::cost::pipeline::{Chunked, overlapped_seconds};
use moeworks_plan::cost::tutel::{best_token_copies, trials_per_entry};
use moeworks_plan::{
    Algorithm, DomainLevel, DomainWork, Group, Migration, Peer, Topology, Wire, choose_domains, domain_seconds,
    domain_transfers, peer, token_share,
};

fn assert_near(value: f64, expected: f64, relative: f64, what: &str) {
    assert!((value - expected).abs() <= relative * expected.abs(), "{what}: {value} against {expected}");
}

/// DeepEP's table of low-latency kernels: 128 tokens of 7168 numbers to eight experts each; the bytes over the
/// published microseconds give the published GB/s.
#[test]
fn bytes_of_dispatch_and_combine_are_those_of_deepep() {
    let dispatch = [(77.0, 98.0), (118.0, 63.0), (155.0, 48.0), (173.0, 43.0), (192.0, 39.0), (194.0, 39.0)];
    let combine = [(114.0, 127.0), (195.0, 74.0), (273.0, 53.0), (314.0, 46.0), (369.0, 39.0), (360.0, 40.0)];
    for (wire, table) in [(Wire::Byte { block: 128 }, dispatch), (Wire::Bf16, combine)] {
        let rows = Rows { tokens: 128, top_k: 8, num_experts: 256, row_bytes: wire.row_bytes(7168) };
        for (us, gb_per_s) in table {
            assert_near(rows.bytes() / (us * 1e-6) / 1e9, gb_per_s, 0.025, "DeepEP");
        }
    }
}

/// Eight of 256 experts at random touch this many nodes (hypergeometric).
#[test]
fn nodes_that_a_token_goes_to() {
    for (nodes, mean) in [(4, 3.614), (8, 5.295), (16, 6.524), (32, 7.267)] {
        assert_near(parts_hit(256, 8, nodes), mean, 1e-3, "nodes");
    }
    assert_near(parts_hit(8, 8, 4), 4.0, 1e-12, "all experts are in all parts");
    assert_near(parts_hit(64, 1, 8), 1.0, 1e-12, "one expert is in one part");
}

/// Tutel, section 3.3: trials that fill an entry of its dictionary.
#[test]
fn trials_of_tutels_dictionary() {
    assert_near(trials_per_entry(64, 16), 43.4, 1e-2, "W 64, E 16");
    assert_near(trials_per_entry(2048, 64), 84.4, 1e-2, "W 2048, E 64");
}

/// r* is where the bytes `C r + P/(E r)` are least.
#[test]
fn the_best_number_of_token_copies_moves_the_least_bytes() {
    let (capacity, params, world, experts) = (1e6, 64e6, 64, 4);
    let best = best_token_copies(capacity, params, world, experts);
    let bytes = |r: f64| capacity * r + params / (experts as f64 * r);
    assert!((1..=16).all(|r| bytes(best) <= bytes(f64::from(r)) + 1e-6), "r* = {best}");
    assert_near(best_token_copies(1e9, 1e6, 64, 4), 1.0, 1e-12, "many tokens");
    assert_near(best_token_copies(1.0, 1e9, 64, 4), 16.0, 1e-12, "large experts");
}

/// Tutel, table 2: with perfect overlap a layer takes as long as the longer of its two parts.
#[test]
fn overlap_approaches_the_longer_of_computation_and_transfer() {
    for (compute, transfer, speedup) in [(371.8, 189.1, 1.51), (375.1, 323.8, 1.86), (386.3, 491.3, 1.78)] {
        assert_near((compute + transfer) / f64::max(compute, transfer), speedup, 1e-2, "Tutel's bound");
        let layer =
            Chunked { transfer_start_s: 0.0, transfer_s: transfer / 2.0, compute_start_s: 0.0, compute_s: compute };
        assert_near(layer.seconds(1), compute + transfer, 1e-12, "one chunk hides nothing");
        let many = layer.seconds(1000);
        assert!(many >= compute.max(transfer) && many < 1.01 * compute.max(transfer), "{many}");
    }
}

/// PipeMoE's closed forms: `2a + re` where computation is longer, `2ra` where transfers fill the link. On one link
/// the first holds as long as it leaves the link time for all transfers, so that the longer of the two is the time.
#[test]
fn chunks_take_what_pipemoe_says() {
    for r in 1..9 {
        let n = r as f64;
        for (a, e) in [(1.0, 1.0), (1.0, 2.5), (0.3, 4.0), (2.0, 1.0), (1.0, 0.9), (5.0, 0.1), (1.0, 1.5)] {
            let closed = f64::max(2.0 * a + n * e, 2.0 * n * a);
            assert_near(overlapped_seconds(r, a, e), closed, 1e-12, "closed form");
        }
    }
}

/// Its optimum where computation is longer: `r = sqrt(2 b n / e0)`.
#[test]
fn the_best_number_of_chunks_is_that_of_pipemoe() {
    let layer = Chunked { transfer_start_s: 0.1, transfer_s: 20.0, compute_start_s: 1.0, compute_s: 100.0 };
    let best = layer.best_chunks(64) as f64;
    assert!((best - (2.0 * 20.0_f64 / 1.0).sqrt()).abs() <= 1.0, "{best}");
    let nothing_to_hide = Chunked { transfer_s: 0.0, transfer_start_s: 0.0, ..layer };
    assert_eq!(nothing_to_hide.best_chunks(64), 1);
}

/// HybridEP, table 7: messages for every domain size.
#[test]
fn transfers_of_hybrid_ep() {
    for workers in [8, 16, 32] {
        for domain in [1, 2, 4, 8] {
            let counted =
                (0..workers).flat_map(|a| (0..workers).map(move |b| (a, b))).fold((0, 0), |mut sum, (a, b)| {
                    match peer(a, b, 0, &[workers], &[domain]) {
                        Peer::Exchange => sum.0 += 1,
                        Peer::Gather => sum.1 += 1,
                        Peer::None => {}
                    }
                    sum
                });
            assert_eq!(counted, domain_transfers(workers, domain), "{workers} workers, domains of {domain}");
        }
    }
    assert_eq!(domain_transfers(8, 2), (24, 8));
    assert_eq!(domain_transfers(32, 4), (224, 96));
}

/// At a level of two only pairs that agree below have to do with each other.
#[test]
fn levels_of_hybrid_ep_pair_workers_at_equal_places_below() {
    assert_eq!(peer(0, 4, 0, &[2, 4], &[1, 2]), Peer::Exchange);
    assert_eq!(peer(0, 5, 0, &[2, 4], &[1, 2]), Peer::None);
    assert_eq!(peer(0, 1, 1, &[2, 4], &[1, 2]), Peer::Gather);
    assert_eq!(peer(0, 2, 1, &[2, 4], &[1, 2]), Peer::Exchange);
    assert_eq!(peer(0, 3, 1, &[2, 4], &[1, 2]), Peer::None);
}

/// HybridEP's optimum for the settings of its table 4 (its printed shares do not follow from them; these do), and
/// that it is one.
#[test]
fn the_share_of_tokens_of_hybrid_ep() {
    let mix = |hidden_s, expert_bytes, bytes_per_s| Migration {
        workers: 8,
        data_bytes: 8e6,
        expert_bytes,
        bytes_per_s,
        hidden_s,
    };
    for (of, share) in [
        (mix(49e-6, 4.7e6, 16e9), 0.976),
        (mix(49e-6, 2.35e6, 16e9), 0.952),
        (mix(490e-6, 4.7e6, 16e9), 0.762),
        (mix(490e-6, 2.35e6, 16e9), 0.523),
        (mix(49e-6, 4.7e6, 128e9), 0.809),
        (mix(49e-6, 2.35e6, 128e9), 0.619),
    ] {
        assert_near(token_share(&of), share, 1e-3, "p*");
    }
    for expert_bytes in [0.094e6, 0.047e6] {
        let of = Migration { data_bytes: 3e6, ..mix(99e-6, expert_bytes, 16e9) };
        assert_eq!(token_share(&of), 0.0, "tokens are more than experts");
    }
    for of in [mix(490e-6, 4.7e6, 16e9), mix(0.0, 1e6, 1e9), mix(1.0, 9e6, 1e9)] {
        let best = of.seconds(token_share(&of));
        assert!((0..=100).all(|i| best <= of.seconds(f64::from(i) / 100.0) + 1e-12), "{of:?}");
    }
}

/// Tutel's 2DH: fewer and larger messages, so it wins where they are small and not where they are large.
#[test]
fn the_hierarchical_all_to_all_wins_with_small_messages() {
    let topology = Topology::example_cluster(32);
    let group = Group { ranks: 256, per_node: 8 };
    let seconds = |algorithm, tokens| {
        let rows = Rows { tokens, top_k: 1, num_experts: 256, row_bytes: 2048 };
        all_to_all(&topology, group, algorithm, &rows).seconds
    };
    assert!(seconds(Algorithm::Hierarchical, 256) < seconds(Algorithm::Linear, 256));
    assert!(seconds(Algorithm::Hierarchical, 1 << 20) > seconds(Algorithm::Linear, 1 << 20));
}

/// Every byte to another rank goes over one link of one class; 2DH sends as much between nodes and more within.
#[test]
fn bytes_of_an_all_to_all_go_where_the_ranks_are() {
    let topology = Topology::example_cluster(4);
    let rows = Rows { tokens: 1000, top_k: 2, num_experts: 64, row_bytes: 100 };
    let group = Group { ranks: 32, per_node: 8 };
    let linear = all_to_all(&topology, group, Algorithm::Linear, &rows);
    assert_near(linear.node_bytes, 200_000.0 * 7.0 / 32.0, 1e-12, "within");
    assert_near(linear.cluster_bytes, 200_000.0 * 24.0 / 32.0, 1e-12, "between");
    let hierarchical = all_to_all(&topology, group, Algorithm::Hierarchical, &rows);
    assert_near(hierarchical.node_bytes, 200_000.0 * 7.0 / 8.0, 1e-12, "within");
    assert_near(hierarchical.cluster_bytes, linear.cluster_bytes, 1e-12, "between");
    let two_hop = all_to_all(&topology, group, Algorithm::TwoHop, &rows);
    let copies = parts_hit(64, 2, 4) / 2.0;
    assert_near(two_hop.cluster_bytes, copies * linear.cluster_bytes, 1e-12, "between, without copies");
    let own = all_to_all(&topology, Group { ranks: 1, per_node: 1 }, Algorithm::Linear, &rows);
    assert_eq!((own.seconds, own.node_bytes, own.cluster_bytes), (0.0, 0.0, 0.0));
}

/// `2 (n-1)/n S` round a ring.
#[test]
fn bytes_of_an_all_reduce() {
    let topology = Topology::example_cluster(4);
    let ring = all_reduce(&topology, Group { ranks: 8, per_node: 8 }, 800.0);
    assert_near(ring.node_bytes, 1400.0, 1e-12, "one node");
    let two = all_reduce(&topology, Group { ranks: 32, per_node: 8 }, 800.0);
    assert_near(two.node_bytes, 1400.0, 1e-12, "within");
    assert_near(two.cluster_bytes, 2.0 * 0.75 * 100.0, 1e-12, "between");
}

#[test]
fn domains_of_hybrid_ep_are_those_of_the_least_time_on_every_level() {
    let level = |size, bytes_per_s| DomainLevel { size, bytes_per_s };
    let levels = [level(4, 1.25e9), level(8, 16e9)];
    let work = |data_bytes: f64, expert_bytes: f64| DomainWork { data_bytes, expert_bytes, hidden_s: 1e-3 };
    let best = |work: &DomainWork| {
        let sizes = |size: usize| (1..=size).filter(move |domain| size.is_multiple_of(*domain));
        let all = sizes(4).flat_map(|a| sizes(8).map(move |b| vec![a, b]));
        all.map(|domains| domain_seconds(&levels, &domains, work)).fold(f64::INFINITY, f64::min)
    };
    for data in [1e5, 1e6, 8e6, 1e8, 1e9] {
        for expert in [1e4, 4e5, 8e6, 5e8] {
            let work = work(data, expert);
            let found = domain_seconds(&levels, &choose_domains(&levels, &work), &work);
            assert!(found <= best(&work) * (1.0 + 1e-6), "{data} {expert}");
        }
    }
    // Many tokens and small experts: all experts come; few tokens and large experts: only tokens move.
    assert_eq!(choose_domains(&levels, &work(1e9, 1e4)), [4, 8]);
    assert_eq!(choose_domains(&levels, &work(1e5, 5e8)), [1, 1]);
    // One level of G workers: the share of tokens by volume is 1 - S / G.
    let one = Migration { workers: 8, data_bytes: 8e6, expert_bytes: 2.35e6, bytes_per_s: 16e9, hidden_s: 0.0 };
    let seconds = domain_seconds(&[level(8, 16e9)], &[4], &DomainWork { hidden_s: 0.0, ..work(8e6, 2.35e6) });
    let (gather, exchange) = (3.0 * one.expert_bytes / 16e9, 2.0 * one.data_bytes * 0.5 / 16e9);
    assert!((seconds - gather - exchange).abs() < 1e-12);
}
