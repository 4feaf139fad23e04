use super::PassAction::{Backward, Begin, End, Forward, Losses};
use super::*;

#[test]
fn a_microbatch_goes_through_all_layers_before_the_next_one_begins() {
    let actions = PassOrder::MicrobatchByMicrobatch.actions(2, 2, false);
    let of = |microbatch| {
        let forward = (0..2).map(move |layer| Forward { microbatch, layer });
        let backward = (0..2).rev().map(move |layer| Backward { microbatch, layer });
        let begin = [Begin { microbatch }].into_iter().chain(forward).chain([Losses { microbatch }]);
        begin.chain(backward).chain([End { microbatch }])
    };
    assert_eq!(actions, of(0).chain(of(1)).collect::<Vec<_>>());
}

#[test]
fn a_layer_takes_all_microbatches_before_the_next_one_begins() {
    let actions = PassOrder::LayerByLayer.actions(2, 2, false);
    let each = |action: fn(usize) -> PassAction| (0..2).map(action);
    let expected = each(|microbatch| Begin { microbatch })
        .chain(each(|microbatch| Forward { microbatch, layer: 0 }))
        .chain(each(|microbatch| Forward { microbatch, layer: 1 }))
        .chain(each(|microbatch| Losses { microbatch }))
        .chain(each(|microbatch| Backward { microbatch, layer: 1 }))
        .chain(each(|microbatch| Backward { microbatch, layer: 0 }))
        .chain(each(|microbatch| End { microbatch }));
    assert_eq!(actions, expected.collect::<Vec<_>>());
}

#[test]
fn orders_have_the_same_actions_and_end_with_a_shared_embedding() {
    for order in [PassOrder::MicrobatchByMicrobatch, PassOrder::LayerByLayer] {
        let actions = order.actions(3, 4, true);
        assert_eq!(actions.len(), 4 * (3 + 2 * 3));
        assert_eq!(actions[actions.len() - 4..], [0, 1, 2, 3].map(|microbatch| End { microbatch }));
        let plain = order.actions(3, 4, false);
        assert!(plain.iter().all(|action| actions.contains(action)) && plain.len() == actions.len());
    }
}
