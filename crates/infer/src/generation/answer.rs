//! Answers as text, piece by piece as tokens are drawn.

use std::ops::ControlFlow;

use moeworks_model::BatchError;

use super::{AnswerText, CachedSequence, GenerateRequest, Sampler, StopReason, generate};
use crate::InferError;
use crate::open::Model;

/// The reason why an answer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    /// A stop token was drawn.
    StopToken,
    /// A stop text came.
    StopText,
    /// The allowed number of tokens was reached.
    #[default]
    Limit,
    /// The receiver of the text asked for it.
    Interrupted,
}

/// A generated text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The text. Special tokens are included where they name a span or a channel.
    pub text: String,
    /// The number of tokens, including the one that ended it.
    pub num_tokens: usize,
    /// The reason why it ended.
    pub end: End,
}

/// Returns the ids of a prompt: of a source if the model has an encoder, otherwise of a text to continue. With
/// `reads_special`, special tokens spelled in the text become these tokens.
///
/// # Errors
/// Fails if there are no ids: the text is empty, and the tokenizer has no token that begins a text.
pub fn prompt_ids(model: &Model, text: &str, reads_special: bool) -> Result<Vec<u32>, InferError> {
    let tokenizer = &model.tokenizer;
    let prompt = match model.has_encoder() {
        true => tokenizer.encode_source(text)?,
        false => tokenizer.encode_prompt(text, reads_special)?,
    };
    if prompt.is_empty() { Err(InferError::EmptyPrompt) } else { Ok(prompt) }
}

/// Generates an answer until one of the texts in `stops` comes or `on_text` breaks. `on_text` gets the text that each
/// token adds, which may be empty.
///
/// # Errors
/// Fails as [`generate`] does, and if no token continues the form that `sampler` holds the answer to. If a result is
/// not a number, the error names the tensor with NaN or infinity, if there is one.
pub fn answer(
    model: &Model,
    sequence: &mut CachedSequence,
    request: &GenerateRequest<'_>,
    sampler: &mut Sampler,
    stops: &[String],
    mut on_text: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Answer, InferError> {
    let mut writer = AnswerText::new(model, request.prompt, stops);
    let mut failure = None;
    let generated = generate(model.as_model_ref(), sequence, request, sampler, |id| {
        if request.stop_ids.contains(&id) {
            return ControlFlow::Continue(());
        }
        let piece = writer.push(id).unwrap_or_else(|error| {
            failure = Some(error);
            String::new()
        });
        let is_asked = on_text(&piece).is_break();
        let is_end = is_asked || failure.is_some() || writer.is_stopped();
        if is_end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let generated =
        generated.map_err(|error| if error == BatchError::NotANumber { model.not_a_number() } else { error.into() })?;
    if let Some(error) = failure.or_else(|| sampler.failure().cloned().map(InferError::Form)) {
        return Err(error);
    }
    let rest = writer.finish()?;
    if !rest.is_empty() {
        let _ = on_text(&rest);
    }
    let end = match generated.reason {
        _ if writer.is_stopped() => End::StopText,
        // A form that is complete ends the answer as a token does.
        StopReason::StopId | StopReason::HasForm => End::StopToken,
        StopReason::MaxTokens | StopReason::NoToken => End::Limit,
        StopReason::Asked => End::Interrupted,
    };
    Ok(Answer { text: writer.into_text(), num_tokens: generated.ids.len(), end })
}
