//! Gathering the whole model on the root, and the part of it that a rank holds.

use std::io;

use moeworks_comm::CommError;
use moeworks_model::safetensors::{FileDType, Payload, TensorBytes};
use moeworks_model::{ParamSet, TensorShare, WeightSpec};
use moeworks_moe::select_experts;
use moeworks_ops::Context;
use moeworks_ops::elementwise::into_type;
use moeworks_ops::quantized::dequantize;
use moeworks_tensor::{DType, Tensor};

use super::Ranks;
use super::stage_groups::WayToRoot;
use crate::error::TrainError;

/// The tag of messages with tensors for the root.
const TAG: u32 = 1;

/// The weights, or the moments, of a rank's part of a model.
#[derive(Clone, Copy)]
pub(crate) struct Held<'a> {
    pub(super) tensors: &'a dyn ParamSet,
    /// True if each tensor is a slice of the rank's part.
    pub(super) are_slices: bool,
    /// True if frozen weights have no tensor, as with moments.
    pub(super) only_trainable: bool,
}

/// A tensor of [`Held`]: its entry in the table, and the rank's part or a slice of it. The part that slices make has
/// each expert on its owner alone.
struct HeldTensor<'a> {
    spec: &'a WeightSpec,
    tensor: &'a Tensor,
    is_slice: bool,
}

impl Ranks {
    /// Returns this rank's parts of tensors, whole even where ranks keep slices of them.
    pub(crate) fn held_parts<'a>(&self, tensors: &'a dyn ParamSet) -> Held<'a> {
        Held { tensors, are_slices: false, only_trainable: false }
    }

    /// Returns this rank's slice of every tensor of its `part`.
    pub(crate) fn slices_of<P: ParamSet>(&self, ctx: &Context, part: &P) -> P {
        part.map_params(self.table().weights(), |spec, tensor| self.slice(ctx, spec.index, tensor))
    }

    /// Returns this rank's part of a whole tensor (weights or moments).
    pub(crate) fn part(&self, ctx: &Context, spec: &WeightSpec, whole: &Tensor) -> Tensor {
        if !self.holds(spec) {
            return ctx.empty(&[0], whole.dtype());
        }
        if spec.role.is_of_experts() {
            return select_experts(ctx, whole, self.layer_of(spec).held());
        }
        self.tensor_ranks().map_or_else(|| whole.clone(), |ranks| ranks.split().part(ctx, spec, whole))
    }

    /// Returns the shape of [`part`](Self::part).
    pub(super) fn part_shape(&self, spec: &WeightSpec) -> Vec<usize> {
        if !self.holds(spec) {
            return vec![0];
        }
        if spec.role.is_of_experts() {
            let mut shape = spec.shape.clone();
            shape[0] = self.layer_of(spec).held().len();
            return shape;
        }
        self.tensor_ranks().map_or_else(|| spec.shape.clone(), |ranks| ranks.split().part_shape(spec))
    }

    /// Returns a function that reduces each whole tensor to this rank's part, in f32, or to a slice of the part if
    /// `are_shared`.
    pub(crate) fn keeper(&self, ctx: &Context, are_shared: bool) -> impl FnMut(&WeightSpec, &Tensor) -> Tensor {
        move |spec, whole| {
            if !self.holds(spec) {
                return ctx.empty(&[0], DType::F32);
            }
            let is_packed = whole.dtype().is_quantized();
            let unpacked = is_packed.then(|| dequantize(ctx, whole, DType::F32));
            let part = into_type(ctx, self.part(ctx, spec, unpacked.as_ref().unwrap_or(whole)), DType::F32);
            if are_shared { self.slice(ctx, spec.index, &part) } else { part }
        }
    }

    /// Describes the weights that this rank holds.
    pub(crate) fn held_weights<'a>(&self, weights: &'a dyn ParamSet) -> Held<'a> {
        Held { tensors: weights, are_slices: self.shards_weights(), only_trainable: false }
    }

    /// Describes the moments that this rank holds.
    pub(crate) fn held_moments<'a>(&self, moments: &'a dyn ParamSet) -> Held<'a> {
        Held { tensors: moments, are_slices: self.shards_optimizer(), only_trainable: true }
    }

    /// Iterates over the tensors of `held`.
    fn held_tensors<'a>(&'a self, held: Held<'a>) -> impl Iterator<Item = HeldTensor<'a>> + 'a {
        let Held { tensors, are_slices, only_trainable } = held;
        let tensors = self.table().specs().iter().zip(tensors.params());
        let tensors = tensors.filter(move |(spec, _)| spec.is_trainable || !only_trainable);
        tensors.map(move |(spec, tensor)| HeldTensor { spec, tensor, is_slice: are_slices })
    }

    /// Returns whether this rank is in the root's group, which has all experts.
    fn is_near_root(&self) -> bool {
        self.layout.place(self.world.rank()).0 == 0
    }

    /// Gathers a whole tensor into `whole`, which only the root passes. All ranks call this; groups with slices first
    /// gather them.
    fn whole_tensor(&self, ctx: &Context, held: &HeldTensor<'_>, whole: Option<&mut Tensor>) -> Result<(), TrainError> {
        let &HeldTensor { spec, tensor, is_slice } = held;
        let is_slice = is_slice && self.holds(spec);
        let joined = is_slice.then(|| self.start_joining(ctx, spec.index, tensor)?.finish()).transpose()?;
        let part = joined.as_ref().map_or(tensor, |(_, joined)| joined);
        let part = HeldTensor { spec, tensor: part, is_slice };
        if let Some(way) = self.way_to_root(spec) {
            return self.whole_over_line(ctx, way, &part, whole);
        }
        match whole {
            Some(to) => self.collect_tensor(&part, to),
            None if self.is_near_root() => Ok(self.give_tensor(spec, part.tensor)?),
            None => Ok(()),
        }
    }

    /// Brings a tensor that the root's stage group does not hold, and that the first rank of another puts together,
    /// to the root.
    fn whole_over_line(
        &self,
        ctx: &Context,
        way: WayToRoot<'_>,
        part: &HeldTensor<'_>,
        whole: Option<&mut Tensor>,
    ) -> Result<(), TrainError> {
        match (way, whole) {
            (WayToRoot::Receive { pipeline_group, from }, Some(to)) => {
                Ok(pipeline_group.receive(to.f32s_mut(), from, TAG)?)
            }
            (WayToRoot::Send { pipeline_group }, _) if self.stage_group.rank() == 0 => {
                let mut whole = ctx.zeros(&part.spec.shape, DType::F32);
                self.collect_tensor(part, &mut whole)?;
                Ok(pipeline_group.send(whole.f32s(), 0, TAG)?)
            }
            (WayToRoot::Send { .. }, _) if self.is_near_root() => Ok(self.give_tensor(part.spec, part.tensor)?),
            _ => Ok(()),
        }
    }

    /// Sends this rank's part of a tensor to the root.
    fn give_tensor(&self, spec: &WeightSpec, part: &Tensor) -> Result<(), CommError> {
        match spec.role.is_of_experts() {
            true => self.experts.group().send(part.f32s(), 0, TAG),
            false => self.give_part(spec, part),
        }
    }

    /// Gathers a tensor's parts into `whole`; the root's part is `own`.
    fn collect_tensor(&self, own: &HeldTensor<'_>, whole: &mut Tensor) -> Result<(), TrainError> {
        if own.spec.role.is_of_experts() {
            return Ok(self.collect(own, whole)?);
        }
        self.collect_parts(own.spec, own.tensor, whole)
    }

    /// Sends this rank's part of a non-expert tensor to the root, if the root needs this rank's copy.
    fn give_part(&self, spec: &WeightSpec, part: &Tensor) -> Result<(), CommError> {
        let Some(ranks) = self.tensor_ranks().filter(|_| self.layout.place(self.world.rank()).1 == 0) else {
            return Ok(());
        };
        let share = ranks.split().share(spec);
        if share.cut.is_some() && share.ranks.start == ranks.split().rank() {
            ranks.group().send(part.f32s(), 0, TAG)?;
        }
        Ok(())
    }

    /// Gathers a non-expert tensor into `whole`; the root's part is `own`.
    fn collect_parts(&self, spec: &WeightSpec, own: &Tensor, whole: &mut Tensor) -> Result<(), TrainError> {
        let ranks = self.tensor_ranks().map(|ranks| (ranks, ranks.split().share(spec)));
        let Some((ranks, TensorShare { cut: Some(cut), .. })) = ranks else {
            whole.f32s_mut().copy_from_slice(own.f32s());
            return Ok(());
        };
        cut.write_part(own.f32s(), whole);
        for (rank, split) in self.tensor_splits().iter().enumerate().skip(1) {
            let share = split.share(spec);
            if let Some(cut) = share.cut.filter(|_| share.ranks.start == rank) {
                let mut part = vec![0.0; cut.len(whole.shape())];
                ranks.group().receive(&mut part, rank, TAG)?;
                cut.write_part(&part, whole);
            }
        }
        Ok(())
    }

    /// Gathers the experts of all ranks of the group into `whole [E, ..]`; the root's are `own`.
    fn collect(&self, own: &HeldTensor<'_>, whole: &mut Tensor) -> Result<(), CommError> {
        let layer = self.layer_of(own.spec);
        let placement = if own.is_slice { layer.placement().owners() } else { layer.placement().clone() };
        let size = whole.shape()[1..].iter().product::<usize>();
        for rank in 0..placement.num_ranks() {
            let held = placement.experts_of(rank);
            let mut received = vec![0.0; if rank == 0 { 0 } else { held.len() * size }];
            if rank > 0 {
                self.experts.group().receive(&mut received, rank, TAG)?;
            }
            let values = if rank == 0 { own.tensor.f32s() } else { &received };
            for (values, expert) in values.chunks(size.max(1)).zip(held) {
                whole.f32s_mut()[expert * size..(expert + 1) * size].copy_from_slice(values);
            }
        }
        Ok(())
    }

    /// Gathers the tensors of all ranks on the root, one at a time in memory: each when it is asked for, while the
    /// other ranks [send](Self::give_tensors) theirs.
    pub(crate) fn whole_one_by_one<'a>(
        &'a self,
        ctx: &'a Context,
        held: Held<'a>,
    ) -> impl Iterator<Item = io::Result<Tensor>> + 'a {
        self.held_tensors(held).map(move |held| self.made_whole(ctx, &held))
    }

    /// Gathers a whole tensor on the root.
    fn made_whole(&self, ctx: &Context, held: &HeldTensor<'_>) -> io::Result<Tensor> {
        let mut whole = ctx.zeros(&held.spec.shape, DType::F32);
        self.whole_tensor(ctx, held, Some(&mut whole)).map_err(io::Error::other)?;
        Ok(whole)
    }

    /// Returns the tensors of [`whole_one_by_one`](Self::whole_one_by_one) as entries of a file. Names begin with
    /// `prefix`.
    pub(crate) fn whole_tensors<'a>(&'a self, ctx: &'a Context, held: Held<'a>, prefix: &str) -> Vec<TensorBytes<'a>> {
        let in_file = |held: HeldTensor<'a>| {
            let (name, shape) = (format!("{prefix}{}", held.spec.name), held.spec.shape.clone());
            let len = size_of::<f32>() * held.spec.num_elements();
            let make = move || Ok(self.made_whole(ctx, &held)?.bytes().to_vec());
            TensorBytes { name, dtype: FileDType::F32, shape, bytes: Payload::Made { len, make: Box::new(make) } }
        };
        self.held_tensors(held).map(in_file).collect()
    }

    /// Sends this rank's part of all tensors to the root, one after another.
    pub(crate) fn give_tensors(&self, ctx: &Context, held: Held<'_>) -> Result<(), TrainError> {
        self.held_tensors(held).try_for_each(|held| self.whole_tensor(ctx, &held, None))
    }
}
