//! Checks of layers whose experts are placed differently.

use super::*;

/// Returns a case of `model` on dp x ep x tp ranks in which each layer has another placement: consecutive experts,
/// round robin, and round robin backwards.
pub(super) fn placed(layout: (usize, usize, usize), model: ModelConfig) -> Case {
    let case = sliced(layout, model);
    let num_ranks = case.layout.num_expert_ranks();
    let place = |layer: usize, expert: usize| match layer % 3 {
        0 => expert * num_ranks / case.model.num_experts,
        1 => expert % num_ranks,
        _ => (num_ranks - 1) - expert % num_ranks,
    };
    let placement = |layer: usize| {
        let experts: String =
            (0..case.model.num_experts).map(|expert| format!("{expert}: {}\n", place(layer, expert))).collect();
        let text = format!("placement experts={} ranks={num_ranks}\n{experts}", case.model.num_experts);
        (layer, text.parse().expect("a placement"))
    };
    let layers = (0..case.model.num_layers).filter(|layer| case.model.is_moe_layer(*layer));
    let placements = Placements::per_layer(layers.map(placement));
    Case { placements, ..case }
}

/// Replicates expert 4 of the second layer and experts 0 and 3 of the last one on all ranks.
fn replicated(case: Case) -> Case {
    let mut layers: Vec<_> = case
        .placements
        .layers()
        .into_iter()
        .map(|layer| (layer, case.placements.layer(layer).unwrap().clone()))
        .collect();
    let all: Vec<usize> = (0..case.layout.num_expert_ranks()).collect();
    layers[1].1.replicate(4, &all);
    let last = layers.len() - 1;
    [0, 3].into_iter().for_each(|expert| layers[last].1.replicate(expert, &all));
    Case { placements: Placements::per_layer(layers), ..case }
}

#[test]
fn layers_placed_differently_give_the_step_of_one_rank() {
    for layout in [(1, 2, 1), (1, 3, 1), (2, 2, 1), (1, 2, 2)] {
        check(&placed(layout, model()));
        check(&replicated(placed(layout, model())));
    }
    // A model with dense layers in between.
    let model = ModelConfig { num_layers: 5, moe_every: 2, dense_width: 21, ..model() };
    check(&replicated(placed((1, 3, 1), model)));
}

#[test]
fn zero_shares_out_what_each_layers_placement_leaves() {
    for zero in 1..=3 {
        check(&Case { zero, ..placed((2, 2, 1), model()) });
        check(&Case { zero, checkpoint_layers: true, ..placed((2, 3, 1), model()) });
    }
}

#[test]
fn experts_come_to_their_tokens_by_each_layers_placement() {
    for layout in [(1, 2, 1), (1, 3, 1)] {
        check(&Case { moving: Moving::Weights, ..placed(layout, model()) });
        check(&Case { moving: Moving::Weights, checkpoint_layers: true, ..replicated(placed(layout, model())) });
    }
}
