//! Placements and their text form.

use moeworks_plan::{
    Algorithm, LayerLoad, Link, Links, MoveCosts, Nodes, Placement, PlacementError, Placements, experts_to_fetch,
    pass_seconds,
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
    let node = Nodes::new(&[0; 4]);
    assert_eq!(placement.serving_rank(&node, 3, 2), 3);
    assert_eq!(placement.serving_rank(&node, 0, 2), 1);
    assert_eq!(placement.serving_rank(&node, 2, 2), 3);
    assert_eq!((0..4).map(|rank| placement.serving_rank(&node, rank, 3)).collect::<Vec<_>>(), [0, 1, 2, 3]);
    // The near one of two.
    let nodes = Nodes::new(&[0, 1, 1, 0]);
    assert_eq!([0, 2].map(|rank| placement.serving_rank(&nodes, rank, 2)), [3, 1]);
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

#[test]
fn a_text_may_have_a_placement_for_each_layer() {
    let placements = Placements::per_layer([(4, mixed()), (1, Placement::sharded(6, 4))]);
    assert_eq!((placements.layers(), placements.has_replicas()), (vec![1, 4], true));
    assert_eq!([0, 1].map(|place| placements.nth(place)), [placements.layer(1), placements.layer(4)]);
    assert_eq!(placements.layer(0), None);
    assert_eq!(placements.to_string().parse(), Ok(placements));
    // A single placement for all layers is written as before, and holds for any layer.
    let same = Placements::from(mixed());
    assert_eq!((same.to_string(), same.layers()), (MIXED.to_owned(), Vec::new()));
    assert_eq!(MIXED.parse(), Ok(same.clone()));
    assert_eq!((same.layer(7), same.num_experts(), same.num_ranks()), (Some(&mixed()), 6, 4));
}

#[test]
fn bad_texts_of_layers_are_refused_with_the_line() {
    for (text, line, problem) in [
        ("placement experts=1 ranks=2\nlayer 0:\n0: 0\nlayer 0:\n0: 1\n", 4, "layer 0 has a placement already"),
        ("placement experts=1 ranks=2\nlayer x:\n0: 0\n", 2, "must be \"layer N:\""),
        ("placement experts=1 ranks=2\nlayer 0\n0: 0\n", 2, "must be \"layer N:\""),
        ("placement experts=2 ranks=2\nlayer 0:\n0: 0\nlayer 1:\n0: 1\n1: 0\n", 3, "ends after 1 of 2 experts"),
        ("placement experts=1 ranks=2\nlayer 0:\n0: 0\n1: 0\n", 4, "there are only 1 experts"),
        ("placement experts=1 ranks=2\nlayer 0:\n0: 2\n", 3, "ascending ranks below 2"),
        ("placement experts=1 ranks=2\n0: 0\nlayer 1:\n0: 0\n", 3, "there are only 1 experts"),
        ("placement experts=1\nlayer 0:\n0: 0\n", 1, "must be \"placement experts=E ranks=R\""),
    ] {
        let error = text.parse::<Placements>().expect_err(text);
        assert!(error.line == line && error.problem.contains(problem), "{text:?}: {error}");
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
                let nodes = Nodes::new(&(0..placement.num_ranks()).map(|rank| rank % 2).collect::<Vec<_>>());
                prop_assert!(placement.holds(placement.serving_rank(&nodes, source, expert), expert));
            }
        }
    }

    /// With one expert a rank and the same rows from each rank the greedy choice is the best of all subsets.
    #[test]
    fn what_is_fetched_is_as_good_as_brute_force(
        loads in prop::collection::vec(0..40_u32, 2..=8),
        (row, moved, expert) in (0.1..3.0_f64, 0.0..3.0_f64, 0.1..60.0_f64),
    ) {
        let n = loads.len();
        let (nodes, placement) = (Nodes::new(&vec![0; n]), Placement::sharded(n, n));
        let (tokens, rows) = (vec![loads.iter().sum(); n], vec![loads; n]);
        let load = LayerLoad { nodes: &nodes, placement: &placement, tokens: &tokens, rows: &rows };
        let costs = costs(Algorithm::Linear, moved, expert, row);
        let seconds = |set: &[usize]| pass_seconds(&load, set, &costs);
        let best = (0..1_usize << n)
            .map(|bits| seconds(&(0..n).filter(|i| bits >> i & 1 == 1).collect::<Vec<_>>()))
            .fold(f64::INFINITY, f64::min);
        let chosen = seconds(&experts_to_fetch(&load, &costs));
        prop_assert!((chosen - best).abs() <= 1e-6 * best.max(1.0), "{} against {}", chosen, best);
    }

    /// On any nodes and paths the choice takes no longer than all tokens moving, or all experts.
    #[test]
    fn what_is_chosen_never_takes_longer_than_all_or_none(
        rows in prop::collection::vec(prop::collection::vec(0..50_u32, 7), 5),
        of_rank in prop::collection::vec(0..3_usize, 5),
        algorithm in prop::sample::select(vec![Algorithm::Linear, Algorithm::Hierarchical, Algorithm::TwoHop]),
        (moved, expert) in (0.0..3.0_f64, 0.1..300.0_f64),
    ) {
        let (nodes, placement) = (Nodes::new(&of_rank), Placement::sharded(7, 5));
        prop_assume!(nodes.ranks().iter().all(|ranks| !ranks.is_empty()));
        // Two choices a token.
        let tokens: Vec<u32> = rows.iter().map(|rows| rows.iter().sum::<u32>().div_ceil(2)).collect();
        let load = LayerLoad { nodes: &nodes, placement: &placement, tokens: &tokens, rows: &rows };
        let costs = costs(algorithm, moved, expert, 0.5);
        let of = |set: &[usize]| pass_seconds(&load, set, &costs);
        let chosen = of(&experts_to_fetch(&load, &costs));
        let all: Vec<usize> = (0..7).collect();
        prop_assert!(chosen <= of(&[]) && chosen <= of(&all), "{} of {} and {}", chosen, of(&[]), of(&all));
    }
}

/// The costs of rows of `row_bytes` bytes and experts of `expert` bytes there and back. Links carry a byte per second
/// inside a node, and a tenth of it with a latency of half a second between nodes.
fn costs(algorithm: Algorithm, row_bytes: f64, expert: f64, row_compute_s: f64) -> MoveCosts {
    let link = |latency_s, bytes_per_s| Link { latency_s, bytes_per_s };
    let links = Links { node: link(0.0, 1.0), cluster: link(0.5, 0.1) };
    MoveCosts { algorithm, links, row_bytes, expert_bytes: [expert; 2], row_compute_s }
}

/// Four ranks on two nodes, an expert on each; every rank has `rows` tokens for each expert.
fn seconds_on_two_nodes(algorithm: Algorithm, rows: u32, fetched: &[usize]) -> f64 {
    let (nodes, placement) = (Nodes::new(&[0, 0, 1, 1]), Placement::sharded(4, 4));
    let (tokens, rows) = ([4 * rows; 4], vec![vec![rows; 4]; 4]);
    let load = LayerLoad { nodes: &nodes, placement: &placement, tokens: &tokens, rows: &rows };
    pass_seconds(&load, fetched, &costs(algorithm, 2.0, 100.0, 0.0))
}

#[test]
fn seconds_are_those_of_what_goes_over_each_link() {
    // Ten tokens of two bytes to one near rank and to each of two far ones, four times.
    let linear = seconds_on_two_nodes(Algorithm::Linear, 10, &[]);
    assert!((linear - 4.0 * (20.0 + 2.0 * (0.5 + 200.0))).abs() < 1e-3, "{linear}");
    // Handed to the near one first, with what is for its partner; then one message.
    let hierarchical = seconds_on_two_nodes(Algorithm::Hierarchical, 10, &[]);
    assert!((hierarchical - 4.0 * (40.0 + 0.5 + 400.0)).abs() < 1e-3, "{hierarchical}");
    // All experts: each to one rank of the other node, and two of them to the neighbour, there and back.
    let weights = seconds_on_two_nodes(Algorithm::Linear, 10, &[0, 1, 2, 3]);
    assert!((weights - 2.0 * (0.5 + 1000.0 + 200.0)).abs() < 1e-3, "{weights}");
}

#[test]
fn many_tokens_for_small_experts_let_the_weights_move_between_nodes() {
    let (nodes, placement) = (Nodes::new(&[0, 0, 1, 1]), Placement::sharded(8, 4));
    // One expert of each rank is wanted by nearly all.
    let rows = |hot: u32| vec![(0..8).map(|expert| if expert % 2 == 0 { hot } else { 1 }).collect::<Vec<u32>>(); 4];
    let chosen = |hot: u32, placement: &Placement| {
        let (rows, tokens) = (rows(hot), [4 * hot + 4; 4]);
        let load = LayerLoad { nodes: &nodes, placement, tokens: &tokens, rows: &rows };
        experts_to_fetch(&load, &costs(Algorithm::TwoHop, 2.0, 100.0, 0.0))
    };
    assert_eq!(chosen(2, &placement), [] as [usize; 0]);
    assert_eq!(chosen(1000, &placement), [0, 2, 4, 6], "the tokens of the others travel");
    assert_eq!(chosen(1000, &Placement::everywhere(8, 4)), [] as [usize; 0], "nothing moves at all");
}
