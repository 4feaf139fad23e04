//! The configurations of measured steps.

use std::path::Path;

use moeworks_train::TrainError;
use moeworks_train::config::{ConfigLayers, Override, RunConfig};

/// The vocabulary of the byte tokenizer.
const VOCABULARY: usize = 257;

/// A configuration by its settings.
#[derive(Clone, Copy, Debug)]
pub struct NamedConfig {
    /// The name.
    pub name: &'static str,
    /// The settings that differ from those of [`BASE`].
    pub settings: &'static [&'static str],
}

/// The settings of every measured step.
pub const BASE: [&str; 16] = [
    "model.width=128",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.head_dim=64",
    "model.num_experts=8",
    "model.top_k=2",
    "model.expert_width=256",
    "train.seq_len=128",
    "train.batch_size=4",
    "train.precision=f32",
    "train.eval_every=0",
    "train.eval_batches=1",
    "train.sample_every=0",
    "train.checkpoint_every=0",
    "data.validation_fraction=0.1",
];

/// The configurations on one rank on which the constants of a step are fitted.
pub(super) const REFERENCES: [NamedConfig; 8] = [
    NamedConfig {
        name: "small",
        settings: &[
            "model.width=64",
            "model.head_dim=32",
            "model.num_layers=6",
            "model.num_experts=4",
            "train.batch_size=1",
        ],
    },
    NamedConfig { name: "large", settings: &["model.width=192", "model.head_dim=96", "train.batch_size=16"] },
    NamedConfig {
        name: "dense, wide",
        settings: &[
            "model.width=192",
            "model.head_dim=96",
            "model.num_experts=0",
            "model.dense_width=384",
            "train.batch_size=2",
        ],
    },
    NamedConfig {
        name: "dense, narrow",
        settings: &[
            "model.width=64",
            "model.head_dim=32",
            "model.num_experts=0",
            "model.dense_width=256",
            "model.num_layers=6",
            "train.batch_size=8",
        ],
    },
    NamedConfig {
        name: "64 experts, 6 a token",
        settings: &["model.num_experts=64", "model.top_k=6", "model.expert_width=32", "train.batch_size=6"],
    },
    NamedConfig {
        name: "16 experts, 1 a token",
        settings: &["model.num_experts=16", "model.top_k=1", "model.expert_width=192", "train.seq_len=256"],
    },
    NamedConfig {
        name: "large, bf16",
        settings: &["model.width=192", "model.head_dim=96", "train.batch_size=12", "train.precision=bf16"],
    },
    NamedConfig {
        name: "small, bf16",
        settings: &[
            "model.width=96",
            "model.head_dim=48",
            "model.num_layers=5",
            "model.num_experts=12",
            "train.batch_size=3",
            "train.precision=bf16",
        ],
    },
];

/// The configurations on several ranks on which the constants of ranks are fitted.
pub(super) const RANK_REFERENCES: [NamedConfig; 5] = [
    NamedConfig { name: "dp 2", settings: &["parallel.dp=2", "model.width=192", "model.head_dim=96"] },
    NamedConfig { name: "ep 2", settings: &["parallel.ep=2", "model.width=96", "model.head_dim=48"] },
    NamedConfig {
        name: "ep 2, 16 experts",
        settings: &["parallel.ep=2", "model.num_experts=16", "train.batch_size=12"],
    },
    NamedConfig {
        name: "tp 2",
        settings: &["parallel.tp=2", "model.width=192", "model.head_dim=96", "train.batch_size=6"],
    },
    NamedConfig {
        name: "pp 2",
        settings: &["parallel.pp=2", "train.grad_accumulation=6", "model.num_layers=6", "model.expert_width=128"],
    },
];

/// Unlike configurations, none of which is used to make the file.
pub const CHECKED: [NamedConfig; 10] = [
    NamedConfig { name: "8 experts, 2 a token", settings: &[] },
    NamedConfig { name: "dense", settings: &["model.num_experts=0", "model.dense_width=512", "model.num_layers=4"] },
    NamedConfig {
        name: "32 narrow experts, 4 a token",
        settings: &["model.num_experts=32", "model.top_k=4", "model.expert_width=64"],
    },
    NamedConfig { name: "wide, bf16", settings: &["model.width=256", "model.head_dim=128", "train.precision=bf16"] },
    NamedConfig { name: "long sequences", settings: &["train.seq_len=512", "train.batch_size=2"] },
    NamedConfig {
        name: "4 microbatches, recomputed",
        settings: &["train.grad_accumulation=4", "train.checkpoint_layers=true"],
    },
    NamedConfig { name: "dp 2", settings: &["parallel.dp=2"] },
    NamedConfig { name: "ep 2", settings: &["parallel.ep=2", "train.batch_size=8"] },
    NamedConfig { name: "tp 2", settings: &["parallel.tp=2", "train.batch_size=8"] },
    NamedConfig { name: "pp 2", settings: &["parallel.pp=2", "train.grad_accumulation=4", "model.num_layers=4"] },
];

impl NamedConfig {
    /// Resolves the settings for `steps` steps, with the text at `text`.
    ///
    /// # Errors
    /// If they are invalid.
    pub fn resolve(&self, text: &Path, steps: usize) -> Result<RunConfig, TrainError> {
        let settings = BASE.iter().chain(self.settings);
        let mut overrides = settings.map(|setting| Override::parse(setting)).collect::<Result<Vec<_>, _>>()?;
        overrides.push(Override::new("data.paths", vec![text.display().to_string()]));
        overrides.push(Override::parse(&format!("train.steps={steps}"))?);
        let mut config = ConfigLayers { overrides, ..ConfigLayers::default() }.resolve()?;
        config.model.vocab_size = VOCABULARY;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_checked_configuration_is_valid_and_none_is_a_reference() {
        let text = Path::new("text.txt");
        let resolved = |named: &NamedConfig| named.resolve(text, 10).unwrap();
        let checked: Vec<RunConfig> = CHECKED.iter().map(resolved).collect();
        for reference in REFERENCES.iter().chain(&RANK_REFERENCES) {
            assert!(!checked.contains(&resolved(reference)), "{}", reference.name);
        }
        let layouts = checked.iter().filter(|config| config.parallel.num_ranks() == 2).count();
        assert_eq!(layouts, 4, "dp, ep, tp and pp");
    }
}
