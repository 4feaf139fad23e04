//! The fields of a request that ask for the experts of tokens.

use super::fields::Fields;
use super::{ApiError, ErrorKind};

/// The first token whose experts are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertsFrom {
    /// The token at this position of prompt and answer.
    Position(usize),
    /// The first token of the answer.
    Answer,
}

impl ExpertsFrom {
    /// Takes `return_routed_experts` and `routed_experts_start_len`, as SGLang has them; -1 means the answer alone.
    pub(super) fn take(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let is_wanted = fields.bool("return_routed_experts")?.unwrap_or(false);
        let start = fields.integer("routed_experts_start_len", -1..=i64::from(u32::MAX))?;
        let start =
            start.map_or(Self::Position(0), |start| usize::try_from(start).map_or(Self::Answer, Self::Position));
        Ok(is_wanted.then_some(start))
    }

    /// The position behind a prompt of `prompt_len` tokens.
    ///
    /// # Errors
    /// If it is beyond the prompt.
    pub(crate) fn position(self, prompt_len: usize) -> Result<usize, ApiError> {
        match self {
            Self::Answer => Ok(prompt_len),
            Self::Position(position) if position <= prompt_len => Ok(position),
            Self::Position(position) => {
                let message = format!(
                    "routed_experts_start_len = {position}: must be from 0 to the prompt's {prompt_len} tokens, or -1 for \
                     the answer alone"
                );
                Err(ApiError::new(ErrorKind::Invalid, message).of("routed_experts_start_len"))
            }
        }
    }
}
