//! Models in use: opening a model, generation, chat, evaluation and reading text, for programs, servers and Python.
//! Nothing here trains.
//!
//! [`open`] finds the model that a path names (a run, a checkpoint, a model folder, a GGUF file) and loads it.
//! [`generation`] draws tokens. [`chat`] renders conversations by the model's own template. [`data`] reads text and
//! tokenises it; [`evaluation`] measures how well a model predicts it. [`model_ranks`] spreads a model's layers and
//! experts over ranks. [`store`] manages run folders and their checkpoints. [`routing_record`] records which experts
//! tokens go to. [`system`] describes the machine. Nothing here prints or ends the process: results are values, and
//! errors are [`InferError`].
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
pub mod constraint;
pub mod data;
mod error;
pub mod evaluation;
pub mod generation;
pub mod json;
pub mod model_ranks;
pub mod open;
pub mod routing_record;
pub mod store;
pub mod system;

pub use error::InferError;
