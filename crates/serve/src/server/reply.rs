//! Answers as JSON, whole or in chunks, as OpenAI's API has them.

use moeworks_infer::chat::final_message;
use moeworks_infer::generation::End;
use serde_json::{Value, json};

use super::base64;
use crate::experts::RoutedExperts;

/// The kind of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The continuation of a text.
    Completion,
    /// A message. Where answers come in channels, it is that of the channel `final`.
    Chat {
        /// Whether they do.
        has_channels: bool,
    },
}

/// The number of tokens of prompts and answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
}

impl Usage {
    fn to_json(self) -> Value {
        let Self { prompt_tokens, completion_tokens } = self;
        json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
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
}

/// An answer as far as it has come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Choice {
    pub(crate) text: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) end: Option<End>,
    /// The experts of the tokens so far, where they are wanted.
    pub(crate) experts: Option<RoutedExperts>,
    /// Bytes of the shown text that were returned in pieces.
    num_shown: usize,
}

impl Choice {
    /// Adds a token and returns the text to show for it.
    pub(crate) fn push(&mut self, kind: Kind, token: u32, piece: &str) -> String {
        self.tokens.push(token);
        self.text += piece;
        let Kind::Chat { has_channels: true } = kind else { return piece.to_owned() };
        let shown = final_message(&self.text);
        let new = shown.get(self.num_shown..).unwrap_or_default().to_owned();
        self.num_shown = self.num_shown.max(shown.len());
        new
    }

    fn shown(&self, kind: Kind) -> &str {
        match kind {
            Kind::Chat { has_channels: true } => final_message(&self.text),
            _ => &self.text,
        }
    }
}

/// A piece of an answer in a stream.
#[derive(Clone, Debug)]
pub(crate) struct Delta<'a> {
    pub(crate) choice: usize,
    pub(crate) text: &'a str,
    /// The tokens, where the client wants to see them.
    pub(crate) tokens: Option<&'a [u32]>,
    pub(crate) end: Option<End>,
    /// Whether it is the first of its answer.
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
        let mut json = json!({"index": index, "finish_reason": finish_reason(choice.end), "logprobs": null});
        match self.kind {
            Kind::Completion => json["text"] = text.into(),
            Kind::Chat { .. } => json["message"] = json!({"role": "assistant", "content": text, "refusal": null}),
        }
        self.add_tokens(&mut json, index, Some(&choice.tokens), true);
        json
    }

    /// Adds the ids of tokens, if they are wanted: those of the prompt once.
    fn add_tokens(&self, json: &mut Value, index: usize, tokens: Option<&[u32]>, is_first: bool) {
        let (Some(prompts), Some(tokens)) = (&self.prompts, tokens) else { return };
        json["token_ids"] = tokens.into();
        if let Some(prompt) = prompts.get(index / self.num_choices).filter(|_| is_first) {
            json["prompt_token_ids"] = prompt.as_slice().into();
        }
    }

    /// The JSON of a piece. `usage` is there where each piece has it; none where only the last has, which is a null then.
    pub(crate) fn chunk(&self, delta: &Delta<'_>, usage: Option<Option<Usage>>) -> Value {
        let &Delta { choice, text, tokens, end, is_first, experts } = delta;
        let mut json = json!({"index": choice, "finish_reason": finish_reason(end), "logprobs": null});
        match self.kind {
            Kind::Completion => json["text"] = text.into(),
            Kind::Chat { .. } if is_first => json["delta"] = json!({"role": "assistant", "content": text}),
            Kind::Chat { .. } if text.is_empty() => json["delta"] = json!({}),
            Kind::Chat { .. } => json["delta"] = json!({"content": text}),
        }
        self.add_tokens(&mut json, choice, tokens, is_first);
        let mut part = self.stream_part(vec![json], usage);
        if let Some(experts) = experts {
            part["sglext"] = experts_json(&[experts]);
        }
        part
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

/// The experts of tokens as SGLang has them: `[N, L, K]` numbers of 32 bits in base64, a text for one answer and a list for several, with
/// the shapes.
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

/// The reason why an answer ended, in the words of the API; null while it goes on.
fn finish_reason(end: Option<End>) -> Option<&'static str> {
    match end {
        None => None,
        Some(End::StopToken | End::StopText) => Some("stop"),
        Some(End::Limit) => Some("length"),
        Some(End::Interrupted) => Some("abort"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelope(kind: Kind) -> Envelope {
        let prompts = Some(vec![vec![1, 2], vec![3]]);
        Envelope { id: "x-1".into(), created: 5, model: "m".into(), kind, prompts, num_choices: 2 }
    }

    #[test]
    fn whole_answers_have_the_form_of_openai() {
        let choice = Choice { text: "a".into(), tokens: vec![7], end: Some(End::Limit), ..Choice::default() };
        let choices = [choice.clone(), choice.clone(), choice];
        let usage = Usage { prompt_tokens: 3, completion_tokens: 3 };
        let json = envelope(Kind::Completion).whole(&choices, usage);
        let expected = json!({"index": 2, "text": "a", "finish_reason": "length", "logprobs": null, "token_ids": [7],
                              "prompt_token_ids": [3]});
        assert_eq!((&json["object"], &json["choices"][2]), (&json!("text_completion"), &expected));
        assert_eq!(json["usage"], json!({"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}));
        let json = envelope(Kind::Chat { has_channels: false }).whole(&choices[..1], usage);
        assert_eq!(json["choices"][0]["message"]["content"], "a");
        assert_eq!(json["object"], "chat.completion");
    }

    #[test]
    fn experts_have_the_form_of_sglang() {
        let experts = |ids: &[i32]| Some(RoutedExperts { num_layers: 2, top_k: 1, ids: ids.to_vec() });
        let choice = |ids| Choice { experts: experts(ids), ..Choice::default() };
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
    fn the_message_of_an_answer_in_channels_is_its_final_one() {
        let kind = Kind::Chat { has_channels: true };
        let mut choice = Choice::default();
        let pieces = [
            "<|channel|>",
            "analysis",
            "<|message|>",
            "hm",
            "<|end|>",
            "<|channel|>",
            "final",
            "<|message|>",
            "It",
            " is",
        ];
        let shown: Vec<String> = pieces.iter().map(|piece| choice.push(kind, 1, piece)).collect();
        assert_eq!(shown.concat(), "It is");
        assert_eq!(envelope(kind).choice(0, &choice)["message"]["content"], "It is");
    }

    #[test]
    fn chunks_of_a_chat_begin_with_the_role() {
        let envelope = Envelope { prompts: None, ..envelope(Kind::Chat { has_channels: false }) };
        let delta = Delta { choice: 0, text: "a", tokens: None, end: None, is_first: true, experts: None };
        let first = envelope.chunk(&delta, None);
        assert_eq!(first["choices"][0]["delta"], json!({"role": "assistant", "content": "a"}));
        assert!(first.get("usage").is_none());
        let last = envelope.chunk(&Delta { text: "", end: Some(End::StopToken), is_first: false, ..delta }, Some(None));
        assert_eq!(last["choices"][0], json!({"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": null}));
        assert_eq!(last["usage"], Value::Null);
        assert_eq!(envelope.usage_chunk(Usage::default())["choices"], json!([]));
    }
}
