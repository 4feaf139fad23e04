//! `moeworks convert` and `moeworks upcycle`: a model folder from another.

use std::path::Path;
use std::process::ExitCode;

use moeworks_model::hf::{self, ModelFolder, Quantize, SaveOptions, Saved, copy_companions};
use moeworks_model::safetensors::FileDType;
use moeworks_model::{ModelConfig, UpcycleOptions};
use moeworks_ops::Context;
use moeworks_tensor::{BLOCK_LEN, DType};
use moeworks_train::store::{Pick, resolve_run};

use crate::args::{ConvertArgs, UpcycleArgs};
use crate::failure::Failure;
use crate::model::Source;

pub(crate) fn run(args: &ConvertArgs) -> Result<ExitCode, Failure> {
    let dtype = args.dtype.as_deref().map(dtype).transpose()?;
    let blocks = args.quantize.as_deref().map(blocks).transpose()?;
    let only_experts = only_experts(args.only.as_deref())?;
    let source = Source::open(&args.model)?;
    check_target(source.path(), &args.out)?;
    let ctx = Context::cpu_all_cores();
    let (config, mut weights) = source.load(&ctx)?;
    if let Some(dtype) = dtype.filter(|_| weights.has_blocks()) {
        weights = weights.compute_copy(&ctx, if dtype == FileDType::BF16 { DType::BF16 } else { DType::F32 });
    }
    let quantize = blocks.map(|dtype| Quantize { ctx: &ctx, dtype, only_experts });
    let options = SaveOptions { dtype, quantize, ..SaveOptions::default() };
    let saved = match &source {
        Source::Folder(run) => {
            let origin = Some(&ModelFolder::open(&run.model_dir)?);
            let saved = hf::save_model(&args.out, &config, &weights, &SaveOptions { origin, ..options })?;
            copy_companions(&run.model_dir, &args.out)?;
            saved
        }
        Source::Gguf(file) => {
            let tokenizer = Some(&file.tokenizer()?);
            hf::save_model(&args.out, &config, &weights, &SaveOptions { tokenizer, ..options })?
        }
    };
    println!("{}: {}", args.out.display(), describe(&saved));
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn upcycle(args: &UpcycleArgs) -> Result<ExitCode, Failure> {
    let from = resolve_run(&args.dense, Pick::Latest)?.model_dir;
    check_target(&from, &args.out)?;
    let ctx = Context::cpu_all_cores();
    let (config, mut weights) = hf::load_model(&ctx, &from)?;
    if weights.has_blocks() {
        weights = weights.compute_copy(&ctx, DType::F32);
    }
    let UpcycleArgs { experts: num_experts, top_k, every, noise, seed, .. } = *args;
    let options = UpcycleOptions { num_experts, top_k, every, noise, seed };
    let (config, weights) = moeworks_model::upcycle(&ctx, &config, &weights, &options)?;
    let saved = hf::save_model(&args.out, &config, &weights, &SaveOptions::default())?;
    copy_companions(&from, &args.out)?;
    println!("{}: {}, {}", args.out.display(), describe(&saved), parameters(&config));
    Ok(ExitCode::SUCCESS)
}

fn describe(saved: &Saved) -> String {
    let Saved { model_type, loads_in_transformers, num_in_blocks, num_not_in_blocks } = saved;
    let note = match (loads_in_transformers, num_in_blocks) {
        (true, _) => String::new(),
        (false, 0) => ", which transformers has no class for".to_owned(),
        (false, _) => format!(", {num_in_blocks} matrices in blocks, which moeworks alone reads"),
    };
    let rest = match num_not_in_blocks {
        0 => String::new(),
        count => format!("; {count} stay as they are: their rows are no multiple of {BLOCK_LEN}"),
    };
    format!("model_type {model_type}{note}{rest}")
}

fn parameters(config: &ModelConfig) -> String {
    let parameters = moeworks_model::account::Parameters::of(config);
    let thousands = crate::progress::thousands;
    format!("{} parameters, {} active per token", thousands(parameters.total()), thousands(parameters.active()))
}

/// Weights are read from the folder while the new one is written: they must not be the same.
fn check_target(from: &Path, to: &Path) -> Result<(), Failure> {
    match (from.canonicalize(), to.canonicalize()) {
        (Ok(from), Ok(to)) if from == to => {
            Err(Failure::input(format!("{}: the folder to write is the one that is read; give another", to.display())))
        }
        _ => Ok(()),
    }
}

fn dtype(name: &str) -> Result<FileDType, Failure> {
    match name {
        "f32" => Ok(FileDType::F32),
        "bf16" => Ok(FileDType::BF16),
        "f16" => Ok(FileDType::F16),
        _ => Err(Failure::input(format!("--dtype {name}: must be f32, bf16 or f16"))),
    }
}

fn blocks(name: &str) -> Result<DType, Failure> {
    match name {
        "int8" => Ok(DType::Q8),
        "int4" => Ok(DType::Q4),
        _ => Err(Failure::input(format!("--quantize {name}: must be int8 or int4"))),
    }
}

fn only_experts(which: Option<&str>) -> Result<bool, Failure> {
    match which {
        None => Ok(false),
        Some("experts") => Ok(true),
        Some(other) => Err(Failure::input(format!("--only {other}: must be experts"))),
    }
}
