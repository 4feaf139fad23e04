//! The TOML form of a described model, and the checks of its values.

use serde::Deserialize;

use super::{Attention, Experts, LayerGroup, Model};

/// The largest size in a file: products of four of them still have room in 128 bits, and of two in 64.
const MAX_SIZE: usize = 1 << 28;
/// The most layers of a model.
const MAX_LAYERS: usize = 1 << 16;
/// The most parameters of a layer, above which sums would not be exact.
const MAX_LAYER_PARAMS: u128 = 1 << 46;

/// The error of an invalid description of a model: the problem, its place and the right value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The text is not TOML, or a field is missing or unknown.
    #[error("{0}")]
    Form(String),
    /// A value out of range.
    #[error("{field} = {value}: {expected}")]
    Value {
        /// The field, such as `layers 2: experts.top_k`.
        field: String,
        /// The value.
        value: String,
        /// The expected range.
        expected: String,
    },
    /// A name that no bundled model has.
    #[error("unknown model {name:?}: expected one of {known}, or a file", known = Model::NAMES.map(|(name, _)| name).join(", "))]
    Unknown {
        /// The name.
        name: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawModel {
    #[serde(default = "unnamed")]
    name: String,
    width: usize,
    vocabulary: usize,
    sequence: usize,
    #[serde(default)]
    is_tied: bool,
    #[serde(default = "yes")]
    has_embedding: bool,
    #[serde(default = "yes")]
    is_causal: bool,
    #[serde(default)]
    mtp_layers: usize,
    #[serde(default)]
    other_params: u64,
    #[serde(default)]
    layers: Vec<RawGroup>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawGroup {
    num: usize,
    width: Option<usize>,
    #[serde(default = "one")]
    token_share: f64,
    attention: Option<RawAttention>,
    window: Option<usize>,
    #[serde(default)]
    has_cross_attention: bool,
    #[serde(default)]
    dense_width: usize,
    experts: Option<RawExperts>,
    #[serde(default = "each")]
    expert_every: usize,
    #[serde(default = "yes")]
    is_gated: bool,
    #[serde(default)]
    has_biases: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAttention {
    heads: usize,
    kv_heads: Option<usize>,
    head_dim: Option<usize>,
    query_rank: Option<usize>,
    kv_rank: Option<usize>,
    nope_dim: Option<usize>,
    rotary_dim: Option<usize>,
    value_dim: Option<usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawExperts {
    num: usize,
    top_k: usize,
    width: usize,
    #[serde(default)]
    shared_width: usize,
}

fn unnamed() -> String {
    "model".to_owned()
}

fn yes() -> bool {
    true
}

fn one() -> f64 {
    1.0
}

fn each() -> usize {
    1
}

impl Model {
    /// Reads the TOML form. The error is one line.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        let raw: RawModel = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            let place = line.map_or_else(String::new, |line| format!("line {line}: "));
            ModelError::Form(format!("{place}{}", error.message().trim().replace('\n', ", ")))
        })?;
        let groups: Vec<LayerGroup> = raw
            .layers
            .into_iter()
            .enumerate()
            .map(|(index, group)| group.into_group(index))
            .collect::<Result<_, _>>()?;
        let model = Self {
            name: raw.name,
            width: raw.width,
            vocabulary: raw.vocabulary,
            sequence: raw.sequence,
            is_tied: raw.is_tied,
            has_embedding: raw.has_embedding,
            is_causal: raw.is_causal,
            mtp_layers: raw.mtp_layers,
            other_params: raw.other_params,
            groups,
        };
        model.check()?;
        Ok(model)
    }

    /// Fails unless every value is in its range. The error names the field, its value and the range.
    pub fn check(&self) -> Result<(), ModelError> {
        if self.name.trim().is_empty() || self.name.contains(char::is_control) {
            return Err(wrong("name", format!("{:?}", self.name), "must be a name on one line"));
        }
        for (name, value) in [("width", self.width), ("vocabulary", self.vocabulary), ("sequence", self.sequence)] {
            check_size(name, value, 1)?;
        }
        let params = self.vocabulary as u128 * self.width as u128;
        if params.max(u128::from(self.other_params)) > MAX_LAYER_PARAMS {
            return Err(wrong("vocabulary", self.vocabulary, "times width must be at most 2^46 parameters"));
        }
        if self.mtp_layers > 64 {
            return Err(wrong("mtp_layers", self.mtp_layers, "must be at most 64"));
        }
        let num_layers = self.groups.iter().fold(0_usize, |sum, group| sum.saturating_add(group.num));
        if num_layers == 0 || num_layers > MAX_LAYERS {
            return Err(wrong(
                "layers",
                num_layers,
                format!("must be [[layers]] tables with 1 to {MAX_LAYERS} in all"),
            ));
        }
        self.groups.iter().enumerate().try_for_each(|(index, group)| group.check(index, self))
    }
}

impl RawGroup {
    fn into_group(self, index: usize) -> Result<LayerGroup, ModelError> {
        let attention = self.attention.map(|raw| raw.into_attention(index)).transpose()?;
        let experts = self.experts.map(|RawExperts { num, top_k, width, shared_width }| Experts {
            num,
            top_k,
            width,
            shared_width,
        });
        Ok(LayerGroup {
            num: self.num,
            width: self.width,
            token_share: self.token_share,
            attention,
            window: self.window,
            has_cross_attention: self.has_cross_attention,
            dense_width: self.dense_width,
            experts,
            expert_every: self.expert_every,
            is_gated: self.is_gated,
            has_biases: self.has_biases,
        })
    }
}

impl RawAttention {
    fn into_attention(self, index: usize) -> Result<Attention, ModelError> {
        let heads = self.heads;
        match self {
            Self {
                kv_heads: None,
                head_dim: None,
                query_rank: Some(query_rank),
                kv_rank: Some(kv_rank),
                nope_dim: Some(nope_dim),
                rotary_dim: Some(rotary_dim),
                value_dim: Some(value_dim),
                ..
            } => Ok(Attention::Latent { heads, query_rank, kv_rank, nope_dim, rotary_dim, value_dim }),
            Self {
                kv_heads,
                head_dim: Some(head_dim),
                query_rank: None,
                kv_rank: None,
                nope_dim: None,
                rotary_dim: None,
                value_dim: None,
                ..
            } => Ok(Attention::Heads { heads, kv_heads: kv_heads.unwrap_or(heads), head_dim }),
            _ => Err(ModelError::Form(format!(
                "layers {}: attention: needs heads, head_dim and optionally kv_heads; or heads, query_rank, kv_rank, \
                 nope_dim, rotary_dim and value_dim for latent attention",
                index + 1
            ))),
        }
    }
}

impl LayerGroup {
    fn check(&self, index: usize, model: &Model) -> Result<(), ModelError> {
        let at = |name: &str| format!("layers {}: {name}", index + 1);
        check_size(at("num"), self.num, 1)?;
        check_size(at("width"), self.width.unwrap_or(1), 1)?;
        check_size(at("window"), self.window.unwrap_or(1), 1)?;
        check_size(at("dense_width"), self.dense_width, 0)?;
        check_size(at("expert_every"), self.expert_every, 1)?;
        if !(self.token_share > 0.0 && self.token_share <= 1e6) {
            return Err(wrong(at("token_share"), self.token_share, "must be a number above 0 and at most 1e6"));
        }
        let sizes: Vec<(&str, usize)> = match self.attention {
            None => Vec::new(),
            Some(Attention::Heads { heads, kv_heads, head_dim }) => {
                if kv_heads == 0 || heads % kv_heads != 0 {
                    return Err(wrong(at("attention.kv_heads"), kv_heads, format!("must divide the {heads} heads")));
                }
                vec![("attention.heads", heads), ("attention.head_dim", head_dim)]
            }
            Some(Attention::Latent { heads, query_rank, kv_rank, nope_dim, rotary_dim, value_dim }) => vec![
                ("attention.heads", heads),
                ("attention.query_rank", query_rank),
                ("attention.kv_rank", kv_rank),
                ("attention.nope_dim", nope_dim),
                ("attention.rotary_dim", rotary_dim),
                ("attention.value_dim", value_dim),
            ],
        };
        for (name, value) in sizes {
            check_size(at(name), value, 1)?;
        }
        self.check_experts(&at)?;
        self.check_params(&at, self.width.unwrap_or(model.width))
    }

    fn check_experts(&self, at: &dyn Fn(&str) -> String) -> Result<(), ModelError> {
        let Some(Experts { num, top_k, width, shared_width }) = self.experts else { return Ok(()) };
        check_size(at("experts.num"), num, 1)?;
        check_size(at("experts.width"), width, 1)?;
        check_size(at("experts.shared_width"), shared_width, 0)?;
        if !(1..=num).contains(&top_k) {
            return Err(wrong(at("experts.top_k"), top_k, format!("must be from 1 to the {num} experts")));
        }
        if self.expert_every > self.num {
            return Err(wrong(
                at("expert_every"),
                self.expert_every,
                format!("must be at most the {} layers of the group", self.num),
            ));
        }
        Ok(())
    }

    /// Fails if a layer has more parameters than sums can hold exactly.
    fn check_params(&self, at: &dyn Fn(&str) -> String, width: usize) -> Result<(), ModelError> {
        let product = |sizes: &[usize]| sizes.iter().fold(1_u128, |all, &size| all.saturating_mul(size as u128));
        let attention = match self.attention {
            None => 0,
            Some(Attention::Heads { heads, head_dim, .. }) => product(&[4, width, heads, head_dim]),
            Some(Attention::Latent { heads, query_rank, kv_rank, nope_dim, rotary_dim, value_dim }) => {
                let head = nope_dim + rotary_dim + value_dim;
                product(&[4, query_rank + kv_rank + width, heads, head]).max(product(&[width, query_rank + kv_rank]))
            }
        };
        let experts = self.experts.map_or(0, |of| {
            let widest = of.width.max(of.shared_width);
            product(&[4, width, widest, of.num + 1])
        });
        let dense = product(&[4, width, self.dense_width]);
        if attention.saturating_add(experts).saturating_add(dense) > MAX_LAYER_PARAMS {
            return Err(wrong(
                at("width"),
                width,
                "with these heads and experts has more than 2^46 parameters a layer",
            ));
        }
        Ok(())
    }
}

fn check_size(field: impl Into<String>, value: usize, least: usize) -> Result<(), ModelError> {
    if (least..=MAX_SIZE).contains(&value) {
        Ok(())
    } else {
        Err(wrong(field, value, format!("must be a number from {least} to {MAX_SIZE}")))
    }
}

fn wrong(field: impl Into<String>, value: impl std::fmt::Display, expected: impl Into<String>) -> ModelError {
    ModelError::Value { field: field.into(), value: value.to_string(), expected: expected.into() }
}
