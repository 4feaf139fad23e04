//! Construction of the weight table of a model that is no decoder, tensor by tensor.

use moeworks_moe::MoeConfig;

use super::role::{WeightPlace, WeightRole};
use super::spec::{Init, Shard, WeightSpec};
use super::table::{MoeParts, WeightTable, extra_inits, moe_shapes};

/// A builder of weight tables. Tensors are added in the order in which the model's [`ParamSet`](super::ParamSet)
/// lists them.
///
/// Tensors belong to no layer until [`layer`](Self::layer) is called. Initial values follow from the role: ones for
/// norms, zeros for biases, and otherwise normally distributed numbers from a stream of their own for each tensor.
///
/// ```
/// use moeworks_model::{TableBuilder, WeightRole};
///
/// let table = TableBuilder::new(/* standard deviation of the first values */ 0.02)
///     .add("patches.weight", WeightRole::Linear, &[64, 48])
///     .layer(0)
///     .add("layers.0.weight", WeightRole::Linear, &[64, 64])
///     .outside()
///     .add("classes.weight", WeightRole::Linear, &[10, 64])
///     .finish();
/// assert_eq!((table.specs().len(), table.layer(0)), (3, 1..2));
/// ```
#[derive(Clone, Debug)]
pub struct TableBuilder {
    specs: Vec<WeightSpec>,
    place: WeightPlace,
    init_std: f32,
}

impl TableBuilder {
    /// Returns an empty table whose random initial values have standard deviation `init_std`.
    #[must_use]
    pub fn new(init_std: f32) -> Self {
        Self { specs: Vec::new(), place: WeightPlace::Model, init_std }
    }

    /// Assigns the next tensors to layer `layer`. Layers are added in order from 0; a layer's gradients are reduced
    /// over ranks as soon as they are complete.
    #[must_use]
    pub fn layer(self, layer: usize) -> Self {
        Self { place: WeightPlace::Layer(layer), ..self }
    }

    /// Assigns the next tensors to no layer.
    #[must_use]
    pub fn outside(self) -> Self {
        Self { place: WeightPlace::Model, ..self }
    }

    /// Adds a tensor. Matrices are decayed, vectors are not.
    #[must_use]
    pub fn add(self, name: &str, role: WeightRole, shape: &[usize]) -> Self {
        let init = if role.is_norm() {
            Init::Ones
        } else if role.is_bias() {
            Init::Zeros
        } else {
            Init::Normal { std: self.init_std, stream: self.specs.len() as u64 }
        };
        self.push(name.to_owned(), role, shape, init)
    }

    /// Adds the tensors of an MoE layer of `config` in the order of
    /// [`MoeWeights::tensors`](moeworks_moe::MoeWeights::tensors), without biases and without a gate of shared
    /// experts.
    #[must_use]
    pub fn add_moe(mut self, config: &MoeConfig) -> Self {
        let layer = if let WeightPlace::Layer(layer) = self.place { layer } else { 0 };
        for (role, shape) in moe_shapes(config, MoeParts::default()) {
            let name = role.name(self.place);
            self = self.add(&name, role, &shape);
        }
        let extras = config.extra_shapes();
        let inits = extra_inits(&extras, layer, self.init_std);
        extras.into_iter().zip(inits).fold(self, |table, (extra, init)| {
            let role = WeightRole::RouterExtra(extra.name);
            let name = role.name(table.place);
            table.push(name, role, &extra.shape, init)
        })
    }

    /// Returns the table.
    #[must_use]
    pub fn finish(self) -> WeightTable {
        WeightTable::from_specs(self.specs)
    }

    fn push(mut self, name: String, role: WeightRole, shape: &[usize], init: Init) -> Self {
        self.specs.push(WeightSpec {
            index: self.specs.len(),
            name,
            place: self.place,
            role,
            shape: shape.to_vec(),
            init,
            shard: if role.is_of_experts() { Shard::Experts } else { Shard::Replicated },
            is_trainable: true,
            is_decayed: shape.len() > 1,
        });
        self
    }
}
