//! An answer as text, piece by piece as its tokens come.

use std::ops::ControlFlow;

use moeworks_model::BatchError;

use super::{CachedSequence, GenerateRequest, Sampler, StopReason, StopTexts, TextStream, generate};
use crate::InferError;
use crate::open::Model;

/// The reason why an answer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    /// A token that ends a text came.
    StopToken,
    /// A text came before which the answer ends.
    StopText,
    /// The number of tokens that was allowed.
    #[default]
    Limit,
    /// The receiver of the text asked for it.
    Interrupted,
}

/// A text that was generated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The text, with special tokens where they say what follows.
    pub text: String,
    /// Tokens, with the one that ended it.
    pub num_tokens: usize,
    /// Says why there is no more.
    pub end: End,
}

/// Returns the ids of a prompt: of a source where the model has an encoder, else of a text to continue. `reads_special` says whether
/// special tokens that the text spells become these tokens.
///
/// # Errors
/// If there are no ids: an empty text, and a tokenizer without a token that a text begins with.
pub fn prompt_ids(model: &Model, text: &str, reads_special: bool) -> Result<Vec<u32>, InferError> {
    let tokenizer = &model.tokenizer;
    let prompt = match model.has_encoder() {
        true => tokenizer.encode_source(text)?,
        false => tokenizer.encode_prompt(text, reads_special)?,
    };
    if prompt.is_empty() { Err(InferError::EmptyPrompt) } else { Ok(prompt) }
}

/// Generates an answer and gives `on_text` what each token adds to its text, which may be nothing: until one of the texts in `stops`
/// comes, or `on_text` breaks.
///
/// # Errors
/// Fails where [`generate`] does. Where a result is not a number the error names the tensor that is to blame, if one is.
pub fn answer(
    model: &Model,
    sequence: &mut CachedSequence,
    request: &GenerateRequest<'_>,
    sampler: &mut Sampler,
    stops: &[String],
    mut on_text: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Answer, InferError> {
    let mut writer = Writer::new(model, request, stops);
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
        let is_end = is_asked || failure.is_some() || writer.stops.is_found();
        if is_end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let generated =
        generated.map_err(|error| if error == BatchError::NotANumber { model.not_a_number() } else { error.into() })?;
    if let Some(error) = failure {
        return Err(error);
    }
    let rest = writer.finish()?;
    if !rest.is_empty() {
        let _ = on_text(&rest);
    }
    let end = match generated.reason {
        _ if writer.stops.is_found() => End::StopText,
        StopReason::StopId => End::StopToken,
        StopReason::MaxTokens => End::Limit,
        StopReason::Asked => End::Interrupted,
    };
    Ok(Answer { text: writer.text, num_tokens: generated.ids.len(), end })
}

/// Makes text of tokens as they come, up to a stop text.
struct Writer<'a> {
    stream: TextStream<'a>,
    stops: StopTexts,
    /// The text so far.
    text: String,
}

impl<'a> Writer<'a> {
    fn new(model: &'a Model, request: &GenerateRequest<'_>, stops: &[String]) -> Self {
        let tokenizer = &model.tokenizer;
        // Special tokens say which span follows, or which channel.
        let shows_special = model.has_encoder() || tokenizer.has_channels();
        let stream = if shows_special { TextStream::with_special(tokenizer) } else { TextStream::new(tokenizer) };
        // An answer is a text of its own; what continues a text is not.
        let stream = if model.has_encoder() { stream } else { stream.after(request.prompt) };
        Self { stream, stops: StopTexts::new(stops), text: String::new() }
    }

    fn push(&mut self, id: u32) -> Result<String, InferError> {
        let piece = self.stream.push(id)?;
        let piece = self.stops.push(&piece);
        self.text += &piece;
        Ok(piece)
    }

    /// Returns the text that was held back.
    fn finish(&mut self) -> Result<String, InferError> {
        let rest = self.stream.finish()?;
        let rest = self.stops.push(&rest) + &self.stops.finish();
        self.text += &rest;
        Ok(rest)
    }
}
