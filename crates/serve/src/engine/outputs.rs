//! The results of the engine's turns.

use moeworks_infer::InferError;
use moeworks_infer::generation::{End, TokenLogprobs};

use crate::experts::RoutedExperts;
use crate::scheduler::SequenceId;

/// The log-probabilities that a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WantedLogprobs {
    /// The likeliest tokens that are named beside each token.
    pub num_top: usize,
    /// Says whether those of the prompt's tokens are wanted, too. The prompt is computed as a whole then, whatever
    /// the prefix cache has.
    pub of_prompt: bool,
}

/// A token that a turn adds to an answer, or the end of one that cannot go on.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// The request's sequence.
    pub sequence: SequenceId,
    /// The token.
    pub token: u32,
    /// The text that is certain with it; a character of several tokens comes with its last one.
    pub text: String,
    /// Says why the answer is complete, if it is.
    pub end: Option<End>,
    /// The token's log-probabilities, where they are wanted.
    pub logprobs: Option<TokenLogprobs>,
    /// Facts about the prompt, with the first token of an answer.
    pub prompt: Option<Box<PromptOutput>>,
    /// The experts, where they are wanted, of tokens that were passed since the last output: with the first token
    /// those of the prompt, then those of the token before. The last token of an answer is not passed.
    pub experts: Option<RoutedExperts>,
    /// Says why the answer cannot go on, if it cannot. There is no token then.
    pub failure: Option<String>,
}

/// Facts about a prompt once it is computed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptOutput {
    /// Tokens whose keys and values others had computed.
    pub num_cached: usize,
    /// The log-probabilities of all tokens but the first, where they are wanted.
    pub logprobs: Vec<TokenLogprobs>,
}

impl Output {
    /// An output that says nothing yet.
    #[must_use]
    pub fn empty(sequence: SequenceId) -> Self {
        Self {
            sequence,
            token: 0,
            text: String::new(),
            end: None,
            logprobs: None,
            prompt: None,
            experts: None,
            failure: None,
        }
    }

    /// The end of an answer that has come to a result that is not a number.
    pub(super) fn not_a_number(sequence: SequenceId) -> Self {
        Self::failed(sequence, &InferError::NotANumber { tensor: None })
    }

    /// The end of an answer that cannot go on.
    pub(super) fn failed(sequence: SequenceId, why: &impl ToString) -> Self {
        Self { failure: Some(why.to_string()), ..Self::empty(sequence) }
    }

    /// Returns whether nothing comes behind it.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.end.is_some() || self.failure.is_some()
    }
}
