//! Values of templates: immutable, of bounded depth.

use std::fmt;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::{Problem, check};

/// Levels of lists and dictionaries inside each other. `serde_json` reads 128, and a template may wrap what it gets.
const MOST_LEVELS: u16 = 200;

/// Memory of one value in a list, with its share of the list's spare capacity.
pub(super) const VALUE_BYTES: u64 = 2 * size_of::<TemplateValue>() as u64;

/// A value of a template.
///
/// Nothing changes a value after it was built, so values form no cycles. Namespaces, macros and loops belong to the rendering
/// and are numbers here.
#[derive(Clone, Default)]
pub(in crate::text) enum TemplateValue {
    #[default]
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Arc<str>),
    List(Arc<List>),
    Map(Arc<Map>),
    Namespace(usize),
    Macro(usize),
    Loop(usize),
    Function(&'static str),
}

/// A list or a tuple.
pub(in crate::text) struct List {
    pub(in crate::text) items: Vec<TemplateValue>,
    pub(super) is_tuple: bool,
    levels: u16,
}

/// A dictionary in the order of insertion.
pub(in crate::text) struct Map {
    pub(in crate::text) entries: Vec<(TemplateValue, TemplateValue)>,
    levels: u16,
}

/// Functions that templates call by name.
const FUNCTIONS: [&str; 5] = ["dict", "namespace", "raise_exception", "range", "strftime_now"];

impl TemplateValue {
    /// The function of a name, or an undefined value.
    pub(super) fn function(name: &str) -> Self {
        FUNCTIONS
            .iter()
            .find(|own| **own == name)
            .map_or(TemplateValue::Undefined, |name| TemplateValue::Function(name))
    }

    pub(in crate::text) fn text(text: &str) -> Self {
        TemplateValue::Text(text.into())
    }

    /// A value of a caller, whose depth nobody has checked.
    pub(in crate::text) fn of_json(json: &serde_json::Value) -> Result<Self, Problem> {
        TemplateValue::of_json_at(json, 0)
    }

    fn of_json_at(json: &serde_json::Value, depth: u16) -> Result<Self, Problem> {
        use serde_json::Value as Json;
        check_levels(depth)?;
        Ok(match json {
            Json::Null => TemplateValue::None,
            Json::Bool(value) => TemplateValue::Bool(*value),
            Json::Number(number) => match (number.as_i128(), number.as_f64()) {
                (Some(value), _) => TemplateValue::Int(value),
                (None, value) => TemplateValue::Float(value.unwrap_or(f64::NAN)),
            },
            Json::String(text) => TemplateValue::text(text),
            Json::Array(items) => {
                let items = items.iter().map(|item| TemplateValue::of_json_at(item, depth + 1));
                return TemplateValue::list(items.collect::<Result<_, _>>()?);
            }
            Json::Object(entries) => {
                let entries = entries
                    .iter()
                    .map(|(key, value)| Ok((TemplateValue::text(key), TemplateValue::of_json_at(value, depth + 1)?)));
                return TemplateValue::map(entries.collect::<Result<_, _>>()?);
            }
        })
    }

    pub(in crate::text) fn list(items: Vec<TemplateValue>) -> Result<Self, Problem> {
        let levels = levels_above(items.iter())?;
        Ok(TemplateValue::List(Arc::new(List { items, is_tuple: false, levels })))
    }

    pub(super) fn tuple(items: Vec<TemplateValue>) -> Result<Self, Problem> {
        let levels = levels_above(items.iter())?;
        Ok(TemplateValue::List(Arc::new(List { items, is_tuple: true, levels })))
    }

    /// A dictionary of different keys.
    pub(in crate::text) fn map(entries: Vec<(TemplateValue, TemplateValue)>) -> Result<Self, Problem> {
        let levels = levels_above(entries.iter().flat_map(|(key, value)| [key, value]))?;
        Ok(TemplateValue::Map(Arc::new(Map { entries, levels })))
    }

    pub(in crate::text) fn as_str(&self) -> Option<&str> {
        match self {
            TemplateValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The value of a text key of a dictionary.
    pub(in crate::text) fn field(&self, name: &str) -> Option<&TemplateValue> {
        let TemplateValue::Map(map) = self else { return None };
        map.entries.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value)
    }

    pub(in crate::text) fn is_none(&self) -> bool {
        matches!(self, TemplateValue::None)
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, TemplateValue::Undefined)
    }

    /// What Python takes for true.
    pub(super) fn is_true(&self) -> bool {
        match self {
            TemplateValue::Undefined | TemplateValue::None => false,
            TemplateValue::Bool(value) => *value,
            TemplateValue::Int(value) => *value != 0,
            TemplateValue::Float(value) => *value != 0.0,
            TemplateValue::Text(text) => !text.is_empty(),
            TemplateValue::List(list) => !list.items.is_empty(),
            TemplateValue::Map(map) => !map.entries.is_empty(),
            TemplateValue::Namespace(_)
            | TemplateValue::Macro(_)
            | TemplateValue::Loop(_)
            | TemplateValue::Function(_) => true,
        }
    }

    /// The kind of value, for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            TemplateValue::Undefined => "an undefined value",
            TemplateValue::None => "none",
            TemplateValue::Bool(_) => "a boolean",
            TemplateValue::Int(_) | TemplateValue::Float(_) => "a number",
            TemplateValue::Text(_) => "a text",
            TemplateValue::List(list) if list.is_tuple => "a tuple",
            TemplateValue::List(_) => "a list",
            TemplateValue::Map(_) => "a dictionary",
            TemplateValue::Namespace(_) => "a namespace",
            TemplateValue::Macro(_) | TemplateValue::Function(_) => "a function",
            TemplateValue::Loop(_) => "a loop",
        }
    }

    /// The number of values and bytes of text in a value that shares nothing, as those of callers.
    pub(in crate::text) fn size(&self) -> u64 {
        match self {
            TemplateValue::Text(text) => 16 + text.len() as u64,
            TemplateValue::List(list) => 16 + list.items.iter().map(TemplateValue::size).sum::<u64>(),
            TemplateValue::Map(map) => {
                16 + map.entries.iter().map(|(key, value)| key.size() + value.size()).sum::<u64>()
            }
            _ => 16,
        }
    }
}

/// Levels of a container of these values.
fn levels_above<'a>(values: impl Iterator<Item = &'a TemplateValue>) -> Result<u16, Problem> {
    let of = |value: &TemplateValue| match value {
        TemplateValue::List(list) => list.levels,
        TemplateValue::Map(map) => map.levels,
        _ => 0,
    };
    let levels = 1 + values.map(of).max().unwrap_or(0);
    check_levels(levels)?;
    Ok(levels)
}

fn check_levels(levels: u16) -> Result<(), Problem> {
    check(levels <= MOST_LEVELS, || format!("lists and dictionaries nested more than {MOST_LEVELS} levels deep"))
}

/// As Python shows a value of a caller; the template's own are written with a bound.
impl fmt::Debug for TemplateValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TemplateValue::None => f.write_str("None"),
            TemplateValue::Bool(value) => f.write_str(if *value { "True" } else { "False" }),
            TemplateValue::Int(value) => write!(f, "{value}"),
            TemplateValue::Float(value) => write!(f, "{value:?}"),
            TemplateValue::Text(text) => write!(f, "{text:?}"),
            TemplateValue::List(list) => f.debug_list().entries(&list.items).finish(),
            TemplateValue::Map(map) => {
                f.debug_map().entries(map.entries.iter().map(|(key, value)| (key, value))).finish()
            }
            other => f.write_str(other.kind()),
        }
    }
}

impl From<bool> for TemplateValue {
    fn from(value: bool) -> Self {
        TemplateValue::Bool(value)
    }
}

impl From<usize> for TemplateValue {
    fn from(value: usize) -> Self {
        TemplateValue::Int(value as i128)
    }
}

impl<'de> Deserialize<'de> for TemplateValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader)
    }
}

/// Reads JSON with the keys of objects in their order.
struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = TemplateValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<TemplateValue, E> {
        Ok(TemplateValue::None)
    }

    fn visit_none<E>(self) -> Result<TemplateValue, E> {
        Ok(TemplateValue::None)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<TemplateValue, D::Error> {
        TemplateValue::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<TemplateValue, E> {
        Ok(TemplateValue::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<TemplateValue, E> {
        Ok(TemplateValue::Int(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<TemplateValue, E> {
        Ok(TemplateValue::Int(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<TemplateValue, E> {
        Ok(TemplateValue::Float(value))
    }

    fn visit_str<E>(self, text: &str) -> Result<TemplateValue, E> {
        Ok(TemplateValue::text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<TemplateValue, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        TemplateValue::list(items).map_err(|problem| serde::de::Error::custom(problem.text))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TemplateValue, A::Error> {
        let mut entries: Vec<(TemplateValue, TemplateValue)> = Vec::new();
        let mut seen = std::collections::HashMap::new();
        while let Some((key, value)) = map.next_entry::<String, TemplateValue>()? {
            // A key that comes again has the last value, in the first place, as in Python.
            match seen.get(&key) {
                Some(&at) => {
                    let entry: &mut (TemplateValue, TemplateValue) = &mut entries[at];
                    entry.1 = value;
                }
                None => {
                    entries.push((TemplateValue::text(&key), value));
                    seen.insert(key, entries.len() - 1);
                }
            }
        }
        TemplateValue::map(entries).map_err(|problem| serde::de::Error::custom(problem.text))
    }
}
