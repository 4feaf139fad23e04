//! What a routing study compares: the one list of schemes.

use moeworks_moe::RouterKind;
use serde::de::{DeserializeOwned, Deserializer, Visitor};

use crate::config::{ConfigError, ConfigLayers, Override, RunConfig};

/// One model of a study: the base configuration with some settings changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// Its name in table and plot, and of its run.
    pub name: &'static str,
    /// What it changes, for the reader.
    pub what: String,
    /// Its configuration, with the steps that give it the study's floating-point operations.
    pub config: RunConfig,
}

/// A name, what it is, and its settings.
type Scheme = (&'static str, &'static str, &'static [&'static str]);

/// The schemes, beside the base configuration itself, by the settings that they change.
const SCHEMES: &[Scheme] = &[
    ("scale-1", "weights that add up to 1", &["model.router.routed_scale=1.0"]),
    ("unnormalised", "weights not divided by their sum", &["model.normalize_weights=false"]),
    ("capacity-1.25", "an expert takes 1.25 even shares, later tokens are dropped", &["model.capacity_factor=1.25"]),
    (
        "reroute",
        "as capacity-1.25, but a token whose expert is full goes to its next one with room",
        &["model.capacity_factor=1.25", "model.router.overflow=reroute"],
    ),
    ("capacity-1.0", "an expert takes an even share, later tokens are dropped", &["model.capacity_factor=1.0"]),
    ("jitter", "router inputs times a number in [0.99, 1.01] (Switch)", &["model.jitter=0.01"]),
    ("pooled-balance", "balance loss over all layers together (transformers)", &["train.balance=pooled"]),
    ("sigmoid", "sigmoid scores in place of softmax", &["model.router.scores=sigmoid"]),
    (
        "expert-bias",
        "sigmoid scores and a bias on each expert in place of the balance loss (DeepSeek-V3)",
        &["model.router.scores=sigmoid", "model.router.expert_bias=true", "train.balance=none"],
    ),
    (
        "device-limited",
        "a token's experts are in half of the groups of two (DeepSeek-V2)",
        &["model.router.num_groups=4", "model.router.top_groups=2"],
    ),
    ("no-balance", "no balance loss", &["train.balance=none"]),
];

/// The dense model, the base, one expert a token of twice the width, a shared expert, more and finer experts, and every
/// other scheme, all with the floating-point operations that `base` takes over its steps and with the active size of its
/// layers.
pub(super) fn variants(base: &RunConfig) -> Result<Vec<Variant>, ConfigError> {
    let model = &base.model;
    let (k, f, shared) = (model.top_k, model.expert_width, model.shared_width);
    let active = k * f + shared;
    let mut variants = vec![
        variant(
            base,
            "dense",
            "no experts; as wide as those a token passes",
            &["model.num_experts=0".to_owned(), format!("model.dense_width={active}")],
        )?,
        variant(base, "top-k", &format!("{k} of {} experts of width {f}", model.num_experts), &[])?,
    ];
    if k > 1 {
        let settings = one_wide(base);
        let experts = (model.num_experts / k).max(2);
        variants.push(variant(base, "top-1", &format!("1 of {experts} experts of width {}", k * f), &settings)?);
        let settings =
            [format!("model.top_k={}", k - 1), format!("model.shared_width={}", shared + f), scale_for(base, k - 1)];
        let what = format!("{} of {} experts, and one that all tokens pass", k - 1, model.num_experts);
        variants.push(variant(base, "shared", &what, &settings)?);
    }
    if f.is_multiple_of(4) {
        let (experts, top_k, width) = (model.num_experts * 4, k * 4, f / 4);
        let settings = [
            format!("model.num_experts={experts}"),
            format!("model.top_k={top_k}"),
            format!("model.expert_width={width}"),
            scale_for(base, top_k),
        ];
        variants.push(variant(base, "fine", &format!("{top_k} of {experts} experts of width {width}"), &settings)?);
    }
    for (name, what, settings) in SCHEMES {
        let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        variants.push(variant(base, name, what, &settings)?);
    }
    // Kinds of router that no scheme above sets, with their own defaults.
    for kind in router_kinds() {
        if variants.iter().any(|variant| kind_of(&variant.config) == *kind) {
            continue;
        }
        match of_kind(base, kind) {
            Ok(variant) => variants.push(variant),
            Err(error) => tracing::warn!("router {kind} is left out of the study: {error}"),
        }
    }
    Ok(variants)
}

/// The base with another kind of router; with one wide expert a token where the kind takes no more than one.
pub(super) fn of_kind(base: &RunConfig, kind: &'static str) -> Result<Variant, ConfigError> {
    let setting = format!("model.router.kind={kind}");
    let plain = variant(base, kind, &setting, std::slice::from_ref(&setting));
    // A kind for one expert is refused or sets K itself, and then computes less than the base.
    let has_k = plain.as_ref().is_ok_and(|variant| variant.config.model.top_k == base.model.top_k);
    if has_k || base.model.top_k == 1 {
        return plain;
    }
    let settings = [&one_wide(base)[..], &[setting]].concat();
    variant(base, kind, &settings.join(", "), &settings).or(plain)
}

/// One expert a token, as wide as the K of the base together, and as many parameters. Its weight is its probability: a
/// normalised one would be 1, and the router would learn nothing from the task.
fn one_wide(base: &RunConfig) -> [String; 5] {
    let (k, f) = (base.model.top_k, base.model.expert_width);
    let experts = (base.model.num_experts / k).max(2);
    [
        "model.top_k=1".to_owned(),
        format!("model.expert_width={}", k * f),
        format!("model.num_experts={experts}"),
        "model.normalize_weights=false".to_owned(),
        scale_for(base, 1),
    ]
}

/// What weights are multiplied by where a token has `top_k` experts: as much for each as in the base.
fn scale_for(base: &RunConfig, top_k: usize) -> String {
    format!("model.router.routed_scale={}", base.model.router.routed_scale * top_k as f32 / base.model.top_k as f32)
}

/// The kind as it is written in configurations.
pub(super) fn kind_of(config: &RunConfig) -> String {
    toml::Value::try_from(config.model.router.kind)
        .map_or_else(|_| String::new(), |kind| kind.as_str().unwrap_or_default().to_owned())
}

/// Every kind of router that this program knows, as it is written in configurations.
pub(super) fn router_kinds() -> &'static [&'static str] {
    spellings::<RouterKind>()
}

/// The spellings of an enum: what its `Deserialize` says that it would take.
fn spellings<T: DeserializeOwned>() -> &'static [&'static str] {
    let mut found: &'static [&'static str] = &[];
    // Always an error: there is nothing to read.
    let _ = T::deserialize(Spellings(&mut found));
    found
}

struct Spellings<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Spellings<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(serde::de::Error::custom("only the spellings are wanted"))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = variants;
        self.deserialize_any(visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

fn variant(base: &RunConfig, name: &'static str, what: &str, settings: &[String]) -> Result<Variant, ConfigError> {
    let overrides = settings.iter().map(|setting| Override::parse(setting)).collect::<Result<_, _>>()?;
    let mut config = ConfigLayers { overrides, ..ConfigLayers::default() }.resolve_over(base.clone())?;
    let share = super::step_flops(base) / super::step_flops(&config);
    config.train.steps = (base.train.steps as f64 * share).round().max(1.0) as u64;
    config.train.warmup_steps = (base.train.warmup_steps as f64 * share).round() as u64;
    Ok(Variant { name, what: what.to_owned(), config })
}
