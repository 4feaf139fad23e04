//! Moving the experts of a layer between the ranks of a group, in training: weights, moments and the copy that GEMMs
//! read. Only weights and moments travel; the copy is made of the weights again.
//!
//! Ranks that hold the same experts may have slices of them (ZeRO): each then gathers the tensors of the layer first,
//! and cuts its slices of the new part afterwards.

use moeworks_model::{ParamSet, WeightSpec};
use moeworks_ops::Context;
use moeworks_ops::elementwise::cast;
use moeworks_plan::{Placement, Placements};
use moeworks_tensor::{DType, Tensor};

use super::Ranks;
use crate::error::TrainError;

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

/// A tensor of experts that moves: the weights of entry `place`, or its moments.
struct Moved {
    place: usize,
    /// None: the weights; 0 or 1: moments.
    moment: Option<usize>,
    tensor: Tensor,
}

impl Ranks {
    /// Lists the tensors of a layer's experts of which this rank has a part, by their indices.
    fn expert_places(&self, layer: usize) -> Vec<usize> {
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

    /// Moves the experts of a layer to the ranks of another placement, and puts it in force. Returns the bytes that
    /// this rank received. All ranks call this between the same steps.
    pub(crate) fn move_layer(&self, moved: &LayerMove<'_>, state: &mut ExpertState<'_>) -> Result<usize, TrainError> {
        let &LayerMove { layer, to } = moved;
        let from = self.experts.layer(layer).placement().clone();
        let places = self.expert_places(layer);
        let mut moved = self.gathered(&places, state)?;
        let tensors = moved.iter_mut().map(|moved| &mut moved.tensor).collect();
        let num_bytes = self.experts.move_experts(state.at, &from, to, tensors)?;
        self.put_in_force(layer, to, &places);
        self.store(moved, &places, state);
        Ok(num_bytes)
    }

    /// Gathers the tensors that move, each whole as this rank's part.
    fn gathered(&self, places: &[usize], state: &ExpertState<'_>) -> Result<Vec<Moved>, TrainError> {
        let whole = |place: usize, tensor: &Tensor, is_slice: bool| match is_slice {
            true => Ok::<_, TrainError>(self.start_joining(state.at, place, tensor)?.finish()?.1),
            false => Ok(tensor.clone()),
        };
        let params = state.params.params();
        let mut moved = Vec::new();
        for &place in places {
            let tensor = whole(place, params[place], self.shards_weights())?;
            moved.push(Moved { place, moment: None, tensor });
            if !self.table().is_trainable(place) {
                continue;
            }
            for (moment, tensors) in state.moments.iter().enumerate() {
                let tensor = whole(place, &tensors[place], self.shards_optimizer())?;
                moved.push(Moved { place, moment: Some(moment), tensor });
            }
        }
        Ok(moved)
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

    /// Stores tensors of the new part, or this rank's slices of them, and makes room for gradients.
    fn store(&self, moved: Vec<Moved>, places: &[usize], state: &mut ExpertState<'_>) {
        for Moved { place, moment, tensor } in moved {
            let is_slice = if moment.is_some() { self.shards_optimizer() } else { self.shards_weights() };
            let own = if is_slice { self.slice(state.at, place, &tensor) } else { tensor };
            match moment {
                Some(moment) => state.moments[moment][place] = own,
                None => *state.params.params_mut()[place] = own,
            }
        }
        let params = state.params.params();
        if let Some(copy) = &mut state.copy {
            let mut copies = copy.params_mut();
            for &place in places {
                *copies[place] = cast(state.at, params[place], copies[place].dtype());
            }
        }
        if self.shards_gradients() {
            return;
        }
        let mut grads = state.grads.params_mut();
        for &place in places {
            *grads[place] = state.ctx.zeros_on_device(&self.table().grad_shape(place), DType::F32);
        }
    }
}
