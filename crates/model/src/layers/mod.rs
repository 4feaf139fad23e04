//! Layers and their blocks, each with explicit phases: forward, backward, weight gradient.
//!
//! A block is pre-norm and residual: `y = x + f(norm(x))`. Forward returns `y` and the activations for backward.
//! Backward returns the gradient of `x`, writes the (small) gradients of norm weights, and leaves the gradients of
//! matrices as a task.

pub(crate) mod attention;
pub(crate) mod cross;
pub(crate) mod feed_forward;
mod heads;
mod latent;
pub(crate) mod layer;
pub(crate) mod norm;
mod paged_attention;
mod pass;
mod projection;
pub(crate) mod relative;
pub(crate) mod segments;
pub(crate) mod weight_grads;

pub use cross::EncoderOutput;
pub use layer::ResidualStream;
pub(crate) use pass::{Pass, RouterRules, Sequences};
pub use weight_grads::{WeightGradTask, WeightGradTasks, WeightGrads};
