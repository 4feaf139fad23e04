//! Decisions and steps of rebalancing on made loads.

use super::*;
use crate::{Nodes, Placement, RankLoads};

fn nodes(num_ranks: usize) -> Nodes {
    Nodes::new(&vec![0; num_ranks])
}

/// Numbers that look random, from a linear congruential generator.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }

    fn placement(&mut self, num_experts: usize, num_ranks: usize) -> Placement {
        let ranks = (0..num_experts).map(|_| {
            let (first, second) = (self.below(num_ranks), self.below(num_ranks));
            if first < second { vec![first, second] } else { vec![first] }
        });
        Placement::from_ranks(num_ranks, ranks.collect())
    }
}

fn rules(slots_per_rank: usize) -> RebalanceRules {
    let sharing = ReplicaSharing::BySource;
    RebalanceRules { slots_per_rank, max_moves: 8, may_replicate: false, num_steps: 10, min_gain: 1.0, sharing }
}

const RATES: RebalanceRates = RebalanceRates { row_s: 1e-3, bytes_per_s: 1e6, sum_bytes_per_s: 1e6 };

/// A layer whose mean load alone is known.
fn layer<'a>(placement: &'a Placement, loads: &'a [f64], expert_bytes: f64) -> LayerLoads<'a> {
    LayerLoads { placement, loads, steps: &[], expert_bytes, gradient_bytes: 0.0 }
}

#[test]
fn steps_reach_the_target_and_keep_to_their_limit_and_every_expert_somewhere() {
    let mut numbers = Numbers(1);
    for case in 0..200 {
        let (num_experts, num_ranks) = (1 + numbers.below(9), 1 + numbers.below(5));
        let (mut current, target) =
            (numbers.placement(num_experts, num_ranks), numbers.placement(num_experts, num_ranks));
        let (max_copies, nodes) = (numbers.below(3), nodes(num_ranks));
        let most_held = current.max_experts().max(target.max_experts());
        let mut num_steps = 0;
        while current != target {
            let next = placement_step(&current, &target, &nodes, max_copies);
            let transfers = expert_transfers(&current, &next, &nodes);
            assert!(most_copies(&transfers, num_ranks) <= max_copies.max(1), "case {case}");
            assert!(transfers.iter().all(|transfer| current.holds(transfer.from, transfer.expert)), "case {case}");
            assert!((0..num_experts).all(|expert| !next.ranks_of(expert).is_empty()), "case {case}");
            assert!(next.max_experts() <= most_held + 2, "case {case}: {next} on the way to {target}");
            current = next;
            num_steps += 1;
            assert!(num_steps <= num_experts * num_ranks, "case {case}: no end");
        }
    }
}

#[test]
fn a_ring_of_full_ranks_moves_one_expert_each_in_one_step() {
    let (from, to) =
        (Placement::sharded(4, 4), "placement experts=4 ranks=4\n0: 1\n1: 2\n2: 3\n3: 0\n".parse().unwrap());
    assert_eq!(placement_step(&from, &to, &nodes(4), 1), to);
    // With more to move than the limit the rest follows later.
    let from = Placement::sharded(4, 2);
    let to: Placement = "placement experts=4 ranks=2\n0: 1\n1: 1\n2: 0\n3: 0\n".parse().unwrap();
    let half = placement_step(&from, &to, &nodes(2), 1);
    assert_eq!(half.to_string(), "placement experts=4 ranks=2\n0: 1\n1: 0\n2: 0\n3: 1\n");
    assert_eq!(placement_step(&half, &to, &nodes(2), 1), to);
}

#[test]
fn a_change_must_promise_more_than_it_costs() {
    let placement = Placement::sharded(4, 2);
    let loads = [30.0, 10.0, 5.0, 5.0];
    let layer = layer(&placement, &loads, 1e4);
    let decide = |layer, policy, rules: RebalanceRules| {
        rebalance_layer(layer, policy, &rules, &RATES, &nodes(2)).expect("valid loads")
    };
    let change = decide(layer, RebalancePolicy::Moves, rules(2)).expect("a swap is worth it");
    assert_eq!((change.num_copies, change.cost_s), (2, 0.01));
    assert!((change.saved_s - 0.005).abs() < 1e-12, "5 tokens less on the fuller rank: {change:?}");
    assert_eq!(change.imbalance, [40.0 / 25.0 - 1.0, 35.0 / 25.0 - 1.0]);
    let asking = |min_gain| RebalanceRules { min_gain, ..rules(2) };
    assert!(decide(layer, RebalancePolicy::Moves, asking(4.9)).is_some());
    assert_eq!(decide(layer, RebalancePolicy::Moves, asking(5.1)), None);
    assert_eq!(decide(layer, RebalancePolicy::Keep, rules(2)), None);
}

#[test]
fn a_step_takes_its_own_fullest_rank_and_the_sums_of_gradients_of_replicas() {
    // By the mean both ranks have as much; in each step one of them has all.
    let placement: Placement = "placement experts=2 ranks=2\n0: 0\n1: 1\n".parse().unwrap();
    let steps = [vec![20.0, 0.0], vec![0.0, 20.0]];
    let uneven = LayerLoads { steps: &steps, gradient_bytes: 1e3, ..layer(&placement, &[10.0, 10.0], 1.0) };
    let rules = RebalanceRules { may_replicate: true, ..rules(2) };
    let change = rebalance_layer(uneven, RebalancePolicy::Anew, &rules, &RATES, &nodes(2)).expect("valid");
    let change = change.expect("copies of both experts make every step even");
    // 20 tokens become 10, and the gradients of two experts are summed.
    assert!((change.saved_s - (10e-3 - 2e-3)).abs() < 1e-12, "{change:?}");
    let slow = RebalanceRates { sum_bytes_per_s: 1e5, ..RATES };
    assert_eq!(rebalance_layer(uneven, RebalancePolicy::Anew, &rules, &slow, &nodes(2)).expect("valid"), None);
}

#[test]
fn ranks_that_hold_a_replica_share_the_other_ranks_in_turn() {
    // Ranks 1 and 3 hold the expert; 0 and 2 have one of them each.
    let placement: Placement = "placement experts=1 ranks=4\n0: 1 3\n".parse().unwrap();
    let loads = |placement: &Placement, nodes: &Nodes| {
        RankLoads::by_source(placement, &[8.0], nodes).expect("valid").loads().to_vec()
    };
    assert_eq!(loads(&placement, &nodes(4)), [0.0, 4.0, 0.0, 4.0]);
    // Three holders of four ranks cannot have equal shares.
    let three: Placement = "placement experts=1 ranks=4\n0: 0 1 2\n".parse().unwrap();
    assert_eq!(loads(&three, &nodes(4)), [4.0, 2.0, 2.0, 0.0]);
    // Ranks without a holder in their node share those of the other nodes in turn.
    let far: Placement = "placement experts=1 ranks=6\n0: 0 1\n".parse().unwrap();
    assert_eq!(loads(&far, &Nodes::new(&[0, 0, 1, 1, 2, 2]))[..2], [4.0, 4.0]);
}

#[test]
fn no_policy_makes_the_largest_load_larger_and_all_keep_to_the_slots() {
    let mut numbers = Numbers(7);
    for case in 0..200 {
        let (num_experts, num_ranks) = (1 + numbers.below(9), 1 + numbers.below(5));
        let placement = Placement::sharded(num_experts, num_ranks);
        let loads: Vec<f64> = (0..num_experts).map(|_| numbers.below(20) as f64).collect();
        let slots_per_rank = (num_experts.div_ceil(num_ranks) + numbers.below(12)).min(num_experts);
        let layer = layer(&placement, &loads, 1.0);
        for (policy, may_replicate) in
            RebalancePolicy::ALL.into_iter().flat_map(|policy| [(policy, true), (policy, false)])
        {
            let rules = RebalanceRules { may_replicate, min_gain: 0.0, ..rules(slots_per_rank) };
            let change = rebalance_layer(layer, policy, &rules, &RATES, &nodes(num_ranks)).expect("valid");
            let Some(change) = change else { continue };
            let max = |placement| RankLoads::by_source(placement, &loads, &nodes(num_ranks)).expect("valid").max();
            assert!(max(&change.placement) < max(&placement), "case {case}, {}", policy.name());
            assert!(change.placement.max_experts() <= slots_per_rank, "case {case}, {}", policy.name());
            assert!(may_replicate || !change.placement.has_replicas(), "case {case}, {}", policy.name());
        }
    }
}

#[test]
fn a_placement_made_anew_moves_little_where_the_old_one_was_nearly_right() {
    let old: Placement = "placement experts=4 ranks=2\n0: 1\n1: 0\n2: 1\n3: 0\n".parse().unwrap();
    let loads = [8.0, 1.0, 6.0, 5.0];
    let layer = layer(&old, &loads, 1.0);
    let change = rebalance_layer(layer, RebalancePolicy::Anew, &rules(3), &RATES, &nodes(2)).expect("valid");
    let change = change.expect("better");
    assert!(change.num_copies <= 2, "{change:?}");
}

#[test]
fn loads_of_another_number_of_experts_are_refused() {
    let placement = Placement::sharded(3, 2);
    let layer = layer(&placement, &[1.0, 2.0], 1.0);
    for policy in [RebalancePolicy::Moves, RebalancePolicy::Anew] {
        let error = rebalance_layer(layer, policy, &rules(2), &RATES, &nodes(2)).expect_err("two loads of three");
        assert_eq!(error.to_string(), "loads of 2 experts: must be 3");
    }
}

#[test]
fn a_bandit_finds_the_fastest_arm_and_follows_when_another_becomes_faster() {
    let mut bandit = Bandit::new(3);
    let mut numbers = Numbers(3);
    let mut run = |bandit: &mut Bandit, times: [f64; 3], rounds: usize| {
        let mut counts = [0; 3];
        for _ in 0..rounds {
            let arm = bandit.choose();
            counts[arm] += 1;
            let noise = (numbers.below(100) as f64 - 50.0) * 2e-3;
            bandit.observe(arm, times[arm] * (1.0 + noise));
        }
        counts
    };
    let counts = run(&mut bandit, [1.0, 0.7, 1.2], 60);
    assert!(counts[1] > 30, "{counts:?}");
    let counts = run(&mut bandit, [0.4, 0.9, 1.2], 100);
    assert!(counts[0] > 50, "{counts:?}");
    bandit.observe(0, f64::NAN);
    assert!(bandit.mean(0).expect("tried").is_finite());
}
