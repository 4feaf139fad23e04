//! The settings of experts that move between ranks while a run goes on.

use moeworks_moe::{Range, settings};
use moeworks_plan::RebalancePolicy;
use serde::{Deserialize, Serialize};

use super::check::wrong;
use super::{ConfigError, RunConfig};

settings! {
    /// Movement of experts between ranks while training goes on, so that the load of ranks is even. The losses are
    /// those without it.
    #[serde(deny_unknown_fields, default)]
    pub struct RebalanceConfig in "rebalance." {
        /// off, online (by the load of the last steps), or the path of a placement, in the form of
        /// parallel.placement, to which the experts move.
        mode: RebalanceMode = RebalanceMode::Off;
        /// Step after which the experts begin to move to the placement of a file.
        at_step: u64 = 1, in Range::AT_LEAST_ONE;
        /// Steps between the decisions of online, whose load is summed.
        every: u64 = 50, in Range::AT_LEAST_ONE;
        /// Slots for experts on each rank beyond an even share, for copies of hot experts.
        spare: usize = 0, in Range::whole(0..=1 << 20);
        /// Policy of online: moves (few moves and swaps), anew (a new placement, with copies in spare slots), or
        /// auto: the one, moves, anew or none, after whose decisions steps were fastest.
        policy: PolicyChoice = PolicyChoice::Auto;
        /// The most moves and swaps of a decision by moves in a layer.
        max_moves: usize = 8, in Range::whole(1..=1 << 20);
        /// Seconds that a change must promise to save until the next decision for each second of moving; 0: any
        /// change that lowers the load of the fullest rank.
        min_gain: f64 = 2.0, in Range::NOT_NEGATIVE;
        /// The most bytes of experts that a rank sends or receives in a step, though at least one expert; 0: by
        /// max_pause.
        bytes_per_step: u64 = 0, in Range::COUNT;
        /// The share of a step's time for which moving may pause training, by the pauses of earlier moves, though at
        /// least one expert moves.
        max_pause: f64 = 0.02, in Range::POSITIVE_SHARE;
    }
}

/// The choice of when experts move; written as `"off"`, `"online"` or a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum RebalanceMode {
    /// Experts stay where they are.
    Off,
    /// Experts move by the load of the last steps.
    Online,
    /// Experts move to the placement in the file at this path.
    File(String),
}

impl From<String> for RebalanceMode {
    fn from(text: String) -> Self {
        match text.as_str() {
            "off" => Self::Off,
            "online" => Self::Online,
            _ => Self::File(text),
        }
    }
}

impl From<RebalanceMode> for String {
    fn from(mode: RebalanceMode) -> Self {
        match mode {
            RebalanceMode::Off => "off".into(),
            RebalanceMode::Online => "online".into(),
            RebalanceMode::File(path) => path,
        }
    }
}

/// The choice of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyChoice {
    /// Chooses by measured step times.
    Auto,
    /// Takes few moves and swaps.
    Moves,
    /// Makes a new placement.
    Anew,
}

impl PolicyChoice {
    /// Returns the policies to choose among.
    #[must_use]
    pub fn policies(self) -> Vec<RebalancePolicy> {
        match self {
            Self::Auto => RebalancePolicy::ALL.to_vec(),
            Self::Moves => vec![RebalancePolicy::Moves],
            Self::Anew => vec![RebalancePolicy::Anew],
        }
    }
}

impl RunConfig {
    /// Refuses models whose experts do not move.
    pub(super) fn check_rebalance(&self) -> Result<(), ConfigError> {
        let mode = &self.rebalance.mode;
        let what = match mode {
            RebalanceMode::Off => return Ok(()),
            RebalanceMode::File(path) if path.is_empty() => "must be off, online or the path of a placement",
            _ if self.model.num_experts == 0 => "must be off: the model has no experts",
            _ if self.model.variant.encoder.is_some() => "must be off in a model with an encoder",
            _ => return Ok(()),
        };
        Err(wrong("rebalance.mode", format!("{:?}", String::from(mode.clone())), what))
    }
}
