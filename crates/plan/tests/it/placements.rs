//! Placements: what they say, and their text.

use moeworks_plan::{
    ExchangeCosts, Moved, Placement, PlacementError, ShadowCosts, choose_moved, shadow, shadow_seconds,
};
use proptest::prelude::*;

const MIXED: &str = include_str!("golden/mixed.placement");

fn mixed() -> Placement {
    let mut placement = Placement::sharded(6, 4);
    placement.replicate(3, &[0, 1, 2, 3]);
    placement.replicate(2, &[3]);
    placement
}

#[test]
fn the_text_form_is_that_of_the_golden_file() {
    assert_eq!(mixed().to_string(), MIXED);
    assert_eq!(MIXED.parse(), Ok(mixed()));
}

#[test]
fn experts_that_do_not_divide_go_to_the_first_ranks() {
    let placement = Placement::sharded(7, 3);
    let held: Vec<Vec<usize>> = (0..3).map(|rank| placement.experts_of(rank)).collect();
    assert_eq!(held, [vec![0, 1, 2], vec![3, 4], vec![5, 6]]);
    assert_eq!(placement.max_experts(), 3);
    assert!(Placement::sharded(2, 3).experts_of(2).is_empty(), "a rank may hold none");
}

#[test]
fn a_rank_that_holds_an_expert_serves_itself_and_others_share_the_replicas() {
    let placement = mixed();
    assert_eq!(placement.serving_rank(3, 2), 3);
    assert_eq!(placement.serving_rank(0, 2), 1);
    assert_eq!(placement.serving_rank(2, 2), 1);
    assert_eq!((0..4).map(|rank| placement.serving_rank(rank, 3)).collect::<Vec<_>>(), [0, 1, 2, 3]);
}

#[test]
fn bad_texts_are_refused_with_the_line() {
    let problem = |text: &str| text.parse::<Placement>().map_err(|PlacementError { line, .. }| line);
    for (text, line) in [
        ("", 1),
        ("placement experts=0 ranks=2\n", 1),
        ("placement experts=99999999999999999999 ranks=2\n", 1),
        ("placement experts=2 ranks=2\n0: 0\n", 2),
        ("placement experts=2 ranks=2\n0: 0\n1: 2\n", 3),
        ("placement experts=2 ranks=2\n0: 0\n1: 1 0\n", 3),
        ("placement experts=2 ranks=2\n0: 0 0\n1: 1\n", 2),
        ("placement experts=2 ranks=2\n1: 0\n0: 1\n", 2),
        ("placement experts=1 ranks=2\n0:\n", 2),
        ("placement experts=1 ranks=2\n0: 1\n1: 1\n", 3),
    ] {
        assert_eq!(problem(text), Err(line), "{text:?}");
    }
}

fn any_placement() -> impl Strategy<Value = Placement> {
    (1..12_usize, 1..9_usize, prop::collection::vec((0..64_usize, 0..64_usize), 0..20)).prop_map(|(e, n, extra)| {
        let mut placement = Placement::sharded(e, n);
        extra.into_iter().for_each(|(expert, rank)| placement.replicate(expert % e, &[rank % n]));
        placement
    })
}

proptest! {
    #[test]
    fn text_and_value_are_the_same(placement in any_placement()) {
        prop_assert_eq!(placement.to_string().parse::<Placement>(), Ok(placement));
    }

    #[test]
    fn any_text_is_read_or_refused(text in "placement experts=[0-9]{1,3} ranks=[0-9]{1,2}\n([0-9]{1,2}: [0-9 *]{0,6}\n){0,4}") {
        if let Ok(placement) = text.parse::<Placement>() {
            prop_assert!((0..placement.num_experts()).all(|expert| !placement.ranks_of(expert).is_empty()));
        }
    }

    #[test]
    fn every_expert_is_served_by_a_rank_that_holds_it(placement in any_placement()) {
        for expert in 0..placement.num_experts() {
            for source in 0..placement.num_ranks() {
                prop_assert!(placement.holds(placement.serving_rank(source, expert), expert));
            }
        }
    }

    /// With one expert a rank and the same rows from each rank the greedy choice is the best of all subsets.
    #[test]
    fn shadowing_is_as_good_as_brute_force(
        loads in prop::collection::vec(0..40_u32, 2..=10),
        row in 0.1..3.0_f64,
        moved in 0.0..3.0_f64,
        expert in 0.1..60.0_f64,
    ) {
        let n = loads.len();
        let placement = Placement::sharded(n, n);
        let counts = vec![loads; n];
        let costs = ShadowCosts { row_compute_s: row, row_move_s: moved, expert_move_s: expert };
        let seconds = |set: &[usize]| shadow_seconds(&counts, &placement, set, &costs);
        let best = (0..1_usize << n)
            .map(|bits| seconds(&(0..n).filter(|i| bits >> i & 1 == 1).collect::<Vec<_>>()))
            .fold(f64::INFINITY, f64::min);
        let chosen = seconds(&shadow(&counts, &placement, &costs));
        prop_assert!((chosen - best).abs() <= 1e-9 * best.max(1.0), "{} against {}", chosen, best);
    }

    #[test]
    fn shadowing_never_costs(
        counts in prop::collection::vec(prop::collection::vec(0..50_u32, 7), 3),
        expert in 0.1..90.0_f64,
    ) {
        let placement = Placement::sharded(7, 3);
        let costs = ShadowCosts { row_compute_s: 1.0, row_move_s: 0.5, expert_move_s: expert };
        let with = shadow_seconds(&counts, &placement, &shadow(&counts, &placement, &costs), &costs);
        prop_assert!(with <= shadow_seconds(&counts, &placement, &[], &costs));
    }
}

#[test]
fn many_tokens_for_small_experts_let_the_weights_move() {
    let costs = ExchangeCosts { row_bytes: 4096.0, expert_bytes: 1e6, bytes_per_s: 1e9, row_seconds: 0.0 };
    let placement = Placement::sharded(4, 4);
    let few = vec![vec![10; 4]; 4];
    let many = vec![vec![1000; 4]; 4];
    assert_eq!(choose_moved(&few, &placement, &costs), Moved::Tokens);
    assert_eq!(choose_moved(&many, &placement, &costs), Moved::Weights);
    assert_eq!(choose_moved(&many, &Placement::everywhere(4, 4), &costs), Moved::Tokens, "nothing moves at all");
}
