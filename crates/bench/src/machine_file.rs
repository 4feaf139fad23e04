//! The measurement of a machine for predictions of training steps, and their check against real steps.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moeworks_comm::{Communicator, RankOptions, try_run_ranks};
use moeworks_infer::data::Watch;
use moeworks_model::model_cost::{Kept, shape};
use moeworks_ops::linear::linear;
use moeworks_ops::{Context, MachineOptions, peak};
use moeworks_plan::machine::{Machine, Overhead, PredictedStep, ProductRate, StepSizes, predict_step};
use moeworks_plan::{Link, Precision};
use moeworks_tensor::{DType, Tensor};
use moeworks_train::config::{ConfigLayers, Override, RunConfig};
use moeworks_train::language_model::{LanguageModel, LanguageModelStart};
use moeworks_train::metrics::{METRICS_JSONL, read_records};
use moeworks_train::{Ranks, Requests, TrainError, machine_bytes};

use crate::collectives;
use crate::error::BenchError;
use crate::machine;
use crate::ranks::{TIMEOUT, num_cores, on_ranks};
use crate::timing::median;

/// Rows and widths of the products.
const ROWS: [usize; 4] = [8, 64, 512, 2048];
const WIDTHS: [usize; 3] = [64, 256, 768];
/// Steps of a measurement, and those of them that are not counted.
const STEPS: u64 = 10;
const UNCOUNTED: usize = 3;
/// Seconds of each product at least.
const PRODUCT_SECONDS: f64 = 0.04;
/// The memory assumed for a machine that does not report its own.
const UNKNOWN_MEMORY: u64 = 8 << 30;
/// The vocabulary of the byte tokenizer.
const VOCABULARY: usize = 257;

/// A configuration by its settings.
#[derive(Clone, Copy, Debug)]
pub struct NamedConfig {
    /// The name.
    pub name: &'static str,
    /// The settings that differ from those of [`BASE`].
    pub settings: &'static [&'static str],
}

/// The settings of every measured step.
pub const BASE: [&str; 16] = [
    "model.width=128",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.head_dim=64",
    "model.num_experts=8",
    "model.top_k=2",
    "model.expert_width=256",
    "train.seq_len=128",
    "train.batch_size=4",
    "train.precision=f32",
    "train.eval_every=0",
    "train.eval_batches=1",
    "train.sample_every=0",
    "train.checkpoint_every=0",
    "data.validation_fraction=0.1",
];

/// The two configurations on which the constants are fitted.
const REFERENCES: [NamedConfig; 2] = [
    NamedConfig {
        name: "small",
        settings: &[
            "model.width=64",
            "model.head_dim=32",
            "model.num_layers=6",
            "model.num_experts=4",
            "train.batch_size=1",
        ],
    },
    NamedConfig { name: "large", settings: &["model.width=192", "model.head_dim=96", "train.batch_size=16"] },
];

/// Unlike configurations, none of which is used to make the file.
pub const CHECKED: [NamedConfig; 10] = [
    NamedConfig { name: "8 experts, 2 a token", settings: &[] },
    NamedConfig { name: "dense", settings: &["model.num_experts=0", "model.dense_width=512", "model.num_layers=4"] },
    NamedConfig {
        name: "32 narrow experts, 4 a token",
        settings: &["model.num_experts=32", "model.top_k=4", "model.expert_width=64"],
    },
    NamedConfig { name: "wide, bf16", settings: &["model.width=256", "model.head_dim=128", "train.precision=bf16"] },
    NamedConfig { name: "long sequences", settings: &["train.seq_len=512", "train.batch_size=2"] },
    NamedConfig {
        name: "4 microbatches, recomputed",
        settings: &["train.grad_accumulation=4", "train.checkpoint_layers=true"],
    },
    NamedConfig { name: "dp 2", settings: &["parallel.dp=2"] },
    NamedConfig { name: "ep 2", settings: &["parallel.ep=2", "train.batch_size=8"] },
    NamedConfig { name: "tp 2", settings: &["parallel.tp=2", "train.batch_size=8"] },
    NamedConfig { name: "pp 2", settings: &["parallel.pp=2", "train.grad_accumulation=4", "model.num_layers=4"] },
];

impl NamedConfig {
    /// Resolves the settings, with the text at `text`.
    ///
    /// # Errors
    /// If they are invalid.
    pub fn resolve(&self, text: &Path) -> Result<RunConfig, TrainError> {
        let settings = BASE.iter().chain(self.settings);
        let mut overrides = settings.map(|setting| Override::parse(setting)).collect::<Result<Vec<_>, _>>()?;
        overrides.push(Override::new("data.paths", vec![text.display().to_string()]));
        overrides.push(Override::parse(&format!("train.steps={STEPS}"))?);
        let mut config = ConfigLayers { overrides, ..ConfigLayers::default() }.resolve()?;
        config.model.vocab_size = VOCABULARY;
        Ok(config)
    }
}

/// A predicted and a measured step.
#[derive(Clone, Debug)]
pub struct CheckedStep {
    /// The configuration.
    pub name: &'static str,
    /// The prediction.
    pub predicted: PredictedStep,
    /// The median of the measured steps, in seconds.
    pub measured_s: f64,
}

impl CheckedStep {
    /// Returns the error of the prediction as a share of the measured time.
    #[must_use]
    pub fn error(&self) -> f64 {
        self.predicted.total() / self.measured_s - 1.0
    }
}

/// Predicts a step of `config`, whose vocabulary size must be set.
///
/// # Errors
/// If its settings of weights are invalid.
pub fn predict(machine: &Machine, config: &RunConfig) -> Result<PredictedStep, TrainError> {
    let train = &config.train;
    let kept = Kept { precision: train.precision, checkpoint_layers: train.checkpoint_layers };
    let shape = shape(&config.model, &config.weight_table()?, train.seq_len, kept);
    let sizes = StepSizes {
        sequences: train.batch_size,
        seq_len: train.seq_len,
        microbatches: train.grad_accumulation,
        precision: train.precision,
        checkpoint_layers: train.checkpoint_layers,
    };
    Ok(predict_step(machine, &shape, sizes, &config.parallel.layout()))
}

/// A temporary folder, removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self, BenchError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("moeworks-bench-machine-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).map_err(|error| BenchError::Request(format!("{}: {error}", path.display())))?;
        Ok(Self(path))
    }

    fn text(&self) -> Result<PathBuf, BenchError> {
        let path = self.0.join("text.txt");
        let line = |i: usize| format!("Line {i} of a text to measure with, {} and {}.\n", i * 7 % 1000, i * i % 977);
        fs::write(&path, (0..4000).map(line).collect::<String>())
            .map_err(|error| BenchError::Request(format!("{}: {error}", path.display())))?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder for temporary files that cannot be removed is left to the system.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Measures this machine. `progress` is told what is measured.
///
/// # Errors
/// If a rank fails, or a file cannot be written.
pub fn measure(options: &MachineOptions, progress: &mut dyn FnMut(&str)) -> Result<Machine, BenchError> {
    let cores = num_cores();
    let ctx = Context::cpu(cores).on_machine(options);
    progress("memory and products");
    let products = products(cores, options);
    let memory_bytes_per_s = peak::measure(&ctx).read_bytes_per_s;
    progress("links");
    let assumed = Link { latency_s: 5e-6, bytes_per_s: memory_bytes_per_s / 4.0 };
    let link = on_ranks(cores.max(2), |comm| collectives::links(comm).map(|links| links.node))?.unwrap_or(assumed);
    let mut measured = Machine {
        name: machine::name(&ctx),
        cores,
        memory_bytes: machine_bytes().unwrap_or(UNKNOWN_MEMORY) as f64,
        memory_bytes_per_s,
        link,
        overhead: Overhead::default(),
        products,
    };
    progress("two reference steps");
    measured.overhead = fit(&measured, options)?;
    Ok(measured)
}

fn products(cores: usize, options: &MachineOptions) -> Vec<ProductRate> {
    let mut threads = vec![1, cores];
    threads.dedup();
    let mut rates = Vec::new();
    for threads in threads {
        let ctx = Context::cpu(threads).on_machine(options);
        for (precision, dtype) in [(Precision::F32, DType::F32), (Precision::Bf16, DType::BF16)] {
            for (rows, width) in ROWS.iter().flat_map(|&rows| WIDTHS.map(|width| (rows, width))) {
                let x = Tensor::zeros(ctx.pool(), &[rows, width], dtype);
                let w = Tensor::zeros(ctx.pool(), &[width, width], dtype);
                let run = || drop(linear(&ctx, &x, &w, DType::F32));
                run();
                let (begun, mut times) = (Instant::now(), Vec::new());
                while times.len() < 3 || begun.elapsed().as_secs_f64() < PRODUCT_SECONDS {
                    let start = Instant::now();
                    run();
                    times.push(start.elapsed().as_secs_f64());
                }
                let flops = 2.0 * (rows * width * width) as f64 / median(times).max(1e-9);
                rates.push(ProductRate { precision, threads, rows, width, flops });
            }
        }
    }
    rates
}

/// Fits the two constants: each reference step takes what its parts with known rates take, and the rest is shared
/// between its layers and its kept values.
fn fit(machine: &Machine, options: &MachineOptions) -> Result<Overhead, BenchError> {
    let scratch = Scratch::new()?;
    let text = scratch.text()?;
    let unit = Machine { overhead: Overhead { layer_s: 1.0, passes: 1.0 }, ..machine.clone() };
    let mut rows = Vec::new();
    for reference in REFERENCES {
        let config = reference.resolve(&text)?;
        let measured = median_step(&config, &scratch.0.join(reference.name), options)?;
        let predicted = predict(&unit, &config)?;
        let rest = (measured - predicted.products - predicted.update).max(0.0);
        rows.push([predicted.layers, predicted.passes, rest]);
    }
    Ok(solve(rows[0], rows[1]))
}

/// Solves `layers * x + passes * y = rest` for two steps. If one of them would be negative it is 0, and the other is
/// the best for both.
fn solve(a: [f64; 3], b: [f64; 3]) -> Overhead {
    let determinant = a[0] * b[1] - b[0] * a[1];
    let (layer_s, passes) = if determinant.abs() > 0.0 {
        ((a[2] * b[1] - b[2] * a[1]) / determinant, (a[0] * b[2] - b[0] * a[2]) / determinant)
    } else {
        (-1.0, -1.0)
    };
    let alone = |index: usize| {
        let squares = a[index] * a[index] + b[index] * b[index];
        if squares > 0.0 { (a[index] * a[2] + b[index] * b[2]) / squares } else { 0.0 }
    };
    match (layer_s >= 0.0, passes >= 0.0) {
        (true, true) => Overhead { layer_s, passes },
        (false, _) => Overhead { layer_s: 0.0, passes: alone(1) },
        (true, false) => Overhead { layer_s: alone(0), passes: 0.0 },
    }
}

/// Trains some steps of `config` in the folder `dir` and returns the median of their times.
fn median_step(config: &RunConfig, dir: &Path, options: &MachineOptions) -> Result<f64, BenchError> {
    let watch = Watch::default();
    let train = |ranks: Option<Ranks>| -> Result<(), TrainError> {
        let mut config = config.clone();
        config.model.vocab_size = 0;
        config.data.cache_dir = dir.join("cache");
        let start = LanguageModelStart {
            machine: options.clone(),
            ranks,
            ..LanguageModelStart::new(config, dir.join("run"), &watch)
        };
        LanguageModel::start(start)?.run(&Requests::default(), &mut |_| ())?;
        Ok(())
    };
    let num_ranks = config.parallel.num_ranks();
    if num_ranks == 1 {
        train(None)?;
    } else {
        let as_rank = |comm: &dyn Communicator| train(Some(Ranks::of_config(comm, config, false)?));
        try_run_ranks(&RankOptions::new(num_ranks).with_timeout(TIMEOUT.max(Duration::from_secs(60))), as_rank)?;
    }
    let records = read_records(&dir.join("run").join(METRICS_JSONL)).map_err(TrainError::from)?;
    let times = records.map(|record| record.map(|record| record.step_ms / 1e3)).collect::<Result<Vec<f64>, _>>();
    let times = times.map_err(TrainError::from)?;
    Ok(median(times.into_iter().skip(UNCOUNTED).collect()))
}

/// Compares predicted with real steps of [`CHECKED`] configurations, up to `most` of them. `done` gets each.
///
/// # Errors
/// If a step cannot be made.
pub fn check(
    machine: &Machine,
    options: &MachineOptions,
    most: usize,
    done: &mut dyn FnMut(&CheckedStep),
) -> Result<Vec<CheckedStep>, BenchError> {
    let scratch = Scratch::new()?;
    let text = scratch.text()?;
    let mut steps = Vec::new();
    for (index, named) in CHECKED.iter().take(most).enumerate() {
        let config = named.resolve(&text)?;
        let measured_s = median_step(&config, &scratch.0.join(index.to_string()), options)?;
        let step = CheckedStep { name: named.name, predicted: predict(machine, &config)?, measured_s };
        done(&step);
        steps.push(step);
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_steps_give_two_constants_and_none_is_negative() {
        assert_eq!(solve([1.0, 2.0, 8.0], [3.0, 1.0, 9.0]), Overhead { layer_s: 2.0, passes: 3.0 });
        let only_layers = solve([1.0, 1.0, 2.0], [1.0, 3.0, 1.0]);
        assert_eq!((only_layers.layer_s, only_layers.passes), (1.5, 0.0));
        assert_eq!(solve([0.0; 3], [0.0; 3]), Overhead { layer_s: 0.0, passes: 0.0 });
    }

    #[test]
    fn every_checked_configuration_is_valid_and_none_is_a_reference() {
        let text = Path::new("text.txt");
        let resolved = |named: &NamedConfig| named.resolve(text).unwrap();
        let checked: Vec<RunConfig> = CHECKED.iter().map(resolved).collect();
        for reference in REFERENCES {
            assert!(!checked.contains(&resolved(&reference)), "{}", reference.name);
        }
        let layouts = checked.iter().filter(|config| config.parallel.num_ranks() == 2).count();
        assert_eq!(layouts, 4, "dp, ep, tp and pp");
    }
}
