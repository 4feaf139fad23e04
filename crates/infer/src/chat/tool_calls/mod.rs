//! Calls of tools in answers, as families of models write them.
//!
//! An answer comes piece by piece, and is read character by character: the events do not depend on how it is cut.
//! Text is given out as it comes, except what may turn out to begin a call. A call is given out once its tool is
//! known and its arguments begin, and they follow as they come, without the blanks between their parts. What looks
//! like a call but is none, or names no tool, stays text. Nothing is ever carried out, and no expression runs over
//! the text: signs are looked for as they are (CVE-2025-48887, CVE-2025-9141).

mod reader;
mod scanner;

use self::reader::{CallReader, NotACall};
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
    /// The arguments, as an object of JSON. Where the answer breaks off, they do, too.
    pub arguments: String,
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolEvent {
    /// Text of the message.
    Text(String),
    /// The beginning of a call of this tool. Its arguments follow.
    Call(String),
    /// More of the arguments of the last call.
    Arguments(String),
}

/// The events of a piece of an answer; those of a kind in a row are one.
#[derive(Clone, Debug, Default)]
struct Events(Vec<ToolEvent>);

impl Events {
    fn add_text(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(ToolEvent::Text(last)) => *last += text,
            _ => self.0.push(ToolEvent::Text(text.to_owned())),
        }
    }

    fn add_call(&mut self, name: String) {
        self.0.push(ToolEvent::Call(name));
    }

    fn add_arguments(&mut self, text: &str) {
        match self.0.last_mut() {
            Some(ToolEvent::Arguments(last)) => *last += text,
            _ => self.0.push(ToolEvent::Arguments(text.to_owned())),
        }
    }
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
const CODE: &str = "```";
const CALL_ID: &str = "[CALL_ID]";

/// Bytes between the sign of a call and its arguments at most: there is a name, and perhaps an id.
const MAX_HEADER: usize = 512;

/// The part that follows a sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Another sign.
    Sign,
    /// Another sign, outside of the list of calls.
    EndOfList,
    /// The name of a tool, or nothing, before an object.
    Header,
    /// The rest of an object whose first bracket is the sign.
    Object,
}

type Signs = &'static [(&'static str, Next)];

/// Signs of each family. The first character of a sign is nowhere else in it, so that a sign that breaks off can only
/// go on as another one at the character that breaks it.
const HERMES: Signs = &[(TOOL_CALL, Next::Header), (TOOL_CALL_END, Next::Sign)];
const MISTRAL: Signs = &[(TOOL_CALLS, Next::Header)];
const LLAMA: Signs = &[("{", Next::Object), (";", Next::Sign), (",", Next::Sign), (PYTHON_TAG, Next::Sign)];
const LIST: Signs = &[("[", Next::Sign), ("{", Next::Object), (",", Next::Sign), ("]", Next::EndOfList)];
const DEEP_SEEK: Signs = &[
    (CALLS_BEGIN, Next::Sign),
    (CALL_BEGIN, Next::Header),
    (CODE, Next::Sign),
    (CALL_END, Next::Sign),
    (CALLS_END, Next::Sign),
];

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

    /// The signs with which calls begin behind text.
    fn first_signs(&self) -> Signs {
        match self {
            Self::Hermes => &HERMES[..1],
            Self::Mistral => MISTRAL,
            Self::DeepSeek => &DEEP_SEEK[..2],
            Self::Llama | Self::List | Self::Arguments(_) => &[],
        }
    }

    /// The signs before, between and behind calls.
    fn signs(&self, is_list: bool) -> Signs {
        match self {
            _ if is_list => LIST,
            Self::Hermes => HERMES,
            Self::Mistral => MISTRAL,
            Self::DeepSeek => DEEP_SEEK,
            Self::Llama => LLAMA,
            Self::List | Self::Arguments(_) => &[],
        }
    }
}

/// The state of a reader.
#[derive(Clone, Debug)]
enum State {
    /// Text, up to a sign.
    Text,
    /// Blanks and signs before, between and behind calls.
    Signs,
    /// The name of a tool, which begins at this byte of the text held back.
    Header(usize),
    /// A call.
    Call(Box<CallReader>),
    /// The arguments of the only call there is.
    Arguments,
}

/// The result of looking for a sign.
enum Found {
    /// There may be one.
    Part,
    /// There is one.
    Sign(Next),
    /// There is none.
    Nothing,
}

/// Reads the calls of an answer.
#[derive(Clone, Debug)]
pub struct ToolParser {
    format: ToolFormat,
    /// The tools that there are.
    names: Vec<String>,
    state: State,
    /// Text that has come and is not given out: it may be part of a call.
    held: String,
    /// The byte of `held` at which the sign under way begins.
    sign_at: usize,
    /// Says whether the calls are a list.
    is_list: bool,
    /// Says whether a call came since the last text.
    has_call: bool,
}

impl ToolParser {
    /// A reader of an answer of a model that has these tools.
    #[must_use]
    pub fn new(format: ToolFormat, names: Vec<String>) -> Self {
        let is_list = format == ToolFormat::List;
        let state = if is_list || format == ToolFormat::Llama { State::Signs } else { State::Text };
        Self { format, names, state, held: String::new(), sign_at: 0, is_list, has_call: false }
    }

    /// Takes a piece of the answer and returns what is certain with it.
    pub fn push(&mut self, text: &str) -> Vec<ToolEvent> {
        let mut events = Events::default();
        text.chars().for_each(|c| self.take(c, &mut events));
        events.0
    }

    /// Ends the answer and returns what was held back.
    pub fn finish(&mut self) -> Vec<ToolEvent> {
        let mut events = Events::default();
        // Blanks behind calls are no text.
        let is_end_of_calls = self.has_call && matches!(self.state, State::Signs) && self.held.trim().is_empty();
        if !is_end_of_calls {
            events.add_text(&self.held);
        }
        self.held.clear();
        events.0
    }

    fn take(&mut self, c: char, events: &mut Events) {
        match &mut self.state {
            State::Text => self.text(c, events),
            State::Signs => self.sign(c, events),
            &mut State::Header(start) => self.header(start, c, events),
            State::Call(_) => self.call(c, events),
            State::Arguments => events.add_arguments(c.encode_utf8(&mut [0; 4])),
        }
    }

    /// Gives out text up to the sign of calls, without the blanks before it.
    fn text(&mut self, c: char, events: &mut Events) {
        if let ToolFormat::Arguments(name) = &self.format {
            events.add_call(name.clone());
            self.state = State::Arguments;
            return self.take(c, events);
        }
        match self.find(c, self.format.first_signs()) {
            Found::Part => {}
            Found::Sign(next) => {
                self.has_call = false;
                self.follow(next, events);
            }
            Found::Nothing => {
                let is_in_sign = self.sign_at < self.held.len();
                self.give_out_as_text(events);
                if is_in_sign {
                    self.take(c, events);
                } else {
                    events.add_text(c.encode_utf8(&mut [0; 4]));
                }
            }
        }
    }

    /// Takes a character before, between or behind calls.
    fn sign(&mut self, c: char, events: &mut Events) {
        match self.find(c, self.format.signs(self.is_list)) {
            Found::Part => {}
            Found::Sign(next) => self.follow(next, events),
            Found::Nothing => {
                self.give_out_as_text(events);
                self.take(c, events);
            }
        }
    }

    /// Looks for one of `signs` in the text held back and the next character, which is held back, too, unless there
    /// is none.
    fn find(&mut self, c: char, signs: Signs) -> Found {
        let begun = &self.held[self.sign_at..];
        if begun.is_empty() && c.is_whitespace() {
            self.held.push(c);
            self.sign_at = self.held.len();
            return Found::Part;
        }
        let rest_of = |sign: &'static str| sign.strip_prefix(begun)?.strip_prefix(c);
        let Some((rest, next)) = signs.iter().find_map(|&(sign, next)| Some((rest_of(sign)?, next))) else {
            return Found::Nothing;
        };
        self.held.push(c);
        if rest.is_empty() { Found::Sign(next) } else { Found::Part }
    }

    /// Goes on behind a sign.
    fn follow(&mut self, next: Next, events: &mut Events) {
        if self.has_call {
            self.held.clear();
        }
        self.sign_at = self.held.len();
        self.is_list &= next != Next::EndOfList;
        self.state = match next {
            Next::Sign | Next::EndOfList => State::Signs,
            Next::Header => State::Header(self.held.len()),
            Next::Object => {
                self.held.truncate(self.held.len().saturating_sub(1));
                self.sign_at = 0;
                State::Call(Box::new(CallReader::object()))
            }
        };
        if next == Next::Object {
            self.take('{', events);
        }
    }

    /// Takes a character between the sign of a call and its object.
    fn header(&mut self, start: usize, c: char, events: &mut Events) {
        let header = &self.held[start..];
        if c == '[' && self.format == ToolFormat::Mistral && header.trim().is_empty() {
            self.is_list = true;
            self.held.push(c);
            return self.follow(Next::Sign, events);
        }
        let may_go_on = header.len() < MAX_HEADER && (self.format != ToolFormat::Hermes || c.is_whitespace());
        let reader = if c == '{' { self.reader(header) } else { None };
        match reader {
            Some(reader) => {
                self.state = State::Call(Box::new(reader));
                self.take(c, events);
            }
            None if may_go_on && c != '{' => self.held.push(c),
            None => {
                self.give_out_as_text(events);
                self.take(c, events);
            }
        }
    }

    /// The reader of the object behind a header; none if that names no tool.
    fn reader(&self, header: &str) -> Option<CallReader> {
        let name = match self.format {
            ToolFormat::Hermes => return Some(CallReader::object()),
            ToolFormat::DeepSeek => deep_seek_name(header)?,
            _ => {
                let name = header.split_once(ARGS).map_or(header, |(name, _)| name);
                name.split_once(CALL_ID).map_or(name, |(name, _)| name).trim()
            }
        };
        self.names.iter().find(|known| *known == name).cloned().map(CallReader::arguments)
    }

    /// Takes a character of a call.
    fn call(&mut self, c: char, events: &mut Events) {
        let State::Call(reader) = &mut self.state else { return };
        match reader.push(c, &self.names, events) {
            Ok(is_complete) => {
                if reader.has_begun() {
                    self.has_call = true;
                    self.held.clear();
                } else {
                    self.held.push(c);
                }
                if is_complete {
                    (self.state, self.sign_at) = (State::Signs, 0);
                }
            }
            Err(NotACall) => {
                self.give_out_as_text(events);
                self.take(c, events);
            }
        }
    }

    /// Gives out what was held back: it is text, as what follows is.
    fn give_out_as_text(&mut self, events: &mut Events) {
        events.add_text(&self.held);
        self.held.clear();
        self.sign_at = 0;
        self.is_list = false;
        self.state = State::Text;
    }
}

/// The name in the header of a call of DeepSeek: `function`, the sign between, the name and the begin of a block of
/// code; since V3.1 the name and the sign.
fn deep_seek_name(header: &str) -> Option<&str> {
    let (kind, rest) = header.split_once(SEPARATOR)?;
    let name = rest.split_once(CODE).map_or(rest, |(name, _)| name).trim();
    Some(if name.is_empty() { kind.trim() } else { name })
}
