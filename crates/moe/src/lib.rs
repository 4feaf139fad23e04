//! Mixture-of-Experts: which experts a token goes to, which row goes where, and the layer that carries it out.

mod config;
mod dispatch;
mod jitter;
mod layer;
mod losses;
mod routing;
mod shared;
mod stats;
mod weights;

pub use config::{ConfigError, MoeConfig, ScoreOrder};
pub use dispatch::{Dispatch, capacity};
pub use layer::{MoeGradTask, MoeLayer, MoeSaved};
pub use losses::{BalanceLoss, LossGrad, balance_loss_per_layer, balance_loss_pooled, z_loss};
pub use routing::{Routing, RoutingError};
pub use stats::{
    LayerStats, cv, dead_expert_frac, e_max_violation, expert_diversity, load_entropy, max_over_mean, num_dead_experts,
};
pub use weights::{MoeWeights, SharedWeights};
