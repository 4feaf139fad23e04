//! Frozen weights (`train.freeze`).

use std::path::{Path, PathBuf};

use moeworks_comm::{RankOptions, try_run_ranks};
use moeworks_infer::data::Watch;
use moeworks_model::hf::load_model;
use moeworks_model::safetensors::SafetensorsFile;
use moeworks_model::{Decoder, GradTarget, ModelConfig, ParamSet, PassOptions, TokenBatch, WeightTable};
use moeworks_ops::linear::Write;
use moeworks_ops::{Context, MachineOptions};
use moeworks_tensor::DType;
use moeworks_train::config::{ConfigLayers, Override, RunConfig};
use moeworks_train::language_model::{LanguageModel, LanguageModelResume, LanguageModelStart, LanguageModelTrainer};
use moeworks_train::metrics::{METRICS_JSONL, Record, read_records};
use moeworks_train::optimizer::global_norm;
use moeworks_train::{Ranks, Requests, resumed_config};

/// A model whose steps take milliseconds, with experts in every other layer.
const TINY: &str = "model.width=16 model.num_layers=2 model.num_heads=2 model.num_kv_heads=2 model.head_dim=8 \
    model.num_experts=6 model.expert_width=8 model.moe_every=2 model.dense_width=12 model.shared_width=6 \
    model.max_seq_len=16 train.seq_len=16 train.batch_size=6 train.eval_every=0 train.sample_every=0 \
    train.checkpoint_every=0 train.precision=f32 train.threads=1 train.warmup_steps=0 train.steps=4 parallel.pin=false";

/// The frozen weights: the embedding, the experts, and the queries and half of the feed-forward of the first layer.
const FROZEN: [&str; 4] =
    ["model.embed_tokens.*", "*.mlp.experts.*", "model.layers.0.self_attn.q_proj.*", "model.layers.0.mlp.down_proj"];

struct Place {
    folder: tempfile::TempDir,
    config: RunConfig,
}

impl Place {
    fn new(settings: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let text = folder.path().join("text.txt");
        std::fs::write(&text, "A text that is short and easily learnt. ".repeat(100)).expect("written");
        let parse = |setting| Override::parse(setting).expect("a setting");
        let mut overrides: Vec<Override> =
            TINY.split_whitespace().chain(settings.split_whitespace()).map(parse).collect();
        overrides.push(Override::new("data.paths", vec![text.display().to_string()]));
        overrides.push(Override::new("data.cache_dir", folder.path().join("cache").display().to_string()));
        overrides.push(Override::new("train.freeze", FROZEN.map(str::to_owned).to_vec()));
        let config = ConfigLayers { overrides, ..ConfigLayers::default() }.resolve().expect("valid");
        Self { folder, config }
    }

    fn run_dir(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Trains a new run for `steps` steps on the configured number of ranks, and returns its last checkpoint.
    fn train(&self, name: &str, steps: u64) -> PathBuf {
        let mut config = self.config.clone();
        config.train.steps = steps;
        self.on_ranks(&config, |ranks| {
            let watch = Watch::default();
            let start = LanguageModelStart::new(config.clone(), self.run_dir(name), &watch);
            LanguageModel::start(LanguageModelStart { ranks, ..start }).expect("a run")
        })
    }

    /// Resumes a run up to `steps` steps.
    fn resume(&self, name: &str, steps: u64) -> PathBuf {
        let change = |mut config: RunConfig| {
            config.train.steps = steps;
            Ok(config)
        };
        let config = resumed_config(&self.run_dir(name), change).expect("the run goes on");
        self.on_ranks(&config, |ranks| {
            let (run_dir, config, watch) = (self.run_dir(name), config.clone(), &Watch::default());
            LanguageModel::resume(LanguageModelResume {
                run_dir,
                config,
                ranks,
                machine: MachineOptions::default(),
                watch,
            })
            .expect("a run")
        })
    }

    fn on_ranks(&self, config: &RunConfig, start: impl Fn(Option<Ranks>) -> LanguageModelTrainer + Sync) -> PathBuf {
        let num_ranks = config.parallel.num_ranks();
        let finish = |mut trainer: LanguageModelTrainer| {
            trainer.run(&Requests::default(), &mut |_| ()).expect("trained");
            trainer.last_checkpoint().map(Path::to_owned)
        };
        if num_ranks == 1 {
            return finish(start(None)).expect("a checkpoint");
        }
        let checkpoints = try_run_ranks(&RankOptions::new(num_ranks), |comm| {
            Ok::<_, moeworks_train::TrainError>(finish(start(Some(Ranks::of_config(comm, config, false)?))))
        });
        checkpoints.expect("trained").swap_remove(0).expect("the root writes checkpoints")
    }

    fn records(&self, name: &str) -> Vec<Record> {
        let records = read_records(&self.run_dir(name).join(METRICS_JSONL)).expect("records");
        records.map(|record| record.expect("readable")).collect()
    }
}

/// Returns the table of a run's weights, with the vocabulary of bytes.
fn table(config: &RunConfig) -> (ModelConfig, WeightTable) {
    let mut config = config.clone();
    config.model.vocab_size = 257;
    let table = config.weight_table().expect("patterns of names");
    (config.model, table)
}

/// Asserts that the frozen weights of a checkpoint are bit-identical to their initial values, and that all others
/// differ.
fn assert_only_trained_weights_moved(place: &Place, checkpoint: &Path, what: &str) {
    let (ctx, (model, table)) = (Context::cpu(1), table(&place.config));
    let first = Decoder::new(model).expect("a model").init(&ctx, place.config.train.seed, None);
    let (_, last) = load_model(&ctx, checkpoint).expect("a model");
    for ((spec, (_, first)), (_, last)) in table.specs().iter().zip(first.tensors()).zip(last.tensors()) {
        assert_eq!(first.to_f32_vec() == last.to_f32_vec(), !spec.is_trainable, "{what}: {}", spec.name);
    }
}

#[test]
fn frozen_weights_keep_their_bits_on_every_layout_and_all_others_learn() {
    let one = Place::new("");
    let checkpoint = one.train("run", 4);
    assert_only_trained_weights_moved(&one, &checkpoint, "one rank");
    let losses: Vec<f64> = one.records("run").iter().map(|record| record.loss).collect();
    for (dp, ep, tp, zero) in
        [(2, 1, 1, 0), (2, 1, 1, 1), (2, 1, 1, 2), (2, 1, 1, 3), (1, 2, 1, 0), (1, 1, 2, 0), (2, 1, 2, 2), (2, 2, 1, 3)]
    {
        let layout = format!("parallel.dp={dp} parallel.ep={ep} parallel.tp={tp} parallel.zero={zero}");
        let place = Place::new(&layout);
        assert_only_trained_weights_moved(&place, &place.train("run", 4), &layout);
        for (record, loss) in place.records("run").iter().zip(&losses) {
            assert!((record.loss - loss).abs() < 1e-4 * loss, "{layout}: {} at step {}", record.loss, record.step);
        }
    }
}

#[test]
fn frozen_weights_keep_their_bits_in_bf16_and_where_experts_move() {
    for settings in ["train.precision=bf16", "parallel.ep=2 parallel.moving=weights", "train.grad_accumulation=2"] {
        let place = Place::new(settings);
        assert_only_trained_weights_moved(&place, &place.train("run", 3), settings);
    }
}

#[test]
fn a_checkpoint_has_moments_of_trained_weights_alone() {
    for settings in ["", "parallel.dp=2 parallel.zero=1"] {
        let place = Place::new(settings);
        let checkpoint = place.train("run", 2);
        let file = SafetensorsFile::open(&checkpoint.join("optimizer.safetensors")).expect("moments");
        let (_, table) = table(&place.config);
        for spec in table.specs() {
            let has = |moment: &str| file.tensors().contains_key(&format!("{moment}.{}", spec.name));
            assert_eq!([has("first"), has("second")], [spec.is_trainable; 2], "{settings} {}", spec.name);
        }
    }
}

#[test]
fn a_run_with_frozen_weights_that_is_resumed_makes_the_steps_of_one_that_was_not_stopped() {
    for settings in ["train.schedule=constant", "train.schedule=constant parallel.dp=2 parallel.zero=3"] {
        let place = Place::new(settings);
        place.train("whole", 4);
        place.train("parts", 2);
        place.resume("parts", 4);
        let losses = |name| place.records(name).iter().map(|record| record.loss).collect::<Vec<_>>();
        assert_eq!(losses("parts"), losses("whole"), "{settings}");
    }
}

#[test]
fn routers_with_state_are_trained_beside_frozen_weights_whatever_ranks_share_out() {
    let settings = "model.router.kind=relu train.schedule=constant";
    let one = Place::new(settings);
    assert_only_trained_weights_moved(&one, &one.train("run", 3), settings);
    let losses: Vec<f64> = one.records("run").iter().map(|record| record.loss).collect();
    for zero in 0..=3 {
        let place = Place::new(&format!("{settings} parallel.dp=2 parallel.zero={zero}"));
        assert_only_trained_weights_moved(&place, &place.train("run", 3), settings);
        for (record, loss) in place.records("run").iter().zip(&losses) {
            assert!((record.loss - loss).abs() < 1e-4 * loss, "{zero}: {} at step {}", record.loss, record.step);
        }
    }
}

#[test]
fn a_run_is_not_resumed_with_other_frozen_weights() {
    let place = Place::new("");
    place.train("run", 2);
    let change = |mut config: RunConfig| {
        config.train.freeze.pop();
        Ok(config)
    };
    let error = resumed_config(&place.run_dir("run"), change).expect_err("refused").to_string();
    assert!(error.contains("train.freeze"), "{error}");
}

#[test]
fn gradients_of_trained_weights_and_their_norm_are_as_if_nothing_were_frozen() {
    let place = Place::new("");
    let (ctx, (model, table)) = (Context::cpu(1), table(&place.config));
    let ids: Vec<u32> = (0..32).map(|i| i * 7919 % 257).collect();
    let batch = TokenBatch { inputs: &ids, targets: &ids, num_sequences: 2, seq_len: 16, ..TokenBatch::default() };
    let options = PassOptions { grad_scale: 1.0 / 32.0, balance_coef: 0.01, ..PassOptions::default() };
    let decoder = Decoder::with_table(model.clone(), table.clone()).expect("a model");
    let weights = decoder.init(&ctx, 1, None);
    let pass = |mut grads| {
        decoder
            .forward_backward(&ctx, &weights, &[batch], &options, GradTarget::new(Write::Replace, &mut grads))
            .expect("a pass");
        grads
    };
    let (all, some) = (pass(weights.zeros_like(&ctx)), pass(weights.gradients(&ctx, &table, DType::F32)));
    let mut sum = 0.0;
    for ((spec, (_, all)), (_, some)) in table.specs().iter().zip(all.tensors()).zip(some.tensors()) {
        if spec.is_trainable {
            assert!(all.bytes() == some.bytes(), "{}", spec.name);
            sum += all.f32s().iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
        } else {
            assert_eq!(some.is_empty(), table.skips_gradient(spec), "{}", spec.name);
        }
    }
    let norm = global_norm(&ctx, &table, &some);
    assert!((norm - sum.sqrt()).abs() < 1e-6 * norm, "{norm}, not {}", sum.sqrt());
}
