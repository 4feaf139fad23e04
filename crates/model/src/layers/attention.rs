//! The attention block: norm, queries, keys and values, causal attention (optionally with a window and sinks), output
//! projection.
//!
//! T tokens, D width, H query heads, G key and value heads, h head width, w width of a head's values.

use moeworks_ops::Context;
use moeworks_ops::attention::{
    AttentionHeads, AttentionInputs as RaggedInputs, AttentionOutput, AttentionShape, RaggedShape, attention_backward,
    attention_biased, attention_biased_backward, attention_ragged, attention_ragged_backward, attention_with_sinks,
    sinks_backward, sinks_ragged_backward,
};
use moeworks_ops::elementwise::{self, into_type};
use moeworks_ops::linear::{Write, linear_backward_input, linear_onto};
use moeworks_tensor::{DType, Tensor};

use super::Pass;
use super::heads::{Heads, HeadsGradTask, HeadsSaved};
use super::latent::{Latent, LatentGradTask, LatentSaved};
use super::norm::{Norm, NormBackward};
use super::paged_attention::{PagedQueries, attend_to_blocks};
use super::projection::{project_grads, project_summed};
use crate::config::ModelConfig;
use crate::kv_cache::{LayerCache, LayerKv};
use crate::paged_kv_cache::PagedLayer;
use crate::split::TensorSplit;
use crate::tensor_ranks::TensorRanks;
use crate::weights::{AttentionInputs, AttentionWeights, LayerWeights};

/// The epsilon of the norms in latent attention, independent of the configured one (DeepSeek's code).
const LATENT_EPS: f32 = 1e-6;

/// An attention block.
#[derive(Clone, Debug)]
pub(crate) struct AttentionBlock {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    window: Option<usize>,
    scale: f32,
    norm: Norm,
    inputs: Inputs,
    residual_multiplier: f32,
    /// True if heads are sharded over tensor-parallel ranks.
    is_cut: bool,
}

/// The projections to queries, keys and values.
#[derive(Clone, Copy, Debug)]
enum Inputs {
    Heads(Heads),
    Latent(Latent),
}

enum InputsSaved {
    Heads(HeadsSaved),
    Latent(LatentSaved),
}

#[allow(clippy::large_enum_variant)] // lives for a moment: nothing is gained by another allocation
enum InputsGradTask {
    Heads(HeadsGradTask),
    Latent(LatentGradTask),
}

/// The activations that backward needs.
pub(crate) struct AttentionSaved {
    /// `[T, D]`: the block's input.
    x: Tensor,
    norm: Tensor,
    inputs: InputsSaved,
    qkv: [Tensor; 3],
    output: AttentionOutput,
}

/// The gradients of the block's matrices, still to be computed.
pub(crate) struct AttentionGradTask {
    inputs: InputsGradTask,
    o: Tensor,
    dy: Tensor,
    compute: DType,
    bias: Option<Vec<f32>>,
}

/// The sinks, with the tensor that their gradients are written to.
struct SinkGrads<'a> {
    sinks: &'a Tensor,
    d_sinks: &'a mut Tensor,
}

impl AttentionBlock {
    /// Makes the block of layer `i`, or the part of it with this rank's heads.
    pub(crate) fn new(config: &ModelConfig, i: usize, split: Option<&TensorSplit>) -> Self {
        let ModelConfig { head_dim, norm_eps: eps, .. } = *config;
        let (num_heads, num_kv_heads) = split.map_or((config.num_heads, config.num_kv_heads), TensorSplit::num_heads);
        let (value_dim, variant) = (config.value_dim(), &config.variant);
        let inputs = match variant.latent {
            None => Inputs::Heads(Heads { eps, clip: variant.clip_qkv, is_cut: split.is_some() }),
            Some(sizes) => Inputs::Latent(Latent { sizes, num_heads, value_dim, eps: LATENT_EPS }),
        };
        Self {
            num_heads,
            num_kv_heads,
            head_dim,
            value_dim,
            window: config.window(i),
            scale: config.attention_scale(),
            norm: Norm { eps },
            inputs,
            residual_multiplier: variant.residual_multiplier,
            is_cut: split.is_some(),
        }
    }

    /// Returns the ranks that shard the heads, if any.
    fn ranks<'a>(&self, pass: &Pass<'a>) -> Option<&'a TensorRanks> {
        pass.tensor.filter(|_| self.is_cut)
    }

    fn shape(&self, pass: &Pass<'_>, kv_len: usize, kv_capacity: usize) -> AttentionShape {
        AttentionShape {
            batch: pass.sequences.count,
            seq_len: pass.sequences.len,
            kv_len,
            kv_capacity,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
            window: self.window,
            scale: self.scale,
        }
    }

    /// Maps `x [T, D]` f32 to `y [T, D]` f32, and returns the activations that backward needs, if a backward pass
    /// follows. With `cache` the tokens continue the sequences there, and are appended; no backward pass can follow.
    pub(crate) fn forward(
        &self,
        pass: &Pass<'_>,
        weights: &LayerWeights,
        x: &Tensor,
        cache: Option<LayerKv<'_>>,
    ) -> (Tensor, Option<AttentionSaved>) {
        let w = &weights.attention;
        let (normed, norm) = self.normed(pass, weights, x);
        if let Some(cache) = cache {
            let o = match cache {
                LayerKv::Growing(cache) => self.attend_cached(pass, w, &normed, cache),
                LayerKv::Paged(layer) => self.attend_paged(pass, w, &normed, layer),
            };
            return (self.output(pass, w, &o, x), None);
        }
        let (qkv, inputs) = self.inputs.forward(pass, w, &normed);
        let output = self.attend_own(pass, &qkv, w.sinks.as_ref());
        let y = self.output(pass, w, &output.o, x);
        let saved = AttentionSaved { x: x.clone(), norm, inputs, qkv, output };
        (y, pass.mode.keeps_for_backward().then_some(saved))
    }

    /// Appends the next tokens `normed [T, D]` of the sequences in `cache`, and returns the heads' outputs.
    fn attend_cached(&self, pass: &Pass<'_>, w: &AttentionWeights, normed: &Tensor, cache: &mut LayerCache) -> Tensor {
        match (&self.inputs, &w.inputs) {
            (Inputs::Heads(heads), AttentionInputs::Heads(inputs)) => {
                let q = heads.forward_cached(pass, inputs, normed, cache);
                let [keys, values] = cache.kept() else { unreachable!("keys and values were appended") };
                let inputs = RaggedInputs { q: &q, k: keys, v: values, sinks: w.sinks.as_ref() };
                attend(pass, inputs, &self.shape(pass, cache.held(), cache.capacity())).o
            }
            (Inputs::Latent(latent), AttentionInputs::Latent(inputs)) => {
                let shape = |kv_len, kv_capacity| self.shape(pass, kv_len, kv_capacity);
                latent.forward_cached(pass, inputs, normed, cache, &shape, w.sinks.as_ref())
            }
            _ => panic!("{WRONG_KIND}"),
        }
    }

    /// Attends among the tokens of the pass, separately in each sequence or segment.
    fn attend_own(&self, pass: &Pass<'_>, [q, k, v]: &[Tensor; 3], sinks: Option<&Tensor>) -> AttentionOutput {
        let inputs = RaggedInputs { q, k, v, sinks };
        let Some(segments) = &pass.segments else {
            let len = pass.sequences.len;
            return attend(pass, inputs, &self.shape(pass, len, len));
        };
        let sequences = segments.own_sequences();
        let shape = RaggedShape { heads: self.heads(), sequences: &sequences };
        attention_ragged(pass.ctx, inputs, &shape)
    }

    /// Writes the next tokens `normed [T, D]` of paged sequences to their blocks, and returns the heads' outputs.
    fn attend_paged(&self, pass: &Pass<'_>, w: &AttentionWeights, normed: &Tensor, layer: &mut PagedLayer) -> Tensor {
        let segments = pass.segments.as_ref().expect("a paged pass has segments");
        match (&self.inputs, &w.inputs) {
            (Inputs::Heads(heads), AttentionInputs::Heads(inputs)) => {
                let ([q, k, v], _) = heads.forward(pass, inputs, normed);
                layer.write(pass.ctx, &[&k, &v], segments.runs());
                let queries = PagedQueries { q: &q, sinks: w.sinks.as_ref(), heads: self.heads() };
                attend_to_blocks(pass.ctx, &queries, layer, &segments.paged_sequences())
            }
            (Inputs::Latent(latent), AttentionInputs::Latent(inputs)) => {
                latent.forward_paged(pass, inputs, normed, layer, self.heads(), w.sinks.as_ref())
            }
            _ => panic!("{WRONG_KIND}"),
        }
    }

    /// Returns the sizes that sequences of all lengths share.
    fn heads(&self) -> AttentionHeads {
        let Self { num_heads, num_kv_heads, head_dim, value_dim, window, scale, .. } = *self;
        AttentionHeads { num_heads, num_kv_heads, head_dim, value_dim, window, scale }
    }

    fn normed(&self, pass: &Pass<'_>, weights: &LayerWeights, x: &Tensor) -> (Tensor, Tensor) {
        let dtype = weights.attention.o.weight.dtype().of_activations();
        self.norm.forward(pass.ctx, &weights.attention_norm, x, dtype)
    }

    /// Backward of [`attend_own`](Self::attend_own): returns the gradients of queries, keys and values, and of the
    /// relative position bias. Those of sinks are written.
    fn attend_own_backward(
        &self,
        pass: &Pass<'_>,
        d_o: &Tensor,
        [q, k, v]: &[Tensor; 3],
        output: &AttentionOutput,
        sinks: Option<SinkGrads<'_>>,
        write: Write,
    ) -> ([Tensor; 3], Option<Vec<f32>>) {
        let ctx = pass.ctx;
        let inputs = RaggedInputs { q, k, v, sinks: sinks.as_ref().map(|grads| grads.sinks) };
        let Some(segments) = &pass.segments else {
            let shape = self.shape(pass, pass.sequences.len, pass.sequences.len);
            if let Some(SinkGrads { sinks, d_sinks }) = sinks {
                sinks_backward(ctx, d_o, output.saved(), sinks, &shape, write, d_sinks);
            }
            return attend_backward(pass, d_o, inputs, output, &shape);
        };
        let sequences = segments.own_sequences();
        let shape = RaggedShape { heads: self.heads(), sequences: &sequences };
        let grads = attention_ragged_backward(ctx, d_o, inputs, output, &shape);
        if let Some(SinkGrads { sinks, d_sinks }) = sinks {
            sinks_ragged_backward(ctx, d_o, output, sinks, &shape, write, d_sinks);
        }
        ([grads.dq, grads.dk, grads.dv], None)
    }

    /// Projects the heads' outputs and adds them to the residual stream.
    fn output(&self, pass: &Pass<'_>, w: &AttentionWeights, o: &Tensor, x: &Tensor) -> Tensor {
        let ranks = self.ranks(pass);
        if ranks.is_none() && self.residual_multiplier == 1.0 && w.o.bias.is_none() {
            return linear_onto(pass.ctx, o, &w.o.weight, x);
        }
        let mut y = project_summed(pass.ctx, ranks, o, &w.o);
        add_residual(pass.ctx, &mut y, self.residual_multiplier, x);
        y
    }

    /// Returns the gradient of `x` from that of `y`, and the task that computes the matrices' gradients. The
    /// gradients of norm weights and sinks are written to `grads` as `write` says.
    pub(crate) fn backward(
        &self,
        pass: &Pass<'_>,
        weights: &LayerWeights,
        saved: AttentionSaved,
        dy: &Tensor,
        write: Write,
        grads: &mut LayerWeights,
    ) -> (Tensor, AttentionGradTask) {
        let (ctx, w) = (pass.ctx, &weights.attention);
        let AttentionSaved { x, norm, inputs, qkv, output } = saved;
        // Products would round it anyway; rounded once, it is half as much to read.
        let d_block = into_type(ctx, scaled(ctx, dy, self.residual_multiplier), w.o.weight.dtype());
        let d_o = linear_backward_input(ctx, &d_block, &w.o.weight, w.o.weight.dtype());
        let sinks = w.sinks.as_ref().zip(grads.attention.sinks.as_mut());
        let sinks = sinks.map(|(sinks, d_sinks)| SinkGrads { sinks, d_sinks });
        let (d_qkv, bias) = self.attend_own_backward(pass, &d_o, &qkv, &output, sinks, write);
        let AttentionOutput { o, .. } = output;
        drop(d_o);
        let inputs_grads = &mut grads.attention.inputs;
        let (mut d_normed, inputs) = self.inputs.backward(pass, w, inputs, d_qkv, write, inputs_grads);
        if let Some(ranks) = self.ranks(pass) {
            ranks.sum(&mut d_normed);
        }
        let (norm_weights, d_norm) = (&weights.attention_norm, &mut grads.attention_norm);
        let around = NormBackward { x: &x, statistics: &norm, dy: &d_normed, base: Some(dy) };
        let dx = self.norm.backward(ctx, norm_weights, around, write, d_norm);
        (dx, AttentionGradTask { inputs, o, dy: d_block, compute: w.o.weight.dtype(), bias })
    }
}

/// Attends by the rules of the pass; also returns the log-sum-exps that backward needs, empty with relative
/// positions.
pub(super) fn attend(pass: &Pass<'_>, inputs: RaggedInputs<'_>, shape: &AttentionShape) -> AttentionOutput {
    let (o, lse) = match &pass.relative {
        None => attention_with_sinks(pass.ctx, inputs, shape),
        Some(relative) => {
            let RaggedInputs { q, k, v, .. } = inputs;
            (attention_biased(pass.ctx, q, k, v, &relative.rule(), shape), pass.ctx.empty(&[0], DType::F32))
        }
    };
    AttentionOutput { o, lse }
}

/// Backward of [`attend`]: returns the gradients of queries, keys and values, and of the relative position bias.
fn attend_backward(
    pass: &Pass<'_>,
    d_o: &Tensor,
    inputs: RaggedInputs<'_>,
    output: &AttentionOutput,
    shape: &AttentionShape,
) -> ([Tensor; 3], Option<Vec<f32>>) {
    match &pass.relative {
        None => (attention_backward(pass.ctx, d_o, inputs, output.saved(), shape).into(), None),
        Some(relative) => {
            let RaggedInputs { q, k, v, .. } = inputs;
            let grads = attention_biased_backward(pass.ctx, d_o, q, k, v, &relative.rule(), shape);
            (grads.qkv, grads.bias)
        }
    }
}

/// Computes `y = multiplier y + x`.
pub(super) fn add_residual(ctx: &Context, y: &mut Tensor, multiplier: f32, x: &Tensor) {
    if multiplier != 1.0 {
        elementwise::scale_assign(ctx, y, multiplier);
    }
    elementwise::add_assign(ctx, y, x);
}

/// Returns `multiplier x`, sharing the memory if the multiplier is 1.
pub(super) fn scaled(ctx: &Context, x: &Tensor, multiplier: f32) -> Tensor {
    if multiplier == 1.0 {
        return x.clone();
    }
    let mut y = elementwise::cast(ctx, x, x.dtype());
    elementwise::scale_assign(ctx, &mut y, multiplier);
    y
}

/// The panic message for weights that do not match the model's configuration.
pub(crate) const WRONG_KIND: &str = "the weights are of another configuration than the model";

impl Inputs {
    fn forward(&self, pass: &Pass<'_>, w: &AttentionWeights, normed: &Tensor) -> ([Tensor; 3], InputsSaved) {
        match (self, &w.inputs) {
            (Self::Heads(heads), AttentionInputs::Heads(w)) => {
                let (qkv, saved) = heads.forward(pass, w, normed);
                (qkv, InputsSaved::Heads(saved))
            }
            (Self::Latent(latent), AttentionInputs::Latent(w)) => {
                let (qkv, saved) = latent.forward(pass, w, normed);
                (qkv, InputsSaved::Latent(saved))
            }
            _ => panic!("{WRONG_KIND}"),
        }
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        w: &AttentionWeights,
        saved: InputsSaved,
        grads_qkv: [Tensor; 3],
        write: Write,
        grads: &mut AttentionInputs,
    ) -> (Tensor, InputsGradTask) {
        match (self, &w.inputs, saved, grads) {
            (Self::Heads(heads), AttentionInputs::Heads(w), InputsSaved::Heads(saved), AttentionInputs::Heads(g)) => {
                let (dx, task) = heads.backward(pass, w, saved, grads_qkv, write, g);
                (dx, InputsGradTask::Heads(task))
            }
            (
                Self::Latent(latent),
                AttentionInputs::Latent(w),
                InputsSaved::Latent(saved),
                AttentionInputs::Latent(g),
            ) => {
                let (dx, task) = latent.backward(pass, w, saved, grads_qkv, write, g);
                (dx, InputsGradTask::Latent(task))
            }
            _ => panic!("{WRONG_KIND}"),
        }
    }
}

impl AttentionGradTask {
    /// Returns the gradient of the relative position bias, `[H, 2 seq_len - 1]`.
    pub(crate) fn take_bias(&mut self) -> Option<Vec<f32>> {
        self.bias.take()
    }

    /// Writes the gradients of the matrices and their biases.
    pub(crate) fn run(self, ctx: &Context, write: Write, grads: &mut AttentionWeights) {
        let Self { inputs, o, dy, compute, .. } = self;
        project_grads(ctx, &dy, &o, compute, write, &mut grads.o);
        match (inputs, &mut grads.inputs) {
            (InputsGradTask::Heads(task), AttentionInputs::Heads(grads)) => task.run(ctx, write, grads),
            (InputsGradTask::Latent(task), AttentionInputs::Latent(grads)) => task.run(ctx, write, grads),
            _ => panic!("{WRONG_KIND}"),
        }
    }
}
