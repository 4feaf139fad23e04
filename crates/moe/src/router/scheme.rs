//! Routing schemes: the trait that a file in `schemes/` implements, and its documentation as a value.
//!
//! A router goes from logits to scores, from scores to a ranking, from the ranking to a choice and from the choice to
//! weights. Each step has a default, which is plain top-k routing; a scheme overrides the steps that differ. Methods
//! are called once per pass and work on whole tensors, so that there is no dynamic dispatch per token.

use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use super::config::{RouterConfig, ScoreFunction};
use super::input::RouterInput;
use super::logits::{NoisyInput, SchemeLogits};
use super::replay::Replay;
use super::score_router::ScoreRouter;
use super::scores::{Gate, Scores};
use super::state::{StepStats, WeightShape};
use crate::ConfigError;
use crate::weights::NamedTensor;
use crate::{MoeConfig, MoeWeights, Range, Ranged};

/// The result of a check of settings.
pub(crate) type Check = Result<(), ConfigError>;

/// Returns an error about `setting` with its value and the valid values.
pub(crate) fn wrong(setting: &'static str, value: &dyn ToString, expected: impl Into<String>) -> Check {
    Err(ConfigError::new(setting, value.to_string(), expected))
}

/// Checks that a setting is at most `limit`.
pub(crate) fn at_most(setting: &'static str, value: usize, limit: usize) -> Check {
    if value <= limit { Ok(()) } else { wrong(setting, &value, format!("must be at most {limit}")) }
}

/// The sizes of a layer, against which settings are checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// E: the number of experts that compute.
    pub(crate) num_experts: usize,
    /// K.
    pub(crate) top_k: usize,
}

/// An option of the router that not every scheme supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouterOption {
    ExpertBias,
    Groups,
    RandomChoices,
    Reroute,
    GateResidual,
    ZeroComputation,
    ModalityExperts,
    Sparsemixer,
}

/// The fused operations of `ops` that can compute a scheme when tokens choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FusedOps {
    /// No fused operation: the steps run one by one.
    None,
    /// Top-k of softmax or sigmoid scores, which are also the weights; on a GPU.
    Scores,
    /// The operation of `Scores`, and with plain options softmax top-k.
    Softmax,
}

/// The source of the weights of a token's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weighing {
    /// The gates of its experts, normalised if the configuration says so.
    Gates,
    /// The gates of its experts, never normalised.
    GatesAsTheyAre,
    /// One over the number of its experts in forward; backward as for the gates.
    Equal,
}

/// The data from which a run builds a table before its first step, for schemes that map token ids to experts by a
/// table: [`MoeWeights::set_hash_table`](crate::MoeWeights::set_hash_table).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableSource {
    /// The frequencies of the training tokens: [`balanced_hash`](crate::balanced_hash).
    TokenCounts,
    /// The embeddings of a trained model: [`clustered_hash`](crate::clustered_hash).
    Embeddings,
}

/// The documentation of a scheme's setting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SettingDoc {
    /// The name below `model.router`.
    pub name: &'static str,
    /// The default, as in TOML. A test compares it with the configuration's.
    pub default: &'static str,
    /// The valid values, independent of other settings.
    pub range: Range,
    /// The valid values in words, if the range does not describe them fully; otherwise empty.
    pub values: &'static str,
    /// The comment in a configuration file.
    pub comment: &'static str,
}

impl SettingDoc {
    /// Returns the valid values in words.
    #[must_use]
    pub fn values(&self) -> String {
        if self.values.is_empty() { self.range.to_string() } else { self.values.into() }
    }
}

/// A variant of a scheme, for the routing study.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StudyVariant {
    /// The variant's name in the study.
    pub name: &'static str,
    /// The settings besides the kind, each in the syntax of `--set`.
    pub settings: &'static [&'static str],
}

/// A change to the layer with which a scheme is benchmarked.
#[derive(Clone, Copy, Debug)]
pub struct BenchChange {
    /// A label appended to the scheme's name.
    pub label: &'static str,
    /// Applies the change.
    pub apply: fn(&mut MoeConfig),
}

/// The documentation of a scheme: a plain value from which the commented configuration, the study, the benchmark and
/// `docs/routing-schemes.md` are made.
#[derive(Clone, Copy, Debug)]
pub struct SchemeDoc {
    /// A description of one paragraph.
    pub text: &'static str,
    /// The paper, its number and section; empty for none.
    pub source: &'static str,
    /// The scheme's own settings.
    pub settings: &'static [SettingDoc],
    /// Settings that come with the scheme unless they are given, with their values as in TOML.
    pub companions: &'static [(&'static str, &'static str)],
    /// Variants for the study besides the scheme with its defaults.
    pub variants: &'static [StudyVariant],
    /// A change to the benchmark's layer, if the scheme needs one.
    pub bench: Option<BenchChange>,
    /// True for a scheme made for benchmarks, which a study leaves out.
    pub is_synthetic: bool,
}

impl SchemeDoc {
    /// Creates the documentation of a scheme without settings of its own.
    pub(crate) const fn new(text: &'static str, source: &'static str) -> Self {
        Self { text, source, settings: &[], companions: &[], variants: &[], bench: None, is_synthetic: false }
    }

    /// Checks the value of one of the scheme's own settings against its range.
    ///
    /// # Panics
    /// If the scheme has no setting `name` (its name below `model`).
    pub(crate) fn check(&self, name: &'static str, value: &impl Ranged) -> Check {
        let is_it = |setting: &&SettingDoc| name.strip_prefix("router.") == Some(setting.name);
        let setting = self.settings.iter().find(is_it).expect("a setting of the scheme");
        value.check(name, &setting.range)
    }
}

/// A routing scheme. The implementing value holds the scheme's own settings.
pub(crate) trait RoutingScheme: Send + Sync {
    /// Returns the documentation.
    fn doc(&self) -> &'static SchemeDoc;

    // Settings.

    /// Checks the scheme's own settings against their ranges.
    fn check_ranges(&self) -> Check {
        Ok(())
    }

    /// Checks the scheme's own settings against the layer's sizes, even if another scheme is chosen.
    fn check_settings(&self, _sizes: Sizes) -> Check {
        Ok(())
    }

    /// Checks the router's settings if this scheme is chosen.
    fn check(&self, _router: &RouterConfig, _sizes: Sizes) -> Check {
        Ok(())
    }

    /// Returns the K that the scheme requires; none if any works.
    fn fixed_top_k(&self) -> Option<usize> {
        None
    }

    /// Returns whether the scheme supports an option of the router.
    fn allows(&self, option: RouterOption) -> bool {
        option != RouterOption::Sparsemixer
    }

    // Weights and state.

    /// Returns the shape of the router's matrix.
    fn matrix_shape(&self, config: &MoeConfig) -> [usize; 2] {
        [config.num_choosable(), config.width]
    }

    /// Returns the shapes of weights besides the matrix.
    fn weights(&self, _config: &MoeConfig) -> Vec<WeightShape> {
        Vec::new()
    }

    /// Returns the shapes of state that lasts from step to step and has no gradient.
    fn state(&self, _config: &MoeConfig) -> Vec<WeightShape> {
        Vec::new()
    }

    /// Updates a state of [`state`](Self::state) from the statistics of one whole step.
    fn next_state(&self, _state: &mut NamedTensor, _step: &StepStats<'_>) {}

    /// Returns the data from which a run builds a table before its first step.
    fn table_source(&self) -> Option<TableSource> {
        None
    }

    /// Returns the number of products of length D that routing a token takes.
    fn num_products(&self, config: &MoeConfig) -> usize {
        config.num_choosable()
    }

    /// Returns whether every token uses all of the router's weights.
    fn passes_all_weights(&self) -> bool {
        true
    }

    /// Returns whether the scheme needs the ids of tokens.
    fn looks_at_ids(&self) -> bool {
        false
    }

    // Forward.

    /// Returns the number of experts per token in this pass.
    fn top_k(&self, config: &MoeConfig, _input: &RouterInput<'_>) -> usize {
        config.top_k
    }

    /// Returns the largest number of experts per token at any time of a run, for planning memory.
    fn largest_top_k(&self, config: &MoeConfig) -> usize {
        config.top_k
    }

    /// Returns whether a token's choice in training depends on other tokens.
    fn is_global(&self) -> bool {
        false
    }

    /// Returns whether the choice respects the experts' capacity already, so that no choice is dropped later.
    fn keeps_to_capacity(&self) -> bool {
        false
    }

    /// Returns whether a trained model routes by plain top-k.
    fn is_plain_when_trained(&self) -> bool {
        false
    }

    /// Returns the fused operations that can compute the scheme.
    fn fused_ops(&self) -> FusedOps {
        FusedOps::None
    }

    /// Returns whether the scheme adds learned noise to the logits, for which a smooth load exists.
    fn has_learned_noise(&self) -> bool {
        false
    }

    /// Returns the function from logits to gates.
    fn gate(&self, router: &RouterConfig, _top_k: usize) -> Gate {
        match router.scores {
            ScoreFunction::Softmax => Gate::Softmax,
            ScoreFunction::Sigmoid => Gate::Sigmoid,
        }
    }

    /// Returns the source of the experts' weights.
    fn weighing(&self) -> Weighing {
        Weighing::Gates
    }

    /// Computes the logits of a pass and the state that their backward needs.
    fn logits(&self, router: &ScoreRouter<'_>, ctx: &Context, x: NoisyInput<'_>) -> SchemeLogits {
        SchemeLogits::linear(ctx, router.weights, x)
    }

    /// Chooses `[T, K]`, the experts of each token. `ranking [T, E]` is negative infinity for experts that a token
    /// cannot use.
    fn choose(&self, router: &ScoreRouter<'_>, ctx: &Context, _scores: &Scores, ranking: &Tensor) -> Tensor {
        router.highest(ctx, ranking)
    }

    /// Returns the lists of expert ids that can replace [`choose`](Self::choose).
    fn replay(&self) -> Replay {
        Replay::TopK
    }

    /// Returns whether some choices may go unused; see [`used`](Self::used).
    fn may_leave_out(&self) -> bool {
        false
    }

    /// Returns whether unused choices count towards the experts' capacity.
    fn counts_left_out(&self) -> bool {
        false
    }

    /// Returns the choices `ids [T, K]` that are used in this pass.
    fn used(&self, _router: &ScoreRouter<'_>, _ctx: &Context, ids: &Tensor, _weights: &Tensor) -> Tensor {
        ids.clone()
    }

    // Losses.

    /// Returns whether the L1 loss on the gates balances loads; `None` without an L1 loss.
    fn l1_is_balanced(&self) -> Option<bool> {
        None
    }

    /// Returns the coefficient of the L1 loss.
    fn l1_weight(&self, _weights: &MoeWeights) -> f32 {
        0.0
    }
}
