//! The context of a pass, which all layers share.

use std::sync::Arc;

use moeworks_moe::{ExpertIds, FixedCapacity, RouterInput};
use moeworks_ops::Context;
use moeworks_ops::experts::AllRows;
use moeworks_ops::linear::Write;
use moeworks_ops::rope::RopeTable;
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use super::cross::EncoderOutput;
use super::layer::{Flow, Layer};
use super::relative::Relative;
use super::segments::Segments;
use crate::mode::Mode;
use crate::pass::{PassOptions, RouterNoise};
use crate::tensor_ranks::TensorRanks;

/// The sequences of a pass, of equal length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sequences {
    /// The number of sequences.
    pub(crate) count: usize,
    /// The number of tokens of each.
    pub(crate) len: usize,
    /// The position of the first of these tokens in its sequence.
    pub(crate) start: usize,
}

impl Sequences {
    /// Returns whole sequences, from their first token on.
    pub(crate) fn whole(count: usize, len: usize) -> Self {
        Self { count, len, start: 0 }
    }

    /// Returns the number of tokens, T.
    pub(crate) fn num_tokens(&self) -> usize {
        self.count * self.len
    }

    /// Returns the position after the last token of each sequence.
    pub(crate) fn end(&self) -> usize {
        self.start + self.len
    }

    /// `[T]` u32: the position of each token in its sequence.
    fn positions(&self, ctx: &Context) -> Tensor {
        let mut positions = ctx.empty(&[self.num_tokens()], DType::U32);
        for (t, position) in positions.u32s_mut().iter_mut().enumerate() {
            *position = (self.start + t % self.len) as u32;
        }
        positions
    }
}

/// The inputs of routers that are the same in all layers of a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouterRules<'a> {
    /// `[T]`; empty while the host does not know them.
    token_ids: &'a [u32],
    first_token: usize,
    progress: f64,
    noise: Option<NoiseStreams>,
    has_sequence_loss: bool,
    has_gshard_loss: bool,
}

/// The random streams of a pass, one per layer.
#[derive(Clone, Copy, Debug)]
struct NoiseStreams {
    seed: u64,
    /// The stream of the model's first layer.
    first: u64,
}

impl<'a> RouterRules<'a> {
    /// Returns the rules of a training pass over a model of `num_layers` layers.
    pub(crate) fn training(token_ids: &'a [u32], options: &PassOptions, num_layers: usize) -> Self {
        // Each pass has as many consecutive streams as there are layers.
        let streams = |RouterNoise { seed, step }| NoiseStreams { seed, first: step.wrapping_mul(num_layers as u64) };
        Self {
            token_ids,
            first_token: options.first_token,
            progress: options.progress,
            noise: options.noise.map(streams),
            has_sequence_loss: options.sequence_coef != 0.0,
            has_gshard_loss: options.has_gshard_loss(),
        }
    }

    /// Returns the rules of a pass over `sequences` without losses and noise.
    pub(crate) fn plain(token_ids: &'a [u32], sequences: &Sequences) -> Self {
        let first_token = sequences.start * sequences.count;
        Self { token_ids, first_token, progress: 1.0, noise: None, has_sequence_loss: false, has_gshard_loss: false }
    }

    /// Returns the rules of the pass of a rank without tokens.
    pub(crate) fn without_tokens(has_gshard_loss: bool) -> Self {
        let none = Sequences { count: 0, len: 0, start: 0 };
        RouterRules { has_gshard_loss, ..RouterRules::plain(&[], &none) }
    }

    /// Returns the input of the router of layer `number`. This alone derives the flags that routers read from `mode`.
    pub(crate) fn input<'b>(&self, mode: Mode, number: usize) -> RouterInput<'b>
    where
        'a: 'b,
    {
        let stream =
            |noise: NoiseStreams| Random::new(noise.seed, Purpose::Router, noise.first.wrapping_add(number as u64));
        RouterInput {
            noise: self.noise.map(stream),
            token_ids: self.token_ids,
            progress: self.progress,
            first_token: self.first_token,
            is_inference: !mode.has_training_rules(),
            is_forward_only: !mode.keeps_for_backward(),
            has_gshard_loss: self.has_gshard_loss,
            ..RouterInput::default()
        }
    }
}

/// The context of a pass, which all layers share.
pub(crate) struct Pass<'a> {
    pub(crate) ctx: &'a Context,
    /// The mode of the pass.
    pub(crate) mode: Mode,
    pub(crate) sequences: Sequences,
    /// The segments that do not attend to each other, if these are not the sequences.
    pub(crate) segments: Option<Segments>,
    /// `[T]` u32: the position of each token in its sequence.
    pub(crate) positions: Tensor,
    /// The rotary table; none without a rotary embedding.
    pub(crate) rope: Option<Arc<RopeTable>>,
    /// The relative position bias, if there is one.
    pub(crate) relative: Option<Relative>,
    /// The encoder's output, in a decoder with an encoder.
    pub(crate) encoder_output: Option<EncoderOutput>,
    /// The ranks of tensor parallelism, if any.
    pub(crate) tensor: Option<&'a TensorRanks>,
    /// The rows of a dense feed-forward, which is a single expert that takes all of them.
    pub(crate) all_rows: Arc<AllRows>,
    /// The experts to use instead of the routers' choice, for each MoE layer of the decoder; empty if routers choose.
    pub(crate) expert_ids: &'a [ExpertIds],
    router: RouterRules<'a>,
}

impl<'a> Pass<'a> {
    /// Begins a pass over `sequences` without a position bias, ranks or encoder output.
    pub(crate) fn new(ctx: &'a Context, mode: Mode, sequences: Sequences, router: RouterRules<'a>) -> Self {
        Self {
            ctx,
            mode,
            segments: None,
            positions: sequences.positions(ctx),
            rope: None,
            relative: None,
            encoder_output: None,
            tensor: None,
            all_rows: Arc::new(AllRows::new(ctx, sequences.num_tokens())),
            sequences,
            expert_ids: &[],
            router,
        }
    }

    /// Returns the token ids; empty while the host does not know them.
    pub(crate) fn token_ids(&self) -> &'a [u32] {
        self.router.token_ids
    }

    /// Returns the input of the router of `layer`. `previous` are the logits of the previous MoE layer.
    pub(crate) fn router_input<'b>(&'b self, layer: &Layer, previous: Option<&'b Tensor>) -> RouterInput<'b> {
        let group_tokens = self.sequences.len;
        let capacity = FixedCapacity { num_tokens: layer.expert_capacity as u32, group_tokens };
        RouterInput {
            capacity: (layer.expert_capacity > 0).then_some(capacity),
            seq_len: if self.router.has_sequence_loss { self.sequences.len } else { 0 },
            previous,
            expert_ids: layer.moe_index.and_then(|index| self.expert_ids.get(index)),
            ..self.router.input(self.mode, layer.number)
        }
    }

    /// Computes the gradient of the relative position bias, if there is one, from its sum over layers.
    pub(crate) fn relative_backward(&self, flow: &Flow, write: Write, grads: Option<&mut Tensor>) {
        if let (Some(relative), Some(d_bias), Some(grads)) = (&self.relative, &flow.d_bias, grads) {
            relative.backward(d_bias, write, grads);
        }
    }
}
