//! Mixture-of-Experts layers: routers, dispatch of tokens to experts, the layer itself and its auxiliary losses.
//!
//! A [`MoeLayer`] takes tokens `x [T, D]`. Its router scores the E experts for each token and chooses K of them; the
//! result is a [`Routing`]. A [`Dispatch`] sorts these choices by expert and applies each expert's capacity. Both are
//! plain values that can be printed, compared and built by hand; no tensor of T x E x C exists anywhere. The experts
//! then run as one grouped GEMM per projection.
//!
//! A layer has three phases. [`MoeLayer::forward`] returns the output and the state that backward needs.
//! [`MoeLayer::backward`] returns the gradient of the input and a [`MoeGradTask`]. Running that task, at once or
//! later, computes the gradients of the weights. There is no automatic differentiation and no hidden state.
//!
//! ```
//! use moeworks_moe::{
//!     LossGrad, MoeConfig, MoeLayer, MoeWeights, Ramp, RouterConfig, RouterInput, ScoreOrder, WgradTarget,
//!     balance_loss_per_layer, z_loss,
//! };
//! use moeworks_ops::linear::Write;
//! use moeworks_ops::{Activation, Context};
//! use moeworks_tensor::{DType, Tensor};
//!
//! // Eight experts, two for each token, and a shared expert that sees them all.
//! let layer = MoeLayer::new(MoeConfig {
//!     width: 16,
//!     num_experts: 8,
//!     top_k: 2,
//!     expert_width: 32,
//!     activation: Activation::SwiGlu,
//!     score_order: ScoreOrder::SoftmaxThenTopK,
//!     normalize_weights: true,
//!     capacity_factor: 1.25, // an expert takes ceil(1.25 * 2 * T / 8) rows; 0 never drops a token
//!     jitter: Ramp::ZERO,
//!     shared_width: 24,
//!     router: RouterConfig::default(), // each token takes its best experts by softmax
//! })?;
//! let ctx = Context::cpu_all_cores();
//! let weights = MoeWeights::random(&ctx, layer.config(), /* seed */ 1, /* standard deviation */ 0.1);
//!
//! // Forward: ten tokens.
//! let values: Vec<f32> = (0..10 * 16).map(|i| (i as f32 * 0.37).sin()).collect();
//! let x = Tensor::from_slice(ctx.pool(), &[10, 16], &values);
//! let (y, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
//! assert_eq!(y.shape(), [10, 16]);
//!
//! // The decisions, as values.
//! print!("{}", saved.routing()); // a line for each token: its experts and (their weights)
//! print!("{}", saved.dispatch()); // a line for each expert: its tokens and (their weights), how many were dropped
//! let stats = saved.stats();
//! println!("{} of {} choices dropped, cv {:.2}", stats.num_dropped, stats.num_choices, stats.cv());
//!
//! // Losses on the router: values to report, and their gradients times their coefficients.
//! let balance = balance_loss_per_layer(&[&stats], 1e-2);
//! println!("balance loss {:.3}, z-loss {:.3}", balance.value, z_loss(&[&stats]));
//! let losses = LossGrad { balance: balance.gradients[0].clone(), z: 1e-3, ..LossGrad::default() };
//!
//! // Backward: the gradient of the input at once, those of the weights when it suits.
//! let dy = Tensor::from_slice(ctx.pool(), &[10, 16], &[0.1_f32; 160]);
//! let (dx, task) = layer.backward(&ctx, &weights, &saved, &dy, &losses);
//! assert_eq!(dx.shape(), x.shape());
//! let mut grads = MoeWeights::zeros(&ctx, layer.config(), DType::F32);
//! task.run(&ctx, WgradTarget::new(Write::Add, &mut grads));
//! assert!(grads.router.f32s().iter().any(|&g| g != 0.0));
//! # Ok::<(), moeworks_moe::ConfigError>(())
//! ```
//!
//! # Precision
//!
//! If the experts' weights are bf16, their GEMMs run in bf16 with f32 accumulation. The router's weight is always
//! f32, and so are its logits, the softmax, all statistics and every gradient of a weight.
//!
//! # Non-finite numbers
//!
//! A NaN logit ranks below all others when experts are chosen; if all are NaN the first K experts are chosen. The
//! output of that token is then NaN; other tokens are not affected.
//!
//! Shape letters: T tokens, D width, F expert width, S shared width, E experts, K experts per token, C capacity, R
//! rows within the capacity.

mod config;
mod config_error;
mod dispatch;
mod ep;
mod layer;
mod losses;
mod overflow;
mod ramp;
mod router;
mod routing;
mod settings;
mod shared;
mod stats;
mod weights;
mod zero_computation;

pub use config::{MoeConfig, ScoreOrder};
pub use config_error::ConfigError;
pub use dispatch::{Dispatch, DispatchRule, capacity};
pub use ep::{
    DomainBase, DomainOptions, EpOptions, ExchangeTimes, ExpertRanks, ExpertRows, HeldLayer, LayerRanks, LevelDomain,
    OwnedLayer, Pace, PendingExperts, RemoteExperts, RemoteLayer, SeenTraffic, bytes_of_expert, can_move,
    serve_experts, serve_owned_experts,
};
pub use layer::{BackwardInput, ForwardInput, MoeGradTask, MoeLayer, MoeSaved, WgradTarget};
pub use losses::{
    BalanceLoss, EntropyLoss, EntropyRule, LossGrad, balance_loss_gshard, balance_loss_per_layer, balance_loss_pooled,
    communication_loss, cv_squared, entropy_loss, group_balance_loss, l1_loads, z_loss,
};
pub use overflow::{Overflow, WithinCapacity};
pub use ramp::{Ramp, RampError, RampShape};
pub use router::{
    BenchChange, ExpertIds, FixedCapacity, GroupScore, HashTable, Init, RouterConfig, RouterInput, RouterKind,
    SchemeDoc, Schemes, ScoreFunction, SecondExpert, SettingDoc, StudyVariant, TableSource, WeightShape, balanced_hash,
    clustered_hash, next_state, schemes_page,
};
pub use routing::{NO_EXPERT, Routing, RoutingError};
pub use settings::{Range, Ranged, Section, Setting};
pub use stats::{
    LayerStats, Load, ModalityStats, ZeroComputationShare, cv, dead_expert_frac, e_max_violation, expert_diversity,
    load_entropy, max_over_mean, num_dead_experts, share,
};
pub use weights::{MoeWeights, NamedTensor, SharedWeights, is_left_out, select_experts};

/// Compiles the example in README.md.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct FrontPage;
