//! Opening of the model at a path, as the options say.

use std::path::Path;

use moeworks_infer::InferError;
use moeworks_infer::compute::{ComputeOptions, FoundContext, MAX_THREADS};
use moeworks_infer::open::{LoadedWeights, Model, OpenOptions, PartChecked, Source, WeightFormat, WeightsToCheck};
use moeworks_model::{DecoderWeights, ModelConfig, WeightCheck};
use moeworks_ops::Context;

use crate::args::{CheckWeights, ComputeArgs, MachineArgs};
use crate::environment;
use crate::failure::Failure;
use crate::progress::bytes;

/// Opens the model of `source`.
pub(crate) fn open(source: &Source, compute: &ComputeArgs) -> Result<Model, Failure> {
    let model = Model::open(context(&compute.machine)?, source, open_options(compute)?)?;
    say_part_checked(model.part_checked.as_ref());
    Ok(model)
}

/// Returns the options of opening a model.
pub(crate) fn open_options(compute: &ComputeArgs) -> Result<OpenOptions, Failure> {
    Ok(OpenOptions { format: weight_format(&compute.precision)?, check: compute.check.check_weights.into() })
}

/// Loads the configuration and the weights in their stored types.
pub(crate) fn load(
    source: &Source,
    ctx: &Context,
    check: CheckWeights,
) -> Result<(ModelConfig, DecoderWeights), Failure> {
    let LoadedWeights { config, weights, part_checked } = source.load(ctx, check.into())?;
    say_part_checked(part_checked.as_ref());
    Ok((config, weights))
}

/// Returns an error if `find` finds NaN or infinity in the weights. `find` gets the number of bytes above which
/// experts are skipped.
pub(crate) fn check_weights(
    path: &Path,
    which: impl Into<WeightsToCheck>,
    find: impl FnOnce(u64) -> Result<WeightCheck, InferError>,
) -> Result<(), Failure> {
    say_part_checked(moeworks_infer::open::check_weights(path, which.into(), find)?.as_ref());
    Ok(())
}

fn say_part_checked(part: Option<&PartChecked>) {
    if let Some(PartChecked { path, num_checked, num_bytes }) = part {
        let (checked, all) = (bytes(*num_checked), bytes(*num_bytes));
        eprintln!(
            "{}: {checked} of {all} were checked for NaN and infinity, without the experts: the model is larger than half of \
             the memory (--check-weights all or none)",
            path.display()
        );
    }
}

/// Creates the compute context that the options ask for.
pub(crate) fn context(machine: &MachineArgs) -> Result<Context, Failure> {
    let MachineArgs { threads, device, expert_cache, batch_invariant } = *machine;
    if threads > MAX_THREADS {
        let expected = format!("must be at most {MAX_THREADS}; 0 for one on each core");
        return Err(Failure::input(format!("--threads {threads}: {expected}")));
    }
    if !(0.0..=1e6).contains(&expert_cache) {
        return Err(Failure::input(format!("--expert-cache {expert_cache}: must be a number of GB, at least 0")));
    }
    let options = ComputeOptions {
        threads,
        device,
        expert_cache_bytes: (expert_cache * 1e9) as usize,
        is_batch_invariant: batch_invariant,
        machine: environment::machine(),
    };
    let FoundContext { ctx, missing } = options.context().map_err(|error| match error {
        InferError::ExpertCacheWithoutGpu => {
            Failure::input(format!("--expert-cache {expert_cache}: needs a GPU, --device cuda"))
        }
        InferError::BatchInvarianceOnGpu => {
            Failure::input("--batch-invariant: works only on the CPU; leave out --device or this option")
        }
        error => error.into(),
    })?;
    if let Some(missing) = missing {
        notice!("--device auto computes on the processor: {missing}");
    }
    Ok(ctx)
}

fn weight_format(name: &str) -> Result<WeightFormat, Failure> {
    match name {
        "stored" => Ok(WeightFormat::Stored),
        "f32" => Ok(WeightFormat::F32),
        "bf16" => Ok(WeightFormat::Bf16),
        _ => Err(Failure::input(format!("--precision {name}: must be stored, f32 or bf16"))),
    }
}

/// Rewrites an error of a model in terms of command-line options.
pub(crate) fn with_options(error: InferError) -> Failure {
    match error {
        InferError::EmptyPrompt => {
            Failure::input("--prompt is empty, and the tokenizer has no token that begins a text")
        }
        InferError::ManyTokens { asked, context, prompt_len, room } => Failure::input(format!(
            "--max-tokens {asked}: the model's context is {context} tokens and the prompt has {prompt_len}: \
             give at most {room}, or -1 for as many as fit"
        )),
        InferError::SeqLen { seq_len, least, longest } => {
            let message = format!("--seq-len {seq_len}: must be from {least} to the model's maximum, {longest}");
            Failure::input(message)
        }
        InferError::NotANumber { tensor: None } => Failure::input(
            "the model's result is not a number, though all weights are: they are too large for --precision",
        ),
        error => error.into(),
    }
}
