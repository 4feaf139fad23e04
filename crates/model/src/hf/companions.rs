//! The files of a model folder other than weights and configuration, which a copy of the folder keeps: tokenizer,
//! templates, defaults of generation.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::error::SaveError;

/// The names of the files that are copied.
pub(super) const COMPANIONS: [&str; 12] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
];

/// Copies the files of `from` that are neither weights nor configuration to `to`, by the names that `transformers`
/// writes for a language model. Returns the paths of the copies.
pub fn copy_companions(from: &Path, to: &Path) -> Result<Vec<PathBuf>, SaveError> {
    let mut copied = Vec::new();
    for name in COMPANIONS {
        let (source, target) = (from.join(name), to.join(name));
        let bytes = match fs::read(&source) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(SaveError::Io { path: source, source: error }),
        };
        crate::files::write_whole(&target, &bytes).map_err(|source| SaveError::Io { path: target.clone(), source })?;
        copied.push(target);
    }
    Ok(copied)
}
