//! `moeworks convert` and `moeworks upcycle`: a model folder from another.

use std::path::Path;
use std::process::ExitCode;

use moeworks_model::hf::{self, ModelFolder, SaveOptions, copy_companions};
use moeworks_model::safetensors::FileDType;
use moeworks_model::{ModelConfig, UpcycleOptions};
use moeworks_train::store::{Pick, resolve_run};

use crate::args::{ConvertArgs, UpcycleArgs};
use crate::failure::Failure;

pub(crate) fn run(args: &ConvertArgs) -> Result<ExitCode, Failure> {
    let dtype = args.dtype.as_deref().map(dtype).transpose()?;
    let from = resolve_run(&args.model, Pick::Latest)?.model_dir;
    check_target(&from, &args.out)?;
    let ctx = crate::model::context(0);
    let (config, weights) = hf::load_model(&ctx, &from)?;
    let origin = ModelFolder::open(&from)?;
    let options = SaveOptions { origin: Some(&origin), dtype, ..SaveOptions::default() };
    let saved = hf::save_model(&args.out, &config, &weights, &options)?;
    copy_companions(&from, &args.out)?;
    println!("{}: {}", args.out.display(), describe(&saved));
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn upcycle(args: &UpcycleArgs) -> Result<ExitCode, Failure> {
    let from = resolve_run(&args.dense, Pick::Latest)?.model_dir;
    check_target(&from, &args.out)?;
    let ctx = crate::model::context(0);
    let (config, weights) = hf::load_model(&ctx, &from)?;
    let UpcycleArgs { experts: num_experts, top_k, every, noise, seed, .. } = *args;
    let options = UpcycleOptions { num_experts, top_k, every, noise, seed };
    let (config, weights) = moeworks_model::upcycle(&ctx, &config, &weights, &options)?;
    let saved = hf::save_model(&args.out, &config, &weights, &SaveOptions::default())?;
    copy_companions(&from, &args.out)?;
    println!("{}: {}, {}", args.out.display(), describe(&saved), parameters(&config));
    Ok(ExitCode::SUCCESS)
}

fn describe(saved: &hf::Saved) -> String {
    let note = if saved.loads_in_transformers { "" } else { ", which transformers has no class for" };
    format!("model_type {}{note}", saved.model_type)
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
