//! A routing scheme: what one file in `schemes/` says, and what the steps that all routers share ask of it.
//!
//! A router goes from logits to scores, from scores to a ranking, from the ranking to a choice and from the choice to weights.
//! Each step has a default, which is plain top-k routing; a scheme replaces those that it does otherwise. It is asked once a
//! pass and works on whole tensors, so that nothing is looked up for a token.

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

/// An error about `setting`: its value, and what would be right.
pub(crate) fn wrong(setting: &'static str, value: &dyn ToString, expected: impl Into<String>) -> Check {
    Err(ConfigError::new(setting, value.to_string(), expected))
}

/// Checks that a setting is at most `limit`.
pub(crate) fn at_most(setting: &'static str, value: usize, limit: usize) -> Check {
    if value <= limit { Ok(()) } else { wrong(setting, &value, format!("must be at most {limit}")) }
}

/// The sizes that settings are checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// E: experts that compute.
    pub(crate) num_experts: usize,
    /// K.
    pub(crate) top_k: usize,
}

/// An option of all routers that not every scheme can be combined with.
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

/// The fused operations of `ops` that compute a scheme where tokens choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FusedOps {
    /// None: the choice is taken step by step.
    None,
    /// The highest K of scores by softmax or sigmoid, weighed by them; on a GPU.
    Scores,
    /// That one, and with plain options the highest K of a softmax.
    Softmax,
}

/// The source of a token's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weighing {
    /// The gates of its experts, normalised if the configuration says so.
    Gates,
    /// The gates as they are.
    GatesAsTheyAre,
    /// One over the number of its experts; backward as if they were the gates.
    Equal,
}

/// The data of which a run makes a table before its first step, for schemes that send ids of tokens to experts by one:
/// [`MoeWeights::set_hash_table`](crate::MoeWeights::set_hash_table).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableSource {
    /// The frequencies of the training tokens: [`balanced_hash`](crate::balanced_hash).
    TokenCounts,
    /// The embeddings of a trained model: [`clustered_hash`](crate::clustered_hash).
    Embeddings,
}

/// A setting of a scheme, as documentation says it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SettingDoc {
    /// Its name below `model.router`.
    pub name: &'static str,
    /// Its default, as in TOML. A test compares it with the value that a configuration has.
    pub default: &'static str,
    /// The values that it may have, whatever other settings are.
    pub range: Range,
    /// Its values in words, where the range does not say them all; empty where it does.
    pub values: &'static str,
    /// Its comment in a configuration file.
    pub comment: &'static str,
}

impl SettingDoc {
    /// Its values in words.
    #[must_use]
    pub fn values(&self) -> String {
        if self.values.is_empty() { self.range.to_string() } else { self.values.into() }
    }
}

/// A variant of a scheme with settings of its own, for the routing study.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StudyVariant {
    /// Its name in the study.
    pub name: &'static str,
    /// Its settings besides the kind, each as after `--set`.
    pub settings: &'static [&'static str],
}

/// A change to the layer that a scheme is timed with.
#[derive(Clone, Copy, Debug)]
pub struct BenchChange {
    /// A label behind the scheme's name.
    pub label: &'static str,
    /// The change.
    pub apply: fn(&mut MoeConfig),
}

/// The documentation of a scheme: a plain value, which the commented configuration, the study, the benchmark and
/// `docs/routing-schemes.md` are made from.
#[derive(Clone, Copy, Debug)]
pub struct SchemeDoc {
    /// One paragraph.
    pub text: &'static str,
    /// The paper, its number and the section; empty for none.
    pub source: &'static str,
    /// The scheme's own settings.
    pub settings: &'static [SettingDoc],
    /// Settings that come with the scheme unless they are given, with their values as in TOML.
    pub companions: &'static [(&'static str, &'static str)],
    /// Variants that a study looks at besides the scheme with its defaults.
    pub variants: &'static [StudyVariant],
    /// A change for the benchmark, if it needs one.
    pub bench: Option<BenchChange>,
    /// Whether it is made for benchmarks, and no part of a study.
    pub is_synthetic: bool,
}

impl SchemeDoc {
    /// A scheme without settings of its own.
    pub(crate) const fn new(text: &'static str, source: &'static str) -> Self {
        Self { text, source, settings: &[], companions: &[], variants: &[], bench: None, is_synthetic: false }
    }

    /// Checks the value of one of the scheme's own settings by its range.
    ///
    /// # Panics
    /// If the scheme has no setting `name`, its name below `model`.
    pub(crate) fn check(&self, name: &'static str, value: &impl Ranged) -> Check {
        let is_it = |setting: &&SettingDoc| name.strip_prefix("router.") == Some(setting.name);
        let setting = self.settings.iter().find(is_it).expect("a setting of the scheme");
        value.check(name, &setting.range)
    }
}

/// A routing scheme. Its value is its own settings.
pub(crate) trait RoutingScheme: Send + Sync {
    /// The documentation.
    fn doc(&self) -> &'static SchemeDoc;

    // Settings.

    /// Checks the scheme's own settings by their ranges.
    fn check_ranges(&self) -> Check {
        Ok(())
    }

    /// Checks the scheme's own settings against the layer's sizes, whichever scheme is chosen.
    fn check_settings(&self, _sizes: Sizes) -> Check {
        Ok(())
    }

    /// Checks the settings of all routers where the scheme is chosen.
    fn check(&self, _router: &RouterConfig, _sizes: Sizes) -> Check {
        Ok(())
    }

    /// The K that tokens must have; none for any.
    fn fixed_top_k(&self) -> Option<usize> {
        None
    }

    /// Whether it can be combined with an option of all routers.
    fn allows(&self, option: RouterOption) -> bool {
        option != RouterOption::Sparsemixer
    }

    // Weights and state.

    /// The shape of the router's matrix.
    fn matrix_shape(&self, config: &MoeConfig) -> [usize; 2] {
        [config.num_choosable(), config.width]
    }

    /// Weights besides the matrix.
    fn weights(&self, _config: &MoeConfig) -> Vec<WeightShape> {
        Vec::new()
    }

    /// State that is kept from step to step and has no gradient.
    fn state(&self, _config: &MoeConfig) -> Vec<WeightShape> {
        Vec::new()
    }

    /// Moves a state of [`state`](Self::state) by what one whole step's tokens did.
    fn next_state(&self, _state: &mut NamedTensor, _step: &StepStats<'_>) {}

    /// The data of which a run makes a table before its first step.
    fn table_source(&self) -> Option<TableSource> {
        None
    }

    /// Products of length D that a token takes to be routed.
    fn num_products(&self, config: &MoeConfig) -> usize {
        config.num_choosable()
    }

    /// Whether every token passes all of the router's weights.
    fn passes_all_weights(&self) -> bool {
        true
    }

    /// Whether the ids of tokens are looked at.
    fn looks_at_ids(&self) -> bool {
        false
    }

    // Forward.

    /// The experts of a token in this pass.
    fn top_k(&self, config: &MoeConfig, _input: &RouterInput<'_>) -> usize {
        config.top_k
    }

    /// The most experts that a token has at any time of a run, by which memory is planned.
    fn largest_top_k(&self, config: &MoeConfig) -> usize {
        config.top_k
    }

    /// Whether tokens are weighed against each other in training, so that no token chooses for itself.
    fn is_global(&self) -> bool {
        false
    }

    /// Whether the choice keeps to the experts' capacity, so that none is dropped behind it.
    fn keeps_to_capacity(&self) -> bool {
        false
    }

    /// Whether a trained model is one of plain top-k routing.
    fn is_plain_when_trained(&self) -> bool {
        false
    }

    /// The fused operations that compute it.
    fn fused_ops(&self) -> FusedOps {
        FusedOps::None
    }

    /// Whether it puts noise of its own on the logits, of which a smooth load is known.
    fn has_learned_noise(&self) -> bool {
        false
    }

    /// The function that makes gates of logits.
    fn gate(&self, router: &RouterConfig, _top_k: usize) -> Gate {
        match router.scores {
            ScoreFunction::Softmax => Gate::Softmax,
            ScoreFunction::Sigmoid => Gate::Sigmoid,
        }
    }

    /// The source of weights.
    fn weighing(&self) -> Weighing {
        Weighing::Gates
    }

    /// The logits of a pass, and what their backward needs.
    fn logits(&self, router: &ScoreRouter<'_>, ctx: &Context, x: NoisyInput<'_>) -> SchemeLogits {
        SchemeLogits::linear(ctx, router.weights, x)
    }

    /// `[T, K]`: the experts of each token; those out of reach are negative infinity in `ranking [T, E]`.
    fn choose(&self, router: &ScoreRouter<'_>, ctx: &Context, _scores: &Scores, ranking: &Tensor) -> Tensor {
        router.highest(ctx, ranking)
    }

    /// The lists of experts that can be handed in for tokens in place of [`choose`](Self::choose).
    fn replay(&self) -> Replay {
        Replay::TopK
    }

    /// Whether tokens may go without some of their choices, as [`used`](Self::used) says.
    fn may_leave_out(&self) -> bool {
        false
    }

    /// Whether counters of capacity move by choices that are left out, too.
    fn counts_left_out(&self) -> bool {
        false
    }

    /// The choices `ids [T, K]` of these weights that are used this time.
    fn used(&self, _router: &ScoreRouter<'_>, _ctx: &Context, ids: &Tensor, _weights: &Tensor) -> Tensor {
        ids.clone()
    }

    // Losses.

    /// Whether the gates have an L1 loss and, if so, whether it balances loads.
    fn l1_is_balanced(&self) -> Option<bool> {
        None
    }

    /// The weight of that loss.
    fn l1_weight(&self, _weights: &MoeWeights) -> f32 {
        0.0
    }
}
