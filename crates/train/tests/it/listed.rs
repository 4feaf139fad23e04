//! Bytes that a training step copies to and from a GPU, at sizes that a test cannot compute on the CPU: the step must
//! run where its tensors are.

use moeworks_gpu::{Emulation, Gpu, GpuOptions};
use moeworks_model::{Decoder, GradTarget, ModelConfig, PassOptions, TokenBatch};
use moeworks_moe::{GroupScore, Ramp, RouterConfig, ScoreFunction};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::DType;

const VOCABULARY: usize = 30_000;
const SEQ_LEN: usize = 512;
const SEQUENCES: usize = 40;

/// Returns the bytes that a training pass of this model copies to and from a GPU, after a first pass.
fn copied(config: ModelConfig) -> (u64, u64) {
    let traced = Emulation { is_hopper: true, is_traced: true, ..Emulation::default() };
    let ctx = Context::cpu(2).with_gpu(Gpu::emulated(traced, &GpuOptions::default()).expect("needs no compiler"));
    let decoder = Decoder::new(config).expect("a model");
    let weights = decoder.init(&ctx, 1, None).compute_copy(&ctx, DType::BF16);
    let mut grads = decoder.init(&ctx, 1, None).zeros_like(&ctx);
    let ids: Vec<u32> = (0..SEQUENCES * SEQ_LEN).map(|i| (i * 7919 % VOCABULARY) as u32).collect();
    let batch =
        TokenBatch { inputs: &ids, targets: &ids, num_sequences: SEQUENCES, seq_len: SEQ_LEN, ..TokenBatch::default() };
    let options = PassOptions { grad_scale: 1.0 / ids.len() as f32, ..PassOptions::default() };
    let mut pass = || {
        let before = ctx.gpu().expect("a GPU").traffic();
        decoder
            .forward_backward(&ctx, &weights, &[batch], &options, GradTarget::new(Write::Replace, &mut grads))
            .expect("a pass");
        let copied = ctx.gpu().expect("a GPU").traffic().since(&before);
        (copied.uploaded_bytes, copied.downloaded_bytes)
    };
    pass();
    pass()
}

fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: VOCABULARY,
        width: 32,
        num_layers: 3,
        num_heads: 2,
        num_kv_heads: 2,
        head_dim: 16,
        num_experts: 16,
        top_k: 4,
        expert_width: 16,
        max_seq_len: SEQ_LEN,
        ..ModelConfig::default()
    }
}

/// Only ids, targets, positions and the terms of losses and statistics are copied: a few numbers per token. A row of
/// the residual stream, of scores or of logits would be 32, 16 and 30,000 numbers. Logits are computed in several
/// chunks.
#[test]
fn a_training_pass_copies_a_few_numbers_a_token() {
    let deepseek = RouterConfig {
        scores: ScoreFunction::Sigmoid,
        expert_bias: true,
        num_groups: 4,
        top_groups: 2,
        group_score: GroupScore::TopTwo,
        ..RouterConfig::default()
    };
    let plain = config();
    let switch = ModelConfig { jitter: Ramp::constant(0.01), top_k: 1, ..config() };
    let deepseek = ModelConfig { router: deepseek, shared_width: 16, normalize_weights: true, ..config() };
    // With groups, the choices of each layer are copied to count the tokens of each group.
    let choices = deepseek.num_layers * deepseek.top_k;
    for (name, config, more) in [("plain", plain, 0), ("Switch", switch, 0), ("DeepSeek-V3", deepseek, choices)] {
        let tokens = (SEQUENCES * SEQ_LEN) as u64;
        let (uploaded, downloaded) = copied(config);
        // Seven lists of four-byte numbers are uploaded (three of them for the embedding, with ids that are all
        // different), and three are downloaded.
        assert!(uploaded <= 8 * 4 * tokens, "{name}: {uploaded} bytes to the GPU for {tokens} tokens");
        assert!(
            downloaded <= (4 + more as u64) * 4 * tokens,
            "{name}: {downloaded} bytes to the host for {tokens} tokens"
        );
    }
}
