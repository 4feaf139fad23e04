//! The code by which a command says how it ended.

/// The exit code of a command: 0 done, 2 something that was given is wrong, and others as the library's documentation
/// says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExitCode(u8);

impl ExitCode {
    /// The command is done.
    pub(crate) const SUCCESS: Self = Self(0);

    /// The number.
    pub(crate) fn number(self) -> u8 {
        self.0
    }
}

impl From<u8> for ExitCode {
    fn from(number: u8) -> Self {
        Self(number)
    }
}
