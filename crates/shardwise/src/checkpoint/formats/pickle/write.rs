//! Writing pickles of protocol 2, which every Python 3 and `torch.load(weights_only=True)` read.

use std::collections::BTreeMap;

use crate::checkpoint::metadata::value::Value;

/// A pickle under construction: each method pushes an object onto the stack, or combines objects on it.
pub(in crate::checkpoint) struct PickleWriter {
    bytes: Vec<u8>,
    /// Globals that were written before, with their index in the memo.
    globals: BTreeMap<(&'static str, &'static str), u32>,
}

impl PickleWriter {
    pub(in crate::checkpoint) fn new() -> Self {
        PickleWriter { bytes: vec![0x80, 2], globals: BTreeMap::new() }
    }

    /// Ends the pickle, whose root is the object on the stack.
    pub(in crate::checkpoint) fn finish(mut self) -> Vec<u8> {
        self.bytes.push(b'.');
        self.bytes
    }

    /// Pushes a class or function.
    pub(in crate::checkpoint) fn global(&mut self, module: &'static str, name: &'static str) {
        let next = self.globals.len() as u32;
        match self.globals.get(&(module, name)) {
            Some(index) => {
                self.bytes.push(b'j');
                self.bytes.extend_from_slice(&index.to_le_bytes());
            }
            None => {
                self.bytes.extend_from_slice(format!("c{module}\n{name}\nr").as_bytes());
                self.bytes.extend_from_slice(&next.to_le_bytes());
                self.globals.insert((module, name), next);
            }
        }
    }

    pub(in crate::checkpoint) fn none(&mut self) {
        self.bytes.push(b'N');
    }

    pub(in crate::checkpoint) fn bool(&mut self, value: bool) {
        self.bytes.push(if value { 0x88 } else { 0x89 });
    }

    pub(in crate::checkpoint) fn int(&mut self, n: i64) {
        if let Ok(n) = u8::try_from(n) {
            self.bytes.extend_from_slice(&[b'K', n]);
        } else if let Ok(n) = u16::try_from(n) {
            self.bytes.push(b'M');
            self.bytes.extend_from_slice(&n.to_le_bytes());
        } else if let Ok(n) = i32::try_from(n) {
            self.bytes.push(b'J');
            self.bytes.extend_from_slice(&n.to_le_bytes());
        } else {
            self.bytes.extend_from_slice(&[0x8a, 8]);
            self.bytes.extend_from_slice(&n.to_le_bytes());
        }
    }

    pub(in crate::checkpoint) fn float(&mut self, x: f64) {
        self.bytes.push(b'G');
        self.bytes.extend_from_slice(&x.to_be_bytes());
    }

    pub(in crate::checkpoint) fn text(&mut self, text: &str) {
        match u32::try_from(text.len()) {
            Ok(length) => {
                self.bytes.push(b'X');
                self.bytes.extend_from_slice(&length.to_le_bytes());
            }
            Err(_) => {
                self.bytes.push(0x8d);
                self.bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
            }
        }
        self.bytes.extend_from_slice(text.as_bytes());
    }

    /// Begins a tuple: objects up to [`end_tuple`](Self::end_tuple) are its entries.
    pub(in crate::checkpoint) fn begin_tuple(&mut self) {
        self.bytes.push(b'(');
    }

    pub(in crate::checkpoint) fn begin_list(&mut self) {
        self.bytes.extend_from_slice(b"](");
    }

    pub(in crate::checkpoint) fn begin_dict(&mut self) {
        self.bytes.extend_from_slice(b"}(");
    }

    pub(in crate::checkpoint) fn end_tuple(&mut self) {
        self.bytes.push(b't');
    }

    pub(in crate::checkpoint) fn end_list(&mut self) {
        self.bytes.push(b'e');
    }

    /// Ends a dict, whose keys and values were pushed alternately.
    pub(in crate::checkpoint) fn end_dict(&mut self) {
        self.bytes.push(b'u');
    }

    pub(in crate::checkpoint) fn empty_tuple(&mut self) {
        self.bytes.push(b')');
    }

    /// Calls the function below the tuple of arguments.
    pub(in crate::checkpoint) fn call(&mut self) {
        self.bytes.push(b'R');
    }

    /// Pushes an instance of a class without arguments; push its state next, then call [`build`](Self::build).
    pub(in crate::checkpoint) fn object(&mut self, module: &'static str, name: &'static str) {
        self.global(module, name);
        self.empty_tuple();
        self.bytes.push(0x81);
    }

    /// Sets the state on top of the stack on the object below it.
    pub(in crate::checkpoint) fn build(&mut self) {
        self.bytes.push(b'b');
    }

    /// Turns the object on the stack into a persistent id: the name of an object outside the pickle.
    pub(in crate::checkpoint) fn persistent_id(&mut self) {
        self.bytes.push(b'Q');
    }

    /// Pushes a tuple of integers.
    pub(in crate::checkpoint) fn sizes(&mut self, sizes: &[usize]) {
        self.begin_tuple();
        sizes.iter().for_each(|&n| self.int(n as i64));
        self.end_tuple();
    }

    /// Pushes a value as the corresponding Python object.
    pub(in crate::checkpoint) fn value(&mut self, value: &Value) {
        match value {
            Value::None => self.none(),
            Value::Bool(b) => self.bool(*b),
            Value::Int(n) => self.int(*n),
            Value::Float(x) => self.float(*x),
            Value::Text(text) => self.text(text),
            Value::Bytes(bytes) => {
                // As Python's protocol 2 does it, which `weights_only` accepts.
                self.global("_codecs", "encode");
                self.begin_tuple();
                self.text(&bytes.iter().map(|&byte| char::from(byte)).collect::<String>());
                self.text("latin1");
                self.end_tuple();
                self.call();
            }
            Value::List(values) => {
                self.begin_list();
                values.iter().for_each(|value| self.value(value));
                self.end_list();
            }
            Value::Tuple(values) => {
                self.begin_tuple();
                values.iter().for_each(|value| self.value(value));
                self.end_tuple();
            }
            Value::Map(values) => {
                self.begin_dict();
                for (key, value) in values {
                    self.text(key);
                    self.value(value);
                }
                self.end_dict();
            }
        }
    }
}
