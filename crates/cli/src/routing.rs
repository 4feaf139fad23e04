//! `moeworks routing`: a page that shows the experts that each token of a text chooses.

mod export;
mod stats;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use moeworks_infer::data::Sources;
use moeworks_infer::open::{Model, Source};
use moeworks_infer::store::Resolved;
use moeworks_model::Mode;
use moeworks_train::routing::{RoutedText, first_tokens, routing_page};

use crate::args::{RoutingArgs, RoutingCommand, RoutingPageArgs};
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::model::open;
use crate::page::{Target, write_whole};
use crate::progress::thousands;
use crate::reading;

/// The largest number of tokens on a page, which contains every choice of each in every layer.
const MAX_TOKENS: usize = 100_000;
/// The largest number of tokens of a window. The text is read in consecutive windows.
const SEQ_LEN: usize = 1024;
const PAGE_FILE: &str = "routing.html";

pub(crate) fn run(args: &RoutingArgs) -> Result<ExitCode, Failure> {
    match (&args.command, &args.page.model) {
        (Some(RoutingCommand::Stats(args)), _) => stats::run(args),
        (Some(RoutingCommand::Export(args)), _) => export::run(args),
        (None, Some(model)) => page(&args.page, model),
        (None, None) => Err(Failure::input("routing: needs a model and --data, or stats or export with a record")),
    }
}

/// Writes the page of a text.
fn page(args: &RoutingPageArgs, model_path: &Path) -> Result<ExitCode, Failure> {
    if !(1..=MAX_TOKENS).contains(&args.max_tokens) {
        return Err(Failure::input(format!("--max-tokens {}: must be from 1 to {MAX_TOKENS}", args.max_tokens)));
    }
    let source = Source::open(model_path)?;
    let run_dir = source.run().and_then(|run| run.run_dir.as_deref());
    let default_out = run_dir.map_or_else(|| PAGE_FILE.into(), |run| run.join(PAGE_FILE));
    let out = args.out.clone().unwrap_or(default_out);
    Target { option: "--out", path: &out, mark: "Moeworks routing", is_forced: args.force }.check()?;
    let sources = Sources::find(&args.text.texts(), &reading::watch(Arc::default()))?;
    let model = open(&source, &args.compute)?;
    let config = model.decoder.config();
    if !(0..config.num_layers).any(|layer| config.is_moe_layer(layer)) {
        return Err(Failure::input(format!("{}: is a dense model; it has no MoE layer to show", model_path.display())));
    }
    let token_ids = first_tokens(&sources, &model.tokenizer, args.max_tokens)?;
    let seq_len = SEQ_LEN.min(config.max_seq_len);
    // Without a capacity, all modes give the same routing.
    let text = RoutedText::new(model.as_model_ref(), &model.tokenizer, token_ids, seq_len, Mode::TrainForward)?;
    let page = routing_page(&text, &name_of(model_path), &facts(&model, source.run(), &text, &sources));
    write_whole(&out, &page)?;
    println!("{}", out.display());
    Ok(ExitCode::SUCCESS)
}

/// Returns the name of a path; "." and ".." have none and are resolved first.
fn name_of(path: &Path) -> String {
    let named = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    named.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn facts(model: &Model, run: Option<&Resolved>, text: &RoutedText, sources: &Sources) -> Vec<String> {
    let config = model.decoder.config();
    let num_layers = text.layers.len();
    let mut facts = vec![
        format!("the first {} tokens of {}", thousands(text.token_ids.len() as u64), sources.describe()),
        format!("{num_layers} MoE layer{} of {} experts", if num_layers == 1 { "" } else { "s" }, text.num_experts),
    ];
    if let Some(checkpoint) = run.and_then(|run| run.checkpoint.as_ref()) {
        facts.push(format!("checkpoint of step {}", thousands(checkpoint.metadata.step)));
    }
    if config.capacity_factor != 0.0 {
        facts.push(format!("capacity factor {} as in training, over {SEQ_LEN} tokens at most", config.capacity_factor));
    }
    facts
}
