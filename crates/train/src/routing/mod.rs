//! What can be seen of a model's routing beyond the figures of one step: how far a token's id decides its expert, how
//! much changed since the checkpoint before, and a page that shows a text coloured by expert.

mod agreement;
mod specialization;

pub use agreement::RoutingSample;
pub use specialization::{Specialization, specialization};
