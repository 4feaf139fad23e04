//! `moeworks bench decode`: prints the speed of generation and prefill of a model, or of a shape with every type of
//! weights.

use std::path::Path;

use moeworks_bench::decode::{self, DecodeSpeed, Model};
use moeworks_bench::machine;
use moeworks_infer::open::{LoadedWeights, Source, WeightsToCheck};
use moeworks_model::{Decoder, ModelConfig};
use moeworks_ops::Context;
use moeworks_ops::peak::Peaks;
use moeworks_tensor::{DType, Device};
use moeworks_train::config::{ConfigLayers, Override, RunConfig};

use super::Output;
use crate::args::DecodeArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::tables;

const HEADER: [&str; 8] =
    ["weights", "texts", "MB a step", "ms a step", "tokens/s", "of bandwidth", "prefill tokens/s", "of product"];

/// Returns the types that `--types` names, or all types if it names none.
fn types(names: &[String]) -> Vec<DType> {
    const TYPES: [(&str, DType); 4] =
        [("f32", DType::F32), ("bf16", DType::BF16), ("q8", DType::Q8), ("q4", DType::Q4)];
    let is_asked = |known: &str| names.is_empty() || names.iter().any(|name| name.eq_ignore_ascii_case(known));
    TYPES.iter().filter(|(known, _)| is_asked(known)).map(|&(_, dtype)| dtype).collect()
}

/// Returns the model with the given settings of its router, each as `setting=value`.
fn with_router(config: &ModelConfig, settings: &[String]) -> Result<ModelConfig, Failure> {
    if settings.is_empty() {
        return Ok(config.clone());
    }
    let parse = |setting: &String| Override::parse(&format!("model.router.{setting}"));
    let overrides = settings.iter().map(parse).collect::<Result<_, _>>()?;
    let mut base = RunConfig { model: config.clone(), ..RunConfig::default() };
    base.train.seq_len = base.train.seq_len.min(config.max_seq_len);
    let layers = ConfigLayers { overrides, ..ConfigLayers::default() };
    Ok(ModelConfig { router: layers.resolve_over(base)?.model.router, ..config.clone() })
}

/// Returns an error if the settings of a router need weights other than the model's.
fn check_router(config: &ModelConfig, stored: &ModelConfig, args: &DecodeArgs) -> Result<(), Failure> {
    let tensors = |config: &ModelConfig| {
        let moe = config.moe();
        (moe.router_shape(), moe.extra_shapes(), moe.state_shapes())
    };
    if tensors(config) == tensors(stored) {
        return Ok(());
    }
    let (asked, path) = (args.router.join(" "), args.model.as_deref().unwrap_or(Path::new("the model")));
    Err(Failure::input(format!("--router {asked}: the router of {} has other weights", path.display())))
}

/// Times a given model, or one of a given shape or OLMoE's in each type of weights, and prints a table.
pub(super) fn run(output: &mut Output, ctx: &Context, peaks: &Peaks, args: &DecodeArgs) -> Result<(), Failure> {
    let mut rows = Vec::new();
    let mut add = |all: Vec<DecodeSpeed>| {
        for speed in all {
            output.cases.push(speed.json());
            rows.push(cells(&speed));
        }
    };
    let batches: Vec<usize> = match (&*args.batch, ctx.device()) {
        ([], Device::Cpu) => vec![1],
        ([], Device::Cuda) => vec![1, 8, 64],
        (batches, _) => batches.iter().copied().map(usize::from).collect(),
    };
    match &args.model {
        Some(path) => {
            let LoadedWeights { config: stored, weights, .. } = Source::open(path)?.load(ctx, WeightsToCheck::None)?;
            decode::check_prefill(&stored, path)?;
            let config = with_router(&stored, &args.router)?;
            check_router(&config, &stored, args)?;
            let model = Model { decoder: &Decoder::new(config)?, weights: &weights };
            add(decode::measure_model(ctx, peaks, model, &batches)?);
        }
        None => {
            let config = decode::read_shape(args.shape.as_deref(), args.layers.map(usize::from))?;
            let config = with_router(&config, &args.router)?;
            for dtype in types(&args.types) {
                add(decode::measure_shape(ctx, peaks, dtype, &config, &batches)?);
                // The next type's weights have other sizes, so the pool's memory is freed.
                ctx.pool().trim();
            }
        }
    }
    if !output.is_json {
        println!("{}, memory {:.1} GB/s", machine::describe(ctx), peaks.read_bytes_per_s / 1e9);
        tables::print(&HEADER, &rows);
    }
    Ok(())
}

/// Prints the seconds of each token, text after text, until the process is stopped or its output is closed.
pub(super) fn endless(ctx: &Context, path: &Path) -> Result<ExitCode, Failure> {
    let LoadedWeights { config, weights, .. } = Source::open(path)?.load(ctx, WeightsToCheck::None)?;
    let model = Model { decoder: &Decoder::new(config)?, weights: &weights };
    match decode::generate_endlessly(ctx, model, |seconds| println!("{seconds:.7}"))? {}
}

fn cells(speed: &DecodeSpeed) -> Vec<String> {
    vec![
        format!("{:?}", speed.dtype),
        speed.batch.to_string(),
        format!("{:.1}", speed.bytes_per_step / 1e6),
        format!("{:.3}", speed.seconds_per_step * 1e3),
        format!("{:.1}", speed.batch as f64 / speed.seconds_per_step),
        format!("{:.1}%", 100.0 * speed.share_of_bandwidth()),
        format!("{:.0}", speed.prefill_tokens_per_s),
        format!("{:.1}%", 100.0 * speed.share_of_product),
    ]
}
