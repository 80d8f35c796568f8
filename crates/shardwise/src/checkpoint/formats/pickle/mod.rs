//! Reading pickles without executing anything, and writing them.
//!
//! A pickle is a program for a stack machine that can call any function by name. This machine only builds a table of objects:
//! calls are recorded and not executed, and a name that checkpoints have no use for is an error, or makes the entry that has it
//! unreadable. A general pickle crate would neither restrict the names nor bound the memory of objects that are referenced
//! many times.

mod globals;
mod machine;
mod object;
mod write;

use std::collections::BTreeMap;

use crate::checkpoint::metadata::stored::NOT_A_CHECKPOINT;
use crate::checkpoint::metadata::value::Value;
use crate::error::{ErrorKind, Result};

use machine::Names;
pub(in crate::checkpoint) use object::{Object, ObjectId};
pub(in crate::checkpoint) use write::PickleWriter;

/// A parsed pickle.
#[derive(Debug)]
pub(in crate::checkpoint) struct Pickle {
    objects: Vec<Object>,
    root: ObjectId,
    /// How many bytes may be copied out of the pickle: objects that are referenced many times could otherwise expand without
    /// bound ("billion laughs").
    budget: usize,
}

/// Most dimensions of a tensor, as in PyTorch.
const MAX_DIMS: usize = 64;
/// Deepest nesting of values: bounds the recursion, and real state dicts are far shallower.
pub(in crate::checkpoint) const MAX_DEPTH: usize = 100;

impl Pickle {
    /// Parses a pickle; the name of a class or function that checkpoints have no use for is an error.
    pub(in crate::checkpoint) fn read(bytes: &[u8]) -> Result<Pickle> {
        Self::parse(bytes, Names::Known)
    }

    /// Parses a pickle with any names; what is an instance of an unknown class cannot be converted to a value.
    pub(in crate::checkpoint) fn read_any(bytes: &[u8]) -> Result<Pickle> {
        Self::parse(bytes, Names::Any)
    }

    fn parse(bytes: &[u8], names: Names) -> Result<Pickle> {
        // 32 bytes per byte of pickle, plus room for small ones: generous, and linear in the size of the file.
        let (objects, root) = machine::run(bytes, names)?;
        Ok(Pickle { objects, root, budget: bytes.len().saturating_mul(32).saturating_add(1 << 16) })
    }

    /// The root object.
    pub(in crate::checkpoint) fn root(&self) -> ObjectId {
        self.root
    }

    /// How many bytes may be copied out of this pickle.
    pub(in crate::checkpoint) fn budget(&self) -> usize {
        self.budget
    }

    pub(in crate::checkpoint) fn get(&self, id: ObjectId) -> &Object {
        &self.objects[id as usize]
    }

    pub(in crate::checkpoint) fn text(&self, id: ObjectId) -> Option<&str> {
        match self.get(id) {
            Object::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A non-negative integer, such as a size or an offset.
    pub(in crate::checkpoint) fn size(&self, id: ObjectId) -> Option<usize> {
        match self.get(id) {
            Object::Int(n) => usize::try_from(*n).ok(),
            _ => None,
        }
    }

    /// The entries of a list or tuple.
    pub(in crate::checkpoint) fn entries(&self, id: ObjectId) -> Option<&[ObjectId]> {
        match self.get(id) {
            Object::List(entries) => Some(entries),
            Object::Tuple(entries) => Some(entries),
            _ => None,
        }
    }

    /// A shape: a tuple or list of integers, or a `torch.Size`.
    pub(in crate::checkpoint) fn sizes(&self, id: ObjectId) -> Option<Vec<usize>> {
        let id = match self.constructed(id) {
            Some(("torch", "Size", args, _)) => *self.entries(args)?.first()?,
            Some(_) => return None,
            None => id,
        };
        let sizes = self.entries(id).filter(|sizes| sizes.len() <= MAX_DIMS)?;
        sizes.iter().map(|&entry| self.size(entry)).collect()
    }

    pub(in crate::checkpoint) fn dict(&self, id: ObjectId) -> Option<&[(ObjectId, ObjectId)]> {
        match self.get(id) {
            Object::Dict(pairs) => Some(pairs),
            _ => None,
        }
    }

    /// The entry of a dict under a string key; of duplicates, the last one, as in Python.
    pub(in crate::checkpoint) fn field(&self, id: ObjectId, name: &str) -> Option<ObjectId> {
        self.dict(id)?.iter().rev().find(|(key, _)| self.text(*key) == Some(name)).map(|&(_, value)| value)
    }

    /// Module and name of a class or function.
    pub(in crate::checkpoint) fn global(&self, id: ObjectId) -> Option<(&str, &str)> {
        match self.get(id) {
            Object::Global(names) => Some((&names.0, &names.1)),
            _ => None,
        }
    }

    /// Module and name of the callable that constructs an object, the arguments, and the state.
    pub(in crate::checkpoint) fn constructed(&self, id: ObjectId) -> Option<(&str, &str, ObjectId, Option<ObjectId>)> {
        match self.get(id) {
            Object::Constructed { callable, args, state } => {
                let (module, name) = self.global(*callable)?;
                Some((module, name, *args, *state))
            }
            _ => None,
        }
    }

    /// Converts an object to a value of at most `depth` levels; its size is subtracted from the budget.
    pub(in crate::checkpoint) fn value(&self, id: ObjectId, depth: usize, budget: &mut usize) -> Result<Value> {
        let object = self.get(id);
        self.spend(id, depth, budget)?;
        let list = |entries: &[ObjectId], budget: &mut usize| -> Result<Vec<Value>> {
            entries.iter().map(|&entry| self.value(entry, depth - 1, budget)).collect()
        };
        let unfit = |found: String| {
            let needed =
                "None, booleans, 64-bit integers, floats, strings, bytes, and lists, tuples and dicts of these";
            ErrorKind::Unsupported.error(
                "stored value",
                found,
                needed,
                "leave it out when saving, or save it as one of these",
            )
        };
        Ok(match object {
            Object::None => Value::None,
            Object::Bool(b) => Value::Bool(*b),
            Object::Int(n) => Value::Int(*n),
            Object::Float(x) => Value::Float(*x),
            Object::Text(text) => Value::Text(text.to_string()),
            Object::Bytes(bytes) => Value::Bytes(bytes.to_vec()),
            Object::List(entries) => Value::List(list(entries, budget)?),
            Object::Tuple(entries) => Value::Tuple(list(entries, budget)?),
            Object::Dict(pairs) => {
                let mut map = BTreeMap::new();
                for &(key, value) in pairs {
                    let name =
                        self.key_text(key).ok_or_else(|| unfit("a dict with keys that are not strings".into()))?;
                    *budget = budget.saturating_sub(name.len());
                    map.insert(name, self.value(value, depth - 1, budget)?);
                }
                Value::Map(map)
            }
            Object::Constructed { .. } => match (self.sizes(id), self.bytes_of(id)) {
                (Some(sizes), _) => Value::Tuple(sizes.into_iter().map(|n| Value::Int(n as i64)).collect()),
                (None, Some(bytes)) => {
                    *budget = budget.saturating_sub(bytes.len());
                    Value::Bytes(bytes)
                }
                _ => return Err(unfit(format!("an object ({})", self.describe(id)))),
            },
            _ => return Err(unfit(self.describe(id))),
        })
    }

    /// The content of a bytes-like object: `bytes` as protocol 2 writes them, a `bytearray` or a `BytesIO`.
    fn bytes_of(&self, id: ObjectId) -> Option<Vec<u8>> {
        let Object::Constructed { callable, args, state } = self.get(id) else { return None };
        let Object::Foreign(names) = self.get(*callable) else { return None };
        let held = |id: ObjectId| match self.get(id) {
            Object::Bytes(bytes) => Some(bytes.to_vec()),
            _ => None,
        };
        match (names.0.as_str(), names.1.as_str()) {
            ("_codecs", "encode") => {
                let [text, encoding] = self.entries(*args)? else { return None };
                let latin = self.text(*encoding) == Some("latin1");
                self.text(*text).filter(|_| latin)?.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect()
            }
            ("builtins" | "__builtin__", "bytes" | "bytearray") => match self.entries(*args)? {
                [] => Some(Vec::new()),
                [inner] => held(*inner).or_else(|| self.bytes_of(*inner)),
                // `bytearray(text, "latin-1")`, as protocol 2 writes one.
                [text, _] => self.text(*text)?.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect(),
                _ => None,
            },
            ("_io", "BytesIO") => {
                let content = *self.entries((*state)?)?.first()?;
                held(content).or_else(|| self.bytes_of(content))
            }
            _ => None,
        }
    }

    /// Subtracts the cost of an object from a budget; fails if the budget or the depth is used up.
    pub(in crate::checkpoint) fn spend(&self, id: ObjectId, depth: usize, budget: &mut usize) -> Result<()> {
        let cost = match self.get(id) {
            Object::Text(text) => 1 + text.len(),
            Object::Bytes(bytes) => 1 + bytes.len(),
            _ => 1,
        };
        if depth == 0 || *budget < cost {
            let found = "values nested without end, or one value repeated too often";
            let needed = format!("{MAX_DEPTH} levels and {} entries at most", self.budget);
            return Err(ErrorKind::Damaged.error("pickle", found, needed, NOT_A_CHECKPOINT));
        }
        *budget -= cost;
        Ok(())
    }

    /// The key of a dict as Python's `str` formats it.
    pub(in crate::checkpoint) fn key_text(&self, id: ObjectId) -> Option<String> {
        match self.get(id) {
            Object::Text(text) => Some(text.to_string()),
            Object::Int(n) => Some(n.to_string()),
            Object::Bool(b) => Some(if *b { "True" } else { "False" }.to_string()),
            Object::None => Some("None".to_string()),
            _ => None,
        }
    }

    /// What kind of object it is, for messages.
    pub(in crate::checkpoint) fn describe(&self, id: ObjectId) -> String {
        let kind = match self.get(id) {
            Object::None => "None",
            Object::Bool(_) => "a boolean",
            Object::Int(_) => "an integer",
            Object::BigInt => "an integer beyond 64 bits",
            Object::Float(_) => "a float",
            Object::Text(_) => "a string",
            Object::Bytes(_) => "bytes",
            Object::List(_) => "a list",
            Object::Tuple(_) => "a tuple",
            Object::Dict(_) => "a dict",
            Object::Set(_) => "a set",
            Object::PersistentId(_) => "a storage",
            Object::Global(names) | Object::Foreign(names) => return format!("{}.{}", names.0, names.1),
            Object::Constructed { callable, .. } => match self.get(*callable) {
                Object::Global(names) | Object::Foreign(names) => return format!("{}.{}", names.0, names.1),
                _ => "an object without a class",
            },
        };
        kind.to_string()
    }
}

#[cfg(test)]
mod tests;
