//! Moving the experts of a layer between the ranks of a group while training goes on: weights and moments. The copy
//! that GEMMs read is made of the weights again.
//!
//! A move starts when the weights of a step have their final values and is on its way during the rest of the update.
//! Between the two steps the weights must have arrived, and the new placement is put in force. The moments, which
//! only the next update reads, travel on under its forward and backward passes.
//!
//! Ranks that keep slices of tensors (ZeRO) send ranges of slices, so that nothing is gathered for a move.

use moeworks_comm::CommError;
use moeworks_model::{ParamSet, WeightSpec};
use moeworks_moe::{ExpertRows, PendingExperts, select_experts};
use moeworks_ops::Context;
use moeworks_ops::elementwise::cast;
use moeworks_plan::{Placement, Placements};
use moeworks_tensor::{DType, Tensor};

use super::Ranks;
use super::slice_move::{PendingSlices, SliceRanks, Sliced};

/// The state of training that experts have on a rank.
pub(crate) struct ExpertState<'a> {
    /// The context of passes, in which gradients are.
    pub(crate) ctx: &'a Context,
    /// The context of the optimizer.
    pub(crate) at: &'a Context,
    /// f32 weights.
    pub(crate) params: &'a mut dyn ParamSet,
    /// The copy that GEMMs read, if there is one.
    pub(crate) copy: Option<&'a mut dyn ParamSet>,
    /// The gradients, whose values no longer count.
    pub(crate) grads: &'a mut dyn ParamSet,
    /// First and second moments.
    pub(crate) moments: [&'a mut Vec<Tensor>; 2],
}

/// A change of a layer's placement.
pub(crate) struct LayerMove<'a> {
    pub(crate) layer: usize,
    pub(crate) to: &'a Placement,
}

/// A layer's experts on their way.
#[must_use = "a started move is finished, or the other ranks wait for it"]
pub(crate) struct LayerOnItsWay {
    layer: usize,
    to: Placement,
    /// The layer's tensors of experts, by their indices.
    places: Vec<usize>,
    weights: OnItsWay,
    moments: MomentsOnTheirWay,
}

/// The moments of a layer's experts on their way.
#[must_use = "a started move is finished, or the other ranks wait for it"]
pub(crate) struct MomentsOnTheirWay {
    /// The layer's tensors that have moments.
    places: Vec<usize>,
    moments: OnItsWay,
}

/// Tensors on their way.
enum OnItsWay {
    /// Rows of experts.
    Rows(PendingExperts),
    /// Ranges of slices.
    Slices(PendingSlices),
    /// This rank has no part of the layer.
    Nothing,
}

/// Tensors that have arrived.
enum Arrived {
    Rows(ExpertRows),
    Slices(Vec<Tensor>),
    Nothing,
}

impl OnItsWay {
    fn finish(self) -> Result<Arrived, CommError> {
        Ok(match self {
            Self::Rows(pending) => Arrived::Rows(pending.finish()?),
            Self::Slices(pending) => Arrived::Slices(pending.finish()?),
            Self::Nothing => Arrived::Nothing,
        })
    }
}

impl Arrived {
    /// Writes the tensor, number `index` of those that arrived, over that of the placement before.
    fn store(&self, at: &Context, index: usize, tensor: &mut Tensor) {
        match self {
            Self::Rows(rows) => rows.place(at, index, tensor),
            Self::Slices(slices) => *tensor = slices[index].clone(),
            Self::Nothing => {}
        }
    }
}

/// A tensor that moves: its index in the table and this rank's part or slice.
struct Moving<'a> {
    place: usize,
    tensor: &'a Tensor,
}

/// The placements before and after a move.
#[derive(Clone, Copy)]
struct Ends<'a> {
    from: &'a Placement,
    to: &'a Placement,
}

impl Ranks {
    /// Lists the tensors of a layer's experts of which this rank has a part, by their indices.
    pub(crate) fn expert_places(&self, layer: usize) -> Vec<usize> {
        let specs = self.table().specs().iter();
        let is_moved = |spec: &&WeightSpec| {
            spec.role.is_of_experts() && spec.place.layer().unwrap_or(0) == layer && self.holds(spec)
        };
        specs.filter(is_moved).map(|spec| spec.index).collect()
    }

    /// Returns the bytes of one expert of a layer that travel with it.
    pub(crate) fn expert_bytes(&self, layer: usize) -> usize {
        let specs = self.table().specs().iter();
        let of_layer = specs.filter(|spec| spec.role.is_of_experts() && spec.place.layer().unwrap_or(0) == layer);
        let bytes = |spec: &WeightSpec| {
            let tensors = if spec.is_trainable { 3 } else { 1 };
            spec.shape[1..].iter().product::<usize>() * size_of::<f32>() * tensors
        };
        of_layer.map(bytes).sum()
    }

    /// Returns the bytes of the gradients of one expert of a layer.
    pub(crate) fn expert_gradient_bytes(&self, layer: usize) -> usize {
        let specs = self.table().specs().iter();
        let is_summed = |spec: &&WeightSpec| {
            spec.role.is_of_experts() && spec.is_trainable && spec.place.layer().unwrap_or(0) == layer
        };
        specs.filter(is_summed).map(|spec| spec.shape[1..].iter().product::<usize>() * size_of::<f32>()).sum()
    }

    /// Starts to move the experts of a layer to the ranks of another placement. All ranks call this when the layer's
    /// weights and moments are those of the end of a step.
    pub(crate) fn start_layer_move(
        &self,
        moved: &LayerMove<'_>,
        state: &ExpertState<'_>,
    ) -> Result<LayerOnItsWay, CommError> {
        let &LayerMove { layer, to } = moved;
        let from = self.experts.layer(layer).placement().clone();
        let (ends, places, params) = (Ends { from: &from, to }, self.expert_places(layer), state.params.params());
        let weights: Vec<_> = places.iter().map(|&place| Moving { place, tensor: params[place] }).collect();
        let weights = self.start_tensors(state.at, ends, &weights, self.shards_weights())?;
        let trained: Vec<usize> = places.iter().copied().filter(|&place| self.table().is_trainable(place)).collect();
        let both = state.moments.iter().flat_map(|moments| trained.iter().map(move |&place| (place, &moments[place])));
        let moments: Vec<_> = both.map(|(place, tensor)| Moving { place, tensor }).collect();
        let moments = self.start_tensors(state.at, ends, &moments, self.shards_optimizer())?;
        let moments = MomentsOnTheirWay { places: trained, moments };
        Ok(LayerOnItsWay { layer, to: to.clone(), places, weights, moments })
    }

    /// Starts to move tensors of a layer, of which this rank has slices or its whole part.
    fn start_tensors(
        &self,
        at: &Context,
        ends: Ends<'_>,
        moved: &[Moving<'_>],
        are_slices: bool,
    ) -> Result<OnItsWay, CommError> {
        let Some(first) = moved.first() else { return Ok(OnItsWay::Nothing) };
        if !are_slices {
            let tensors: Vec<&Tensor> = moved.iter().map(|moving| moving.tensor).collect();
            return Ok(OnItsWay::Rows(self.experts.start_move(ends.from, ends.to, &tensors)?));
        }
        let tensors = moved.iter().map(|moving| Sliced {
            slice: moving.tensor,
            expert_len: self.table().spec(moving.place).shape[1..].iter().product(),
        });
        let tensors: Vec<Sliced<'_>> = tensors.collect();
        let ranks = SliceRanks::new(self.all_with(self.table().spec(first.place)), self.layout());
        Ok(OnItsWay::Slices(ranks.start(at, ends.from, ends.to, &tensors)?))
    }

    /// Waits for the weights of a move and puts its placement in force. Returns the moments, which may travel on
    /// until the next update. All ranks call this between the same steps.
    pub(crate) fn finish_layer_move(
        &self,
        moved: LayerOnItsWay,
        state: &mut ExpertState<'_>,
    ) -> Result<MomentsOnTheirWay, CommError> {
        let LayerOnItsWay { layer, to, places, weights, moments } = moved;
        let arrived = weights.finish()?;
        let before: Vec<Vec<usize>> = places.iter().map(|&place| self.table().grad_shape(place)).collect();
        self.put_in_force(layer, &to, &places);
        for (index, &place) in places.iter().enumerate() {
            let mut params = state.params.params_mut();
            arrived.store(state.at, index, params[place]);
            if let Some(copy) = &mut state.copy {
                renew_copy(state.at, &arrived, params[place], copy.params_mut().swap_remove(place));
            }
            let shape = self.table().grad_shape(place);
            if !self.shards_gradients() && shape != before[index] {
                *state.grads.params_mut()[place] = state.ctx.zeros_on_device(&shape, DType::F32);
            }
        }
        Ok(moments)
    }

    /// Waits for the moments of a move. All ranks call this before the same update.
    pub(crate) fn finish_moments(
        &self,
        at: &Context,
        on_their_way: MomentsOnTheirWay,
        moments: [&mut Vec<Tensor>; 2],
    ) -> Result<(), CommError> {
        let MomentsOnTheirWay { places, moments: pending } = on_their_way;
        let arrived = pending.finish()?;
        let tensors = moments.into_iter().enumerate();
        for (moment, tensors) in tensors {
            for (index, &place) in places.iter().enumerate() {
                arrived.store(at, moment * places.len() + index, &mut tensors[place]);
            }
        }
        Ok(())
    }

    /// Puts the placement of a layer in force, whose tensors are `places`.
    fn put_in_force(&self, layer: usize, to: &Placement, places: &[usize]) {
        let placements = self.experts.placements();
        let of_layer = |number: usize| {
            let placement = if number == layer { Some(to) } else { placements.layer(number) };
            Some((number, placement?.clone()))
        };
        self.experts.set_placements(Placements::per_layer(placements.layers().into_iter().filter_map(of_layer)));
        for &place in places {
            self.table().set_shape(place, self.part_shape(self.table().spec(place)));
        }
    }
}

/// Makes the copy that GEMMs read of weights that arrived again, where it changes.
fn renew_copy(at: &Context, arrived: &Arrived, weights: &Tensor, copy: &mut Tensor) {
    let changed = match arrived {
        Arrived::Nothing => return,
        Arrived::Rows(rows) if at.gpu().is_none() => rows.changed_rows(),
        _ => None,
    };
    let Some(changed) = changed else {
        *copy = cast(at, weights, copy.dtype());
        return;
    };
    if changed.is_empty() {
        return;
    }
    let rows = cast(at, &select_experts(at, weights, &changed), copy.dtype());
    let size = rows.num_bytes() / changed.len();
    for (from, &row) in rows.bytes().chunks_exact(size.max(1)).zip(&changed) {
        copy.bytes_mut()[row * size..(row + 1) * size].copy_from_slice(from);
    }
}
