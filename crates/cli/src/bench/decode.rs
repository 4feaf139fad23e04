//! `moeworks bench decode`: how fast a model of OLMoE's shape goes on with a text, in every type of weights.
//!
//! Two layers of width 2,048 with 16 heads of 128, 64 experts of width 1,024 of which 8 a token, and a vocabulary of 8,192 (with
//! `--layers 16` OLMoE-1B-7B's own), or with `--shape` what a `config.json` describes, with weights drawn at random. A token reads the
//! weights of its experts, of attention, of the routers and of the output projection once; the share is that of the rate of reading memory,
//! which is measured between the tokens, since on a machine with neighbours it changes within seconds: both are medians. Prefill is compared
//! with a square product in the same type (in bf16 for quantized weights, which prefill multiplies in bf16, and in f32 for f16), in turn with
//! it: both are the best of three.

use std::path::Path;
use std::time::Instant;

use moeworks_infer::generation::{Sampler, SamplingOptions};
use moeworks_infer::open::{LoadedWeights, Source, WeightsToCheck};
use moeworks_model::account::Parameters;
use moeworks_model::hf::ModelFolder;
use moeworks_model::{Decoder, DecoderWeights, FeedForwardWeights, KvCache, ModelConfig, QkNorm, WeightRole};
use moeworks_ops::linear::linear;
use moeworks_ops::measure::best_seconds;
use moeworks_ops::peak::{Memory, Peaks};
use moeworks_ops::sampling::DrawnTokens;
use moeworks_ops::{Context, quantized};
use moeworks_tensor::{DType, Device, Purpose, Random, Tensor, bf16};
use moeworks_train::config::{ConfigLayers, Override, RunConfig};
use serde_json::{Value, json};

use super::median;
use crate::exit_code::ExitCode;
use crate::failure::Failure;

/// Tokens of the prompt that are in the cache before decoding is timed.
const PROMPT: usize = 32;
/// Tokens that are decoded; the median counts.
const DECODED: usize = 41;
/// Tokens after which memory is read.
const TOKENS_PER_READ: usize = 4;
/// Tokens of a prefill.
const PREFILL: usize = 512;
/// Times that a prefill and a product take turns.
const PREFILLS: usize = 3;

/// Layers of OLMoE-1B-7B.
const OLMOE_LAYERS: usize = 16;

/// Sequences that go on together, on a GPU; elsewhere one alone.
const BATCHES: [usize; 3] = [1, 8, 64];

/// What was measured with one type of weights and so many sequences together.
pub(super) struct Measured {
    dtype: DType,
    batch: usize,
    /// Bytes of weights that a step reads.
    bytes_per_step: f64,
    seconds_per_step: f64,
    read_bytes_per_s: f64,
    prefill_tokens_per_s: f64,
    share_of_product: f64,
}

impl Measured {
    fn share_of_bandwidth(&self) -> f64 {
        self.bytes_per_step / self.seconds_per_step / self.read_bytes_per_s
    }

    pub(super) fn json(&self) -> Value {
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

    /// The cells of a table under [`HEADER`].
    pub(super) fn cells(&self) -> Vec<String> {
        vec![
            format!("{:?}", self.dtype),
            self.batch.to_string(),
            format!("{:.1}", self.bytes_per_step / 1e6),
            format!("{:.3}", self.seconds_per_step * 1e3),
            format!("{:.1}", self.batch as f64 / self.seconds_per_step),
            format!("{:.1}%", 100.0 * self.share_of_bandwidth()),
            format!("{:.0}", self.prefill_tokens_per_s),
            format!("{:.1}%", 100.0 * self.share_of_product),
        ]
    }
}

pub(super) const HEADER: [&str; 8] =
    ["weights", "texts", "MB a step", "ms a step", "tokens/s", "of bandwidth", "prefill tokens/s", "of product"];

/// Returns the types that `--types` names; all of them if it names none.
pub(super) fn types(names: &[String]) -> Vec<DType> {
    const TYPES: [(&str, DType); 4] =
        [("f32", DType::F32), ("bf16", DType::BF16), ("q8", DType::Q8), ("q4", DType::Q4)];
    let is_asked = |known: &str| names.is_empty() || names.iter().any(|name| name.eq_ignore_ascii_case(known));
    TYPES.iter().filter(|(known, _)| is_asked(known)).map(|&(_, dtype)| dtype).collect()
}

/// Of the shape that a folder's `config.json` describes, or OLMoE's; of so many layers, if it is said.
pub(super) fn config(shape: Option<&Path>, num_layers: Option<usize>) -> Result<ModelConfig, Failure> {
    let Some(dir) = shape else { return Ok(of_olmoe(num_layers.unwrap_or(2))) };
    let mut config = ModelFolder::open(dir)?.config().clone();
    if config.variant.encoder.is_some() {
        return Err(Failure::input(format!("{}: has an encoder, only decoders are timed", dir.display())));
    }
    takes_prefill(&config, dir)?;
    if let Some(count) = num_layers {
        take_layers(&mut config, count, dir)?;
    }
    Ok(config)
}

/// The model with these settings of its router, each as `setting=value`.
pub(super) fn with_router(config: &ModelConfig, settings: &[String]) -> Result<ModelConfig, Failure> {
    if settings.is_empty() {
        return Ok(config.clone());
    }
    let parse = |setting: &String| Override::parse(&format!("model.router.{setting}"));
    let overrides = settings.iter().map(parse).collect::<Result<_, _>>()?;
    let mut base = RunConfig { model: config.clone(), ..RunConfig::default() };
    base.train.seq_len = base.train.seq_len.min(config.max_seq_len);
    let layers = ConfigLayers { overrides, ..ConfigLayers::default() };
    Ok(ModelConfig { router: layers.resolve_over(base)?.model.router, ..config.clone() })
}

/// Leaves so many of the layers, the first ones.
fn take_layers(config: &mut ModelConfig, count: usize, dir: &Path) -> Result<(), Failure> {
    if count > config.num_layers {
        let all = config.num_layers;
        return Err(Failure::input(format!("--layers {count}: {} has {all}", dir.display())));
    }
    config.num_layers = count;
    config.variant.dense_layers.retain(|&layer| layer < count);
    config.variant.full_attention_layers.retain(|&layer| layer < count);
    Ok(())
}

/// Whether the model takes as many tokens as a prefill has.
fn takes_prefill(config: &ModelConfig, path: &Path) -> Result<(), Failure> {
    if config.max_seq_len >= PREFILL {
        return Ok(());
    }
    let longest = config.max_seq_len;
    Err(Failure::input(format!("{}: takes {longest} tokens at most, not {PREFILL}", path.display())))
}

/// OLMoE's shape, with a small vocabulary unless it has as many layers as OLMoE.
fn of_olmoe(num_layers: usize) -> ModelConfig {
    ModelConfig {
        vocab_size: if num_layers < OLMOE_LAYERS { 8192 } else { 50304 },
        width: 2048,
        num_layers,
        num_heads: 16,
        num_kv_heads: 16,
        head_dim: 128,
        qk_norm: QkNorm::Whole,
        num_experts: 64,
        top_k: 8,
        expert_width: 1024,
        tie_embeddings: false,
        softmax_before_topk: true,
        normalize_weights: false,
        max_seq_len: 4096,
        ..ModelConfig::default()
    }
}

/// Times one type of weights: with two layers some seconds, and the memory of 873 million weights.
pub(super) fn measure(
    ctx: &Context,
    peaks: &Peaks,
    dtype: DType,
    config: &ModelConfig,
) -> Result<Vec<Measured>, Failure> {
    let decoder = Decoder::new(config.clone())?;
    let weights = random_weights(ctx, &decoder, dtype);
    timed(ctx, peaks, (&decoder, &weights), dtype)
}

/// Times a model, whatever its types are; `dtype` of the result is that of the first layer's feed-forward.
pub(super) fn measure_model(
    ctx: &Context,
    peaks: &Peaks,
    model: &Path,
    router: &[String],
) -> Result<Vec<Measured>, Failure> {
    let LoadedWeights { config: stored, weights, .. } = Source::open(model)?.load(ctx, WeightsToCheck::None)?;
    takes_prefill(&stored, model)?;
    let config = with_router(&stored, router)?;
    let tensors = |config: &ModelConfig| {
        let moe = config.moe();
        (moe.router_shape(), moe.extra_shapes(), moe.state_shapes())
    };
    if tensors(&config) != tensors(&stored) {
        let asked = router.join(" ");
        return Err(Failure::input(format!("--router {asked}: the router of {} has other weights", model.display())));
    }
    let dtype = match weights.layers.first().map(|layer| &layer.feed_forward) {
        Some(FeedForwardWeights::Moe(moe)) => moe.gate_up.dtype(),
        Some(FeedForwardWeights::Dense(dense)) => dense.gate_up.dtype(),
        None => weights.embedding.dtype(),
    };
    timed(ctx, peaks, (&Decoder::new(config)?, &weights), dtype)
}

fn timed(
    ctx: &Context,
    peaks: &Peaks,
    model: (&Decoder, &DecoderWeights),
    dtype: DType,
) -> Result<Vec<Measured>, Failure> {
    let config = model.0.config();
    let (prefill, product_rate) = prefilling(ctx, model, dtype)?;
    let batches = if ctx.device() == Device::Cpu { &BATCHES[..1] } else { &BATCHES[..] };
    let of_batch = |&batch: &usize| {
        let mut texts = Texts::new(ctx, model, batch)?;
        let (seconds_per_step, read_bytes_per_s) = decoding(ctx, peaks, &mut texts)?;
        Ok(Measured {
            dtype,
            batch,
            bytes_per_step: bytes_per_step(config, model.1, &texts.experts()?),
            seconds_per_step,
            read_bytes_per_s,
            prefill_tokens_per_s: PREFILL as f64 / prefill,
            share_of_product: prefill_flops(config) / prefill / product_rate,
        })
    };
    batches.iter().map(of_batch).collect()
}

/// Ids of prompts, each of which goes on where the one before ends.
fn ids(config: &ModelConfig, count: usize) -> Vec<u32> {
    (0..count).map(|i| (i * 7919 % config.vocab_size) as u32).collect()
}

/// Seconds a step, and bytes a second that were read from memory meanwhile: medians.
fn decoding(ctx: &Context, peaks: &Peaks, texts: &mut Texts<'_>) -> Result<(f64, f64), Failure> {
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

/// Texts that go on behind prompts of one length.
struct Texts<'a> {
    ctx: &'a Context,
    model: (&'a Decoder, &'a DecoderWeights),
    cache: KvCache,
    logits: Tensor,
    sampler: Sampler,
}

impl<'a> Texts<'a> {
    fn new(ctx: &'a Context, model: (&'a Decoder, &'a DecoderWeights), count: usize) -> Result<Self, Failure> {
        let config = model.0.config();
        let mut cache = KvCache::of_sequences(config, count);
        let logits = model.0.extend(ctx, model.1, &mut cache, &ids(config, count * PROMPT))?;
        // The most likely token, as what it is compared with takes.
        let sampler = Sampler::new(SamplingOptions { temperature: 0.0, ..SamplingOptions::default() })?;
        Ok(Self { ctx, model, cache, logits, sampler })
    }

    fn drawn(&mut self) -> DrawnTokens {
        let count = self.cache.num_sequences();
        self.sampler.sample_each(self.ctx, &self.logits, count)
    }

    /// Makes a token of each text; their seconds.
    fn next(&mut self) -> Result<f64, Failure> {
        let start = Instant::now();
        // As `generate` does: the next step begins on a GPU before the host knows what was drawn.
        let drawn = self.drawn();
        self.logits = self.model.0.extend_drawn(self.ctx, self.model.1, &mut self.cache, &drawn)?;
        assert_eq!(drawn.wait().len(), self.cache.num_sequences());
        Ok(start.elapsed().as_secs_f64())
    }

    /// How many experts of each layer the next tokens go to; 0 in layers without.
    fn experts(&mut self) -> Result<Vec<usize>, Failure> {
        let ids: Vec<u32> = self.drawn().wait().iter().map(|drawn| drawn.id).collect();
        let (decoder, weights) = self.model;
        let mut experts = vec![0; decoder.config().num_layers];
        decoder.extend_watched(self.ctx, weights, &mut self.cache, &ids, |layer, saved| {
            experts[layer] = saved.dispatch().tokens_per_expert().iter().filter(|&&count| count > 0).count();
        })?;
        Ok(experts)
    }
}

/// Prints the seconds of each token as it comes, text after text, until the process is stopped or nobody reads on.
pub(super) fn endless(ctx: &Context, model: &Path) -> Result<ExitCode, Failure> {
    let LoadedWeights { config, weights, .. } = Source::open(model)?.load(ctx, WeightsToCheck::None)?;
    let decoder = Decoder::new(config)?;
    loop {
        let mut text = Texts::new(ctx, (&decoder, &weights), 1)?;
        for _ in 0..DECODED {
            let seconds = text.next()?;
            println!("{seconds:.7}");
        }
    }
}

/// Seconds of a prefill, and operations a second of products in turn with it: the best.
fn prefilling(
    ctx: &Context,
    (decoder, weights): (&Decoder, &DecoderWeights),
    dtype: DType,
) -> Result<(f64, f64), Failure> {
    let prompt = ids(decoder.config(), PREFILL);
    let product = Square::new(ctx, dtype);
    let (mut prefill, mut product_rate) = (f64::INFINITY, 0.0_f64);
    for _ in 0..PREFILLS {
        let mut cache = KvCache::new(decoder.config());
        let start = Instant::now();
        decoder.extend(ctx, weights, &mut cache, &prompt)?;
        ctx.wait();
        prefill = prefill.min(start.elapsed().as_secs_f64());
        product_rate = product_rate.max(product.rate(ctx));
    }
    Ok((prefill, product_rate))
}

/// Weights in their types, made where they stay: the matrices of `dtype`, the embedding a float.
fn random_weights(ctx: &Context, decoder: &Decoder, dtype: DType) -> DecoderWeights {
    // Zeros that nobody touches take no memory.
    let mut weights = decoder.zero_weights(ctx);
    let roles = weights.roles();
    for (index, ((_, tensor), role)) in weights.tensors_mut().into_iter().zip(roles).enumerate() {
        if role.is_norm() {
            tensor.f32s_mut().fill(1.0);
            continue;
        }
        let dtype = match role {
            WeightRole::Embedding if dtype.is_quantized() => DType::BF16,
            role if role.is_product() => dtype,
            _ => DType::F32,
        };
        *tensor = random_tensor(ctx, tensor.shape(), dtype, index as u64);
    }
    weights
}

/// Numbers of deviation 0.02. Four of them a draw: a model's weights in seconds.
fn random_tensor(ctx: &Context, shape: &[usize], dtype: DType, stream: u64) -> Tensor {
    const PIECE: usize = 1 << 15;
    let random = Random::new(1, Purpose::Test, stream);
    let value = |word: u32| (word >> 8) as f32 * (0.0692 / 16_777_216.0) - 0.0346;
    let mut tensor = ctx.empty(shape, if dtype.is_quantized() { DType::F32 } else { dtype });
    match tensor.dtype() {
        DType::BF16 => ctx.threads().run_pieces(tensor.bf16s_mut(), PIECE, |piece, values| {
            for (values, at) in values.chunks_mut(4).zip((piece * PIECE / 4) as u64..) {
                values.iter_mut().zip(random.words(at)).for_each(|(x, word)| *x = bf16::from_f32(value(word)));
            }
        }),
        _ => ctx.threads().run_pieces(tensor.f32s_mut(), PIECE, |piece, values| {
            for (values, at) in values.chunks_mut(4).zip((piece * PIECE / 4) as u64..) {
                values.iter_mut().zip(random.words(at)).for_each(|(x, word)| *x = value(word));
            }
        }),
    }
    if dtype.is_quantized() { quantized::quantize(ctx, &tensor, dtype) } else { tensor }
}

/// Bytes of weights that a step reads: of the experts of each layer as many as are chosen, of the embedding a row, all of the rest.
fn bytes_per_step(config: &ModelConfig, weights: &DecoderWeights, experts: &[usize]) -> f64 {
    // Names are `model.layers.3.mlp.experts.gate_up_proj` and the like.
    let layer = |name: &str| name.split("layers.").nth(1)?.split('.').next()?.parse::<usize>().ok();
    let bytes = |(name, tensor): (String, &Tensor)| {
        let share = if name.contains("mlp.experts.") {
            layer(&name).map_or(0, |layer| experts[layer]) as f64 / config.num_experts as f64
        } else if name.contains("embed_tokens") {
            1.0 / config.vocab_size as f64
        } else {
            1.0
        };
        share * tensor.stored_bytes() as f64
    };
    weights.tensors().into_iter().map(bytes).sum()
}

/// Operations of a prefill: products with the weights, the last token's logits, and causal attention.
fn prefill_flops(config: &ModelConfig) -> f64 {
    let head = config.width * config.vocab_size;
    let weights = Parameters::of(config).in_products() as usize - head;
    let attention = PREFILL * PREFILL * config.num_heads * (config.head_dim + config.value_dim());
    (2 * PREFILL * weights + config.num_layers * attention + 2 * head) as f64
}

/// A square product of the size of a prefill's.
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

    /// Operations a second, the best of two tries.
    fn rate(&self, ctx: &Context) -> f64 {
        let seconds = best_seconds(2, || {
            drop(linear(ctx, &self.x, &self.w, self.x.dtype()));
            ctx.wait();
        });
        2.0 * (Self::SIZE * Self::SIZE * Self::SIZE) as f64 / seconds
    }
}
