//! Errors of a configuration.

use std::path::PathBuf;

/// An invalid configuration. Every message is one line: where, the setting, its value, and what would be valid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A setting whose value is of the wrong type or out of range.
    #[error("{origin}{setting} = {value}: {expected}")]
    Value {
        /// The place of the value, as `file:line: `; empty for the command line, presets and defaults.
        origin: String,
        /// The setting's dotted name.
        setting: String,
        /// Its value as TOML.
        value: String,
        /// The valid values.
        expected: String,
    },
    /// A setting that does not exist.
    #[error("{origin}{setting}: unknown setting; {hint}")]
    Unknown {
        /// The place of the name; see [`ConfigError::Value`].
        origin: String,
        /// The name as given.
        setting: String,
        /// Similar names, or how to list all of them.
        hint: String,
    },
    /// A file that is not TOML.
    #[error("{}:{line}: not TOML: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The parser's message.
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
    /// A model folder to start from is invalid.
    #[error(transparent)]
    Model(#[from] moeworks_model::LoadError),
    /// A file that cannot be read.
    #[error("{}: the configuration cannot be read: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}

impl From<moeworks_moe::ConfigError> for ConfigError {
    fn from(error: moeworks_moe::ConfigError) -> Self {
        let moeworks_moe::ConfigError { setting, value, expected } = error;
        Self::Value { origin: String::new(), setting: format!("model.{setting}"), value, expected }
    }
}
