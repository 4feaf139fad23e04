//! The tensors of a rank's part of a model, known by their numbers: where only slices of them are there, it says what they are of.

use std::ops::Range;

/// Names and shapes of the tensors of a model, in their order.
pub(super) struct TensorTable {
    names: Vec<String>,
    shapes: Vec<Vec<usize>>,
    /// The tensors of each layer.
    layers: Vec<Range<usize>>,
}

impl TensorTable {
    /// Of a model of so many layers.
    pub(super) fn new(tensors: impl Iterator<Item = (String, Vec<usize>)>, num_layers: usize) -> Self {
        let (names, shapes): (Vec<String>, Vec<_>) = tensors.unzip();
        let of_layer = |layer: usize| {
            let prefix = format!("model.layers.{layer}.");
            let start = names.iter().take_while(|name| !name.starts_with(&prefix)).count();
            start..start + names[start..].iter().take_while(|name| name.starts_with(&prefix)).count()
        };
        let layers = (0..num_layers).map(of_layer).collect();
        Self { names, shapes, layers }
    }

    pub(super) fn name(&self, place: usize) -> &str {
        &self.names[place]
    }

    pub(super) fn shape(&self, place: usize) -> &[usize] {
        &self.shapes[place]
    }

    /// The numbers of a layer's tensors.
    pub(super) fn layer(&self, layer: usize) -> Range<usize> {
        self.layers[layer].clone()
    }

    /// The numbers of the tensors that belong to no layer.
    pub(super) fn outside(&self) -> impl Iterator<Item = usize> {
        (0..self.names.len()).filter(|place| !self.layers.iter().any(|layer| layer.contains(place)))
    }
}
