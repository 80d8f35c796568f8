//! Safetensors files: a JSON header, then the bytes of all tensors.
//!
//! Not the `safetensors` crate, which needs a file as one slice of memory: here byte ranges are read from files that are kept
//! open, and boxes are written in one pass with block checksums.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Seek, Write};
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Map, json};

use crate::checkpoint::bytes::content::BoxToWrite;
use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::stored::{Chunk, NOT_A_CHECKPOINT};
use crate::error::{Error, ErrorKind, Result};

/// Longest header that is read; the `safetensors` library has the same bound.
const MAX_HEADER: u64 = 100_000_000;

/// The validated header of a file.
pub(in crate::checkpoint) struct SafetensorsHeader {
    /// The `__metadata__` entry: free-form strings.
    pub(in crate::checkpoint) metadata: BTreeMap<String, String>,
    /// Tensors by name: type, shape, and byte offset in the file.
    pub(in crate::checkpoint) tensors: BTreeMap<String, (ElementType, Vec<usize>, u64)>,
    /// The raw header with its length field.
    pub(in crate::checkpoint) bytes: Vec<u8>,
}

#[derive(serde::Deserialize)]
struct TensorInfo {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// The header as parsed from JSON. A duplicate name is refused, because readers would disagree about which one counts.
#[derive(Default)]
struct HeaderEntries {
    metadata: UniqueMap<String>,
    tensors: Vec<(String, TensorInfo)>,
}

/// A JSON object that is refused if a key occurs twice.
pub(in crate::checkpoint) struct UniqueMap<T>(pub(in crate::checkpoint) BTreeMap<String, T>);

impl<T> Default for UniqueMap<T> {
    fn default() -> Self {
        UniqueMap(BTreeMap::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for UniqueMap<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct UniqueMapVisitor<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for UniqueMapVisitor<T> {
            type Value = UniqueMap<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map without duplicate keys")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap<T>, A::Error> {
                let mut all = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, T>()? {
                    if all.contains_key(&key) {
                        return Err(A::Error::custom(format!("{key:?} twice")));
                    }
                    all.insert(key, value);
                }
                Ok(UniqueMap(all))
            }
        }
        deserializer.deserialize_map(UniqueMapVisitor(std::marker::PhantomData))
    }
}

impl<'de> Deserialize<'de> for HeaderEntries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = HeaderEntries;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("dtype, shape and offsets by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderEntries, A::Error> {
                let (mut entries, mut seen) = (HeaderEntries::default(), BTreeSet::new());
                while let Some(key) = map.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(A::Error::custom(format!("{key:?} twice")));
                    }
                    match key.as_str() {
                        "__metadata__" => entries.metadata = map.next_value()?,
                        _ => entries.tensors.push((key, map.next_value()?)),
                    }
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// Reads the raw header of a file with its length field.
pub(in crate::checkpoint) fn header_bytes(files: &Files, name: &str) -> Result<Vec<u8>> {
    let bad = |found: String, needed: &str| {
        ErrorKind::Damaged.error("safetensors file", format!("{found} in {name:?}"), needed, NOT_A_CHECKPOINT)
    };
    let size = files.size(name).ok_or_else(|| bad("no file".to_string(), "a file"))?;
    let mut length = [0; 8];
    if size < 8 {
        return Err(bad(format!("{size} bytes"), "a header"));
    }
    files.read(name, 0, &mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER || length > size - 8 {
        return Err(bad(format!("a header of {length} bytes"), "one that is in the file, and below 100 MB"));
    }
    let mut bytes = vec![0; 8 + length as usize];
    files.read(name, 0, &mut bytes)?;
    Ok(bytes)
}

/// Reads and validates the header of a file.
pub(in crate::checkpoint) fn read_header(files: &Files, name: &str) -> Result<SafetensorsHeader> {
    let bad = |found: String, needed: &str| {
        ErrorKind::Damaged.error("safetensors file", format!("{found} in {name:?}"), needed, NOT_A_CHECKPOINT)
    };
    let bytes = header_bytes(files, name)?;
    let (size, length) = (files.size(name).unwrap_or(0), bytes.len() as u64 - 8);
    let parsed: HeaderEntries =
        serde_json::from_slice(&bytes[8..]).map_err(|error| bad(error.to_string(), "a JSON header"))?;
    let mut header = SafetensorsHeader { metadata: parsed.metadata.0, tensors: BTreeMap::new(), bytes };
    let mut ranges = Vec::new();
    for (key, info) in parsed.tensors {
        let element = ElementType::from_name(&info.dtype)?;
        let count = info.shape.iter().try_fold(1u64, |count, &n| count.checked_mul(n as u64));
        let bytes = count.and_then(|count| count.checked_mul(element.size_in_bytes() as u64));
        let [start, end] = info.data_offsets;
        let fits = end <= size.saturating_sub(8 + length) && start.checked_add(bytes.unwrap_or(u64::MAX)) == Some(end);
        if !fits {
            let found = format!("tensor {key:?} of shape {:?} at bytes {start} to {end}", info.shape);
            return Err(bad(found, "as many bytes as the shape has, inside the file"));
        }
        ranges.push((start, end));
        header.tensors.insert(key, (element, info.shape, 8 + length + start));
    }
    ranges.sort_unstable();
    let mut reached = 0;
    for (start, end) in ranges {
        if start != reached {
            return Err(bad(format!("a gap or an overlap between tensors at byte {reached}"), "tensors without gaps"));
        }
        reached = end;
    }
    if 8 + length + reached != size {
        return Err(bad(format!("{size} bytes"), &format!("{}, as the header says", 8 + length + reached)));
    }
    Ok(header)
}

/// Whether a file name has the extension of safetensors.
pub(in crate::checkpoint) fn is_safetensors(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|e| e == "safetensors")
}

/// Writes a file with boxes under the given names. Returns their chunks with the flat keys of their tensors, and the CRC-32 of
/// the header.
pub(in crate::checkpoint) fn write(
    out: &mut (impl Write + Seek),
    file: &str,
    metadata: &BTreeMap<String, String>,
    boxes: &[(String, BoxToWrite)],
    progress: &dyn Fn(u64),
) -> Result<(Vec<(String, Chunk)>, u32)> {
    // Widest types first, as the `safetensors` library does, so that readers that map the file find elements aligned.
    let mut order: Vec<&(String, BoxToWrite)> = boxes.iter().collect();
    order.sort_by_key(|(_, content)| std::cmp::Reverse(content.element().size_in_bytes()));
    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert("__metadata__".to_string(), json!(metadata));
    }
    let mut end = 0u64;
    for (name, content) in &order {
        let start = end;
        end += content.bytes() as u64;
        let info = json!({
            "dtype": content.element().safetensors_name(),
            "shape": content.part.sizes,
            "data_offsets": [start, end],
        });
        if header.insert(name.clone(), info).is_some() {
            let found = format!("two tensors named {name:?} for one file");
            return Err(ErrorKind::Argument.error("checkpoint", found, "different names", "rename one of them"));
        }
    }
    let mut text = serde_json::to_vec(&header).map_err(Error::other)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut head = (text.len() as u64).to_le_bytes().to_vec();
    head.extend_from_slice(&text);
    out.write_all(&head)?;
    let one = |(_, content): &(String, BoxToWrite)| Ok((content.key.clone(), content.write(out, file, progress)?));
    let chunks = order.into_iter().map(one).collect::<Result<_>>()?;
    Ok((chunks, crc32fast::hash(&head)))
}
