//! The pickle machine: a stack, a memo, and a table of objects that grows by a bounded amount per byte read.

use rustc_hash::FxHashMap;

use super::globals;
use super::object::{Object, ObjectId};
use crate::checkpoint::metadata::stored::NOT_A_CHECKPOINT;
use crate::error::{Error, ErrorKind, Result};

/// Objects that are in the table of every pickle.
const NONE: ObjectId = 0;
const TRUE: ObjectId = 1;
const FALSE: ObjectId = 2;
const EMPTY_TUPLE: ObjectId = 3;

struct PickleMachine<'a> {
    bytes: &'a [u8],
    at: usize,
    objects: Vec<Object>,
    stack: Vec<ObjectId>,
    /// Stack heights at the open marks.
    marks: Vec<usize>,
    memo: FxHashMap<u64, ObjectId>,
    names: Names,
}

/// What happens to the name of a class or function that checkpoints have no use for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Names {
    /// It is an error.
    Known,
    /// It becomes an [`Object::Foreign`].
    Any,
}

/// Parses a pickle into a table of objects and the index of the root.
pub(super) fn run(bytes: &[u8], names: Names) -> Result<(Vec<Object>, ObjectId)> {
    let objects = vec![Object::None, Object::Bool(true), Object::Bool(false), Object::Tuple(Box::new([]))];
    let memo = FxHashMap::default();
    let mut machine = PickleMachine { bytes, at: 0, objects, stack: Vec::new(), marks: Vec::new(), memo, names };
    loop {
        let at = machine.at;
        let opcode = machine.byte()?;
        if opcode == b'.' {
            let root = machine.pop()?;
            return Ok((machine.objects, root));
        }
        machine.step(opcode).map_err(|error| located(error, at))?;
    }
}

/// Adds the byte position to an error.
fn located(error: Error, at: usize) -> Error {
    match error {
        Error::Invalid(inner) => {
            ErrorKind::Damaged.error(inner.what, format!("{} at byte {at}", inner.found), &inner.needed, &inner.fix)
        }
        other => other,
    }
}

fn bad(found: impl std::fmt::Display, needed: &str) -> Error {
    ErrorKind::Damaged.error("pickle", found, needed, NOT_A_CHECKPOINT)
}

impl<'a> PickleMachine<'a> {
    fn step(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            // PROTO and FRAME: nothing depends on them.
            0x80 => self.take(1).map(drop),
            0x95 => self.take(8).map(drop),
            b'(' => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            b'0' => match self.marks.last() == Some(&self.stack.len()) {
                true => self.marks.pop().map(drop).ok_or_else(|| bad("an empty stack", "an object")),
                false => self.pop().map(drop),
            },
            b'1' => self.since_mark().map(drop),
            b'2' => self.top().map(|id| self.stack.push(id)),
            b'N' => self.known(NONE),
            0x88 => self.known(TRUE),
            0x89 => self.known(FALSE),
            b')' => self.known(EMPTY_TUPLE),
            b'I' | b'L' | b'J' | b'K' | b'M' | 0x8a | 0x8b | b'F' | b'G' => self.number(opcode),
            b'V' | b'S' | b'X' | 0x8c | 0x8d | b'U' | b'T' => self.text(opcode),
            b'C' | b'B' | 0x8e | 0x96 => self.bytes_object(opcode),
            b']' | b'}' | 0x8f | b'l' | b't' | 0x85..=0x87 | b'd' | 0x91 => self.container(opcode),
            b'a' | b'e' | 0x90 | b's' | b'u' => self.fill(opcode),
            b'p' | b'q' | b'r' | 0x94 | b'g' | b'h' | b'j' => self.memory(opcode),
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push_global(module, name)
            }
            0x93 => self.stack_global(),
            b'R' | 0x81 => self.call(),
            0x92 => {
                // NEWOBJ_EX of a class that cannot be read anyway: the arguments by name are not needed.
                self.pop()?;
                self.call()
            }
            b'b' => self.build(),
            b'P' => {
                let name = Object::Text(self.line()?.into());
                self.push(name)?;
                self.persistent_id()
            }
            b'Q' => self.persistent_id(),
            other => Err(bad(format!("opcode {other:#04x}"), "one that checkpoints use")),
        }
    }

    fn number(&mut self, opcode: u8) -> Result<()> {
        let number = match opcode {
            b'I' => return self.decimal_int(),
            b'L' => {
                let line = self.line()?;
                return self.push_decimal(line.strip_suffix('L').unwrap_or(line));
            }
            0x8a => {
                let length = usize::from(self.byte()?);
                return self.long(length);
            }
            0x8b => {
                let length = self.length4()?;
                return self.long(length);
            }
            b'J' => Object::Int(i64::from(i32::from_le_bytes(self.array()?))),
            b'K' => Object::Int(i64::from(self.byte()?)),
            b'M' => Object::Int(i64::from(u16::from_le_bytes(self.array()?))),
            b'F' => {
                let line = self.line()?;
                Object::Float(line.trim().parse().map_err(|_| bad(format!("{line:?}"), "a number"))?)
            }
            _ => Object::Float(f64::from_be_bytes(self.array()?)),
        };
        self.push(number)
    }

    fn text(&mut self, opcode: u8) -> Result<()> {
        let length = match opcode {
            b'V' | b'S' => return self.quoted(opcode == b'S'),
            0x8c | b'U' => usize::from(self.byte()?),
            0x8d => self.length8()?,
            _ => self.length4()?,
        };
        if matches!(opcode, b'U' | b'T') { self.old_text(length) } else { self.unicode(length) }
    }

    fn bytes_object(&mut self, opcode: u8) -> Result<()> {
        let length = match opcode {
            b'C' => usize::from(self.byte()?),
            b'B' => self.length4()?,
            _ => self.length8()?,
        };
        self.binary(length)
    }

    /// Creates a list, tuple, dict or set.
    fn container(&mut self, opcode: u8) -> Result<()> {
        let object = match opcode {
            0x85..=0x87 => return self.tuple(usize::from(opcode - 0x84)),
            b']' => Object::List(Vec::new()),
            b'}' => Object::Dict(Vec::new()),
            0x8f => Object::Set(Vec::new()),
            b'l' => Object::List(self.since_mark()?),
            b't' => Object::Tuple(self.since_mark()?.into()),
            b'd' => Object::Dict(pairs(&self.since_mark()?)?),
            _ => Object::Set(self.since_mark()?),
        };
        self.push(object)
    }

    /// Adds entries to a list, dict or set.
    fn fill(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            b'a' => {
                let entry = self.pop()?;
                self.append(&[entry])
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set_items(&[(key, value)])
            }
            b'u' => {
                let pairs = pairs(&self.since_mark()?)?;
                self.set_items(&pairs)
            }
            _ => {
                let entries = self.since_mark()?;
                self.append(&entries)
            }
        }
    }

    /// Stores an object in the memo or recalls one.
    fn memory(&mut self, opcode: u8) -> Result<()> {
        let index = match opcode {
            0x94 => self.memo.len() as u64,
            b'p' | b'g' => self.index_line()?,
            b'q' | b'h' => u64::from(self.byte()?),
            _ => u64::from(u32::from_le_bytes(self.array()?)),
        };
        if matches!(opcode, b'g' | b'h' | b'j') { self.recall(index) } else { self.remember(index) }
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        if length > rest.len() {
            return Err(bad(format!("an end {} bytes too early", length - rest.len()), "a complete pickle"));
        }
        self.at += length;
        Ok(&rest[..length])
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn length4(&mut self) -> Result<usize> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }

    fn length8(&mut self) -> Result<usize> {
        let length = u64::from_le_bytes(self.array()?);
        usize::try_from(length).map_err(|_| bad(format!("{length} bytes"), "a length"))
    }

    /// Reads text up to the end of the line.
    fn line(&mut self) -> Result<&'a str> {
        let rest = &self.bytes[self.at..];
        let end =
            rest.iter().position(|&b| b == b'\n').ok_or_else(|| bad("a line without an end", "a complete pickle"))?;
        self.at += end + 1;
        std::str::from_utf8(&rest[..end]).map_err(|_| bad("bytes that are not UTF-8", "text"))
    }

    fn index_line(&mut self) -> Result<u64> {
        let line = self.line()?;
        line.parse().map_err(|_| bad(format!("{line:?}"), "a number"))
    }

    fn push(&mut self, object: Object) -> Result<()> {
        let id = ObjectId::try_from(self.objects.len()).map_err(|_| bad("too many objects", "2^32 at most"))?;
        self.objects.push(object);
        self.stack.push(id);
        Ok(())
    }

    fn known(&mut self, id: ObjectId) -> Result<()> {
        self.stack.push(id);
        Ok(())
    }

    /// The stack height at the innermost mark: objects below it cannot be popped.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<ObjectId> {
        match self.stack.last() {
            Some(&id) if self.stack.len() > self.floor() => Ok(id),
            _ => Err(bad("an empty stack", "an object on it")),
        }
    }

    fn pop(&mut self) -> Result<ObjectId> {
        let id = self.top()?;
        self.stack.pop();
        Ok(id)
    }

    fn since_mark(&mut self) -> Result<Vec<ObjectId>> {
        let mark = self.marks.pop().ok_or_else(|| bad("no mark", "a mark on the stack"))?;
        Ok(self.stack.split_off(mark))
    }

    fn tuple(&mut self, length: usize) -> Result<()> {
        if self.stack.len() < self.floor() + length {
            return Err(bad("an empty stack", "objects on it"));
        }
        let entries = self.stack.split_off(self.stack.len() - length);
        self.push(Object::Tuple(entries.into()))
    }

    fn append(&mut self, entries: &[ObjectId]) -> Result<()> {
        let id = self.top()?;
        match &mut self.objects[id as usize] {
            Object::List(list) | Object::Set(list) => list.extend_from_slice(entries),
            // Entries of an object that cannot be read.
            Object::Constructed { .. } if self.names == Names::Any => {}
            _ => return Err(bad("entries for an object that is not a list", "a list")),
        }
        Ok(())
    }

    fn set_items(&mut self, pairs: &[(ObjectId, ObjectId)]) -> Result<()> {
        let id = self.top()?;
        match &mut self.objects[id as usize] {
            Object::Dict(dict) => dict.extend_from_slice(pairs),
            Object::Constructed { .. } if self.names == Names::Any => {}
            _ => return Err(bad("items for an object that is not a dict", "a dict")),
        }
        Ok(())
    }

    fn remember(&mut self, index: u64) -> Result<()> {
        let id = self.top()?;
        self.memo.insert(index, id);
        Ok(())
    }

    fn recall(&mut self, index: u64) -> Result<()> {
        let id = self
            .memo
            .get(&index)
            .ok_or_else(|| bad(format!("no object {index} in the memo"), "one that was stored in the memo"))?;
        self.stack.push(*id);
        Ok(())
    }

    fn decimal_int(&mut self) -> Result<()> {
        match self.line()? {
            "00" => self.known(FALSE),
            "01" => self.known(TRUE),
            line => self.push_decimal(line),
        }
    }

    fn push_decimal(&mut self, line: &str) -> Result<()> {
        let digits = line.strip_prefix('-').unwrap_or(line);
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(bad(format!("{line:?}"), "an integer"));
        }
        self.push(line.parse().map_or(Object::BigInt, Object::Int))
    }

    /// An integer in two's complement, little-endian.
    fn long(&mut self, length: usize) -> Result<()> {
        let bytes = self.take(length)?;
        let fill = if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
        let mut wide = [fill; 8];
        let object = match bytes.len() <= 8 {
            true => {
                wide[..bytes.len()].copy_from_slice(bytes);
                Object::Int(i64::from_le_bytes(wide))
            }
            false => Object::BigInt,
        };
        self.push(object)
    }

    fn unicode(&mut self, length: usize) -> Result<()> {
        let bytes = self.take(length)?;
        let text = std::str::from_utf8(bytes).map_err(|_| bad("bytes that are not UTF-8", "text"))?;
        self.push(Object::Text(text.into()))
    }

    fn binary(&mut self, length: usize) -> Result<()> {
        let bytes = self.take(length)?;
        self.push(Object::Bytes(bytes.into()))
    }

    /// A Python 2 `str`: text if it is UTF-8, else bytes.
    fn old_text(&mut self, length: usize) -> Result<()> {
        let bytes = self.take(length)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => self.push(Object::Text(text.into())),
            Err(_) => self.push(Object::Bytes(bytes.into())),
        }
    }

    /// Text that ends with the line, as protocol 0 stores it.
    fn quoted(&mut self, quotes: bool) -> Result<()> {
        let line = self.line()?;
        let inner = match quotes {
            false => Some(line),
            true => ['\'', '"'].iter().find_map(|&quote| line.strip_prefix(quote)?.strip_suffix(quote)),
        };
        match inner {
            Some(text) if !text.contains('\\') => self.push(Object::Text(text.into())),
            _ => Err(bad("text with escapes", "plain text, as in protocol 2 and later")),
        }
    }

    fn push_global(&mut self, module: &str, name: &str) -> Result<()> {
        let names = Box::new((module.to_string(), name.to_string()));
        match globals::check(module, name) {
            Ok(()) => self.push(Object::Global(names)),
            Err(_) if self.names == Names::Any => self.push(Object::Foreign(names)),
            Err(error) => Err(error),
        }
    }

    fn stack_global(&mut self) -> Result<()> {
        let (name, module) = (self.pop()?, self.pop()?);
        match (&self.objects[module as usize], &self.objects[name as usize]) {
            (Object::Text(module), Object::Text(name)) => {
                let (module, name) = (module.clone(), name.clone());
                self.push_global(&module, &name)
            }
            _ => Err(bad("a class whose name is not a string", "the name of a class")),
        }
    }

    fn call(&mut self) -> Result<()> {
        let (args, callable) = (self.pop()?, self.pop()?);
        let Object::Tuple(given) = &self.objects[args as usize] else {
            return Err(bad("a call without a tuple of arguments", "a tuple"));
        };
        // An `OrderedDict` becomes a dict: its items follow by SETITEMS, as those of a dict do.
        let is_dict = match &self.objects[callable as usize] {
            Object::Global(names) => names.1 == "OrderedDict" && given.is_empty(),
            Object::Foreign(_) => false,
            _ if self.names == Names::Any => false,
            _ => {
                let needed = "a class or function by name";
                return Err(bad("a call of an object that is not a class or function", needed));
            }
        };
        match is_dict {
            true => self.push(Object::Dict(Vec::new())),
            false => self.push(Object::Constructed { callable, args, state: None }),
        }
    }

    fn build(&mut self) -> Result<()> {
        let new = self.pop()?;
        let id = self.top()?;
        match &mut self.objects[id as usize] {
            Object::Constructed { state, .. } => *state = Some(new),
            // Attributes of an `OrderedDict`, such as `_metadata` of a state dict; not needed.
            Object::Dict(_) => {}
            Object::Foreign(_) => {}
            _ => return Err(bad("state for an object that cannot have one", "an object")),
        }
        Ok(())
    }

    fn persistent_id(&mut self) -> Result<()> {
        let name = self.pop()?;
        self.push(Object::PersistentId(name))
    }
}

fn pairs(entries: &[ObjectId]) -> Result<Vec<(ObjectId, ObjectId)>> {
    match entries.as_chunks::<2>() {
        (pairs, []) => Ok(pairs.iter().map(|&[key, value]| (key, value)).collect()),
        _ => Err(bad("a key without a value", "pairs")),
    }
}
