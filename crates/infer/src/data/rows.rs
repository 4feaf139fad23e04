//! The rows of a file, with or without a text, and counts of those without.

use std::borrow::Cow;
use std::ops::ControlFlow;

use super::input::Input;
use super::notes::Note;
use super::sources::Visit;
use super::{DataError, text};

/// The number of rows that may lack the field at the start of a file before the file is refused.
const PATIENCE: u64 = 1000;

/// Fields of conversations, which are not plain text.
const CONVERSATIONS: [&str; 4] = ["messages", "conversations", "conversation", "chat"];

/// A row of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Row<'t> {
    /// The row has a text.
    Text(Cow<'t, str>),
    /// The text is null.
    Null,
    /// The row lacks the field; these are some of its fields.
    Missing(Vec<String>),
    /// The field holds a value of this other kind.
    Wrong(&'static str),
    /// The row is a value of this other kind instead of an object.
    Other(&'static str),
}

impl Row<'_> {
    pub(super) fn into_owned(self) -> Row<'static> {
        match self {
            Row::Text(text) => Row::Text(Cow::Owned(text.into_owned())),
            Row::Null => Row::Null,
            Row::Missing(fields) => Row::Missing(fields),
            Row::Wrong(kind) => Row::Wrong(kind),
            Row::Other(kind) => Row::Other(kind),
        }
    }
}

/// The state of reading the rows of a file.
pub(super) struct Rows<'a> {
    input: Input<'a>,
    num_with_field: u64,
    num_missing: u64,
    /// The place and the fields of the first row without the field.
    first_missing: Option<(String, Vec<String>)>,
}

impl<'a> Rows<'a> {
    pub(super) fn new(input: Input<'a>) -> Self {
        Self { input, num_with_field: 0, num_missing: 0, first_missing: None }
    }

    /// Passes the text of a row to `visit`, or counts why it has none.
    pub(super) fn take(
        &mut self,
        row: Row<'_>,
        place: &dyn Fn() -> String,
        visit: &mut Visit<'_>,
    ) -> Result<ControlFlow<()>, DataError> {
        let input = self.input;
        let wrong = |problem| Err(DataError::Format { path: input.path.into(), place: place(), problem });
        self.num_with_field += u64::from(!matches!(row, Row::Missing(_)));
        match row {
            Row::Text(text) if text.is_empty() => input.note(Note::EmptyText, place),
            Row::Text(text) => return text::give(&text, &input, visit),
            Row::Null => input.note(Note::NullText, place),
            Row::Missing(fields) => {
                input.note(Note::MissingText, place);
                self.first_missing.get_or_insert_with(|| (place(), fields));
                self.num_missing += 1;
                if self.num_with_field == 0 && self.num_missing >= PATIENCE {
                    return self.without_field().map_or(Ok(ControlFlow::Continue(())), Err);
                }
            }
            Row::Wrong(kind) => return wrong(format!("field \"{}\" is {kind}; must be text", input.field)),
            Row::Other(kind) => {
                let field = input.field;
                return wrong(format!("is {kind}; must be an object with the text in field \"{field}\""));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Fails if no row had the field.
    pub(super) fn end(&mut self) -> Result<(), DataError> {
        if self.num_with_field == 0 { self.without_field().map_or(Ok(()), Err) } else { Ok(()) }
    }

    /// Returns the error of a file in which no row has the field.
    fn without_field(&mut self) -> Option<DataError> {
        let (place, fields) = self.first_missing.take()?;
        let is_chat = fields.iter().any(|field| CONVERSATIONS.contains(&&**field));
        let names = if fields.is_empty() { "none".into() } else { fields.join(", ") };
        let hint = if is_chat { "conversations are not read, only text: write each as one; " } else { "" };
        let field = self.input.field;
        let problem = format!("no field \"{field}\" (fields: {names}); {hint}data.text_field names the one to use");
        Some(DataError::Format { path: self.input.path.into(), place, problem })
    }
}
