//! The decisions of MoE layers as numbers, for the root's hooks.

use moeworks_moe::{LayerStats, MoeConfig, MoeSaved, Routing};
use moeworks_ops::Context;

/// Appends the decisions of a layer.
pub(super) fn write(numbers: &mut Vec<f64>, layer: usize, saved: &MoeSaved) {
    let routing = saved.routing();
    numbers.extend([layer, routing.num_experts(), routing.num_tokens(), routing.top_k()].map(|number| number as f64));
    numbers.extend(routing.expert_ids().iter().map(|&id| f64::from(id)));
    numbers.extend(routing.expert_weights().iter().map(|&weight| f64::from(weight)));
    numbers.extend(saved.stats().to_numbers());
}

/// Reads the decisions of layers of `config`; none if they are not ones.
pub(super) fn read(ctx: &Context, config: &MoeConfig, numbers: Vec<f64>) -> Option<Vec<(usize, MoeSaved)>> {
    let mut layers = Vec::new();
    let mut rest = numbers.into_iter().peekable();
    while rest.peek().is_some() {
        let mut number = || rest.next().map(|number| number as usize);
        let [layer, num_experts, num_tokens, top_k] = [number()?, number()?, number()?, number()?];
        let num_choices = num_tokens.checked_mul(top_k).filter(|&count| count <= rest.len())?;
        let ids: Vec<u32> = rest.by_ref().take(num_choices).map(|id| id as u32).collect();
        let weights: Vec<f32> = rest.by_ref().take(num_choices).map(|weight| weight as f32).collect();
        let routing = Routing::new(ctx, num_experts, top_k, &ids, &weights).ok()?;
        let stats = LayerStats::from_numbers(&mut rest);
        layers.push((layer, MoeSaved::reported(ctx, config, routing, stats)));
    }
    Some(layers)
}
