//! Lists of a model's tensors in the order of its [`WeightTable`](super::WeightTable).

use moeworks_tensor::Tensor;

use super::role::{WeightPlace, WeightRole};
use super::structs::{AttentionInputs, DecoderWeights, FeedForwardWeights, LayerWeights};

/// Lists the tensors of layers at `$place`, for reading or for writing as in `list_tensors`.
macro_rules! list_layers {
    ($list:ident, $place:expr, $layers:expr, $iter:ident, $option:ident $(, $mutable:tt)?) => {
        for (i, layer) in $layers.$iter().enumerate() {
            let mut add = |role, tensor| $list.push(($place(i), role, tensor));
            macro_rules! add_option {
                ($role:expr, $tensor:expr) => {
                    if let Some(tensor) = $tensor.$option() {
                        add($role, tensor);
                    }
                };
            }
            add(WeightRole::AttentionNorm, & $($mutable)? layer.attention_norm.weight);
            add_option!(WeightRole::AttentionNormBias, layer.attention_norm.bias);
            let attention = & $($mutable)? layer.attention;
            match & $($mutable)? attention.inputs {
                AttentionInputs::Heads(heads) => {
                    add(WeightRole::Q, & $($mutable)? heads.q.weight);
                    add_option!(WeightRole::QBias, heads.q.bias);
                    add(WeightRole::K, & $($mutable)? heads.k.weight);
                    add_option!(WeightRole::KBias, heads.k.bias);
                    add(WeightRole::V, & $($mutable)? heads.v.weight);
                    add_option!(WeightRole::VBias, heads.v.bias);
                    add_option!(WeightRole::QNorm, heads.q_norm);
                    add_option!(WeightRole::KNorm, heads.k_norm);
                }
                AttentionInputs::Latent(latent) => {
                    let q = match & $($mutable)? latent.q_down {
                        Some(down) => {
                            add(WeightRole::QDown, & $($mutable)? down.projection.weight);
                            add_option!(WeightRole::QDownBias, down.projection.bias);
                            add(WeightRole::QDownNorm, & $($mutable)? down.norm);
                            WeightRole::QUp
                        }
                        None => WeightRole::Q,
                    };
                    add(q, & $($mutable)? latent.q);
                    add(WeightRole::KvDown, & $($mutable)? latent.kv_down.weight);
                    add_option!(WeightRole::KvDownBias, latent.kv_down.bias);
                    add(WeightRole::KvDownNorm, & $($mutable)? latent.kv_norm);
                    add(WeightRole::KvUp, & $($mutable)? latent.kv);
                }
            }
            add(WeightRole::O, & $($mutable)? attention.o.weight);
            add_option!(WeightRole::OBias, attention.o.bias);
            add_option!(WeightRole::Sinks, attention.sinks);
            if let Some(cross) = layer.cross.$option() {
                add(WeightRole::CrossNorm, & $($mutable)? cross.norm.weight);
                add_option!(WeightRole::CrossNormBias, cross.norm.bias);
                add(WeightRole::CrossQ, & $($mutable)? cross.q.weight);
                add(WeightRole::CrossK, & $($mutable)? cross.k.weight);
                add(WeightRole::CrossV, & $($mutable)? cross.v.weight);
                add(WeightRole::CrossO, & $($mutable)? cross.o.weight);
            }
            add(WeightRole::FeedForwardNorm, & $($mutable)? layer.feed_forward_norm.weight);
            add_option!(WeightRole::FeedForwardNormBias, layer.feed_forward_norm.bias);
            match & $($mutable)? layer.feed_forward {
                FeedForwardWeights::Dense(dense) => {
                    add(WeightRole::DenseGateUp, & $($mutable)? dense.gate_up);
                    add(WeightRole::DenseDown, & $($mutable)? dense.down);
                    if let Some((gate_up, down)) = & $($mutable)? dense.biases {
                        add(WeightRole::DenseGateUpBias, gate_up);
                        add(WeightRole::DenseDownBias, down);
                    }
                }
                FeedForwardWeights::Moe(moe) => {
                    add(WeightRole::Router, & $($mutable)? moe.router);
                    add_option!(WeightRole::RouterBias, moe.router_bias);
                    add(WeightRole::ExpertGateUp, & $($mutable)? moe.gate_up);
                    add(WeightRole::ExpertDown, & $($mutable)? moe.down);
                    if let Some((gate_up, down)) = & $($mutable)? moe.biases {
                        add(WeightRole::ExpertGateUpBias, gate_up);
                        add(WeightRole::ExpertDownBias, down);
                    }
                    if let Some(shared) = moe.shared.$option() {
                        add(WeightRole::SharedGateUp, & $($mutable)? shared.gate_up);
                        add(WeightRole::SharedDown, & $($mutable)? shared.down);
                        add_option!(WeightRole::SharedGate, shared.gate);
                    }
                    for extra in moe.extras.$iter() {
                        add(WeightRole::RouterExtra(extra.name), & $($mutable)? extra.tensor);
                    }
                }
            }
        }
    };
}

/// Lists all tensors with place and role, for reading or for writing, so that both have the same order.
macro_rules! list_tensors {
    ($weights:expr, $iter:ident, $option:ident $(, $mutable:tt)?) => {{
        let weights = $weights;
        let mut list = Vec::new();
        let mut of_embedding = WeightPlace::Model;
        if let Some(encoder) = weights.encoder.$option() {
            if let Some(tensor) = encoder.embedding.$option() {
                list.push((WeightPlace::Encoder, WeightRole::Embedding, tensor));
                of_embedding = WeightPlace::Decoder;
            }
            if let Some(relative) = encoder.relative.$option() {
                list.push((WeightPlace::Encoder, WeightRole::RelativeBias, relative));
            }
            list_layers!(list, WeightPlace::EncoderLayer, encoder.layers, $iter, $option $(, $mutable)?);
            list.push((WeightPlace::Encoder, WeightRole::FinalNorm, & $($mutable)? encoder.final_norm.weight));
        }
        list.push((of_embedding, WeightRole::Embedding, & $($mutable)? weights.embedding));
        let outside = WeightPlace::Model;
        if let Some(positions) = weights.positions.$option() {
            list.push((outside, WeightRole::Positions, positions));
        }
        if let Some(relative) = weights.relative.$option() {
            list.push((outside, WeightRole::RelativeBias, relative));
        }
        list_layers!(list, WeightPlace::Layer, weights.layers, $iter, $option $(, $mutable)?);
        list.push((outside, WeightRole::FinalNorm, & $($mutable)? weights.final_norm.weight));
        if let Some(bias) = weights.final_norm.bias.$option() {
            list.push((outside, WeightRole::FinalNormBias, bias));
        }
        if let Some(head) = weights.head.$option() {
            list.push((outside, WeightRole::Head, head));
        }
        if let Some(bias) = weights.head_bias.$option() {
            list.push((outside, WeightRole::HeadBias, bias));
        }
        list
    }};
}

impl LayerWeights {
    /// Lists the tensors for writing, in the order of [`DecoderWeights::tensors`].
    #[must_use]
    pub fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        let mut list = Vec::new();
        let layers = std::slice::from_mut(self);
        list_layers!(list, WeightPlace::Layer, layers, iter_mut, as_mut, mut);
        list.into_iter().map(|(_, _, tensor)| tensor).collect()
    }
}

impl DecoderWeights {
    /// Lists every tensor with its name: that of `transformers` in memory, if there is one. The order is that of
    /// computation and is always the same for a configuration.
    #[must_use]
    pub fn tensors(&self) -> Vec<(String, &Tensor)> {
        self.entries().into_iter().map(|(place, role, tensor)| (role.name(place), tensor)).collect()
    }

    /// Lists the tensors for writing, in the order of [`DecoderWeights::tensors`]. They must not be borrowed from a
    /// mapped file: [`DecoderWeights::compute_copy`] makes a copy.
    #[must_use]
    pub fn tensors_mut(&mut self) -> Vec<(String, &mut Tensor)> {
        self.entries_mut().into_iter().map(|(place, role, tensor)| (role.name(place), tensor)).collect()
    }

    /// Returns the role of each tensor, in the order of [`DecoderWeights::tensors`].
    #[must_use]
    pub fn roles(&self) -> Vec<WeightRole> {
        self.entries().into_iter().map(|(_, role, _)| role).collect()
    }

    /// Lists every tensor with its place and role, in the order of [`DecoderWeights::tensors`].
    pub(crate) fn entries(&self) -> Vec<(WeightPlace, WeightRole, &Tensor)> {
        list_tensors!(self, iter, as_ref)
    }

    /// Lists the entries as [`DecoderWeights::entries`] does, for writing.
    pub(crate) fn entries_mut(&mut self) -> Vec<(WeightPlace, WeightRole, &mut Tensor)> {
        list_tensors!(self, iter_mut, as_mut, mut)
    }

    /// Lists the routers' states with the prefixes of their names in files. They are not among
    /// [`DecoderWeights::tensors`]: they have no gradient, and the optimizer does not touch them.
    #[must_use]
    pub fn states(&self) -> Vec<(String, &Tensor)> {
        let layers = self.layers.iter().enumerate().filter_map(|(i, layer)| match &layer.feed_forward {
            FeedForwardWeights::Moe(moe) => Some((WeightPlace::Layer(i), &moe.state)),
            FeedForwardWeights::Dense(_) => None,
        });
        let name = |place, name| WeightRole::RouterExtra(name).name(place);
        layers.flat_map(|(at, states)| states.iter().map(move |state| (name(at, state.name), &state.tensor))).collect()
    }

    /// Lists the routers' states for writing, in the order of [`DecoderWeights::states`].
    pub(crate) fn states_mut(&mut self) -> Vec<&mut Tensor> {
        let layers = self.layers.iter_mut().filter_map(|layer| match &mut layer.feed_forward {
            FeedForwardWeights::Moe(moe) => Some(&mut moe.state),
            FeedForwardWeights::Dense(_) => None,
        });
        layers.flat_map(|states| states.iter_mut().map(|state| &mut state.tensor)).collect()
    }
}
