//! The whole model put together on the root, and the part of it that a rank keeps.

use moeworks_comm::CommError;
use moeworks_model::{Decoder, DecoderWeights, is_of_experts};
use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use super::Ranks;
use crate::error::TrainError;
use crate::optimizer::Optimizer;

/// The tag of experts on their way to the root.
const TAG: u32 = 1;

impl Ranks {
    /// The part of a whole model (weights or moments) that this rank keeps.
    pub(crate) fn part(&self, ctx: &Context, whole: &DecoderWeights) -> DecoderWeights {
        whole.of_experts(ctx, self.experts.held())
    }

    /// The whole of the parts of all ranks, on the root; `None` elsewhere. All ranks call this.
    pub(crate) fn whole(
        &self,
        ctx: &Context,
        decoder: &Decoder,
        part: &DecoderWeights,
    ) -> Result<Option<DecoderWeights>, TrainError> {
        // The root's group has all experts.
        if self.layout.place(self.world.rank()).0 != 0 {
            return Ok(None);
        }
        let Some(mut whole) = self.is_root().then(|| decoder.zero_weights(ctx)) else {
            for (name, tensor) in part.tensors() {
                if is_of_experts(&name) {
                    self.experts.group().send(tensor.f32s(), 0, TAG)?;
                }
            }
            return Ok(None);
        };
        for ((name, part), (_, to)) in part.tensors().into_iter().zip(whole.tensors_mut()) {
            if is_of_experts(&name) {
                self.collect(part, to)?;
            } else {
                to.f32s_mut().copy_from_slice(part.f32s());
            }
        }
        part.update_states(ctx, &mut whole);
        Ok(Some(whole))
    }

    /// The experts of all ranks of the group into `whole` `[E, ..]`; the root's are `own`.
    fn collect(&self, own: &Tensor, whole: &mut Tensor) -> Result<(), CommError> {
        let placement = self.experts.placement();
        let size = whole.shape()[1..].iter().product::<usize>();
        for rank in 0..placement.num_ranks() {
            let held = placement.experts_of(rank);
            let mut received = vec![0.0; if rank == 0 { 0 } else { held.len() * size }];
            if rank > 0 {
                self.experts.group().receive(&mut received, rank, TAG)?;
            }
            let values = if rank == 0 { own.f32s() } else { &received };
            for (values, expert) in values.chunks(size.max(1)).zip(held) {
                whole.f32s_mut()[expert * size..(expert + 1) * size].copy_from_slice(values);
            }
        }
        Ok(())
    }

    /// The optimizer's state of the whole model, on the root.
    pub(crate) fn whole_optimizer(
        &self,
        ctx: &Context,
        decoder: &Decoder,
        optimizer: &Optimizer,
    ) -> Result<Option<Optimizer>, TrainError> {
        let first = self.whole(ctx, decoder, &optimizer.first)?;
        let second = self.whole(ctx, decoder, &optimizer.second)?;
        Ok(first.zip(second).map(|(first, second)| optimizer.with_moments(first, second)))
    }
}
