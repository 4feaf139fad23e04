//! Routers: from a layer's input to a [`Routing`], and back from the gradient of its weights.
//!
//! Every scheme ends in the same value, so that dispatch, experts and statistics do not know which one was used.

mod assign;
mod blocks;
mod check;
mod choice;
mod clusters;
mod config;
mod flat;
mod grads;
mod hash;
mod input;
mod joint;
mod load;
mod noise;
mod parts;
mod residual;
mod rows;
mod scorer;
mod scores;
mod sparsemixer;
mod state;
mod tree;
mod weigh;

pub use clusters::clustered_hash;
pub use config::{GroupScore, HashTable, RouterConfig, RouterKind, ScoreFunction, SecondExpert};
pub(crate) use flat::{Decision, FlatRouter, FlatSaved};
pub(crate) use grads::RouterGradTask;
pub use hash::balanced_hash;
pub use input::{FixedCapacity, RouterInput};
pub(crate) use scorer::put;
pub use state::{Init, WeightShape, next_state};
