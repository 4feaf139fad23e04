//! The model that is served: its names, its tokens, its template and its room.

use std::sync::Arc;

use moeworks_infer::chat::{ChatTemplate, Message, RenderOptions, Sandbox, SandboxError, ToolFormat, ToolParser};
use moeworks_infer::open::{FileDefaults, Model};
use moeworks_model::TokenizerError;
use serde_json::{Map, Value};

use crate::api::{ApiError, ChatPrompt, ErrorKind, Prompt, PromptOptions, ToolChoice, Tools, quoted};

/// The model that is served.
pub struct ServedModel {
    /// Its names; the first stands in answers.
    pub names: Vec<String>,
    /// The model.
    pub model: Arc<Model>,
    /// The sampling settings that its files recommend.
    pub defaults: FileDefaults,
    /// Its chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// Carries the template out.
    pub sandbox: Sandbox,
    /// Tokens that a sequence has at most, prompt and answer together, for the room that keys and values have.
    pub max_sequence_tokens: usize,
}

impl ServedModel {
    /// The name that stands in answers.
    #[must_use]
    pub fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// Tokens of prompt and answer together at most.
    #[must_use]
    pub fn context(&self) -> usize {
        self.room(0)
    }

    /// Tokens that fit behind a prompt.
    fn room(&self, prompt_len: usize) -> usize {
        self.model.decoder.room(prompt_len).min(self.max_sequence_tokens.saturating_sub(prompt_len))
    }

    /// Checks the name of a request; without one it means the model that is here.
    pub(crate) fn check_name(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name {
            Some(name) if !self.names.iter().any(|own| own == name) => {
                let message = format!("there is no model {}: this server has {}", quoted(name), quoted(self.name()));
                Err(ApiError::new(ErrorKind::NoModel, message).of("model"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the tokens of an answer at most: those that are asked for, or as many as the model's files
    /// recommend and fit.
    pub(crate) fn max_new_tokens(&self, prompt_len: usize, asked: Option<usize>) -> Result<usize, ApiError> {
        let room = self.room(prompt_len);
        let context = self.context();
        let too_long = |message: String| Err(ApiError::new(ErrorKind::TooLong, message));
        if room == 0 {
            return too_long(format!(
                "the prompt has {prompt_len} tokens, but the context is {context}: shorten it to at most {}",
                context.saturating_sub(1)
            ));
        }
        match asked {
            Some(asked) if asked > room => too_long(format!(
                "max_tokens = {asked}: the context is {context} tokens and the prompt has {prompt_len}: give at most {room}"
            ))
            .map_err(|error: ApiError| error.of("max_tokens")),
            Some(asked) => Ok(asked),
            None => Ok(self.defaults.sampling.max_new_tokens.map_or(room, |of_model| of_model.min(room))),
        }
    }

    /// Returns the tokens of a prompt.
    pub(crate) fn encode_prompt(&self, prompt: &Prompt, options: PromptOptions) -> Result<Vec<u32>, ApiError> {
        let tokenizer = &self.model.tokenizer;
        prompt.check_vocabulary(tokenizer.vocab_size())?;
        let PromptOptions { adds_special_tokens, reads_special_tokens } = options;
        let ids = match prompt {
            Prompt::Tokens(ids) => Ok(ids.clone()),
            Prompt::Text(text) if adds_special_tokens => tokenizer.encode_prompt(text, reads_special_tokens),
            Prompt::Text(text) if reads_special_tokens => tokenizer.encode_spelled(text),
            Prompt::Text(text) => tokenizer.encode(text),
        };
        let ids = ids.map_err(|error| tokenizer_error(&error))?;
        if ids.is_empty() {
            return Err(ApiError::new(ErrorKind::Invalid, "prompt: has no tokens").of("prompt"));
        }
        Ok(ids)
    }

    /// The reader of calls in answers; none where there are no tools.
    pub(crate) fn tool_parser(&self, tools: &Tools) -> Result<Option<ToolParser>, ApiError> {
        let unsupported = |message: &str| Err(ApiError::new(ErrorKind::Unsupported, message).of("tools"));
        let format = match &tools.choice {
            ToolChoice::None => return Ok(None),
            _ if self.model.tokenizer.has_channels() => {
                return unsupported("tools: calls of models that answer in channels are not read");
            }
            ToolChoice::Auto => {
                let source = self.template.as_ref().map_or("", ChatTemplate::source);
                match ToolFormat::from_template(source) {
                    Some(format) => format,
                    None => {
                        return unsupported("tools: the way in which the model's template writes calls is not known");
                    }
                }
            }
            ToolChoice::Required => ToolFormat::List,
            ToolChoice::Named(name) => ToolFormat::Arguments(name.clone()),
        };
        Ok(Some(ToolParser::new(format, tools.names.clone())))
    }

    /// The text of a prompt.
    pub(crate) fn prompt_text(&self, prompt: &Prompt) -> Result<String, ApiError> {
        match prompt {
            Prompt::Text(text) => Ok(text.clone()),
            Prompt::Tokens(ids) => self.model.tokenizer.decode(ids).map_err(|error| tokenizer_error(&error)),
        }
    }

    /// Returns the tokens of a conversation, by the model's template. No text of the client becomes a special token.
    pub(crate) fn encode_chat(&self, prompt: &ChatPrompt) -> Result<Vec<u32>, ApiError> {
        let Some(template) = &self.template else {
            let message =
                "the model has no chat template: use /v1/completions, or start the server with --chat-template";
            return Err(ApiError::new(ErrorKind::Unsupported, message).of("messages"));
        };
        let messages: Vec<Message> = prompt.messages.iter().map(|message| self.guarded(message, template)).collect();
        let mut variables = Map::new();
        for (name, value) in &prompt.variables {
            variables.insert(name.clone(), self.guarded_value(value));
        }
        let tools = prompt.tools.tools.as_ref();
        if tools.is_some() && !template.source().contains("tools") {
            let message = "tools: the model's chat template knows no tools";
            return Err(ApiError::new(ErrorKind::Unsupported, message).of("tools"));
        }
        let tools = tools.map(|tools| tools.map_texts(&|text| self.model.tokenizer.guard(text)));
        let options = RenderOptions { add_generation_prompt: prompt.add_generation_prompt, variables, tools };
        let mut text = self.sandbox.render(template, &messages, &options).map_err(|error| template_error(&error))?;
        if prompt.continue_final_message {
            cut_behind_last_message(&mut text, &messages)?;
        }
        let ids = self.model.tokenizer.encode_rendered(&text).map_err(|error| tokenizer_error(&error))?;
        if ids.is_empty() {
            return Err(
                ApiError::new(ErrorKind::Invalid, "messages: the template makes no text of them").of("messages")
            );
        }
        Ok(ids)
    }

    /// A message as the template sees it, with the spellings of special tokens marked.
    fn guarded(&self, message: &Message, template: &ChatTemplate) -> Message {
        let tokenizer = &self.model.tokenizer;
        // Templates from before there were developers know them as the system.
        let knows_developers = template.source().contains("developer");
        let role = if message.role == "developer" && !knows_developers { "system" } else { &message.role };
        Message {
            name: message.name.as_ref().map(|name| tokenizer.guard(name)),
            tool_calls: message.tool_calls.as_ref().map(|calls| calls.map_texts(&|text| tokenizer.guard(text))),
            tool_call_id: message.tool_call_id.as_ref().map(|id| tokenizer.guard(id)),
            ..Message::new(role, tokenizer.guard(&message.content))
        }
    }

    fn guarded_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.model.tokenizer.guard(text).into(),
            Value::Array(values) => values.iter().map(|value| self.guarded_value(value)).collect(),
            Value::Object(map) => map
                .iter()
                .map(|(name, value)| (self.model.tokenizer.guard(name), self.guarded_value(value)))
                .collect::<Map<_, _>>()
                .into(),
            other => other.clone(),
        }
    }
}

/// Takes away what a template puts behind the last message.
fn cut_behind_last_message(text: &mut String, messages: &[Message]) -> Result<(), ApiError> {
    let content = messages.last().map_or("", |message| message.content.trim());
    match text.rfind(content) {
        Some(start) if !content.is_empty() => {
            text.truncate(start + content.len());
            Ok(())
        }
        _ => {
            let message =
                "continue_final_message: the template does not write the last message as it is, or it is empty";
            Err(ApiError::new(ErrorKind::Invalid, message).of("continue_final_message"))
        }
    }
}

fn tokenizer_error(error: &TokenizerError) -> ApiError {
    ApiError::new(ErrorKind::Internal, error.to_string())
}

/// A template that refuses a conversation says so; one that cannot be carried out at all is the server's fault.
fn template_error(error: &SandboxError) -> ApiError {
    let is_own_fault = matches!(error, SandboxError::Start(_) | SandboxError::Stream { .. });
    let kind = if is_own_fault { ErrorKind::Internal } else { ErrorKind::Invalid };
    ApiError::new(kind, error.to_string()).of("messages")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_goes_on_right_behind_the_last_message() {
        let messages = [Message::new("user", "a"), Message::new("assistant", " The answer is ")];
        let mut text = "<u>a</u><a>The answer is</a>\n".to_owned();
        cut_behind_last_message(&mut text, &messages).unwrap();
        assert_eq!(text, "<u>a</u><a>The answer is");
        for messages in [vec![], vec![Message::new("assistant", " ")], vec![Message::new("assistant", "other")]] {
            assert!(cut_behind_last_message(&mut text.clone(), &messages).is_err());
        }
    }
}
