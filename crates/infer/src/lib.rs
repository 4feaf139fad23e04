//! Models in use: everything that a program, a server or Python needs to open a model and let it answer, without
//! training.
//!
//! [`open`] finds the model that a path means (a run, a checkpoint, a model folder, a GGUF file) and loads it;
//! [`generation`] draws tokens; [`chat`] holds conversations by the model's own template; [`data`] reads text and
//! makes tokens of it, [`evaluation`] says how well a model predicts it; [`store`] knows run folders and their
//! checkpoints; [`system`] knows the machine. Nothing here prints or ends the process: what there is to say comes
//! back as values, and errors are [`InferError`].
//!
//! ```no_run
//! use std::ops::ControlFlow;
//! use std::path::Path;
//!
//! use moeworks_infer::InferError;
//! use moeworks_infer::generation::{CachedSequence, GenerateRequest, Sampler, SamplingOptions, answer, prompt_ids};
//! use moeworks_infer::open::{Model, OpenOptions, Source};
//! use moeworks_ops::Context;
//!
//! # fn main() -> Result<(), InferError> {
//! let source = Source::open(Path::new("runs/tiny"))?;
//! let model = Model::open(Context::cpu_all_cores(), &source, OpenOptions::default())?;
//! let prompt = prompt_ids(&model, "Once upon a time", false)?;
//! let request = GenerateRequest { prompt: &prompt, max_new_tokens: 50, stop_ids: &model.stop_ids };
//! let mut sequence = CachedSequence::new(model.decoder.config());
//! let mut sampler = Sampler::new(SamplingOptions::default())?;
//! let answer = answer(&model, &mut sequence, &request, &mut sampler, &[], |piece| {
//!     print!("{piece}");
//!     ControlFlow::Continue(())
//! })?;
//! println!("\n{} tokens", answer.num_tokens);
//! # Ok(())
//! # }
//! ```

pub mod chat;
pub mod compute;
pub mod data;
mod error;
pub mod evaluation;
pub mod generation;
pub mod open;
pub mod store;
pub mod system;

pub use error::InferError;
