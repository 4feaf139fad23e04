//! Layers of settings, and the one-line error for each invalid one.

use std::fs;

use moeworks_model::{ActivationKind, LatentAttention, RopeScaling, Rotary, Variant};
use moeworks_train::config::{ConfigLayers, Override, PRESETS, Precision, RunConfig, TokenizerChoice, print_config};
use moeworks_train::resumed_config;
use proptest::prelude::*;

fn resolve(preset: Option<&str>, file: Option<&str>, overrides: &[&str]) -> Result<RunConfig, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.toml");
    fs::write(&path, file.unwrap_or_default()).unwrap();
    let overrides = overrides.iter().map(|text| Override::parse(text)).collect::<Result<_, _>>();
    let layers = ConfigLayers {
        from: None,
        preset: preset.map(String::from),
        file: file.map(|_| path),
        overrides: overrides.map_err(|error| error.to_string())?,
    };
    layers.resolve().map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))
}

#[test]
fn later_layers_win() {
    let file = "[model]\nwidth = 128\nnum_experts = 32\n[train]\nlr = 1\nseed = 7\n";
    let config = resolve(Some("switch-like"), Some(file), &["train.seed=9", "train.precision=f32"]).unwrap();
    assert_eq!((config.model.top_k, config.model.moe_every), (1, 2));
    assert_eq!((config.model.width, config.model.num_experts), (128, 32));
    assert_eq!((config.train.lr, config.train.seed, config.train.precision), (1.0, 9, Precision::F32));
}

#[test]
fn a_run_from_before_the_seed_of_what_is_held_out_keeps_what_its_own_seed_held_out() {
    let run = tempfile::tempdir().unwrap();
    let held_out_by = |data: &str| {
        fs::write(run.path().join("config.toml"), format!("[data]\n{data}\n[train]\nseed = 7\n")).unwrap();
        resumed_config(run.path(), Ok).unwrap().data.validation_seed
    };
    assert_eq!((held_out_by(""), held_out_by("validation_seed = 2")), (7, 2));
    let change = |mut config: RunConfig| {
        config.data.validation_seed = 3;
        Ok(config)
    };
    let error = resumed_config(run.path(), change).unwrap_err().to_string();
    assert!(error.contains("data.validation_seed"), "{error}");
}

#[test]
fn settings_on_the_command_line_are_toml_or_bare_words() {
    let config = resolve(
        None,
        None,
        &[
            "data.paths=[\"a b.txt\", \"c\"]",
            "data.tokenizer=my/tokenizer.json",
            "run.name=2026",
            "train.sample_prompt=Once upon = a time",
            "train.lr = 3e-4",
            "train.checkpoint_layers=true",
            "model.capacity_factor=-2",
        ],
    )
    .unwrap();
    assert_eq!(config.data.paths, ["a b.txt", "c"]);
    assert_eq!(config.data.tokenizer, TokenizerChoice::File("my/tokenizer.json".into()));
    assert_eq!(config.run.name, "2026");
    assert_eq!(config.train.sample_prompt, "Once upon = a time");
    assert_eq!((config.train.lr, config.train.checkpoint_layers, config.model.capacity_factor), (3e-4, true, -2.0));
    assert_eq!(resolve(None, None, &["data.paths=one.txt"]).unwrap().data.paths, ["one.txt"]);
    let made = Override::new("data.paths", vec!["x".to_string()]);
    let config = ConfigLayers { overrides: vec![made], ..ConfigLayers::default() }.resolve().unwrap();
    assert_eq!(config.data.paths, ["x"]);
}

#[test]
fn every_wrong_setting_gives_one_line() {
    for (setting, expected) in [
        ("train.lr=-1", "train.lr = -1: must be a number above 0"),
        ("train.lr=nan", "train.lr = nan: must be a finite number"),
        ("train.lr=fast", "train.lr = \"fast\": must be a number"),
        ("train.lr=", "train.lr = \"\": must be a number"),
        ("train.steps=0", "train.steps = 0: must be from 1 to 281474976710655"),
        ("train.steps=-5", "train.steps = -5: must be a whole number of at least 0"),
        ("train.steps=2.5", "train.steps = 2.5: must be a whole number of at least 0"),
        ("model.width=-8", "model.width = -8: must be a whole number of at least 0"),
        ("model.width=99999999999", "model.width = 99999999999: must be from 1 to 1048576"),
        ("model.width=0", "model.width = 0: must be from 1 to 1048576"),
        ("model.top_k=9", "model.top_k = 9: must be from 1 to the number of experts, 8"),
        ("model.top_k=0", "model.top_k = 0: must be from 1 to the number of experts, 8"),
        ("model.num_kv_heads=3", "model.num_kv_heads = 3: must divide num_heads, 4"),
        ("model.head_dim=63", "model.head_dim = 63: must be even, for the rotary embedding"),
        (
            "model.qk_norm=all",
            "model.qk_norm = \"all\": unknown variant `all`, expected one of `none`, `head`, `whole`",
        ),
        (
            "train.precision=fp16",
            "train.precision = \"fp16\": unknown variant `fp16`, expected one of `f32`, `bf16`, `fp8`",
        ),
        (
            "train.expert_gradients=fp8",
            "train.expert_gradients = \"fp8\": unknown variant `fp8`, expected `f32` or `bf16`",
        ),
        ("train.seq_len=2000", "train.seq_len = 2000: must be at most model.max_seq_len, 1024"),
        (
            "train.batch_size=99999999",
            "train.batch_size = 99999999: times train.seq_len, 256, must be below 2147483648",
        ),
        ("train.beta2=1", "train.beta2 = 1: must be at least 0 and below 1"),
        ("train.clip_norm=-1", "train.clip_norm = -1: must be a number of at least 0"),
        ("train.checkpoint_layers=1", "train.checkpoint_layers = 1: must be true or false"),
        ("train.sample_prompt=", "train.sample_prompt = \"\": must not be empty while train.sample_every is above 0"),
        ("train.seed=99999999999999999999", "train.seed = \"99999999999999999999\": must be a whole number"),
        ("data.validation_fraction=0.9", "data.validation_fraction = 0.9: must be a number from 0 to 0.5"),
        ("data.paths=3", "data.paths = 3: must be a list of texts"),
        ("run.name=../x", "run.name = \"../x\": must be the name of a folder, without slashes"),
        ("train.learning_rate=1", "train.learning_rate: unknown setting; `moeworks train --print-config`"),
        ("train.stesp=1", "train.stesp: unknown setting; near names: train.steps"),
        ("lr=1", "lr: unknown setting; near names: train.lr"),
        ("train=1", "train: unknown setting"),
        ("train.lr.x=1", "train.lr.x: unknown setting"),
        ("train.lr", "--set train.lr: must be SETTING=VALUE, such as train.lr=3e-4"),
        ("=3", "--set =3: must be SETTING=VALUE"),
    ] {
        let message = resolve(None, None, &[setting]).unwrap_err();
        assert!(message.starts_with(expected), "{setting}: {message}");
        assert!(!message.contains('\n'), "{message}");
    }
}

#[test]
fn gradients_of_experts_in_bf16_are_for_one_rank() {
    let setting = "train.expert_gradients=bf16";
    assert!(resolve(None, None, &[setting]).is_ok());
    let message = resolve(None, None, &[setting, "parallel.ep=2"]).unwrap_err();
    assert_eq!(message, "train.expert_gradients = \"bf16\": must be \"f32\" on several ranks, whose sums are f32");
}

#[test]
fn errors_in_files_name_the_line() {
    for (file, expected) in [
        ("[train]\nlr = 1e-3\n\nstps = 3\n", "run.toml:4: train.stps: unknown setting; near names: train.steps"),
        ("[train]\nsteps = -3", "run.toml:2: train.steps = -3: must be a whole number of at least 0"),
        ("[model]\n# few\nnum_experts = 2\ntop_k = 3", "run.toml:4: model.top_k = 3: must be from 1 to the number of"),
        ("[train]\nsteps = = 3", "run.toml:2: not TOML: "),
        ("[train\n", "run.toml:1: not TOML: "),
        ("[train]\nlr = 1\nlr = 2\n", "run.toml:3: not TOML: duplicate key"),
        ("[trian]\n", "run.toml:1: trian: unknown setting; near names: train"),
        ("train.schedule = \"linear\"", "run.toml:1: train.schedule = \"linear\": unknown variant"),
        ("train.seed = 99999999999999999999", "run.toml:1: train.seed = 99999999999999999999: "),
        ("data.tokenizer = 3", "run.toml:1: data.tokenizer = 3: must be text in quotation marks"),
        ("train.lr = { a = 1 }", "run.toml:1: train.lr = { a = 1 }: must be a number"),
    ] {
        let message = resolve(None, Some(file), &[]).unwrap_err();
        assert!(message.starts_with(expected), "{file}: {message}");
        assert!(!message.contains('\n'), "{message}");
    }
    let missing = ConfigLayers { file: Some("nowhere/run.toml".into()), ..ConfigLayers::default() };
    let message = missing.resolve().unwrap_err().to_string();
    assert!(message.starts_with("nowhere/run.toml: the configuration cannot be read: "), "{message}");
    let message = resolve(Some("huge"), None, &[]).unwrap_err();
    assert_eq!(message, "--preset huge: must be one of tiny, small, olmoe-like, switch-like, deepseek-like");
}

#[test]
fn a_value_that_only_clashes_with_a_later_one_is_no_error() {
    assert!(resolve(None, Some("[model]\ntop_k = 12"), &["model.num_experts=16"]).is_ok());
}

#[test]
fn presets_print_and_read_back() {
    for (name, _) in PRESETS {
        let config = resolve(Some(name), None, &[]).unwrap();
        assert_eq!(resolve(None, Some(&print_config(&config)), &[]).unwrap(), config, "{name}");
    }
}

proptest! {
    #[test]
    fn any_text_prints_and_reads_back(prompt in ".{1,20}", name in "[^/\\\\\\p{C}]{3,10}", paths in prop::collection::vec("\\PC{1,9}", 0..4)) {
        let mut config = RunConfig::default();
        config.train.sample_prompt = format!("{prompt}\n[x]\n\"'");
        config.run.name = name;
        config.data.paths = paths;
        let text = print_config(&config);
        prop_assert_eq!(resolve(None, Some(&text), &[]).unwrap(), config, "{}", text);
    }

    #[test]
    fn any_override_gives_a_value_or_one_line(text in "\\PC*", key in "(train|model|data)\\.[a-z_]{1,10}") {
        for text in [text.clone(), format!("{key}={text}")] {
            if let Err(message) = resolve(None, None, &[&text]) {
                prop_assert!(!message.contains('\n'), "{}", message);
            }
        }
    }
}

#[test]
fn a_printed_configuration_of_a_published_family_is_read_back() {
    let mut config = RunConfig::default();
    config.model.activation = ActivationKind::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
    config.model.head_dim = 48;
    config.model.variant = Variant {
        sinks: true,
        window: 128,
        full_attention_layers: vec![1, 3],
        latent: Some(LatentAttention { query_rank: 0, kv_rank: 32, plain_dim: 32, rotary_dim: 16 }),
        rotary: Rotary {
            scaling: RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_len: 8192,
            },
            ..Rotary::default()
        },
        ..Variant::default()
    };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    fs::write(&file, print_config(&config)).unwrap();
    let layers = ConfigLayers { file: Some(file), ..ConfigLayers::default() };
    assert_eq!(layers.resolve().unwrap(), config);
}
