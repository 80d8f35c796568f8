//! Loading: every rank reads the bytes that it needs, in the layout that it wants.

use std::collections::BTreeMap;
use std::panic::Location;
use std::path::Path;

use candle_core::{DType, Tensor};

use super::cast::to_tensor;
use super::catalog::{Catalog, StoredTensor};
use super::open::open;
use super::read::Files;
use super::state::{Leaf, State};
use super::value::{Key, Value};
use crate::comm::{DeviceMesh, World, together};
use crate::error::{Error, Result, Site};
use crate::layout::{Layout, OwnedBox, TensorBox, TensorMeta};
use crate::local::{Assembly, placeholder};
use crate::sharded::ShardedTensor;
use crate::tensor::DTensor;

/// Loads a checkpoint into state like a template: the same tree, with tensors in the layouts and types of the template's.
/// All ranks of the world make the call; if one of them fails, all get its error.
///
/// The checkpoint may have been saved in any layout by any number of ranks. What it has beside the template's entries is left
/// alone; what it lacks is an error that lists all of it. Values come from the checkpoint, whatever the template has.
#[track_caller]
pub fn load(world: &World, path: impl AsRef<Path>, template: &State) -> Result<State> {
    let site = Location::caller();
    let catalog = opened(world, path.as_ref(), site)?;
    let files = Files::new(&catalog.directory);
    let loaded = || -> Result<State> {
        let flat = template.flatten()?;
        check_entries(&catalog, &flat)?;
        let mut leaves = Vec::new();
        for (key, (path, leaf)) in flat {
            let state = match leaf {
                Leaf::Tensor(like) => {
                    let layout = like.layout().settled();
                    let tensor =
                        read_tensor(&files, &key, &catalog.tensors[&key], like.device_mesh(), layout, like.dtype());
                    State::Tensor(tensor?)
                }
                Leaf::Sharded(like) => State::Sharded(read_sharded(&files, &key, &catalog.tensors[&key], like)?),
                Leaf::Plain(like) => State::Plain(read_plain(&files, &key, &catalog.tensors[&key], like.dtype())?),
                Leaf::Value(like) => State::Value(catalog.values.get(&key).cloned().unwrap_or(like)),
            };
            leaves.push((path, state));
        }
        Ok(State::unflatten(leaves))
    };
    together(world, loaded(), site)
}

/// Loads all of a checkpoint, with every tensor in a layout that is chosen by key and shape. All ranks of the world make the
/// call; if one of them fails, all get its error.
#[track_caller]
pub fn load_placed(
    world: &World,
    path: impl AsRef<Path>,
    place: impl Fn(&str, &[usize]) -> Result<(DeviceMesh, Layout)>,
) -> Result<State> {
    let site = Location::caller();
    let catalog = opened(world, path.as_ref(), site)?;
    let files = Files::new(&catalog.directory);
    let loaded = || -> Result<State> {
        let way = |key: &String| catalog.paths.get(key).cloned().unwrap_or_else(|| vec![Key::Name(key.clone())]);
        let mut leaves = Vec::new();
        for (key, stored) in &catalog.tensors {
            let (mesh, layout) = place(key, &stored.shape)?;
            if layout.shape() != stored.shape {
                let needed = format!("one of shape {:?}, which tensor {key:?} has", stored.shape);
                return Err(Error::invalid("layout", layout, needed, "choose layouts by the shape that is given"));
            }
            let tensor = read_tensor(&files, key, stored, &mesh, layout.settled(), stored.element.widened()?)?;
            leaves.push((way(key), State::Tensor(tensor)));
        }
        leaves.extend(catalog.values.iter().map(|(key, value)| (way(key), State::Value(value.clone()))));
        Ok(State::unflatten(leaves))
    };
    together(world, loaded(), site)
}

/// What is in a checkpoint, if all ranks can see it.
fn opened(world: &World, path: &Path, site: Site) -> Result<Catalog> {
    if world.is_dry() {
        return Err(Error::invalid("load", "a dry run", "a run with data", "dry runs know shapes, not values"));
    }
    together(world, open(path), site)
}

/// An error that lists what the checkpoint lacks or has in another shape.
fn check_entries(catalog: &Catalog, flat: &BTreeMap<String, (Vec<Key>, Leaf<'_>)>) -> Result<()> {
    let mut wrong = Vec::new();
    for (key, (_, leaf)) in flat {
        let shape = match leaf {
            // Some formats do not store a map without entries, and there is nothing in it to load.
            Leaf::Value(value) if catalog.values.contains_key(key) || is_empty_map(value) => continue,
            Leaf::Value(_) => {
                wrong.push(format!("no value {key:?}"));
                continue;
            }
            Leaf::Tensor(tensor) => tensor.shape(),
            Leaf::Sharded(tensor) => tensor.shape(),
            Leaf::Plain(tensor) => tensor.dims(),
        };
        match catalog.tensors.get(key) {
            None => wrong.push(catalog.tensor(key).err().map_or(String::new(), |e| format!("no tensor {key:?} ({e})"))),
            Some(stored) if stored.shape != shape => {
                wrong.push(format!("tensor {key:?} of shape {:?} instead of {shape:?}", stored.shape));
            }
            Some(_) => {}
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    let found = wrong.join(", ");
    Err(Error::invalid(
        "checkpoint",
        found,
        "all entries of the template in their shapes",
        "rename or leave out entries",
    ))
}

fn is_empty_map(value: &Value) -> bool {
    matches!(value, Value::Map(entries) if entries.is_empty())
}

/// This rank's part of a tensor.
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
            let whole = Assembly::new(meta)?;
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

/// A box of a stored tensor in memory: read to where it stays, unless its type has to be changed.
pub(super) fn read_box(
    files: &Files,
    key: &str,
    stored: &StoredTensor,
    part: &TensorBox,
    dtype: DType,
) -> Result<Tensor> {
    if stored.element.dtype() == Some(dtype) {
        let memory = Assembly::new(TensorMeta { shape: part.sizes.clone(), dtype })?;
        let length = part.volume() * dtype.size_in_bytes();
        // SAFETY: the memory is so long and nobody else's; it is zeroed before it is seen as bytes, and any bytes are
        // elements of these types.
        unsafe {
            let first = memory.range::<u8>(0);
            first.write_bytes(0, length);
            files.read_box(key, stored, part, std::slice::from_raw_parts_mut(first, length))?;
            return Ok(memory.finish());
        }
    }
    let mut bytes = crate::local::reserve(part.volume() * stored.element.size_in_bytes())?;
    bytes.resize(part.volume() * stored.element.size_in_bytes(), 0);
    files.read_box(key, stored, part, &mut bytes)?;
    Ok(to_tensor(&bytes, stored.element)?.to_dtype(dtype)?.reshape(part.sizes.as_slice())?)
}
