//! The weights of an MoE layer, in a structure that holds their gradients as well.

use moeworks_ops::elementwise::fill_normal;
use moeworks_ops::experts::{ExpertBiases, ExpertWeights};
use moeworks_ops::{Activation, Context};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::MoeConfig;

/// The weights of an MoE layer, or their gradients: f32, except that those of the experts' matrices may be bf16. `A`
/// is 2 with a gated activation, 1 otherwise.
#[derive(Clone, Debug)]
pub struct MoeWeights {
    /// `[E, D]`, always f32: the router's logits are `x router^T`. See [`MoeConfig::router_shape`] for other schemes.
    pub router: Tensor,
    /// `[E]` f32: added to the router's logits; none without a bias.
    pub router_bias: Option<Tensor>,
    /// `[E, A F, D]`, f32 or bf16; with a gated activation the gate's F rows come first in each expert.
    pub gate_up: Tensor,
    /// `[E, D, F]`, of the type of `gate_up`.
    pub down: Tensor,
    /// The experts' biases, f32: `[E, A F]` before the activation and `[E, D]` after the down projection.
    pub biases: Option<(Tensor, Tensor)>,
    /// The shared experts, if the layer has any.
    pub shared: Option<SharedWeights>,
    /// Weights of the router that only some schemes have, [`MoeConfig::extra_shapes`]; f32.
    pub extras: Vec<NamedTensor>,
    /// Router state besides the weights that lasts from step to step, such as `e_score_correction_bias`; f32. It has
    /// no gradient and is not among [`tensors`](Self::tensors). Unused in a structure of gradients.
    pub state: Vec<NamedTensor>,
}

/// A named tensor of a router, for schemes that have more than the router's weight.
#[derive(Clone, Debug)]
pub struct NamedTensor {
    /// The name, appended to the router's own name in files.
    pub name: &'static str,
    /// The values, f32.
    pub tensor: Tensor,
}

impl NamedTensor {
    /// Applies `f` to the tensor and keeps the name.
    #[must_use]
    pub fn map(&self, f: impl FnOnce(&Tensor) -> Tensor) -> Self {
        Self { name: self.name, tensor: f(&self.tensor) }
    }
}

/// The weights of all shared experts as one dense feed-forward of width S.
#[derive(Clone, Debug)]
pub struct SharedWeights {
    /// `[A S, D]`, f32 or bf16; with a gated activation the gate's S rows come first.
    pub gate_up: Tensor,
    /// `[D, S]`, of the type of `gate_up`.
    pub down: Tensor,
    /// `[1, D]` f32: the weight of the sigmoid gate that multiplies the shared experts' output; none for no gate.
    pub gate: Option<Tensor>,
}

/// The random streams of initial weights: a seed and the first stream's number.
#[derive(Clone, Copy)]
struct InitStreams {
    seed: u64,
    first: u64,
}

/// Returns whether a gradient is left out of a pass because its weight is frozen. Its shape is then `[0]`.
#[must_use]
pub fn is_left_out(grad: &Tensor) -> bool {
    *grad.shape() == [0]
}

/// Returns `[experts, ..]`: the given rows of a tensor `[E, ..]`.
#[must_use]
pub fn select_experts(ctx: &Context, tensor: &Tensor, experts: &[usize]) -> Tensor {
    let mut shape = tensor.shape().to_vec();
    let bytes = tensor.num_bytes() / shape[0].max(1);
    shape[0] = experts.len();
    let mut selected = ctx.empty(&shape, tensor.dtype());
    for (to, &expert) in selected.bytes_mut().chunks_exact_mut(bytes.max(1)).zip(experts) {
        tensor.read_bytes(expert * bytes, to);
    }
    selected
}

impl MoeWeights {
    /// Creates zeros in the shapes of `config`. The router is f32, everything else `dtype`.
    #[must_use]
    pub fn zeros(ctx: &Context, config: &MoeConfig, dtype: DType) -> Self {
        let a = config.activation.num_inputs();
        let (e, d, f, s) = (config.num_experts, config.width, config.expert_width, config.shared_width);
        Self {
            router: ctx.zeros(&config.router_shape(), DType::F32),
            router_bias: None,
            gate_up: ctx.zeros(&[e, a * f, d], dtype),
            down: ctx.zeros(&[e, d, f], dtype),
            biases: None,
            shared: (s > 0).then(|| SharedWeights {
                gate_up: ctx.zeros(&[a * s, d], dtype),
                down: ctx.zeros(&[d, s], dtype),
                gate: None,
            }),
            extras: config.zero_extras(ctx),
            state: config.first_state(ctx),
        }
    }

    /// Draws f32 weights from a normal distribution of standard deviation `std`, truncated at three.
    #[must_use]
    pub fn random(ctx: &Context, config: &MoeConfig, seed: u64, std: f32) -> Self {
        let mut weights = Self::zeros(ctx, config, DType::F32);
        for (i, tensor) in weights.tensors_mut().into_iter().enumerate() {
            fill_normal(ctx, &Random::new(seed, Purpose::Init, i as u64), std, tensor);
        }
        weights.init_extras(ctx, config, InitStreams { seed, first: 1 << 32 }, std);
        weights
    }

    /// Initialises the weights that only some schemes have, each from a stream of its own.
    fn init_extras(&mut self, ctx: &Context, config: &MoeConfig, streams: InitStreams, std: f32) {
        let random = |i: usize| Random::new(streams.seed, Purpose::Init, streams.first + i as u64);
        let shapes = config.extra_shapes().into_iter().enumerate();
        self.extras = shapes.map(|(i, shape)| NamedTensor::first(ctx, &shape, &random(i), std)).collect();
    }

    /// Returns the number of elements in the matrices of one expert.
    pub(crate) fn expert_params(&self) -> usize {
        let per_expert = |tensor: &Tensor| tensor.shape()[1..].iter().product::<usize>();
        per_expert(&self.gate_up) + per_expert(&self.down)
    }

    /// Returns the layer with the given experts only, in this order. Their weights are copied; everything else is
    /// shared.
    #[must_use]
    pub fn select_experts(&self, ctx: &Context, experts: &[usize]) -> Self {
        let select = |tensor: &Tensor| select_experts(ctx, tensor, experts);
        Self {
            gate_up: select(&self.gate_up),
            down: select(&self.down),
            biases: self.biases.as_ref().map(|(gate_up, down)| (select(gate_up), select(down))),
            ..self.clone()
        }
    }

    /// Returns the tensors, in the order of the fields.
    #[must_use]
    pub fn tensors(&self) -> Vec<&Tensor> {
        let biases = self.biases.iter().flat_map(|(gate_up, down)| [gate_up, down]);
        let shared = self.shared.iter().flat_map(|s| [Some(&s.gate_up), Some(&s.down), s.gate.as_ref()]).flatten();
        let experts = [&self.gate_up, &self.down].into_iter().chain(biases);
        let extras = self.extras.iter().map(|extra| &extra.tensor);
        [&self.router].into_iter().chain(&self.router_bias).chain(experts).chain(shared).chain(extras).collect()
    }

    /// Returns the tensors for writing, in the order of the fields.
    #[must_use]
    pub fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        let biases = self.biases.iter_mut().flat_map(|(gate_up, down)| [gate_up, down]);
        let shared = self.shared.iter_mut().flat_map(|s| [Some(&mut s.gate_up), Some(&mut s.down), s.gate.as_mut()]);
        let experts = [&mut self.gate_up, &mut self.down].into_iter().chain(biases);
        let extras = self.extras.iter_mut().map(|extra| &mut extra.tensor);
        let router = [&mut self.router].into_iter().chain(&mut self.router_bias);
        router.chain(experts).chain(shared.flatten()).chain(extras).collect()
    }

    /// Returns the state named `name`. Panics if the configuration has none.
    pub(crate) fn state(&self, name: &str) -> &Tensor {
        let found = self.state.iter().find(|state| state.name == name);
        &found.unwrap_or_else(|| panic!("the weights of an MoE layer have no {name}")).tensor
    }

    /// Returns the scheme's weight named `name`. Panics if the configuration has none.
    pub(crate) fn extra(&self, name: &str) -> &Tensor {
        let found = self.extras.iter().find(|extra| extra.name == name);
        &found.unwrap_or_else(|| panic!("the weights of an MoE layer have no {name}")).tensor
    }

    /// Returns the scheme's weight named `name` for writing. Panics if the configuration has none.
    pub(crate) fn extra_mut(&mut self, name: &str) -> &mut Tensor {
        let found = self.extras.iter_mut().find(|extra| extra.name == name);
        &mut found.unwrap_or_else(|| panic!("the weights of an MoE layer have no {name}")).tensor
    }

    pub(crate) fn experts(&self, activation: Activation) -> ExpertWeights<'_> {
        ExpertWeights { gate_up: &self.gate_up, down: &self.down, activation }
    }

    pub(crate) fn expert_biases(&self) -> Option<ExpertBiases<'_>> {
        self.biases.as_ref().map(|(gate_up, down)| ExpertBiases { gate_up, down })
    }

    /// Panics if a tensor does not have the shape that `config` asks for, with `e` experts on this rank.
    pub(crate) fn check(&self, config: &MoeConfig, e: usize) {
        let a = config.activation.num_inputs();
        let (d, f, s) = (config.width, config.expert_width, config.shared_width);
        let router = config.router_shape();
        assert_eq!((self.router.shape(), self.router.dtype()), (&router[..], DType::F32), "router of an MoE layer");
        for (extra, shape) in self.extras.iter().zip(config.extra_shapes()) {
            assert_eq!(extra.tensor.shape(), shape.shape, "{} of an MoE layer", shape.name);
        }
        if let Some(bias) = &self.router_bias {
            assert_eq!((bias.len(), bias.dtype()), (config.num_choosable(), DType::F32), "bias of a router");
        }
        assert_eq!(self.gate_up.shape(), [e, a * f, d], "gate_up of an MoE layer");
        if let Some((gate_up, down)) = &self.biases {
            assert_eq!((gate_up.shape(), down.shape()), (&[e, a * f][..], &[e, d][..]), "biases of experts");
        }
        assert_eq!(self.down.shape(), [e, d, f], "down of an MoE layer");
        assert_eq!(self.shared.is_some(), s > 0, "whether an MoE layer has shared experts");
        if let Some(shared) = &self.shared {
            assert_eq!(shared.gate_up.shape(), [a * s, d], "gate_up of shared experts");
            assert_eq!(shared.down.shape(), [d, s], "down of shared experts");
            if let Some(gate) = &shared.gate {
                assert_eq!((gate.shape(), gate.dtype()), (&[1, d][..], DType::F32), "gate of shared experts");
            }
        }
    }
}
