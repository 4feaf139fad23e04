//! Schemas of JSON (JSON Schema, drafts 7 to 2020-12) as grammars.
//!
//! A grammar has texts of values that the schema allows, though not all of them: keys come in the order of
//! `properties`, numbers have a bounded number of digits, blanks stand where people put them. Keywords that would
//! allow values that are not right if they were passed over are refused by name.

mod keywords;
mod limits;
mod number;

use std::collections::HashMap;

use self::keywords::{is_note, merged, types, unsupported, without};
use self::limits::{bounds, counts};
use self::number::Bounds;
use super::grammar::{Grammar, NodeId, RuleId};
use super::{ConstraintError, Rules, regex, strings};
use crate::json::Json;

/// Schemas in a schema at most, each counted as often as it is looked at.
const MAX_SCHEMAS: usize = 4096;
/// Schemas inside of each other at most.
const MAX_DEPTH: usize = 64;
/// Values of an `enum` at most.
const MAX_VALUES: usize = 1024;

/// Formats of strings that are known; others say nothing.
const FORMATS: [(&str, &str); 6] = [
    (
        "date",
        "^[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|\
         02-(0[1-9]|1[0-9]|2[0-8]))$",
    ),
    ("time", "^([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$"),
    (
        "date-time",
        "^[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|\
         02-(0[1-9]|1[0-9]|2[0-8]))T\
         ([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$",
    ),
    ("uuid", "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"),
    ("ipv4", "^((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])$"),
    ("email", "^[A-Za-z0-9_+-]{1,32}(\\.[A-Za-z0-9_+-]{1,16}){0,2}@[A-Za-z0-9]{1,32}(\\.[A-Za-z0-9]{1,16}){1,3}$"),
];

/// Makes the grammar of a schema's values.
pub(super) fn grammar(schema: &Json) -> Result<Rules, ConstraintError> {
    let mut builder = Builder::new(schema);
    let root = builder.reference("#")?;
    builder.finish()?;
    Ok(Rules { grammar: builder.grammar, root })
}

/// Makes the grammar of any object of JSON.
pub(super) fn any_object() -> Rules {
    let mut builder = Builder::new(&Json::Null);
    let root = builder.object;
    builder.any_values();
    Rules { grammar: builder.grammar, root }
}

struct Builder<'a> {
    grammar: Grammar,
    root: &'a Json,
    /// The rules of schemas that are referred to, by their places.
    references: HashMap<String, RuleId>,
    /// References whose rules are not made yet.
    pending: Vec<(String, RuleId)>,
    /// Blanks.
    blank: RuleId,
    /// One character of a string.
    character: RuleId,
    /// Any value, and any object.
    value: RuleId,
    object: RuleId,
    num_schemas: usize,
    depth: usize,
}

impl<'a> Builder<'a> {
    fn new(root: &'a Json) -> Self {
        let mut grammar = Grammar::default();
        let [blank, character, value, object] = std::array::from_fn(|_| grammar.new_rule());
        let node = strings::character(&mut grammar);
        grammar.set_rule(character, node);
        let node = blanks(&mut grammar);
        grammar.set_rule(blank, node);
        let (references, pending) = (HashMap::new(), Vec::new());
        Self { grammar, root, references, pending, blank, character, value, object, num_schemas: 0, depth: 0 }
    }

    /// Makes the rules that are referred to.
    fn finish(&mut self) -> Result<(), ConstraintError> {
        while let Some((place, rule)) = self.pending.pop() {
            let root = self.root;
            let schema = find(root, &place).ok_or_else(|| wrong(&place, "there is no schema at this place"))?;
            let node = self.schema(schema, &place)?;
            self.grammar.set_rule(rule, node);
        }
        self.any_values();
        Ok(())
    }

    /// The rule of the schema at a place of the whole one.
    fn reference(&mut self, place: &str) -> Result<RuleId, ConstraintError> {
        if let Some(&rule) = self.references.get(place) {
            return Ok(rule);
        }
        let rule = self.grammar.new_rule();
        self.references.insert(place.to_owned(), rule);
        self.pending.push((place.to_owned(), rule));
        Ok(rule)
    }

    fn schema(&mut self, schema: &Json, place: &str) -> Result<NodeId, ConstraintError> {
        self.num_schemas += 1;
        if self.num_schemas > MAX_SCHEMAS || self.depth > MAX_DEPTH {
            return Err(ConstraintError::TooLarge);
        }
        self.depth += 1;
        let node = match schema {
            Json::Bool(true) => Ok(self.grammar.rule(self.value)),
            Json::Bool(false) => Ok(self.grammar.nothing()),
            Json::Object(_) => self.object_schema(schema, place),
            _ => Err(wrong(place, "must be an object")),
        };
        self.depth -= 1;
        node
    }

    fn object_schema(&mut self, schema: &Json, place: &str) -> Result<NodeId, ConstraintError> {
        if let Some(keyword) = unsupported(schema) {
            return Err(wrong(place, &format!("{keyword} is not supported")));
        }
        if let Some(target) = schema.get("$ref") {
            return self.referring(schema, target, place);
        }
        if let Some(value) = schema.get("const") {
            return Ok(self.grammar.literal(value.to_string()));
        }
        if let Some(values) = schema.get("enum") {
            return self.values(values, place);
        }
        if let Some(all) = schema.get("allOf") {
            return self.all_of(&without(schema, "allOf"), all, place);
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(branches) = schema.get(key) {
                return self.any_of(&without(schema, key), branches, &format!("{place}/{key}"));
            }
        }
        self.typed(schema, place)
    }

    /// A schema that refers to another one, perhaps with more to say.
    fn referring(&mut self, schema: &Json, target: &Json, place: &str) -> Result<NodeId, ConstraintError> {
        let target = target.as_str().filter(|target| target.starts_with('#'));
        let Some(target) = target else {
            return Err(wrong(place, "$ref must begin with #: other schemas are not fetched"));
        };
        let root = self.root;
        let found =
            find(root, target).ok_or_else(|| wrong(place, &format!("$ref {target:?}: there is nothing there")))?;
        let rest = without(schema, "$ref");
        if rest.entries().iter().all(|(key, _)| is_note(key)) {
            let rule = self.reference(target)?;
            return Ok(self.grammar.rule(rule));
        }
        let both = merged(&rest, found).map_err(|key| both_have(place, &key))?;
        self.schema(&both, place)
    }

    fn values(&mut self, values: &Json, place: &str) -> Result<NodeId, ConstraintError> {
        let values = values.items();
        if values.is_empty() || values.len() > MAX_VALUES {
            return Err(wrong(place, &format!("enum must be a list of 1 to {MAX_VALUES} values")));
        }
        let nodes = values.iter().map(|value| self.grammar.literal(value.to_string())).collect();
        Ok(self.grammar.alternatives(nodes))
    }

    fn all_of(&mut self, rest: &Json, all: &Json, place: &str) -> Result<NodeId, ConstraintError> {
        let mut both = rest.clone();
        for schema in all.items() {
            let root = self.root;
            // A reference has to be looked up to be combined.
            let target = schema.get("$ref").and_then(Json::as_str).and_then(|target| find(root, target));
            let schema = match target {
                Some(target) => merged(&without(schema, "$ref"), target).map_err(|key| both_have(place, &key))?,
                None => schema.clone(),
            };
            both = merged(&both, &schema).map_err(|key| both_have(place, &key))?;
        }
        self.schema(&both, place)
    }

    fn any_of(&mut self, rest: &Json, branches: &Json, place: &str) -> Result<NodeId, ConstraintError> {
        if branches.items().is_empty() {
            return Err(wrong(place, "must be a list of schemas"));
        }
        let mut nodes = Vec::new();
        for (index, branch) in branches.items().iter().enumerate() {
            let place = format!("{place}/{index}");
            let has_more = rest.entries().iter().any(|(key, _)| !is_note(key));
            nodes.push(match has_more {
                true => self.all_of(rest, &Json::Array(vec![branch.clone()]), &place)?,
                false => self.schema(branch, &place)?,
            });
        }
        Ok(self.grammar.alternatives(nodes))
    }

    /// A schema that says the type of its values, or lets it be seen from other keywords.
    fn typed(&mut self, schema: &Json, place: &str) -> Result<NodeId, ConstraintError> {
        let Some(named) = schema.get("type") else {
            return match seen_type(schema) {
                Some(name) => self.value_of_type(name, schema, place),
                None => Ok(self.grammar.rule(self.value)),
            };
        };
        let mut nodes = Vec::new();
        for name in types(named) {
            let name = name.as_str().ok_or_else(|| wrong(place, "type must be a name or a list of names"))?;
            nodes.push(self.value_of_type(name, schema, place)?);
        }
        Ok(self.grammar.alternatives(nodes))
    }

    fn value_of_type(&mut self, name: &str, schema: &Json, place: &str) -> Result<NodeId, ConstraintError> {
        match name {
            "null" => Ok(self.grammar.literal("null")),
            "boolean" => {
                let nodes = ["true", "false"].map(|text| self.grammar.literal(text));
                Ok(self.grammar.alternatives(nodes.to_vec()))
            }
            "integer" => Ok(number::integer(&mut self.grammar, bounds(schema, true, place)?)),
            "number" => Ok(number::number(&mut self.grammar, bounds(schema, false, place)?)),
            "string" => self.string(schema, place),
            "array" => self.array(schema, place),
            "object" => self.object(schema, place),
            _ => Err(wrong(place, "type must be null, boolean, integer, number, string, array or object")),
        }
    }

    fn string(&mut self, schema: &Json, place: &str) -> Result<NodeId, ConstraintError> {
        let (least, most) = counts(schema, "minLength", "maxLength", place)?;
        let has_length = least > 0 || most.is_some();
        let format = schema.get("format").and_then(Json::as_str);
        let format = format.and_then(|name| FORMATS.iter().find(|(own, _)| *own == name)).map(|(_, pattern)| *pattern);
        let pattern = match schema.get("pattern") {
            None => format.filter(|_| !has_length),
            Some(pattern) if format.is_none() && !has_length => {
                Some(pattern.as_str().ok_or_else(|| wrong(place, "pattern must be a text"))?)
            }
            Some(_) => {
                return Err(wrong(place, "pattern together with format, minLength or maxLength is not supported"));
            }
        };
        let inner = match pattern {
            Some(pattern) => regex::in_string(&mut self.grammar, pattern).map_err(|error| match error {
                ConstraintError::Regex(reason) => wrong(place, &format!("pattern: {reason}")),
                other => other,
            })?,
            None => {
                let one = self.grammar.rule(self.character);
                self.grammar.repeat(one, least, most)
            }
        };
        let (open, close) = (self.grammar.literal("\""), self.grammar.literal("\""));
        Ok(self.grammar.sequence(vec![open, inner, close]))
    }

    fn array(&mut self, schema: &Json, place: &str) -> Result<NodeId, ConstraintError> {
        let (least, most) = counts(schema, "minItems", "maxItems", place)?;
        // Before 2020 a list of schemas was the value of `items`.
        let old = schema.get("items").filter(|items| matches!(items, Json::Array(_)));
        let firsts = schema.get("prefixItems").or(old).map_or(&[][..], Json::items);
        let others = if old.is_some() { schema.get("additionalItems") } else { schema.get("items") };
        let mut nodes = Vec::new();
        for (index, first) in firsts.iter().enumerate() {
            nodes.push(self.schema(first, &format!("{place}/prefixItems/{index}"))?);
        }
        let other = self.schema(others.unwrap_or(&Json::Bool(true)), &format!("{place}/items"))?;
        let items = self.items(&nodes, other, least, most);
        let (open, close) = (self.token("[", true), self.token_behind("]"));
        Ok(self.grammar.sequence(vec![open, items, close]))
    }

    /// The items of a list: first those of `firsts`, then any number of `other`.
    fn items(&mut self, firsts: &[NodeId], other: NodeId, least: u32, most: Option<u32>) -> NodeId {
        let comma = self.token(",", true);
        let is_possible = |count: usize| most.is_none_or(|most| count < most as usize);
        let (rule, count) = (self.grammar.new_rule(), firsts.len().max(1) as u32);
        self.grammar.set_rule(rule, other);
        let other = self.grammar.rule(rule);
        let further = self.grammar.sequence(vec![comma, other]);
        // Behind all that are listed, or behind the first.
        let most_behind = most.map(|most| most.saturating_sub(count));
        let mut behind = self.grammar.repeat(further, least.saturating_sub(count), most_behind);
        for (index, &first) in firsts.iter().enumerate().skip(1).rev() {
            let with_rest = self.grammar.sequence(vec![comma, first, behind]);
            behind = match (is_possible(index), index < least as usize) {
                (false, _) => self.grammar.empty(),
                (true, true) => with_rest,
                (true, false) => self.grammar.optional(with_rest),
            };
        }
        let first = firsts.first().copied().unwrap_or(other);
        let all = self.grammar.sequence(vec![first, behind]);
        match (is_possible(0), least) {
            (false, _) => self.grammar.empty(),
            (true, 0) => self.grammar.optional(all),
            (true, _) => all,
        }
    }

    fn object(&mut self, schema: &Json, place: &str) -> Result<NodeId, ConstraintError> {
        let properties = schema.get("properties").map_or(&[][..], Json::entries);
        let required: Vec<&str> =
            schema.get("required").map_or(&[][..], Json::items).iter().filter_map(Json::as_str).collect();
        let open = schema.get("additionalProperties");
        if properties.is_empty() && required.is_empty() && open.is_none_or(|open| *open == Json::Bool(true)) {
            return Ok(self.grammar.rule(self.object));
        }
        // Where it is not said, others are left out: what is listed is what is wanted.
        let others = open.unwrap_or(&Json::Bool(false));
        let mut members = Vec::new();
        for (name, schema) in properties {
            let value = self.schema(schema, &format!("{place}/properties/{name}"))?;
            members.push(Member { node: self.member(name, value), is_required: required.contains(&name.as_str()) });
        }
        let is_listed = |name: &&&str| properties.iter().any(|(own, _)| own == **name);
        for name in required.iter().filter(|name| !is_listed(name)) {
            let value = self.schema(others, &format!("{place}/required"))?;
            members.push(Member { node: self.member(name, value), is_required: true });
        }
        let names: Vec<&str> = properties.iter().map(|(name, _)| name.as_str()).chain(required).collect();
        let other = match others {
            Json::Bool(false) => None,
            schema => Some(self.other_member(&names, schema, place)?),
        };
        let members = self.members(&members, other);
        let (open, close) = (self.token("{", true), self.token_behind("}"));
        Ok(self.grammar.sequence(vec![open, members, close]))
    }

    /// A key with its value, as a rule, since it stands in several places.
    fn member(&mut self, name: &str, value: NodeId) -> NodeId {
        let key = self.grammar.literal(Json::from(name).to_string());
        self.keyed(key, value)
    }

    fn other_member(&mut self, names: &[&str], schema: &Json, place: &str) -> Result<NodeId, ConstraintError> {
        if names.iter().any(|name| name.len() > strings::MAX_AVOIDED) {
            return Err(wrong(place, "names of properties are too long for additionalProperties beside them"));
        }
        let value = self.schema(schema, &format!("{place}/additionalProperties"))?;
        let key = strings::other_than(&mut self.grammar, names);
        Ok(self.keyed(key, value))
    }

    fn keyed(&mut self, key: NodeId, value: NodeId) -> NodeId {
        let (colon, space, rule) = (self.grammar.literal(":"), self.grammar.literal(" "), self.grammar.new_rule());
        let space = self.grammar.optional(space);
        let node = self.grammar.sequence(vec![key, colon, space, value]);
        self.grammar.set_rule(rule, node);
        self.grammar.rule(rule)
    }

    /// The members of an object in their order, then any number of others. What follows a member is a rule of its
    /// own, so that a grammar is as large as its schema.
    fn members(&mut self, members: &[Member], other: Option<NodeId>) -> NodeId {
        let comma = self.token(",", true);
        let mut behind = match other {
            Some(other) => {
                let one = self.grammar.sequence(vec![comma, other]);
                self.grammar.repeat(one, 0, None)
            }
            None => self.grammar.empty(),
        };
        let mut from_here = match other {
            Some(other) => {
                let all = self.grammar.sequence(vec![other, behind]);
                self.grammar.optional(all)
            }
            None => self.grammar.empty(),
        };
        for member in members.iter().rev() {
            let rule = self.grammar.new_rule();
            self.grammar.set_rule(rule, behind);
            let rest = self.grammar.rule(rule);
            let first = self.grammar.sequence(vec![member.node, rest]);
            let further = self.grammar.sequence(vec![comma, member.node]);
            if member.is_required {
                from_here = first;
                behind = self.grammar.sequence(vec![further, rest]);
            } else {
                from_here = self.grammar.alternatives(vec![first, from_here]);
                let further = self.grammar.optional(further);
                behind = self.grammar.sequence(vec![further, rest]);
            }
        }
        from_here
    }

    /// A sign with blanks behind it, where there may be some.
    fn token(&mut self, sign: &str, has_blanks: bool) -> NodeId {
        let sign = self.grammar.literal(sign);
        let blank = if has_blanks { self.grammar.rule(self.blank) } else { self.grammar.empty() };
        self.grammar.sequence(vec![sign, blank])
    }

    /// A sign with blanks before it.
    fn token_behind(&mut self, sign: &str) -> NodeId {
        let (blank, sign) = (self.grammar.rule(self.blank), self.grammar.literal(sign));
        self.grammar.sequence(vec![blank, sign])
    }

    /// Makes the rules of any value and any object.
    fn any_values(&mut self) {
        let (value, character) = (self.grammar.rule(self.value), self.grammar.rule(self.character));
        let (open, close) = (self.grammar.literal("\""), self.grammar.literal("\""));
        let characters = self.grammar.repeat(character, 0, None);
        let string = self.grammar.sequence(vec![open, characters, close]);
        let member = self.keyed(string, value);
        let members = self.items(&[], member, 0, None);
        let (open, close) = (self.token("{", true), self.token_behind("}"));
        let object = self.grammar.sequence(vec![open, members, close]);
        self.grammar.set_rule(self.object, object);
        let items = self.items(&[], value, 0, None);
        let (open, close) = (self.token("[", true), self.token_behind("]"));
        let array = self.grammar.sequence(vec![open, items, close]);
        let number = number::number(&mut self.grammar, Bounds::default());
        let mut nodes = vec![self.grammar.rule(self.object), array, string, number];
        nodes.extend(["true", "false", "null"].map(|text| self.grammar.literal(text)));
        let node = self.grammar.alternatives(nodes);
        self.grammar.set_rule(self.value, node);
    }
}

/// A property of an object.
struct Member {
    node: NodeId,
    is_required: bool,
}

/// Blanks as people put them: none, one, or a new line with some.
fn blanks(grammar: &mut Grammar) -> NodeId {
    let (space, line, tab) = (grammar.literal(" "), grammar.literal("\n"), grammar.literal("\t"));
    let indent = grammar.alternatives(vec![space, tab]);
    let indent = grammar.repeat(indent, 0, Some(32));
    let line = grammar.sequence(vec![line, indent]);
    let some = grammar.alternatives(vec![space, line]);
    grammar.optional(some)
}

fn wrong(place: &str, reason: &str) -> ConstraintError {
    ConstraintError::Schema { place: place.to_owned(), reason: reason.to_owned() }
}

fn both_have(place: &str, key: &str) -> ConstraintError {
    wrong(place, &format!("two schemas that hold together both have {key}, which is not supported"))
}

/// The schema at a place such as `#/$defs/Item`.
fn find<'a>(root: &'a Json, place: &str) -> Option<&'a Json> {
    let mut found = root;
    for part in place.strip_prefix('#')?.split('/').skip(1) {
        let part = part.replace("~1", "/").replace("~0", "~");
        found = match found {
            Json::Array(items) => items.get(part.parse::<usize>().ok()?)?,
            other => other.get(&part)?,
        };
    }
    Some(found)
}

/// The type that keywords of a schema are about.
fn seen_type(schema: &Json) -> Option<&'static str> {
    let keywords = [
        ("object", &["properties", "required", "additionalProperties"][..]),
        ("array", &["items", "prefixItems", "minItems", "maxItems"]),
        ("string", &["pattern", "minLength", "maxLength", "format"]),
        ("number", &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    ];
    let is_there = |keys: &[&str]| keys.iter().any(|key| schema.get(key).is_some());
    keywords.into_iter().find(|(_, keys)| is_there(keys)).map(|(name, _)| name)
}
