//! Exit codes of commands.

/// The exit code of a command: 0 for success, 2 for invalid input, and others as listed in the library's
/// documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExitCode(u8);

impl ExitCode {
    /// The command succeeded.
    pub(crate) const SUCCESS: Self = Self(0);

    /// Returns the code as a number.
    pub(crate) fn number(self) -> u8 {
        self.0
    }
}

impl From<u8> for ExitCode {
    fn from(number: u8) -> Self {
        Self(number)
    }
}
