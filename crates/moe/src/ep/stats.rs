//! Merges the statistics of all ranks' tokens.

use moeworks_comm::{CommError, Communicator};

use crate::{LayerStats, ModalityStats, ZeroComputationShare};

/// Merges `layers` over the ranks of `world`, in the order of ranks.
pub(super) fn merge(world: &dyn Communicator, layers: &mut [LayerStats]) -> Result<(), CommError> {
    let own: Vec<f64> = layers.iter().flat_map(to_numbers).collect();
    let mut lens = vec![0_u64; world.size()];
    world.all_gather(&[own.len() as u64], &mut lens)?;
    let lens: Vec<usize> = lens.into_iter().map(|len| len as usize).collect();
    let mut all = vec![0.0; lens.iter().sum()];
    world.all_gather_v(&own, &mut all, &lens)?;
    for layer in &mut *layers {
        *layer = LayerStats { zero_computation: layer.zero_computation, ..LayerStats::empty(layer.num_experts()) };
    }
    let mut numbers = all.into_iter();
    for _ in 0..world.size() {
        for layer in &mut *layers {
            let other = from_numbers(layer.num_experts(), layer.zero_computation, &mut numbers);
            layer.merge(&other);
        }
    }
    Ok(())
}

impl LayerStats {
    /// Returns the statistics as numbers, to be sent to a rank that does not have the layer.
    #[must_use]
    pub fn to_numbers(&self) -> Vec<f64> {
        let ZeroComputationShare { num_zero_computation, ratio, num_null } = self.zero_computation;
        let mut numbers = vec![self.num_experts() as f64, num_zero_computation as f64, ratio, num_null as f64];
        numbers.extend(to_numbers(self));
        numbers
    }

    /// Returns the statistics that [`to_numbers`](Self::to_numbers) made the next of `numbers` of.
    pub fn from_numbers(numbers: &mut impl Iterator<Item = f64>) -> Self {
        let mut number = || numbers.next().unwrap_or(0.0);
        let num_experts = number() as usize;
        let (num_zero_computation, ratio, num_null) = (number() as usize, number(), number() as usize);
        from_numbers(num_experts, ZeroComputationShare { num_zero_computation, ratio, num_null }, numbers)
    }
}

/// Flattens a layer's statistics to numbers, without the number of experts and values that are equal on all ranks.
fn to_numbers(layer: &LayerStats) -> Vec<f64> {
    let counts = |counts: &[u32]| counts.iter().map(|&n| f64::from(n)).collect::<Vec<f64>>();
    let floats = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let mut numbers = vec![
        layer.num_tokens as f64,
        layer.num_choices as f64,
        layer.num_dropped as f64,
        layer.num_rerouted as f64,
        layer.mean_entropy,
        layer.z,
        layer.mean_squared_logit,
        layer.sequence_loss,
        layer.gshard_loss,
        layer.smooth_load.len() as f64,
        layer.modalities.len() as f64,
        layer.tokens_per_group.len() as f64,
    ];
    numbers.extend(counts(&layer.tokens_per_expert));
    numbers.extend(counts(&layer.kept_per_expert));
    numbers.extend(counts(&layer.tokens_per_group));
    numbers.extend(floats(&layer.mean_prob));
    numbers.extend(&layer.importance);
    numbers.extend(&layer.smooth_load);
    for modality in &layer.modalities {
        numbers.extend([modality.num_tokens as f64, modality.mean_entropy]);
        numbers.extend(floats(&modality.mean_prob));
    }
    numbers
}

/// Rebuilds statistics from the numbers of [`to_numbers`].
fn from_numbers(
    e: usize,
    zero_computation: ZeroComputationShare,
    numbers: &mut impl Iterator<Item = f64>,
) -> LayerStats {
    let mut number = || numbers.next().unwrap_or(0.0);
    let mut stats = LayerStats { zero_computation, ..LayerStats::empty(e) };
    stats.num_tokens = number() as usize;
    stats.num_choices = number() as usize;
    stats.num_dropped = number() as usize;
    stats.num_rerouted = number() as usize;
    stats.mean_entropy = number();
    stats.z = number();
    stats.mean_squared_logit = number();
    stats.sequence_loss = number();
    stats.gshard_loss = number();
    let (num_smooth, num_modalities) = (number() as usize, number() as usize);
    stats.tokens_per_group = vec![0; number() as usize];
    for counts in [&mut stats.tokens_per_expert, &mut stats.kept_per_expert, &mut stats.tokens_per_group] {
        counts.iter_mut().for_each(|n| *n = number() as u32);
    }
    stats.mean_prob.iter_mut().for_each(|p| *p = number() as f32);
    stats.importance.iter_mut().for_each(|x| *x = number());
    stats.smooth_load = (0..num_smooth).map(|_| number()).collect();
    let mut modality = || {
        let (num_tokens, mean_entropy) = (number() as usize, number());
        ModalityStats { num_tokens, mean_entropy, mean_prob: (0..e).map(|_| number() as f32).collect() }
    };
    stats.modalities = (0..num_modalities).map(|_| modality()).collect();
    stats
}
