//! `moeworks generate`: continues a prompt, printing as it goes.

use std::io::{Write as _, stdout};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::Instant;

use moeworks_model::generation::{GenerateRequest, Sampler, SamplingOptions, TextStream, generate};

use crate::args::GenerateArgs;
use crate::failure::Failure;
use crate::model::Model;

pub(crate) fn run(args: &GenerateArgs) -> Result<ExitCode, Failure> {
    let options = SamplingOptions {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        seed: args.seed,
    };
    let mut sampler = Sampler::new(options)?;
    let model = Model::load(&args.model, &args.precision, args.threads)?;
    let has_encoder = model.decoder.config().variant.encoder.is_some();
    let mut prompt = if has_encoder {
        model.tokenizer.encode_source(&args.prompt)?
    } else {
        model.tokenizer.encode(&args.prompt)?
    };
    if prompt.is_empty() {
        // An empty prompt asks for a document from its beginning, which follows the end of another.
        prompt.extend(model.tokenizer.eos_id());
    }
    if prompt.is_empty() {
        return Err(Failure::input("--prompt is empty, and the tokenizer has no token that a text begins with"));
    }
    let stop_ids: Vec<u32> = model.tokenizer.eos_id().into_iter().collect();
    let request = GenerateRequest { prompt: &prompt, max_new_tokens: args.max_tokens, stop_ids: &stop_ids };
    // A model with an encoder answers its prompt and does not continue it.
    let mut stream = if has_encoder {
        TextStream::with_special(&model.tokenizer)
    } else {
        print!("{}", args.prompt);
        flush();
        TextStream::new(&model.tokenizer)
    };
    let mut failure = None;
    let start = Instant::now();
    let (ids, _) = generate(&model.decoder, &model.ctx, &model.weights, &request, &mut sampler, |id| {
        if stop_ids.contains(&id) {
            return ControlFlow::Continue(());
        }
        match stream.push(id) {
            Ok(text) => print!("{text}"),
            Err(error) => {
                failure = Some(error);
                return ControlFlow::Break(());
            }
        }
        flush();
        ControlFlow::Continue(())
    })?;
    if let Some(error) = failure {
        return Err(error.into());
    }
    println!("{}", stream.finish()?);
    tracing::info!("{} tokens, {:.1} tokens/s", ids.len(), ids.len() as f64 / start.elapsed().as_secs_f64());
    Ok(ExitCode::SUCCESS)
}

fn flush() {
    // A reader that went away ends the program at the next print; there is nobody to tell.
    let _ = stdout().flush();
}
