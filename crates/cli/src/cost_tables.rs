//! Tables of a model's parameters, memory and floating-point operations, shared by `inspect` and `estimate`.

use moeworks_model::model_cost::{self, Parameters};
use moeworks_model::{ModelConfig, WeightTable};
use moeworks_plan::{Precision, RankMemory, Tokens, Workload};
use moeworks_train::config::GradientType;
use serde_json::{Value, json};

use crate::progress::{bytes, thousands};
use crate::tables;

/// Prints the table of parameters by part; with a column of trained ones if some are frozen.
pub(crate) fn print_parameters(config: &ModelConfig, table: &WeightTable) {
    let parameters = Parameters::from_table(config, table);
    let has_frozen = parameters.trainable() < parameters.total();
    let row = |name: &str, [total, active, trainable]: [u64; 3]| {
        let mut row = vec![name.to_owned(), thousands(total), thousands(active)];
        row.extend(has_frozen.then(|| thousands(trainable)));
        row
    };
    let parts = parameters.parts.iter();
    let mut rows: Vec<Vec<String>> =
        parts.map(|part| row(part.name, [part.total, part.active, part.trainable])).collect();
    rows.push(row("all", [parameters.total(), parameters.active(), parameters.trainable()]));
    let header = ["parameters", "total", "active per token", "trained"];
    tables::print(if has_frozen { &header } else { &header[..3] }, &rows);
    if let Some((taken, flat)) = routing_flops(config) {
        let saved = 100.0 * (1.0 - taken as f64 / flat as f64);
        println!();
        println!(
            "routing: {} FLOP a token and MoE layer, {saved:.0}% less than the {} of scoring every expert",
            thousands(taken),
            thousands(flat)
        );
    }
}

/// Returns the operations of a layer's router for a token and those of scoring every expert, if the former are fewer.
fn routing_flops(config: &ModelConfig) -> Option<(u64, u64)> {
    let has_experts = (0..config.num_layers).any(|layer| config.is_moe_layer(layer));
    Some(model_cost::routing_flops_per_token(config)).filter(|(taken, flat)| has_experts && taken < flat)
}

/// The settings of training that its memory depends on, besides the model and the precision.
#[derive(Clone, Copy)]
pub(crate) struct Training {
    /// The number of tokens of a micro-batch.
    pub(crate) tokens: usize,
    pub(crate) expert_gradients: GradientType,
}

impl Training {
    fn memory(self, config: &ModelConfig, table: &WeightTable, precision: Precision, checkpoint: bool) -> RankMemory {
        let workload = Workload {
            tokens: Tokens::OfEachRank(self.tokens),
            precision,
            zero: 0,
            expert_gradient_bytes: self.expert_gradients.bytes(),
        };
        model_cost::memory_on_one_rank(config, table, &workload, checkpoint)
    }
}

/// Prints the memory for training the weights of `table` at each precision.
pub(crate) fn print_training_memory(config: &ModelConfig, table: &WeightTable, training: Training) {
    let row = |name: &str, precision: Precision, checkpoint: bool| {
        let memory = training.memory(config, table, precision, checkpoint);
        let parts = [memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total()];
        let parts = parts.map(|part| bytes(part.round() as u64));
        std::iter::once(name.to_owned()).chain(parts).collect()
    };
    let header = format!("training, {} tokens a micro-batch", thousands(training.tokens as u64));
    tables::print(
        &[&header, "weights", "gradients", "optimizer", "activations", "all"],
        &[
            row("f32", Precision::F32, false),
            row("f32, checkpoint_layers", Precision::F32, true),
            row("bf16", Precision::Bf16, false),
            row("bf16, checkpoint_layers", Precision::Bf16, true),
        ],
    );
}

/// Prints the memory for inference at each precision.
pub(crate) fn print_inference_memory(config: &ModelConfig, seq_len: usize) {
    let parameters = Parameters::new(config);
    let cache = model_cost::kv_cache_bytes(config, seq_len);
    let rows: Vec<Vec<String>> = [("f32", 32), ("bf16", 16), ("int8", 8), ("int4", 4)]
        .into_iter()
        .map(|(name, bits)| {
            let weights = parameters.total() * bits / 8;
            let read = parameters.active() * bits / 8;
            vec![name.to_owned(), bytes(weights), bytes(cache), bytes(weights + cache), bytes(read)]
        })
        .collect();
    let header = format!("inference, {} tokens of context", thousands(seq_len as u64));
    tables::print(&[&header, "weights", "KV cache", "all", "read per token"], &rows);
}

/// Returns all of these tables as JSON.
pub(crate) fn json(config: &ModelConfig, table: &WeightTable, training: Training, seq_len: usize) -> Value {
    let parameters = Parameters::from_table(config, table);
    let parts: Vec<Value> = parameters
        .parts
        .iter()
        .map(|part| {
            json!({ "name": part.name, "total": part.total, "active": part.active, "trainable": part.trainable })
        })
        .collect();
    let memory = |precision| {
        let memory = training.memory(config, table, precision, false);
        json!({
            "weights_bytes": memory.weights.round() as u64,
            "gradients_bytes": memory.gradients.round() as u64,
            "optimizer_bytes": memory.optimizer.round() as u64,
            "activations_bytes": memory.activations.round() as u64,
            "total_bytes": memory.total().round() as u64,
        })
    };
    json!({
        "parameters": {
            "total": parameters.total(),
            "active": parameters.active(),
            "trainable": parameters.trainable(),
            "parts": parts,
        },
        "training": { "tokens": training.tokens, "f32": memory(Precision::F32), "bf16": memory(Precision::Bf16) },
        "inference": {
            "f32_bytes": parameters.total() * 4,
            "bf16_bytes": parameters.total() * 2,
            "int8_bytes": parameters.total(),
            "int4_bytes": parameters.total() / 2,
            "kv_cache_bytes_per_token": model_cost::kv_cache_bytes(config, 1),
        },
        "routing": routing_flops(config)
            .map(|(taken, flat)| json!({ "flops_per_token": taken, "flops_saved_per_token": flat - taken })),
        "forward_flops_per_token": model_cost::forward_flops_per_token(config, seq_len),
        "training_flops_per_token": model_cost::training_flops_per_token(config, seq_len),
    })
}
