//! Helpers that several tests share.

use std::path::{Path, PathBuf};

use moeworks_infer::open::Model;
use moeworks_model::{ModelConfig, Tokenizer};
use moeworks_ops::Context;

pub(crate) use crate::small_model::{model, random_ids, small_config};

/// A model of bytes with random weights.
pub(crate) fn byte_model() -> Model {
    let (ctx, tokenizer) = (Context::cpu(1), Tokenizer::bytes());
    let config = ModelConfig { vocab_size: tokenizer.vocab_size(), ..small_config() };
    let (decoder, weights) = model(&ctx, config);
    let stop_ids = tokenizer.stop_ids(&[]);
    Model { ctx, decoder, weights, tokenizer, stop_ids, part_checked: None }
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A fixture of the crate of models.
pub(crate) fn model_fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(name)
}
