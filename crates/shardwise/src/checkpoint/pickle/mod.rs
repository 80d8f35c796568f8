//! Pickles, read without executing anything, and written.
//!
//! A pickle is a program for a small machine that can call any function it names. Here the machine only builds a table of
//! objects: a call is recorded and not made, and a name that checkpoints have no use for ends the reading. It is ours because
//! a general reader has no list of names, and no bound on what objects that are used many times grow to.

mod globals;
mod machine;
mod object;
mod write;

use std::collections::BTreeMap;

use super::stored::NOT_A_CHECKPOINT;
use super::value::Value;
use crate::error::{ErrorKind, Result};

pub(super) use object::{Object, ObjectId};
pub(super) use write::PickleWriter;

/// A pickle that has been read.
#[derive(Debug)]
pub(super) struct Pickle {
    objects: Vec<Object>,
    root: ObjectId,
    /// How much may be made of it: objects that are used many times would otherwise grow without bound.
    budget: usize,
}

/// More dimensions than PyTorch's tensors can have are refused.
const MAX_DIMS: usize = 64;
/// Values nested deeper than this are refused.
pub(super) const MAX_DEPTH: usize = 100;

impl Pickle {
    /// Reads a pickle.
    pub(super) fn read(bytes: &[u8]) -> Result<Pickle> {
        let (objects, root) = machine::run(bytes)?;
        Ok(Pickle { objects, root, budget: bytes.len().saturating_mul(32).saturating_add(1 << 16) })
    }

    /// What the pickle stands for.
    pub(super) fn root(&self) -> ObjectId {
        self.root
    }

    /// How many bytes may be made of this pickle.
    pub(super) fn budget(&self) -> usize {
        self.budget
    }

    pub(super) fn get(&self, id: ObjectId) -> &Object {
        &self.objects[id as usize]
    }

    pub(super) fn text(&self, id: ObjectId) -> Option<&str> {
        match self.get(id) {
            Object::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A size, an offset or a position.
    pub(super) fn size(&self, id: ObjectId) -> Option<usize> {
        match self.get(id) {
            Object::Int(n) => usize::try_from(*n).ok(),
            _ => None,
        }
    }

    /// The entries of a list or tuple.
    pub(super) fn entries(&self, id: ObjectId) -> Option<&[ObjectId]> {
        match self.get(id) {
            Object::List(entries) => Some(entries),
            Object::Tuple(entries) => Some(entries),
            _ => None,
        }
    }

    /// Sizes: a tuple or list, or `torch.Size` of one.
    pub(super) fn sizes(&self, id: ObjectId) -> Option<Vec<usize>> {
        let id = match self.constructed(id) {
            Some(("torch", "Size", args, _)) => *self.entries(args)?.first()?,
            Some(_) => return None,
            None => id,
        };
        let sizes = self.entries(id).filter(|sizes| sizes.len() <= MAX_DIMS)?;
        sizes.iter().map(|&entry| self.size(entry)).collect()
    }

    pub(super) fn dict(&self, id: ObjectId) -> Option<&[(ObjectId, ObjectId)]> {
        match self.get(id) {
            Object::Dict(pairs) => Some(pairs),
            _ => None,
        }
    }

    /// The entry of a dict under a name; the last one counts.
    pub(super) fn field(&self, id: ObjectId, name: &str) -> Option<ObjectId> {
        self.dict(id)?.iter().rev().find(|(key, _)| self.text(*key) == Some(name)).map(|&(_, value)| value)
    }

    /// Module and name of a class or function.
    pub(super) fn global(&self, id: ObjectId) -> Option<(&str, &str)> {
        match self.get(id) {
            Object::Global(names) => Some((&names.0, &names.1)),
            _ => None,
        }
    }

    /// Module and name of what an object is made with, the arguments, and the state.
    pub(super) fn constructed(&self, id: ObjectId) -> Option<(&str, &str, ObjectId, Option<ObjectId>)> {
        match self.get(id) {
            Object::Constructed { callable, args, state } => {
                let (module, name) = self.global(*callable)?;
                Some((module, name, *args, *state))
            }
            _ => None,
        }
    }

    /// An object as a value, not deeper than `depth`; what it takes comes off the budget.
    pub(super) fn value(&self, id: ObjectId, depth: usize, budget: &mut usize) -> Result<Value> {
        let object = self.get(id);
        self.spend(id, depth, budget)?;
        let list = |entries: &[ObjectId], budget: &mut usize| -> Result<Vec<Value>> {
            entries.iter().map(|&entry| self.value(entry, depth - 1, budget)).collect()
        };
        let unfit = |found: String| {
            let needed = "none, truth values, integers of 64 bits, numbers, text, lists, tuples and dicts of these";
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
            Object::List(entries) => Value::List(list(entries, budget)?),
            Object::Tuple(entries) => Value::Tuple(list(entries, budget)?),
            Object::Dict(pairs) => {
                let mut map = BTreeMap::new();
                for &(key, value) in pairs {
                    let name = self.key_text(key).ok_or_else(|| unfit("a dict with keys that are not text".into()))?;
                    *budget = budget.saturating_sub(name.len());
                    map.insert(name, self.value(value, depth - 1, budget)?);
                }
                Value::Map(map)
            }
            Object::Constructed { .. } => match self.sizes(id) {
                Some(sizes) => Value::Tuple(sizes.into_iter().map(|n| Value::Int(n as i64)).collect()),
                None => return Err(unfit(format!("an object ({})", self.describe(id)))),
            },
            _ => return Err(unfit(self.describe(id))),
        })
    }

    /// Takes the cost of an object off a budget; an error if it is used up, or if the object lies too deep.
    pub(super) fn spend(&self, id: ObjectId, depth: usize, budget: &mut usize) -> Result<()> {
        let cost = match self.get(id) {
            Object::Text(text) => 1 + text.len(),
            _ => 1,
        };
        if depth == 0 || *budget < cost {
            let found = "values inside values without end, or one value over and over";
            let needed = format!("{MAX_DEPTH} levels and {} entries at most", self.budget);
            return Err(ErrorKind::Damaged.error("pickle", found, needed, NOT_A_CHECKPOINT));
        }
        *budget -= cost;
        Ok(())
    }

    /// The key of a dict as text, as Python's `str` has it.
    pub(super) fn key_text(&self, id: ObjectId) -> Option<String> {
        match self.get(id) {
            Object::Text(text) => Some(text.to_string()),
            Object::Int(n) => Some(n.to_string()),
            Object::Bool(b) => Some(if *b { "True" } else { "False" }.to_string()),
            Object::None => Some("None".to_string()),
            _ => None,
        }
    }

    /// What an object is, for messages.
    pub(super) fn describe(&self, id: ObjectId) -> String {
        let kind = match self.get(id) {
            Object::None => "None",
            Object::Bool(_) => "a truth value",
            Object::Int(_) => "a whole number",
            Object::BigInt => "a whole number beyond 64 bits",
            Object::Float(_) => "a number",
            Object::Text(_) => "text",
            Object::Bytes(_) => "bytes",
            Object::List(_) => "a list",
            Object::Tuple(_) => "a tuple",
            Object::Dict(_) => "a dict",
            Object::Set(_) => "a set",
            Object::PersistentId(_) => "a storage",
            Object::Global(names) => return format!("{}.{}", names.0, names.1),
            Object::Constructed { callable, .. } => match self.global(*callable) {
                Some((module, name)) => return format!("{module}.{name}"),
                None => "an object without a class",
            },
        };
        kind.to_string()
    }
}

#[cfg(test)]
mod tests;
