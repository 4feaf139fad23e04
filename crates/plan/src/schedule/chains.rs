//! The chains of a microbatch in a stage, action by action.
//!
//! Unexpanded, a chain is one action. Expanded, with L MoE layers, the forward is FA FD FE FC for each layer, the
//! backward BC BE BD BA for each layer from the last, and the weights' gradients are WE WA for each layer from the
//! last.

use super::action::{Action, Chain, Kind};

const FORWARD: [Kind; 4] = [Kind::ForwardAttention, Kind::ForwardDispatch, Kind::ForwardExperts, Kind::ForwardCombine];
const BACKWARD: [Kind; 4] =
    [Kind::BackwardCombine, Kind::BackwardExperts, Kind::BackwardDispatch, Kind::BackwardAttention];
const WEIGHT: [Kind; 2] = [Kind::WeightExperts, Kind::WeightAttention];

fn parts(chain: Chain) -> &'static [Kind] {
    match chain {
        Chain::Forward => &FORWARD,
        Chain::Backward => &BACKWARD,
        Chain::Weight => &WEIGHT,
    }
}

/// Returns the number of actions of a chain in a stage of `layers` MoE layers.
pub(super) fn chain_len(chain: Chain, layers: u16) -> u32 {
    (u32::from(layers) * parts(chain).len() as u32).max(1)
}

/// Returns the place of an action in its chain; `None` if a stage of `layers` MoE layers has no such action.
pub(super) fn chain_index(action: Action, layers: u16) -> Option<u32> {
    if !action.kind.is_part() {
        return (layers == 0 && action.layer == 0).then_some(0);
    }
    let chain = action.kind.chain();
    let part = parts(chain).iter().position(|&kind| kind == action.kind)?;
    let behind = layers.checked_sub(1)?.checked_sub(action.layer)?;
    let layer = if chain == Chain::Forward { action.layer } else { behind };
    Some(u32::from(layer) * parts(chain).len() as u32 + part as u32)
}

/// Returns the action at a place of a chain.
pub(super) fn chain_action(chain: Chain, index: u32, of: Action, layers: u16) -> Action {
    let Action { stage, microbatch, .. } = of;
    if layers == 0 {
        let kind = match chain {
            Chain::Forward => Kind::Forward,
            Chain::Backward => Kind::InputGrad,
            Chain::Weight => Kind::WeightGrad,
        };
        return Action::new(kind, stage, microbatch);
    }
    let num_parts = parts(chain).len() as u32;
    let (layer, part) = ((index / num_parts) as u16, index % num_parts);
    let layer = if chain == Chain::Forward { layer } else { layers - 1 - layer };
    Action::part(parts(chain)[part as usize], stage, microbatch, layer)
}

/// Returns how many actions of the backward must be done before the weights' gradient at `index` of its chain.
pub(super) fn backward_before_weight(index: u32, layers: u16) -> u32 {
    match (layers, index % 2) {
        (0, _) => 1,
        (_, 0) => index / 2 * 4 + 2,
        _ => index / 2 * 4 + 4,
    }
}
