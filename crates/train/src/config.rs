//! The settings of a training run: one resolved value, [`RunConfig`], and how it comes about.
//!
//! Settings are laid over each other as TOML tables, defaults, then a preset, then a file, then single settings from the
//! command line ([`ConfigLayers`]), and only the result becomes a `RunConfig`. So nothing after this module has to know
//! where a value came from, and no setting is optional: a run reads the value that [`print_config`] shows.

mod check;
mod data;
mod error;
mod layers;
mod presets;
mod print;
mod schemes;

use std::path::{Path, PathBuf};

use moeworks_gpu::DeviceChoice;
use moeworks_model::ModelConfig;
use moeworks_moe::Ramp;
use moeworks_ops::Context;
use moeworks_plan::{Layout, Order, Wire};
use moeworks_tensor::DType;
use serde::{Deserialize, Serialize};

pub use data::{DataConfig, TokenizerChoice};
pub use error::ConfigError;
pub use layers::{ConfigLayers, Override};
pub use presets::PRESETS;
pub use print::print_config;

/// Every setting of a training run.
///
/// ```
/// use moeworks_train::config::{ConfigLayers, Override, print_config};
///
/// let layers = ConfigLayers { overrides: vec![Override::parse("train.lr=3e-4").unwrap()], ..ConfigLayers::default() };
/// let config = layers.resolve().unwrap();
/// assert_eq!(config.train.lr, 3e-4);
/// assert!(print_config(&config).contains("lr = 0.0003"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// The model's shape and rules.
    pub model: ModelConfig,
    /// Where text comes from and how it becomes tokens.
    pub data: DataConfig,
    /// How the model is trained.
    pub train: TrainConfig,
    /// How it lies on ranks.
    pub parallel: ParallelConfig,
    /// Where the results go.
    pub run: OutputConfig,
}

/// How the learning rate goes after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Half a cosine down to `lr * min_lr_ratio` at the last step.
    Cosine,
    /// Warm-up, stable, decay: constant, then linear down to `lr * min_lr_ratio` over the last `decay_fraction` of the
    /// steps.
    Wsd,
    /// Constant.
    Constant,
}

/// Number format of the matrices that compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// f32 throughout.
    F32,
    /// Mixed: bf16 matrix products with f32 sums, f32 master weights, optimizer, norms, router and losses.
    Bf16,
    /// As `bf16`; the products of experts and dense feed-forwards, forward and back to their inputs, in eight-bit floats
    /// ([`moeworks_ops::e4m3`]).
    Fp8,
}

/// The type of gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientType {
    /// f32.
    F32,
    /// bf16: sums of f32, rounded once a microbatch.
    Bf16,
}

impl GradientType {
    /// The tensors' type.
    #[must_use]
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

impl Precision {
    /// Whether products are made of bf16 copies of the weights.
    #[must_use]
    pub fn has_bf16_copies(self) -> bool {
        self != Self::F32
    }

    /// What weights and what is kept of a pass are: bf16 in `fp8`, too.
    #[must_use]
    pub fn kept(self) -> moeworks_plan::Precision {
        if self.has_bf16_copies() { moeworks_plan::Precision::Bf16 } else { moeworks_plan::Precision::F32 }
    }
}

/// Which auxiliary loss balances the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BalanceChoice {
    /// None.
    None,
    /// Each layer by itself (Switch).
    Layer,
    /// Counts and probabilities pooled over all layers (transformers).
    Pooled,
    /// Each layer by itself, by the tokens' first choices (GShard).
    Gshard,
}

/// How the model is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Optimizer steps in total.
    pub steps: u64,
    /// S: tokens of a training sequence.
    pub seq_len: usize,
    /// Sequences of a microbatch: those that are in memory together.
    pub batch_size: usize,
    /// Microbatches of a step.
    pub grad_accumulation: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning rate at the end, as a share of `lr`.
    pub min_lr_ratio: f64,
    /// How the learning rate goes after the warm-up.
    pub schedule: ScheduleKind,
    /// Steps over which the learning rate rises from 0.
    pub warmup_steps: u64,
    /// Share of the steps that the `wsd` schedule decays over.
    pub decay_fraction: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// AdamW's decay of the mean of the gradient.
    pub beta1: f64,
    /// AdamW's decay of the mean of its square.
    pub beta2: f64,
    /// AdamW's epsilon.
    pub eps: f64,
    /// Largest global norm of the gradient; 0 for no clipping.
    pub clip_norm: f64,
    /// Number format of the matrices that compute.
    pub precision: Precision,
    /// Of the gradients of routed experts' matrices; all others are f32. In bf16 they take half the memory and half the time of writing
    /// them.
    pub expert_gradients: GradientType,
    /// Whether each layer keeps only its input for backward and computes the rest again.
    pub checkpoint_layers: bool,
    /// Which auxiliary loss balances the experts.
    pub balance: BalanceChoice,
    /// Weight of the balance loss.
    pub balance_coef: Ramp,
    /// Weight of the balance loss over the router's groups of experts (DeepSeek-V2's device-level loss).
    pub device_coef: Ramp,
    /// Weight of the balance loss over the tokens that each group gets (DeepSeek-V2's communication balance loss).
    pub communication_coef: Ramp,
    /// Weight of the sequence-wise balance loss of DeepSeek-V3.
    pub sequence_coef: Ramp,
    /// Weight of the squared coefficient of variation of the experts' importance (Shazeer).
    pub importance_coef: Ramp,
    /// Weight of the squared coefficient of variation of the experts' smooth load under noise (Shazeer).
    pub load_coef: Ramp,
    /// Weight of the mean entropy of the tokens' choice (LIMoE's local loss, the loss of top-p routing).
    pub local_entropy_coef: Ramp,
    /// Weight of what the entropy of the mean choice lacks to `min_entropy` (LIMoE's global loss).
    pub global_entropy_coef: Ramp,
    /// In nats; 0 for the logarithm of the number of experts.
    pub min_entropy: f64,
    /// Weight of the router's z-loss.
    pub z_coef: Ramp,
    /// Steps between evaluations; 0 for none but the last.
    pub eval_every: u64,
    /// Microbatches of an evaluation; 0 for all held-out data.
    pub eval_batches: usize,
    /// Steps between samples of generated text; 0 for none.
    pub sample_every: u64,
    /// Tokens of a sample.
    pub sample_tokens: usize,
    /// What a sample goes on from.
    pub sample_prompt: String,
    /// Steps between checkpoints; 0 for none but the last.
    pub checkpoint_every: u64,
    /// How many of the newest checkpoints are kept, besides the best.
    pub keep_last: usize,
    /// Steps with a non-finite loss or gradient, one after the other, that end the run.
    pub max_bad_steps: u64,
    /// Seed of the initial weights, the order of data, routing noise and samples.
    pub seed: u64,
    /// Threads that compute; 0 for one on each core.
    pub threads: usize,
    /// What computes.
    #[serde(with = "device_name")]
    pub device: DeviceChoice,
    /// Where a GPU computes: what the optimizer alone reads stays in the host's memory, and weights are updated there. In bf16 that
    /// leaves 6 of 18 bytes a weight on the GPU (ZeRO-Offload, 2101.06840).
    pub offload_optimizer: bool,
    /// Patterns of names of weights that training leaves as they are, such as `"*.mlp.experts.*"`; `*` stands for any run of characters.
    pub freeze: Vec<String>,
}

impl TrainConfig {
    /// Returns the context in which the optimizer updates weights: the host where `offload_optimizer` is set.
    #[must_use]
    pub fn optimizer_context(&self, ctx: &Context) -> Context {
        if self.offload_optimizer { ctx.on_host() } else { ctx.clone() }
    }
}

/// A device as its name.
mod device_name {
    use moeworks_gpu::DeviceChoice;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(choice: &DeviceChoice, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(choice)
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<DeviceChoice, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            steps: 400,
            seq_len: 256,
            batch_size: 8,
            grad_accumulation: 1,
            lr: 1.5e-3,
            min_lr_ratio: 0.1,
            schedule: ScheduleKind::Cosine,
            warmup_steps: 25,
            decay_fraction: 0.2,
            weight_decay: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            clip_norm: 1.0,
            precision: Precision::Bf16,
            expert_gradients: GradientType::F32,
            checkpoint_layers: false,
            balance: BalanceChoice::Layer,
            balance_coef: Ramp::constant(0.01),
            device_coef: Ramp::ZERO,
            communication_coef: Ramp::ZERO,
            sequence_coef: Ramp::ZERO,
            importance_coef: Ramp::ZERO,
            load_coef: Ramp::ZERO,
            local_entropy_coef: Ramp::ZERO,
            global_entropy_coef: Ramp::ZERO,
            min_entropy: 0.0,
            z_coef: Ramp::constant(0.001),
            eval_every: 50,
            eval_batches: 8,
            sample_every: 100,
            sample_tokens: 120,
            sample_prompt: "The ".into(),
            checkpoint_every: 100,
            keep_last: 2,
            max_bad_steps: 10,
            seed: 1,
            threads: 0,
            device: DeviceChoice::Cpu,
            offload_optimizer: false,
            freeze: Vec::new(),
        }
    }
}

/// How the model lies on ranks. Each rank trains on its share of the sequences of a microbatch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelConfig {
    /// Groups of ranks, each with all experts.
    pub dp: usize,
    /// Ranks of a group, which hold the experts between them; each of them is `tp` ranks.
    pub ep: usize,
    /// Ranks that hold what is no expert between them and pass the same sequences.
    pub tp: usize,
    /// Whether the ranks of a group are those at the same place of neighbouring ranks, not neighbours themselves.
    pub apart: bool,
    /// Which ranks of a group hold which experts.
    pub placement: PlacementChoice,
    /// By which hops tokens go to the ranks of their experts.
    pub all_to_all: PathChoice,
    /// In which form they go.
    pub wire: WireChoice,
    /// Whether tokens move to experts or experts to tokens.
    pub moving: MovingChoice,
    /// In how many chunks, so that one is computed while another is under way; 0 for the number that is measured to be best,
    /// with which two runs may differ by rounding.
    pub chunks: usize,
    /// What `moeworks bench comm` measured, for choices by cost; where the file is not there they go by a described cluster.
    #[serde(serialize_with = "as_text")]
    pub topology: PathBuf,
    /// Whether ranks and their threads keep to cores of their own, near their memory.
    pub pin: bool,
    /// What ranks that hold the same weights share out: 0 nothing, 1 their optimizer state, 2 gradients, too, 3 and the weights
    /// themselves (the stages of ZeRO).
    pub zero: u8,
    /// Whether sums over ranks are taken in the order of ranks also where an MPI library takes them sooner.
    pub ordered_sums: bool,
    /// Seconds after which a rank that the others wait for within a step is taken for hung.
    pub timeout_s: u64,
    /// The cuts of weights over the ranks of `tp` that differ from the usual ones: `"PATTERN=replicated"` or `"PATTERN=tensor"` (cut as
    /// usual), later rules win.
    pub sharding: Vec<String>,
}

/// By which hops tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathChoice {
    /// The path of the least cost for the nodes that the ranks stand on.
    Auto,
    /// From each rank to each other.
    Linear,
    /// Inside the node first, then between nodes.
    Hierarchical,
    /// Once to each node, and on from there.
    TwoHop,
}

/// Whether tokens move to experts or experts to tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MovingChoice {
    /// Tokens.
    Tokens,
    /// Experts: their weights come to all ranks of a group for a pass, and their gradients go home.
    Weights,
    /// For each layer and step those experts whose weights cost less to move than their tokens.
    Auto,
}

/// In which form tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireChoice {
    /// As they are.
    F32,
    /// bf16; sums are f32.
    Bf16,
    /// IEEE half precision; sums are f32.
    F16,
    /// A byte a number and a scale for each 128 when dispatched; back, and in backward, bf16.
    Int8,
}

impl WireChoice {
    /// The form as a value.
    #[must_use]
    pub fn wire(self) -> Wire {
        match self {
            Self::F32 => Wire::F32,
            Self::Bf16 => Wire::Bf16,
            Self::F16 => Wire::F16,
            Self::Int8 => Wire::Byte { block: 128 },
        }
    }
}

/// Which ranks of a group hold which experts; written as `"sharded"`, `"everywhere"` or a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum PlacementChoice {
    /// Each expert on one rank, neighbouring experts together.
    Sharded,
    /// Every expert on every rank.
    Everywhere,
    /// As a file with a placement's text says.
    File(String),
}

impl From<String> for PlacementChoice {
    fn from(text: String) -> Self {
        match text.as_str() {
            "sharded" => Self::Sharded,
            "everywhere" => Self::Everywhere,
            _ => Self::File(text),
        }
    }
}

impl From<PlacementChoice> for String {
    fn from(choice: PlacementChoice) -> Self {
        match choice {
            PlacementChoice::Sharded => "sharded".into(),
            PlacementChoice::Everywhere => "everywhere".into(),
            PlacementChoice::File(path) => path,
        }
    }
}

impl Default for ParallelConfig {
    fn default() -> Self {
        Self {
            dp: 1,
            ep: 1,
            tp: 1,
            apart: false,
            placement: PlacementChoice::Sharded,
            all_to_all: PathChoice::Auto,
            wire: WireChoice::F32,
            moving: MovingChoice::Tokens,
            chunks: 1,
            topology: "topology.toml".into(),
            pin: true,
            zero: 0,
            ordered_sums: false,
            timeout_s: 25,
            sharding: Vec::new(),
        }
    }
}

impl ParallelConfig {
    /// Ranks in all.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.dp.saturating_mul(self.ep).saturating_mul(self.tp)
    }

    /// The groups as a value.
    #[must_use]
    pub fn layout(&self) -> Layout {
        let order = if self.apart { Order::Apart } else { Order::Together };
        Layout { order, ..Layout::new(self.dp, self.ep, self.tp) }
    }
}

/// Where the results go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OutputConfig {
    /// Folder of all runs.
    #[serde(serialize_with = "as_text")]
    pub out: PathBuf,
    /// Folder of this run within it; empty for one made from the date and the time.
    pub name: String,
}

impl Default for OutputConfig {
    fn default() -> Self {
        Self { out: "runs".into(), name: String::new() }
    }
}

/// A path as text. Paths come from TOML, which is UTF-8, so nothing is lost.
fn as_text<S: serde::Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

#[cfg(test)]
#[path = "config/tests.rs"]
mod tests;
