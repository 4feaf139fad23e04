//! What values a configuration may have, each with the one line that says what would be right.

use moeworks_model::{TensorSplit, WeightRuleError, WeightTable};
use moeworks_moe::TableSource;

use moeworks_infer::data::is_piped;

use super::{ConfigError, GradientType, PlacementChoice, RunConfig, TokenizerChoice, TrainConfig};

/// No size of a model or a batch is larger: above it, products of sizes would no longer fit.
const MAX_SIZE: usize = 1 << 24;

/// Tokens that are in memory together are counted in 32 bits.
const MAX_TOKENS: usize = 1 << 31;

/// No run has more ranks.
const MAX_RANKS: usize = 1 << 12;

/// Chunks that a layer is cut into at most.
const MAX_CHUNKS: usize = 64;

fn wrong(setting: &str, value: impl std::fmt::Display, expected: impl Into<String>) -> ConfigError {
    ConfigError::Value {
        origin: String::new(),
        setting: setting.into(),
        value: value.to_string(),
        expected: expected.into(),
    }
}

fn at_least_one(settings: &[(&str, u64)]) -> Result<(), ConfigError> {
    for &(setting, value) in settings {
        if value == 0 {
            return Err(wrong(setting, value, "must be at least 1"));
        }
    }
    Ok(())
}

fn within(setting: &str, value: f64, low: f64, high: f64) -> Result<(), ConfigError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(wrong(setting, value, format!("must be a number from {low} to {high}")))
}

/// TOML, in which a run keeps its settings, has no greater numbers.
fn within_toml(setting: &str, seed: u64) -> Result<(), ConfigError> {
    if i64::try_from(seed).is_ok() {
        return Ok(());
    }
    Err(wrong(setting, seed, format!("must be at most {}", i64::MAX)))
}

impl RunConfig {
    /// Checks every setting by itself and with the others. The error is a [`ConfigError::Value`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_model()?;
        self.weight_table()?;
        self.check_data()?;
        self.train.check_counts()?;
        self.train.check_numbers()?;
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

    /// The table of the model's weights with the settings `parallel.sharding` and `train.freeze`. Fails where one of these cannot be carried
    /// out.
    pub fn weight_table(&self) -> Result<WeightTable, ConfigError> {
        let refused = |setting: &'static str| {
            move |error: WeightRuleError| wrong(setting, format!("{:?}", error.rule), error.problem)
        };
        let mut table = WeightTable::new(&self.model);
        table.set_sharding(&self.parallel.sharding).map_err(refused("parallel.sharding"))?;
        table.freeze(&self.train.freeze).map_err(refused("train.freeze"))?;
        Ok(table)
    }

    fn check_model(&self) -> Result<(), ConfigError> {
        let model = &self.model;
        for (setting, value) in [
            ("model.vocab_size", model.vocab_size),
            ("model.width", model.width),
            ("model.num_layers", model.num_layers),
            ("model.num_heads", model.num_heads),
            ("model.head_dim", model.head_dim),
            ("model.num_experts", model.num_experts),
            ("model.expert_width", model.expert_width),
            ("model.shared_width", model.shared_width),
            ("model.dense_width", model.dense_width),
            ("model.max_seq_len", model.max_seq_len),
        ] {
            if value > MAX_SIZE {
                return Err(wrong(setting, value, format!("must be at most {MAX_SIZE}")));
            }
        }
        model.validate().map_err(|error| wrong(&format!("model.{}", error.setting), error.value, error.expected))
    }

    /// Losses of what the router does not have.
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

    fn check_parallel(&self) -> Result<(), ConfigError> {
        let parallel = &self.parallel;
        at_least_one(&[
            ("parallel.dp", parallel.dp as u64),
            ("parallel.ep", parallel.ep as u64),
            ("parallel.tp", parallel.tp as u64),
            ("parallel.timeout_s", parallel.timeout_s),
        ])?;
        if parallel.num_ranks() > 1 && self.train.expert_gradients == GradientType::Bf16 {
            let expected = "must be \"f32\" on several ranks, whose sums are f32";
            return Err(wrong("train.expert_gradients", "\"bf16\"", expected));
        }
        if parallel.num_ranks() > MAX_RANKS {
            let expected = format!(
                "times parallel.ep, {}, times parallel.tp, {}, must be at most {MAX_RANKS} ranks",
                parallel.ep, parallel.tp
            );
            return Err(wrong("parallel.dp", parallel.dp, expected));
        }
        if parallel.zero > 3 {
            return Err(wrong("parallel.zero", parallel.zero, "must be 0, 1, 2 or 3"));
        }
        if parallel.zero > 0 && parallel.placement == PlacementChoice::Everywhere {
            let expected = "must be 0 where parallel.placement is \"everywhere\": no expert may be on several ranks";
            return Err(wrong("parallel.zero", parallel.zero, expected));
        }
        if parallel.chunks > MAX_CHUNKS {
            let expected = format!("must be at most {MAX_CHUNKS}; 0 for the number that is measured to be best");
            return Err(wrong("parallel.chunks", parallel.chunks, expected));
        }
        self.check_tensor_parallel()?;
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
        within("data.validation_fraction", data.validation_fraction, 0.0, 0.5)?;
        within_toml("data.validation_seed", data.validation_seed)?;
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
        // 256 bytes and the token that ends a document.
        if data.tokenizer == TokenizerChoice::Bpe && !(257..=MAX_SIZE).contains(&data.bpe_vocab_size) {
            let expected = format!("must be from 257, one for each byte and one that ends a document, to {MAX_SIZE}");
            return Err(wrong("data.bpe_vocab_size", data.bpe_vocab_size, expected));
        }
        if data.tokenizer == TokenizerChoice::File(String::new()) {
            return Err(wrong("data.tokenizer", "\"\"", "must be \"bytes\", \"bpe\" or the path of a tokenizer.json"));
        }
        Ok(())
    }
}

impl TrainConfig {
    /// Tokens of a microbatch.
    #[must_use]
    pub fn microbatch_tokens(&self) -> usize {
        self.seq_len.saturating_mul(self.batch_size)
    }

    /// Tokens of an optimizer step.
    #[must_use]
    pub fn step_tokens(&self) -> usize {
        self.microbatch_tokens().saturating_mul(self.grad_accumulation)
    }

    fn check_counts(&self) -> Result<(), ConfigError> {
        at_least_one(&[
            ("train.steps", self.steps),
            ("train.seq_len", self.seq_len as u64),
            ("train.batch_size", self.batch_size as u64),
            ("train.grad_accumulation", self.grad_accumulation as u64),
            ("train.keep_last", self.keep_last as u64),
            ("train.max_bad_steps", self.max_bad_steps),
        ])?;
        // The streams of random numbers count steps in 56 bits.
        if self.steps >= 1 << 48 {
            return Err(wrong("train.steps", self.steps, format!("must be below {}", 1u64 << 48)));
        }
        if self.microbatch_tokens() >= MAX_TOKENS {
            let expected = format!("times train.seq_len, {}, must be below {MAX_TOKENS} tokens", self.seq_len);
            return Err(wrong("train.batch_size", self.batch_size, expected));
        }
        if self.grad_accumulation > MAX_SIZE {
            return Err(wrong(
                "train.grad_accumulation",
                self.grad_accumulation,
                format!("must be at most {MAX_SIZE}"),
            ));
        }
        if self.sample_every > 0 && self.sample_prompt.is_empty() {
            let expected = "must not be empty while train.sample_every is above 0";
            return Err(wrong("train.sample_prompt", "\"\"", expected));
        }
        if self.threads > 1024 {
            return Err(wrong("train.threads", self.threads, "must be at most 1024; 0 for one on each core"));
        }
        within_toml("train.seed", self.seed)
    }

    fn check_numbers(&self) -> Result<(), ConfigError> {
        for (setting, value) in [("train.lr", self.lr), ("train.eps", self.eps)] {
            if !(value > 0.0 && value.is_finite()) {
                return Err(wrong(setting, value, "must be a number above 0"));
            }
        }
        for (setting, value) in [
            ("train.weight_decay", self.weight_decay),
            ("train.clip_norm", self.clip_norm),
            ("train.balance_coef", self.balance_coef.range().0),
            ("train.device_coef", self.device_coef.range().0),
            ("train.communication_coef", self.communication_coef.range().0),
            ("train.sequence_coef", self.sequence_coef.range().0),
            ("train.importance_coef", self.importance_coef.range().0),
            ("train.load_coef", self.load_coef.range().0),
            ("train.local_entropy_coef", self.local_entropy_coef.range().0),
            ("train.global_entropy_coef", self.global_entropy_coef.range().0),
            ("train.min_entropy", self.min_entropy),
            ("train.z_coef", self.z_coef.range().0),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(wrong(setting, value, "must be a number of at least 0"));
            }
        }
        for (setting, value) in [("train.beta1", self.beta1), ("train.beta2", self.beta2)] {
            if !(0.0..1.0).contains(&value) {
                return Err(wrong(setting, value, "must be at least 0 and below 1"));
            }
        }
        within("train.min_lr_ratio", self.min_lr_ratio, 0.0, 1.0)?;
        within("train.decay_fraction", self.decay_fraction, 0.0, 1.0)
    }
}
