//! Co-activation, beam search, rows that are shared out, and importance.

use proptest::prelude::*;

use super::*;
use crate::Placement;

/// Tokens that choose two experts of one of `num_groups` groups; expert e belongs to group `e % num_groups`.
fn grouped(num_experts: usize, num_groups: usize, num_tokens: usize) -> Coactivation {
    let mut pairs = Coactivation::new(num_experts);
    for token in 0..num_tokens {
        let group = token % num_groups;
        let size = num_experts / num_groups;
        let member = |i: usize| (group + num_groups * (i % size)) as u32;
        pairs.add(&[member(token / num_groups), member(token / num_groups + 1 + token % (size - 1))]);
    }
    pairs
}

fn max_load(placement: &Placement, loads: &[f64]) -> f64 {
    RankLoads::new(placement, loads).unwrap().max()
}

#[test]
fn experts_chosen_together_come_to_one_node() {
    let pairs = grouped(32, 4, 4000);
    let sizes = NodeSizes { num_ranks: 8, num_nodes: 4, slots_per_rank: 4, max_excess: 0.1 };
    let placement = place_by_coactivation(&[1.0; 32], &pairs, sizes).unwrap();
    assert!(pairs.in_node_share(&Placement::sharded(32, 8), 2) < 0.3);
    assert_eq!(pairs.in_node_share(&placement, 2), 1.0);
    assert_eq!(placement.max_experts(), 4);
}

#[test]
fn a_pair_is_counted_once_for_a_token_and_an_expert_with_itself_never() {
    let mut pairs = Coactivation::new(3);
    pairs.add(&[0, 2, u32::MAX]);
    pairs.add(&[2, 0, 0]);
    assert_eq!((pairs.pair(0, 2), pairs.pair(2, 0), pairs.pair(0, 0)), (3, 3, 0));
    assert_eq!(pairs.num_pairs(), 3);
}

#[test]
fn a_beam_finds_moves_that_greed_does_not() {
    // The greedy first swap leads to a place from which no single swap helps.
    let loads = [10.0, 7.0, 6.0, 9.0, 5.0, 4.0, 3.0, 2.0, 8.0, 11.0, 1.0, 12.0];
    let plain = Placement::sharded(12, 4);
    let options = BeamOptions { slots_per_rank: 3, max_moves: 6, width: 8 };
    let (greedy, _) = improve(&plain, &loads, 3, 6).unwrap();
    let (beam, moves) = improve_by_beam(&plain, &loads, options).unwrap();
    assert!(max_load(&beam, &loads) <= max_load(&greedy, &loads));
    assert_eq!(max_load(&beam, &loads), 20.0, "the mean is 19.5");
    assert!(moves.len() <= 6);
}

#[test]
fn the_rows_of_a_hot_expert_are_shared_out_over_idle_ranks() {
    let placement = Placement::sharded(4, 4);
    let options = SplitOptions { least_imbalance: 0.3, max_excess: 0.0, min_rows: 10 };
    let split = split_rows(&placement, &[700, 100, 100, 100], options).unwrap();
    assert_eq!(split.rows_per_rank, [250, 250, 250, 250]);
    assert_eq!(split.num_fetched(), 3);
    let fetched = RowShare { expert: 0, rank: 1, rows: 150, is_fetched: true };
    assert_eq!(split.shares[1], fetched);
    // With a load that is even enough nothing is fetched.
    let split = split_rows(&placement, &[280, 240, 240, 240], options).unwrap();
    assert_eq!((split.num_fetched(), split.rows_per_rank), (0, vec![280, 240, 240, 240]));
}

#[test]
fn copies_of_hot_experts_take_the_places_of_experts_that_matter_least() {
    let (loads, importance) = ([80.0, 10.0, 6.0, 4.0], [40.0, 8.0, 0.5, 1.5]);
    let limits = ReplicationLimits { num_slots: 4, max_copies: 4, max_lost: 0.05 };
    let found = replicate_by_importance(&loads, &importance, limits).unwrap();
    // Expert 2 is chosen more often than expert 3, and matters less.
    assert_eq!((found.evicted(), found.copies.clone()), (vec![2, 3], vec![3, 1, 0, 0]));
    assert!((found.lost - 0.04).abs() < 1e-12, "{found:?}");
    let keeps = replicate_by_importance(&loads, &importance, ReplicationLimits { max_lost: 0.0, ..limits }).unwrap();
    assert_eq!((keeps.copies, keeps.lost), (vec![1, 1, 1, 1], 0.0));
    let few = ReplicationLimits { num_slots: 2, ..limits };
    assert_eq!(replicate_by_importance(&loads, &importance, few).unwrap().evicted(), [2, 3]);
    let fewer = replicate_by_importance(&loads, &importance, ReplicationLimits { num_slots: 1, ..limits });
    assert_eq!(fewer.unwrap_err().to_string(), "slots = 1: must be at least 2 to keep the experts that matter");
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let pairs = Coactivation::new(6);
    let sizes = NodeSizes { num_ranks: 4, num_nodes: 2, slots_per_rank: 2, max_excess: 0.0 };
    let error = |sizes| place_by_coactivation(&[1.0; 6], &pairs, sizes).unwrap_err().to_string();
    assert_eq!(error(NodeSizes { num_nodes: 3, ..sizes }), "nodes = 3: must divide the 4 ranks");
    assert_eq!(error(NodeSizes { slots_per_rank: 1, ..sizes }), "slots of a rank = 1: must be at least 2");
    assert_eq!(error(NodeSizes { num_ranks: 0, ..sizes }), "ranks = 0: must be at least 1");
    let few = place_by_coactivation(&[1.0; 5], &pairs, sizes).unwrap_err().to_string();
    assert_eq!(few, "loads of 5 experts: must be 6");
}

proptest! {
    #[test]
    fn coactivation_places_every_expert_and_keeps_no_fewer_pairs_in_a_node_than_the_plain_placement(
        (num_nodes, ranks_per_node, num_experts) in (1_usize..4, 1_usize..4, 1_usize..20),
        spare in 0_usize..2,
        tokens in prop::collection::vec(prop::collection::vec(0_u32..20, 2..4), 0..60),
        loads in prop::collection::vec(0.0_f64..1e3, 20),
    ) {
        let num_ranks = num_nodes * ranks_per_node;
        let mut pairs = Coactivation::new(num_experts);
        tokens.iter().for_each(|token| pairs.add(token));
        let slots_per_rank = num_experts.div_ceil(num_ranks) + spare;
        let sizes = NodeSizes { num_ranks, num_nodes, slots_per_rank, max_excess: 0.2 };
        let placement = place_by_coactivation(&loads[..num_experts], &pairs, sizes).unwrap();
        for expert in 0..num_experts {
            prop_assert!(!placement.ranks_of(expert).is_empty());
            prop_assert!(placement.ranks_of(expert).windows(2).all(|pair| pair[0] < pair[1]));
            let nodes: std::collections::BTreeSet<usize> =
                placement.ranks_of(expert).iter().map(|rank| rank / ranks_per_node).collect();
            prop_assert_eq!(nodes.len(), 1);
        }
        prop_assert!(placement.max_experts() <= slots_per_rank);
        let plain = pairs.in_node_share(&Placement::sharded(num_experts, num_ranks), ranks_per_node);
        prop_assert!(pairs.in_node_share(&placement, ranks_per_node) >= plain);
    }

    #[test]
    fn a_beam_is_never_worse_than_greedy_moves(
        ranks in 1_usize..6,
        width in 1_usize..5,
        max_moves in 0_usize..6,
        loads in prop::collection::vec(0.0_f64..1e3, 1..20),
    ) {
        let plain = Placement::sharded(loads.len(), ranks);
        let slots_per_rank = plain.max_experts();
        let options = BeamOptions { slots_per_rank, max_moves, width };
        let (beam, moves) = improve_by_beam(&plain, &loads, options).unwrap();
        let (greedy, _) = improve(&plain, &loads, slots_per_rank, max_moves).unwrap();
        prop_assert!(max_load(&beam, &loads) <= max_load(&greedy, &loads));
        prop_assert!(moves.len() <= max_moves && beam.max_experts() <= slots_per_rank);
        prop_assert!((0..loads.len()).all(|expert| beam.ranks_of(expert).len() == 1));
    }

    #[test]
    fn no_row_is_lost_and_the_largest_load_never_rises(
        ranks in 1_usize..6,
        rows in prop::collection::vec(0_u64..500, 1..16),
        min_rows in 0_u64..40,
    ) {
        let placement = Placement::sharded(rows.len(), ranks);
        let options = SplitOptions { least_imbalance: 0.1, max_excess: 0.05, min_rows };
        let split = split_rows(&placement, &rows, options).unwrap();
        let mut found = vec![0; rows.len()];
        let mut of_ranks = vec![0; ranks];
        for share in &split.shares {
            found[share.expert] += share.rows;
            of_ranks[share.rank] += share.rows;
            prop_assert!(!share.is_fetched || share.rows >= min_rows);
            prop_assert_eq!(share.is_fetched, !placement.holds(share.rank, share.expert));
        }
        prop_assert_eq!(&found, &rows);
        prop_assert_eq!(&of_ranks, &split.rows_per_rank);
        let before: Vec<f64> = rows.iter().map(|&rows| rows as f64).collect();
        prop_assert!(split.rows_per_rank.iter().all(|&rows| rows as f64 <= max_load(&placement, &before)));
    }
}
