//! `moeworks evaluate`: how well a model predicts a text, and where its tokens go.

use std::process::ExitCode;

use moeworks_model::{PassStats, TokenBatch};
use moeworks_moe::LayerStats;
use moeworks_train::config::{DataConfig, RunConfig};
use moeworks_train::data::{CachePlace, Sources, TokenStore, evaluation_batches};
use serde_json::{Value, json};

use crate::args::EvaluateArgs;
use crate::failure::Failure;
use crate::model::Model;
use crate::progress::thousands;
use crate::tables;

/// Tokens of a batch, whatever the sequence length.
const BATCH_TOKENS: usize = 4096;
/// The longest sequence that is chosen without being asked for.
const DEFAULT_SEQ_LEN: usize = 1024;

pub(crate) fn run(args: &EvaluateArgs) -> Result<ExitCode, Failure> {
    let model = Model::load(&args.model, &args.precision, args.threads)?;
    let longest = model.decoder.config().max_seq_len;
    let seq_len = args.seq_len.unwrap_or(DEFAULT_SEQ_LEN.min(longest));
    if seq_len == 0 || seq_len > longest {
        return Err(Failure::input(format!("--seq-len {seq_len}: must be from 1 to the model's maximum, {longest}")));
    }
    let tokens = tokens_of(&model, args)?;
    let result = evaluate(&model, &tokens, seq_len, args.max_sequences)?;
    // Every target but an end of text stands for some bytes: those of the whole text, in proportion to the tokens evaluated.
    let bytes = tokens.num_text_bytes() as f64 * result.num_targets as f64 / (tokens.len() - 1) as f64;
    let loss = result.mean_loss();
    let bits_per_byte = result.loss_sum / std::f64::consts::LN_2 / bytes;
    let accuracy = result.num_correct as f64 / result.num_targets.max(1) as f64;
    if args.json {
        let layers: Vec<Value> = moe_layers(&model, &result)
            .map(|(i, layer)| json!({ "layer": i, "tokens_per_expert": layer.tokens_per_expert, "cv": layer.cv() }))
            .collect();
        let value = json!({
            "tokens": result.num_targets, "bytes": bytes, "loss": loss, "perplexity": loss.exp(),
            "bits_per_byte": bits_per_byte, "accuracy": accuracy, "layers": layers,
        });
        println!("{value:#}");
        return Ok(ExitCode::SUCCESS);
    }
    println!("tokens         {}", thousands(result.num_targets as u64));
    println!("loss           {loss:.4} nats a token");
    println!("perplexity     {:.3}", loss.exp());
    println!("bits per byte  {bits_per_byte:.4}");
    println!("accuracy       {:.2}% of tokens are the likeliest", 100.0 * accuracy);
    if !result.layers.is_empty() {
        println!();
        print_load(&model, &result);
    }
    Ok(ExitCode::SUCCESS)
}

/// The tokens of the texts, through the same cache as in training.
fn tokens_of(model: &Model, args: &EvaluateArgs) -> Result<TokenStore, Failure> {
    let config =
        RunConfig { data: DataConfig { paths: args.data.clone(), ..DataConfig::default() }, ..RunConfig::default() };
    let sources = Sources::find(&config.data)?;
    let tokens = TokenStore::open(&sources, &model.tokenizer, &CachePlace::of(&config))?;
    if tokens.len() < 2 {
        let message = format!("{}: {} tokens, but at least 2 are needed", sources.describe(), tokens.len());
        return Err(Failure::input(message));
    }
    Ok(tokens)
}

/// Goes through the text in windows that follow each other; the last one is filled up and the filling not counted.
fn evaluate(model: &Model, tokens: &TokenStore, seq_len: usize, max_sequences: usize) -> Result<PassStats, Failure> {
    // With a limit, batches of one sequence end exactly there.
    let batch_size = if max_sequences == 0 { (BATCH_TOKENS / seq_len).max(1) } else { 1 };
    let max_batches = if max_sequences == 0 { usize::MAX } else { max_sequences };
    let mut sum = PassStats::default();
    for batch in evaluation_batches(tokens, seq_len, batch_size).take(max_batches) {
        let batch =
            TokenBatch { inputs: &batch.inputs, targets: &batch.targets, num_sequences: batch.num_sequences, seq_len };
        let stats = model.decoder.evaluate(&model.ctx, &model.weights, &batch)?;
        sum.loss_sum += stats.loss_sum;
        sum.num_targets += stats.num_targets;
        sum.num_correct += stats.num_correct;
        if sum.layers.is_empty() {
            sum.layers = stats.layers;
        } else {
            sum.layers.iter_mut().zip(&stats.layers).for_each(|(sum, layer)| sum.merge(layer));
        }
    }
    Ok(sum)
}

fn moe_layers<'a>(model: &'a Model, stats: &'a PassStats) -> impl Iterator<Item = (usize, &'a LayerStats)> {
    let config = model.decoder.config();
    (0..config.num_layers).filter(|&i| config.is_moe_layer(i)).zip(&stats.layers)
}

fn print_load(model: &Model, stats: &PassStats) {
    let rows: Vec<Vec<String>> = moe_layers(model, stats)
        .map(|(i, layer)| {
            let total = layer.num_choices.max(1) as f64;
            let shares: Vec<String> = layer
                .tokens_per_expert
                .iter()
                .take(16)
                .map(|&n| format!("{:.1}", 100.0 * f64::from(n) / total))
                .collect();
            let more = if layer.tokens_per_expert.len() > 16 { " ..." } else { "" };
            vec![format!("layer {i}"), format!("{:.3}", layer.cv()), format!("{}{more}", shares.join(" "))]
        })
        .collect();
    tables::print(&["expert load", "cv", "% of choices, expert by expert"], &rows);
}
