//! Construction of [`DecoderWeights`] from the table of weights.

use std::iter::Peekable;
use std::slice::Iter;

use moeworks_moe::{MoeWeights, NamedTensor, SharedWeights, WeightShape};
use moeworks_tensor::Tensor;

use super::role::{WeightPlace, WeightRole};
use super::spec::WeightSpec;
use super::structs::{
    AttentionInputs, AttentionWeights, CrossWeights, DecoderWeights, DenseWeights, EncoderWeights, FeedForwardWeights,
    HeadWeights, LatentWeights, LayerWeights, LinearWeights, NormWeights, Numbers, QueryDown,
};
use super::table::WeightTable;
use crate::config::ModelConfig;

/// A cursor over the table: `make` creates each tensor, and the next entry shows which optional parts the model has.
struct Builder<'a, F, S> {
    specs: Peekable<Iter<'a, WeightSpec>>,
    states: Vec<WeightShape>,
    make: F,
    make_state: S,
}

impl DecoderWeights {
    /// Builds the weights of a model of `config`. `make` creates each tensor from its entry in `table`, in order;
    /// `make_state` creates the routers' states from their shapes, in the order of [`DecoderWeights::states`].
    pub(crate) fn build(
        config: &ModelConfig,
        table: &WeightTable,
        make: impl FnMut(&WeightSpec) -> Tensor,
        make_state: impl FnMut(&WeightShape) -> Tensor,
    ) -> Self {
        let states = if config.num_experts > 0 { config.moe().state_shapes() } else { Vec::new() };
        Builder { specs: table.specs().iter().peekable(), states, make, make_state }.decoder()
    }
}

// Fields are evaluated in the order in which they are written, which is that of the table.
impl<F: FnMut(&WeightSpec) -> Tensor, S: FnMut(&WeightShape) -> Tensor> Builder<'_, F, S> {
    fn place(&mut self) -> Option<WeightPlace> {
        self.specs.peek().map(|spec| spec.place)
    }

    fn has(&mut self, role: WeightRole) -> bool {
        self.specs.peek().is_some_and(|spec| spec.role == role)
    }

    /// Creates the next tensor, which must be of `role`.
    fn next_tensor(&mut self, role: WeightRole) -> Tensor {
        let spec = self.specs.next().filter(|spec| spec.role == role);
        (self.make)(spec.expect("the table has the tensors of a model, in their order"))
    }

    fn option(&mut self, role: WeightRole) -> Option<Tensor> {
        self.has(role).then(|| self.next_tensor(role))
    }

    fn pair(&mut self, first: WeightRole, second: WeightRole) -> Option<(Tensor, Tensor)> {
        self.has(first).then(|| (self.next_tensor(first), self.next_tensor(second)))
    }

    fn decoder(&mut self) -> DecoderWeights {
        let of_encoder = [WeightPlace::Encoder, WeightPlace::EncoderLayer(0)];
        let has_encoder = self.place().is_some_and(|place| of_encoder.contains(&place));
        DecoderWeights {
            encoder: has_encoder.then(|| self.encoder()),
            embedding: self.next_tensor(WeightRole::Embedding),
            positions: self.option(WeightRole::Positions),
            relative: self.option(WeightRole::RelativeBias),
            layers: self.layers(WeightPlace::Layer),
            final_norm: self.norm(WeightRole::FinalNorm, WeightRole::FinalNormBias),
            head: self.option(WeightRole::Head),
            head_bias: self.option(WeightRole::HeadBias),
        }
    }

    fn encoder(&mut self) -> EncoderWeights {
        EncoderWeights {
            embedding: self.option(WeightRole::Embedding),
            relative: self.option(WeightRole::RelativeBias),
            layers: self.layers(WeightPlace::EncoderLayer),
            final_norm: self.norm(WeightRole::FinalNorm, WeightRole::FinalNormBias),
        }
    }

    fn layers(&mut self, place: fn(usize) -> WeightPlace) -> Vec<LayerWeights> {
        let mut layers = Vec::new();
        while self.place() == Some(place(layers.len())) {
            layers.push(self.layer());
        }
        layers
    }

    fn norm(&mut self, weight: WeightRole, bias: WeightRole) -> NormWeights {
        NormWeights { weight: self.next_tensor(weight), bias: self.option(bias) }
    }

    fn linear(&mut self, weight: WeightRole, bias: WeightRole) -> LinearWeights {
        LinearWeights { weight: self.next_tensor(weight), bias: self.option(bias) }
    }

    fn plain(&mut self, weight: WeightRole) -> LinearWeights {
        LinearWeights { weight: self.next_tensor(weight), bias: None }
    }

    fn layer(&mut self) -> LayerWeights {
        LayerWeights {
            attention_norm: self.norm(WeightRole::AttentionNorm, WeightRole::AttentionNormBias),
            attention: self.attention(),
            cross: self.has(WeightRole::CrossNorm).then(|| self.cross()),
            feed_forward_norm: self.norm(WeightRole::FeedForwardNorm, WeightRole::FeedForwardNormBias),
            feed_forward: match self.has(WeightRole::Router) {
                true => FeedForwardWeights::Moe(self.moe()),
                false => FeedForwardWeights::Dense(self.dense()),
            },
        }
    }

    fn attention(&mut self) -> AttentionWeights {
        AttentionWeights {
            inputs: self.attention_inputs(),
            o: self.linear(WeightRole::O, WeightRole::OBias),
            sinks: self.option(WeightRole::Sinks),
        }
    }

    fn attention_inputs(&mut self) -> AttentionInputs {
        if self.has(WeightRole::QDown) {
            let projection = self.linear(WeightRole::QDown, WeightRole::QDownBias);
            let q_down = Some(QueryDown { projection, norm: self.next_tensor(WeightRole::QDownNorm) });
            let q = self.next_tensor(WeightRole::QUp);
            return AttentionInputs::Latent(self.latent(q_down, q));
        }
        let q = self.linear(WeightRole::Q, WeightRole::QBias);
        match self.has(WeightRole::KvDown) {
            true => AttentionInputs::Latent(self.latent(None, q.weight)),
            false => AttentionInputs::Heads(self.heads(q)),
        }
    }

    fn heads(&mut self, q: LinearWeights) -> HeadWeights {
        HeadWeights {
            q,
            k: self.linear(WeightRole::K, WeightRole::KBias),
            v: self.linear(WeightRole::V, WeightRole::VBias),
            q_norm: self.option(WeightRole::QNorm),
            k_norm: self.option(WeightRole::KNorm),
        }
    }

    fn latent(&mut self, q_down: Option<QueryDown>, q: Tensor) -> LatentWeights {
        LatentWeights {
            q_down,
            q,
            kv_down: self.linear(WeightRole::KvDown, WeightRole::KvDownBias),
            kv_norm: self.next_tensor(WeightRole::KvDownNorm),
            kv: self.next_tensor(WeightRole::KvUp),
            kv_numbers: Numbers::default(),
        }
    }

    fn cross(&mut self) -> CrossWeights {
        CrossWeights {
            norm: self.norm(WeightRole::CrossNorm, WeightRole::CrossNormBias),
            q: self.plain(WeightRole::CrossQ),
            k: self.plain(WeightRole::CrossK),
            v: self.plain(WeightRole::CrossV),
            o: self.plain(WeightRole::CrossO),
        }
    }

    fn moe(&mut self) -> MoeWeights {
        MoeWeights {
            router: self.next_tensor(WeightRole::Router),
            router_bias: self.option(WeightRole::RouterBias),
            gate_up: self.next_tensor(WeightRole::ExpertGateUp),
            down: self.next_tensor(WeightRole::ExpertDown),
            biases: self.pair(WeightRole::ExpertGateUpBias, WeightRole::ExpertDownBias),
            shared: self.has(WeightRole::SharedGateUp).then(|| SharedWeights {
                gate_up: self.next_tensor(WeightRole::SharedGateUp),
                down: self.next_tensor(WeightRole::SharedDown),
                gate: self.option(WeightRole::SharedGate),
            }),
            extras: self.extras(),
            state: self.state(),
        }
    }

    /// Creates the weights that only some routing schemes have.
    fn extras(&mut self) -> Vec<NamedTensor> {
        let mut extras = Vec::new();
        while let Some(role @ WeightRole::RouterExtra(name)) = self.specs.peek().map(|spec| spec.role) {
            extras.push(NamedTensor { name, tensor: self.next_tensor(role) });
        }
        extras
    }

    /// Creates the router's state, which is not in the table.
    fn state(&mut self) -> Vec<NamedTensor> {
        let Self { states, make_state, .. } = self;
        states.iter().map(|state| NamedTensor { name: state.name, tensor: make_state(state) }).collect()
    }

    fn dense(&mut self) -> DenseWeights {
        DenseWeights {
            gate_up: self.next_tensor(WeightRole::DenseGateUp),
            down: self.next_tensor(WeightRole::DenseDown),
            biases: self.pair(WeightRole::DenseGateUpBias, WeightRole::DenseDownBias),
        }
    }
}
