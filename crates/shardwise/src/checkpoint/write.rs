//! Files of a checkpoint written: the boxes of one file in any format, and what makes files a checkpoint.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::catalog::{Catalog, Chunk, Format, StoredTensor};
use super::content::Content;
use super::directory::unwritable;
use super::native::{FileInfo, MANIFEST, Manifest};
use super::value::Value;
use super::{dcp, hf, safetensors};
use crate::error::{Error, Result};
use crate::layout::TensorBox;

/// A box to be written.
pub(super) struct Part {
    /// Flat key of the tensor.
    pub(super) key: String,
    /// The box.
    pub(super) part: TensorBox,
    /// Whether it is all of the tensor.
    pub(super) is_whole: bool,
    /// Its elements.
    pub(super) content: Content,
}

/// What was written to a file: where its boxes are.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct WrittenFile {
    pub(super) name: String,
    pub(super) info: Option<FileInfo>,
    pub(super) chunks: Vec<(String, Chunk)>,
    /// The same and where values are, as PyTorch's format wants to know it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) places: Vec<dcp::Place>,
}

/// The name of a file in a format: number `index` of `count`.
pub(super) fn file_name(format: Format, index: usize, count: usize) -> String {
    match format {
        Format::Native => format!("part-{index:05}.safetensors"),
        Format::HuggingFace if count == 1 => "model.safetensors".to_string(),
        Format::HuggingFace => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        Format::Dcp | Format::Torch => format!("__{index}_0.distcp"),
    }
}

/// The name of file `index` of `count` with boxes of one rank, as PyTorch has it for safetensors.
pub(super) fn shard_name(rank: usize, index: usize, count: usize) -> String {
    format!("shard-{:05}-model-{:05}-of-{count:05}.safetensors", rank + 1, index + 1)
}

/// The boxes of one rank by file, one file at least. In a format that knows boxes by the name of their tensor alone, boxes of
/// one tensor go to different files.
pub(super) fn in_files(format: Format, parts: Vec<Part>) -> Vec<Vec<Part>> {
    let mut files: Vec<Vec<Part>> = vec![Vec::new()];
    for part in parts {
        let free = |file: &&mut Vec<Part>| format != Format::HuggingFace || file.iter().all(|p| p.key != part.key);
        match files.iter_mut().find(free) {
            Some(file) => file.push(part),
            None => files.push(vec![part]),
        }
    }
    files
}

/// Writes boxes to a file of a directory and makes it durable. `values` go along in a format that has them in such files;
/// `progress` hears of bytes.
pub(super) fn write_file(
    format: Format,
    directory: &Path,
    name: &str,
    parts: Vec<Part>,
    values: &BTreeMap<String, Value>,
    progress: &dyn Fn(u64),
) -> Result<WrittenFile> {
    let path = directory.join(name);
    let written = write_to(format, &path, name, parts, values, progress).map_err(|error| match error {
        // Which file it was is what helps.
        Error::Io(error) => unwritable(&path, &error),
        other => other,
    });
    if written.is_err() {
        // The space is needed to say what went wrong.
        let _ = fs::remove_file(&path);
    }
    written
}

fn write_to(
    format: Format,
    path: &Path,
    name: &str,
    parts: Vec<Part>,
    values: &BTreeMap<String, Value>,
    progress: &dyn Fn(u64),
) -> Result<WrittenFile> {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    if format == Format::Dcp {
        let tensors: Vec<_> = parts.into_iter().map(|p| (p.key, p.part, p.content)).collect();
        let values: Vec<_> = values.iter().map(|(key, value)| (key.clone(), value)).collect();
        let places = dcp::write_file(&mut out, name, &tensors, &values, progress)?;
        out.into_inner().map_err(|error| Error::from(error.into_error()))?.sync_all()?;
        let chunks = places.iter().filter_map(|place| Some((place.key.clone(), place.chunk.clone()?))).collect();
        return Ok(WrittenFile { name: name.to_string(), info: None, chunks, places });
    }
    let metadata = match format {
        Format::HuggingFace if parts.iter().all(|p| p.is_whole) => {
            BTreeMap::from([("format".to_string(), "pt".to_string())])
        }
        Format::HuggingFace => {
            let boxes: Vec<(&str, &TensorBox)> = parts.iter().map(|p| (p.key.as_str(), &p.part)).collect();
            hf::sharding_info(&boxes)?
        }
        _ => BTreeMap::new(),
    };
    // Names in this library's own files say which box it is; the manifest is what counts.
    let named = |p: &Part| match format == Format::Native && !p.is_whole {
        true => format!("{}@{}", p.key, p.part.offsets.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")),
        false => p.key.clone(),
    };
    let names: Vec<String> = parts.iter().map(named).collect();
    let mut boxes = Vec::new();
    let mut tensors = Vec::new();
    for (part, name) in parts.into_iter().zip(names) {
        boxes.push((part.key, part.part));
        tensors.push((name, part.content));
    }
    let (places, header_crc32) = safetensors::write(&mut out, &metadata, &tensors, progress)?;
    let file = out.into_inner().map_err(|error| Error::from(error.into_error()))?;
    file.sync_all()?;
    let chunk = |((key, part), place): ((String, TensorBox), safetensors::Written)| {
        let (offset, crc32, blocks) = (place.offset, Some(place.crc32), Some(place.blocks));
        (key, Chunk { part, file: name.to_string(), offset, strides: None, crc32, blocks })
    };
    let chunks = boxes.into_iter().zip(places).map(chunk).collect();
    let info = Some(FileInfo { bytes: file.metadata()?.len(), header_crc32 });
    Ok(WrittenFile { name: name.to_string(), info, chunks, places: Vec::new() })
}

/// Makes written files a checkpoint: adds the file that says what is where. `catalog` has all tensors but for their chunks.
pub(super) fn seal(directory: &Path, mut catalog: Catalog, files: Vec<WrittenFile>) -> Result<()> {
    let mut infos = BTreeMap::new();
    let mut places = Vec::new();
    for file in files {
        places.extend(file.places);
        infos.extend(file.info.map(|info| (file.name, info)));
        for (key, chunk) in file.chunks {
            if let Some(tensor) = catalog.tensors.get_mut(&key) {
                tensor.chunks.push(chunk);
            }
        }
    }
    catalog.tensors.values_mut().for_each(|t| t.chunks.sort_by(|a, b| a.part.offsets.cmp(&b.part.offsets)));
    let (name, contents) = match catalog.format {
        Format::Native => (MANIFEST, Manifest::new(&catalog, infos).to_text()?.into_bytes()),
        Format::HuggingFace if infos.len() > 1 && catalog.tensors.values().all(|t| t.chunks.len() <= 1) => {
            (hf::INDEX, hf::index_text(&catalog.tensors)?.into_bytes())
        }
        Format::HuggingFace => return super::directory::sync(directory),
        Format::Dcp => {
            let described = |(key, t): (&String, &StoredTensor)| (key.clone(), (t.element, t.shape.clone()));
            let tensors = catalog.tensors.iter().map(described).collect();
            (dcp::METADATA, dcp::metadata_bytes(&tensors, &places, &catalog.paths)?)
        }
        Format::Torch => unreachable!("refused before anything is written"),
    };
    let path = directory.join(name);
    fs::write(&path, contents).map_err(|error| unwritable(&path, &error))?;
    super::directory::sync(directory)
}
