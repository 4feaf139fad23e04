//! `moeworks estimate`: the memory and time of training a configuration on this machine, without training it.

use moeworks_bench::training::tokens_per_second;
use moeworks_model::model_cost::training_flops_per_token;
use moeworks_train::config::{Precision, RunConfig};
use serde_json::json;

use crate::args::EstimateArgs;
use crate::cost_tables::{self, Training};
use crate::environment;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::progress::{duration, thousands};
use crate::train::resolve_config;

/// The vocabulary size of the byte tokenizer. That of a `tokenizer.json` is only known once the file is read.
pub(crate) const BYTE_VOCABULARY: usize = 257;

pub(crate) fn run(args: &EstimateArgs) -> Result<ExitCode, Failure> {
    let mut config = resolve_config(&args.config, Vec::new())?;
    config.model.vocab_size = vocabulary(&config);
    let table = config.weight_table()?;
    let train = &config.train;
    let micro_tokens = train.batch_size * train.seq_len;
    let training = Training { tokens: micro_tokens, expert_gradients: train.expert_gradients };
    let tokens = micro_tokens as u64 * train.grad_accumulation as u64 * train.steps;
    let flops = training_flops_per_token(&config.model, train.seq_len);
    let measured = tokens_per_second(&config, &environment::machine())?;
    let seconds = tokens as f64 / measured.tokens_per_s;
    if args.json {
        let mut value = cost_tables::json(&config.model, &table, training, train.seq_len);
        value["tokens"] = json!(tokens);
        value["tokens_per_s"] = json!(measured.tokens_per_s);
        value["mfu"] = json!(measured.mfu);
        value["seconds"] = json!(seconds);
        println!("{value:#}");
        return Ok(ExitCode::SUCCESS);
    }
    cost_tables::print_parameters(&config.model, &table);
    println!();
    cost_tables::print_training_memory(&config.model, &table, training);
    println!();
    cost_tables::print_inference_memory(&config.model, train.seq_len);
    println!();
    let precision = match train.precision {
        Precision::F32 => "f32",
        Precision::Bf16 => "bf16",
        Precision::Fp8 => "fp8",
    };
    println!("training FLOPs a token    {:.3} GFLOP at sequences of {}", flops / 1e9, train.seq_len);
    println!("tokens                    {} in {} steps", thousands(tokens), thousands(train.steps));
    println!(
        "speed on this machine     {:.0} tokens/s in {precision}, {:.0}% of its peak ({})",
        measured.tokens_per_s,
        100.0 * measured.mfu,
        measured.how,
    );
    println!("time                      about {}", duration(seconds));
    Ok(ExitCode::SUCCESS)
}

/// Returns the vocabulary size as far as it is known before the data is read.
pub(crate) fn vocabulary(config: &RunConfig) -> usize {
    use moeworks_train::config::TokenizerChoice::{Bpe, Bytes, File};
    match (&config.data.tokenizer, config.model.vocab_size) {
        (_, given @ 1..) => given,
        (Bytes, 0) => BYTE_VOCABULARY,
        (Bpe, 0) => config.data.bpe_vocab_size,
        (File(path), 0) => {
            moeworks_model::Tokenizer::from_file(path.as_ref()).map_or(BYTE_VOCABULARY, |t| t.vocab_size())
        }
    }
}
