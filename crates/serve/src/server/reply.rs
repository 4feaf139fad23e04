//! Answers as JSON, whole or in chunks, as OpenAI's API has them.

use std::sync::Arc;

use moeworks_model::TokenTable;
use serde_json::{Value, json};

use super::base64;
use super::choice::{CallDelta, CallPlace, Choice, Shown};
use super::logprobs::{CompletionTokens, chat_json, completion_json};
use crate::experts::RoutedExperts;

/// The kind of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The continuation of a text.
    #[default]
    Completion,
    /// A message. Where answers come in channels, it is that of the channel `final`.
    Chat {
        /// Says whether they do.
        has_channels: bool,
    },
}

/// The number of tokens of prompts and answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    /// Tokens of prompts that were computed before, for others.
    pub(crate) cached_tokens: usize,
    pub(crate) completion_tokens: usize,
}

impl Usage {
    fn to_json(self) -> Value {
        let Self { prompt_tokens, cached_tokens, completion_tokens } = self;
        json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        })
    }
}

/// The parts that all JSON of one answer has in common.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    pub(crate) id: String,
    /// Seconds since the beginning of 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) kind: Kind,
    /// The tokens of the prompts, where the client wants to see them.
    pub(crate) prompts: Option<Vec<Vec<u32>>>,
    /// Answers to each prompt.
    pub(crate) num_choices: usize,
    /// The prompts, where they stand before the answers.
    pub(crate) echoes: Option<Vec<Echo>>,
    /// The bytes of tokens, where log-probabilities are wanted.
    pub(crate) table: Option<Arc<TokenTable>>,
}

/// A prompt that stands before its answers.
#[derive(Clone, Debug)]
pub(crate) struct Echo {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
}

/// A piece of an answer in a stream.
#[derive(Clone, Debug)]
pub(crate) struct Delta<'a> {
    pub(crate) choice: usize,
    pub(crate) shown: &'a Shown,
    /// The tokens, where the client wants to see them.
    pub(crate) tokens: Option<&'a [u32]>,
    pub(crate) finish_reason: Option<&'static str>,
    /// Log-probabilities of the tokens; null where there are none.
    pub(crate) logprobs: Value,
    /// Says whether it is the first of its answer.
    pub(crate) is_first: bool,
    /// The experts of tokens before it, where they are wanted.
    pub(crate) experts: Option<&'a RoutedExperts>,
}

impl Envelope {
    /// The JSON of whole answers.
    pub(crate) fn whole(&self, choices: &[Choice], usage: Usage) -> Value {
        let experts: Option<Vec<&RoutedExperts>> = choices.iter().map(|choice| choice.experts.as_ref()).collect();
        let choices: Vec<Value> =
            choices.iter().enumerate().map(|(index, choice)| self.choice(index, choice)).collect();
        let object = match self.kind {
            Kind::Completion => "text_completion",
            Kind::Chat { .. } => "chat.completion",
        };
        let mut whole = self.head(object);
        whole["choices"] = choices.into();
        whole["usage"] = usage.to_json();
        if let Some(experts) = experts {
            whole["sglext"] = experts_json(&experts);
        }
        whole
    }

    fn head(&self, object: &str) -> Value {
        let Self { id, created, model, .. } = self;
        json!({"id": id, "object": object, "created": created, "model": model, "system_fingerprint": FINGERPRINT})
    }

    fn choice(&self, index: usize, choice: &Choice) -> Value {
        let text = choice.shown(self.kind);
        let logprobs = self.logprobs(index, choice, 0, &mut 0);
        let mut json = json!({"index": index, "finish_reason": choice.finish_reason(), "logprobs": logprobs});
        match self.kind {
            Kind::Completion => {
                json["text"] = (self.echo(index).map_or("", |echo| &echo.text).to_owned() + text).into();
            }
            Kind::Chat { .. } => json["message"] = self.message(index, choice, text),
        }
        self.add_tokens(&mut json, index, Some(&choice.tokens), true);
        json
    }

    fn message(&self, index: usize, choice: &Choice, text: &str) -> Value {
        let calls = choice.calls();
        let content = (!text.is_empty() || calls.is_empty()).then_some(text);
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !calls.is_empty() {
            message["tool_calls"] = CallPlace { id: &self.id, choice: index }.whole(calls);
        }
        message
    }

    /// The prompt of an answer, where it stands before it.
    fn echo(&self, index: usize) -> Option<&Echo> {
        self.echoes.as_ref()?.get(index / self.num_choices)
    }

    /// The log-probabilities of an answer's tokens from the one numbered `start` on, with those of the prompt before
    /// the first; null where they are not wanted. `offset` is the place in the text at which they begin, and becomes
    /// that at which they end.
    pub(crate) fn logprobs(&self, index: usize, choice: &Choice, start: usize, offset: &mut usize) -> Value {
        let Some(table) = &self.table else { return Value::Null };
        let answer = choice.logprobs.get(start..).unwrap_or_default();
        if self.kind != Kind::Completion {
            return chat_json(table, answer);
        }
        let echo = self.echo(index).filter(|_| start == 0);
        let prompt = echo.map(|echo| (&echo.ids[..], &choice.prompt.logprobs[..]));
        completion_json(table, &CompletionTokens { prompt, answer }, offset)
    }

    /// Adds the ids of tokens, if they are wanted: those of the prompt once.
    fn add_tokens(&self, json: &mut Value, index: usize, tokens: Option<&[u32]>, is_first: bool) {
        let (Some(prompts), Some(tokens)) = (&self.prompts, tokens) else { return };
        json["token_ids"] = tokens.into();
        if let Some(prompt) = prompts.get(index / self.num_choices).filter(|_| is_first) {
            json["prompt_token_ids"] = prompt.as_slice().into();
        }
    }

    /// The JSON of a piece. `usage` is there where each piece has it; none where only the last has, which is a null
    /// then.
    pub(crate) fn chunk(&self, delta: &Delta<'_>, usage: Option<Option<Usage>>) -> Value {
        let &Delta { choice, shown, tokens, finish_reason, is_first, ref logprobs, experts } = delta;
        let finish_reason = finish_reason.filter(|_| shown.calls.len() <= 1);
        let mut json = json!({"index": choice, "finish_reason": finish_reason, "logprobs": logprobs});
        let echo = self.echo(choice).filter(|_| is_first).map_or("", |echo| &echo.text);
        match self.kind {
            Kind::Completion => json["text"] = (echo.to_owned() + &shown.text).into(),
            Kind::Chat { .. } => json["delta"] = self.message_delta(choice, shown, is_first),
        }
        self.add_tokens(&mut json, choice, tokens, is_first);
        let mut part = self.stream_part(vec![json], usage);
        if let Some(experts) = experts {
            part["sglext"] = experts_json(&[experts]);
        }
        part
    }

    fn message_delta(&self, choice: usize, shown: &Shown, is_first: bool) -> Value {
        let mut delta = json!({});
        if is_first {
            delta["role"] = "assistant".into();
        }
        if !shown.text.is_empty() || (is_first && shown.calls.is_empty()) {
            delta["content"] = shown.text.as_str().into();
        }
        // Clients expect one piece of a call at a time: further ones have chunks of their own.
        if let Some(call) = shown.calls.first() {
            delta["tool_calls"] = CallPlace { id: &self.id, choice }.piece(call);
        }
        delta
    }

    /// The JSON of pieces that a token shows of calls behind the first one, which [`Self::chunk`] has.
    pub(crate) fn further_calls(&self, delta: &Delta<'_>, usage: Option<Option<Usage>>) -> Vec<Value> {
        let (place, calls) = (CallPlace { id: &self.id, choice: delta.choice }, &delta.shown.calls);
        let one = |(number, call): (usize, &CallDelta)| {
            let finish_reason = delta.finish_reason.filter(|_| number + 1 == calls.len());
            let calls = json!({"tool_calls": place.piece(call)});
            let choice =
                json!({"index": delta.choice, "delta": calls, "finish_reason": finish_reason, "logprobs": null});
            self.stream_part(vec![choice], usage)
        };
        calls.iter().enumerate().skip(1).map(one).collect()
    }

    /// The JSON of the last piece, with the number of tokens.
    pub(crate) fn usage_chunk(&self, usage: Usage) -> Value {
        self.stream_part(Vec::new(), Some(Some(usage)))
    }

    fn stream_part(&self, choices: Vec<Value>, usage: Option<Option<Usage>>) -> Value {
        let object = match self.kind {
            Kind::Completion => "text_completion",
            Kind::Chat { .. } => "chat.completion.chunk",
        };
        let mut part = self.head(object);
        part["choices"] = choices.into();
        if let Some(usage) = usage {
            part["usage"] = usage.map_or(Value::Null, Usage::to_json);
        }
        part
    }
}

/// The experts of tokens as SGLang has them: `[N, L, K]` numbers of 32 bits in base64, a text for one answer and a
/// list for several, with the shapes.
fn experts_json(answers: &[&RoutedExperts]) -> Value {
    let one = |experts: &&RoutedExperts| (base64::of_i32s(&experts.ids).into(), shape_json(experts));
    let (mut texts, mut shapes): (Vec<Value>, Vec<Value>) = answers.iter().map(one).unzip();
    match (texts.len(), texts.pop(), shapes.pop()) {
        (1, Some(text), Some(shape)) => json!({"routed_experts": text, "routed_experts_shape": shape}),
        (_, text, shape) => {
            texts.extend(text);
            shapes.extend(shape);
            json!({"routed_experts": texts, "routed_experts_shape": shapes})
        }
    }
}

fn shape_json(experts: &RoutedExperts) -> Value {
    json!([experts.num_tokens(), experts.num_layers, experts.top_k])
}

/// Names the program whose answers these are: a seed gives the same text as long as it is the same.
const FINGERPRINT: &str = concat!("moeworks-", env!("CARGO_PKG_VERSION"));

#[cfg(test)]
mod tests {
    use moeworks_infer::generation::End;

    use super::super::choice::NewToken;
    use super::*;

    fn envelope(kind: Kind) -> Envelope {
        let prompts = Some(vec![vec![1, 2], vec![3]]);
        let (id, model) = ("x-1".into(), "m".into());
        Envelope { id, created: 5, model, kind, prompts, num_choices: 2, echoes: None, table: None }
    }

    #[test]
    fn whole_answers_have_the_form_of_openai() {
        let mut choice = Choice::default();
        choice.push(Kind::Completion, &NewToken { id: 7, text: "a", end: Some(End::Limit) });
        let choices = [choice.clone(), choice.clone(), choice];
        let usage = Usage { prompt_tokens: 3, cached_tokens: 2, completion_tokens: 3 };
        let json = envelope(Kind::Completion).whole(&choices, usage);
        let expected = json!({"index": 2, "text": "a", "finish_reason": "length", "logprobs": null, "token_ids": [7],
                              "prompt_token_ids": [3]});
        assert_eq!((&json["object"], &json["choices"][2]), (&json!("text_completion"), &expected));
        let usage_json = json!({"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6,
                                "prompt_tokens_details": {"cached_tokens": 2}});
        assert_eq!(json["usage"], usage_json);
        let json = envelope(Kind::Chat { has_channels: false }).whole(&choices[..1], usage);
        assert_eq!(json["choices"][0]["message"]["content"], "a");
        assert_eq!(json["object"], "chat.completion");
    }

    #[test]
    fn experts_have_the_form_of_sglang() {
        let experts = |ids: &[i32]| Some(RoutedExperts { num_layers: 2, top_k: 1, ids: ids.to_vec() });
        let choice = |ids| {
            let mut choice = Choice::default();
            choice.experts = experts(ids);
            choice
        };
        let choices = [choice(&[1, -1]), choice(&[])];
        let json = envelope(Kind::Completion).whole(&choices[..1], Usage::default());
        assert_eq!(json["sglext"], json!({"routed_experts": "AQAAAP////8=", "routed_experts_shape": [1, 2, 1]}));
        let json = envelope(Kind::Completion).whole(&choices, Usage::default());
        assert_eq!(json["sglext"]["routed_experts"], json!(["AQAAAP////8=", ""]));
        assert_eq!(json["sglext"]["routed_experts_shape"], json!([[1, 2, 1], [0, 2, 1]]));
        let json = envelope(Kind::Completion).whole(&[Choice::default()], Usage::default());
        assert!(json.get("sglext").is_none());
    }

    #[test]
    fn chunks_of_a_chat_begin_with_the_role() {
        let envelope = Envelope { prompts: None, ..envelope(Kind::Chat { has_channels: false }) };
        let (shown, logprobs) = (Shown { text: "a".into(), calls: vec![] }, Value::Null);
        let delta = Delta {
            choice: 0,
            shown: &shown,
            tokens: None,
            finish_reason: None,
            logprobs,
            is_first: true,
            experts: None,
        };
        let first = envelope.chunk(&delta, None);
        assert_eq!(first["choices"][0]["delta"], json!({"role": "assistant", "content": "a"}));
        assert!(first.get("usage").is_none());
        let last = envelope.chunk(
            &Delta { shown: &Shown::default(), finish_reason: Some("stop"), is_first: false, ..delta },
            Some(None),
        );
        assert_eq!(last["choices"][0], json!({"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": null}));
        assert_eq!(last["usage"], Value::Null);
        assert_eq!(envelope.usage_chunk(Usage::default())["choices"], json!([]));
    }
}
