//! Relative position bias: a learned number per head and bucket of distances, added to attention scores (T5,
//! 1910.10683).
//!
//! Small distances have a bucket each; larger ones share buckets that grow with the logarithm of the distance. The
//! formula is that of `_relative_position_bucket` in transformers 5.23, in f32 throughout, so that the limits of
//! buckets agree.

use moeworks_ops::attention::ScoreRule;
use moeworks_ops::linear::Write;
use moeworks_tensor::Tensor;

use crate::config::{ModelConfig, PositionKind};

/// The relative position bias of all layers in one pass.
pub(crate) struct Relative {
    /// `[H, seq_len + kv_len - 1]`, in the layout of [`ScoreRule`].
    bias: Vec<f32>,
    /// The bucket of each distance.
    ranges: Vec<usize>,
    is_causal: bool,
}

/// The division of distances into buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buckets {
    pub(crate) count: usize,
    pub(crate) max_distance: usize,
    /// True if a query sees only keys up to its own position.
    pub(crate) is_causal: bool,
}

impl Buckets {
    /// Returns the bucket of a key `distance` positions after the query; negative if it is before.
    pub(crate) fn bucket(&self, distance: isize) -> usize {
        let (count, first) = match self.is_causal {
            true => (self.count, 0),
            false => (self.count / 2, if distance > 0 { self.count / 2 } else { 0 }),
        };
        let distance = if self.is_causal { distance.min(0) } else { distance }.unsigned_abs();
        let exact = count / 2;
        if distance < exact {
            return first + distance;
        }
        let growth = (self.max_distance as f64 / exact as f64).ln() as f32;
        let range = (distance as f32 / exact as f32).ln() / growth * (count - exact) as f32;
        first + (exact + range as usize).min(count - 1)
    }
}

impl Relative {
    /// Computes the bias of a pass over layers of `config` as [`new`](Self::new) does; none unless positions are
    /// relative.
    pub(crate) fn of(
        config: &ModelConfig,
        weights: Option<&Tensor>,
        is_causal: bool,
        lens: [usize; 2],
    ) -> Option<Self> {
        let PositionKind::Relative { num_buckets: count, max_distance } = config.variant.positions else { return None };
        weights.map(|weights| Self::new(weights, Buckets { count, max_distance, is_causal }, lens))
    }

    /// Computes the bias from `weights [buckets, H]` for `seq_len` queries, the last of which is at the last of
    /// `kv_len` keys.
    pub(crate) fn new(weights: &Tensor, buckets: Buckets, [seq_len, kv_len]: [usize; 2]) -> Self {
        let (values, num_heads) = (weights.f32s(), weights.cols());
        let distances = 1 - kv_len as isize..seq_len as isize;
        let ranges: Vec<usize> = distances.map(|distance| buckets.bucket(distance)).collect();
        let of_head = |head: usize| ranges.iter().map(move |range| values[range * num_heads + head]);
        let bias = (0..num_heads).flat_map(of_head).collect();
        Self { bias, ranges, is_causal: buckets.is_causal }
    }

    /// Computes the gradient of the weights from that of the bias, `[H, seq_len + kv_len - 1]`.
    pub(crate) fn backward(&self, d_bias: &[f32], write: Write, grads: &mut Tensor) {
        let num_heads = grads.cols();
        let grads = grads.f32s_mut();
        if write == Write::Replace {
            grads.fill(0.0);
        }
        for (head, d_bias) in d_bias.chunks_exact(self.ranges.len()).enumerate() {
            self.ranges.iter().zip(d_bias).for_each(|(range, d)| grads[range * num_heads + head] += d);
        }
    }

    pub(crate) fn rule(&self) -> ScoreRule<'_> {
        ScoreRule { bias: Some(&self.bias), is_causal: self.is_causal }
    }
}

#[cfg(test)]
#[path = "relative_tests.rs"]
mod tests;
