//! Many prompts at once without a server: the same engine, with answers in the order of the prompts.

mod read;

use std::collections::HashMap;

use moeworks_infer::generation::End;
use serde_json::{Value, json};

pub use read::{BatchDefaults, BatchError, BatchPrompt, read};

use crate::engine::{Engine, EngineError, Output};
use crate::scheduler::SequenceId;
use crate::server::ServedModel;

/// The answer to a prompt of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchAnswer {
    /// The text that is shown: of an answer in channels the final one.
    pub text: String,
    /// Says why there is no more; none where no token was asked for.
    pub end: Option<End>,
    /// Tokens of the answer, with the one that ended it.
    pub num_tokens: usize,
}

/// Answers prompts, as many at a time as the engine's limits say. `on_end` is told the tokens of each answer that is
/// complete. Returns the answers in the order of the prompts.
///
/// # Errors
/// If the model fails.
pub fn answer_all(
    engine: &mut Engine<'_>,
    prompts: Vec<BatchPrompt>,
    mut on_end: impl FnMut(usize),
) -> Result<Vec<BatchAnswer>, EngineError> {
    let mut answers = vec![BatchAnswer::default(); prompts.len()];
    let mut places: HashMap<SequenceId, usize> = HashMap::new();
    let mut coming = prompts.into_iter().enumerate();
    // The engine knows of those that wait for a turn, and of as many again: which of them goes first it decides.
    let most = engine.limits().max_running * 2;
    loop {
        while places.len() < most {
            let Some((index, prompt)) = coming.next() else { break };
            match prompt.request {
                Some(request) => drop(places.insert(engine.add(request)?, index)),
                None => on_end(0),
            }
        }
        if places.is_empty() {
            return Ok(answers);
        }
        for output in engine.turn()? {
            let Output { sequence, text, end, failure, .. } = output;
            if let Some(why) = failure {
                return Err(EngineError::Answer { why });
            }
            let Some(&index) = places.get(&sequence) else { continue };
            let answer = &mut answers[index];
            answer.text += &text;
            answer.num_tokens += 1;
            if end.is_some() {
                answer.end = end;
                places.remove(&sequence);
                on_end(answer.num_tokens);
            }
        }
    }
}

impl BatchAnswer {
    /// The line of a file of answers. `id` names it.
    #[must_use]
    pub fn to_json(&self, served: &ServedModel, id: &Value, prompt: &PromptInfo) -> Value {
        let is_in_channels = prompt.is_chat && served.model.tokenizer.has_channels();
        let text = if is_in_channels { moeworks_infer::chat::final_message(&self.text) } else { &self.text };
        let reason = match self.end {
            Some(End::StopToken | End::StopText) => "stop",
            Some(End::Interrupted) => "abort",
            Some(End::Limit) | None => "length",
        };
        let (prompt_tokens, completion_tokens) = (prompt.num_tokens, self.num_tokens);
        json!({
            "id": id,
            "text": text,
            "finish_reason": reason,
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens},
        })
    }
}

/// A prompt as its answer's line needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptInfo {
    /// Its tokens.
    pub num_tokens: usize,
    /// True for a conversation.
    pub is_chat: bool,
}
