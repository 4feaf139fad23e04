//! The parts of a model's weights that the ranks of a layout hold, from the table of weights alone.

use std::ops::Range;

use moeworks_moe::ConfigError;
use moeworks_plan::{Layout, Placements};

use crate::config::ModelConfig;
use crate::split::{Cut, TensorSplit};
use crate::weights::{Shard, WeightSpec, WeightTable};

/// The parts of each weight that the ranks of a layout hold. ZeRO shards these parts further.
#[derive(Clone, Debug)]
pub struct Sharding {
    layout: Layout,
    placements: Placements,
    /// The split of each rank of a tensor-parallel group.
    splits: Vec<TensorSplit>,
}

/// A part of a tensor, with the ranks that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldPart {
    /// The ranks of the layout, in ascending order.
    pub ranks: Vec<usize>,
    /// The part; none: the whole tensor.
    pub cut: Option<Cut>,
}

impl Sharding {
    /// Computes the parts of the weights of `table`, of a model of `config`, on the ranks of `layout`. `placements`
    /// assign the experts of each layer to the ranks of a group. Fails if there are more tensor-parallel ranks than
    /// heads, hidden units or ids to shard.
    pub fn new(
        config: &ModelConfig,
        table: &WeightTable,
        layout: Layout,
        placements: impl Into<Placements>,
    ) -> Result<Self, ConfigError> {
        let split = |rank| TensorSplit::new(config, table, rank, layout.tp);
        let splits = (0..layout.tp).map(split).collect::<Result<_, _>>()?;
        Ok(Self { layout, placements: placements.into(), splits })
    }

    /// Returns the part of the tensor of `spec` that `rank` holds; none: the whole tensor.
    #[must_use]
    pub fn cut(&self, spec: &WeightSpec, rank: usize) -> Option<Cut> {
        let (_, ep, tp) = self.layout.place(rank);
        match spec.shard {
            Shard::Experts => {
                let placement = spec.place.layer().and_then(|layer| self.placements.layer(layer))?;
                let held = placement.experts_of(ep * self.layout.tp + tp);
                let cut = Cut { dim: 0, pieces: runs(&held) };
                Some(cut).filter(|_| held.len() < spec.shape[0])
            }
            // A single rank holds the whole tensor.
            _ => self.splits[tp].share(spec).cut.filter(|_| self.layout.tp > 1),
        }
    }

    /// Returns the shape of the part of the tensor of `spec` that `rank` holds.
    #[must_use]
    pub fn part_shape(&self, spec: &WeightSpec, rank: usize) -> Vec<usize> {
        self.cut(spec, rank).map_or_else(|| spec.shape.clone(), |cut| cut.shape(&spec.shape))
    }

    /// Returns the number of elements of the part that `rank` holds.
    #[must_use]
    pub fn num_elements(&self, spec: &WeightSpec, rank: usize) -> usize {
        self.part_shape(spec, rank).iter().product()
    }

    /// Lists the distinct parts of the tensor of `spec`, each with the ranks that hold it.
    #[must_use]
    pub fn parts(&self, spec: &WeightSpec) -> Vec<HeldPart> {
        let mut parts: Vec<HeldPart> = Vec::new();
        for rank in 0..self.layout.num_ranks() {
            let cut = self.cut(spec, rank);
            match parts.iter_mut().find(|part| part.cut == cut) {
                Some(part) => part.ranks.push(rank),
                None => parts.push(HeldPart { ranks: vec![rank], cut }),
            }
        }
        parts
    }

    /// Returns the layout.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}

/// Groups ascending numbers into runs of consecutive ones.
fn runs(numbers: &[usize]) -> Vec<Range<usize>> {
    let neighbours = numbers.chunk_by(|a, b| a + 1 == *b);
    neighbours.map(|run| run[0]..run[run.len() - 1] + 1).collect()
}

#[cfg(test)]
mod tests {
    use moeworks_plan::Placement;

    use super::*;
    use crate::config::QkNorm;

    fn model() -> ModelConfig {
        ModelConfig {
            vocab_size: 23,
            width: 8,
            num_layers: 2,
            num_heads: 6,
            num_kv_heads: 3,
            head_dim: 4,
            moe_every: 2,
            num_experts: 5,
            expert_width: 6,
            dense_width: 11,
            qk_norm: QkNorm::Whole,
            ..ModelConfig::default()
        }
    }

    /// Counts how often each element of the tensor is held by the ranks of `parts`, one rank of each.
    fn coverage(spec: &WeightSpec, parts: &[HeldPart]) -> Vec<u32> {
        let mut counts = vec![0; spec.num_elements()];
        for part in parts {
            match &part.cut {
                None => counts.iter_mut().for_each(|count| *count += 1),
                Some(cut) => cut.each(&spec.shape, 1, |run, _| counts[run].iter_mut().for_each(|count| *count += 1)),
            }
        }
        counts
    }

    #[test]
    fn parts_cover_each_tensor_once_and_every_rank_holds_one() {
        let (config, table) = (model(), WeightTable::new(&model()));
        for (dp, ep, tp) in [(1, 1, 1), (2, 1, 1), (1, 5, 1), (1, 2, 1), (1, 1, 2), (1, 1, 5), (2, 2, 3), (1, 3, 4)] {
            let layout = Layout::new(dp, ep, tp);
            let placement = Placement::sharded(config.num_experts, layout.num_expert_ranks());
            let sharding = Sharding::new(&config, &table, layout, placement).unwrap();
            for spec in table.specs() {
                let parts = sharding.parts(spec);
                assert!(coverage(spec, &parts).iter().all(|&count| count == 1), "{layout:?} {}: {parts:?}", spec.name);
                let mut ranks: Vec<usize> = parts.iter().flat_map(|part| part.ranks.iter().copied()).collect();
                ranks.sort_unstable();
                assert!(ranks.into_iter().eq(0..layout.num_ranks()), "{layout:?} {}", spec.name);
                assert!(spec.shard.dim().is_some() || parts.len() == 1, "{}", spec.name);
            }
        }
    }

    #[test]
    fn a_replicated_attention_is_whole_on_every_rank() {
        let (config, mut table) = (model(), WeightTable::new(&model()));
        table.set_sharding(&["*.self_attn.*=replicated".to_owned()]).unwrap();
        let sharding = Sharding::new(&config, &table, Layout::new(1, 1, 2), Placement::sharded(5, 2)).unwrap();
        for spec in table.specs().iter().filter(|spec| spec.name.contains("self_attn")) {
            assert_eq!(sharding.parts(spec), [HeldPart { ranks: vec![0, 1], cut: None }], "{}", spec.name);
        }
    }
}
