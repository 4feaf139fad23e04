//! An answer as far as it has come: its text as it is shown, and its calls of tools.

use moeworks_infer::chat::{ToolCall, ToolEvent, ToolParser, final_message};
use moeworks_infer::generation::{End, TokenLogprobs};
use serde_json::{Value, json};

use super::reply::Kind;
use crate::engine::PromptOutput;
use crate::experts::RoutedExperts;

/// An answer as far as it has come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Choice {
    /// The text as it came.
    text: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) end: Option<End>,
    /// Log-probabilities of the tokens, where they are wanted.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// Facts about the prompt.
    pub(crate) prompt: PromptOutput,
    /// The experts of the tokens so far, where they are wanted.
    pub(crate) experts: Option<RoutedExperts>,
    /// Bytes of the shown text that were returned in pieces.
    num_shown: usize,
    tools: Option<ChoiceTools>,
}

/// The calls of tools in an answer.
#[derive(Clone, Debug)]
struct ChoiceTools {
    parser: ToolParser,
    /// Calls at most; further ones are left out.
    most: usize,
    calls: Vec<ToolCall>,
    /// Says whether the call under way is left out.
    is_beyond: bool,
    /// The text without them.
    text: String,
}

/// A token of an answer.
#[derive(Clone, Debug)]
pub(crate) struct NewToken<'a> {
    pub(crate) id: u32,
    pub(crate) text: &'a str,
    pub(crate) end: Option<End>,
}

/// The parts of an answer that a token shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shown {
    pub(crate) text: String,
    pub(crate) calls: Vec<CallDelta>,
}

/// A call that begins, or goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CallDelta {
    /// Its number among those of the answer.
    pub(crate) index: usize,
    /// The name of the tool, where the call begins. Its arguments are empty then.
    pub(crate) name: Option<String>,
    pub(crate) arguments: String,
}

impl Choice {
    /// An empty answer whose calls a parser reads, up to `most`.
    pub(crate) fn with_tools(parser: ToolParser, most: usize) -> Self {
        let tools = ChoiceTools { parser, most, calls: Vec::new(), is_beyond: false, text: String::new() };
        Self { tools: Some(tools), ..Self::default() }
    }

    /// Adds a token and returns what is to be shown for it.
    pub(crate) fn push(&mut self, kind: Kind, token: &NewToken<'_>) -> Shown {
        self.tokens.push(token.id);
        self.end = token.end;
        if let Some(tools) = &mut self.tools {
            return tools.push(token.text, token.end.is_some());
        }
        self.text += token.text;
        let Kind::Chat { has_channels: true } = kind else {
            return Shown { text: token.text.to_owned(), calls: Vec::new() };
        };
        let shown = final_message(&self.text);
        let text = shown.get(self.num_shown..).unwrap_or_default().to_owned();
        self.num_shown = self.num_shown.max(shown.len());
        Shown { text, calls: Vec::new() }
    }

    /// The text that is shown.
    pub(crate) fn shown(&self, kind: Kind) -> &str {
        match (kind, &self.tools) {
            (_, Some(tools)) => &tools.text,
            (Kind::Chat { has_channels: true }, None) => final_message(&self.text),
            _ => &self.text,
        }
    }

    /// The calls so far.
    pub(crate) fn calls(&self) -> &[ToolCall] {
        self.tools.as_ref().map_or(&[], |tools| &tools.calls)
    }

    /// The reason why the answer ended, in the words of the API; none while it goes on.
    pub(crate) fn finish_reason(&self) -> Option<&'static str> {
        match self.end? {
            End::StopToken | End::StopText if !self.calls().is_empty() => Some("tool_calls"),
            End::StopToken | End::StopText => Some("stop"),
            End::Limit => Some("length"),
            End::Interrupted => Some("abort"),
        }
    }
}

impl ChoiceTools {
    fn push(&mut self, text: &str, is_last: bool) -> Shown {
        let mut events = self.parser.push(text);
        if is_last {
            events.extend(self.parser.finish());
        }
        let mut shown = Shown::default();
        for event in events {
            match event {
                ToolEvent::Text(text) => {
                    self.text += &text;
                    shown.text += &text;
                }
                ToolEvent::Call(name) => {
                    self.is_beyond = self.calls.len() >= self.most;
                    if !self.is_beyond {
                        let index = self.calls.len();
                        self.calls.push(ToolCall { name: name.clone(), arguments: String::new() });
                        shown.calls.push(CallDelta { index, name: Some(name), arguments: String::new() });
                    }
                }
                ToolEvent::Arguments(_) if self.is_beyond => {}
                ToolEvent::Arguments(more) => {
                    let index = self.calls.len().saturating_sub(1);
                    if let Some(call) = self.calls.last_mut() {
                        call.arguments += &more;
                    }
                    shown.calls.push(CallDelta { index, name: None, arguments: more });
                }
            }
        }
        shown
    }
}

/// The answer's place among all calls: ids of calls are made of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallPlace<'a> {
    /// The id of the request's answers.
    pub(crate) id: &'a str,
    pub(crate) choice: usize,
}

impl CallPlace<'_> {
    /// The id of a call. Templates of Mistral want nine letters and digits.
    fn call_id(self, index: usize) -> String {
        let hash = blake3::hash(format!("{}/{}/{index}", self.id, self.choice).as_bytes());
        hash.to_hex()[..9].to_owned()
    }

    /// The calls of a whole message.
    pub(crate) fn whole(self, calls: &[ToolCall]) -> Value {
        let one = |(index, call): (usize, &ToolCall)| {
            let ToolCall { name, arguments } = call;
            json!({"id": self.call_id(index), "type": "function", "function": {"name": name, "arguments": arguments}})
        };
        calls.iter().enumerate().map(one).collect()
    }

    /// The call of a piece.
    pub(crate) fn piece(self, call: &CallDelta) -> Value {
        let CallDelta { index, name, arguments } = call;
        match name {
            Some(name) => json!([{"index": index, "id": self.call_id(*index), "type": "function",
                                  "function": {"name": name, "arguments": arguments}}]),
            None => json!([{"index": index, "function": {"arguments": arguments}}]),
        }
    }
}

#[cfg(test)]
mod tests {
    use moeworks_infer::chat::ToolFormat;

    use super::*;

    fn push(choice: &mut Choice, text: &str, end: Option<End>) -> Shown {
        choice.push(Kind::Chat { has_channels: false }, &NewToken { id: 1, text, end })
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
        let new = |text| NewToken { id: 1, text, end: None };
        let shown: Vec<String> = pieces.iter().map(|piece| choice.push(kind, &new(piece)).text).collect();
        assert_eq!((shown.concat().as_str(), choice.shown(kind)), ("It is", "It is"));
    }

    #[test]
    fn calls_end_an_answer_that_stops_by_itself_and_further_ones_are_left_out() {
        let parser = ToolParser::new(ToolFormat::Hermes, vec!["f".into()]);
        let mut choice = Choice::with_tools(parser, 1);
        let call = "<tool_call>{\"name\": \"f\"}</tool_call>";
        assert_eq!(push(&mut choice, "Hm. <tool", None).text, "Hm.");
        let shown = push(&mut choice, &format!("{}{call}", &call[5..]), None);
        let begin = CallDelta { name: Some("f".into()), ..CallDelta::default() };
        let more = CallDelta { arguments: "{}".into(), ..CallDelta::default() };
        assert_eq!(shown, Shown { text: String::new(), calls: vec![begin, more] });
        assert_eq!(choice.calls(), [ToolCall { name: "f".into(), arguments: "{}".into() }]);
        assert_eq!(choice.finish_reason(), None);
        push(&mut choice, "", Some(End::StopToken));
        assert_eq!((choice.finish_reason(), choice.calls().len()), (Some("tool_calls"), 1));
        choice.end = Some(End::Limit);
        assert_eq!(choice.finish_reason(), Some("length"));
    }
}
