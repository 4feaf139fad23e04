//! Measurements of a model's routing beyond the figures of one step: how far a token's id decides its expert, how
//! many choices changed since the previous checkpoint, and a page that shows a text coloured by expert.

mod agreement;
mod page;
mod palette;
mod routed;
mod specialization;
mod text;

pub use agreement::RoutingSample;
pub use page::routing_page;
pub use routed::{Choice, RoutedLayer, RoutedText, TokenCount, first_tokens};
pub use specialization::{Specialization, specialization};
