//! The tensors of a rank's part of a model, by their indices in the table of weights.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use moeworks_model::{ParamSet, WeightSpec, WeightTable};
use moeworks_tensor::Tensor;

/// The table of a model's weights, with the shapes of this rank's parts.
pub(crate) struct PartTable {
    weights: Arc<WeightTable>,
    /// The shapes of the parts, of which those of experts change when experts move.
    shapes: RwLock<Vec<Vec<usize>>>,
}

impl PartTable {
    /// Creates the table of the parts of `weights`; `part_shape` returns their shapes.
    pub(super) fn new(weights: &Arc<WeightTable>, part_shape: impl Fn(&WeightSpec) -> Vec<usize>) -> Self {
        let shapes = weights.specs().iter().map(part_shape).collect();
        Self { weights: Arc::clone(weights), shapes: RwLock::new(shapes) }
    }

    /// Sets the shape of a part whose experts have changed.
    pub(super) fn set_shape(&self, place: usize, shape: Vec<usize>) {
        self.shapes.write().unwrap_or_else(PoisonError::into_inner)[place] = shape;
    }

    pub(crate) fn weights(&self) -> &WeightTable {
        &self.weights
    }

    pub(super) fn specs(&self) -> &[WeightSpec] {
        self.weights.specs()
    }

    pub(super) fn spec(&self, place: usize) -> &WeightSpec {
        &self.weights.specs()[place]
    }

    pub(super) fn is_trainable(&self, place: usize) -> bool {
        self.spec(place).is_trainable
    }

    pub(crate) fn shape(&self, place: usize) -> Vec<usize> {
        self.shapes.read().unwrap_or_else(PoisonError::into_inner)[place].clone()
    }

    /// Returns the shape of the part's gradient while a pass computes it; `[0]` if the pass leaves it out.
    pub(super) fn grad_shape(&self, place: usize) -> Vec<usize> {
        if self.weights.skips_gradient(self.spec(place)) { vec![0] } else { self.shape(place) }
    }

    pub(super) fn num_layers(&self) -> usize {
        self.weights.num_layers()
    }

    /// Returns the tensors of `params` that belong to a layer, for writing, with their indices.
    pub(super) fn in_layer<'a>(
        &self,
        layer: usize,
        params: &'a mut dyn ParamSet,
    ) -> impl Iterator<Item = (usize, &'a mut Tensor)> + use<'a> {
        let places = self.layer(layer);
        params.params_mut().into_iter().enumerate().skip(places.start).take(places.len())
    }

    /// Returns the indices of a layer's tensors.
    pub(crate) fn layer(&self, layer: usize) -> Range<usize> {
        self.weights.layer(layer)
    }

    /// Returns the indices of the tensors outside the layers.
    pub(crate) fn outside(&self) -> impl Iterator<Item = usize> {
        self.weights.outside().map(|spec| spec.index)
    }
}
