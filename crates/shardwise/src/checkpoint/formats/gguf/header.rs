//! The header of a GGUF file: metadata, and type, shape and place of each tensor.
//!
//! Not candle's reader, which keeps every number of an array as an enum and has no bound on their memory.

use std::collections::{BTreeMap, BTreeSet};

use shardwise_kernels::quantized::BlockType;

use super::MAGIC;
use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::stored::NOT_A_CHECKPOINT;
use crate::checkpoint::metadata::value::Value;
use crate::error::{Error, ErrorKind, Result};

/// The validated header of a file.
pub(super) struct GgufHeader {
    /// The metadata by key.
    pub(super) values: BTreeMap<String, Value>,
    /// All tensors.
    pub(super) tensors: Vec<TensorEntry>,
}

/// A tensor as the header describes it.
pub(super) struct TensorEntry {
    pub(super) name: String,
    pub(super) stored: StoredType,
    /// Row-major: the reverse of the file's order, which has the fastest dimension first.
    pub(super) shape: Vec<usize>,
    /// Byte offset in the file.
    pub(super) offset: u64,
}

/// The type of the elements of a tensor.
#[derive(Clone, Copy)]
pub(super) enum StoredType {
    Plain(ElementType),
    Blocks(BlockType),
}

/// Longest header that is read. Those of models with the largest vocabularies have about 20 MB.
const MAX_HEADER: u64 = 256 << 20;
/// Most values, those in lists included: each takes 32 bytes of memory, but may take only one of the file.
const MAX_VALUES: usize = 8 << 20;
/// Deepest nesting of lists; real files do not nest them.
const MAX_DEPTH: usize = 4;
/// Most dimensions of a tensor, as in ggml.
const MAX_DIMS: u32 = 4;
/// Alignment of the tensors unless the metadata has another one.
const ALIGNMENT: u64 = 32;
/// Bytes that are read at a time.
const WINDOW: u64 = 64 << 10;

impl GgufHeader {
    /// Reads and validates the header: every tensor is inside the file, and no two overlap.
    pub(super) fn read(files: &Files, name: &str) -> Result<Self> {
        let size = files.size(name).unwrap_or(0);
        let mut reader =
            HeaderReader { files, name, size, at: 0, window: Vec::new(), window_start: 0, values_left: MAX_VALUES };
        if size < 4 || reader.take(4)? != MAGIC {
            return Err(reader.bad("a file that does not begin with GGUF", "the GGUF magic number"));
        }
        let version = reader.u32()?;
        if !(2..=3).contains(&version) {
            let swapped = version.swap_bytes();
            let found = match (2..=3).contains(&swapped) {
                true => format!("a big-endian file of version {swapped}: {name:?}"),
                false => format!("version {version} of {name:?}"),
            };
            let needed = "version 2 or 3, little-endian";
            return Err(ErrorKind::Unsupported.error("GGUF file", found, needed, "convert it again with llama.cpp"));
        }
        let (tensor_count, value_count) = (reader.u64()?, reader.u64()?);
        let mut values = BTreeMap::new();
        for _ in 0..value_count {
            let key = reader.name()?;
            let kind = reader.u32()?;
            let value = reader.value(kind, 0)?;
            if values.contains_key(&key) {
                return Err(reader.bad(format!("two values named {key:?}"), "different names"));
            }
            values.insert(key, value);
        }
        let mut entries = Vec::new();
        for _ in 0..tensor_count {
            entries.push(reader.tensor()?);
        }
        let alignment = match values.get("general.alignment") {
            None => ALIGNMENT,
            Some(Value::Int(n)) if *n > 0 && n % 8 == 0 => *n as u64,
            Some(other) => return Err(reader.bad(format!("general.alignment {other}"), "a multiple of 8")),
        };
        let tensors = place(&reader, entries, alignment)?;
        Ok(GgufHeader { values, tensors })
    }
}

/// Finds where the tensors are in the file and refuses any that are outside it or overlap.
fn place(reader: &HeaderReader<'_>, mut tensors: Vec<TensorEntry>, alignment: u64) -> Result<Vec<TensorEntry>> {
    let data = reader.at.checked_next_multiple_of(alignment);
    let mut ranges = Vec::new();
    let mut names = BTreeSet::new();
    for tensor in &mut tensors {
        let (found, inner) = (format!("tensor {:?} of shape {:?}", tensor.name, tensor.shape), tensor.shape.last());
        if !names.insert(tensor.name.clone()) {
            return Err(reader.bad(format!("two tensors named {:?}", tensor.name), "different names"));
        }
        let count = tensor.shape.iter().try_fold(1u64, |count, &n| count.checked_mul(n as u64));
        let bytes = match tensor.stored {
            StoredType::Plain(element) => count.and_then(|count| count.checked_mul(element.size_in_bytes() as u64)),
            StoredType::Blocks(block) => {
                if !inner.is_some_and(|n| n.is_multiple_of(block.elements())) {
                    let needed = format!("rows of whole blocks of {} elements ({block})", block.elements());
                    return Err(reader.bad(found, &needed));
                }
                count.and_then(|count| (count / block.elements() as u64).checked_mul(block.bytes() as u64))
            }
        };
        if !tensor.offset.is_multiple_of(alignment) {
            let needed = format!("a multiple of {alignment}");
            return Err(reader.bad(format!("{found} at byte {} of the data", tensor.offset), &needed));
        }
        let start = data.and_then(|data| data.checked_add(tensor.offset));
        let end = start.zip(bytes).and_then(|(start, bytes)| start.checked_add(bytes));
        let (Some(start), Some(end)) = (start, end.filter(|&end| end <= reader.size)) else {
            let found = format!("{found} at byte {} of the data, in a file of {} bytes", tensor.offset, reader.size);
            return Err(reader.bad(found, "a tensor that ends inside the file"));
        };
        tensor.offset = start;
        ranges.push((start, end));
    }
    ranges.retain(|(start, end)| start < end);
    ranges.sort_unstable();
    if let Some(pair) = ranges.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        return Err(reader.bad(format!("two tensors at byte {}", pair[1].0), "tensors that do not overlap"));
    }
    Ok(tensors)
}

/// Reads a header from its beginning, without trusting any length in it.
struct HeaderReader<'a> {
    files: &'a Files,
    name: &'a str,
    /// Size of the file.
    size: u64,
    /// Position of the next byte.
    at: u64,
    window: Vec<u8>,
    window_start: u64,
    /// How many more values may be read.
    values_left: usize,
}

impl HeaderReader<'_> {
    fn bad(&self, found: impl std::fmt::Display, needed: &str) -> Error {
        ErrorKind::Damaged.error("GGUF file", format!("{found} in {:?}", self.name), needed, NOT_A_CHECKPOINT)
    }

    /// The next `count` bytes. Allocates no more than the file has.
    fn take(&mut self, count: u64) -> Result<&[u8]> {
        let end = self.at.checked_add(count);
        let Some(end) = end.filter(|&end| end <= self.size.min(MAX_HEADER)) else {
            let found = format!("{count} bytes from byte {} on, where the file has {}", self.at, self.size);
            return Err(self.bad(found, "a header that ends inside the file, and below 256 MiB"));
        };
        if end > self.window_start + self.window.len() as u64 || self.at < self.window_start {
            self.window.resize(count.max(WINDOW).min(self.size - self.at) as usize, 0);
            self.files.read(self.name, self.at, &mut self.window)?;
            self.window_start = self.at;
        }
        let start = (self.at - self.window_start) as usize;
        self.at = end;
        Ok(&self.window[start..start + count as usize])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N as u64)?);
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn name(&mut self) -> Result<String> {
        let length = self.u64()?;
        let text = String::from_utf8(self.take(length)?.to_vec());
        text.map_err(|_| self.bad("a name that is not UTF-8", "UTF-8"))
    }

    /// Reads a value of a type; `depth` is the number of lists around it.
    fn value(&mut self, kind: u32, depth: usize) -> Result<Value> {
        self.values_left = match self.values_left.checked_sub(1) {
            Some(left) => left,
            None => return Err(self.bad(format!("more than {MAX_VALUES} values"), "fewer")),
        };
        Ok(match kind {
            0 => Value::Int(i64::from(self.array::<1>()?[0])),
            1 => Value::Int(i64::from(i8::from_le_bytes(self.array()?))),
            2 => Value::Int(i64::from(u16::from_le_bytes(self.array()?))),
            3 => Value::Int(i64::from(i16::from_le_bytes(self.array()?))),
            4 => Value::Int(i64::from(self.u32()?)),
            5 => Value::Int(i64::from(i32::from_le_bytes(self.array()?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array()?))),
            7 => match self.array()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(self.bad(format!("the boolean {other}"), "0 or 1")),
            },
            8 => {
                let length = self.u64()?;
                // Some writers split characters of a token: such a string is still shown.
                Value::Text(String::from_utf8_lossy(self.take(length)?).into_owned())
            }
            9 => {
                let (kind, count) = (self.u32()?, self.u64()?);
                if depth >= MAX_DEPTH {
                    return Err(self.bad(format!("lists nested more than {MAX_DEPTH} deep"), "flat lists"));
                }
                let mut list = Vec::new();
                for _ in 0..count {
                    list.push(self.value(kind, depth + 1)?);
                }
                Value::List(list)
            }
            // Larger numbers than `i64` has are shown rounded; no key of a model needs them.
            10 => self.u64().map(|n| i64::try_from(n).map_or(Value::Float(n as f64), Value::Int))?,
            11 => Value::Int(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(self.bad(format!("a value of type {other}"), "a type from 0 to 12")),
        })
    }

    /// Reads the entry of a tensor; its offset is still relative to the data.
    fn tensor(&mut self) -> Result<TensorEntry> {
        let name = self.name()?;
        let dims = self.u32()?;
        if dims > MAX_DIMS {
            return Err(self.bad(format!("tensor {name:?} of {dims} dimensions"), "at most 4"));
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            let size = self.u64()?;
            let size = usize::try_from(size).map_err(|_| self.bad(format!("a dimension of {size}"), "a smaller one"));
            shape.insert(0, size?);
        }
        let number = self.u32()?;
        let stored = stored_type(number).ok_or_else(|| {
            let found = format!("tensor {name:?} of type {} in {:?}", type_name(number), self.name);
            let known: Vec<&str> = BlockType::ALL.iter().map(|block| block.name()).collect();
            let needed = format!("F32, F16, BF16, F64, I8, I16, I32, I64, {}", known.join(", "));
            let fix = "quantize the model to one of these with llama.cpp";
            ErrorKind::Unsupported.error::<Error>("GGUF file", found, needed, fix)
        })?;
        Ok(TensorEntry { name, stored, shape, offset: self.u64()? })
    }
}

fn stored_type(number: u32) -> Option<StoredType> {
    Some(StoredType::Plain(match number {
        0 => ElementType::F32,
        1 => ElementType::F16,
        24 => ElementType::I8,
        25 => ElementType::I16,
        26 => ElementType::I32,
        27 => ElementType::I64,
        28 => ElementType::F64,
        30 => ElementType::BF16,
        other => return BlockType::from_number(other).map(StoredType::Blocks),
    }))
}

/// The name of a type that is not supported, for messages.
fn type_name(number: u32) -> String {
    let name = match number {
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        other => return format!("{other}"),
    };
    name.to_string()
}
