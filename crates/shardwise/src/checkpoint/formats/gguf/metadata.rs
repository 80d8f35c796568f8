//! Typed access to the metadata of a GGUF file. Remembers what was asked for, so that nothing of a model is ignored silently.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use crate::checkpoint::metadata::value::Value;
use crate::error::{Error, ErrorKind, Result};

/// The metadata of one file.
pub(super) struct Metadata<'a> {
    values: &'a BTreeMap<String, Value>,
    /// `general.architecture`, the prefix of the keys of the model.
    pub(super) architecture: &'a str,
    asked: RefCell<BTreeSet<String>>,
}

/// Keys of a model, without the architecture, that say nothing that tensors or other keys do not say.
const INFORMATION: [&str; 4] = ["vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.causal"];

impl<'a> Metadata<'a> {
    pub(super) fn new(values: &'a BTreeMap<String, Value>) -> Result<Self> {
        let Some(Value::Text(architecture)) = values.get("general.architecture") else {
            let found = values.get("general.architecture").map_or_else(|| "none".to_string(), Value::to_string);
            return Err(bad("general.architecture", &found, "the name of an architecture"));
        };
        Ok(Metadata { values, architecture, asked: RefCell::default() })
    }

    /// The value of a key; one that begins with a dot is a key of the architecture.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        let key = self.full(key);
        let value = self.values.get(&key);
        self.asked.borrow_mut().insert(key);
        value
    }

    fn full(&self, key: &str) -> String {
        if key.starts_with('.') { format!("{}{key}", self.architecture) } else { key.to_string() }
    }

    /// A value converted by `read`, `None` if there is no such key.
    fn typed<T>(&self, key: &str, needed: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let text = || value.to_string().chars().take(60).collect::<String>();
        read(value).map(Some).ok_or_else(|| bad(&self.full(key), &text(), needed))
    }

    /// A number of things. A list with a number per layer is one number if all are equal.
    pub(super) fn count(&self, key: &str) -> Result<Option<usize>> {
        let one = |value: &Value| match value {
            Value::Int(n) => usize::try_from(*n).ok(),
            _ => None,
        };
        self.typed(key, "a count, the same for all layers", |value| match value {
            Value::List(list) => {
                let first = one(list.first()?)?;
                list.iter().all(|value| one(value) == Some(first)).then_some(first)
            }
            value => one(value),
        })
    }

    /// A count that every file of the architecture has.
    pub(super) fn needed_count(&self, key: &str) -> Result<usize> {
        self.count(key)?.ok_or_else(|| bad(&self.full(key), "none", "a count"))
    }

    /// A number; the shortest decimal that gives the `f32` of the file, as configurations have it.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", |value| match value {
            Value::Float(x) if f64::from(*x as f32) == *x => (*x as f32).to_string().parse().ok(),
            Value::Float(x) => Some(*x),
            Value::Int(n) => Some(*n as f64),
            _ => None,
        })
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a boolean", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", |value| match value {
            Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// A list of strings.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        self.typed(key, "a list of strings", |value| match value {
            Value::List(list) => {
                list.iter().map(|v| if let Value::Text(t) = v { Some(t.as_str()) } else { None }).collect()
            }
            _ => None,
        })
    }

    /// A list of numbers.
    pub(super) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let number = |value: &Value| match value {
            Value::Float(x) => Some(*x),
            Value::Int(n) => Some(*n as f64),
            _ => None,
        };
        self.typed(key, "a list of numbers", |value| match value {
            Value::List(list) => list.iter().map(number).collect(),
            _ => None,
        })
    }

    /// Keys that begin with a prefix.
    pub(super) fn keys(&self, prefix: &str) -> impl Iterator<Item = &'a str> {
        let prefix = prefix.to_string();
        self.values.keys().map(String::as_str).filter(move |key| key.starts_with(&prefix))
    }

    /// Refuses keys of the architecture that nobody has asked for: they may change the result.
    pub(super) fn check_all_used(&self) -> Result<()> {
        let prefix = format!("{}.", self.architecture);
        let asked = self.asked.borrow();
        let unused = |key: &&str| !asked.contains(*key) && !INFORMATION.contains(&&key[prefix.len()..]);
        match self.keys(&prefix).find(unused) {
            None => Ok(()),
            Some(key) => {
                let value = self.values[key].to_string().chars().take(60).collect::<String>();
                Err(ErrorKind::Unsupported.error(
                    "GGUF metadata",
                    format!("{key} = {value}"),
                    format!("keys that are known for the architecture {:?}", self.architecture),
                    "use the Hugging Face directory of the model, or convert with `--to native`, which keeps GGUF's names",
                ))
            }
        }
    }
}

/// The error for a value that a model needs in another form.
pub(super) fn bad(key: &str, found: &str, needed: &str) -> Error {
    ErrorKind::Damaged.error(
        "GGUF metadata",
        format!("{found} as {key}"),
        needed,
        "convert the model to GGUF again, with a newer llama.cpp",
    )
}
