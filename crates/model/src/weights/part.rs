//! The part of a model's weights that a rank loads.

use std::ops::Range;
use std::sync::Arc;

use moeworks_moe::select_experts;
use moeworks_ops::Context;
use moeworks_plan::Placements;
use moeworks_tensor::{Bytes, Tensor};

use super::role::WeightPlace;
use super::spec::{Shard, WeightSpec};
use crate::stage::StagePart;

/// The part of a model in use that a rank loads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ModelPart {
    /// All weights.
    #[default]
    Whole,
    /// The experts of rank 0 and all other weights.
    Root(Placements),
    /// Only the experts of a rank. All other tensors are empty.
    Experts {
        /// The placement of the experts.
        placements: Placements,
        /// The rank.
        rank: usize,
    },
    /// The weights of `rest` in a stage. All other tensors are empty.
    Stage {
        /// The stage.
        stage: StagePart,
        /// The part of the stage's weights.
        rest: Box<ModelPart>,
    },
}

/// The part of a tensor that is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TensorPart {
    Whole,
    /// These experts, ascending; there are more.
    Experts(Vec<usize>),
    Nothing,
}

impl ModelPart {
    /// Returns the part of the tensor of `spec`. `num_encoder_layers` layers of an encoder are numbered before those
    /// of the decoder.
    pub(crate) fn of_tensor(&self, spec: &WeightSpec, num_encoder_layers: usize) -> TensorPart {
        let (placements, rank) = match self {
            Self::Whole => return TensorPart::Whole,
            Self::Stage { stage, rest } => {
                // An output projection that is the embedding is on the same rank.
                let is_held = stage.holds(spec, false);
                return if is_held { rest.of_tensor(spec, num_encoder_layers) } else { TensorPart::Nothing };
            }
            Self::Root(placements) => (placements, 0),
            Self::Experts { placements, rank } => (placements, *rank),
        };
        let number = match spec.place {
            WeightPlace::Layer(layer) => Some(num_encoder_layers + layer),
            WeightPlace::EncoderLayer(layer) => Some(layer),
            _ => None,
        };
        let placement = number.filter(|_| spec.shard == Shard::Experts).and_then(|number| placements.layer(number));
        match placement.map(|placement| placement.experts_of(rank)) {
            Some(held) if held.len() == spec.shape[0] => TensorPart::Whole,
            Some(held) => TensorPart::Experts(held),
            None if self.has_all_else() => TensorPart::Whole,
            None => TensorPart::Nothing,
        }
    }

    /// Returns whether the weights that are not of experts are loaded.
    pub(crate) fn has_all_else(&self) -> bool {
        match self {
            Self::Whole | Self::Root(_) => true,
            Self::Experts { .. } => false,
            Self::Stage { rest, .. } => rest.has_all_else(),
        }
    }
}

/// Returns the shape of the given experts of a stack of this shape.
pub(crate) fn part_shape(shape: &[usize], experts: &[usize]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let Some(count) = shape.first_mut() {
        *count = experts.len();
    }
    shape
}

/// Returns ascending numbers as a range, if they are consecutive.
pub(crate) fn as_range(numbers: &[usize]) -> Option<Range<usize>> {
    let (&first, &last) = (numbers.first()?, numbers.last()?);
    (last - first + 1 == numbers.len()).then_some(first..last + 1)
}

/// A tensor as the owner of the memory of its parts.
struct Whole(Tensor);

impl AsRef<[u8]> for Whole {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

/// Returns the given experts, ascending and at least one, of a stack. Those in the memory of a file stay there;
/// others are copied.
pub(crate) fn select(ctx: &Context, stack: &Tensor, experts: &[usize]) -> Tensor {
    let shape = part_shape(stack.shape(), experts);
    if let Some((base, is_interleaved)) = stack.as_transposed()
        && let Some(part) = Tensor::transposed(ctx.pool(), select(ctx, base, experts), is_interleaved)
    {
        return part;
    }
    if let Some(pieces) = stack.pieces().filter(|pieces| pieces.len().is_multiple_of(stack.shape()[0]))
        && let Some(part) = Tensor::of_pieces(ctx.pool(), chosen(pieces, stack.shape()[0], experts), &shape)
    {
        return part;
    }
    // Only memory of a file has a span.
    let in_file = stack.has_span(stack).then(|| in_file(ctx, stack, experts, &shape)).flatten();
    in_file.unwrap_or_else(|| select_experts(ctx, stack, experts))
}

/// Returns the entries of the given experts out of a list with equally many for each of `num_experts`.
pub(crate) fn chosen<T: Clone>(list: &[T], num_experts: usize, experts: &[usize]) -> Vec<T> {
    let each = list.len() / num_experts.max(1);
    experts.iter().flat_map(|expert| list[expert * each..(expert + 1) * each].iter().cloned()).collect()
}

/// Borrows experts of a stack of matrices in a file: as one tensor if they are consecutive.
fn in_file(ctx: &Context, stack: &Tensor, experts: &[usize], shape: &[usize]) -> Option<Tensor> {
    let owner: Bytes = Arc::new(Whole(stack.clone()));
    let len = stack.num_bytes() / stack.shape()[0].max(1);
    let part = |experts: Range<usize>, shape: &[usize]| {
        Tensor::from_foreign(owner.clone(), experts.start * len..experts.end * len, shape, stack.dtype())
    };
    if let Some(range) = as_range(experts) {
        return part(range, shape);
    }
    let pieces: Option<Vec<Tensor>> = experts.iter().map(|&expert| part(expert..expert + 1, &shape[1..])).collect();
    Tensor::of_pieces(ctx.pool(), pieces?, shape)
}

#[cfg(test)]
#[path = "part_tests.rs"]
mod tests;
