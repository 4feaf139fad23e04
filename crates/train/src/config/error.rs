//! What can be wrong with a configuration.

use std::path::PathBuf;

/// A configuration that cannot be used. Every message is one line: where, which setting, its value, what would be right.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A setting whose value is of the wrong type or out of range.
    #[error("{origin}{setting} = {value}: {expected}")]
    Value {
        /// Where the value was set, as `file:line: `; empty for the command line, presets and defaults.
        origin: String,
        /// The setting's dotted name.
        setting: String,
        /// Its value as TOML.
        value: String,
        /// The values that would be right.
        expected: String,
    },
    /// A setting that does not exist.
    #[error("{origin}{setting}: there is no such setting; {hint}")]
    Unknown {
        /// As for [`ConfigError::Value`].
        origin: String,
        /// The name as given.
        setting: String,
        /// Which names are near, or where to find them all.
        hint: String,
    },
    /// A file that is not TOML.
    #[error("{}:{line}: not TOML: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What the parser says.
        message: String,
    },
    /// A `--set` that is not `name=value`.
    #[error("--set {text}: must be SETTING=VALUE, such as train.lr=3e-4")]
    Override {
        /// The text as given.
        text: String,
    },
    /// A preset that does not exist.
    #[error("--preset {name}: must be one of {known}")]
    Preset {
        /// The name as given.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// A model folder to start from that cannot be used.
    #[error(transparent)]
    Model(#[from] moeworks_model::LoadError),
    /// A file that cannot be read.
    #[error("{}: the configuration cannot be read: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl From<moeworks_moe::ConfigError> for ConfigError {
    fn from(error: moeworks_moe::ConfigError) -> Self {
        let moeworks_moe::ConfigError { setting, value, expected } = error;
        Self::Value { origin: String::new(), setting: format!("model.{setting}"), value, expected }
    }
}
