//! A call read character by character: its arguments are given out as they come.

use super::scanner::{Malformed, Part, Scanner};
use super::{Events, Json};

/// The text is no call of a tool that there is, or is none from here on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotACall;

impl From<Malformed> for NotACall {
    fn from(_: Malformed) -> Self {
        Self
    }
}

/// A reader of the object of a call.
#[derive(Clone, Debug)]
pub(super) struct CallReader {
    scanner: Scanner,
    /// The tool, once it is known to be one of those that there are.
    name: Option<String>,
    /// Says whether the object is the arguments; else it has a name and arguments.
    is_arguments: bool,
    /// Says whether the call was given out.
    has_begun: bool,
    /// Says whether the member under way is given out as it comes.
    is_streaming: bool,
    /// The key of the member under way, in quotes.
    key: String,
    /// The value of the member under way.
    value: String,
    /// Arguments that came before the name, or as a text.
    arguments: Option<String>,
}

impl CallReader {
    /// A reader of an object with a name and arguments.
    pub(super) fn object() -> Self {
        Self {
            scanner: Scanner::new(),
            name: None,
            is_arguments: false,
            has_begun: false,
            is_streaming: false,
            key: String::new(),
            value: String::new(),
            arguments: None,
        }
    }

    /// A reader of the arguments of a tool.
    pub(super) fn arguments(name: String) -> Self {
        Self { name: Some(name), is_arguments: true, ..Self::object() }
    }

    /// Says whether the call was given out. What comes from then on is its own.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Takes a character; returns whether the object is complete.
    pub(super) fn push(&mut self, c: char, names: &[String], events: &mut Events) -> Result<bool, NotACall> {
        let before = self.scanner.depth();
        let part = self.scanner.push(c)?;
        let depth = before.max(self.scanner.depth());
        match (depth, part) {
            (_, Part::Blank) => {}
            _ if self.is_arguments => {
                self.begin(events)?;
                events.add_arguments(&escaped(c));
            }
            (1, Part::Key) => self.key.push(c),
            (1, Part::Mark) if c == '{' || c == ':' => {}
            (1, Part::Mark) => self.end_member(names)?,
            _ => self.add_value(c, events)?,
        }
        let is_complete = self.scanner.depth() == 0;
        if is_complete && !self.has_begun {
            self.begin(events)?;
            events.add_arguments(self.arguments.as_deref().unwrap_or("{}"));
        }
        Ok(is_complete)
    }

    /// Gives out the call, if that was not done before.
    fn begin(&mut self, events: &mut Events) -> Result<(), NotACall> {
        if !self.has_begun {
            events.add_call(self.name.clone().ok_or(NotACall)?);
            self.has_begun = true;
        }
        Ok(())
    }

    fn has_arguments_key(&self) -> bool {
        matches!(self.key.as_str(), "\"arguments\"" | "\"parameters\"")
    }

    /// Takes a character of a member's value.
    fn add_value(&mut self, c: char, events: &mut Events) -> Result<(), NotACall> {
        let is_first = self.value.is_empty() && !self.is_streaming;
        let may_begin = self.name.is_some() && self.arguments.is_none() && !self.has_begun;
        if is_first && c == '{' && may_begin && self.has_arguments_key() {
            self.begin(events)?;
            self.is_streaming = true;
        }
        if self.is_streaming {
            events.add_arguments(&escaped(c));
        } else {
            self.value += &escaped(c);
        }
        Ok(())
    }

    /// Ends the member under way, if there is one.
    fn end_member(&mut self, names: &[String]) -> Result<(), NotACall> {
        let (is_arguments, key) = (self.has_arguments_key(), std::mem::take(&mut self.key));
        let value = std::mem::take(&mut self.value);
        if std::mem::take(&mut self.is_streaming) || self.has_begun {
            return Ok(());
        }
        if is_arguments && self.arguments.is_none() {
            self.arguments = Some(held_arguments(value)?);
        } else if key == "\"name\"" {
            let name: String = serde_json::from_str(&value).map_err(|_| NotACall)?;
            if self.name.is_some() || !names.contains(&name) {
                return Err(NotACall);
            }
            self.name = Some(name);
        }
        Ok(())
    }
}

/// Arguments that are an object, or the text of a value.
fn held_arguments(value: String) -> Result<String, NotACall> {
    if value.starts_with('{') {
        return Ok(value);
    }
    let text: String = serde_json::from_str(&value).map_err(|_| NotACall)?;
    Json::parse(text).map(|json| json.to_string()).map_err(|_| NotACall)
}

/// A character as it stands in JSON. Control characters are only let through in texts, where they have to be escaped.
fn escaped(c: char) -> String {
    match c {
        '\n' => "\\n".to_owned(),
        '\t' => "\\t".to_owned(),
        '\r' => "\\r".to_owned(),
        c if u32::from(c) < 0x20 => format!("\\u{:04x}", u32::from(c)),
        c => c.into(),
    }
}
