//! Routers: from a layer's input to a [`Routing`](crate::Routing), and back from the gradient of its weights.
//!
//! Every scheme ends in a [`Routing`](crate::Routing), so that dispatch, experts and statistics do not depend on the
//! scheme. A scheme is a file in `schemes/` behind the trait of `scheme.rs`, and a line in the table of
//! `schemes/mod.rs`. The steps that all schemes share are `logits`, `scores` and `ranking`; `score_router` composes
//! them.

mod assign;
mod blocks;
mod check;
mod choice;
mod clusters;
mod config;
mod global_assign;
mod grads;
mod input;
mod load;
mod logits;
mod noise;
mod page;
mod ranking;
mod replay;
mod residual;
mod rows;
mod scheme;
mod schemes;
mod score_router;
mod scores;
mod sparsemixer;
mod state;
mod token_groups;
mod weigh;

pub use clusters::clustered_hash;
pub use config::{GroupScore, RouterConfig, ScoreFunction};
pub(crate) use grads::{RouterGradTask, RouterGrads};
pub use input::{FixedCapacity, RouterInput};
pub(crate) use logits::store;
pub use page::schemes_page;
pub use replay::ExpertIds;
pub use scheme::{BenchChange, SchemeDoc, SettingDoc, StudyVariant, TableSource};
pub use schemes::{HashTable, RouterKind, Schemes, SecondExpert, balanced_hash};
pub(crate) use score_router::{Decision, RouterSaved, ScoreRouter};
pub use state::{Init, WeightShape, next_state};
