//! Loading: each rank reads the bytes that its layout needs.

use std::collections::BTreeMap;
use std::panic::Location;
use std::path::Path;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};

use super::cast::to_tensor;
use super::catalog::Catalog;
use super::element::ElementType;
use super::files::{Files, LoadReport};
use super::open::open;
use super::state::{State, StateLeaf};
use super::stored::StoredTensor;
use super::value::{Key, Value, flat_key};
use crate::comm::{DeviceMesh, World, all_ok, gather_texts};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::layout::{Layout, OwnedBox, TensorBox, TensorMeta};
use crate::sharded::ShardedTensor;
use crate::tensor::DTensor;
use shardwise_kernels::{Assembly, placeholder};

/// Loads a checkpoint into new state with the structure of `template`, each tensor in the layout and dtype it has there.
///
/// Collective: every rank of the world must call it. Each rank reads only the bytes that its layouts need; ranks exchange
/// fingerprints and errors. The checkpoint may have been saved in any layout by any number of ranks. A `Partial` tensor of the
/// template is loaded replicated on that axis.
///
/// Unlike PyTorch's `load`, which fills the given state dict in place, this returns new state. Entries of the checkpoint that
/// the template lacks are ignored; entries that the checkpoint lacks are an error that lists all of them. Values are those of
/// the checkpoint, whatever the template has. A one-element tensor and a number stand for each other, because PyTorch stores
/// numbers such as `step` as tensors.
///
/// All ranks load the same save, even while another one replaces it: then they start over with the new one. Every byte that
/// has a checksum is verified; [`load_reporting`] returns what has none.
///
/// # Errors
/// [`Error::OnRank`] on all ranks with the error of the first rank that failed: entries that are missing or have another shape,
/// an empty map in the template where the checkpoint has entries (they would be dropped silently), a checksum that does not
/// match, a file that cannot be read.
#[track_caller]
pub fn load(world: &World, path: impl AsRef<Path>, template: &State) -> Result<State> {
    load_consistent(world, path.as_ref(), Location::caller(), &|catalog| load_template(catalog, template))
        .map(|(state, _)| state)
}

/// Loads as [`load`] does, and also returns how much this rank read and what of it no checksum covers.
///
/// Collective.
#[track_caller]
pub fn load_reporting(world: &World, path: impl AsRef<Path>, template: &State) -> Result<(State, LoadReport)> {
    load_consistent(world, path.as_ref(), Location::caller(), &|catalog| load_template(catalog, template))
}

/// Loads all entries of a checkpoint, each tensor in the layout that `place` chooses from its flat key and global shape.
///
/// Collective: every rank of the world must call it, with the same choices. Needs no template; otherwise as [`load`].
///
/// # Errors
/// As [`load`]; [`ErrorKind::Layout`] if a chosen layout is for another shape.
#[track_caller]
pub fn load_placed(
    world: &World,
    path: impl AsRef<Path>,
    place: impl Fn(&str, &[usize]) -> Result<(DeviceMesh, Layout)>,
) -> Result<State> {
    let read = |catalog: &Catalog| -> Result<State> {
        let path_of = |key: &String| catalog.paths.get(key).cloned().unwrap_or_else(|| vec![Key::Name(key.clone())]);
        let mut leaves = Vec::new();
        for (key, stored) in &catalog.tensors {
            let (mesh, layout) = place(key, &stored.shape)?;
            if layout.shape() != stored.shape {
                let needed = format!("one of shape {:?}, which tensor {key:?} has", stored.shape);
                return Err(ErrorKind::Layout.error(
                    "layout",
                    layout,
                    needed,
                    "build the layout from the shape that the function is given",
                ));
            }
            let dtype = stored.element.widened()?;
            let tensor = read_tensor(&catalog.files, key, stored, &mesh, layout.reduced(), dtype)?;
            leaves.push((path_of(key), State::Tensor(tensor)));
        }
        leaves.extend(catalog.values.iter().map(|(key, value)| (path_of(key), State::Value(value.clone()))));
        Ok(State::unflatten(leaves))
    };
    load_consistent(world, path.as_ref(), Location::caller(), &read).map(|(state, _)| state)
}

/// How often a load starts over because a save replaced the checkpoint: saves take longer than opening one, so only a
/// directory that changes all the time gets there.
const ATTEMPTS: u32 = 200;

/// Runs `read` on the same save on all ranks: if a newer save removed files meanwhile, all ranks open that one and read again.
/// `read` must not communicate, since it may fail on some ranks only.
pub(crate) fn load_consistent<T>(
    world: &World,
    path: &Path,
    site: Site,
    read: &dyn Fn(&Catalog) -> Result<T>,
) -> Result<(T, LoadReport)> {
    for _ in 0..ATTEMPTS {
        let catalog = open_on_all_ranks(world, path, site)?;
        let loaded = read(&catalog);
        let status = match &loaded {
            Ok(_) => String::new(),
            Err(_) if catalog.files.is_replaced() => REPLACED.to_string(),
            Err(error) => format!("!{}", error.to_report()),
        };
        // Empty for success, `REPLACED`, or `!` and the error: one gather shows every rank how the load went.
        let all = gather_texts(world, &status, site)?;
        if let Some(rank) = all.iter().position(|status| status.starts_with('!')) {
            return Err(Error::from_report(world.ranks()[rank], &all[rank][1..]));
        }
        if all.iter().all(String::is_empty) {
            return loaded.map(|loaded| (loaded, catalog.files.report()));
        }
    }
    let found = format!("a save that replaced {} {ATTEMPTS} times while it was read", path.display());
    Err(ErrorKind::path(path).error(
        "checkpoint",
        found,
        "a checkpoint that stays until it is read",
        "load it while nothing is being saved",
    ))
}

/// The message of a rank whose checkpoint was replaced while it was reading.
const REPLACED: &str = "~";

/// Opens a checkpoint on all ranks and ensures that all of them opened the same save.
fn open_on_all_ranks(world: &World, path: &Path, site: Site) -> Result<Catalog> {
    if world.is_dry() {
        return Err(ErrorKind::NoData.error(
            "load",
            "a dry run",
            "a run with data",
            "dry runs know shapes, not values",
        ));
    }
    let mut before = None;
    for attempt in 0..ATTEMPTS {
        let catalog = all_ok(world, open(path).and_then(|c| Ok((c.fingerprint()?, c))), site);
        let (fingerprint, catalog) = catalog?;
        if world.size() == 1 {
            return Ok(catalog);
        }
        let instance = catalog.files.instance();
        let all =
            gather_texts(world, &format!("{fingerprint:016x} {instance:016x} {}", before == Some(instance)), site)?;
        let field = |i: usize| all.iter().map(move |text| text.split(' ').nth(i));
        let same = |i: usize| field(i).all(|text| text == all[0].split(' ').nth(i));
        // Hosts may have a copy each. Then the contents are equal, the files differ, and they stay as they are.
        let is_unchanged = field(2).all(|stable| stable == Some("true"));
        if same(0) && (same(1) || is_unchanged) {
            return Ok(catalog);
        }
        if is_unchanged && attempt > MAX_STABLE_ATTEMPTS {
            let other = field(0).position(|text| text != all[0].split(' ').next()).unwrap_or(0);
            let found =
                format!("different contents on rank {} than on rank {}", world.ranks()[other], world.ranks()[0]);
            let found = format!("{found} at {}", path.display());
            return Err(ErrorKind::Disagreement.error(
                "checkpoint",
                found,
                "the same on all ranks",
                "copy one of them to all hosts",
            ));
        }
        before = Some(instance);
        std::thread::sleep(Duration::from_millis(1));
    }
    let found = format!("a save that replaced {} {ATTEMPTS} times while ranks opened it", path.display());
    Err(ErrorKind::Disagreement.error(
        "checkpoint",
        found,
        "one that all ranks can open",
        "load it while nothing is being saved",
    ))
}

/// After this many attempts with unchanged files on every rank, contents that differ are not a save that reaches some hosts
/// later (attempts are 1 ms apart) but different checkpoints.
const MAX_STABLE_ATTEMPTS: u32 = 20;

/// Reads state with the structure of a template on this rank.
pub(super) fn load_template(catalog: &Catalog, template: &State) -> Result<State> {
    let (files, flat) = (&*catalog.files, template.flatten()?);
    let found = match_template(catalog, &flat)?;
    let mut leaves = Vec::new();
    for ((key, (path, leaf)), entry) in flat.into_iter().zip(found) {
        let state = match (leaf, entry) {
            (_, TemplateMatch::Omitted) => continue,
            (_, TemplateMatch::EmptyMap(depth)) => {
                leaves.push((path[..depth].to_vec(), State::Map(BTreeMap::new())));
                continue;
            }
            (StateLeaf::Value(like), TemplateMatch::Absent) => State::Value(like),
            (StateLeaf::Value(_), TemplateMatch::Value(value)) => State::Value(value.clone()),
            (StateLeaf::Value(_), TemplateMatch::Tensor(stored)) => State::Value(read_number(files, &key, stored)?),
            (StateLeaf::Tensor(like), TemplateMatch::Tensor(stored)) => {
                let layout = like.layout().reduced();
                State::Tensor(read_tensor(files, &key, stored, like.device_mesh(), layout, like.dtype())?)
            }
            (StateLeaf::Tensor(like), TemplateMatch::Value(value)) => {
                let local = to_scalar(value, like.dtype())?;
                State::Tensor(DTensor::from_parts(like.device_mesh(), like.layout().reduced(), local))
            }
            (StateLeaf::Sharded(like), TemplateMatch::Tensor(stored)) => {
                State::Sharded(read_sharded(files, &key, stored, like)?)
            }
            (StateLeaf::Plain(like), TemplateMatch::Tensor(stored)) => {
                State::Plain(read_plain(files, &key, stored, like.dtype())?)
            }
            (StateLeaf::Plain(like), TemplateMatch::Value(value)) => State::Plain(to_scalar(value, like.dtype())?),
            _ => unreachable!("refused by match_template"),
        };
        leaves.push((path, state));
    }
    Ok(State::unflatten(leaves))
}

/// What a checkpoint has for an entry of the template.
enum TemplateMatch<'a> {
    Tensor(&'a StoredTensor),
    Value(&'a Value),
    /// An empty map at this depth of the entry's path.
    EmptyMap(usize),
    /// Nothing, where the template has an empty map: there is nothing to load.
    Absent,
    /// Nothing, which is meaningful for this entry ([`BEGUN`]): the loaded state lacks it too.
    Omitted,
}

/// Entry of a momentum that has not seen a gradient yet; a momentum that has does not store it.
const BEGUN: &str = "begun";

/// Finds each entry of the template in the checkpoint; an error lists all that are missing or have another shape.
fn match_template<'a>(
    catalog: &'a Catalog,
    flat: &BTreeMap<String, (Vec<Key>, StateLeaf<'_>)>,
) -> Result<Vec<TemplateMatch<'a>>> {
    let (mut wrong, mut unfilled, mut found) = (Vec::new(), Vec::new(), Vec::new());
    for (key, (path, leaf)) in flat {
        let (tensor, value) = (catalog.tensors.get(key), catalog.values.get(key));
        // A parameter that had no optimizer state when it was saved is stored as an empty map instead of its entries.
        let empty = || {
            let is_empty = |&depth: &usize| catalog.values.get(&flat_key(&path[..depth])).is_some_and(is_empty_map);
            (1..path.len()).find(is_empty)
        };
        let shape = match leaf {
            StateLeaf::Value(_) => None,
            StateLeaf::Tensor(tensor) => Some(tensor.shape()),
            StateLeaf::Sharded(tensor) => Some(tensor.shape()),
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
            (None, ..) => {
                wrong.push(format!("no value {key:?}"));
                continue;
            }
            (Some(_), ..) => {
                wrong.push(catalog.tensor(key).err().map_or(String::new(), |e| format!("no tensor {key:?} ({e})")));
                continue;
            }
        });
    }
    if !wrong.is_empty() {
        let (needed, fix) = (
            "all entries of the template in the same shapes",
            "rename these entries of the template, or remove them from it",
        );
        return Err(ErrorKind::state().error("checkpoint", wrong.join(", "), needed, fix));
    }
    if !unfilled.is_empty() {
        let found = format!("{} where the template has an empty map", unfilled.join(", "));
        let needed = "a template with an entry for everything to load below it";
        let fix = "take the template of an optimizer from its `state_dict()`, use `load_into`, or remove the empty map";
        return Err(ErrorKind::state().error("template", found, needed, fix));
    }
    Ok(found)
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

/// Reads a one-element tensor as a number.
pub(super) fn read_number(files: &Files, key: &str, stored: &StoredTensor) -> Result<Value> {
    let dtype = stored.element.widened()?;
    let number = read_plain(files, key, stored, dtype)?.flatten_all()?;
    Ok(match stored.element {
        ElementType::Bool => Value::Bool(number.to_vec1::<u8>()?[0] != 0),
        _ if dtype.is_float() => Value::Float(number.to_dtype(DType::F64)?.to_vec1::<f64>()?[0]),
        _ => Value::Int(number.to_dtype(DType::I64)?.to_vec1::<i64>()?[0]),
    })
}

/// A number as a 0-D tensor.
fn to_scalar(value: &Value, dtype: DType) -> Result<Tensor> {
    let number = match value {
        Value::Int(n) => Tensor::new(*n, &Device::Cpu)?,
        Value::Float(x) => Tensor::new(*x, &Device::Cpu)?,
        Value::Bool(b) => Tensor::new(u8::from(*b), &Device::Cpu)?,
        _ => unreachable!("match_template accepts only numbers here"),
    };
    Ok(number.to_dtype(dtype)?)
}

/// Reads this rank's local part of a tensor.
fn read_tensor(
    files: &Files,
    key: &str,
    stored: &StoredTensor,
    mesh: &DeviceMesh,
    layout: Layout,
    dtype: DType,
) -> Result<DTensor> {
    let rank = mesh.world().rank();
    let meta = TensorMeta { shape: layout.local_shape(rank), dtype };
    let boxes = layout.boxes_of(rank);
    let local = match boxes.as_slice() {
        [] => placeholder(&meta)?,
        [single] => read_box(files, key, stored, &single.global, dtype)?,
        several => {
            let whole = Assembly::kept(meta)?;
            for OwnedBox { global, local_offsets, .. } in several {
                // SAFETY: one thread; the boxes are disjoint.
                unsafe { whole.paste(&read_box(files, key, stored, global, dtype)?, local_offsets) };
            }
            // SAFETY: the boxes of a rank make up its local tensor.
            unsafe { whole.finish() }
        }
    };
    Ok(DTensor::from_parts(mesh, layout, local))
}

fn read_sharded(files: &Files, key: &str, stored: &StoredTensor, like: &ShardedTensor) -> Result<ShardedTensor> {
    let mut loaded = like.clone();
    loaded.set_shards(&|part| read_box(files, key, stored, &part.as_box(), like.dtype()))?;
    Ok(loaded)
}

fn read_plain(files: &Files, key: &str, stored: &StoredTensor, dtype: DType) -> Result<Tensor> {
    let whole = TensorBox { offsets: vec![0; stored.shape.len()], sizes: stored.shape.clone() };
    read_box(files, key, stored, &whole, dtype)
}

/// Reads a box of a stored tensor, directly into the tensor's memory unless its type has to be converted.
pub(super) fn read_box(
    files: &Files,
    key: &str,
    stored: &StoredTensor,
    part: &TensorBox,
    dtype: DType,
) -> Result<Tensor> {
    if stored.element.dtype() == Some(dtype) {
        let memory = Assembly::kept(TensorMeta { shape: part.sizes.clone(), dtype })?;
        let length = part.volume() * dtype.size_in_bytes();
        // SAFETY: the memory is `length` bytes long and not shared; it is zeroed before it is seen as bytes, and any bit
        // pattern is an element of these types.
        unsafe {
            let first = memory.range::<u8>(0);
            first.write_bytes(0, length);
            files.read_box(key, stored, part, std::slice::from_raw_parts_mut(first, length))?;
            return Ok(memory.finish());
        }
    }
    let mut bytes = shardwise_kernels::reserve(part.volume() * stored.element.size_in_bytes())?;
    bytes.resize(part.volume() * stored.element.size_in_bytes(), 0);
    files.read_box(key, stored, part, &mut bytes)?;
    Ok(to_tensor(&bytes, stored.element)?.to_dtype(dtype)?.reshape(part.sizes.as_slice())?)
}
