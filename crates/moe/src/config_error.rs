//! The error of an invalid configuration.

/// An invalid setting: its name, its value and the values that would be valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting} = {value}: {expected}")]
pub struct ConfigError {
    /// The setting's name.
    pub setting: &'static str,
    /// Its value.
    pub value: String,
    /// The valid values.
    pub expected: String,
}

impl ConfigError {
    /// Creates an error about `setting`.
    pub fn new(setting: &'static str, value: impl ToString, expected: impl Into<String>) -> Self {
        Self { setting, value: value.to_string(), expected: expected.into() }
    }
}
