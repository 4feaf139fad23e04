//! The number of tokens that an answer may have.

use std::str::FromStr;

use crate::InferError;
use crate::open::Model;

/// The default number of tokens to generate.
pub const DEFAULT_TOKENS: usize = 200;

/// A limit on the number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenLimit {
    /// This many.
    Tokens(usize),
    /// All that fit in the model's context.
    Room,
}

impl FromStr for TokenLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse::<i64>() {
            Ok(-1) => Ok(Self::Room),
            Ok(count @ 0..) => Ok(Self::Tokens(usize::try_from(count).unwrap_or(usize::MAX))),
            _ => Err("must be a whole number, or -1 for as many as fit".to_owned()),
        }
    }
}

/// Limits on the tokens of an answer, the strongest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenLimits {
    /// The limit that the user gave.
    pub asked: Option<TokenLimit>,
    /// The limit that the model's files recommend.
    pub of_model: Option<usize>,
}

/// Returns the most tokens to generate after a prompt of `prompt_len` tokens: the user's number, or that of the
/// model's files or [`DEFAULT_TOKENS`] as far as it fits.
///
/// # Errors
/// Fails if the prompt leaves no space, or less than the user asked for.
pub fn max_new_tokens(model: &Model, prompt_len: usize, limits: TokenLimits) -> Result<usize, InferError> {
    let (room, context) = (model.decoder.room(prompt_len), model.decoder.config().max_seq_len);
    let TokenLimits { asked, of_model } = limits;
    if (room == 0 && asked != Some(TokenLimit::Tokens(0))) || prompt_len > context.saturating_add(room) {
        return Err(InferError::LongPrompt { prompt_len, context });
    }
    match asked {
        Some(TokenLimit::Tokens(asked)) if asked > room => {
            Err(InferError::ManyTokens { asked, context, prompt_len, room })
        }
        Some(TokenLimit::Tokens(count)) => Ok(count),
        Some(TokenLimit::Room) => Ok(room),
        None => Ok(of_model.unwrap_or(DEFAULT_TOKENS).min(room)),
    }
}
