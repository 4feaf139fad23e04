//! `moeworks convert` and `moeworks upcycle`: write a model folder derived from another model.

use std::path::Path;

use moeworks_infer::open::Source;
use moeworks_infer::store::{Holding, Pick, resolve_run};
use moeworks_model::hf::{self, ModelFolder, NewFolder, Quantize, SaveOptions, Saved, copy_companions};
use moeworks_model::safetensors::FileDType;
use moeworks_model::{ModelConfig, UpcycleOptions};
use moeworks_ops::Context;
use moeworks_tensor::{BLOCK_LEN, DType};

use crate::args::{ConvertArgs, UpcycleArgs};
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::model::{check_weights, load};

pub(crate) fn run(args: &ConvertArgs) -> Result<ExitCode, Failure> {
    let dtype = args.dtype.as_deref().map(dtype).transpose()?;
    let blocks = args.quantize.as_deref().map(blocks).transpose()?;
    let only_experts = only_experts(args.only.as_deref())?;
    let source = Source::open(&args.model)?;
    check_target(source.path(), &args.out, args.force)?;
    let ctx = Context::cpu_all_cores();
    let (config, mut weights) = load(&source, &ctx, args.check.check_weights)?;
    if let Some(dtype) = dtype.filter(|_| weights.has_blocks()) {
        weights = weights.compute_copy(&ctx, if dtype == FileDType::BF16 { DType::BF16 } else { DType::F32 });
    }
    let quantize = blocks.map(|dtype| Quantize { ctx: &ctx, dtype, only_experts });
    let options = SaveOptions { dtype, quantize, clamp: args.clamp, ..SaveOptions::default() };
    let saved = write_folder(&args.out, |dir| match &source {
        Source::Folder(run) => {
            let origin = Some(&ModelFolder::open(&run.model_dir)?);
            let saved = hf::save_model(dir, &config, &weights, &SaveOptions { origin, ..options })?;
            copy_companions(&run.model_dir, dir)?;
            Ok(saved)
        }
        Source::Gguf(file) => {
            let tokenizer = Some(&file.tokenizer()?);
            Ok(hf::save_model(dir, &config, &weights, &SaveOptions { tokenizer, ..options })?)
        }
    })?;
    println!("{}: {}", args.out.display(), describe(&saved));
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn upcycle(args: &UpcycleArgs) -> Result<ExitCode, Failure> {
    let from = resolve_run(&args.dense, Pick::Latest)?.model_dir;
    check_target(&from, &args.out, args.force)?;
    let ctx = Context::cpu_all_cores();
    let (config, mut weights) = hf::load_model(&ctx, &from)?;
    check_weights(&from, args.check.check_weights, |most| Ok(hf::check_weights(&ctx, &from, most)?))?;
    if weights.has_blocks() {
        weights = weights.compute_copy(&ctx, DType::F32);
    }
    let UpcycleArgs { experts: num_experts, top_k, every, noise, seed, .. } = *args;
    let options = UpcycleOptions { num_experts, top_k, every, noise, seed };
    let (config, weights) = moeworks_model::upcycle(&ctx, &config, &weights, &options)?;
    let saved = write_folder(&args.out, |dir| {
        let saved = hf::save_model(dir, &config, &weights, &SaveOptions::default())?;
        copy_companions(&from, dir)?;
        Ok(saved)
    })?;
    println!("{}: {}, {}", args.out.display(), describe(&saved), parameters(&config));
    Ok(ExitCode::SUCCESS)
}

fn describe(saved: &Saved) -> String {
    let Saved { model_type, loads_in_transformers, num_in_blocks, num_not_in_blocks } = saved;
    let note = match (loads_in_transformers, num_in_blocks) {
        (true, _) => String::new(),
        (false, 0) => ", which transformers does not support".to_owned(),
        (false, _) => format!(", {num_in_blocks} matrices in blocks, which only moeworks reads"),
    };
    let rest = match num_not_in_blocks {
        0 => String::new(),
        count => {
            format!("; {count} matrices are not quantized: the length of their rows is not a multiple of {BLOCK_LEN}")
        }
    };
    format!("model_type {model_type}{note}{rest}")
}

fn parameters(config: &ModelConfig) -> String {
    let parameters = moeworks_model::model_cost::Parameters::new(config);
    let thousands = crate::progress::thousands;
    format!("{} parameters, {} active per token", thousands(parameters.total()), thousands(parameters.active()))
}

/// Returns an error if the target is the folder that is read, or holds something that the user may want to keep.
fn check_target(from: &Path, to: &Path, is_forced: bool) -> Result<(), Failure> {
    let shown = to.display();
    // The weights are read from the source folder while the target is written.
    if let (Ok(from), Ok(to)) = (from.canonicalize(), to.canonicalize())
        && from == to
    {
        return Err(Failure::input(format!("{shown}: the output folder is the input folder; choose another")));
    }
    let holding = Holding::new(to).map_err(|error| Failure::input(format!("{shown}: {error}")))?;
    let Some(problem) = holding.describe() else { return Ok(()) };
    match holding {
        Holding::File => Err(Failure::input(format!("{shown}: {problem}; give the name of a folder"))),
        Holding::Run | Holding::Checkpoint => {
            Err(Failure::input(format!("{shown}: {problem}, which a model cannot replace; choose another folder")))
        }
        _ if is_forced => Ok(()),
        Holding::Model => {
            Err(Failure::input(format!("{shown}: {problem}; choose another folder, or --force to replace it")))
        }
        _ => Err(Failure::input(format!("{shown}: {problem}; choose another folder, or --force to write beside that"))),
    }
}

/// Writes the model folder `out` atomically: `write` fills a folder with a temporary name, which is then renamed.
fn write_folder<R>(out: &Path, write: impl FnOnce(&Path) -> Result<R, Failure>) -> Result<R, Failure> {
    let folder = NewFolder::begin(out)?;
    let named = |failure: Failure| {
        let (temporary, asked) = (folder.path().display().to_string(), out.display().to_string());
        Failure { message: failure.message.replace(&temporary, &asked), ..failure }
    };
    let written = write(folder.path()).map_err(named)?;
    folder.finish()?;
    Ok(written)
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
