//! `moeworks evaluate`: how well a model predicts a text, and which experts its tokens use.
//!
//! A model with an encoder predicts masked spans of the text, as in the training of T5.

use std::ops::ControlFlow;
use std::sync::Arc;

use moeworks_infer::data::{Sources, TokenStore};
use moeworks_infer::evaluation::{Evaluation, EvaluationOptions, evaluate_recorded};
use moeworks_infer::open::{Model, Source};
use moeworks_infer::routing_record::RecordSource;
use moeworks_model::PassStats;
use moeworks_train::config::RunConfig;
use serde_json::{Value, json};

use crate::args::EvaluateArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::host::Call;
use crate::model::with_options;
use crate::model_ranks::{ModelOptions, ModelRank, on_model_ranks};
use crate::progress::thousands;
use crate::reading;
use crate::record;
use crate::tables;

pub(crate) fn run(args: &EvaluateArgs, call: &Call<'_>) -> Result<ExitCode, Failure> {
    let options = ModelOptions { compute: &args.compute, ranks: &args.ranks };
    on_model_ranks(call, &args.model, options, None, |rank| one_rank(args, rank))
}

/// Evaluates on the rank that makes the passes.
fn one_rank(args: &EvaluateArgs, rank: ModelRank<'_>) -> Result<ExitCode, Failure> {
    record::check(&args.record)?;
    let model = rank.open(&Source::open(&args.model)?)?;
    let options = EvaluationOptions { seq_len: args.seq_len, max_sequences: args.max_sequences };
    options.seq_len(&model).map_err(with_options)?;
    let tokens = tokens_of(&model, args)?;
    let mut recorder = record::begin(&args.record, RecordSource::Evaluate, &model, &args.model)?;
    let on_batch = |_| ControlFlow::Continue(());
    let result = evaluate_recorded(&model, &tokens, options, recorder.as_mut(), on_batch).map_err(with_options)?;
    if args.json {
        println!("{:#}", as_json(&model, &result));
    } else {
        print(&model, &result);
    }
    model.end_ranks()?;
    Ok(ExitCode::SUCCESS)
}

fn as_json(model: &Model, result: &Evaluation) -> Value {
    let has_encoder = model.decoder.config().variant.encoder.is_some();
    // The MoE layers, each with a flag for layers of the encoder.
    let layers = model.decoder.config().moe_layers().into_iter().zip(&result.stats.layers);
    let layers: Vec<Value> = layers
        .map(|((is_encoder, i), layer)| {
            let mut value = json!({ "layer": i, "tokens_per_expert": layer.tokens_per_expert, "cv": layer.cv() });
            if has_encoder {
                value["stack"] = if is_encoder { "encoder" } else { "decoder" }.into();
                value["dropped"] = layer.num_dropped.into();
            }
            value
        })
        .collect();
    json!({
        "tokens": result.stats.num_targets, "bytes": result.num_bytes, "loss": result.loss(),
        "perplexity": result.perplexity(), "bits_per_byte": result.bits_per_byte(), "accuracy": result.accuracy(),
        "task": if has_encoder { "spans" } else { "next token" }, "layers": layers,
    })
}

fn print(model: &Model, result: &Evaluation) {
    if result.num_bytes.is_none() {
        println!("task           to find the 15% of the tokens that are left out, in spans of 3 (T5)");
    }
    println!("tokens         {}", thousands(result.stats.num_targets as u64));
    println!("loss           {:.4} nats a token", result.loss());
    println!("perplexity     {:.3}", result.perplexity());
    if let Some(bits) = result.bits_per_byte() {
        println!("bits per byte  {bits:.4}");
    }
    println!("accuracy       {:.2}% of tokens are the likeliest", 100.0 * result.accuracy());
    if !result.stats.layers.is_empty() {
        println!();
        print_load(model, &result.stats);
    }
}

/// Returns the tokens of the texts, using the same cache as training.
fn tokens_of(model: &Model, args: &EvaluateArgs) -> Result<TokenStore, Failure> {
    let sources = Sources::find(&args.text.texts(), &reading::watch(Arc::default()))?;
    let place = RunConfig::default().cache_place(sources.watch().user_cache());
    let tokens = TokenStore::open(&sources, &model.tokenizer, &place)?;
    tokens.notes().warn();
    notice!("Data:       {}", tokens.summary(sources.num_files()));
    if tokens.len() < 2 {
        let message = format!("{}: {} tokens, but at least 2 are needed", sources.describe(), tokens.len());
        return Err(Failure::input(message));
    }
    Ok(tokens)
}

fn print_load(model: &Model, stats: &PassStats) {
    let config = model.decoder.config();
    let rows: Vec<Vec<String>> = config
        .moe_layer_numbers()
        .into_iter()
        .zip(&stats.layers)
        .map(|(number, layer)| {
            let total = layer.num_choices.max(1) as f64;
            let shares: Vec<String> = layer
                .tokens_per_expert
                .iter()
                .take(16)
                .map(|&n| format!("{:.1}", 100.0 * f64::from(n) / total))
                .collect();
            let more = if layer.tokens_per_expert.len() > 16 { " ..." } else { "" };
            vec![config.layer_name(number), format!("{:.3}", layer.cv()), format!("{}{more}", shares.join(" "))]
        })
        .collect();
    tables::print(&["expert load", "cv", "% of choices, expert by expert"], &rows);
}
