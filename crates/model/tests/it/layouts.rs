//! Folders with matrices in other layouts than in memory: MXFP4 and FP8 with separate scales, and transposed stacks.

use moeworks_model::hf::{ModelFolder, SaveOptions, load_model, save_model};
use moeworks_model::safetensors::ModelFiles;
use moeworks_model::{Decoder, DecoderWeights, LatentAttention, ModelConfig};
use moeworks_ops::{Context, Isa};
use moeworks_tensor::{BLOCK_LEN, DType, F8_BLOCK_LEN, F8Block, Mxfp4Block, Tensor};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{assert_close, assert_same_bits, fixture, random_ids};

/// Pseudo-random bytes.
fn bytes(len: usize, seed: u64) -> impl Iterator<Item = u8> {
    random_ids(256, len, seed).into_iter().map(|id| id as u8)
}

/// A matrix, or a stack, in MXFP4.
fn four_bits(ctx: &Context, shape: &[usize], seed: u64) -> Tensor {
    let mut tensor = ctx.empty(shape, DType::Mxfp4);
    let blocks = tensor.slice_mut::<Mxfp4Block>();
    let mut random = bytes(blocks.len() * (BLOCK_LEN / 2 + 1), seed);
    let mut next = || random.next().expect("as many as were asked for");
    blocks.fill_with(|| {
        let scale = [120 + next() % 4];
        Mxfp4Block::joined(&std::array::from_fn(|_| next()), &scale)
    });
    tensor
}

/// A matrix, or a stack, in FP8: one scale per 128 x 128 block, of gate and up each.
fn eight_bits(ctx: &Context, shape: &[usize], rows_of_a_tensor: usize, seed: u64) -> Tensor {
    let mut tensor = ctx.empty(shape, DType::F8);
    let blocks_per_row = tensor.cols() / F8_BLOCK_LEN;
    let mut random = bytes(tensor.len(), seed);
    for (index, block) in tensor.slice_mut::<F8Block>().iter_mut().enumerate() {
        let (row, column) = (index / blocks_per_row, index % blocks_per_row);
        let (matrix, row) = (row / rows_of_a_tensor, row % rows_of_a_tensor);
        let scale = 1e-4 * (1.0 + (matrix + 3 * (row / F8_BLOCK_LEN) + 5 * column) as f32);
        // All values but the largest and NaN.
        *block = F8Block::joined(&std::array::from_fn(|_| random.next().unwrap() & 0xbf), &scale.to_le_bytes());
    }
    tensor
}

/// A small GPT-OSS.
fn small_gpt_oss(ctx: &Context) -> Decoder {
    let (config, _) = load_model(ctx, &fixture("gpt_oss")).unwrap();
    Decoder::new(ModelConfig { width: 64, expert_width: 96, num_experts: 5, ..config }).unwrap()
}

/// The small GPT-OSS with experts in MXFP4.
fn gpt_oss(ctx: &Context) -> (Decoder, DecoderWeights) {
    let decoder = small_gpt_oss(ctx);
    let mut seed = 0;
    let weights = decoder.init(ctx, 7, None).map_named(|name, tensor| {
        seed += 1;
        let is_expert = name.ends_with("experts.gate_up_proj") || name.ends_with("experts.down_proj");
        if is_expert { four_bits(ctx, tensor.shape(), seed) } else { tensor.clone() }
    });
    (decoder, weights)
}

/// A small DeepSeek-V3 in FP8.
fn deepseek(ctx: &Context) -> (Decoder, DecoderWeights) {
    let (mut config, _) = load_model(ctx, &fixture("deepseek_v3")).unwrap();
    let latent = config.variant.latent.unwrap();
    config.variant.latent = Some(LatentAttention { query_rank: 128, kv_rank: 128, ..latent });
    config.variant.value_dim = 32;
    let config =
        ModelConfig { width: 256, num_experts: 8, expert_width: 128, shared_width: 128, dense_width: 384, ..config };
    let decoder = Decoder::new(config).unwrap();
    let mut seed = 0;
    let weights = decoder.init(ctx, 7, None).map_named(|name, tensor| {
        seed += 1;
        let is_joined = name.contains("gate_up_proj");
        let is_matrix = name.contains("_proj") || name.contains("_mqa");
        let rows =
            tensor.rows() / tensor.shape().split_last_chunk::<2>().map_or(1, |(outer, _)| outer.iter().product());
        let rows = rows / if is_joined { 2 } else { 1 };
        if is_matrix { eight_bits(ctx, tensor.shape(), rows, seed) } else { tensor.clone() }
    });
    (decoder, weights)
}

/// Saves a model, loads it in a context of its own, and computes with it. Only small tensors may be copied. Results
/// must equal those of the weights in memory, and be near those of the dequantized weights; saved again it must have
/// the same bytes.
fn check(decoder: &Decoder, weights: &DecoderWeights, method: Option<&str>) {
    let (ctx, [first, second]) = (Context::cpu(2), [(); 2].map(|()| TempDir::new().unwrap()));
    save_model(first.path(), decoder.config(), weights, &SaveOptions::default()).unwrap();
    let (config, loaded) = load_model(&ctx, first.path()).unwrap();
    let held = ctx.pool().stats().used_bytes;
    let of_experts = |(name, _): &(String, &Tensor)| name.contains("experts.") && !name.contains("bias");
    let expert_bytes: usize =
        weights.tensors().into_iter().filter(of_experts).map(|(_, tensor)| tensor.num_bytes()).sum();
    assert!(held < expert_bytes / 2, "{held}, of experts {expert_bytes}");
    let floats = loaded.compute_copy(&ctx, DType::F32);
    let before = ctx.pool().stats().used_bytes;
    for num_tokens in [1, 9, 40] {
        let ids = random_ids(config.vocab_size, num_tokens, 3);
        // Vector code sums the layouts in other orders, and activations in int8 may then round differently; portable
        // loops do not.
        for (isa, tolerance) in [(Isa::Portable, 1e-6), (ctx.isa(), 1e-4)] {
            let ctx = ctx.clone().with_isa(isa);
            let logits = |weights: &DecoderWeights| decoder.logits(&ctx, weights, &ids, 1, None).unwrap().to_f32_vec();
            let found = logits(&loaded);
            assert_close("in memory", &found, &logits(weights), tolerance);
            assert_close("floats", &found, &logits(&floats), 0.05);
        }
    }
    assert_eq!(ctx.pool().stats().used_bytes, before, "something was gathered");

    let origin = Some(&ModelFolder::open(first.path()).unwrap());
    save_model(second.path(), &config, &loaded, &SaveOptions { origin, ..SaveOptions::default() }).unwrap();
    let json = |dir: &TempDir| -> Value {
        serde_json::from_str(&std::fs::read_to_string(dir.path().join("config.json")).unwrap()).unwrap()
    };
    assert_eq!(json(&first)["quantization_config"]["quant_method"].as_str(), method);
    assert_eq!(json(&second), json(&first));
    let [before, after] = [&first, &second].map(|dir| ModelFiles::open(dir.path()).unwrap());
    for name in before.names() {
        let of = |files: &ModelFiles| files.get(name).unwrap().0.bytes(name).unwrap().to_vec();
        assert_eq!(of(&before), of(&after), "{name}");
    }
    // Last, because it dequantizes them.
    assert_same_bits(&loaded, weights);
}

#[test]
fn experts_in_four_bit_floats_are_multiplied_where_the_file_has_them() {
    let (decoder, weights) = gpt_oss(&Context::cpu(2));
    check(&decoder, &weights, Some("mxfp4"));
}

#[test]
fn matrices_in_eight_bit_floats_are_multiplied_where_the_file_has_them() {
    let (decoder, weights) = deepseek(&Context::cpu(2));
    check(&decoder, &weights, Some("fp8"));
}

#[test]
fn transposed_experts_are_multiplied_where_the_file_has_them() {
    let ctx = Context::cpu(2);
    for dtype in [DType::F32, DType::F16] {
        let decoder = small_gpt_oss(&ctx);
        let weights = decoder.init(&ctx, 7, None).compute_copy(&ctx, DType::F32);
        check(&decoder, &weights.compute_copy(&ctx, dtype), None);
    }
}
