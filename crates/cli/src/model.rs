//! Loads the model that a path means: a run, a checkpoint or a model folder.

use std::path::Path;

use moeworks_model::{Decoder, DecoderWeights, Tokenizer, hf};
use moeworks_ops::Context;
use moeworks_tensor::DType;
use moeworks_train::store::{Pick, resolve_run};

use crate::failure::Failure;

/// A model ready to compute.
pub(crate) struct Model {
    pub(crate) ctx: Context,
    pub(crate) decoder: Decoder,
    /// In the precision that was asked for.
    pub(crate) weights: DecoderWeights,
    pub(crate) tokenizer: Tokenizer,
}

impl Model {
    pub(crate) fn load(path: &Path, precision: &str, threads: usize) -> Result<Self, Failure> {
        let dtype = dtype(precision)?;
        let ctx = context(threads);
        let resolved = resolve_run(path, Pick::Latest)?;
        let (config, weights) = hf::load_model(&ctx, &resolved.model_dir)?;
        let tokenizer = Tokenizer::from_dir(&resolved.model_dir)?;
        let weights = if weights.compute_dtype() == dtype { weights } else { weights.compute_copy(&ctx, dtype) };
        let decoder = Decoder::new(config)?;
        Ok(Self { ctx, decoder, weights, tokenizer })
    }
}

/// A context with `threads` threads, 0 for one a core.
pub(crate) fn context(threads: usize) -> Context {
    if threads == 0 { Context::cpu_all_cores() } else { Context::cpu(threads) }
}

fn dtype(precision: &str) -> Result<DType, Failure> {
    match precision {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        _ => Err(Failure::input(format!("--precision {precision}: must be f32 or bf16"))),
    }
}
