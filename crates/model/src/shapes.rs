//! The shapes of a decoder's weights, from its configuration.

use moeworks_moe::{MoeWeights, NamedTensor, SharedWeights};
use moeworks_tensor::{DType, MemoryPool, Tensor};

use crate::config::{ModelConfig, NormKind, PositionKind, QkNorm};
use crate::weights::{
    AttentionInputs, AttentionWeights, CrossWeights, DecoderWeights, DenseWeights, EncoderWeights, FeedForwardWeights,
    HeadWeights, LatentWeights, LayerWeights, LinearWeights, NormWeights, Numbers,
};

/// Makes tensors of given shapes.
struct Maker<'a, F, S> {
    config: &'a ModelConfig,
    make: F,
    make_state: S,
}

/// The weights of a model of `config`, each tensor made from its shape by `make`, which is called in the order of
/// [`DecoderWeights::tensors`]; the routers' states are made by `make_state`, in the order of [`DecoderWeights::states`].
pub(crate) fn weights_with(
    config: &ModelConfig,
    make: impl FnMut(&[usize]) -> Tensor,
    make_state: impl FnMut(&[usize]) -> Tensor,
) -> DecoderWeights {
    Maker { config, make, make_state }.decoder()
}

/// The name and shape of every tensor of a model of `config`, in the order of [`DecoderWeights::tensors`].
pub(crate) fn shapes_by_name(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let pool = MemoryPool::new();
    let nothing = || Tensor::zeros(&pool, &[0], DType::F32);
    let mut shapes = Vec::new();
    let weights = weights_with(
        config,
        |shape| {
            shapes.push(shape.to_vec());
            nothing()
        },
        |_| nothing(),
    );
    weights.tensors().into_iter().map(|(name, _)| name).zip(shapes).collect()
}

// Fields are filled in the order in which they are written: that of the list of tensors.
impl<F: FnMut(&[usize]) -> Tensor, S: FnMut(&[usize]) -> Tensor> Maker<'_, F, S> {
    fn decoder(&mut self) -> DecoderWeights {
        let c = self.config;
        let (v, d) = (c.vocab_size, c.width);
        let encoder = c.of_encoder().map(|of_encoder| {
            let Self { make, make_state, .. } = self;
            Maker { config: &of_encoder, make, make_state }.encoder()
        });
        DecoderWeights {
            encoder,
            embedding: (self.make)(&[v, d]),
            positions: self.option(c.variant.positions == PositionKind::Learned, &[c.max_seq_len, d]),
            relative: self.relative(),
            layers: (0..c.num_layers).map(|i| self.layer(i)).collect(),
            final_norm: self.norm(),
            head: self.option(!c.tie_embeddings, &[v, d]),
            head_bias: self.option(c.variant.head_bias, &[v]),
        }
    }

    fn encoder(&mut self) -> EncoderWeights {
        let c = self.config;
        EncoderWeights {
            embedding: self.option(!c.tie_embeddings, &[c.vocab_size, c.width]),
            relative: self.relative(),
            layers: (0..c.num_layers).map(|i| self.layer(i)).collect(),
            final_norm: self.norm(),
        }
    }

    fn relative(&mut self) -> Option<Tensor> {
        match self.config.variant.positions {
            PositionKind::Relative { num_buckets, .. } => Some((self.make)(&[num_buckets, self.config.num_heads])),
            _ => None,
        }
    }

    fn option(&mut self, is_there: bool, shape: &[usize]) -> Option<Tensor> {
        is_there.then(|| (self.make)(shape))
    }

    fn pair(&mut self, is_there: bool, first: &[usize], second: &[usize]) -> Option<(Tensor, Tensor)> {
        is_there.then(|| ((self.make)(first), (self.make)(second)))
    }

    fn norm(&mut self) -> NormWeights {
        let shape = [self.config.width];
        NormWeights {
            weight: (self.make)(&shape),
            bias: self.option(self.config.variant.norm == NormKind::Layer, &shape),
        }
    }

    fn linear(&mut self, out: usize, inner: usize, has_bias: bool) -> LinearWeights {
        LinearWeights { weight: (self.make)(&[out, inner]), bias: self.option(has_bias, &[out]) }
    }

    fn layer(&mut self, i: usize) -> LayerWeights {
        LayerWeights {
            attention_norm: self.norm(),
            attention: self.attention(),
            cross: self.config.variant.encoder.is_some().then(|| self.cross()),
            feed_forward_norm: self.norm(),
            feed_forward: if self.config.is_moe_layer(i) {
                FeedForwardWeights::Moe(self.moe())
            } else {
                FeedForwardWeights::Dense(self.dense())
            },
        }
    }

    fn attention(&mut self) -> AttentionWeights {
        let c = self.config;
        AttentionWeights {
            inputs: match c.variant.latent {
                None => AttentionInputs::Heads(self.heads()),
                Some(_) => AttentionInputs::Latent(self.latent()),
            },
            o: self.linear(c.width, c.num_heads * c.value_dim(), c.variant.output_bias),
            sinks: self.option(c.variant.sinks, &[c.num_heads]),
        }
    }

    fn cross(&mut self) -> CrossWeights {
        let c = self.config;
        let (d, h, w) = (c.width, c.head_dim, c.value_dim());
        CrossWeights {
            norm: self.norm(),
            q: self.linear(c.num_heads * h, d, false),
            k: self.linear(c.num_kv_heads * h, d, false),
            v: self.linear(c.num_kv_heads * w, d, false),
            o: self.linear(d, c.num_heads * w, false),
        }
    }

    fn heads(&mut self) -> HeadWeights {
        let c = self.config;
        let (d, h, bias) = (c.width, c.head_dim, c.variant.qkv_bias);
        let (q, k) = (c.num_heads * h, c.num_kv_heads * h);
        let norms = match c.qk_norm {
            QkNorm::None => None,
            QkNorm::Head => Some((h, h)),
            QkNorm::Whole => Some((q, k)),
        };
        HeadWeights {
            q: self.linear(q, d, bias),
            k: self.linear(k, d, bias),
            v: self.linear(c.num_kv_heads * c.value_dim(), d, bias),
            q_norm: norms.map(|(q, _)| (self.make)(&[q])),
            k_norm: norms.map(|(_, k)| (self.make)(&[k])),
        }
    }

    fn latent(&mut self) -> LatentWeights {
        let c = self.config;
        let latent = c.variant.latent.expect("latent attention");
        let (d, h, bias) = (c.width, c.num_heads, c.variant.qkv_bias);
        let (rank, kv_rank) = (latent.query_rank, latent.kv_rank);
        LatentWeights {
            q_down: (rank > 0).then(|| (self.linear(rank, d, bias), (self.make)(&[rank]))),
            q: (self.make)(&[h * c.head_dim, if rank > 0 { rank } else { d }]),
            kv_down: self.linear(kv_rank + latent.rotary_dim, d, bias),
            kv_norm: (self.make)(&[kv_rank]),
            kv: (self.make)(&[h * (latent.plain_dim + c.value_dim()), kv_rank]),
            kv_numbers: Numbers::default(),
        }
    }

    fn moe(&mut self) -> MoeWeights {
        let c = self.config;
        let a = c.moe().activation.num_inputs();
        let (d, e, f, s) = (c.width, c.num_experts, c.expert_width, c.shared_width);
        MoeWeights {
            router: (self.make)(&c.moe().router_shape()),
            router_bias: self.option(c.variant.router_bias, &[e]),
            gate_up: (self.make)(&[e, a * f, d]),
            down: (self.make)(&[e, d, f]),
            biases: self.pair(c.variant.feed_forward_bias, &[e, a * f], &[e, d]),
            shared: (s > 0).then(|| SharedWeights {
                gate_up: (self.make)(&[a * s, d]),
                down: (self.make)(&[d, s]),
                gate: self.option(c.variant.shared_gate, &[1, d]),
            }),
            extras: self.extras(),
            state: self.states(),
        }
    }

    /// Weights of a router that only some schemes have.
    fn extras(&mut self) -> Vec<NamedTensor> {
        let shapes = self.config.moe().extra_shapes().into_iter();
        shapes.map(|extra| NamedTensor { name: extra.name, tensor: (self.make)(&extra.shape) }).collect()
    }

    /// What a router keeps besides weights. Not among the list of tensors.
    fn states(&mut self) -> Vec<NamedTensor> {
        let shapes = self.config.moe().state_shapes().into_iter();
        shapes.map(|state| NamedTensor { name: state.name, tensor: (self.make_state)(&state.shape) }).collect()
    }

    fn dense(&mut self) -> DenseWeights {
        let c = self.config;
        let (d, af) = (c.width, c.moe().activation.num_inputs() * c.dense_width);
        DenseWeights {
            gate_up: (self.make)(&[1, af, d]),
            down: (self.make)(&[1, d, c.dense_width]),
            biases: self.pair(c.variant.feed_forward_bias, &[1, af], &[1, d]),
        }
    }
}
