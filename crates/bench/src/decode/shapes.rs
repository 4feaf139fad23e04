//! Models without stored weights: shapes and random weights.

use std::path::Path;

use moeworks_model::hf::ModelFolder;
use moeworks_model::{Decoder, DecoderWeights, ModelConfig, QkNorm, WeightRole};
use moeworks_moe::ScoreOrder;
use moeworks_ops::{Context, quantized};
use moeworks_tensor::{DType, Purpose, Random, Tensor, bf16};

use super::PREFILL;
use crate::error::BenchError;

/// The number of layers of OLMoE-1B-7B.
const OLMOE_LAYERS: usize = 16;

/// Returns the configuration in a folder's `config.json`, or OLMoE's. Both are reduced to `num_layers` layers if
/// given.
///
/// # Errors
/// [`BenchError`] where the file cannot be read or describes no decoder that can be timed.
pub fn read_shape(shape: Option<&Path>, num_layers: Option<usize>) -> Result<ModelConfig, BenchError> {
    let Some(dir) = shape else { return Ok(olmoe(num_layers.unwrap_or(2))) };
    let mut config = ModelFolder::open(dir)?.config().clone();
    if config.variant.encoder.is_some() {
        return Err(BenchError::Request(format!("{}: has an encoder, only decoders are timed", dir.display())));
    }
    check_prefill(&config, dir)?;
    if let Some(count) = num_layers {
        take_layers(&mut config, count, dir)?;
    }
    Ok(config)
}

/// Keeps the first `count` layers.
fn take_layers(config: &mut ModelConfig, count: usize, dir: &Path) -> Result<(), BenchError> {
    if count > config.num_layers {
        let all = config.num_layers;
        return Err(BenchError::Request(format!("--layers {count}: {} has {all}", dir.display())));
    }
    config.num_layers = count;
    config.variant.dense_layers.retain(|&layer| layer < count);
    config.variant.full_attention_layers.retain(|&layer| layer < count);
    Ok(())
}

/// Returns an error if the model's context is shorter than the timed prefill.
///
/// # Errors
/// [`BenchError::Request`] with the name `path`.
pub fn check_prefill(config: &ModelConfig, path: &Path) -> Result<(), BenchError> {
    if config.max_seq_len >= PREFILL {
        return Ok(());
    }
    let longest = config.max_seq_len;
    Err(BenchError::Request(format!("{}: takes {longest} tokens at most, not {PREFILL}", path.display())))
}

/// Returns OLMoE's shape, with a small vocabulary unless it has all layers of OLMoE.
fn olmoe(num_layers: usize) -> ModelConfig {
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
        score_order: ScoreOrder::SoftmaxThenTopK,
        normalize_weights: false,
        max_seq_len: 4096,
        ..ModelConfig::default()
    }
}

/// Draws weights directly in their final type and place: matrices in `dtype`, the embedding in a float type.
pub(super) fn random_weights(ctx: &Context, decoder: &Decoder, dtype: DType) -> DecoderWeights {
    // Untouched zeros use no memory.
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

/// Draws numbers with a standard deviation of 0.02, four of each random block, so that a whole model takes seconds.
pub(super) fn random_tensor(ctx: &Context, shape: &[usize], dtype: DType, stream: u64) -> Tensor {
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
