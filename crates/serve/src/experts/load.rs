//! Tokens by layer and expert.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use moeworks_moe::{cv, max_over_mean};
use moeworks_plan::Placement;

use super::RankLoad;

/// Tokens that each expert of each MoE layer computed since the engine began. The engine counts; others read at any
/// time.
#[derive(Debug)]
pub struct ExpertLoad {
    layers: Vec<LayerCounts>,
    /// The ranks of experts; none on one rank.
    ranks: Mutex<Option<RankLoad>>,
}

#[derive(Debug)]
struct LayerCounts {
    /// The number of the layer in the model.
    layer: usize,
    num_tokens: AtomicU64,
    experts: Vec<AtomicU64>,
}

/// The load of one layer at some time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerLoad {
    /// The number of the layer in the model, from 0.
    pub layer: usize,
    /// Tokens that came to the layer.
    pub num_tokens: u64,
    /// Tokens that each expert had; a token has several experts.
    pub tokens_per_expert: Vec<u64>,
}

impl ExpertLoad {
    pub(crate) fn new(layers: &[usize], num_experts: usize) -> Self {
        let zeros = || (0..num_experts).map(|_| AtomicU64::new(0)).collect();
        let layer = |&layer| LayerCounts { layer, num_tokens: AtomicU64::new(0), experts: zeros() };
        Self { layers: layers.iter().map(layer).collect(), ranks: Mutex::default() }
    }

    /// MoE layers.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The place of the model's layer `layer` among the MoE layers.
    pub(crate) fn place(&self, layer: usize) -> Option<usize> {
        self.layers.binary_search_by_key(&layer, |counts| counts.layer).ok()
    }

    /// Counts the choices of tokens; ids that no expert has are passed over.
    pub(crate) fn add(&self, place: usize, num_tokens: usize, expert_ids: &[u32]) {
        let LayerCounts { num_tokens: all, experts, .. } = &self.layers[place];
        // Only the engine writes, so that no count is lost between reading and writing it.
        let add = |count: &AtomicU64, more: u64| count.store(count.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        add(all, num_tokens as u64);
        for expert in expert_ids.iter().filter_map(|&id| experts.get(id as usize)) {
            add(expert, 1);
        }
    }

    /// Begins to show the ranks of experts.
    pub(crate) fn set_ranks(&self, ranks: RankLoad) {
        *self.locked() = Some(ranks);
    }

    /// Notes that experts of a layer have moved to the ranks of `placement`.
    pub(crate) fn moved(&self, layer: usize, placement: &Placement, experts: impl Iterator<Item = usize>) {
        if let Some(ranks) = &mut *self.locked() {
            ranks.moved(layer, placement, experts);
        }
    }

    /// Notes the load by which the last decision was made.
    pub(crate) fn decided(&self, window: Vec<Vec<u64>>) {
        if let Some(ranks) = &mut *self.locked() {
            ranks.window = window;
        }
    }

    /// Returns the ranks of experts; none where all are on one rank.
    #[must_use]
    pub fn ranks(&self) -> Option<RankLoad> {
        self.locked().clone()
    }

    fn locked(&self) -> MutexGuard<'_, Option<RankLoad>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads all counts.
    #[must_use]
    pub fn layers(&self) -> Vec<LayerLoad> {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let layer = |counts: &LayerCounts| LayerLoad {
            layer: counts.layer,
            num_tokens: read(&counts.num_tokens),
            tokens_per_expert: counts.experts.iter().map(read).collect(),
        };
        self.layers.iter().map(layer).collect()
    }
}

impl LayerLoad {
    /// The coefficient of variation over the experts: 0 where all have as many tokens.
    #[must_use]
    pub fn cv(&self) -> f64 {
        cv(&self.tokens_per_expert)
    }

    /// The mean load over the highest one: 1 where all experts have as many tokens, `1 / E` where one has all, 1
    /// before the first token.
    #[must_use]
    pub fn balancedness(&self) -> f64 {
        let most = max_over_mean(&self.tokens_per_expert);
        if most > 0.0 { 1.0 / most } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_counted_by_layer_and_expert_and_none_is_no_expert() {
        let load = ExpertLoad::new(&[1, 3], 4);
        assert_eq!((load.place(3), load.place(2)), (Some(1), None));
        load.add(1, 3, &[0, 1, 0, u32::MAX, 0, 3]);
        let layers = load.layers();
        assert_eq!(layers[1], LayerLoad { layer: 3, num_tokens: 3, tokens_per_expert: vec![3, 1, 0, 1] });
        assert_eq!(layers[1].balancedness(), 1.25 / 3.0);
        assert_eq!((layers[0].balancedness(), layers[0].cv()), (1.0, 0.0));
    }
}
