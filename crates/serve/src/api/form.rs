//! The form that answers are held to, as OpenAI, vLLM, SGLang and llama.cpp spell it.

use std::cell::OnceCell;

use moeworks_infer::constraint::{ConstraintError, Form};
use moeworks_infer::json::Json;
use serde_json::Value;

use super::fields::Fields;
use super::{ApiError, ErrorKind};

/// Bytes of an expression, a grammar or a name at most.
const MAX_BYTES: usize = 64 << 10;

/// The body of a request with the order of its keys, read where it is needed.
pub(crate) struct Ordered<'a> {
    body: &'a [u8],
    json: OnceCell<Json>,
}

impl<'a> Ordered<'a> {
    pub(crate) fn new(body: &'a [u8]) -> Self {
        Self { body, json: OnceCell::new() }
    }

    /// The value at a path of keys.
    pub(crate) fn get(&self, path: &[&str]) -> Option<&Json> {
        // A body that is no JSON has been refused before.
        let json = self.json.get_or_init(|| Json::parse(self.body).unwrap_or_default());
        path.iter().try_fold(json, |json, key| json.get(key))
    }
}

/// The form that answers are held to, with the field that says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormRequest {
    /// The name of the field.
    pub field: String,
    /// The form.
    pub kind: FormKind,
}

/// A form of answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FormKind {
    /// Any object of JSON.
    JsonObject,
    /// The values of a schema.
    Schema(Json),
    /// The texts of a regular expression.
    Regex(String),
    /// The texts of a grammar.
    Grammar(String),
    /// One of some texts.
    Choice(Vec<String>),
}

impl FormRequest {
    /// Takes the form of a request, which may be spelled in several ways but is one.
    pub(super) fn take(fields: &mut Fields, ordered: &Ordered<'_>) -> Result<Option<Self>, ApiError> {
        // A hint at how other servers should do it.
        fields.ignore(&["guided_decoding_backend"]);
        fields.refuse(&["guided_whitespace_pattern", "structural_tag"])?;
        let mut found = Vec::new();
        found.extend(response_format(fields, ordered)?);
        found.extend(structured_outputs(fields, ordered)?);
        for name in ["json_schema", "guided_json"] {
            if let Some(value) = fields.take(name) {
                found.push(Self::new(name, schema(fields, name, &value, ordered.get(&[name]))?));
            }
        }
        for name in ["regex", "guided_regex"] {
            found.extend(fields.text(name, MAX_BYTES)?.map(|text| Self::new(name, FormKind::Regex(text))));
        }
        for name in ["grammar", "ebnf", "guided_grammar"] {
            found.extend(fields.text(name, MAX_BYTES)?.map(|text| Self::new(name, FormKind::Grammar(text))));
        }
        found.extend(choice(fields, "guided_choice")?);
        match &found[..] {
            [first, second, ..] => {
                let message = format!("{}: {} is given, too; an answer has one form", second.field, first.field);
                Err(ApiError::new(ErrorKind::Invalid, message).of(&second.field))
            }
            _ => Ok(found.pop()),
        }
    }

    fn new(field: &str, kind: FormKind) -> Self {
        Self { field: field.to_owned(), kind }
    }

    /// Makes the form. It takes a while where it is large.
    pub(crate) fn form(&self) -> Result<Form, ApiError> {
        self.kind.form().map_err(|error| {
            let message = format!("{}: {error}", self.field);
            ApiError::new(ErrorKind::Invalid, message).of(&self.field)
        })
    }
}

impl FormKind {
    fn form(&self) -> Result<Form, ConstraintError> {
        match self {
            Self::JsonObject => Form::json_object(),
            Self::Schema(schema) => Form::json_schema(schema),
            Self::Regex(pattern) => Form::regex(pattern),
            Self::Grammar(text) => Form::grammar(text),
            Self::Choice(texts) => Form::choice(texts),
        }
    }
}

/// Takes `response_format`: the schema stands in `json_schema.schema` (OpenAI) or `schema` (llama.cpp).
fn response_format(fields: &mut Fields, ordered: &Ordered<'_>) -> Result<Option<FormRequest>, ApiError> {
    const FIELD: &str = "response_format";
    let Some(mut format) = fields.object(FIELD)? else { return Ok(None) };
    let kind = format.take("type").unwrap_or_default();
    let of_llama_cpp = format.take("schema");
    let kind = match (kind.as_str(), of_llama_cpp) {
        (Some("text"), None) => None,
        (Some("json_object" | "json_schema"), Some(value)) => {
            Some(schema(&format, "schema", &value, ordered.get(&[FIELD, "schema"]))?)
        }
        (Some("json_object"), None) => Some(FormKind::JsonObject),
        (Some("json_schema"), None) => Some(named_schema(&mut format, ordered)?),
        _ => return Err(format.wrong("type", &kind, "text, json_object or json_schema")),
    };
    format.finish()?;
    Ok(kind.map(|kind| FormRequest::new(FIELD, kind)))
}

/// Takes the schema of OpenAI's `response_format`.
fn named_schema(format: &mut Fields, ordered: &Ordered<'_>) -> Result<FormKind, ApiError> {
    let named = format.object("json_schema")?;
    let mut named = named.ok_or_else(|| format.wrong("json_schema", &Value::Null, "an object with a schema"))?;
    // Every schema is followed strictly.
    named.bool("strict")?;
    named.text("name", MAX_BYTES)?;
    named.text("description", MAX_BYTES)?;
    let value = named.take("schema").unwrap_or_else(|| Value::Object(serde_json::Map::new()));
    let found = ordered.get(&["response_format", "json_schema", "schema"]);
    let kind = schema(&named, "schema", &value, found)?;
    named.finish()?;
    Ok(kind)
}

/// Takes vLLM's `structured_outputs`.
fn structured_outputs(fields: &mut Fields, ordered: &Ordered<'_>) -> Result<Vec<FormRequest>, ApiError> {
    const FIELD: &str = "structured_outputs";
    let Some(mut outputs) = fields.object(FIELD)? else { return Ok(Vec::new()) };
    outputs.refuse(&["structural_tag", "whitespace_pattern", "disable_additional_properties"])?;
    outputs.ignore(&["disable_fallback", "disable_any_whitespace"]);
    let mut found = Vec::new();
    if let Some(value) = outputs.take("json") {
        let kind = schema(&outputs, "json", &value, ordered.get(&[FIELD, "json"]))?;
        found.push(FormRequest::new("structured_outputs.json", kind));
    }
    if outputs.bool("json_object")? == Some(true) {
        found.push(FormRequest::new("structured_outputs.json_object", FormKind::JsonObject));
    }
    let regex = outputs.text("regex", MAX_BYTES)?.map(FormKind::Regex);
    found.extend(regex.map(|kind| FormRequest::new("structured_outputs.regex", kind)));
    let grammar = outputs.text("grammar", MAX_BYTES)?.map(FormKind::Grammar);
    found.extend(grammar.map(|kind| FormRequest::new("structured_outputs.grammar", kind)));
    found.extend(choice(&mut outputs, "choice")?);
    outputs.finish()?;
    Ok(found)
}

/// Reads a schema, which may be an object or its text.
fn schema(fields: &Fields, name: &str, value: &Value, ordered: Option<&Json>) -> Result<FormKind, ApiError> {
    match (value, ordered) {
        (Value::String(text), _) => Json::parse(text)
            .map(FormKind::Schema)
            .map_err(|_| fields.wrong(name, value, "a schema of JSON, or its text")),
        (Value::Object(_) | Value::Bool(_), Some(json)) => Ok(FormKind::Schema(json.clone())),
        _ => Err(fields.wrong(name, value, "a schema of JSON, or its text")),
    }
}

/// Takes texts to choose from.
fn choice(fields: &mut Fields, name: &str) -> Result<Option<FormRequest>, ApiError> {
    let Some(value) = fields.take(name) else { return Ok(None) };
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let texts: Option<Vec<String>> = value.as_array().and_then(|values| values.iter().map(text).collect());
    let texts = texts.ok_or_else(|| fields.wrong(name, &value, "a list of texts"))?;
    Ok(Some(FormRequest::new(&fields.name(name), FormKind::Choice(texts))))
}
