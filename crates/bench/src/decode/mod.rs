//! The speed of generation and of prefill: tokens per second, and the share of the memory bandwidth and of a GEMM's
//! rate.
//!
//! By default the model has OLMoE's shape with random weights: two layers of width 2,048 with 16 heads of 128, 64
//! experts of width 1,024 of which 8 per token, and a vocabulary of 8,192 (with 16 layers, OLMoE-1B-7B's own). A
//! token reads the weights of its experts, of attention, of the routers and of the output projection once. The
//! reported share is relative to the rate of reading memory, which is measured between the tokens because it changes
//! within seconds on a shared machine. Both are medians. Prefill takes turns with a square GEMM in the same type (in
//! bf16 for quantized weights, which prefill multiplies in bf16, and in f32 for f16); both are the best of three.

mod shapes;

use std::time::Instant;

use moeworks_infer::generation::{Sampler, SamplingOptions};
use moeworks_model::model_cost::Parameters;
use moeworks_model::{
    Decoder, DecoderWeights, FeedForwardWeights, KvCache, ModelConfig, WeightPlace, WeightRole, WeightSpec,
};
use moeworks_ops::Context;
use moeworks_ops::linear::linear;
use moeworks_ops::peak::{Memory, Peaks};
use moeworks_ops::sampling::DrawnTokens;
use moeworks_tensor::{DType, Device, Tensor};
use serde_json::{Value, json};

use crate::error::BenchError;
use crate::timing::{best_seconds, median};
use shapes::{random_tensor, random_weights};

pub use shapes::{check_prefill, read_shape};

/// The number of prompt tokens in the cache before generation is timed.
const PROMPT: usize = 32;
/// The number of decoded tokens, of whose times the median counts.
const DECODED: usize = 41;
/// The number of tokens between two measurements of memory.
const TOKENS_PER_READ: usize = 4;
/// The number of tokens of a prefill.
const PREFILL: usize = 512;
/// The number of turns of a prefill and a GEMM.
const PREFILLS: usize = 3;

/// The model to time.
#[derive(Clone, Copy)]
pub struct Model<'a> {
    /// The configured layers of the model.
    pub decoder: &'a Decoder,
    /// The weights of the model.
    pub weights: &'a DecoderWeights,
}

/// The speed with one type of weights and one batch size.
#[derive(Clone, Debug)]
pub struct DecodeSpeed {
    /// The type of the first layer's feed-forward weights.
    pub dtype: DType,
    /// The number of sequences generated together.
    pub batch: usize,
    /// The bytes of weights that a step reads.
    pub bytes_per_step: f64,
    /// The median time of a step, which adds a token to each sequence, in seconds.
    pub seconds_per_step: f64,
    /// The median rate of reading memory, measured in between.
    pub read_bytes_per_s: f64,
    /// The number of prompt tokens per second.
    pub prefill_tokens_per_s: f64,
    /// The share of a GEMM's rate that prefill reaches.
    pub share_of_product: f64,
}

impl DecodeSpeed {
    /// Returns the share of the memory bandwidth that a step reaches.
    #[must_use]
    pub fn share_of_bandwidth(&self) -> f64 {
        self.bytes_per_step / self.seconds_per_step / self.read_bytes_per_s
    }

    /// Returns the figures as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "name": format!("decode, {:?}", self.dtype),
            "batch": self.batch,
            "bytes_per_token": self.bytes_per_step / self.batch as f64,
            "seconds_per_token": self.seconds_per_step / self.batch as f64,
            "tokens_per_s": self.batch as f64 / self.seconds_per_step,
            "read_bytes_per_s": self.read_bytes_per_s,
            "share_of_bandwidth": self.share_of_bandwidth(),
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "prefill_share_of_product": self.share_of_product,
        })
    }
}

/// Times a model with random weights of type `dtype`, with each of these numbers of sequences. Two layers of OLMoE
/// take a few seconds, and the memory of 873 million weights.
///
/// # Errors
/// [`BenchError`] where the configuration cannot be computed.
pub fn measure_shape(
    ctx: &Context,
    peaks: &Peaks,
    dtype: DType,
    config: &ModelConfig,
    batches: &[usize],
) -> Result<Vec<DecodeSpeed>, BenchError> {
    let decoder = Decoder::new(config.clone())?;
    let weights = random_weights(ctx, &decoder, dtype);
    timed(ctx, peaks, Model { decoder: &decoder, weights: &weights }, dtype, batches)
}

/// Times a model with its own weights, whatever their types, with each of these numbers of sequences.
///
/// # Errors
/// [`BenchError`] where the model cannot be computed.
pub fn measure_model(
    ctx: &Context,
    peaks: &Peaks,
    model: Model<'_>,
    batches: &[usize],
) -> Result<Vec<DecodeSpeed>, BenchError> {
    let dtype = match model.weights.layers.first().map(|layer| &layer.feed_forward) {
        Some(FeedForwardWeights::Moe(moe)) => moe.gate_up.dtype(),
        Some(FeedForwardWeights::Dense(dense)) => dense.gate_up.dtype(),
        None => model.weights.embedding.dtype(),
    };
    timed(ctx, peaks, model, dtype, batches)
}

/// Generates texts without end and passes the seconds of each token to `report`.
///
/// # Errors
/// [`BenchError`] where the model cannot be computed; otherwise it does not return.
pub fn generate_endlessly(
    ctx: &Context,
    model: Model<'_>,
    mut report: impl FnMut(f64),
) -> Result<std::convert::Infallible, BenchError> {
    loop {
        let mut text = Texts::new(ctx, model, 1)?;
        for _ in 0..DECODED {
            report(text.next()?);
        }
    }
}

fn timed(
    ctx: &Context,
    peaks: &Peaks,
    model: Model<'_>,
    dtype: DType,
    batches: &[usize],
) -> Result<Vec<DecodeSpeed>, BenchError> {
    let config = model.decoder.config();
    let (prefill, product_rate) = prefilling(ctx, model, dtype)?;
    let of_batch = |&batch: &usize| {
        let mut texts = Texts::new(ctx, model, batch)?;
        let (seconds_per_step, read_bytes_per_s) = decoding(ctx, peaks, &mut texts)?;
        Ok(DecodeSpeed {
            dtype,
            batch,
            bytes_per_step: bytes_per_step(model, &texts.experts()?),
            seconds_per_step,
            read_bytes_per_s,
            prefill_tokens_per_s: PREFILL as f64 / prefill,
            share_of_product: prefill_flops(config) / prefill / product_rate,
        })
    };
    batches.iter().map(of_batch).collect()
}

/// Returns the ids of the next prompts.
fn ids(config: &ModelConfig, count: usize) -> Vec<u32> {
    (0..count).map(|i| (i * 7919 % config.vocab_size) as u32).collect()
}

/// Returns the median time of a step in seconds, and the median bytes per second read from memory in between.
fn decoding(ctx: &Context, peaks: &Peaks, texts: &mut Texts<'_>) -> Result<(f64, f64), BenchError> {
    let memory = (ctx.device() == Device::Cpu).then(Memory::default);
    let (mut times, mut rates) = (Vec::new(), Vec::new());
    for token in 0..DECODED {
        times.push(texts.next()?);
        if token % TOKENS_PER_READ == 0 {
            rates.push(memory.as_ref().map_or(peaks.read_bytes_per_s, |memory| memory.read(ctx)));
        }
    }
    Ok((median(times), median(rates)))
}

/// Texts that are generated after prompts of one length.
struct Texts<'a> {
    ctx: &'a Context,
    model: Model<'a>,
    cache: KvCache,
    logits: Tensor,
    sampler: Sampler,
}

impl<'a> Texts<'a> {
    fn new(ctx: &'a Context, model: Model<'a>, count: usize) -> Result<Self, BenchError> {
        let config = model.decoder.config();
        let mut cache = KvCache::with_sequences(config, count);
        let logits =
            model.decoder.forward_cached(ctx, model.weights, &mut cache, &ids(config, count * PROMPT), None)?;
        // The likeliest token is chosen, as in the programs used for comparison.
        let sampler = Sampler::new(SamplingOptions { temperature: 0.0, ..SamplingOptions::default() })?;
        Ok(Self { ctx, model, cache, logits, sampler })
    }

    fn drawn(&mut self) -> DrawnTokens {
        let count = self.cache.num_sequences();
        self.sampler.sample_each(self.ctx, &self.logits, count)
    }

    /// Generates a token of each text and returns the time in seconds.
    fn next(&mut self) -> Result<f64, BenchError> {
        let start = Instant::now();
        // The next step starts on a GPU before the host knows the sampled tokens, as in `generate`.
        let drawn = self.drawn();
        self.logits = self.model.decoder.step_async(self.ctx, self.model.weights, &mut self.cache, &drawn)?;
        assert_eq!(drawn.wait().len(), self.cache.num_sequences());
        Ok(start.elapsed().as_secs_f64())
    }

    /// Returns the number of experts per layer that the next tokens use; 0 in layers without experts.
    fn experts(&mut self) -> Result<Vec<usize>, BenchError> {
        let ids: Vec<u32> = self.drawn().wait().iter().map(|drawn| drawn.id).collect();
        let Model { decoder, weights } = self.model;
        let mut experts = vec![0; decoder.config().num_layers];
        decoder.forward_cached(
            self.ctx,
            weights,
            &mut self.cache,
            &ids,
            Some(&mut |layer, saved| {
                experts[layer] = saved.dispatch().tokens_per_expert().iter().filter(|&&count| count > 0).count();
            }),
        )?;
        Ok(experts)
    }
}

/// Returns the time of a prefill in seconds, and the operations per second of GEMMs in turns with it: the best of
/// each.
fn prefilling(ctx: &Context, Model { decoder, weights }: Model<'_>, dtype: DType) -> Result<(f64, f64), BenchError> {
    let prompt = ids(decoder.config(), PREFILL);
    let product = Square::new(ctx, dtype);
    let (mut prefill, mut product_rate) = (f64::INFINITY, 0.0_f64);
    for _ in 0..PREFILLS {
        let mut cache = KvCache::new(decoder.config());
        let start = Instant::now();
        decoder.forward_cached(ctx, weights, &mut cache, &prompt, None)?;
        ctx.wait();
        prefill = prefill.min(start.elapsed().as_secs_f64());
        product_rate = product_rate.max(product.rate(ctx));
    }
    Ok((prefill, product_rate))
}

/// Returns the bytes of weights that a step reads: the chosen experts of each layer, a row of the embedding, and all
/// other weights.
fn bytes_per_step(model: Model<'_>, experts: &[usize]) -> f64 {
    let config = model.decoder.config();
    let share = |spec: &WeightSpec| match (spec.role, spec.place) {
        (role, WeightPlace::Layer(layer)) if role.is_of_experts() => experts[layer] as f64 / config.num_experts as f64,
        (WeightRole::Embedding, _) => 1.0 / config.vocab_size as f64,
        _ => 1.0,
    };
    let tensors = model.weights.tensors();
    let specs = model.decoder.weight_table().specs();
    specs.iter().zip(tensors).map(|(spec, (_, tensor))| share(spec) * tensor.stored_bytes() as f64).sum()
}

/// Returns the floating-point operations of a prefill: GEMMs with the weights, the last token's logits, and causal
/// attention.
fn prefill_flops(config: &ModelConfig) -> f64 {
    let head = config.width * config.vocab_size;
    let weights = Parameters::new(config).in_products() as usize - head;
    let attention = PREFILL * PREFILL * config.num_heads * (config.head_dim + config.value_dim());
    (2 * PREFILL * weights + config.num_layers * attention + 2 * head) as f64
}

/// A square GEMM of a prefill's size.
struct Square {
    x: Tensor,
    w: Tensor,
}

impl Square {
    const SIZE: usize = 2048;

    fn new(ctx: &Context, dtype: DType) -> Self {
        let dtype = match dtype {
            DType::F16 => DType::F32,
            dtype if dtype.is_quantized() => DType::BF16,
            dtype => dtype,
        };
        let [x, w] = [1, 2].map(|stream| random_tensor(ctx, &[Self::SIZE; 2], dtype, stream));
        Self { x, w }
    }

    /// Returns operations per second, the best of two tries.
    fn rate(&self, ctx: &Context) -> f64 {
        let seconds = best_seconds(2, || {
            drop(linear(ctx, &self.x, &self.w, self.x.dtype()));
            ctx.wait();
        });
        2.0 * (Self::SIZE * Self::SIZE * Self::SIZE) as f64 / seconds
    }
}
