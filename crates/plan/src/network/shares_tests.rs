use proptest::prelude::*;

use super::*;

fn phase(alone_s: f64, uses: &[(u32, f64)]) -> Phase {
    Phase { fixed_s: 0.0, alone_s, uses: uses.to_vec() }
}

#[test]
fn two_that_need_one_link_whole_get_half_each() {
    let mut shares = Shares::new(2);
    let first = shares.start(&phase(1.0, &[(0, 1.0)]), 0.0);
    assert_eq!(shares.end_of(first), 1.0);
    let second = shares.start(&phase(1.0, &[(0, 1.0)]), 0.5);
    assert_eq!((shares.end_of(first), shares.end_of(second)), (1.5, 2.5));
    shares.end(first, 1.5);
    assert_eq!(shares.changed(), [second]);
    assert_eq!(shares.end_of(second), 2.0);
}

#[test]
fn what_one_cannot_use_goes_to_the_others() {
    let mut shares = Shares::new(2);
    // The first is slowed by the second on link 1 and leaves more than half of link 0 to the third.
    let first = shares.start(&phase(1.0, &[(0, 0.5), (1, 1.0)]), 0.0);
    let second = shares.start(&phase(1.0, &[(1, 1.0)]), 0.0);
    let third = shares.start(&phase(1.0, &[(0, 1.0)]), 0.0);
    let ends = [first, second, third].map(|flow| shares.end_of(flow));
    assert_eq!(ends, [2.0, 2.0, 1.0 / 0.75]);
}

#[test]
fn those_on_other_links_are_not_looked_at() {
    let mut shares = Shares::new(2);
    let first = shares.start(&phase(1.0, &[(0, 1.0)]), 0.0);
    shares.start(&phase(1.0, &[(1, 1.0)]), 0.25);
    assert!(!shares.changed().contains(&first));
    assert_eq!(shares.end_of(first), 1.0);
}

proptest! {
    /// No link carries more than its bandwidth, and each flow is slowed by a link that is full.
    #[test]
    fn shares_are_max_min_fair(flows in prop::collection::vec((0.1..9.0, prop::collection::btree_map(0..6_u32, 0.01..1.0, 1..5)), 1..12)) {
        let mut shares = Shares::new(6);
        for (alone_s, uses) in &flows {
            let most = uses.values().copied().fold(0.0, f64::max);
            let uses: Vec<(u32, f64)> = uses.iter().map(|(&link, &full)| (link, full / most)).collect();
            shares.start(&phase(*alone_s, &uses), 0.0);
        }
        let used = |link: u32| -> f64 {
            let on = shares.flows.iter().flat_map(|flow| flow.uses.iter().map(move |of| (flow.share, of)));
            on.filter(|(_, of)| of.0 == link).map(|(share, of)| share * of.1).sum()
        };
        for link in 0..6 {
            prop_assert!(used(link) <= 1.0 + 1e-9, "link {} carries {}", link, used(link));
        }
        for flow in &shares.flows {
            prop_assert!(flow.share > 0.0 && flow.share <= 1.0);
            let is_fastest_on = |link: u32| shares.links[link as usize].flows.iter()
                .all(|&other| shares.flows[other as usize].share <= flow.share * (1.0 + 1e-9));
            let is_held_back = flow.uses.iter().any(|&(link, _)| used(link) >= 1.0 - 1e-9 && is_fastest_on(link));
            prop_assert!(is_held_back, "share {}", flow.share);
        }
    }
}
