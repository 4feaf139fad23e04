//! Models as Hugging Face folders: `config.json`, `model.safetensors` or shards with an index,
//! `generation_config.json`, `tokenizer.json`, `tokenizer_config.json`.
//!
//! A model is saved as the `transformers` family that computes the same function: see `families`, one file per
//! family. A model that no family expresses (two-matrix experts with shared ones, and so on) is saved with
//! `model_type` `moeworks` and the usual tensor names. `transformers` does not load such a folder, and [`Saved`] says
//! so.
//!
//! `config.json` always also has our own configuration under the key `moeworks`, so that training settings (capacity,
//! jitter, ...) survive. It is used only while it agrees with the other keys.

mod blocks;
mod check;
mod companions;
mod config_json;
mod error;
mod families;
mod family;
mod fit;
mod fp8;
mod key_table;
mod keys;
mod load;
mod mtp;
mod mxfp4;
mod names;
mod new_folder;
mod page;
mod rope_json;
mod save;
mod slices;
mod stop_ids;
mod streaming_save;

pub use blocks::Quantize;
pub use check::check_weights;
pub use companions::copy_companions;
pub(crate) use config_json::config_of_keys;
pub use error::{DoesNotFit, LoadError, SaveError};
pub(crate) use load::warn_of_keys;
pub use load::{ModelFolder, load_model, load_part, read_json, warn_again};
pub use new_folder::NewFolder;
pub use page::families_page;
pub(crate) use page::list;
pub use save::{SaveOptions, Saved, save_model, save_streamed};
pub use stop_ids::stop_ids;
pub use streaming_save::StreamedWeights;
