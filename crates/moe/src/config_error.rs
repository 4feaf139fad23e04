//! The error of a configuration.

/// A setting that no layer can have: which one, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting} = {value}: {expected}")]
pub struct ConfigError {
    /// The setting's name.
    pub setting: &'static str,
    /// Its value.
    pub value: String,
    /// The values that would be right.
    pub expected: String,
}

impl ConfigError {
    /// An error about `setting`.
    pub fn new(setting: &'static str, value: impl ToString, expected: impl Into<String>) -> Self {
        Self { setting, value: value.to_string(), expected: expected.into() }
    }
}
