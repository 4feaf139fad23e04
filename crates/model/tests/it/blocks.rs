//! Model folders with matrices in blocks of small integers.

use moeworks_gpu::Gpu;
use moeworks_model::KvCache;
use moeworks_model::hf::{LoadError, ModelFolder, Quantize, SaveError, SaveOptions, load_model, save_model};
use moeworks_model::safetensors::ModelFiles;
use moeworks_model::{Decoder, DecoderWeights, LatentAttention, ModelConfig, QkNorm, Variant};
use moeworks_ops::{Context, quantized};
use moeworks_tensor::DType;
use serde_json::{Value, json};

use crate::common::{assert_same_bits, fixture, model, random_ids, small_config};

/// A model whose rows are all whole blocks, except for the experts' hidden width of 24.
fn config() -> ModelConfig {
    ModelConfig { expert_width: 32, dense_width: 64, shared_width: 32, tie_embeddings: false, ..small_config() }
}

fn saved(ctx: &Context, config: ModelConfig, quantize: Quantize<'_>) -> (tempfile::TempDir, DecoderWeights) {
    let dir = tempfile::tempdir().unwrap();
    let (decoder, weights) = model(ctx, config);
    let options = SaveOptions { quantize: Some(quantize), ..SaveOptions::default() };
    let saved = save_model(dir.path(), decoder.config(), &weights, &options).unwrap();
    assert!(!saved.loads_in_transformers && saved.num_in_blocks > 0);
    (dir, weights)
}

fn config_json(dir: &std::path::Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap()
}

#[test]
fn all_matrices_but_the_embedding_come_back_as_the_nearest_blocks() {
    let ctx = Context::cpu(2);
    for (dtype, bits) in [(DType::Q8, 8), (DType::Q4, 4)] {
        let (dir, weights) = saved(&ctx, config(), Quantize { ctx: &ctx, dtype, only_experts: false });
        let said = json!({ "quant_method": "moeworks", "bits": bits, "block_size": 32, "only": null });
        assert_eq!(config_json(dir.path())["quantization_config"], said);
        let (loaded_config, loaded) = load_model(&ctx, dir.path()).unwrap();
        assert_eq!(loaded_config, config());
        for ((name, original), (_, tensor)) in weights.tensors().into_iter().zip(loaded.tensors()) {
            let is_exact = name.contains("norm") || name.contains("embed") || name.contains("mlp.gate.");
            if is_exact {
                assert!(tensor.dtype() == DType::F32 && tensor.bytes() == original.bytes(), "{name}");
            } else {
                let nearest = quantized::quantize(&ctx, original, dtype);
                assert!(tensor.dtype() == dtype && tensor.bytes() == nearest.bytes(), "{name}");
            }
        }
    }
}

#[test]
fn experts_alone_can_be_in_blocks_and_the_model_computes_with_them() {
    let ctx = Context::cpu(2);
    let quantize = Quantize { ctx: &ctx, dtype: DType::Q8, only_experts: true };
    let (dir, weights) = saved(&ctx, config(), quantize);
    let (_, loaded) = load_model(&ctx, dir.path()).unwrap();
    for (name, tensor) in loaded.tensors() {
        assert_eq!(tensor.dtype() == DType::Q8, name.contains("experts"), "{name}");
    }
    let (decoder, _) = model(&ctx, config());
    let ids = random_ids(50, 40, 1);
    let exact = decoder.logits(&ctx, &weights, &ids, 1, None).unwrap().to_f32_vec();
    let found = decoder.logits(&ctx, &loaded, &ids, 1, None).unwrap().to_f32_vec();
    let plain = decoder.logits(&ctx, &loaded.compute_copy(&ctx, DType::F32), &ids, 1, None).unwrap().to_f32_vec();
    let largest = exact.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    for ((exact, found), plain) in exact.iter().zip(&found).zip(&plain) {
        assert!((exact - found).abs() < 0.03 * largest && (plain - found).abs() < 0.03 * largest);
    }
}

#[test]
fn latent_attention_computes_in_blocks() {
    let ctx = Context::cpu(2);
    let (small, _) = load_model(&ctx, &fixture("deepseek_v3")).unwrap();
    let latent = LatentAttention { query_rank: 32, kv_rank: 32, ..small.variant.latent.unwrap() };
    let variant = Variant { latent: Some(latent), ..small.variant.clone() };
    let wide = ModelConfig { variant, width: 64, expert_width: 32, shared_width: 32, dense_width: 64, ..small };
    let (dir, weights) = saved(&ctx, wide.clone(), Quantize { ctx: &ctx, dtype: DType::Q8, only_experts: false });
    let (config, loaded) = load_model(&ctx, dir.path()).unwrap();
    assert!(
        config.computes_as(&wide)
            && loaded.tensors().iter().any(|(name, t)| name.contains("kv_b") && t.dtype() == DType::Q8)
    );
    let decoder = Decoder::new(config).unwrap();
    let ids = random_ids(decoder.config().vocab_size, 12, 1);
    let [exact, found] = [&weights, &loaded].map(|w| decoder.logits(&ctx, w, &ids, 1, None).unwrap().to_f32_vec());
    let largest = exact.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let mean = exact.iter().zip(&found).map(|(a, b)| (a - b).abs()).sum::<f32>() / exact.len() as f32;
    assert!(mean < 0.02 * largest, "{mean} of {largest}");
    // One token at a time, on GPUs, which keep latent vectors in bf16.
    for (name, gpu) in Gpu::for_tests() {
        let ctx = ctx.clone().with_gpu(gpu);
        let mut cache = KvCache::new(decoder.config());
        let mut last = decoder.forward_cached(&ctx, &loaded, &mut cache, &ids[..8], None).unwrap();
        for id in &ids[8..] {
            last = decoder.forward_cached(&ctx, &loaded, &mut cache, &[*id], None).unwrap();
        }
        let last = last.to_f32_vec();
        let exact = &exact[exact.len() - last.len()..];
        let mean = exact.iter().zip(&last).map(|(a, b)| (a - b).abs()).sum::<f32>() / last.len() as f32;
        assert!(mean < 0.04 * largest, "{name}: {mean} of {largest}");
    }
}

#[test]
fn a_folder_in_blocks_is_saved_again_with_the_same_bytes() {
    let ctx = Context::cpu(1);
    let (dir, _) = saved(&ctx, config(), Quantize { ctx: &ctx, dtype: DType::Q4, only_experts: false });
    let again = tempfile::tempdir().unwrap();
    let (loaded_config, loaded) = load_model(&ctx, dir.path()).unwrap();
    let origin = ModelFolder::open(dir.path()).unwrap();
    let options = SaveOptions { origin: Some(&origin), ..SaveOptions::default() };
    save_model(again.path(), &loaded_config, &loaded, &options).unwrap();
    for file in ["config.json", "model.safetensors"] {
        let [a, b] = [&dir, &again].map(|dir| std::fs::read(dir.path().join(file)).unwrap());
        assert!(a == b, "{file}");
    }
    // From int4 to int8 the numbers stay, up to the coarser of the two.
    let wider = tempfile::tempdir().unwrap();
    let quantize = Some(Quantize { ctx: &ctx, dtype: DType::Q8, only_experts: false });
    save_model(wider.path(), &loaded_config, &loaded, &SaveOptions { quantize, ..options }).unwrap();
    let (_, wider) = load_model(&ctx, wider.path()).unwrap();
    let [narrow, wide] = [&loaded, &wider].map(|w| w.compute_copy(&ctx, DType::F32));
    for ((name, a), (_, b)) in narrow.tensors().into_iter().zip(wide.tensors()) {
        let largest = a.f32s().iter().fold(0.0_f32, |max, x| max.max(x.abs()));
        assert!(a.f32s().iter().zip(b.f32s()).all(|(a, b)| (a - b).abs() <= largest / 200.0), "{name}");
    }
    assert_same_bits(&loaded, &load_model(&ctx, again.path()).unwrap().1);
}

#[test]
fn matrices_without_whole_blocks_stay_and_none_at_all_is_refused() {
    let ctx = Context::cpu(1);
    let quantize = Some(Quantize { ctx: &ctx, dtype: DType::Q8, only_experts: false });
    let options = SaveOptions { quantize, ..SaveOptions::default() };
    let (decoder, weights) = model(&ctx, ModelConfig { expert_width: 24, ..config() });
    let dir = tempfile::tempdir().unwrap();
    let saved = save_model(dir.path(), decoder.config(), &weights, &options).unwrap();
    // The second matrix of the experts of the only MoE layer.
    assert_eq!(saved.num_not_in_blocks, 1);
    let odd =
        ModelConfig { width: 28, num_heads: 2, num_kv_heads: 1, head_dim: 14, expert_width: 12, ..small_config() };
    let odd = ModelConfig { dense_width: 20, qk_norm: QkNorm::None, ..odd };
    let (decoder, weights) = model(&ctx, odd);
    let out = dir.path().join("out");
    let result = save_model(&out, decoder.config(), &weights, &options);
    assert!(matches!(result, Err(SaveError::NoBlocks { .. })) && !out.exists());
}

#[test]
fn blocks_of_the_wrong_shape_are_refused() {
    let ctx = Context::cpu(1);
    let (dir, _) = saved(&ctx, config(), Quantize { ctx: &ctx, dtype: DType::Q8, only_experts: true });
    let path = dir.path().join("config.json");
    let mut json = config_json(dir.path());
    for key in ["num_experts", "num_local_experts"] {
        json[key] = json!(4);
    }
    json["moeworks"]["num_experts"] = json!(4);
    std::fs::write(&path, json.to_string()).unwrap();
    match load_model(&ctx, dir.path()) {
        Err(LoadError::WrongShape { .. }) => {}
        other => panic!("{:?}", other.map(|_| ())),
    }
    assert!(ModelFiles::open(dir.path()).unwrap().names().any(|name| name.ends_with(".q8_0")));
}
