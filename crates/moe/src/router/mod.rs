//! Routers: from a layer's input to a [`Routing`], and back from the gradient of its weights.
//!
//! Every scheme ends in the same value, so that dispatch, experts and statistics do not know which one was used.

mod blocks;
mod choice;
mod config;
mod flat;
mod input;
mod noise;
mod rows;
mod sparsemixer;
mod state;

pub use config::{GroupScore, RouterConfig, RouterKind, ScoreFunction};
pub(crate) use flat::{Decision, FlatRouter, FlatSaved, RouterGradTask};
pub use input::RouterInput;
pub use state::next_state;
