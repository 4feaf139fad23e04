//! The tools of a request, and the calls in its messages.

use moeworks_infer::json::Json;
use serde_json::Value;

use super::fields::Fields;
use super::form::{FormKind, FormRequest, Ordered};
use super::{ApiError, ErrorKind};

/// Tools of a request at most.
const MAX_TOOLS: usize = 128;
/// Bytes of the name of a tool at most.
const MAX_NAME: usize = 64;
/// Bytes of the description of a tool at most.
const MAX_DESCRIPTION: usize = 64 << 10;
/// Calls of an answer that has to call something, at most.
const MAX_CALLS: u32 = 16;

/// The calls that an answer may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// None.
    #[default]
    None,
    /// Any number, also none.
    Auto,
    /// At least one.
    Required,
    /// One of this tool.
    Named(String),
}

/// The tools of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tools {
    /// The tools as they came; none where the model is not to know of them.
    pub tools: Option<Json>,
    /// Their names.
    pub names: Vec<String>,
    /// The calls that an answer may have.
    pub choice: ToolChoice,
    /// Says whether an answer may have several calls.
    pub are_parallel: bool,
}

impl Tools {
    /// Takes the tools of a request.
    pub(super) fn take(fields: &mut Fields, ordered: &Ordered<'_>) -> Result<Self, ApiError> {
        let names = names(fields)?;
        let choice = choice(fields, &names)?;
        let are_parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
        let has_tools = choice != ToolChoice::None;
        let tools = ordered.get(&["tools"]).filter(|_| has_tools).cloned();
        Ok(Self { tools, names, choice, are_parallel })
    }

    /// The form of an answer that has to be a call.
    pub(crate) fn form(&self) -> Option<FormRequest> {
        let tools = self.tools.as_ref().map_or(&[][..], Json::items);
        let schema = match &self.choice {
            ToolChoice::None | ToolChoice::Auto => return None,
            ToolChoice::Named(name) => {
                let is_named = |tool: &&Json| name_of(tool).and_then(Json::as_str) == Some(name);
                parameters(tools.iter().find(is_named)?)
            }
            ToolChoice::Required => calls_schema(tools, if self.are_parallel { MAX_CALLS } else { 1 }),
        };
        Some(FormRequest { field: "tools".to_owned(), kind: FormKind::Schema(schema) })
    }
}

fn name_of(tool: &Json) -> Option<&Json> {
    tool.get("function")?.get("name")
}

/// The schema of a tool's arguments.
fn parameters(tool: &Json) -> Json {
    let given = tool.get("function").and_then(|function| function.get("parameters"));
    // Without parameters there are no arguments.
    let none = || object([("type", "object".into()), ("additionalProperties", Json::Bool(false))]);
    given.filter(|given| **given != Json::Null).cloned().unwrap_or_else(none)
}

/// The schema of a list of calls.
fn calls_schema(tools: &[Json], most: u32) -> Json {
    let (mut definitions, mut calls) = (Vec::new(), Vec::new());
    for (index, tool) in tools.iter().enumerate() {
        let place = format!("#/$defs/{index}");
        definitions.push((index.to_string(), rebased(&parameters(tool), &place)));
        let name = name_of(tool).cloned().unwrap_or_default();
        let arguments = object([("$ref", place.as_str().into())]);
        let properties = object([("name", object([("const", name)])), ("arguments", arguments)]);
        let required = Json::Array(vec!["name".into(), "arguments".into()]);
        calls.push(object([("type", "object".into()), ("properties", properties), ("required", required)]));
    }
    object([
        ("type", "array".into()),
        ("items", object([("anyOf", Json::Array(calls))])),
        ("minItems", Json::Number(1.into())),
        ("maxItems", Json::Number(most.into())),
        ("$defs", Json::Object(definitions)),
    ])
}

fn object<const N: usize>(entries: [(&str, Json); N]) -> Json {
    Json::Object(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

/// A schema whose references are from another place.
fn rebased(schema: &Json, place: &str) -> Json {
    match schema {
        Json::Array(items) => Json::Array(items.iter().map(|item| rebased(item, place)).collect()),
        Json::Object(entries) => {
            let entry = |(key, value): &(String, Json)| match (key.as_str(), value.as_str()) {
                ("$ref", Some(target)) if target.starts_with('#') => {
                    (key.clone(), Json::String(format!("{place}{}", &target[1..])))
                }
                _ => (key.clone(), rebased(value, place)),
            };
            Json::Object(entries.iter().map(entry).collect())
        }
        other => other.clone(),
    }
}

/// Takes the tools and returns their names.
fn names(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let Some(value) = fields.take("tools") else { return Ok(Vec::new()) };
    let Value::Array(tools) = value else { return Err(fields.wrong("tools", &value, "a list of tools")) };
    if tools.len() > MAX_TOOLS {
        let message = format!("tools: {} tools: must be at most {MAX_TOOLS}", tools.len());
        return Err(ApiError::new(ErrorKind::Invalid, message).of("tools"));
    }
    let mut names = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        let name = name(Fields::nested(format!("tools[{index}]"), tool)?)?;
        if names.contains(&name) {
            let message = format!("tools[{index}]: there is another tool {name}");
            return Err(ApiError::new(ErrorKind::Invalid, message).of("tools"));
        }
        names.push(name);
    }
    Ok(names)
}

/// Checks a tool and returns its name.
fn name(mut tool: Fields) -> Result<String, ApiError> {
    let kind = tool.take("type").unwrap_or_else(|| "function".into());
    if kind != "function" {
        return Err(tool.unsupported("type", &kind));
    }
    let Some(mut function) = tool.object("function")? else {
        return Err(tool.wrong("function", &Value::Null, "an object with a name"));
    };
    let name = tool_name(&mut function)?;
    function.text("description", MAX_DESCRIPTION)?;
    function.bool("strict")?;
    if let Some(value) = function.take("parameters").filter(|value| !value.is_object()) {
        return Err(function.wrong("parameters", &value, "a schema of an object"));
    }
    function.finish()?;
    tool.finish()?;
    Ok(name)
}

fn tool_name(function: &mut Fields) -> Result<String, ApiError> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let value = function.take("name").unwrap_or_default();
    let name = value.as_str().filter(|name| (1..=MAX_NAME).contains(&name.len()) && name.chars().all(is_part));
    let expected = || format!("1 to {MAX_NAME} letters, digits, _, - and .");
    name.map(str::to_owned).ok_or_else(|| function.wrong("name", &value, &expected()))
}

fn choice(fields: &mut Fields, names: &[String]) -> Result<ToolChoice, ApiError> {
    let invalid = |message: String| Err(ApiError::new(ErrorKind::Invalid, message).of("tool_choice"));
    let automatic = if names.is_empty() { ToolChoice::None } else { ToolChoice::Auto };
    let choice = match fields.take("tool_choice") {
        None => automatic,
        Some(Value::String(text)) => match text.as_str() {
            "none" => ToolChoice::None,
            "auto" => automatic,
            "required" => ToolChoice::Required,
            _ => return Err(fields.wrong("tool_choice", &text.into(), "none, auto, required or a tool")),
        },
        Some(value) => {
            let mut named = Fields::nested("tool_choice".to_owned(), value)?;
            let kind = named.take("type").unwrap_or_default();
            if kind != "function" {
                return Err(named.wrong("type", &kind, "function"));
            }
            let function = named.object("function")?;
            let Some(mut function) = function else {
                return Err(named.wrong("function", &Value::Null, "an object with a name"));
            };
            let name = tool_name(&mut function)?;
            function.finish()?;
            named.finish()?;
            ToolChoice::Named(name)
        }
    };
    match &choice {
        ToolChoice::Required if names.is_empty() => invalid("tool_choice = required: there are no tools".to_owned()),
        ToolChoice::Named(name) if !names.contains(name) => invalid(format!("tool_choice: there is no tool {name}")),
        _ => Ok(choice),
    }
}

/// Takes the calls of a message of an assistant, as templates expect them: with arguments that are objects.
pub(super) fn calls(fields: &mut Fields) -> Result<Option<Json>, ApiError> {
    let Some(value) = fields.take("tool_calls") else { return Ok(None) };
    let place = fields.name("tool_calls");
    let Value::Array(values) = value else { return Err(ApiError::field(&place, &value, "a list of calls")) };
    let calls: Result<Vec<Json>, ApiError> = values
        .into_iter()
        .enumerate()
        .map(|(index, value)| call(Fields::nested(format!("{place}[{index}]"), value)?))
        .collect();
    Ok(Some(calls?).filter(|calls| !calls.is_empty()).map(Json::Array))
}

fn call(mut call: Fields) -> Result<Json, ApiError> {
    call.ignore(&["index"]);
    let id = call.text("id", 256)?.unwrap_or_default();
    let kind = call.take("type").unwrap_or_else(|| "function".into());
    if kind != "function" {
        return Err(call.unsupported("type", &kind));
    }
    let Some(mut function) = call.object("function")? else {
        return Err(call.wrong("function", &Value::Null, "an object with a name and arguments"));
    };
    let name = tool_name(&mut function)?;
    let arguments = match function.take("arguments") {
        None => Json::Object(Vec::new()),
        Some(value) => {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let text = if text.trim().is_empty() { "{}" } else { &text };
            let object = Json::parse(text).ok().filter(|json| matches!(json, Json::Object(_)));
            object.ok_or_else(|| function.wrong("arguments", &value, "the text of an object of JSON"))?
        }
    };
    function.finish()?;
    call.finish()?;
    let function = object([("name", name.as_str().into()), ("arguments", arguments)]);
    Ok(object([("id", id.as_str().into()), ("type", "function".into()), ("function", function)]))
}
