//! The whole model put together on the root, and the part of it that a rank keeps.

use moeworks_comm::CommError;
use moeworks_model::{Decoder, DecoderWeights, TensorShare, TensorSplit, is_of_experts};
use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use super::Ranks;
use crate::config::ConfigError;
use crate::error::TrainError;
use crate::optimizer::Optimizer;

/// The tag of tensors on their way to the root.
const TAG: u32 = 1;

impl Ranks {
    /// The part of a whole model (weights or moments) that this rank keeps.
    pub(crate) fn part(&self, ctx: &Context, whole: &DecoderWeights) -> DecoderWeights {
        let part = whole.of_experts(ctx, self.experts.held());
        match self.tensor_ranks() {
            Some(ranks) => ranks.split().part(ctx, &part),
            None => part,
        }
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
                } else {
                    self.give_part(&name, tensor)?;
                }
            }
            return Ok(None);
        };
        for ((name, part), (_, to)) in part.tensors().into_iter().zip(whole.tensors_mut()) {
            if is_of_experts(&name) {
                self.collect(part, to)?;
            } else {
                self.collect_parts(decoder, (&name, part), to)?;
            }
        }
        part.update_states(ctx, &mut whole);
        Ok(Some(whole))
    }

    /// Gives the root this rank's part of a tensor, if it is of those that the root takes one of.
    fn give_part(&self, name: &str, part: &Tensor) -> Result<(), CommError> {
        let Some(ranks) = self.tensor_ranks().filter(|_| self.layout.place(self.world.rank()).1 == 0) else {
            return Ok(());
        };
        let share = ranks.split().of(name);
        if share.cut.is_some() && share.ranks.start == ranks.split().rank() {
            ranks.group().send(part.f32s(), 0, TAG)?;
        }
        Ok(())
    }

    /// A tensor of no expert into `whole`; the root's part is `own`.
    fn collect_parts(
        &self,
        decoder: &Decoder,
        (name, own): (&str, &Tensor),
        whole: &mut Tensor,
    ) -> Result<(), TrainError> {
        let ranks = self.tensor_ranks().map(|ranks| (ranks, ranks.split().of(name)));
        let Some((ranks, TensorShare { cut: Some(cut), .. })) = ranks else {
            whole.f32s_mut().copy_from_slice(own.f32s());
            return Ok(());
        };
        cut.put(own.f32s(), whole);
        let size = ranks.split().size();
        for rank in 1..size {
            let split = TensorSplit::new(decoder.config(), (rank, size)).map_err(ConfigError::from)?;
            let share = split.of(name);
            if let Some(cut) = share.cut.filter(|_| share.ranks.start == rank) {
                let mut part = vec![0.0; cut.len(whole.shape())];
                ranks.group().receive(&mut part, rank, TAG)?;
                cut.put(&part, whole);
            }
        }
        Ok(())
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
