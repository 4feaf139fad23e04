//! Calls of tools in answers, as families of models write them.
//!
//! An answer comes piece by piece. What is text is given out as it comes, except what may turn out to begin a call; a
//! call is given out once it is complete. What looks like a call but is none, or names no tool, stays text. Nothing
//! is ever carried out, and no expression runs over the text: signs are looked for as they are (CVE-2025-48887,
//! CVE-2025-9141).

use crate::json::Json;

/// The way in which a family writes calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen and many others.
    Hermes,
    /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]NAME[ARGS]{...}`.
    Mistral,
    /// The answer is `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`: Llama 3.
    Llama,
    /// `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME` and the arguments in a block of code, or without one.
    DeepSeek,
    /// The answer is a list of objects with `name` and `arguments`: an answer that was held to it.
    List,
    /// The answer is the arguments of this tool: an answer that was held to it.
    Arguments(String),
}

/// A call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// The tool.
    pub name: String,
    /// The arguments, as an object of JSON.
    pub arguments: String,
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolEvent {
    /// Text of the message.
    Text(String),
    /// A call.
    Call(ToolCall),
    /// More of the arguments of the last call.
    Arguments(String),
}

const TOOL_CALL: &str = "<tool_call>";
const TOOL_CALL_END: &str = "</tool_call>";
const TOOL_CALLS: &str = "[TOOL_CALLS]";
const ARGS: &str = "[ARGS]";
const PYTHON_TAG: &str = "<|python_tag|>";
const CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
const CALLS_END: &str = "<｜tool▁calls▁end｜>";
const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";

impl ToolFormat {
    /// Finds the way by a chat template; none where the template has no tools, or writes calls in a way that is not
    /// known.
    #[must_use]
    pub fn from_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        match () {
            () if !has("tools") => None,
            // Names and arguments in tags of their own (Qwen3-Coder, GLM).
            () if has("<function=") || has("<arg_key>") => None,
            () if has(TOOL_CALL) => Some(Self::Hermes),
            () if has(TOOL_CALLS) => Some(Self::Mistral),
            () if has(CALL_BEGIN) => Some(Self::DeepSeek),
            () if has(PYTHON_TAG) || has("\"parameters\"") || has("ipython") => Some(Self::Llama),
            () => None,
        }
    }

    /// The sign with which calls begin behind text.
    fn marker(&self) -> Option<&'static str> {
        match self {
            Self::Hermes => Some(TOOL_CALL),
            Self::Mistral => Some(TOOL_CALLS),
            Self::DeepSeek => Some(CALLS_BEGIN),
            Self::Llama | Self::List | Self::Arguments(_) => None,
        }
    }
}

/// The state of a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing has come that says what the answer is.
    Start,
    Text,
    Calls,
}

/// Reads the calls of an answer.
#[derive(Clone, Debug)]
pub struct ToolParser {
    format: ToolFormat,
    /// The tools that there are.
    names: Vec<String>,
    state: State,
    /// Text that has come and is not given out.
    pending: String,
    /// Says whether something has come behind the last look at `pending` that may end a call.
    may_end: bool,
}

impl ToolParser {
    /// A reader of an answer of a model that has these tools.
    #[must_use]
    pub fn new(format: ToolFormat, names: Vec<String>) -> Self {
        let state = match format {
            ToolFormat::List => State::Calls,
            ToolFormat::Llama | ToolFormat::Arguments(_) => State::Start,
            _ => State::Text,
        };
        Self { format, names, state, pending: String::new(), may_end: false }
    }

    /// Takes a piece of the answer and returns what is certain with it.
    pub fn push(&mut self, text: &str) -> Vec<ToolEvent> {
        self.pending += text;
        self.may_end |= text.contains(['}', ']', '>']);
        let mut events = Vec::new();
        while self.step(false, &mut events) {}
        events
    }

    /// Ends the answer and returns what was held back.
    pub fn finish(&mut self) -> Vec<ToolEvent> {
        let mut events = Vec::new();
        self.may_end = true;
        while self.step(true, &mut events) {}
        let rest = std::mem::take(&mut self.pending);
        // What is left of calls that are complete is signs and blanks.
        let is_sign = |text: &str| matches!(text.trim(), CALLS_END | ";");
        let is_only_sign = self.state == State::Calls && is_sign(&rest);
        if !rest.is_empty() && !is_only_sign {
            events.push(ToolEvent::Text(rest));
        }
        events
    }

    /// Goes on as far as is certain; returns whether there may be more.
    fn step(&mut self, is_end: bool, events: &mut Vec<ToolEvent>) -> bool {
        if self.pending.is_empty() {
            return false;
        }
        match self.state {
            State::Start => self.start(is_end, events),
            State::Text => self.text(is_end, events),
            State::Calls => match &self.format {
                ToolFormat::Arguments(_) => {
                    events.push(ToolEvent::Arguments(std::mem::take(&mut self.pending)));
                    false
                }
                ToolFormat::Hermes => self.between(TOOL_CALL, TOOL_CALL_END, events),
                ToolFormat::DeepSeek => self.between(CALL_BEGIN, CALL_END, events),
                _ => self.may_end && self.json(is_end, events),
            },
        }
    }

    fn start(&mut self, is_end: bool, events: &mut Vec<ToolEvent>) -> bool {
        if let ToolFormat::Arguments(name) = &self.format {
            events.push(ToolEvent::Call(ToolCall { name: name.clone(), arguments: String::new() }));
            self.state = State::Calls;
            return true;
        }
        let text = self.pending.trim_start();
        if let Some(rest) = text.strip_prefix(PYTHON_TAG) {
            self.pending = rest.to_owned();
            self.state = State::Calls;
        } else if text.starts_with('{') {
            self.state = State::Calls;
        } else if !is_end && PYTHON_TAG.starts_with(text) {
            return false;
        } else {
            self.state = State::Text;
        }
        true
    }

    /// Gives out text up to the sign of calls, without the blanks before it.
    fn text(&mut self, is_end: bool, events: &mut Vec<ToolEvent>) -> bool {
        let marker = self.format.marker();
        let found = marker.and_then(|marker| Some((self.pending.find(marker)?, marker)));
        let shown = match found {
            Some((start, _)) => self.pending[..start].trim_end().len(),
            None if is_end || marker.is_none() => self.pending.len(),
            None => {
                let may_begin = marker.map_or(0, |marker| common_end(&self.pending, marker));
                self.pending[..self.pending.len() - may_begin].trim_end().len()
            }
        };
        if shown > 0 {
            events.push(ToolEvent::Text(self.pending[..shown].to_owned()));
        }
        match found {
            // The sign of a single call belongs to the call.
            Some((start, TOOL_CALL)) => drop(self.pending.drain(..start)),
            Some((start, marker)) => drop(self.pending.drain(..start + marker.len())),
            None => {
                self.pending.drain(..shown);
                return false;
            }
        }
        self.state = State::Calls;
        true
    }

    /// Takes a call between two signs.
    fn between(&mut self, begin: &str, end: &str, events: &mut Vec<ToolEvent>) -> bool {
        let rest = self.pending.trim_start();
        let blanks = self.pending.len() - rest.len();
        if !rest.starts_with(begin) {
            let may_come = begin.starts_with(rest) || CALLS_END.starts_with(rest);
            if rest.starts_with(CALLS_END) {
                self.pending.drain(..blanks + CALLS_END.len());
            }
            if !may_come {
                self.state = State::Text;
            }
            return !may_come;
        }
        let Some(len) = Some(end).filter(|_| self.may_end).and_then(|end| rest.find(end)) else {
            self.may_end = false;
            return false;
        };
        let whole = blanks + len + end.len();
        let inner = &rest[begin.len()..len];
        let call = if begin == TOOL_CALL { parsed(inner) } else { deep_seek_call(inner) };
        match call.filter(|call| self.names.contains(&call.name)) {
            Some(call) => events.push(ToolEvent::Call(call)),
            None => events.push(ToolEvent::Text(self.pending[..whole].to_owned())),
        }
        self.pending.drain(..whole);
        true
    }

    /// Takes the calls of a value of JSON, once it is complete.
    fn json(&mut self, is_end: bool, events: &mut Vec<ToolEvent>) -> bool {
        self.may_end = false;
        let text = self.pending.trim_start();
        let text = text.strip_prefix([';', ',']).unwrap_or(text);
        let text = text.strip_prefix(TOOL_CALLS).unwrap_or(text);
        let value_at = text.find(['{', '[']).filter(|_| self.format == ToolFormat::Mistral && !text.starts_with('['));
        // The name stands before the arguments in later files of the family.
        let (name, value) = match value_at.or_else(|| text.find(ARGS)) {
            Some(at) if !text.starts_with(['{', '[']) || text.starts_with(ARGS) => {
                (Some(text[..at].trim()), text[at..].strip_prefix(ARGS).unwrap_or(&text[at..]))
            }
            _ => (None, text),
        };
        let mut values = serde_json::Deserializer::from_str(value).into_iter::<Json>();
        let Some(Ok(found)) = values.next() else {
            if is_end {
                self.state = State::Text;
            }
            return is_end && !self.pending.is_empty() && self.format.marker().is_none();
        };
        let len = self.pending.len() - value.len() + values.byte_offset();
        let calls: Option<Vec<ToolCall>> = match (name, &found) {
            (Some(name), _) => Some(vec![ToolCall { name: name.to_owned(), arguments: found.to_string() }]),
            (None, Json::Array(items)) => items.iter().map(call_of).collect(),
            (None, one) => call_of(one).map(|call| vec![call]),
        };
        let is_known = |calls: &Vec<ToolCall>| calls.iter().all(|call| self.names.contains(&call.name));
        match calls.filter(is_known) {
            Some(calls) => events.extend(calls.into_iter().map(ToolEvent::Call)),
            None => events.push(ToolEvent::Text(self.pending[..len].to_owned())),
        }
        self.pending.drain(..len);
        self.may_end = true;
        true
    }
}

/// Bytes at the end of a text that `marker` begins with.
fn common_end(text: &str, marker: &str) -> usize {
    let lens = (1..marker.len()).rev().filter(|&len| marker.is_char_boundary(len));
    lens.into_iter().find(|&len| text.ends_with(&marker[..len])).unwrap_or(0)
}

fn parsed(text: &str) -> Option<ToolCall> {
    call_of(&Json::parse(text.trim()).ok()?)
}

/// The call of an object with a name and arguments.
fn call_of(json: &Json) -> Option<ToolCall> {
    let name = json.get("name")?.as_str()?.to_owned();
    let arguments = match json.get("arguments").or_else(|| json.get("parameters")) {
        None => "{}".to_owned(),
        Some(Json::String(text)) => Json::parse(text).ok()?.to_string(),
        Some(object @ Json::Object(_)) => object.to_string(),
        Some(_) => return None,
    };
    Some(ToolCall { name, arguments })
}

/// The call between the signs of DeepSeek: `function`, the sign between, the name and a block of code; since V3.1 the
/// name, the sign and the arguments.
fn deep_seek_call(text: &str) -> Option<ToolCall> {
    let (kind, rest) = text.split_once(SEPARATOR)?;
    let (name, arguments) = match rest.trim_start().starts_with('{') {
        true => (kind, rest),
        false => rest.split_once('\n')?,
    };
    let arguments = arguments.trim().trim_start_matches("```json").trim_matches('`').trim();
    let arguments = Json::parse(arguments).ok().filter(|json| matches!(json, Json::Object(_)))?;
    Some(ToolCall { name: name.trim().to_owned(), arguments: arguments.to_string() })
}
