//! Groups of ranks.

use moeworks_plan::{Group, Layout, LayoutError, RankOrder, Topology};
use proptest::prelude::*;

#[test]
fn groups_together_and_apart() {
    let together = Layout::new(2, 4, 1);
    assert_eq!(together.ep_group(5), [4, 5, 6, 7]);
    assert_eq!(together.dp_group(5), [1, 5]);
    let apart = Layout { order: RankOrder::DpInner, ..together };
    assert_eq!(apart.ep_group(5), [1, 3, 5, 7]);
    assert_eq!(apart.dp_group(5), [4, 5]);
    assert_eq!(apart.dense_group(5), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(apart.to_string(), "dp 2 ep 4 tp 1 dp_inner");
}

#[test]
fn sizes_that_do_not_give_the_ranks_are_refused() {
    assert_eq!(Layout::new(2, 4, 1).check(8), Ok(()));
    assert_eq!(Layout::new(2, 0, 1).check(8), Err(LayoutError::Zero("ep")));
    let error = Layout::new(2, 4, 2).check(8).unwrap_err();
    assert_eq!(error.to_string(), "dp 2 x ep 4 x tp 2 = 16 ranks, but there are 8");
    assert!(Layout::new(usize::MAX, 4, 2).check(8).is_err());
}

#[test]
fn stage_groups_of_a_pipeline_are_outermost_and_each_has_all_other_groups() {
    let layout = Layout::new(2, 2, 1).with_pipeline(3);
    assert_eq!((layout.num_ranks(), layout.stage_group_size()), (12, 4));
    assert_eq!((layout.stage_group(9), layout.place(9)), (2, (0, 1, 0)));
    assert_eq!(layout.ep_group(9), [8, 9]);
    assert_eq!(layout.dp_group(9), [9, 11]);
    assert_eq!(layout.dense_group(9), [8, 9, 10, 11]);
    assert_eq!(layout.pp_group(9), [1, 5, 9]);
    assert_eq!(layout.to_string(), "dp 2 ep 2 tp 1 pp 3");
    let error = layout.check(8).unwrap_err();
    assert_eq!(error.to_string(), "dp 2 x ep 2 x tp 1 x pp 3 = 12 ranks, but there are 8");
    assert_eq!(Layout::new(1, 1, 1).with_pipeline(0).check(1), Err(LayoutError::Zero("pp")));
}

#[test]
fn a_group_knows_how_many_of_it_share_a_node() {
    let topology = Topology::example_cluster(2);
    let group = |ranks: &[usize]| Group::of(&topology, ranks);
    assert_eq!(group(&[0, 1, 2, 3]), Group { ranks: 4, per_node: 4 });
    assert_eq!(group(&[0, 8]), Group { ranks: 2, per_node: 1 });
    assert_eq!(group(&[0, 8]).nodes(), 2);
    assert_eq!(group(&[0, 1, 8, 9]).nodes(), 2);
}

proptest! {
    /// The groups of a kind cut the ranks into parts, and each rank is in its own at its place.
    #[test]
    fn groups_are_a_partition(dp in 1..5_usize, ep in 1..5_usize, tp in 1..4_usize, is_apart: bool) {
        let order = if is_apart { RankOrder::DpInner } else { RankOrder::EpInner };
        let layout = Layout { order, ..Layout::new(dp, ep, tp) };
        for rank in 0..layout.num_ranks() {
            let (at_dp, at_ep, at_tp) = layout.place(rank);
            prop_assert_eq!(layout.dp_group(rank)[at_dp], rank);
            prop_assert_eq!(layout.ep_group(rank)[at_ep * tp + at_tp], rank);
            prop_assert_eq!(layout.tp_group(rank)[at_tp], rank);
            for &other in &layout.ep_group(rank) {
                prop_assert_eq!(layout.ep_group(other), layout.ep_group(rank));
            }
            prop_assert_eq!(layout.dense_group(rank).len(), dp * ep);
        }
    }
}
