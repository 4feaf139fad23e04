//! Checks of settings against each other. Each error says in one line what would be valid. The range of a single
//! setting is in its section's definition.

use moeworks_model::{TensorSplit, WeightRuleError, WeightTable};
use moeworks_moe::{RouterKind, Section as _, TableSource};

use moeworks_infer::data::is_piped;

use super::parallel::MAX_RANKS;
use super::{ConfigError, GradientType, MovingChoice, RunConfig, TokenizerChoice, TrainConfig};

/// The limit of tokens that are in memory together, because their number is a 32-bit integer.
const MAX_TOKENS: usize = 1 << 31;

/// The limit of a trained model's positions, above which products of sizes would overflow.
const MAX_TRAINED_LEN: usize = 1 << 24;

pub(crate) fn wrong(setting: &str, value: impl std::fmt::Display, expected: impl Into<String>) -> ConfigError {
    ConfigError::Value {
        origin: String::new(),
        setting: setting.into(),
        value: value.to_string(),
        expected: expected.into(),
    }
}

/// Converts the error of a setting whose dotted name is complete.
fn out_of_range(error: moeworks_moe::ConfigError) -> ConfigError {
    let moeworks_moe::ConfigError { setting, value, expected } = error;
    wrong(setting, value, expected)
}

impl RunConfig {
    /// Checks every setting by itself and against the others. The error is a [`ConfigError::Value`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_ranges()?;
        self.check_model()?;
        self.weight_table()?;
        self.check_data()?;
        self.check_separate_documents()?;
        self.train.check_counts()?;
        self.check_router_losses()?;
        self.check_parallel()?;
        if self.model.variant.encoder.is_some() && self.train.seq_len < 2 {
            let expected = "must be at least 2 with an encoder: a part of each text is left out, the rest is read";
            return Err(wrong("train.seq_len", self.train.seq_len, expected));
        }
        if self.train.seq_len > self.model.max_seq_len {
            let expected = format!("must be at most model.max_seq_len, {}", self.model.max_seq_len);
            return Err(wrong("train.seq_len", self.train.seq_len, expected));
        }
        if self.run.out.as_os_str().is_empty() {
            return Err(wrong("run.out", "\"\"", "must be a folder, such as \"runs\""));
        }
        let name = &self.run.name;
        if name == "." || name == ".." || name.chars().any(|c| c == '/' || c == '\\' || c.is_control()) {
            return Err(wrong("run.name", format!("{name:?}"), "must be the name of a folder, without slashes"));
        }
        Ok(())
    }

    /// Creates the table of the model's weights with the settings `parallel.sharding` and `train.freeze`. Fails if
    /// one of them cannot be applied.
    pub fn weight_table(&self) -> Result<WeightTable, ConfigError> {
        let refused = |setting: &'static str| {
            move |error: WeightRuleError| wrong(setting, format!("{:?}", error.rule), error.problem)
        };
        let mut table = WeightTable::new(&self.model);
        table.set_sharding(&self.parallel.sharding).map_err(refused("parallel.sharding"))?;
        table.freeze(&self.train.freeze).map_err(refused("train.freeze"))?;
        Ok(table)
    }

    /// Checks every setting by itself.
    pub fn check_ranges(&self) -> Result<(), ConfigError> {
        self.model.check_ranges()?;
        self.model.router.check_ranges()?;
        for kind in RouterKind::ALL {
            self.model.router.check_scheme(*kind)?;
        }
        let sections = [
            self.data.check_ranges(),
            self.train.check_ranges(),
            self.parallel.check_ranges(),
            self.rebalance.check_ranges(),
            self.run.check_ranges(),
        ];
        sections.into_iter().collect::<Result<(), _>>().map_err(out_of_range)
    }

    fn check_model(&self) -> Result<(), ConfigError> {
        let model = &self.model;
        if model.max_seq_len > MAX_TRAINED_LEN {
            let expected = format!("must be at most {MAX_TRAINED_LEN} to train the model");
            return Err(wrong("model.max_seq_len", model.max_seq_len, expected));
        }
        model.validate().map_err(|error| wrong(&format!("model.{}", error.setting), error.value, error.expected))
    }

    /// Refuses losses on groups or noise that the router does not have.
    fn check_router_losses(&self) -> Result<(), ConfigError> {
        let router = &self.model.router;
        for (setting, ramp) in
            [("train.device_coef", self.train.device_coef), ("train.communication_coef", self.train.communication_coef)]
        {
            if ramp.range().1 > 0.0 && router.num_groups < 2 {
                return Err(wrong(setting, ramp, "needs model.router.num_groups of at least 2"));
            }
        }
        if self.train.load_coef.range().1 > 0.0 && !router.has_logit_noise() {
            let expected = "must be 0 without noise on the logits (model.router.noise_std, or the kind noisy_top_k)";
            return Err(wrong("train.load_coef", self.train.load_coef, expected));
        }
        Ok(())
    }

    fn check_domains(&self) -> Result<(), ConfigError> {
        let parallel = &self.parallel;
        let (domain, num_ranks) = (&parallel.domain, parallel.layout().num_expert_ranks());
        if !domain.is_auto() && !num_ranks.is_multiple_of(domain.num_members()) {
            let expected = format!("must divide parallel.ep times parallel.tp, {num_ranks}");
            return Err(wrong("parallel.domain", domain, expected));
        }
        let has_domains = domain.num_members() != 1;
        if has_domains && parallel.moving != MovingChoice::Tokens {
            return Err(wrong("parallel.domain", domain, "must be 1 unless parallel.moving is \"tokens\""));
        }
        let shares = [
            ("parallel.domain_keep", parallel.domain_keep),
            ("parallel.domain_keep_gradients", parallel.domain_keep_gradients),
        ];
        if let Some((setting, share)) = shares.into_iter().find(|(_, share)| !has_domains && *share < 1.0) {
            return Err(wrong(setting, share, "must be 1 without domains (parallel.domain)"));
        }
        Ok(())
    }

    fn check_parallel(&self) -> Result<(), ConfigError> {
        let parallel = &self.parallel;
        if parallel.num_ranks() > 1 && self.train.expert_gradients == GradientType::Bf16 {
            let expected = "must be \"f32\" on several ranks, whose sums are f32";
            return Err(wrong("train.expert_gradients", "\"bf16\"", expected));
        }
        if parallel.num_ranks() as u64 > MAX_RANKS {
            let expected = format!(
                "times parallel.ep, {}, times parallel.tp, {}, times parallel.pp, {}, must be at most {MAX_RANKS} ranks",
                parallel.ep, parallel.tp, parallel.pp
            );
            return Err(wrong("parallel.dp", parallel.dp, expected));
        }
        self.check_domains()?;
        self.check_tensor_parallel()?;
        self.check_pipeline()?;
        self.check_rebalance()?;
        if parallel.ep > 1 && self.model.num_experts == 0 {
            return Err(wrong("parallel.ep", parallel.ep, "must be 1: the model has no experts; use parallel.dp"));
        }
        Ok(())
    }

    fn check_tensor_parallel(&self) -> Result<(), ConfigError> {
        let tp = self.parallel.tp;
        if tp == 1 {
            return Ok(());
        }
        Ok(TensorSplit::check(&self.model, &self.weight_table()?, tp)?)
    }

    fn check_data(&self) -> Result<(), ConfigError> {
        let data = &self.data;
        if data.paths.iter().any(String::is_empty) {
            return Err(wrong("data.paths", format!("{:?}", data.paths), "must not hold an empty path"));
        }
        if data.paths.iter().any(|path| is_piped(path)) && self.parallel.num_ranks() > 1 {
            let expected =
                "must hold no pipe, such as -, with several ranks, each of which reads the data; name a file";
            return Err(wrong("data.paths", format!("{:?}", data.paths), expected));
        }
        let needs_embeddings = self.model.router.table_source() == Some(TableSource::Embeddings);
        if needs_embeddings && data.hash_embeddings.as_os_str().is_empty() {
            let expected = "must be the run or model whose embeddings model.router.hash = \"clustered\" clusters";
            return Err(wrong("data.hash_embeddings", "\"\"", expected));
        }
        if data.text_field.is_empty() {
            return Err(wrong("data.text_field", "\"\"", "must be the name of the field that holds the text"));
        }
        if data.tokenizer == TokenizerChoice::File(String::new()) {
            return Err(wrong("data.tokenizer", "\"\"", "must be \"bytes\", \"bpe\" or the path of a tokenizer.json"));
        }
        Ok(())
    }
}

impl RunConfig {
    /// Checks that no part of the model or the losses needs whole sequences if these hold several documents.
    fn check_separate_documents(&self) -> Result<(), ConfigError> {
        let problem = if !self.data.separate_documents {
            return Ok(());
        } else if self.model.variant.encoder.is_some() {
            "must be false in a model with an encoder, which is trained on spans left out of a text"
        } else if self.train.sequence_coef.range().1 > 0.0 {
            "must be false with train.sequence_coef, a loss over whole sequences"
        } else {
            return Ok(());
        };
        Err(wrong("data.separate_documents", true, problem))
    }
}

impl TrainConfig {
    /// Returns the number of tokens in a microbatch.
    #[must_use]
    pub fn microbatch_tokens(&self) -> usize {
        self.seq_len.saturating_mul(self.batch_size)
    }

    /// Returns the number of tokens in an optimizer step.
    #[must_use]
    pub fn step_tokens(&self) -> usize {
        self.microbatch_tokens().saturating_mul(self.grad_accumulation)
    }

    fn check_counts(&self) -> Result<(), ConfigError> {
        if self.microbatch_tokens() >= MAX_TOKENS {
            let expected = format!("times train.seq_len, {}, must be below {MAX_TOKENS} tokens", self.seq_len);
            return Err(wrong("train.batch_size", self.batch_size, expected));
        }
        if self.sample_every > 0 && self.sample_prompt.is_empty() {
            let expected = "must not be empty while train.sample_every is above 0";
            return Err(wrong("train.sample_prompt", "\"\"", expected));
        }
        Ok(())
    }
}
