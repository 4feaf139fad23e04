//! The keywords of schemas, and how two schemas become one.

use crate::json::Json;

/// Keywords that say nothing about values.
const NOTES: [&str; 14] = [
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "discriminator",
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
];

/// Keywords that bound values in a way that is not supported.
const UNSUPPORTED: [&str; 20] = [
    "not",
    "if",
    "then",
    "else",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "contains",
    "minContains",
    "maxContains",
    "multipleOf",
    "$anchor",
    "$dynamicRef",
    "$recursiveRef",
];

/// Returns whether a keyword says nothing about values.
pub(super) fn is_note(key: &str) -> bool {
    NOTES.contains(&key)
}

/// The first keyword of a schema that is not supported.
pub(super) fn unsupported(schema: &Json) -> Option<&str> {
    let is_unsupported = |(key, value): &&(String, Json)| {
        let is_unique = key == "uniqueItems" && *value == Json::Bool(true);
        is_unique || UNSUPPORTED.contains(&key.as_str())
    };
    schema.entries().iter().find(is_unsupported).map(|(key, _)| key.as_str())
}

/// A schema without a keyword.
pub(super) fn without(schema: &Json, left_out: &str) -> Json {
    Json::Object(schema.entries().iter().filter(|(key, _)| key != left_out).cloned().collect())
}

/// The schema of values that two schemas have in common. Says the keyword that hinders it.
pub(super) fn merged(first: &Json, second: &Json) -> Result<Json, String> {
    let (first, second) = match (first, second) {
        (Json::Bool(true), other) | (other, Json::Bool(true)) => return Ok(other.clone()),
        (Json::Bool(false), _) | (_, Json::Bool(false)) => return Ok(Json::Bool(false)),
        both => both,
    };
    let mut entries = first.entries().to_vec();
    for (key, value) in second.entries() {
        let Some((_, own)) = entries.iter_mut().find(|(name, _)| name == key) else {
            entries.push((key.clone(), value.clone()));
            continue;
        };
        *own = match key.as_str() {
            _ if own == value || is_note(key) => continue,
            "properties" => merged_properties(own, value),
            "required" => union(own, value),
            "type" => common_types(own, value),
            "enum" => Json::Array(own.items().iter().filter(|item| value.items().contains(item)).cloned().collect()),
            "additionalProperties" if *own == Json::Bool(false) || *value == Json::Bool(false) => Json::Bool(false),
            "allOf" => Json::Array([own.items(), value.items()].concat()),
            _ => return Err(key.clone()),
        };
    }
    Ok(Json::Object(entries))
}

fn merged_properties(first: &Json, second: &Json) -> Json {
    let mut entries = first.entries().to_vec();
    for (name, schema) in second.entries() {
        match entries.iter_mut().find(|(own, _)| own == name) {
            Some((_, own)) if own == schema => {}
            Some((_, own)) => {
                let both = Json::Array(vec![own.clone(), schema.clone()]);
                *own = Json::Object(vec![("allOf".to_owned(), both)]);
            }
            None => entries.push((name.clone(), schema.clone())),
        }
    }
    Json::Object(entries)
}

fn union(first: &Json, second: &Json) -> Json {
    let mut items = first.items().to_vec();
    items.extend(second.items().iter().filter(|item| !first.items().contains(item)).cloned());
    Json::Array(items)
}

/// The names of types, one or several.
pub(super) fn types(value: &Json) -> &[Json] {
    match value {
        Json::Array(items) => items,
        one => std::slice::from_ref(one),
    }
}

fn common_types(first: &Json, second: &Json) -> Json {
    let (first, second) = (types(first), types(second));
    let has = |list: &[Json], name: &str| list.contains(&name.into());
    let common = first.iter().filter_map(|own| match own.as_str() {
        // Whole numbers are numbers.
        Some("number") if has(second, "integer") && !has(second, "number") => Some("integer".into()),
        Some("integer") if has(second, "number") => Some(own.clone()),
        _ => second.contains(own).then(|| own.clone()),
    });
    Json::Array(common.collect())
}
