//! Training on several weighted sources, and on a single one.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moeworks_infer::data::{DataError, ReadPhase, Watch};
use moeworks_model::Tokenizer;
use moeworks_ops::MachineOptions;
use moeworks_train::config::{ConfigLayers, Override, RunConfig};
use moeworks_train::data::{Dataset, DatasetError, Mix};
use moeworks_train::language_model::{LanguageModel, LanguageModelResume, LanguageModelStart, LanguageModelTrainer};
use moeworks_train::{Event, Outcome, Requests, TrainError, resumed_config};

/// Returns the configuration of a small model on the sources `paths`.
fn config(cache: &Path, paths: &[String], settings: &[&str]) -> RunConfig {
    let small = [
        "model.width=32",
        "model.num_layers=1",
        "model.num_heads=2",
        "model.num_kv_heads=2",
        "model.head_dim=16",
        "model.num_experts=4",
        "model.expert_width=32",
        "model.max_seq_len=64",
        "train.seq_len=32",
        "train.batch_size=3",
        "train.grad_accumulation=2",
        "train.steps=6",
        "train.warmup_steps=1",
        "train.sample_every=0",
        "train.eval_batches=2",
        "train.checkpoint_every=2",
        "train.threads=1",
    ];
    let mut overrides: Vec<Override> =
        small.iter().chain(settings).map(|text| Override::parse(text).unwrap()).collect();
    overrides.push(Override::new("data.paths", paths.to_vec()));
    overrides.push(Override::new("data.cache_dir", cache.display().to_string()));
    ConfigLayers { overrides, ..ConfigLayers::default() }.resolve().unwrap()
}

/// A folder with files of capital letters, of digits and of small letters. All lines are different.
struct Texts(tempfile::TempDir);

impl Texts {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let alphabet = |first: u8, len: usize| {
            let letter = |i: usize| char::from(first + ((i * i + i / 7) % len) as u8);
            (0..9000).map(letter).collect::<String>()
        };
        fs::write(folder.path().join("large.txt"), alphabet(b'a', 26).repeat(3)).unwrap();
        fs::write(folder.path().join("small.txt"), &alphabet(b'A', 26)[..800]).unwrap();
        fs::create_dir(folder.path().join("digits=1")).unwrap();
        fs::write(folder.path().join("digits=1/x.txt"), alphabet(b'0', 10)).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn dataset(&self, names: &[&str]) -> Result<Dataset, DatasetError> {
        let paths: Vec<String> = names.iter().map(|name| self.path(name)).collect();
        let config = config(&self.0.path().join("cache"), &paths, &[]);
        Dataset::open(&config, &Mix::find(&config.data.texts(), &Watch::default())?, &Tokenizer::bytes())
    }

    fn run(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// Returns the source of each of the first `num` training sequences: 0 for small letters, 1 for capitals, 2 for
/// digits.
fn sources(data: &Dataset, num: usize) -> Vec<usize> {
    let mut batch = moeworks_infer::data::Batch::default();
    data.fill_sequences(0, num, &mut batch);
    let kind = |ids: &[u32]| match ids[0] as u8 {
        b'a'..=b'z' => 0,
        b'A'..=b'Z' => 1,
        _ => 2,
    };
    batch.inputs.chunks(batch.seq_len).map(kind).collect()
}

#[test]
fn sequences_are_drawn_by_weight_over_any_stretch() {
    let texts = Texts::new();
    let data = texts.dataset(&["large.txt=5", "small.txt=3", "digits=1=2"]).unwrap();
    let drawn = sources(&data, 1000);
    for start in [0, 1, 137, 500] {
        for end in [start + 10, start + 100, 1000] {
            for (source, share) in [0.5, 0.3, 0.2].into_iter().enumerate() {
                let count = drawn[start..end].iter().filter(|&&drawn| drawn == source).count() as f64;
                assert!((count - share * (end - start) as f64).abs() <= 2.0, "{source} in {start}..{end}: {count}");
            }
        }
    }
    assert_eq!(data.sequences_of_parts(1000), [500, 300, 200]);
}

#[test]
fn validation_is_held_out_of_every_source() {
    let texts = Texts::new();
    let data = texts.dataset(&["large.txt=1", "small.txt=1", "digits=1=1"]).unwrap();
    for part in data.parts() {
        assert!(!part.validation().is_empty() && !part.train().is_empty(), "{}", part.name());
    }
    let windows: u64 = data.validation_batches(0).map(|batch| batch.num_sequences as u64).sum();
    assert_eq!(windows, data.num_validation());
    let first: Vec<u8> = data.validation_batches(1).flat_map(|batch| batch.inputs).map(|id| id as u8).collect();
    assert!(first.iter().any(u8::is_ascii_uppercase) && first.iter().any(u8::is_ascii_digit));
}

#[test]
fn a_single_source_is_the_same_with_a_weight_and_without() {
    let texts = Texts::new();
    let [plain, weighted] = ["large.txt", "large.txt=0.2"].map(|name| texts.dataset(&[name]).unwrap());
    for step in [0, 5, 1000] {
        assert_eq!(plain.train_batch(step, 1), weighted.train_batch(step, 1));
    }
    assert!(plain.validation_batches(0).eq(weighted.validation_batches(0)));
}

/// The expected first tokens of each sequence were recorded before weights were supported.
#[test]
fn without_weights_the_order_is_what_it_was() {
    let texts = Texts::new();
    let data = texts.dataset(&["large.txt", "small.txt"]).unwrap();
    let firsts = |batch: moeworks_infer::data::Batch| -> Vec<String> {
        let text = |ids: &[u32]| ids[..4].iter().map(|&id| char::from(id as u8)).collect();
        batch.inputs.chunks(batch.seq_len).map(text).collect()
    };
    let held_out: Vec<String> = data.validation_batches(1).flat_map(firsts).collect();
    let found = (firsts(data.train_batch(0, 0)), firsts(data.train_batch(400, 1)), held_out);
    assert_eq!(format!("{found:?}"), GOLDEN);
}

const GOLDEN: &str = r#"(["einu", "leax", "bkwj"], ["oqty", "aabe", "fozm"], ["exsp", "lihi", "qzky"])"#;

#[test]
fn weights_that_are_none_are_refused() {
    let texts = Texts::new();
    for (names, expected) in [
        (&["large.txt=0"][..], "large.txt=0: its weight, behind the last =, must be a number above 0, such as 0.3"),
        (&["large.txt=-1"], "large.txt=-1: its weight"),
        (&["large.txt=nan"], "large.txt=nan: its weight"),
        (&["large.txt=inf"], "large.txt=inf: its weight"),
        (&["large.txt=1e999"], "large.txt=1e999: its weight"),
        (&["large.txt=half"], "large.txt=half: its weight"),
        (&["large.txt=0.5", "small.txt"], "small.txt: has no weight, but other sources have"),
        (&["nowhere.txt=0.5"], "nowhere.txt: no such file or folder"),
        (&["a=b/nowhere.txt"], "a=b/nowhere.txt: no such file or folder"),
    ] {
        let message = texts.dataset(names).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
        assert!(!message.contains('\n'));
    }
    // A file in two sources would be in both training and held-out data.
    let message = texts.dataset(&["large.txt=1", "*.txt=1", "small.txt=1"]).unwrap_err().to_string();
    assert!(message.contains("small.txt: no text found: 2 files named more than once are read once"), "{message}");
}

fn losses(trainer: &mut LanguageModelTrainer, stop_after: u64) -> Vec<(u64, f64, Option<f64>)> {
    let (requests, mut losses) = (Requests::default(), Vec::new());
    let stop = Arc::clone(&requests.stop);
    let outcome = trainer.run(&requests, &mut |event| {
        if let Event::Step { record, .. } = event {
            losses.push((record.step, record.loss, record.val_loss));
            stop.store(record.step == stop_after, Ordering::SeqCst);
        }
    });
    assert_eq!(outcome.unwrap(), if stop_after < 6 { Outcome::Stopped } else { Outcome::Finished });
    losses
}

#[test]
fn a_run_on_weighted_sources_resumes_exactly() {
    let texts = Texts::new();
    let paths = ["large.txt=0.55", "small.txt=0.25", "digits=1=0.2"].map(|name| texts.path(name));
    let config = config(&texts.run("cache"), &paths, &[]);
    let watch = Watch::default();
    let start = |config, name| LanguageModel::start(LanguageModelStart::new(config, texts.run(name), &watch)).unwrap();
    let mut whole = start(config.clone(), "whole");
    let unbroken = losses(&mut whole, 6);
    let mut first = start(config, "parts");
    let mut broken = losses(&mut first, 3);
    drop(first);
    let (run_dir, config) = (texts.run("parts"), resumed_config(&texts.run("parts"), Ok).unwrap());
    let resume =
        LanguageModelResume { run_dir, config, ranks: None, machine: MachineOptions::default(), watch: &watch };
    let mut second = LanguageModel::resume(resume).unwrap();
    assert_eq!(second.task().dataset().train_batch(4, 1), whole.task().dataset().train_batch(4, 1));
    broken.extend(losses(&mut second, 6));
    assert_eq!(broken, unbroken);
}

#[test]
fn reading_tells_how_far_it_is_and_stops_when_asked() {
    let texts = Texts::new();
    fs::write(texts.path("long.txt"), "words and words ".repeat(1 << 19)).unwrap();
    let paths = [texts.path("long.txt")];
    let config = config(&texts.run("cache"), &paths, &[]);
    let stop = Arc::new(AtomicBool::new(false));
    let setter = Arc::clone(&stop);
    let watch = Watch::new(stop).with_listener(move |progress| {
        assert_eq!((progress.num_files, progress.num_bytes), (1, 8 << 20));
        let is_half = !progress.is_over && progress.phase == ReadPhase::Tokenising && progress.num_bytes_done > 4 << 20;
        setter.store(is_half, Ordering::Relaxed);
    });
    let error = LanguageModel::start(LanguageModelStart::new(config, texts.run("run"), &watch)).err().unwrap();
    assert!(matches!(error, TrainError::Data(DataError::Stopped)), "{error}");
    assert!(!texts.run("run").exists());
    assert_eq!(fs::read_dir(texts.run("cache")).unwrap().count(), 0, "nothing half-written stays");
}
