//! `moeworks inspect`: the contents of a run or a model folder.

use std::collections::BTreeMap;

use moeworks_infer::open::Source;
use moeworks_model::gguf::block_types;
use moeworks_model::{DecoderWeights, ModelConfig};
use moeworks_ops::Context;
use moeworks_tensor::DType;
use moeworks_train::config::GradientType;
use moeworks_train::metrics::{Record, read_last_record};
use serde_json::{Value, json};

use crate::args::InspectArgs;
use crate::cost_tables::{self, Training};
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::model::load;
use crate::progress::{bytes, thousands};
use crate::sharding::{View, weight_table};
use crate::tables;

/// The settings of the memory table.
const TRAINING: Training = Training { tokens: 4096, expert_gradients: GradientType::F32 };

pub(crate) fn run(args: &InspectArgs) -> Result<ExitCode, Failure> {
    let source = Source::open(&args.model)?;
    let ctx = Context::cpu_all_cores();
    // Loading also checks the shape of every tensor.
    let (config, weights) = load(&source, &ctx, args.check.check_weights)?;
    let sharding = args.sharding.sharding.then(|| View::new(&source, &config, &args.sharding)).transpose()?;
    let table = weight_table(&source, &config);
    let run_dir = source.run().and_then(|run| run.run_dir.as_deref());
    let record = run_dir.and_then(|run| read_last_record(run).ok().flatten());
    let seq_len = config.max_seq_len;
    if args.json {
        let mut value = cost_tables::json(&config, &table, TRAINING, seq_len);
        value["model"] = serde_json::to_value(&config)?;
        value["stored_bytes"] = serde_json::to_value(stored_bytes(&weights))?;
        if let Some(record) = &record {
            value["step"] = json!(record.step);
            value["expert_load"] = load_json(record);
        }
        if let Some(sharding) = &sharding {
            value["sharding"] = sharding.json();
        }
        println!("{value:#}");
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(sharding) = sharding {
        sharding.print();
        return Ok(ExitCode::SUCCESS);
    }
    println!("{}", source.path().display());
    println!("{}", describe(&config));
    let stored: Vec<String> =
        stored_bytes(&weights).into_iter().map(|(name, count)| format!("{} in {name}", bytes(count))).collect();
    println!("weights: {}", stored.join(", "));
    if let Some(checkpoint) = source.run().and_then(|run| run.checkpoint.as_ref()) {
        let val = checkpoint.metadata.val_loss.map_or_else(String::new, |loss| format!(", validation loss {loss:.4}"));
        println!("checkpoint of step {}{val}", thousands(checkpoint.metadata.step));
    }
    println!();
    cost_tables::print_parameters(&config, &table);
    println!();
    cost_tables::print_training_memory(&config, &table, TRAINING);
    println!();
    cost_tables::print_inference_memory(&config, seq_len);
    if let Some(record) = record.filter(|record| !record.layers.is_empty()) {
        println!();
        print_load(&config, &record);
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the bytes of the weights by their type.
fn stored_bytes(weights: &DecoderWeights) -> BTreeMap<&'static str, u64> {
    let mut sums = BTreeMap::new();
    for (_, tensor) in weights.tensors() {
        let name = match tensor.dtype() {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::U32 => "u32",
            DType::Q8 => "int8",
            DType::Q4 => "int4",
            DType::F8 => "fp8",
            other => block_types().find(|(known, _)| *known == other).map_or("blocks", |(_, name)| name),
        };
        *sums.entry(name).or_default() += tensor.stored_bytes() as u64;
    }
    sums
}

fn describe(config: &ModelConfig) -> String {
    let experts = if config.num_experts == 0 {
        "dense".to_owned()
    } else {
        format!("{} experts of width {}, {} a token", config.num_experts, config.expert_width, config.top_k)
    };
    let layers = match &config.variant.encoder {
        None => format!("{} layers", config.num_layers),
        Some(encoder) => format!("an encoder of {} layers, a decoder of {}", encoder.num_layers, config.num_layers),
    };
    format!(
        "{layers}, width {}, {} heads of {} ({} for keys and values), {experts}, vocabulary {}, {} {} tokens",
        config.width,
        config.num_heads,
        config.head_dim,
        config.num_kv_heads,
        thousands(config.vocab_size as u64),
        if config.variant.encoder.is_some() { "made for" } else { "up to" },
        thousands(config.max_seq_len as u64),
    )
}

fn print_load(config: &ModelConfig, record: &Record) {
    let rows: Vec<Vec<String>> = record
        .layers
        .iter()
        .map(|layer| {
            let total = layer.num_choices().max(1) as f64;
            let even = total / layer.tokens_per_expert.len().max(1) as f64;
            let extreme = |pick: fn(f64, f64) -> bool| {
                let mut best = (0, f64::NAN);
                for (expert, &count) in layer.tokens_per_expert.iter().enumerate() {
                    if best.1.is_nan() || pick(count as f64, best.1) {
                        best = (expert, count as f64);
                    }
                }
                format!("{} ({:.2}x)", best.0, best.1 / even)
            };
            vec![
                config.layer_name(layer.layer),
                extreme(|a, b| a > b),
                extreme(|a, b| a < b),
                format!("{:.3}", layer.cv()),
                format!("{:.1}%", 100.0 * layer.drop_rate()),
                format!("{:.3}", layer.router_entropy),
            ]
        })
        .collect();
    let header = format!("expert load, step {}", thousands(record.step));
    tables::print(&[&header, "most used", "least used", "cv", "dropped", "router entropy"], &rows);
}

fn load_json(record: &Record) -> Value {
    record
        .layers
        .iter()
        .map(|layer| json!({ "layer": layer.layer, "tokens_per_expert": layer.tokens_per_expert, "dropped": layer.num_dropped }))
        .collect()
}
