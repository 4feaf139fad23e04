//! `moeworks evaluate`: how well a model predicts a text, and where its tokens go.
//!
//! A model with an encoder predicts what is left out of a text, in the way that T5 is trained.

use std::process::ExitCode;
use std::sync::Arc;

use moeworks_infer::open::Model;
use moeworks_model::PassStats;
use moeworks_train::config::RunConfig;
use moeworks_train::data::{Batch, CachePlace, Sources, SpanRule, TokenStore, evaluation_batches, span_batches};
use serde_json::{Value, json};

use crate::args::EvaluateArgs;
use crate::failure::Failure;
use crate::model::{open_path, with_options};
use crate::progress::thousands;
use crate::reading;
use crate::tables;

/// Tokens of a batch, whatever the sequence length.
const BATCH_TOKENS: usize = 4096;
/// The longest sequence that is chosen without being asked for.
const DEFAULT_SEQ_LEN: usize = 1024;

pub(crate) fn run(args: &EvaluateArgs) -> Result<ExitCode, Failure> {
    let model = open_path(&args.model, &args.compute)?;
    let config = model.decoder.config();
    let (longest, has_encoder) = (config.max_seq_len, config.variant.encoder.is_some());
    let seq_len = args.seq_len.unwrap_or(DEFAULT_SEQ_LEN.min(longest));
    // What an encoder is to read has no longest length, but something to be left out of it.
    let (least, longest) = if has_encoder { (2, 1 << 20) } else { (1, longest) };
    if seq_len < least || seq_len > longest {
        let message = format!("--seq-len {seq_len}: must be from {least} to the model's maximum, {longest}");
        return Err(Failure::input(message));
    }
    let tokens = tokens_of(&model, args)?;
    let spans = SpanRule::of(config, &model.tokenizer)?;
    let (result, num_ignored) = evaluate(&model, (&tokens, spans.as_ref()), seq_len, args.max_sequences)?;
    // Every target but an end of text stands for some bytes: those of the whole text, in proportion to the tokens evaluated.
    let share = (result.num_targets + num_ignored) as f64 / (tokens.len() - 1) as f64;
    let bytes = (!has_encoder).then(|| tokens.num_text_bytes() as f64 * share);
    if !result.mean_loss().is_finite() {
        return Err(with_options(model.not_a_number()));
    }
    if args.json {
        println!("{:#}", as_json(&model, &result, bytes));
    } else {
        print(&model, &result, bytes);
    }
    Ok(ExitCode::SUCCESS)
}

fn bits_per_byte(result: &PassStats, bytes: f64) -> f64 {
    result.loss_sum / std::f64::consts::LN_2 / bytes
}

fn accuracy(result: &PassStats) -> f64 {
    result.num_correct as f64 / result.num_targets.max(1) as f64
}

fn as_json(model: &Model, result: &PassStats, bytes: Option<f64>) -> Value {
    let has_encoder = model.decoder.config().variant.encoder.is_some();
    // The MoE layers, with whether they are the encoder's.
    let layers = model.decoder.config().moe_layers().into_iter().zip(&result.layers);
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
    let loss = result.mean_loss();
    json!({
        "tokens": result.num_targets, "bytes": bytes, "loss": loss, "perplexity": loss.exp(),
        "bits_per_byte": bytes.map(|bytes| bits_per_byte(result, bytes)), "accuracy": accuracy(result),
        "task": if has_encoder { "spans" } else { "next token" }, "layers": layers,
    })
}

fn print(model: &Model, result: &PassStats, bytes: Option<f64>) {
    let loss = result.mean_loss();
    if bytes.is_none() {
        println!("task           to find the 15% of the tokens that are left out, in spans of 3 (T5)");
    }
    println!("tokens         {}", thousands(result.num_targets as u64));
    println!("loss           {loss:.4} nats a token");
    println!("perplexity     {:.3}", loss.exp());
    if let Some(bytes) = bytes {
        println!("bits per byte  {:.4}", bits_per_byte(result, bytes));
    }
    println!("accuracy       {:.2}% of tokens are the likeliest", 100.0 * accuracy(result));
    if !result.layers.is_empty() {
        println!();
        print_load(model, result);
    }
}

/// The tokens of the texts, through the same cache as in training.
fn tokens_of(model: &Model, args: &EvaluateArgs) -> Result<TokenStore, Failure> {
    let config = RunConfig { data: args.text.config(), ..RunConfig::default() };
    let sources = Sources::find(&config.data, &reading::watch(Arc::default()))?;
    let tokens = TokenStore::open(&sources, &model.tokenizer, &CachePlace::of(&config))?;
    tokens.notes().warn();
    notice!("Data:       {}", tokens.summary(sources.num_files()));
    if tokens.len() < 2 {
        let message = format!("{}: {} tokens, but at least 2 are needed", sources.describe(), tokens.len());
        return Err(Failure::input(message));
    }
    Ok(tokens)
}

/// Goes through the text in windows that follow each other: the last one is filled up and the filling not counted, or a model
/// with an encoder is to find the spans that are left out of each by `spans`. Each document begins with what the tokenizer puts before
/// a text, which is read but not counted; a window that begins inside a document reads nothing before it, as in training. Returns the
/// figures and how many tokens were not counted.
fn evaluate(
    model: &Model,
    (tokens, spans): (&TokenStore, Option<&SpanRule>),
    seq_len: usize,
    max_sequences: usize,
) -> Result<(PassStats, usize), Failure> {
    let (batch_size, max_batches) = batches(seq_len, max_sequences);
    let batches: Box<dyn Iterator<Item = Batch>> = match spans {
        None => Box::new(evaluation_batches(tokens, seq_len, batch_size)),
        Some(rule) => Box::new(span_batches(tokens, seq_len, batch_size, rule)),
    };
    let (mut sum, mut num_ignored) = (PassStats::default(), 0);
    for mut batch in batches.take(max_batches) {
        if spans.is_none() {
            num_ignored += batch.ignore_text_starts(model.tokenizer.text_start(), model.tokenizer.eos_id());
        }
        add(&mut sum, model.decoder.evaluate(&model.ctx, &model.weights, &batch.tokens())?);
    }
    Ok((sum, num_ignored))
}

/// Sequences of a batch, and batches at most. With a limit, batches of one sequence end exactly there.
fn batches(seq_len: usize, max_sequences: usize) -> (usize, usize) {
    match max_sequences {
        0 => ((BATCH_TOKENS / seq_len).max(1), usize::MAX),
        limit => (1, limit),
    }
}

/// Adds the figures of a batch.
fn add(sum: &mut PassStats, stats: PassStats) {
    sum.loss_sum += stats.loss_sum;
    sum.num_targets += stats.num_targets;
    sum.num_correct += stats.num_correct;
    if sum.layers.is_empty() {
        sum.layers = stats.layers;
    } else {
        sum.layers.iter_mut().zip(&stats.layers).for_each(|(sum, layer)| sum.merge(layer));
    }
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
