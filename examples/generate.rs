//! Opens a checkpoint (a Hugging Face folder, a GGUF file or a run) and continues a text.
//!
//! `cargo run --release --example generate -- PATH "The first line"`

use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use moeworks_infer::InferError;
use moeworks_infer::generation::{CachedSequence, GenerateRequest, Sampler, SamplingOptions, answer, prompt_ids};
use moeworks_infer::open::{Model, OpenOptions, Source};
use moeworks_ops::Context;

/// The text that the model of `path` finds most likely behind `prompt`, of 24 tokens at most.
pub(crate) fn complete(path: &Path, prompt: &str) -> Result<String, InferError> {
    let source = Source::open(path)?;
    let model = Model::open(Context::cpu_all_cores(), &source, OpenOptions::default())?;
    let ids = prompt_ids(&model, prompt, /* special tokens in the text */ false)?;
    let request = GenerateRequest { prompt: &ids, max_new_tokens: 24, stop_ids: &model.stop_ids };
    // Temperature 0 takes the most likely token; the cache may serve the next prompt, too.
    let mut sampler = Sampler::new(SamplingOptions { temperature: 0.0, ..SamplingOptions::default() })?;
    let mut sequence = CachedSequence::new(model.decoder.config());
    let print = |piece: &str| {
        print!("{piece}");
        std::io::stdout().flush().map_or(ControlFlow::Break(()), ControlFlow::Continue)
    };
    Ok(answer(&model, &mut sequence, &request, &mut sampler, /* stop texts */ &[], print)?.text)
}

#[allow(dead_code)] // the test calls `complete`
fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(path), Some(prompt)) = (args.next(), args.next()) else {
        return Err("usage: generate PATH PROMPT".into());
    };
    complete(Path::new(&path), &prompt)?;
    println!();
    Ok(())
}
