//! The list of schemes that a routing study compares.

use std::path::Path;

use moeworks_moe::{RouterKind, StudyVariant, TableSource};

use crate::config::{ConfigError, ConfigLayers, Override, RunConfig};

/// One model of a study: the base configuration with some settings changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// The name in the table, in the plot and of the run.
    pub name: &'static str,
    /// A description of the changes, for the reader.
    pub what: String,
    /// The configuration, with the number of steps that gives the study's floating-point operations.
    pub config: RunConfig,
}

/// A name, a description and the settings.
type Scheme = (&'static str, &'static str, &'static [&'static str]);

/// The schemes beside the base configuration, by the settings that they change.
const SCHEMES: &[Scheme] = &[
    ("scale-1", "weights that add up to 1", &["model.router.routed_scale=1.0"]),
    ("unnormalised", "weights not divided by their sum", &["model.normalize_weights=false"]),
    ("capacity-1.25", "an expert takes 1.25 even shares, later tokens are dropped", &["model.capacity_factor=1.25"]),
    (
        "priority",
        "as capacity-1.25, but the tokens with the highest scores are served first (V-MoE)",
        &["model.capacity_factor=1.25", "model.router.overflow=priority"],
    ),
    (
        "reroute",
        "as capacity-1.25, but a token whose expert is full goes to its next one with room",
        &["model.capacity_factor=1.25", "model.router.overflow=reroute"],
    ),
    (
        "local-groups",
        "as capacity-1.25, each 512 tokens by themselves (GShard)",
        &["model.capacity_factor=1.25", "model.router.local_group=512"],
    ),
    ("capacity-1.0", "an expert takes an even share, later tokens are dropped", &["model.capacity_factor=1.0"]),
    ("jitter", "router inputs times a number in [0.99, 1.01] (Switch)", &["model.jitter=0.01"]),
    (
        "noise",
        "normal noise of a deviation of 0.06 on the logits, losses on importance and load (V-MoE)",
        &["model.router.noise_std=0.06", "train.balance=none", "train.importance_coef=0.005", "train.load_coef=0.005"],
    ),
    ("input-dropout", "a tenth of the router's input left out", &["model.router.input_dropout=0.1"]),
    (
        "temperature",
        "logits divided by a temperature that falls from 2 to 1 in the first half",
        &["model.router.temperature=linear 2 to 1 over 0.5"],
    ),
    (
        "random-start",
        "random choices in the first tenth of the steps, fewer and fewer in the second",
        &["model.router.random_share=0.1"],
    ),
    ("sparsemixer", "two experts drawn from those near the best (PhiMoE)", &["model.router.sparsemixer_jitter=0.01"]),
    ("pooled-balance", "balance loss over all layers together (transformers)", &["train.balance=pooled"]),
    ("sigmoid", "sigmoid scores in place of softmax", &["model.router.scores=sigmoid"]),
    (
        "expert-bias",
        "sigmoid scores, a bias on each expert and the sequence-wise loss in place of the balance loss (DeepSeek-V3)",
        &[
            "model.router.scores=sigmoid",
            "model.router.expert_bias=true",
            "train.balance=none",
            "train.sequence_coef=1e-4",
        ],
    ),
    (
        "device-limited",
        "all experts of a token are in one of four groups (DeepSeek-V2)",
        &["model.router.num_groups=4", "model.router.top_groups=1"],
    ),
    (
        "device-balance",
        "as device-limited, with balance losses over groups, their experts and their tokens (DeepSeek-V2)",
        &[
            "model.router.num_groups=4",
            "model.router.top_groups=1",
            "train.balance_coef=0.003",
            "train.device_coef=0.05",
            "train.communication_coef=0.02",
        ],
    ),
    (
        "moe++",
        "a zero, a copy and two constant experts besides, gating residuals, capacity 1.1 (MoE++)",
        &[
            "model.router.zero_experts=1",
            "model.router.copy_experts=1",
            "model.router.constant_experts=2",
            "model.router.gate_residual=true",
            "model.capacity_factor=1.1",
        ],
    ),
    ("null-experts", "four experts that give nothing besides (AdaMoE)", &["model.router.null_experts=4"]),
    (
        "modality",
        "ids below 65 are a modality with experts of its own, the others another; losses on entropies (LIMoE)",
        &[
            "model.router.modality_boundaries=65",
            "model.router.modality_experts=4, 8",
            "train.local_entropy_coef=0.01",
            "train.global_entropy_coef=0.01",
        ],
    ),
    ("no-balance", "no balance loss", &["train.balance=none"]),
];

/// The name of the model without experts.
pub(super) const DENSE: &str = "dense";

/// A variant's name, and the variant or the reason why the base does not allow it.
pub(super) type Possible = (&'static str, Result<Variant, ConfigError>);

/// Lists all variants: the dense model, the base, one expert per token of K times the width, a shared expert, more
/// and finer experts, and every other scheme. All have the floating-point operations of `base` over its steps and the
/// active layer size of `base`. `embeddings` is the model whose embeddings a clustered hash uses, unless the base
/// names one.
pub(super) fn variants(base: &RunConfig, embeddings: &Path) -> Vec<Possible> {
    let model = &base.model;
    let (k, f, shared) = (model.top_k, model.expert_width, model.shared_width);
    let mut variants = Vec::new();
    let mut add = |name, what: &str, settings: &[String]| variants.push((name, variant(base, name, what, settings)));
    let dense = ["model.num_experts=0".to_owned(), format!("model.dense_width={}", k * f + shared)];
    add(DENSE, "no experts; as wide as those a token passes", &dense);
    add("top-k", &format!("{k} of {} experts of width {f}", model.num_experts), &[]);
    if k > 1 {
        let (experts, width) = one_of(base);
        add("top-1", &format!("1 of {experts} experts of width {width}"), &one_wide(base));
        let sigmoid = ["model.router.scores=sigmoid".to_owned(), scale_for(base, 2)];
        add(
            "top-1-sigmoid",
            "as top-1, weighed by twice the sigmoid of the logit",
            &[&one_wide(base)[..], &sigmoid].concat(),
        );
        // A single weight divided by its sum is 1, and the router would get no gradient from the task.
        let is_normalized = model.normalize_weights && k > 2;
        let settings = [
            format!("model.top_k={}", k - 1),
            format!("model.shared_width={}", shared + f),
            format!("model.normalize_weights={is_normalized}"),
            scale_for(base, k - 1),
        ];
        add("shared", &format!("{} of {} experts, and one that all tokens pass", k - 1, model.num_experts), &settings);
    }
    if f.is_multiple_of(4) {
        let (experts, top_k, width) = (model.num_experts * 4, k * 4, f / 4);
        let settings = [
            format!("model.num_experts={experts}"),
            format!("model.top_k={top_k}"),
            format!("model.expert_width={width}"),
            scale_for(base, top_k),
        ];
        add("fine", &format!("{top_k} of {experts} experts of width {width}"), &settings);
    }
    for (name, what, settings) in SCHEMES {
        add(name, what, &settings.iter().map(|&setting| setting.to_owned()).collect::<Vec<_>>());
    }
    // Every other kind of router, with its defaults and with the settings of its variants.
    for &kind in RouterKind::ALL.iter().filter(|kind| !kind.doc().is_synthetic) {
        let own = (kind != base.model.router.kind).then_some(StudyVariant { name: kind.name(), settings: &[] });
        for StudyVariant { name, settings } in own.into_iter().chain(kind.doc().variants.iter().copied()) {
            let mut with_embeddings = base.clone();
            if base.data.hash_embeddings.as_os_str().is_empty() {
                with_embeddings.data.hash_embeddings = embeddings.to_owned();
            }
            let mut variant = of_kind(&with_embeddings, name, kind.name(), settings);
            if let Some(other) = variant.as_mut().ok().filter(|variant| !needs_embeddings(&variant.config)) {
                other.config.data.hash_embeddings.clone_from(&base.data.hash_embeddings);
            }
            variants.push((name, variant));
        }
    }
    variants
}

/// Builds the base with another kind of router and the settings `more`. Where the kind takes only one expert per
/// token, the experts are wider instead.
fn of_kind(base: &RunConfig, name: &'static str, kind: &str, more: &[&str]) -> Result<Variant, ConfigError> {
    let settings: Vec<String> =
        [&[&*format!("model.router.kind={kind}")], more].concat().into_iter().map(str::to_owned).collect();
    let what = settings.join(", ");
    let plain = variant(base, name, &what, &settings);
    // A kind for one expert is rejected or sets K itself, and then computes less than the base.
    let has_k = plain.as_ref().is_ok_and(|variant| variant.config.model.top_k == base.model.top_k);
    if has_k || base.model.top_k == 1 {
        return plain;
    }
    let (experts, width) = one_of(base);
    let what = format!("1 of {experts} experts of width {width}, {what}");
    variant(base, name, &what, &[&one_wide(base)[..], &settings].concat()).or(plain)
}

/// Returns the number and width of experts such that one is as wide as K of the base and all have as many parameters.
fn one_of(base: &RunConfig) -> (usize, usize) {
    let (k, f) = (base.model.top_k, base.model.expert_width);
    ((base.model.num_experts / k).max(2), k * f)
}

/// Lists the settings for one expert per token, as wide as K of the base, with as many parameters. Its weight is its
/// probability: a normalised weight would be 1, and the router would get no gradient from the task.
fn one_wide(base: &RunConfig) -> [String; 5] {
    let (experts, width) = one_of(base);
    [
        "model.top_k=1".to_owned(),
        format!("model.expert_width={width}"),
        format!("model.num_experts={experts}"),
        "model.normalize_weights=false".to_owned(),
        scale_for(base, 1),
    ]
}

/// Returns the setting of the scale such that, with `top_k` experts per token, each expert's weight is as large as in
/// the base.
fn scale_for(base: &RunConfig, top_k: usize) -> String {
    format!("model.router.routed_scale={}", base.model.router.routed_scale * top_k as f32 / base.model.top_k as f32)
}

/// Returns whether a configuration needs the embeddings of a trained model.
pub(super) fn needs_embeddings(config: &RunConfig) -> bool {
    config.model.router.table_source() == Some(TableSource::Embeddings)
}

fn variant(base: &RunConfig, name: &'static str, what: &str, settings: &[String]) -> Result<Variant, ConfigError> {
    let overrides = settings.iter().map(|setting| Override::parse(setting)).collect::<Result<_, _>>()?;
    let mut config = ConfigLayers { overrides, ..ConfigLayers::default() }.resolve_over(base.clone())?;
    let share = super::step_flops(base) / super::step_flops(&config);
    config.train.steps = (base.train.steps as f64 * share).round().max(1.0) as u64;
    config.train.warmup_steps = (base.train.warmup_steps as f64 * share).round() as u64;
    Ok(Variant { name, what: what.to_owned(), config })
}
