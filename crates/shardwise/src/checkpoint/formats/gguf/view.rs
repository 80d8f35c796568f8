//! A GGUF file seen as a Hugging Face directory: tensors under other names, with rows in another order, without a copy.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value as Json;

use super::config::{HeadCounts, config};
use super::families::{Change, GgufFamily, Traits};
use super::metadata::Metadata;
use super::pooling::{FilePooling, pooling, pooling_files};
use super::rope::RopeFactors;
use super::tokenizer;
use crate::checkpoint::catalogs::catalog::Catalog;
use crate::checkpoint::catalogs::format::Format;
use crate::checkpoint::catalogs::open::open;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::encoding::ChunkEncoding;
use crate::checkpoint::metadata::stored::{Chunk, StoredTensor, row_major};
use crate::checkpoint::metadata::value::Value;
use crate::error::{ErrorKind, Result};
use crate::layout::TensorBox;

/// A GGUF file as a Hugging Face directory: what its files would contain. Returned by [`open_as_hf`].
#[derive(Debug, Clone)]
pub struct HfView {
    /// The `config.json`.
    pub config: Json,
    /// The `tokenizer.json`, in the form of the `tokenizers` library; `None` if the file has no tokenizer.
    pub tokenizer_json: Option<String>,
    /// The `tokenizer_config.json`: special tokens and the chat template; null if the file has no tokenizer.
    pub tokenizer_config: Json,
    /// How the model makes one embedding of the tokens of a sentence, if it is an encoder and the file says so.
    pub pooling: Option<FilePooling>,
    /// The tensors under the names, in the shapes and with the order of rows that Hugging Face's classes have. They are read
    /// from the GGUF file.
    pub catalog: Catalog,
}

/// Opens a GGUF file, or a directory with one, as a Hugging Face directory.
///
/// Local: any rank may call it, and it needs no world. Reads the header and no tensors, but for the factors of rotary
/// positions. Rows of queries and keys are reordered and the weights of Gemma's norms shifted while tensors are read.
///
/// # Errors
/// As [`open`](crate::checkpoint::open()); [`ErrorKind::Unsupported`] or [`ErrorKind::UnknownName`] for an architecture, a
/// tensor, a key of the metadata or a tokenizer that is not known: the error names it.
pub fn open_as_hf(path: impl AsRef<Path>) -> Result<HfView> {
    let catalog = open(path)?;
    HfView::of(catalog)
}

/// Tensors whose contents go to the configuration.
const ROPE_TENSORS: [&str; 3] = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

impl HfView {
    /// The view of an opened GGUF file.
    ///
    /// # Errors
    /// As [`open_as_hf`]; [`ErrorKind::Argument`] if the checkpoint is of another format.
    pub fn of(catalog: Catalog) -> Result<HfView> {
        if catalog.format != Format::Gguf {
            let found = format!("a checkpoint of format {}", catalog.format);
            return Err(ErrorKind::Argument.error("Hugging Face view", found, "a GGUF file", "open it as it is"));
        }
        let meta = Metadata::new(&catalog.values)?;
        let has_experts = meta.count(".expert_count")?.is_some_and(|experts| experts > 0);
        if !has_experts {
            meta.count(".expert_used_count")?;
        }
        let has_window = meta.count(".attention.sliding_window")?.is_some_and(|window| window > 0);
        let token_types = catalog.tensors.contains_key("token_types.weight");
        let family =
            GgufFamily::of(meta.architecture, Traits { experts: has_experts, window: has_window, token_types })?;
        let pooling = if family.is_encoder() { pooling(&meta)? } else { None };
        let config = config(family, &meta, &catalog.tensors, &rope_factors(&catalog)?)?;
        let heads = HeadCounts::of(&meta)?;
        let (tokenizer_json, tokenizer_config) = match tokenizer::tokenizer(&meta)? {
            Some((tokenizer, config)) => (Some(tokenizer), config),
            None => (None, Json::Null),
        };
        meta.check_all_used()?;
        let mut tensors = BTreeMap::new();
        for (name, stored) in &catalog.tensors {
            if ROPE_TENSORS.contains(&name.as_str()) {
                continue;
            }
            let Some((new, change)) = family.hf_tensor(name) else {
                let found = format!("tensor {name:?}");
                let needed = format!("the tensors of the architecture {:?}", meta.architecture);
                let fix = "use the Hugging Face directory of the model, or convert with `--to native`, which keeps GGUF's names";
                return Err(ErrorKind::unknown(name).error("GGUF file", found, needed, fix));
            };
            tensors.extend(changed(name, &new, change, stored, heads)?);
        }
        let values: BTreeMap<String, Value> = BTreeMap::new();
        let catalog = Catalog { tensors, values, paths: BTreeMap::new(), ..catalog };
        Ok(HfView { config, tokenizer_json, tokenizer_config, pooling, catalog })
    }

    /// Names, with a directory where they are in one, and contents of the files of the directory that hold no tensors.
    pub fn files(&self) -> Vec<(&'static str, String)> {
        let pretty = |json: &Json| format!("{json:#}\n");
        let mut files = vec![("config.json", pretty(&self.config))];
        files.extend(self.tokenizer_json.clone().map(|text| ("tokenizer.json", text)));
        if !self.tokenizer_config.is_null() {
            files.push(("tokenizer_config.json", pretty(&self.tokenizer_config)));
        }
        files.extend(self.pooling.iter().flat_map(|pooling| pooling_files(*pooling, &self.config)));
        files
    }
}

/// Reads the factors of rotary positions.
fn rope_factors(catalog: &Catalog) -> Result<RopeFactors> {
    let read = |name: &str| -> Result<Option<Vec<f32>>> {
        let Some(stored) = catalog.tensors.get(name) else { return Ok(None) };
        if stored.element != ElementType::F32 || stored.shape.len() != 1 {
            let found = format!("{name} of type {} and shape {:?}", stored.type_name(), stored.shape);
            return Err(ErrorKind::Damaged.error("GGUF file", found, "a vector of F32", "convert the model again"));
        }
        let bytes = catalog.read(name)?;
        Ok(Some(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()))
    };
    let [frequencies, long, short] = ROPE_TENSORS;
    Ok(RopeFactors { frequencies: read(frequencies)?, long_and_short: read(long)?.zip(read(short)?) })
}

/// The tensors of Hugging Face that a stored tensor is, with their names.
fn changed(
    name: &str,
    new: &str,
    change: Change,
    stored: &StoredTensor,
    heads: HeadCounts,
) -> Result<Vec<(String, StoredTensor)>> {
    let shape = &stored.shape;
    let bad = |needed: String| {
        let found = format!("tensor {name:?} of type {} and shape {shape:?}", stored.type_name());
        ErrorKind::Damaged.error("GGUF file", found, needed, "the file contradicts itself; convert the model again")
    };
    // Without elements a file of a few bytes could claim any number of heads or experts.
    if stored.elem_count() == 0 {
        return Err(bad("elements".to_string()));
    }
    let [whole] = stored.chunks.as_slice() else { return Err(bad("one chunk".to_string())) };
    let (rows, row) = (shape.first().copied().unwrap_or(1), shape.iter().skip(1).product::<usize>());
    // Where a row begins. All rows are whole blocks, so this is exact; sizes were checked when the file was opened.
    let at = |index: usize| whole.offset + whole.stored_bytes(stored.element) / (rows.max(1) as u64) * index as u64;
    let tensor = |shape: Vec<usize>, chunks: Vec<Chunk>| StoredTensor { element: stored.element, shape, chunks };
    let single = |tensor: StoredTensor| Ok(vec![(new.to_string(), tensor)]);
    match change {
        Change::Same => single(stored.clone()),
        Change::QueryRows | Change::KeyRows => {
            let count = if change == Change::QueryRows { heads.queries } else { heads.keys };
            let size = rows / count;
            if rows % count != 0 || size % 2 != 0 || shape.is_empty() {
                return Err(bad(format!("rows for {count} heads of an even size")));
            }
            let mut strides = row_major(shape);
            strides[0] *= 2;
            let half = |index: usize| {
                let (head, odd) = (index / 2, index % 2);
                let mut part = whole.part.clone();
                part.offsets[0] = head * size + odd * size / 2;
                part.sizes[0] = size / 2;
                Chunk { part, offset: at(head * size + odd), strides: Some(strides.clone()), ..whole.clone() }
            };
            single(tensor(shape.clone(), (0..2 * count).map(half).collect()))
        }
        Change::RowsByHead => {
            let count = heads.queries;
            let size = rows / (3 * count);
            if rows % (3 * count) != 0 || shape.is_empty() {
                return Err(bad(format!("rows for queries, keys and values of {count} heads")));
            }
            let piece = |index: usize| {
                let (head, kind) = (index / 3, index % 3);
                let mut part = whole.part.clone();
                part.offsets[0] = index * size;
                part.sizes[0] = size;
                Chunk { part, offset: at((kind * count + head) * size), ..whole.clone() }
            };
            single(tensor(shape.clone(), (0..3 * count).map(piece).collect()))
        }
        Change::Transposed => {
            let [outputs, inputs] = *shape.as_slice() else { return Err(bad("a matrix".to_string())) };
            let part = TensorBox { offsets: vec![0, 0], sizes: vec![inputs, outputs] };
            let chunk = Chunk { part, strides: Some(vec![1, inputs]), ..whole.clone() };
            single(tensor(vec![inputs, outputs], vec![chunk]))
        }
        Change::MinusOne => {
            if stored.element != ElementType::F32 || whole.encoding.is_some() {
                return Err(bad("F32, as all norms have".to_string()));
            }
            let chunk = Chunk { encoding: Some(ChunkEncoding::PlusOne), ..whole.clone() };
            single(tensor(shape.clone(), vec![chunk]))
        }
        Change::OneRow => {
            let part = TensorBox { offsets: vec![0, 0], sizes: vec![1, rows * row] };
            single(tensor(part.sizes.clone(), vec![Chunk { part, ..whole.clone() }]))
        }
        Change::Experts => {
            let [experts, outputs, inputs] = *shape.as_slice() else { return Err(bad("three dimensions".to_string())) };
            let one = |expert: usize| {
                let part = TensorBox { offsets: vec![0, 0], sizes: vec![outputs, inputs] };
                let chunk = Chunk { part, offset: at(expert), ..whole.clone() };
                (new.replace("{e}", &expert.to_string()), tensor(vec![outputs, inputs], vec![chunk]))
            };
            Ok((0..experts).map(one).collect())
        }
    }
}
