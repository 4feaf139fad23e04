//! The body of a request as a JSON object, within bounds.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::{ApiError, ErrorKind};

/// Levels of lists and objects in a body at most.
pub const MAX_DEPTH: usize = 32;

/// Reads an object. Text that is no JSON, deep nesting and keys that come twice are refused.
pub(crate) fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let invalid = |reason: &str| ApiError::new(ErrorKind::Invalid, format!("the body: {reason}"));
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(invalid("is empty, and must be a JSON object"));
    }
    if depth(bytes) > MAX_DEPTH {
        return Err(invalid(&format!("more than {MAX_DEPTH} levels of lists and objects")));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = Unique.deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| value));
    match value.map_err(|error| invalid(&format!("is not JSON: {error}")))? {
        Value::Object(map) => Ok(map),
        _ => Err(invalid("must be a JSON object")),
    }
}

/// Levels of brackets outside of texts. It looks at each byte once, and needs no stack.
fn depth(bytes: &[u8]) -> usize {
    let (mut level, mut deepest, mut is_text, mut is_escaped) = (0_usize, 0, false, false);
    for &byte in bytes {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            b'{' | b'[' if !is_text => level += 1,
            b'}' | b']' if !is_text => level = level.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(level);
    }
    deepest
}

/// Reads a value whose objects have each key once: readers differ in which of two values they take.
struct Unique;

impl<'de> DeserializeSeed<'de> for Unique {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("a number that is not finite"))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = seq.next_element_seed(Self)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            let value = access.next_value_seed(Self)?;
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("the key {} comes twice", super::error::quoted(&key))));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}
