//! The template engine, with the additions of `transformers` to Jinja.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, escape_formatter};
use minijinja_contrib::globals::{cycler, joiner};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::Map;

use super::clock::strftime_now;
use super::python::{float, string_method, to_json};
use super::{ChatError, MAX_BYTES, MAX_STEPS, Message, RenderOptions};

/// Renders a template.
pub(super) fn render(
    source: &str,
    tokens: &Map<String, serde_json::Value>,
    messages: &[Message],
    options: &RenderOptions,
) -> Result<String, ChatError> {
    let mut context: BTreeMap<&str, Value> =
        options.variables.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))).collect();
    context.extend(tokens.iter().filter_map(|(name, token)| Some((name.as_str(), token.as_str()?.into()))));
    context.extend([
        ("messages", Value::from(Serde(messages))),
        ("add_generation_prompt", options.add_generation_prompt.into()),
        ("tools", ().into()),
        ("documents", ().into()),
    ]);
    let source = without_generation_tags(&with_plain_line_ends(source));
    let environment = environment();
    let mut text = Bounded(Vec::new());
    environment
        .template_from_str(&source)
        .and_then(|template| template.render_captured_to(context, &mut text).map(|_| ()))
        .map_err(|error| failure(&error))?;
    String::from_utf8(text.0).map_err(|_| ChatError::Fails { line: None, reason: "its text is not UTF-8".into() })
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    // The delimiters are the default ones: the configuration cannot fail.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        environment.set_syntax(syntax);
    }
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", to_json);
    environment.add_filter("wordcount", |text: Cow<'_, str>| text.split_whitespace().count());
    environment.add_function("cycler", |items: Rest<Value>| cycler(items.0));
    environment.add_function("joiner", joiner);
    environment.set_formatter(|output, state, value| {
        let is_float = value.kind() == ValueKind::Number && !value.is_integer();
        match f64::try_from(value.clone()) {
            Ok(number) if is_float => Ok(output.write_str(&float(number))?),
            _ => escape_formatter(output, state, value),
        }
    });
    // The engine counts `none` as iterable, Python does not.
    environment.add_test("iterable", |value: &Value| {
        value.as_str().is_some() || (!value.is_none() && value.try_iter().is_ok())
    });
    environment.add_function("strftime_now", |format: Cow<'_, str>| {
        strftime_now(&format).map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
    });
    environment.add_function("raise_exception", |message: Cow<'_, str>| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.into_owned()))
    });
    environment
}

/// Calls a method of Python that the engine lacks.
fn method(state: &mut State<'_, '_>, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let own = value.as_str().and_then(|text| string_method(text, method, arguments));
    own.unwrap_or_else(|| unknown_method_callback(state, value, method, arguments))
}

fn failure(error: &Error) -> ChatError {
    match error.kind() {
        ErrorKind::OutOfFuel => ChatError::Endless,
        ErrorKind::WriteFailure => ChatError::TooLong,
        kind => {
            let reason = match error.detail() {
                Some(detail) if kind == ErrorKind::InvalidOperation => detail.to_owned(),
                Some(detail) => format!("{kind}: {detail}"),
                None => kind.to_string(),
            };
            ChatError::Fails { line: error.line(), reason }
        }
    }
}

/// A buffer for text up to the allowed length.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Converts all line ends to line feeds, as Jinja does when it reads a template.
fn with_plain_line_ends(source: &str) -> Cow<'_, str> {
    if source.contains('\r') { source.replace("\r\n", "\n").replace('\r', "\n").into() } else { source.into() }
}

/// Replaces `{% generation %}` and `{% endgeneration %}`, by which `transformers` marks the model's messages, with
/// tags that do nothing except keep the white-space control of the marks.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(end) = rest[start..].find("%}").map(|end| start + end + 2) else { break };
        let inner = &rest[start + 2..end - 2];
        let is_sign = |c| matches!(c, '-' | '+');
        let word = inner.trim_matches(|c: char| is_sign(c) || c.is_whitespace());
        let replaced = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        result.push_str(&rest[..start + 2]);
        match replaced {
            Some(tag) => {
                let sign = |at: Option<char>| at.filter(|&c| is_sign(c)).map_or(String::new(), String::from);
                result.push_str(&format!("{} {tag} {}", sign(inner.chars().next()), sign(inner.chars().next_back())));
            }
            None => result.push_str(inner),
        }
        result.push_str("%}");
        rest = &rest[end..];
    }
    result + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_of_what_a_model_said_do_nothing() {
        let source = "a {%- generation -%} b {%- endgeneration %}{% if x %}{{ y }}{% endif %}";
        let expected = "a {%- if true -%} b {%- endif %}{% if x %}{{ y }}{% endif %}";
        assert_eq!(without_generation_tags(source), expected);
        assert_eq!(without_generation_tags("{% generation"), "{% generation");
    }
}
