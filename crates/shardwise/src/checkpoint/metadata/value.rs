//! Non-tensor values of a checkpoint, and paths in nested state.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::{Map, Value as Json, json};

use crate::error::{Error, ErrorKind, Result};

/// A stored value that is not a tensor: what a pickled Python object of plain types is to PyTorch.
///
/// In JSON most variants are the plain JSON value. JSON objects tag what it cannot express: a tuple is `{"tuple": [...]}`, a
/// map `{"map": {...}}`, NaN and the infinities `{"float": "nan"}`, bytes `{"bytes": "00ff"}`.
#[doc(alias = "BytesStorageMetadata")]
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Python's `None`.
    None,
    /// A boolean.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// A string.
    Text(String),
    /// Bytes: Python's `bytes`, and the content of a `bytearray` or `BytesIO`.
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Value>),
    /// A tuple, which Python distinguishes from a list.
    Tuple(Vec<Value>),
    /// A dict with string keys.
    Map(BTreeMap<String, Value>),
}

/// One component of a path in nested state.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Key {
    /// Position in a list or tuple.
    Index(usize),
    /// Key of a map.
    Name(String),
}

/// Joins the components of a path with dots: the flat key that checkpoints store entries under.
#[doc(alias = "FQN")]
pub fn flat_key(path: &[Key]) -> String {
    path.iter().map(ToString::to_string).collect::<Vec<_>>().join(".")
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Index(i) => write!(f, "{i}"),
            Key::Name(name) => f.write_str(name),
        }
    }
}

impl Value {
    /// Converts to JSON, with the tags described at [`Value`].
    pub fn to_json(&self) -> Json {
        let list = |values: &[Value]| values.iter().map(Value::to_json).collect::<Vec<_>>();
        match self {
            Value::None => Json::Null,
            Value::Bool(b) => json!(b),
            Value::Int(n) => json!(n),
            Value::Float(x) if x.is_finite() => json!(x),
            Value::Float(x) => json!({ "float": x.to_string().to_lowercase() }),
            Value::Text(text) => json!(text),
            Value::Bytes(bytes) => json!({ "bytes": hex(bytes) }),
            Value::List(values) => Json::Array(list(values)),
            Value::Tuple(values) => json!({ "tuple": list(values) }),
            Value::Map(values) => {
                let object: Map<String, Json> = values.iter().map(|(k, v)| (k.clone(), v.to_json())).collect();
                json!({ "map": object })
            }
        }
    }

    /// Reads a value from the JSON that [`to_json`](Self::to_json) returns.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] for a JSON object without a known tag.
    pub fn from_json(json: &Json) -> Result<Value> {
        let list = |values: &[Json]| values.iter().map(Value::from_json).collect::<Result<Vec<_>>>();
        let bad = |found: &Json| {
            let needed = "a value, {\"tuple\": [...]}, {\"map\": {...}}, {\"float\": \"nan\"} or {\"bytes\": \"00ff\"}";
            ErrorKind::Damaged.error(
                "stored value",
                found,
                needed,
                "the file was not written by this library, or is damaged",
            )
        };
        Ok(match json {
            Json::Null => Value::None,
            Json::Bool(b) => Value::Bool(*b),
            Json::Number(n) => match (n.as_i64(), n.as_f64()) {
                (Some(n), _) => Value::Int(n),
                (None, Some(x)) => Value::Float(x),
                _ => return Err(bad(json)),
            },
            Json::String(text) => Value::Text(text.clone()),
            Json::Array(values) => Value::List(list(values)?),
            Json::Object(object) if object.len() == 1 => match object.iter().next() {
                Some((tag, Json::Array(values))) if tag == "tuple" => Value::Tuple(list(values)?),
                Some((tag, Json::Object(map))) if tag == "map" => {
                    let entry = |(k, v): (&String, &Json)| Ok((k.clone(), Value::from_json(v)?));
                    Value::Map(map.iter().map(entry).collect::<Result<_>>()?)
                }
                Some((tag, Json::String(text))) if tag == "bytes" => {
                    Value::Bytes(from_hex(text).ok_or_else(|| bad(json))?)
                }
                Some((tag, Json::String(text))) if tag == "float" => Value::Float(text.parse().map_err(|_| bad(json))?),
                _ => return Err(bad(json)),
            },
            Json::Object(_) => return Err(bad(json)),
        })
    }
}

/// Bytes as hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    pairs.iter().map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}

impl Value {
    /// Converts anything serializable to a value; structs become maps. The inverse of [`read`](Self::read).
    pub fn of(something: &impl Serialize) -> Result<Value> {
        serde_json::to_value(something).map_err(Error::other).and_then(|json| Value::from_plain(&json))
    }

    /// Deserializes the value into a Rust type. The inverse of [`of`](Self::of).
    ///
    /// # Errors
    /// [`ErrorKind::State`] if the type does not fit the value.
    pub fn read<T: de::DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_value(self.to_plain()).map_err(|error| {
            let found = format!("{self} ({error})");
            ErrorKind::state().error(
                "stored value",
                found,
                "a value of the requested type",
                "read it as the type that was saved",
            )
        })
    }

    fn from_plain(json: &Json) -> Result<Value> {
        Ok(match json {
            Json::Array(values) => Value::List(values.iter().map(Value::from_plain).collect::<Result<_>>()?),
            Json::Object(map) => {
                let entry = |(k, v): (&String, &Json)| Ok((k.clone(), Value::from_plain(v)?));
                Value::Map(map.iter().map(entry).collect::<Result<_>>()?)
            }
            plain => Value::from_json(plain)?,
        })
    }

    fn to_plain(&self) -> Json {
        match self {
            Value::List(values) | Value::Tuple(values) => Json::Array(values.iter().map(Value::to_plain).collect()),
            Value::Map(values) => Json::Object(values.iter().map(|(k, v)| (k.clone(), v.to_plain())).collect()),
            Value::Bytes(bytes) => Json::from(bytes.clone()),
            plain => plain.to_json(),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to_json())
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.to_json().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Value::from_json(&Json::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

macro_rules! from {
    ($($T:ty => $variant:ident $convert:expr;)*) => {$(
        impl From<$T> for Value {
            fn from(value: $T) -> Self {
                Value::$variant($convert(value))
            }
        }
    )*};
}
from! {
    bool => Bool |b| b;
    i64 => Int |n| n;
    i32 => Int i64::from;
    u32 => Int i64::from;
    f64 => Float |x| x;
    f32 => Float f64::from;
    String => Text |text| text;
    &str => Text str::to_string;
    Vec<u8> => Bytes |bytes| bytes;
    &[u8] => Bytes <[u8]>::to_vec;
}
