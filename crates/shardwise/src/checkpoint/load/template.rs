//! Filling a template from a checkpoint: which entry is where, and what is read for it.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use crate::checkpoint::bytes::files::LoadReport;
use crate::checkpoint::bytes::read_tensor::{
    read_box, read_merged, read_number, read_sharded, read_tensor, to_scalar, whole_box,
};
use crate::checkpoint::catalogs::catalog::Catalog;
use crate::checkpoint::load::block_scales::{BlockScales, SCALE_SUFFIX};
use crate::checkpoint::load::load_options::{LoadedState, StateLoadOptions};
use crate::checkpoint::load::shared_reads::{BoxRequest, ReceivedBoxes};
use crate::checkpoint::metadata::state::{State, StateLeaf};
use crate::checkpoint::metadata::stored::StoredTensor;
use crate::checkpoint::metadata::value::{Key, Value, flat_key};
use crate::error::{ErrorKind, Result, listed, nearest};
use crate::layout::TensorBox;
use crate::tensor::DTensor;
use shardwise_kernels::own_copy;

/// Reads boxes of the tensors of a checkpoint, except what another rank has read.
pub(in crate::checkpoint) struct BoxReader<'a> {
    catalog: &'a Catalog,
    block_scales: Option<[usize; 2]>,
    received: &'a ReceivedBoxes,
}

impl<'a> BoxReader<'a> {
    pub(in crate::checkpoint) fn new(
        catalog: &'a Catalog,
        options: &StateLoadOptions,
        received: &'a ReceivedBoxes,
    ) -> Self {
        BoxReader { catalog, block_scales: options.block_scales, received }
    }

    pub(in crate::checkpoint) fn read(&self, request: &BoxRequest) -> Result<Tensor> {
        if let Some(tensor) = self.received.get(request) {
            return Ok(tensor.clone());
        }
        let BoxRequest { key, part, dtype } = request;
        let (files, stored) = (&*self.catalog.files, self.catalog.tensor(key)?);
        let scales = self.block_scales.map(|block| BlockScales::of(self.catalog, key, block)).transpose()?.flatten();
        match scales {
            Some(scales) => scales.read_box(files, key, stored, part, *dtype),
            None => read_box(files, key, stored, part, *dtype),
        }
    }
}

/// The boxes that this rank needs for a template and that other ranks may need too. A shard of a sharded tensor has one owner.
pub(in crate::checkpoint) fn boxes_to_read(
    catalog: &Catalog,
    template: &State,
    options: &StateLoadOptions,
) -> Result<Vec<BoxRequest>> {
    let flat = template.flatten()?;
    let found = match_template(catalog, &flat, options)?.found;
    let mut requests = Vec::new();
    for ((key, (_, leaf)), entry) in flat.into_iter().zip(found) {
        let TemplateMatch::Tensor(stored) = entry else { continue };
        let (parts, dtype) = match leaf {
            StateLeaf::Tensor(like) => {
                let boxes = like.layout().reduced().boxes_of(like.device_mesh().world().rank());
                (boxes.into_iter().map(|owned| owned.global).collect(), like.dtype())
            }
            StateLeaf::Merged(like) => {
                let boxes = like.boxes_of(like.stored().device_mesh().world().rank());
                (boxes.into_iter().map(|owned| owned.global).collect(), like.stored().dtype())
            }
            StateLeaf::Plain(like) => (vec![whole_box(&stored.shape)], like.dtype()),
            StateLeaf::Sharded(_) | StateLeaf::Value(_) => continue,
        };
        let parts = parts.into_iter().filter(|part: &TensorBox| part.volume() > 0);
        requests.extend(parts.map(|part| BoxRequest { key: key.clone(), part, dtype }));
    }
    Ok(requests)
}

/// Reads state with the structure of a template on this rank, except the boxes that it has received.
pub(in crate::checkpoint) fn load_template(
    catalog: &Catalog,
    template: &State,
    options: &StateLoadOptions,
    received: &ReceivedBoxes,
) -> Result<LoadedState> {
    let (files, flat) = (&*catalog.files, template.flatten()?);
    let reader = BoxReader::new(catalog, options, received);
    let Matched { found, missing_keys, narrowed_keys } = match_template(catalog, &flat, options)?;
    let scaled = |key: &str| {
        options.block_scales.is_some() && key.strip_suffix(SCALE_SUFFIX).is_some_and(|k| flat.contains_key(k))
    };
    let is_known = |key: &&String| !flat.contains_key(*key) && !scaled(key);
    let unexpected_keys = catalog.tensors.keys().chain(catalog.values.keys()).filter(is_known).cloned().collect();
    let mut leaves = Vec::new();
    for ((key, (path, leaf)), entry) in flat.into_iter().zip(found) {
        let read =
            |part: &TensorBox, dtype: DType| reader.read(&BoxRequest { key: key.clone(), part: part.clone(), dtype });
        let state = match (leaf, entry) {
            (StateLeaf::Tensor(kept), TemplateMatch::Missing) => State::Tensor(kept.clone()),
            (StateLeaf::Sharded(kept), TemplateMatch::Missing) => State::Sharded(kept.clone()),
            (StateLeaf::Merged(kept), TemplateMatch::Missing) => State::Merged(kept.clone()),
            (StateLeaf::Plain(kept), TemplateMatch::Missing) => State::Plain(kept.clone()),
            (StateLeaf::Value(kept), TemplateMatch::Missing) => State::Value(kept),
            (_, TemplateMatch::Omitted) => continue,
            (_, TemplateMatch::EmptyMap(depth)) => {
                leaves.push((path[..depth].to_vec(), State::Map(BTreeMap::new())));
                continue;
            }
            (StateLeaf::Value(like), TemplateMatch::Absent) => State::Value(like),
            (StateLeaf::Value(_), TemplateMatch::Value(value)) => State::Value(value.clone()),
            (StateLeaf::Value(_), TemplateMatch::Tensor(stored)) => State::Value(read_number(files, &key, stored)?),
            (StateLeaf::Tensor(like), TemplateMatch::Tensor(_)) => {
                let (layout, dtype) = (like.layout().reduced(), like.dtype());
                State::Tensor(read_tensor(&|part| read(part, dtype), like.device_mesh(), layout, dtype)?)
            }
            (StateLeaf::Tensor(like), TemplateMatch::Value(value)) => {
                let local = to_scalar(value, like.dtype())?;
                State::Tensor(DTensor::from_parts(like.device_mesh(), like.layout().reduced(), local))
            }
            (StateLeaf::Sharded(like), TemplateMatch::Tensor(_)) => {
                State::Sharded(read_sharded(&|part| read(part, like.dtype()), like)?)
            }
            (StateLeaf::Merged(like), TemplateMatch::Tensor(_)) => {
                State::Merged(read_merged(&|part| read(part, like.stored().dtype()), like)?)
            }
            (StateLeaf::Plain(like), TemplateMatch::Tensor(stored)) => {
                let plain = read(&whole_box(&stored.shape), like.dtype())?;
                // Thread ranks share the memory of a broadcast, and the program may write to its tensor.
                State::Plain(if received.is_empty() { plain } else { own_copy(&plain)? })
            }
            (StateLeaf::Plain(like), TemplateMatch::Value(value)) => State::Plain(to_scalar(value, like.dtype())?),
            _ => unreachable!("refused by match_template"),
        };
        leaves.push((path, state));
    }
    Ok(LoadedState {
        state: State::unflatten(leaves),
        report: LoadReport::default(),
        missing_keys,
        unexpected_keys,
        narrowed_keys,
    })
}

/// What a checkpoint has for an entry of the template.
enum TemplateMatch<'a> {
    Tensor(&'a StoredTensor),
    Value(&'a Value),
    /// An empty map at this depth of the entry's path.
    EmptyMap(usize),
    /// Nothing, where the template has an empty map: there is nothing to load.
    Absent,
    /// Nothing, and the load is partial: the template's entry is kept.
    Missing,
    /// Nothing, which is meaningful for this entry ([`BEGUN`]): the loaded state lacks it too.
    Omitted,
}

/// Entry of a momentum that has not seen a gradient yet; a momentum that has does not store it.
const BEGUN: &str = "begun";

/// What a checkpoint has for the entries of a template, in their order.
struct Matched<'a> {
    found: Vec<TemplateMatch<'a>>,
    missing_keys: Vec<String>,
    narrowed_keys: Vec<String>,
}

/// Finds each entry of the template in the checkpoint; an error lists all that are missing or have another shape or type.
fn match_template<'a>(
    catalog: &'a Catalog,
    flat: &BTreeMap<String, (Vec<Key>, StateLeaf<'_>)>,
    options: &StateLoadOptions,
) -> Result<Matched<'a>> {
    let (mut wrong, mut unfilled, mut found) = (Vec::new(), Vec::new(), Vec::new());
    let (mut missing_keys, mut narrowed_keys) = (Vec::new(), Vec::new());
    for (key, (path, leaf)) in flat {
        let (tensor, value) = (catalog.tensors.get(key), catalog.values.get(key));
        // A parameter that had no optimizer state when it was saved is stored as an empty map instead of its entries.
        let empty = || {
            let is_empty = |&depth: &usize| catalog.values.get(&flat_key(&path[..depth])).is_some_and(is_empty_map);
            (1..path.len()).find(is_empty)
        };
        let dtype = match leaf {
            StateLeaf::Value(_) => None,
            StateLeaf::Tensor(tensor) => Some(tensor.dtype()),
            StateLeaf::Sharded(tensor) => Some(tensor.dtype()),
            StateLeaf::Merged(tensor) => Some(tensor.stored().dtype()),
            StateLeaf::Plain(tensor) => Some(tensor.dtype()),
        };
        if let (Some(dtype), Some(stored)) = (dtype, tensor)
            && stored.element.narrows_to(dtype)
        {
            if !options.allow_narrowing {
                wrong.push(format!("tensor {key:?} of type {} instead of {}", stored.element, dtype.as_str()));
            }
            narrowed_keys.push(key.clone());
        }
        let shape = match leaf {
            StateLeaf::Value(_) => None,
            StateLeaf::Tensor(tensor) => Some(tensor.shape()),
            StateLeaf::Sharded(tensor) => Some(tensor.shape()),
            StateLeaf::Merged(tensor) => Some(tensor.shape()),
            StateLeaf::Plain(tensor) => Some(tensor.dims()),
        };
        let is_number = |value: &Value| matches!(value, Value::Int(_) | Value::Float(_) | Value::Bool(_));
        let may_be_value = !matches!(leaf, StateLeaf::Sharded(_)) && shape.is_none_or(<[usize]>::is_empty);
        found.push(match (shape, tensor, value) {
            (None, _, Some(value)) => TemplateMatch::Value(value),
            (None, Some(stored), None) if stored.elem_count() == 1 => TemplateMatch::Tensor(stored),
            (Some(shape), Some(stored), _) if stored.shape == shape => TemplateMatch::Tensor(stored),
            (Some(_), None, Some(value)) if may_be_value && is_number(value) => TemplateMatch::Value(value),
            (Some(shape), Some(stored), _) => {
                wrong.push(format!("tensor {key:?} of shape {:?} instead of {shape:?}", stored.shape));
                continue;
            }
            _ if empty().is_some() => TemplateMatch::EmptyMap(empty().unwrap_or(0)),
            // DCP does not store a map without entries, and there is nothing in it to load.
            (None, None, None) if matches!(leaf, StateLeaf::Value(value) if is_empty_map(value)) => {
                unfilled.extend(below(catalog, key).map(|inner| format!("{inner:?}")));
                TemplateMatch::Absent
            }
            (None, ..) if path.len() > 1 && path.last() == Some(&Key::Name(BEGUN.to_string())) => {
                TemplateMatch::Omitted
            }
            _ if options.allow_partial && !catalog.unreadable.contains_key(key) && value.is_none() => {
                missing_keys.push(key.clone());
                TemplateMatch::Missing
            }
            (None, ..) => {
                wrong.push(match catalog.unreadable.get(key) {
                    Some(reason) => format!("value {key:?}, which cannot be read ({reason})"),
                    None => format!("no value {key:?}"),
                });
                continue;
            }
            (Some(_), ..) => {
                wrong.push(no_tensor(catalog, key, wrong.len() < SUGGESTED));
                continue;
            }
        });
    }
    if !wrong.is_empty() {
        let (needed, fix) = (
            "all entries of the template in the same shapes, in types that hold the stored ones unless narrowing is allowed",
            "rename these entries of the template, remove them from it, or see `StateLoadOptions`",
        );
        return Err(ErrorKind::state().error("checkpoint", listed(&wrong), needed, fix));
    }
    if !unfilled.is_empty() {
        let found = format!("{} where the template has an empty map", unfilled.join(", "));
        let needed = "a template with an entry for everything to load below it";
        let fix = "take the template of an optimizer from its `state_dict()`, use `load_into`, or remove the empty map";
        return Err(ErrorKind::state().error("template", found, needed, fix));
    }
    Ok(Matched { found, missing_keys, narrowed_keys })
}

/// Most tensors that names are suggested for: entries that are missing together are usually misspelled in one way, and comparing
/// with all names takes a while.
const SUGGESTED: usize = 3;

/// Why a tensor cannot be loaded that a checkpoint does not have under this key, or has in a form that cannot be read.
fn no_tensor(catalog: &Catalog, key: &str, suggests: bool) -> String {
    if let Some(reason) = catalog.unreadable.get(key) {
        return format!("tensor {key:?}, which cannot be read ({reason})");
    }
    match if suggests { nearest(key, catalog.tensors.keys()) } else { String::new() } {
        near if near.is_empty() => format!("no tensor {key:?}"),
        near => format!("no tensor {key:?} ({near} as the nearest names)"),
    }
}

/// The first entry of a checkpoint below a key.
fn below<'a>(catalog: &'a Catalog, key: &str) -> Option<&'a String> {
    let prefix = format!("{key}.");
    let first = |key: Option<&'a String>| key.filter(|key| key.starts_with(&prefix));
    let tensor = first(catalog.tensors.range(prefix.clone()..).next().map(|(key, _)| key));
    tensor.or_else(|| first(catalog.values.range(prefix.clone()..).next().map(|(key, _)| key)))
}

fn is_empty_map(value: &Value) -> bool {
    matches!(value, Value::Map(entries) if entries.is_empty())
}
