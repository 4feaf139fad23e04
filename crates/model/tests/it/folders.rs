//! Model folders: every kind of model survives a round trip, and inconsistent folders are refused.

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::Path;

use moeworks_model::hf::{LoadError, ModelFolder, SaveOptions, StreamedWeights, load_model, save_model, save_streamed};
use moeworks_model::safetensors::{FileDType, ModelFiles, SafetensorsError};
use moeworks_model::{ActivationKind, Decoder, ModelConfig, ParamSet, QkNorm, Tokenizer, WeightTable};
use moeworks_moe::{Ramp, ScoreOrder};
use moeworks_ops::Context;
use moeworks_tensor::{DType, Tensor};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{assert_same_bits, fixture, model, random_ids, small_config};

#[track_caller]
fn assert_saved_as(config: ModelConfig, model_type: &str) {
    let ctx = Context::cpu(2);
    let dir = tempfile::tempdir().unwrap();
    let (decoder, weights) = model(&ctx, config);
    for (dtype, max_shard_bytes) in [(DType::F32, 5_000_000_000), (DType::BF16, 10_000), (DType::F16, 10_000)] {
        let weights = weights.compute_copy(&ctx, dtype);
        let options = SaveOptions { max_shard_bytes, ..SaveOptions::default() };
        let saved = save_model(dir.path(), decoder.config(), &weights, &options).unwrap();
        assert_eq!((saved.model_type, saved.loads_in_transformers), (model_type, model_type != "moeworks"));
        let (config, loaded) = load_model(&ctx, dir.path()).unwrap();
        assert_eq!(config, *decoder.config());
        assert_same_bits(&loaded, &weights);
    }
}

#[test]
fn a_model_is_saved_as_the_family_that_computes_it() {
    let all_moe = ModelConfig { moe_every: 1, ..small_config() };
    assert_saved_as(small_config(), "qwen3_moe");
    assert_saved_as(
        ModelConfig {
            capacity_factor: -1.5,
            jitter: "linear 0.1 to 0 over 0.5".parse().unwrap(),
            norm_eps: 3e-5,
            ..small_config()
        },
        "qwen3_moe",
    );
    assert_saved_as(
        ModelConfig { score_order: ScoreOrder::TopKThenSoftmax, normalize_weights: false, ..small_config() },
        "qwen3_moe",
    );
    assert_saved_as(ModelConfig { qk_norm: QkNorm::Whole, normalize_weights: false, ..all_moe.clone() }, "olmoe");
    assert_saved_as(
        ModelConfig { qk_norm: QkNorm::Whole, score_order: ScoreOrder::TopKThenSoftmax, ..all_moe.clone() },
        "olmoe",
    );
    assert_saved_as(ModelConfig { qk_norm: QkNorm::None, jitter: Ramp::constant(0.25), ..all_moe.clone() }, "mixtral");
    assert_saved_as(ModelConfig { num_experts: 0, ..small_config() }, "qwen3");
    assert_saved_as(
        ModelConfig { num_experts: 0, qk_norm: QkNorm::None, tie_embeddings: true, ..small_config() },
        "llama",
    );
}

#[test]
fn a_model_that_no_family_computes_is_saved_as_ours() {
    let all_moe = ModelConfig { moe_every: 1, ..small_config() };
    assert_saved_as(ModelConfig { activation: ActivationKind::Gelu, ..small_config() }, "moeworks");
    assert_saved_as(ModelConfig { activation: ActivationKind::Relu, shared_width: 16, ..small_config() }, "moeworks");
    assert_saved_as(ModelConfig { shared_width: 16, ..small_config() }, "moeworks");
    // OLMoE's norm is as wide as the model; Mixtral always normalises and has no dense layers.
    assert_saved_as(ModelConfig { qk_norm: QkNorm::Whole, head_dim: 6, ..all_moe.clone() }, "moeworks");
    assert_saved_as(ModelConfig { qk_norm: QkNorm::None, normalize_weights: false, ..all_moe.clone() }, "moeworks");
    assert_saved_as(ModelConfig { qk_norm: QkNorm::None, ..small_config() }, "moeworks");
    assert_saved_as(ModelConfig { qk_norm: QkNorm::Whole, num_experts: 0, ..all_moe }, "moeworks");
}

#[test]
fn old_and_new_keys_are_written() {
    let ctx = Context::cpu(1);
    let (dir, tokenizer) = (tempfile::tempdir().unwrap(), Tokenizer::bytes());
    let (decoder, weights) = model(&ctx, small_config());
    let options = SaveOptions { tokenizer: Some(&tokenizer), ..SaveOptions::default() };
    save_model(dir.path(), decoder.config(), &weights, &options).unwrap();
    let config = read_json(&dir.path().join("config.json"));
    assert_eq!(config["rope_theta"], config["rope_parameters"]["rope_theta"]);
    assert_eq!((&config["torch_dtype"], &config["dtype"]), (&json!("float32"), &json!("float32")));
    assert_eq!((&config["num_experts"], &config["num_local_experts"]), (&json!(5), &json!(5)));
    assert_eq!((&config["decoder_sparse_step"], &config["mlp_only_layers"]), (&json!(2), &json!([])));
    assert_eq!((&config["rms_norm_eps"], &config["eos_token_id"]), (&json!(1e-6), &json!(256)));
    assert_eq!(read_json(&dir.path().join("generation_config.json"))["eos_token_id"], 256);
    assert_eq!(Tokenizer::from_dir(dir.path()).unwrap().json(), tokenizer.json());
}

fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A copy of a fixture to damage.
struct Copy(TempDir);

impl Copy {
    fn of(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(fixture(name)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                continue;
            }
            fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
        Self(dir)
    }

    fn set(self, key: &str, value: Value) -> Self {
        let path = self.0.path().join("config.json");
        let mut config = read_json(&path);
        match value {
            Value::Null => drop(config.as_object_mut().unwrap().remove(key)),
            value => config[key] = value,
        }
        fs::write(path, config.to_string()).unwrap();
        self
    }

    fn load(&self) -> Result<ModelConfig, LoadError> {
        load_model(&Context::cpu(1), self.0.path()).map(|(config, _)| config)
    }

    #[track_caller]
    fn fault(&self) -> LoadError {
        let error = self.load().expect_err("a bad folder was loaded");
        let text = error.to_string();
        assert!(text.contains(self.0.path().to_str().unwrap()) && !text.contains('\n'), "{text}");
        error
    }
}

#[test]
fn keys_of_older_versions_are_read() {
    let new = Copy::of("qwen3_moe").load().unwrap();
    let experts = new.num_experts;
    let old = Copy::of("qwen3_moe")
        .set("rope_parameters", Value::Null)
        .set("rope_theta", json!(10_000))
        .set("rope_scaling", Value::Null)
        .set("num_local_experts", Value::Null)
        .set("num_experts", json!(experts));
    assert_eq!(old.load().unwrap(), new);
}

#[test]
fn our_own_settings_count_only_while_they_agree_with_the_other_keys() {
    let ctx = Context::cpu(1);
    let dir = Copy(tempfile::tempdir().unwrap());
    let (decoder, weights) = model(&ctx, ModelConfig { capacity_factor: 1.25, ..small_config() });
    save_model(dir.0.path(), decoder.config(), &weights, &SaveOptions::default()).unwrap();
    assert_eq!(dir.load().unwrap().capacity_factor, 1.25);
    let dir = dir.set("rms_norm_eps", json!(1e-4));
    let config = dir.load().unwrap();
    assert_eq!((config.norm_eps, config.capacity_factor), (1e-4, 0.0));
}

#[test]
fn a_configuration_that_would_be_computed_wrongly_is_refused() {
    for (key, value) in [
        ("model_type", Value::Null),
        ("model_type", json!(3)),
        ("hidden_size", Value::Null),
        ("hidden_size", json!(-16)),
        ("hidden_size", json!("16")),
        ("quantization_config", json!({"quant_method": "gptq"})),
        ("hidden_act", json!("gelu")),
        ("clip_qkv", json!(3.0)),
        ("sliding_window", json!(-1)),
        ("layer_types", json!(["full_attention", "chunked_attention"])),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("rope_parameters", json!({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})),
        ("rope_parameters", json!({"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0})),
        ("rope_scaling", json!({"type": "linear"})),
        ("rope_scaling", json!({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5})),
        ("rope_scaling", json!({"type": "yarn", "factor": 2.0, "attn_factor": 3.0})),
        ("rope_scaling", json!({"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0})),
        ("rope_scaling", json!({"type": "linear", "factor": "2"})),
        ("rope_scaling", json!({"type": "default", "mrope_section": [2, 1]})),
        ("rope_theta", json!(500.0)),
        ("partial_rotary_factor", json!(0.5)),
        ("rope_parameters", json!({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})),
        ("rope_parameters", json!({"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 500.0}})),
        ("rope_parameters", json!({"full_attention": {"rope_theta": 1e4}, "sliding_attention": null})),
        ("num_hidden_layers", json!(2.0)),
        ("rms_norm_eps", json!("nan")),
        ("routed_scaling_factor", json!(2.5)),
        ("scoring_func", json!("sigmoid")),
        ("attn_logit_softcapping", json!(30.0)),
        ("logit_scale", json!(0.5)),
        ("is_encoder_decoder", json!(true)),
        ("mlp_only_layers", json!("1")),
        ("shared_expert_intermediate_size", json!(64)),
    ] {
        let error = Copy::of("qwen3_moe").set(key, value.clone()).fault();
        assert!(matches!(&error, LoadError::Config { .. }), "{key} = {value}: {error}");
        assert!(error.to_string().contains(key), "{key} = {value}: {error}");
    }
    for (key, setting, value) in [
        ("num_experts_per_tok", "top_k", json!(6)),
        ("num_experts_per_tok", "top_k", json!(0)),
        ("num_key_value_heads", "num_kv_heads", json!(3)),
        ("head_dim", "head_dim", json!(5)),
        ("num_hidden_layers", "num_layers", json!(1_u64 << 60)),
        ("num_local_experts", "num_experts", json!(1_u64 << 50)),
        ("rms_norm_eps", "norm_eps", json!(-1.0)),
        ("decoder_sparse_step", "moe_every", json!(0)),
        ("rope_parameters", "variant.rotary.scaling", json!({"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0})),
    ] {
        let error = Copy::of("qwen3_moe").set(key, value).fault();
        assert!(matches!(&error, LoadError::Setting { source, .. } if source.setting == setting), "{key}: {error}");
    }
    let error = Copy::of("qwen3_moe").set("model_type", json!("gpt_neox")).fault();
    assert!(matches!(&error, LoadError::UnknownFamily { model_type, .. } if model_type == "gpt_neox"));
    assert!(error.to_string().contains("qwen3_moe, olmoe, mixtral"), "{error}");
    let dir = Copy::of("llama");
    for text in ["", "{", "[]", "{\"model_type\":\"llama\"}"] {
        fs::write(dir.0.path().join("config.json"), text).unwrap();
        assert!(matches!(dir.fault(), LoadError::Config { .. }), "{text}");
    }
    fs::remove_file(dir.0.path().join("config.json")).unwrap();
    assert!(matches!(dir.fault(), LoadError::Io { .. }));
}

/// One rotary embedding, given for each kind of layer.
#[test]
fn rotary_parameters_that_are_the_same_for_every_kind_of_layer_are_used() {
    let of = |parameters: Value| Copy::of("qwen3_moe").set("rope_parameters", parameters).load().unwrap();
    let plain = of(json!({"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}));
    let each = json!({"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0});
    assert_eq!(of(json!({"full_attention": each, "sliding_attention": each})), plain);
    // A kind that no layer has is not checked.
    let other = json!({"rope_type": "default", "rope_theta": 1e4});
    let nested = json!({"full_attention": each, "sliding_attention": other});
    let kinds = json!(["full_attention", "full_attention"]);
    let dir = Copy::of("qwen3_moe").set("layer_types", kinds).set("rope_parameters", nested);
    assert_eq!(dir.load().unwrap(), plain);
}

#[test]
fn messages_about_settings_name_the_keys_of_the_file() {
    for (key, value, parts) in [
        ("num_key_value_heads", json!(3), ["num_key_value_heads = 3", "num_attention_heads, 4"]),
        ("num_experts_per_tok", json!(6), ["num_experts_per_tok = 6", "5"]),
        ("hidden_size", json!(0), ["hidden_size = 0", "from 1 to 1048576"]),
        (
            "rope_parameters",
            json!({"rope_type": "linear", "factor": -2.0}),
            ["rope_parameters", "factor must be a positive"],
        ),
        ("num_hidden_layers", json!(2.0), ["num_hidden_layers = 2.0", "a whole number"]),
        ("tie_word_embeddings", json!("yes"), ["tie_word_embeddings = \"yes\"", "true or false"]),
    ] {
        let error = Copy::of("qwen3_moe").set(key, value).fault().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{key}: {error}");
    }
}

#[test]
fn keys_that_nothing_is_known_of_are_told() {
    let dir = Copy::of("qwen3_moe")
        .set("new_scale", json!(2.0))
        .set("_attn", json!("x"))
        .set("rope_parameters", json!({"rope_type": "linear", "factor": 2.0, "bent": 1.0}));
    let folder = ModelFolder::open(dir.0.path()).unwrap();
    assert_eq!(folder.unknown_keys(), ["new_scale", "rope_parameters.bent"]);
    for name in ["gpt_oss", "deepseek_v3", "switch", "phimoe"] {
        assert_eq!(ModelFolder::open(&fixture(name)).unwrap().unknown_keys(), [""; 0], "{name}");
    }
}

/// `transformers` writes the shared experts of a DeepSeek that has none.
#[test]
fn tensors_without_elements_need_no_place() {
    let (ctx, dir) = (Context::cpu(1), Copy::of("mixtral"));
    let path = dir.0.path().join("model.safetensors");
    let mut file = fs::read(&path).unwrap();
    let header_len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let empty = br#"{"nothing":{"dtype":"F32","shape":[0,16],"data_offsets":[0,0]},"#;
    file.splice(8..9, *empty);
    file[..8].copy_from_slice(&((header_len + empty.len() - 1) as u64).to_le_bytes());
    fs::write(&path, file).unwrap();
    let (_, weights) = load_model(&ctx, dir.0.path()).unwrap();
    assert_same_bits(&weights, &load_model(&ctx, &fixture("mixtral")).unwrap().1);
}

/// Returns true if an error is the expected one.
type Check<'a> = &'a dyn Fn(&LoadError) -> bool;

#[test]
fn weights_that_do_not_fit_the_configuration_are_refused() {
    let shape =
        |error: &LoadError, name: &str| matches!(error, LoadError::WrongShape { tensor, .. } if tensor.contains(name));
    let missing = |error: &LoadError, name: &str| matches!(error, LoadError::Safetensors(SafetensorsError::Missing { tensor, .. }) if tensor.contains(name));
    let cases: [(&str, &str, Value, Check<'_>); 8] = [
        ("qwen3_moe", "vocab_size", json!(65), &|e| shape(e, "embed_tokens")),
        ("qwen3_moe", "num_local_experts", json!(9), &|e| shape(e, "mlp.gate.weight")),
        ("qwen3_moe", "moe_intermediate_size", json!(13), &|e| shape(e, "experts.0.gate_proj")),
        ("mixtral", "intermediate_size", json!(13), &|e| shape(e, "experts.gate_up_proj")),
        ("qwen3_moe", "num_hidden_layers", json!(3), &|e| missing(e, "model.layers.2.")),
        ("qwen3_moe", "num_hidden_layers", json!(1), &|e| matches!(e, LoadError::UnexpectedTensor { .. })),
        ("qwen3_moe", "model_type", json!("llama"), &|e| matches!(e, LoadError::Safetensors(_))),
        ("llama", "tie_word_embeddings", json!(false), &|e| missing(e, "lm_head.weight")),
    ];
    for (name, key, value, is_right) in cases {
        let error = Copy::of(name).set(key, value).fault();
        assert!(is_right(&error), "{name}, {key}: {error}");
    }
}

#[test]
fn a_damaged_shard_is_refused() {
    let dir = Copy::of("qwen3_moe_sparse");
    let shard = dir.0.path().join("model-00002-of-00003.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    let error = dir.fault();
    assert!(error.to_string().contains("00002"), "{error}");
    assert!(matches!(error, LoadError::Safetensors(SafetensorsError::OffsetsOutOfRange { .. })));
    fs::remove_file(&shard).unwrap();
    assert!(matches!(dir.fault(), LoadError::Safetensors(SafetensorsError::Io { .. })));
}

/// Writes the f32 weights of a fixture by both methods. Streamed weights must not stay in memory: at most the three
/// that a tensor on disk is made of.
#[track_caller]
fn assert_streamed_as_saved(name: &str) {
    let (ctx, arriving) = (Context::cpu(2), Context::cpu(1));
    let (config, weights) = load_model(&ctx, &fixture(name)).unwrap();
    let weights = weights.kept(&ctx, &WeightTable::new(&config), |_, tensor| tensor.clone());
    let tensors = weights.tensors();
    let largest = tensors.iter().map(|(_, tensor)| tensor.num_bytes()).max().unwrap();
    let (num_received, most_kept) = (Cell::new(0), Cell::new(0));
    let next = || {
        most_kept.set(arriving.pool().stats().used_bytes.max(most_kept.get()));
        let (_, from) = &tensors[num_received.replace(num_received.get() + 1)];
        let mut tensor = arriving.zeros(from.shape(), DType::F32);
        tensor.f32s_mut().copy_from_slice(&from.to_f32_vec());
        Ok(tensor)
    };
    let shapes = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape().to_vec())).collect();
    let streamed = StreamedWeights { shapes, states: weights.states(), next: &next };
    let (saved_dir, streamed_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let saved = save_model(saved_dir.path(), &config, &weights, &SaveOptions::default()).unwrap();
    assert_eq!(save_streamed(streamed_dir.path(), &config, &streamed, None).unwrap(), saved, "{name}");
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        let read = |dir: &TempDir| fs::read(dir.path().join(file)).unwrap();
        assert!(read(&saved_dir) == read(&streamed_dir), "{name}: {file}");
    }
    assert_eq!(num_received.get(), tensors.len(), "{name}");
    assert!(most_kept.get() <= 2 * largest.next_multiple_of(4096), "{name}: {} of {largest}", most_kept.get());
    assert_eq!(arriving.pool().stats().used_bytes, 0, "{name}");
}

#[test]
fn streamed_weights_make_the_same_files_as_saved_ones() {
    for name in ["deepseek_v2", "deepseek_v3", "gpt2", "gpt_oss", "granitemoe", "llama", "mixtral", "olmoe"] {
        assert_streamed_as_saved(name);
    }
    for name in ["phimoe", "qwen2_moe", "qwen3", "qwen3_moe", "switch", "switch_untied"] {
        assert_streamed_as_saved(name);
    }
}

#[test]
fn a_streamed_weight_that_fails_or_has_another_shape_is_an_error() {
    let ctx = Context::cpu(1);
    let (decoder, weights) = model(&ctx, small_config());
    let save = |next: &dyn Fn() -> io::Result<Tensor>| {
        let streamed = StreamedWeights { shapes: decoder.tensor_shapes(), states: weights.states(), next };
        let dir = tempfile::tempdir().unwrap();
        let error = save_streamed(dir.path(), decoder.config(), &streamed, None).unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
        error.to_string()
    };
    let lost = save(&|| Err(io::Error::other("rank 3 is gone")));
    assert!(lost.contains("rank 3 is gone"), "{lost}");
    let other = save(&|| Ok(ctx.zeros(&[2, 3], DType::F32)));
    assert!(other.contains("model.embed_tokens"), "{other}");
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error() {
    let ctx = Context::cpu(1);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let (decoder, weights) = model(&ctx, small_config());
    let path = dir.path().join("file/model");
    let error = save_model(&path, decoder.config(), &weights, &SaveOptions::default()).unwrap_err();
    assert!(error.to_string().contains("file/model"), "{error}");
}

/// Loading and running a model whose experts are stored one by one takes less from the pool than the experts' size.
#[test]
fn experts_stored_one_by_one_stay_in_their_files() {
    let sizes = ModelConfig { width: 64, num_experts: 8, expert_width: 64, num_layers: 2, ..small_config() };
    let (decoder, weights) = model(&Context::cpu(2), ModelConfig { moe_every: 1, ..sizes });
    let ids = random_ids(50, 20, 3);
    for (dtype, num_shards) in
        [(DType::F32, 1), (DType::BF16, 1), (DType::F16, 1), (DType::F32, 3), (DType::BF16, 5), (DType::F16, 5)]
    {
        let (ctx, dir) = (Context::cpu(2), tempfile::tempdir().unwrap());
        let weights = weights.compute_copy(&Context::cpu(1), dtype);
        let all_bytes: usize = weights.tensors().iter().map(|(_, tensor)| tensor.num_bytes()).sum();
        let max_shard_bytes = all_bytes / num_shards + 1000;
        let options = SaveOptions { max_shard_bytes, ..SaveOptions::default() };
        save_model(dir.path(), decoder.config(), &weights, &options).unwrap();
        let expected = decoder.logits(&Context::cpu(2), &weights, &ids, 1, None).unwrap().to_f32_vec();
        let (_, loaded) = load_model(&ctx, dir.path()).unwrap();
        let held = ctx.pool().stats().used_bytes;
        // Gate and up of an expert that are in different shards are copied together.
        let expert_bytes = 3 * 64 * 64 * dtype.size();
        assert!(held < 30_000 + (num_shards - 1) * expert_bytes, "{held} bytes of {all_bytes}");
        assert_eq!(
            decoder.logits(&ctx, &loaded, &ids, 1, None).unwrap().to_f32_vec(),
            expected,
            "{dtype:?}, {num_shards}"
        );
        assert_eq!(ctx.pool().stats().used_bytes, held, "{dtype:?}, {num_shards}: something was gathered");
        assert_same_bits(&loaded, &weights);
    }
}

#[test]
fn a_folder_in_f16_is_computed_with_as_it_is_and_written_in_f16_again() {
    let (ctx, dir) = (Context::cpu(1), tempfile::tempdir().unwrap());
    for name in ["qwen3_moe", "granitemoe", "mixtral"] {
        let (config, weights) = load_model(&ctx, &fixture(name)).unwrap();
        let [first, second] = ["first", "second"].map(|which| dir.path().join(name).join(which));
        let half = SaveOptions { dtype: Some(FileDType::F16), ..SaveOptions::default() };
        save_model(&first, &config, &weights, &half).unwrap();
        let (_, weights) = load_model(&ctx, &first).unwrap();
        assert!(weights.are_all(DType::F16), "{name}");
        let (decoder, ids) = (Decoder::new(config.clone()).unwrap(), random_ids(config.vocab_size, 9, 3));
        let logits = |weights| decoder.logits(&ctx, weights, &ids, 1, None).unwrap().to_f32_vec();
        assert_eq!(logits(&weights), logits(&weights.compute_copy(&ctx, DType::F32)), "{name}");
        let origin = Some(&ModelFolder::open(&first).unwrap());
        save_model(&second, &config, &weights, &SaveOptions { origin, ..SaveOptions::default() }).unwrap();
        for file in ["config.json", "model.safetensors"] {
            assert!(fs::read(first.join(file)).unwrap() == fs::read(second.join(file)).unwrap(), "{name}: {file}");
        }
    }
}

#[test]
fn four_bit_floats_of_another_form_are_refused() {
    let dir = Copy::of("gpt_oss_mxfp4");
    let error = dir.set("intermediate_size", json!(48)).fault();
    assert!(
        matches!(&error, LoadError::WrongShape { tensor, .. } if tensor.ends_with("gate_up_proj_blocks")),
        "{error}"
    );
}

#[test]
fn layers_that_predict_further_tokens_are_kept() {
    let (ctx, dir, out) = (Context::cpu(1), fixture("deepseek_v3_fp8"), tempfile::tempdir().unwrap());
    let (config, weights) = load_model(&ctx, &dir).unwrap();
    let (name, key) = ("model.layers.1.enorm.weight", "num_nextn_predict_layers");
    let save = |origin| {
        let options = SaveOptions { origin, ..SaveOptions::default() };
        save_model(out.path(), &config, &weights, &options).unwrap();
        (ModelFiles::open(out.path()).unwrap(), read_json(&out.path().join("config.json")))
    };
    let (files, json) = save(None);
    assert!(files.find(name).is_none() && json[key] == 0);
    let (files, json) = save(Some(&ModelFolder::open(&dir).unwrap()));
    let there = ModelFiles::open(&dir).unwrap();
    assert_eq!(files.get(name).unwrap().0.bytes(name).unwrap(), there.get(name).unwrap().0.bytes(name).unwrap());
    assert_eq!(json[key], 1);
    assert_same_bits(&load_model(&ctx, out.path()).unwrap().1, &weights);
}
