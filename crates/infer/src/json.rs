//! JSON whose objects keep the order of their keys, as templates of tools and schemas need it.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap as _, Serializer};
use serde_json::Number;

/// A value of JSON. Objects keep the order of their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Json {
    /// `null`
    #[default]
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number.
    Number(Number),
    /// A text.
    String(String),
    /// A list.
    Array(Vec<Json>),
    /// An object.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Reads a text.
    ///
    /// # Errors
    /// If it is not JSON, is nested too deep, or an object has a key twice.
    pub fn parse(text: impl AsRef<[u8]>) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(text.as_ref())
    }

    /// The value of a key; none if this is no object, or has no such key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.entries().iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The keys and values of an object; none of anything else.
    #[must_use]
    pub fn entries(&self) -> &[(String, Self)] {
        match self {
            Self::Object(entries) => entries,
            _ => &[],
        }
    }

    /// The values of a list; none of anything else.
    #[must_use]
    pub fn items(&self) -> &[Self] {
        match self {
            Self::Array(items) => items,
            _ => &[],
        }
    }

    /// The text, if this is one.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The value with each text in it, keys included, as `change` has it.
    #[must_use]
    pub fn map_texts(&self, change: &impl Fn(&str) -> String) -> Self {
        match self {
            Self::String(text) => Self::String(change(text)),
            Self::Array(items) => Self::Array(items.iter().map(|item| item.map_texts(change)).collect()),
            Self::Object(entries) => {
                Self::Object(entries.iter().map(|(key, value)| (change(key), value.map_texts(change))).collect())
            }
            other => other.clone(),
        }
    }
}

/// Prints it on one line.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Number(number) => number.serialize(serializer),
            Self::String(text) => serializer.serialize_str(text),
            Self::Array(items) => items.serialize(serializer),
            Self::Object(entries) => {
                let mut map = serializer.serialize_map(Some(entries.len()))?;
                for (key, value) in entries {
                    map.serialize_entry(key, value)?;
                }
                map.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Json, E> {
        Number::from_f64(value).map(Json::Number).ok_or_else(|| E::custom("a number that is not finite"))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Json, E> {
        Ok(Json::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Json::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let (mut entries, mut keys) = (Vec::new(), std::collections::HashSet::new());
        while let Some((key, value)) = access.next_entry::<String, Json>()? {
            if !keys.insert(key.clone()) {
                return Err(A::Error::custom(format!("the key {key:?} comes twice")));
            }
            entries.push((key, value));
        }
        Ok(Json::Object(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_keep_the_order_of_their_keys() {
        let text = r#"{"z":1,"a":[true,null,-2.5,"é\n"],"m":{"y":{},"b":18446744073709551615}}"#;
        let json = Json::parse(text).unwrap();
        assert_eq!(json.to_string(), text);
        assert_eq!(json.get("a").unwrap().items().len(), 4);
        assert!(Json::parse(r#"{"a":1,"a":2}"#).is_err() && Json::parse("{").is_err());
        assert!(Json::parse("[".repeat(1000)).is_err());
    }
}
