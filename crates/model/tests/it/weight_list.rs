//! The list of a model's weights, compared with committed files: names, shapes, types, sharding, weight decay,
//! initial values and counts. A line that changes is a checkpoint that no longer loads, or a run that no longer
//! repeats.

use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

use moeworks_model::model_cost::Parameters;
use moeworks_model::{
    ActivationKind, Decoder, EncoderConfig, LatentAttention, ModelConfig, NormKind, PositionKind, QkNorm, TensorSplit,
    Variant, WeightSpec, WeightTable,
};
use moeworks_moe::{RouterConfig, RouterKind, ScoreFunction};
use moeworks_ops::Context;
use moeworks_tensor::Tensor;

/// A small model with three layers, the second of which has experts.
fn base() -> ModelConfig {
    ModelConfig {
        vocab_size: 37,
        width: 16,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 8,
        qk_norm: QkNorm::None,
        num_experts: 6,
        top_k: 2,
        expert_width: 10,
        moe_every: 2,
        dense_width: 14,
        max_seq_len: 32,
        ..ModelConfig::default()
    }
}

/// Returns the small model with a router of `kind`, changed by `change`.
fn routed(kind: RouterKind, change: impl FnOnce(&mut RouterConfig)) -> ModelConfig {
    let mut config = ModelConfig { moe_every: 1, ..base() };
    config.router.kind = kind;
    config.top_k = if matches!(kind, RouterKind::Switch | RouterKind::Base) { 1 } else { 2 };
    change(&mut config.router);
    config
}

fn latent(query_rank: usize) -> ModelConfig {
    let sizes = LatentAttention { query_rank, kv_rank: 6, plain_dim: 4, rotary_dim: 4 };
    let variant = Variant { latent: Some(sizes), value_dim: 6, qkv_bias: true, ..Variant::default() };
    ModelConfig { num_kv_heads: 4, shared_width: 12, variant, ..base() }
}

fn encoder(tie_embeddings: bool) -> ModelConfig {
    let encoder = EncoderConfig { num_layers: 2, dense_layers: vec![1], start_id: 0 };
    let positions = PositionKind::Relative { num_buckets: 8, max_distance: 20 };
    let variant = Variant { encoder: Some(encoder), positions, ..Variant::default() };
    let activation = ActivationKind::Relu;
    ModelConfig { moe_every: 1, num_kv_heads: 4, tie_embeddings, activation, top_k: 1, variant, ..base() }
}

/// A model with every bias, learned positions and layer norms.
fn with_all_biases() -> ModelConfig {
    let variant = Variant {
        norm: NormKind::Layer,
        positions: PositionKind::Learned,
        qkv_bias: true,
        output_bias: true,
        sinks: true,
        feed_forward_bias: true,
        router_bias: true,
        shared_gate: true,
        head_bias: true,
        ..Variant::default()
    };
    ModelConfig { shared_width: 12, activation: ActivationKind::Gelu, variant, ..base() }
}

fn cases() -> Vec<(&'static str, ModelConfig)> {
    use RouterKind::{Cosine, DenseToSparse, Forced, Hash, Hierarchical, LowRank, NoisyTopK, Relu, TopK};
    let qk_norm = |qk_norm| ModelConfig { qk_norm, tie_embeddings: true, ..base() };
    vec![
        ("dense", ModelConfig { num_experts: 0, ..base() }),
        ("moe", base()),
        ("shared", ModelConfig { shared_width: 12, ..base() }),
        ("latent", latent(10)),
        ("latent_direct", latent(0)),
        ("all_biases", with_all_biases()),
        ("qk_norm_head_tied", qk_norm(QkNorm::Head)),
        ("qk_norm_whole_tied", qk_norm(QkNorm::Whole)),
        ("encoder_tied", encoder(true)),
        ("encoder_untied", encoder(false)),
        ("router_noisy", routed(NoisyTopK, |_| ())),
        ("router_cosine", routed(Cosine, |router| router.schemes.cosine.dim = 5)),
        ("router_tree", routed(Hierarchical, |router| router.schemes.hierarchical.tree = "3".to_owned())),
        ("router_hash", routed(Hash, |_| ())),
        ("router_relu", routed(Relu, |_| ())),
        ("router_low_rank", routed(LowRank, |router| router.schemes.low_rank.dim = 3)),
        ("router_dense_to_sparse", routed(DenseToSparse, |_| ())),
        ("router_forced", routed(Forced, |_| ())),
        (
            "router_bias_state",
            routed(TopK, |router| {
                (router.expert_bias, router.scores) = (true, ScoreFunction::Sigmoid);
            }),
        ),
        (
            "router_free_experts",
            routed(TopK, |router| {
                (router.zero_experts, router.copy_experts, router.constant_experts) = (1, 1, 2);
                router.gate_residual = true;
            }),
        ),
    ]
}

/// Returns the FNV-1a hash of a tensor's bytes.
fn checksum(tensor: &Tensor) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    tensor.bytes().iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Describes the parts of a tensor on `size` ranks: `whole`, or ranges and their dim; a plus if gradients are summed
/// over ranks.
fn cut(config: &ModelConfig, table: &WeightTable, spec: &WeightSpec, size: usize) -> String {
    if spec.role.is_of_experts() {
        return "experts".to_owned();
    }
    let of_rank = |rank: usize| {
        let share = TensorSplit::new(config, table, rank, size).expect("a split").share(spec);
        let sum = if share.is_summed { "+" } else { "" };
        match share.cut {
            None => format!("whole{sum}"),
            Some(cut) => format!("{:?}@{}{sum}", cut.pieces, cut.dim),
        }
    };
    let ranks: Vec<String> = (0..size).map(of_rank).collect();
    if ranks.iter().all(|rank| *rank == ranks[0]) { ranks[0].clone() } else { ranks.join(" ") }
}

fn list(config: &ModelConfig) -> String {
    let ctx = Context::cpu(1);
    let weights = Decoder::new(config.clone()).expect("a model").init(&ctx, 11, None);
    let mut text = String::new();
    let table = WeightTable::new(config);
    for (spec, (name, tensor)) in table.specs().iter().zip(weights.tensors()) {
        let role = if spec.role.is_product() { "product" } else { "exact" };
        let decay = if spec.is_decayed { "decayed" } else { "kept" };
        let cuts = [2, 3].map(|size| cut(config, &table, spec, size));
        writeln!(
            text,
            "{name} {:?} {role} {decay} | tp2 {} | tp3 {} | {:016x}",
            tensor.shape(),
            cuts[0],
            cuts[1],
            checksum(tensor)
        )
        .expect("text");
    }
    for (name, tensor) in weights.states() {
        writeln!(text, "state {name} {:?} {:016x}", tensor.shape(), checksum(tensor)).expect("text");
    }
    let parameters = Parameters::new(config);
    for part in &parameters.parts {
        writeln!(text, "part {}: {} {} {}", part.name, part.total, part.active, part.in_products).expect("text");
    }
    let [total, active, in_products] = [parameters.total(), parameters.active(), parameters.in_products()];
    writeln!(text, "all: {total} {active} {in_products}").expect("text");
    text
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(format!("{name}.txt"))
}

#[test]
fn the_table_lists_the_tensors_that_a_model_has_in_their_order() {
    let ctx = Context::cpu(1);
    for (name, config) in cases() {
        let weights = Decoder::new(config.clone()).expect("a model").init(&ctx, 11, None);
        let table = WeightTable::new(&config);
        let listed: Vec<_> = table.specs().iter().map(|spec| (spec.name.clone(), spec.role, &spec.shape[..])).collect();
        let tensors = weights.tensors().into_iter().zip(weights.roles());
        let found: Vec<_> = tensors.map(|((name, tensor), role)| (name, role, tensor.shape())).collect();
        assert_eq!(listed, found, "{name}");
        assert!(table.specs().iter().enumerate().all(|(index, spec)| spec.index == index), "{name}");
    }
}

#[test]
fn names_shapes_cuts_and_first_values_are_those_of_the_golden_lists() {
    for (name, config) in cases() {
        let (found, golden) = (list(&config), fs::read_to_string(file(name)).expect("a golden list"));
        for (line, (found, golden)) in found.lines().zip(golden.lines()).enumerate() {
            assert_eq!(found, golden, "{name}, line {}", line + 1);
        }
        assert_eq!(found.lines().count(), golden.lines().count(), "{name}: lines");
    }
}

/// Writes the golden lists: `it --ignored writes_the_golden_lists`. Every change must be intended.
#[test]
#[ignore = "writes into the source tree"]
fn writes_the_golden_lists() {
    for (name, config) in cases() {
        fs::write(file(name), list(&config)).expect("a golden list");
    }
}
