//! The file of a measured machine.

use serde::{Deserialize, Serialize};

use crate::{Link, Precision, RankSpec, Topology};

/// The rate of a square product of some rows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductRate {
    /// The type of the weights.
    pub precision: Precision,
    /// The threads that computed it.
    pub threads: usize,
    /// Rows of the input.
    pub rows: usize,
    /// Columns of the input, and of the result.
    pub width: usize,
    /// Operations a second; a multiply-add counts as two.
    pub flops: f64,
    /// Operations a second of the product with the products for its two gradients; those of `flops` if not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training_flops: Option<f64>,
}

/// The rate of the products of several experts of equal load, with the activation between them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertRate {
    /// The type of the weights.
    pub precision: Precision,
    /// The threads that computed them.
    pub threads: usize,
    /// Rows of each expert.
    pub rows: usize,
    /// The width of the model.
    pub width: usize,
    /// The width of an expert.
    pub expert_width: usize,
    /// Operations a second of a forward pass.
    pub flops: f64,
    /// Operations a second of forward and backward.
    pub training_flops: f64,
}

/// The rate of causal attention.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRate {
    /// The type of queries, keys and values.
    pub precision: Precision,
    /// The threads that computed it.
    pub threads: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Operations a second of a forward pass, those for pairs of tokens that the mask leaves.
    pub flops: f64,
    /// Operations a second of forward and backward, which counts as three forward passes.
    pub training_flops: f64,
}

/// The rate of an output layer with its loss, forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputLayerRate {
    /// The type of the weights.
    pub precision: Precision,
    /// The threads that computed it.
    pub threads: usize,
    /// The width of the model.
    pub width: usize,
    /// The number of ids.
    pub vocabulary: usize,
    /// Operations a second of its three products.
    pub training_flops: f64,
}

/// The rate of an update: the norm of all gradients, and the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpdateRate {
    /// The precision of training; with bf16 products the update writes the copy of the weights that they read.
    pub precision: Precision,
    /// The threads that computed it.
    pub threads: usize,
    /// Parameters a second.
    pub params_per_s: f64,
}

/// The costs of the rest of a step, fitted on reference steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overhead {
    /// Seconds of a layer in a microbatch, forward and backward, whatever its size.
    pub layer_s: f64,
    /// Passes over the values that forward keeps, at the rate of memory.
    pub passes: f64,
    /// Seconds of a step, whatever its size.
    #[serde(default)]
    pub step_s: f64,
    /// Seconds of a core for each weight of a layer in a microbatch, besides its products.
    #[serde(default)]
    pub weight_s: f64,
    /// Seconds of a core for each choice of an expert: rows to experts and back.
    #[serde(default)]
    pub choice_s: f64,
    /// Seconds of a core for each score of an expert for a token.
    #[serde(default)]
    pub score_s: f64,
    /// Seconds of a step on several ranks.
    #[serde(default)]
    pub ranks_s: f64,
    /// Seconds for which a rank waits in a communication that layers wait for, besides the time of the link.
    #[serde(default)]
    pub wait_s: f64,
    /// The time of the bytes of communications over that on the measured link.
    #[serde(default = "one")]
    pub link_share: f64,
}

fn one() -> f64 {
    1.0
}

impl Default for Overhead {
    /// Returns constants that cost nothing, with bytes at the rate of the measured link.
    fn default() -> Self {
        Self {
            layer_s: 0.0,
            passes: 0.0,
            step_s: 0.0,
            weight_s: 0.0,
            choice_s: 0.0,
            score_s: 0.0,
            ranks_s: 0.0,
            wait_s: 0.0,
            link_share: one(),
        }
    }
}

/// A measured machine.
///
/// ```
/// use moeworks_plan::machine::Machine;
///
/// let text = "name = \"a machine\"\ncores = 2\nmemory_bytes = 8e9\nmemory_bytes_per_s = 1e10\n\
///     [link]\nlatency_s = 1e-6\nbytes_per_s = 4e9\n\
///     [overhead]\nlayer_s = 1e-4\npasses = 3.0\n\
///     [[products]]\nprecision = \"f32\"\nthreads = 1\nrows = 64\nwidth = 64\nflops = 1e10\n";
/// let machine = Machine::parse(text)?;
/// assert_eq!(Machine::parse(&machine.to_toml())?, machine);
/// # Ok::<(), moeworks_plan::machine::MachineError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The name of the processor.
    pub name: String,
    /// The number of cores.
    pub cores: usize,
    /// Bytes of memory.
    pub memory_bytes: f64,
    /// Bytes a second that all cores together read.
    pub memory_bytes_per_s: f64,
    /// Seconds of a fixed piece of work on all cores while the rest was measured. Its time at another moment tells
    /// how fast the machine is then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe_s: Option<f64>,
    /// The link between two ranks that are threads.
    pub link: Link,
    /// The costs of the rest.
    pub overhead: Overhead,
    /// The rates of products.
    pub products: Vec<ProductRate>,
    /// The rates of experts; those of products if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<ExpertRate>,
    /// The rates of attention; those of products if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attention: Vec<AttentionRate>,
    /// The rates of output layers; those of products if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub output_layers: Vec<OutputLayerRate>,
    /// The rates of updates; that of memory if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub updates: Vec<UpdateRate>,
}

/// The error of a file that describes no machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MachineError {
    /// The text is not TOML, or a field is missing or unknown.
    #[error("{0}")]
    Form(String),
    /// A value out of range.
    #[error("{field} = {value}: {expected}")]
    Value {
        /// The field.
        field: &'static str,
        /// The value.
        value: String,
        /// The values that would be right.
        expected: &'static str,
    },
}

impl Machine {
    /// Reads the TOML form. The error is one line.
    ///
    /// # Errors
    /// If the text is not TOML, a field is missing or unknown, or a value is out of range.
    pub fn parse(text: &str) -> Result<Self, MachineError> {
        let machine: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            let place = line.map_or_else(String::new, |line| format!("line {line}: "));
            MachineError::Form(format!("{place}{}", error.message().trim().replace('\n', ", ")))
        })?;
        machine.check()?;
        Ok(machine)
    }

    /// Returns the TOML form, which [`Machine::parse`] reads back.
    #[must_use]
    pub fn to_toml(&self) -> String {
        // Numbers and tables of numbers always have a TOML form.
        toml::to_string(self).unwrap_or_default()
    }

    fn check(&self) -> Result<(), MachineError> {
        let wrong = |field, value: String, expected| Err(MachineError::Value { field, value, expected });
        for (field, value) in self.positive_values() {
            if !(value > 0.0 && value.is_finite()) {
                return wrong(field, value.to_string(), "must be a finite number above 0");
            }
        }
        let Overhead { layer_s, passes, step_s, weight_s, choice_s, score_s, ranks_s, wait_s, link_share } =
            self.overhead;
        let not_negative = [
            ("link.latency_s", self.link.latency_s),
            ("overhead.layer_s", layer_s),
            ("overhead.passes", passes),
            ("overhead.step_s", step_s),
            ("overhead.weight_s", weight_s),
            ("overhead.choice_s", choice_s),
            ("overhead.score_s", score_s),
            ("overhead.ranks_s", ranks_s),
            ("overhead.wait_s", wait_s),
            ("overhead.link_share", link_share),
        ];
        for (field, value) in not_negative {
            if !(value >= 0.0 && value.is_finite()) {
                return wrong(field, value.to_string(), "must be a finite number of at least 0");
            }
        }
        if self.products.is_empty() {
            return wrong("products", "[]".to_owned(), "must have at least one [[products]]");
        }
        Ok(())
    }

    /// Returns the values that must be above zero, with the names of their fields.
    fn positive_values(&self) -> Vec<(&'static str, f64)> {
        let mut values = vec![
            ("cores", self.cores as f64),
            ("memory_bytes", self.memory_bytes),
            ("memory_bytes_per_s", self.memory_bytes_per_s),
            ("probe_s", self.probe_s.unwrap_or(1.0)),
            ("link.bytes_per_s", self.link.bytes_per_s),
        ];
        for rate in &self.products {
            values.extend([("products.flops", rate.flops), ("products.rows", rate.rows as f64)]);
            values.extend([("products.width", rate.width as f64), ("products.threads", rate.threads as f64)]);
            values.push(("products.training_flops", rate.training_flops.unwrap_or(1.0)));
        }
        for rate in &self.experts {
            values.extend([("experts.flops", rate.flops), ("experts.training_flops", rate.training_flops)]);
            values.extend([("experts.rows", rate.rows as f64), ("experts.width", rate.width as f64)]);
            values
                .extend([("experts.expert_width", rate.expert_width as f64), ("experts.threads", rate.threads as f64)]);
        }
        for rate in &self.attention {
            values.extend([("attention.flops", rate.flops), ("attention.training_flops", rate.training_flops)]);
            values.extend([("attention.seq_len", rate.seq_len as f64), ("attention.head_dim", rate.head_dim as f64)]);
            values.push(("attention.threads", rate.threads as f64));
        }
        for rate in &self.output_layers {
            values.extend([("output_layers.width", rate.width as f64), ("output_layers.threads", rate.threads as f64)]);
            values.push(("output_layers.vocabulary", rate.vocabulary as f64));
            values.push(("output_layers.training_flops", rate.training_flops));
        }
        for rate in &self.updates {
            values.extend([("updates.params_per_s", rate.params_per_s), ("updates.threads", rate.threads as f64)]);
        }
        values
    }

    /// Returns the machine as a topology of `num_ranks` ranks that share its cores, with products of the given size.
    #[must_use]
    pub fn topology(&self, num_ranks: usize, precision: Precision, size: [f64; 2]) -> Topology {
        let num_ranks = num_ranks.max(1);
        let share = 1.0 / num_ranks as f64;
        let threads = (self.cores / num_ranks).max(1);
        let per_core = self.product_rate(precision, threads, size) / threads as f64;
        let rank = RankSpec {
            flops: per_core * self.cores as f64 * share,
            memory_bytes: self.memory_bytes * share,
            memory_bytes_per_s: self.memory_bytes_per_s * share,
        };
        Topology {
            node_sizes: vec![num_ranks],
            rank,
            node_link: self.link,
            cluster_link: self.link,
            numa_cores: Vec::new(),
        }
    }
}
