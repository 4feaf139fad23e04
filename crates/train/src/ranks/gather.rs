//! The whole model put together on the root, and the part of it that a rank keeps.

use std::io;

use moeworks_comm::CommError;
use moeworks_model::safetensors::{FileDType, Payload, TensorBytes};
use moeworks_model::{Decoder, DecoderWeights, TensorShare, TensorSplit, is_of_experts};
use moeworks_moe::select_experts;
use moeworks_ops::Context;
use moeworks_ops::elementwise::into_type;
use moeworks_ops::quantized::dequantize;
use moeworks_tensor::{DType, Tensor};

use super::Ranks;
use crate::config::ConfigError;
use crate::error::TrainError;

/// The tag of tensors on their way to the root.
const TAG: u32 = 1;

/// What a rank has of the weights or the moments of its part of a model.
#[derive(Clone, Copy)]
pub(crate) enum Held<'a> {
    /// All of it.
    Part(&'a DecoderWeights),
    /// A slice of every tensor.
    Slices(&'a DecoderWeights),
}

impl<'a> Held<'a> {
    /// One tensor after another.
    fn tensors(self) -> impl Iterator<Item = HeldTensor<'a>> {
        let (tensors, is_slice) = match self {
            Held::Part(part) => (part, false),
            Held::Slices(slices) => (slices, true),
        };
        let tensors = tensors.tensors().into_iter().enumerate();
        tensors.map(move |(place, (name, tensor))| HeldTensor { place, name, tensor, is_slice })
    }
}

/// What a rank has of one of a model's tensors: its place among them, its name, and its part or a slice of that.
struct HeldTensor<'a> {
    place: usize,
    name: String,
    tensor: &'a Tensor,
    is_slice: bool,
}

impl Ranks {
    /// The part of the tensor `name` of a whole model (weights or moments) that this rank keeps, or keeps slices of.
    pub(crate) fn part(&self, ctx: &Context, name: &str, whole: &Tensor) -> Tensor {
        if is_of_experts(name) {
            return select_experts(ctx, whole, self.experts.held());
        }
        self.tensor_ranks().map_or_else(|| whole.clone(), |ranks| ranks.split().part(ctx, name, whole))
    }

    /// The shape of [`part`](Self::part) of a tensor of `shape`.
    pub(super) fn part_shape(&self, name: &str, mut shape: Vec<usize>) -> Vec<usize> {
        if is_of_experts(name) {
            shape[0] = self.experts.held().len();
            return shape;
        }
        self.tensor_ranks().map_or_else(|| shape.clone(), |ranks| ranks.split().part_shape(name, &shape))
    }

    /// What this rank keeps, in f32, of the tensors of a whole model, each by its name, in their order: of its part a slice where
    /// `are_shared`.
    pub(crate) fn keeper(&self, ctx: &Context, are_shared: bool) -> impl FnMut(&str, &Tensor) -> Tensor {
        let mut places = 0..;
        move |name, whole| {
            let place = places.next().unwrap_or_default();
            let is_packed = whole.dtype().is_quantized();
            let unpacked = is_packed.then(|| dequantize(ctx, whole, DType::F32));
            let part = into_type(ctx, self.part(ctx, name, unpacked.as_ref().unwrap_or(whole)), DType::F32);
            if are_shared { self.slice(ctx, place, &part) } else { part }
        }
    }

    /// The weights as this rank has them.
    pub(crate) fn held_weights<'a>(&self, weights: &'a DecoderWeights) -> Held<'a> {
        if self.shards_weights() { Held::Slices(weights) } else { Held::Part(weights) }
    }

    /// The moments as this rank has them.
    pub(crate) fn held_moments<'a>(&self, moments: &'a DecoderWeights) -> Held<'a> {
        if self.shards_optimizer() { Held::Slices(moments) } else { Held::Part(moments) }
    }

    /// Whether this rank is of the root's group, which has all experts.
    fn is_near_root(&self) -> bool {
        self.layout.place(self.world.rank()).0 == 0
    }

    /// The whole of a tensor into `whole`, which the root gives. All ranks call this: those whose group has slices put these together
    /// first.
    fn whole_tensor(
        &self,
        (ctx, decoder): (&Context, &Decoder),
        held: &HeldTensor<'_>,
        whole: Option<&mut Tensor>,
    ) -> Result<(), TrainError> {
        let &HeldTensor { place, ref name, tensor, is_slice } = held;
        let joined = is_slice.then(|| self.start_joining(ctx, place, tensor)?.finish()).transpose()?;
        let part = joined.as_ref().map_or(tensor, |(_, joined)| joined);
        match whole {
            Some(to) => self.collect_tensor(decoder, (name, part), to),
            None if self.is_near_root() => Ok(self.give_tensor(name, part)?),
            None => Ok(()),
        }
    }

    /// Gives the root this rank's part of a tensor.
    fn give_tensor(&self, name: &str, part: &Tensor) -> Result<(), CommError> {
        if is_of_experts(name) { self.experts.group().send(part.f32s(), 0, TAG) } else { self.give_part(name, part) }
    }

    /// A tensor of which others have parts into `whole`; the root's part is `own`.
    fn collect_tensor(
        &self,
        decoder: &Decoder,
        (name, own): (&str, &Tensor),
        whole: &mut Tensor,
    ) -> Result<(), TrainError> {
        if is_of_experts(name) {
            return Ok(self.collect(own, whole)?);
        }
        self.collect_parts(decoder, (name, own), whole)
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

    /// What all ranks hold, on the root, one tensor after another in memory: each is put together when it is asked for, while the other
    /// ranks [give](Self::give_tensors) theirs.
    pub(crate) fn whole_one_by_one<'a>(
        &'a self,
        (ctx, decoder): (&'a Context, &'a Decoder),
        held: Held<'a>,
    ) -> impl Iterator<Item = io::Result<Tensor>> + 'a {
        let shapes = decoder.tensor_shapes().into_iter();
        held.tensors().zip(shapes).map(move |(held, (_, shape))| self.made_whole((ctx, decoder), &held, &shape))
    }

    /// The whole, of `shape`, of a tensor on the root.
    fn made_whole(
        &self,
        (ctx, decoder): (&Context, &Decoder),
        held: &HeldTensor<'_>,
        shape: &[usize],
    ) -> io::Result<Tensor> {
        let mut whole = ctx.zeros(shape, DType::F32);
        self.whole_tensor((ctx, decoder), held, Some(&mut whole)).map_err(io::Error::other)?;
        Ok(whole)
    }

    /// [The same](Self::whole_one_by_one) as a file has it. Names begin with `prefix`.
    pub(crate) fn whole_tensors<'a>(
        &'a self,
        (ctx, decoder): (&'a Context, &'a Decoder),
        held: Held<'a>,
        prefix: &str,
    ) -> Vec<TensorBytes<'a>> {
        let shapes = decoder.tensor_shapes().into_iter().map(|(_, shape)| shape);
        let in_file = |(held, shape): (HeldTensor<'a>, Vec<usize>)| {
            let (name, len) = (format!("{prefix}{}", held.name), size_of::<f32>() * shape.iter().product::<usize>());
            let of_whole = shape.clone();
            let make = move || Ok(self.made_whole((ctx, decoder), &held, &of_whole)?.bytes().to_vec());
            TensorBytes { name, dtype: FileDType::F32, shape, bytes: Payload::Made { len, make: Box::new(make) } }
        };
        held.tensors().zip(shapes).map(in_file).collect()
    }

    /// Gives the root this rank's part of all tensors, one after another.
    pub(crate) fn give_tensors(&self, (ctx, decoder): (&Context, &Decoder), held: Held<'_>) -> Result<(), TrainError> {
        held.tensors().try_for_each(|held| self.whole_tensor((ctx, decoder), &held, None))
    }
}
