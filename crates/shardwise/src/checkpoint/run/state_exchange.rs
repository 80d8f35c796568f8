//! State that moves between ranks: whole tensors on chosen ranks, a state of one rank distributed to all, a state sent to another
//! rank.

use std::collections::BTreeMap;
use std::panic::Location;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use crate::checkpoint::metadata::state::{State, StateLeaf};
use crate::checkpoint::metadata::value::{Key, Value};
use crate::comm::{DeviceMesh, World, agree, all_ok, gather_texts};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::mesh::Mesh;
use crate::placement::Placement;
use crate::sharded::shard_tensor;
use crate::tensor::DTensor;
use shardwise_kernels::{check_dtype, contiguous, convert, own_copy, placeholder};

impl State {
    /// Gathers whole tensors on some ranks: distributed and sharded tensors become plain ones there, and other ranks get an empty
    /// map. Without ranks, all ranks get them.
    ///
    /// Collective: every rank of the world must call it, with the same entries. Every tensor is sent to these ranks only, one
    /// exchange per tensor, and is in the memory of these ranks only.
    ///
    /// ```
    /// use shardwise::checkpoint::State;
    /// use shardwise::prelude::*;
    ///
    /// launch(3, |world| {
    ///     let mesh = world.mesh([("dp", 3)])?;
    ///     let state = State::map([("w", DTensor::ones((5, 2), DType::F32, &mesh, [Shard(0)])?)]);
    ///     let full = state.gather(&world, &[0])?;
    ///     let State::Map(entries) = full else { unreachable!() };
    ///     assert_eq!(entries.len(), if world.rank() == 0 { 1 } else { 0 });
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Disagreement`] if ranks have different entries, [`ErrorKind::Rank`] for a rank outside the world.
    #[doc(alias = "_gather_state_dict")]
    #[doc(alias = "full_state_dict")]
    #[track_caller]
    pub fn gather(&self, world: &World, ranks: &[usize]) -> Result<State> {
        let site = Location::caller();
        let flat = all_ok(world, self.flatten(), site)?;
        agree(world, &[("ranks to gather on", &format!("{ranks:?}")), ("state to gather", &describe(&flat))], site)?;
        let mut targets = if ranks.is_empty() { world.ranks().to_vec() } else { ranks.to_vec() };
        targets.sort_unstable();
        targets.dedup();
        if let Some(&rank) = targets.iter().find(|&&rank| rank >= world.size()) {
            let needed = format!("ranks of the world, below {}", world.size());
            let kind = ErrorKind::Rank { rank, size: world.size() };
            return Err(kind.error("ranks to gather on", rank, needed, "pass ranks of this world"));
        }
        let mesh = DeviceMesh::new(world, Mesh::from_ranks([("gathered", targets.len())], targets.clone())?)?;
        let is_target = targets.contains(&world.rank());
        let mut leaves = Vec::new();
        for (path, leaf) in flat.into_values() {
            let whole = match leaf {
                StateLeaf::Value(value) => State::Value(value),
                StateLeaf::Plain(tensor) => State::Plain(tensor.clone()),
                StateLeaf::Tensor(tensor) => {
                    State::Plain(own_copy(tensor.detach().to_mesh(&mesh, [Placement::Replicate])?.local())?)
                }
                StateLeaf::Merged(tensor) => {
                    let whole = tensor.stored().detach().to_mesh(&mesh, [Placement::Replicate])?;
                    let whole = own_copy(whole.local())?;
                    State::Plain(if is_target { whole.reshape(tensor.shape())? } else { whole })
                }
                StateLeaf::Sharded(tensor) => {
                    State::Plain(own_copy(tensor.to_dtensor_on(&mesh, [Placement::Replicate])?.local())?)
                }
            };
            leaves.extend(is_target.then_some((path, whole)));
        }
        Ok(State::unflatten(leaves))
    }

    /// Fills this template from the full state of one rank: every tensor gets the layout and type that it has here. Values are
    /// those of the full state.
    ///
    /// Collective: every rank of the world must call it with the same template. Rank `src` passes the full state, with plain
    /// tensors; what other ranks pass is not looked at, so it may be an empty map. Every rank receives its own parts only, one
    /// exchange per tensor.
    ///
    /// ```
    /// use shardwise::candle_core::{Device, Tensor};
    /// use shardwise::checkpoint::State;
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let full = match world.rank() {
    ///         0 => State::map([("w", Tensor::arange(0f32, 4.0, &Device::Cpu)?)]),
    ///         _ => State::Map(Default::default()),
    ///     };
    ///     let template = State::map([("w", DTensor::zeros(4, DType::F32, &mesh, [Shard(0)])?)]);
    ///     let state = template.distribute(&world, &full, 0)?;
    ///     assert_eq!(state.tensor("w")?.to_local()?.to_vec1::<f32>()?, [[0.0, 1.0], [2.0, 3.0]][world.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// On all ranks: [`ErrorKind::State`] if the full state lacks an entry or has it in another shape,
    /// [`ErrorKind::Disagreement`] if ranks pass different templates.
    #[doc(alias = "broadcast_from_rank0")]
    #[doc(alias = "_distribute_tensors")]
    #[track_caller]
    pub fn distribute(&self, world: &World, full: &State, src: usize) -> Result<State> {
        let site = Location::caller();
        let flat = all_ok(world, self.flatten(), site)?;
        agree(world, &[("source of the state", &src.to_string()), ("template", &describe(&flat))], site)?;
        let mine = match world.rank() == src {
            true => SourceEntries::new(full, &flat).map(Some),
            false if src < world.size() => Ok(None),
            false => {
                let needed = format!("a rank of the world, below {}", world.size());
                let kind = ErrorKind::Rank { rank: src, size: world.size() };
                Err(kind.error("source of the state", src, needed, "0 is the first rank"))
            }
        };
        let mine = all_ok(world, mine, site)?;
        let text = mine.as_ref().map_or_else(|| Ok(String::new()), |mine| serde_json::to_string(&mine.values));
        let texts = gather_texts(world, &text.map_err(Error::other)?, site)?;
        let values: BTreeMap<String, Value> = serde_json::from_str(&texts[src]).map_err(Error::other)?;
        let alone = DeviceMesh::new(world, Mesh::from_ranks([("source", 1)], vec![src])?)?;
        let mut leaves = Vec::new();
        for (key, (path, leaf)) in flat {
            let tensor = mine.as_ref().and_then(|mine| mine.tensors.get(&key));
            let given = |shape: &[usize], dtype: DType| match tensor {
                Some(tensor) => Ok::<_, Error>(contiguous(&convert(tensor, dtype)?)?),
                None => Ok(placeholder(&TensorMeta { shape: shape.to_vec(), dtype })?),
            };
            let state = match leaf {
                StateLeaf::Value(like) => State::Value(values.get(&key).cloned().unwrap_or(like)),
                StateLeaf::Plain(like) => {
                    let meta = TensorMeta::new(like.dims(), like.dtype());
                    let tensor = tensor.map(|_| given(like.dims(), like.dtype())).transpose()?;
                    State::Plain(own_copy(&world.broadcast(tensor.as_ref(), &meta, src)?)?)
                }
                StateLeaf::Tensor(like) => {
                    let layout = Layout::replicated(alone.mesh(), like.shape())?;
                    let local = given(&layout.local_shape(world.rank()), like.dtype())?;
                    State::Tensor(moved_to(like, &DTensor::from_parts(&alone, layout, local))?)
                }
                StateLeaf::Merged(like) => {
                    let stored = like.stored();
                    let layout = Layout::replicated(alone.mesh(), stored.shape())?;
                    let shape = layout.local_shape(world.rank());
                    let local = given(&shape, stored.dtype())?.reshape(shape)?;
                    State::Merged(like.with_stored(moved_to(stored, &DTensor::from_parts(&alone, layout, local))?))
                }
                StateLeaf::Sharded(like) => {
                    let mesh = like.device_mesh();
                    let Some(position) = mesh.ranks().iter().position(|&rank| rank == src) else {
                        let needed = format!("a rank of the mesh of {key:?}, one of {:?}", mesh.ranks());
                        let fix = "distribute from a rank of that mesh";
                        return Err(ErrorKind::Argument.error("source of the state", src, needed, fix));
                    };
                    let whole = given(like.shape(), like.dtype())?;
                    State::Sharded(shard_tensor(&whole, like.sharding_spec().clone(), mesh, Some(position))?)
                }
            };
            leaves.push((path, state));
        }
        Ok(State::unflatten(leaves))
    }

    /// Sends this rank's part of the state to another rank, which calls [`receive`](Self::receive).
    ///
    /// Point-to-point; does not wait for the receiver. Of a distributed or sharded tensor the local part is sent.
    #[doc(alias = "PGTransport")]
    #[track_caller]
    pub fn send(&self, world: &World, to: usize) -> Result<()> {
        let mut tensors: Vec<Tensor> = Vec::new();
        let mut entries = Vec::new();
        for (path, leaf) in self.flatten()?.into_values() {
            let parts = match leaf {
                StateLeaf::Value(value) => {
                    entries.push(SentEntry { path, value: Some(value), tensors: Vec::new() });
                    continue;
                }
                StateLeaf::Plain(tensor) => vec![tensor.clone()],
                StateLeaf::Tensor(tensor) => vec![tensor.local().clone()],
                StateLeaf::Merged(tensor) => vec![tensor.stored().local().clone()],
                StateLeaf::Sharded(tensor) => tensor.local_shards().iter().map(|s| s.storage().clone()).collect(),
            };
            let metas = parts.iter().map(|t| (t.dtype().as_str().to_string(), t.dims().to_vec())).collect();
            entries.push(SentEntry { path, value: None, tensors: metas });
            tensors.extend(parts);
        }
        let header = serde_json::to_vec(&entries).map_err(Error::other)?;
        world.send(&Tensor::new(&[header.len() as i64], &Device::Cpu)?, to, TAG)?;
        let length = header.len();
        world.send(&Tensor::from_vec(header, length, &Device::Cpu)?, to, TAG)?;
        tensors.iter().try_for_each(|tensor| world.send(&contiguous(tensor)?, to, TAG))
    }

    /// Receives the state that another rank sends. A tensor that is distributed or sharded in `template` gets its layout, with
    /// the received part as this rank's; other tensors are plain.
    ///
    /// Point-to-point: waits for the sender.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if a part does not have the shape or type of this rank's part in the template.
    #[track_caller]
    pub fn receive(world: &World, from: usize, template: &State) -> Result<State> {
        let length = world.recv(&TensorMeta::new(1, DType::I64), from, TAG)?.to_vec1::<i64>()?[0];
        let header = world.recv(&TensorMeta::new(length.max(0) as usize, DType::U8), from, TAG)?.to_vec1::<u8>()?;
        let entries: Vec<SentEntry> = serde_json::from_slice(&header).map_err(Error::other)?;
        let flat = template.flatten()?;
        let mut leaves = Vec::new();
        for SentEntry { path, value, tensors } in entries {
            if let Some(value) = value {
                leaves.push((path, State::Value(value)));
                continue;
            }
            let mut parts = Vec::new();
            for (dtype, shape) in tensors {
                let dtype: DType = dtype.parse().map_err(Error::other)?;
                check_dtype(dtype)?;
                parts.push(own_copy(&world.recv(&TensorMeta { shape, dtype }, from, TAG)?)?);
            }
            let key = crate::checkpoint::metadata::value::flat_key(&path);
            let state = placed(&key, parts, flat.get(&key).map(|(_, leaf)| leaf))?;
            leaves.push((path, state));
        }
        Ok(State::unflatten(leaves))
    }
}

/// The tag of messages with a state.
const TAG: u64 = 0x5354;

/// What precedes the tensors of an entry that is sent: its path, and the value or the types and shapes of the tensors.
#[derive(Serialize, Deserialize)]
struct SentEntry {
    path: Vec<Key>,
    value: Option<Value>,
    tensors: Vec<(String, Vec<usize>)>,
}

/// A whole tensor of one rank in the layout of `like`. Collective.
fn moved_to(like: &DTensor, whole: &DTensor) -> Result<DTensor> {
    let to = like.layout().reduced();
    whole.to_mesh_layout(like.device_mesh(), &to)
}

/// Received parts as the template has the entry.
fn placed(key: &str, mut parts: Vec<Tensor>, like: Option<&StateLeaf<'_>>) -> Result<State> {
    if let Some(StateLeaf::Merged(like)) = like {
        return Ok(match placed(key, parts, Some(&StateLeaf::Tensor(like.stored())))? {
            State::Tensor(stored) => State::Merged(like.with_stored(stored)),
            other => other,
        });
    }
    let refuse = |needed: String| {
        let found: Vec<String> = parts.iter().map(|t| format!("{} {:?}", t.dtype().as_str(), t.dims())).collect();
        let found = format!("{found:?} for entry {key:?}");
        ErrorKind::state().error("received state", found, needed, "receive with the layouts of the sender")
    };
    match like {
        Some(StateLeaf::Tensor(like)) => {
            let shape = like.layout().local_shape(like.device_mesh().world().rank());
            match parts.as_slice() {
                [part] if part.dims() == shape && part.dtype() == like.dtype() => {
                    Ok(State::Tensor(DTensor::from_parts(like.device_mesh(), like.layout().clone(), parts.remove(0))))
                }
                _ => Err(refuse(format!("this rank's part, {} {shape:?}", like.dtype().as_str()))),
            }
        }
        Some(StateLeaf::Sharded(like)) => {
            let fits =
                like.local_shards().iter().map(|s| s.metadata().sizes.as_slice()).eq(parts.iter().map(Tensor::dims));
            if !fits || parts.iter().any(|part| part.dtype() != like.dtype()) {
                return Err(refuse(format!("this rank's {} shards", like.local_shards().len())));
            }
            let mut filled = (*like).clone();
            let offsets: Vec<Vec<usize>> = like.local_shards().iter().map(|s| s.metadata().offsets.clone()).collect();
            filled.set_shards(&|part| {
                let index = offsets.iter().position(|o| *o == part.offsets).unwrap_or(0);
                Ok(parts[index].clone())
            })?;
            Ok(State::Sharded(filled))
        }
        _ => match parts.len() {
            1 => Ok(State::Plain(parts.remove(0))),
            _ => Err(refuse("a sharded tensor in the template".to_string())),
        },
    }
}

/// Keys and kinds of all entries, for comparison between ranks.
fn describe(flat: &BTreeMap<String, (Vec<Key>, StateLeaf<'_>)>) -> String {
    let kind = |leaf: &StateLeaf<'_>| match leaf {
        StateLeaf::Tensor(tensor) => format!("{} {}", tensor.dtype().as_str(), tensor.layout()),
        StateLeaf::Sharded(tensor) => {
            format!("{} {:?} {}", tensor.dtype().as_str(), tensor.shape(), tensor.sharding_spec())
        }
        StateLeaf::Merged(tensor) => format!("{:?} of {}", tensor.shape(), tensor.stored().layout()),
        StateLeaf::Plain(tensor) => format!("plain {} {:?}", tensor.dtype().as_str(), tensor.dims()),
        StateLeaf::Value(_) => "value".to_string(),
    };
    let entries: Vec<String> = flat.iter().map(|(key, (_, leaf))| format!("{key}: {}", kind(leaf))).collect();
    entries.join(", ")
}

/// The entries of a full state that a template needs, on the rank that has it.
struct SourceEntries {
    tensors: BTreeMap<String, Tensor>,
    values: BTreeMap<String, Value>,
}

impl SourceEntries {
    /// Checks that the full state has all entries of a template in the same shapes.
    fn new(full: &State, template: &BTreeMap<String, (Vec<Key>, StateLeaf<'_>)>) -> Result<Self> {
        let full = full.flatten()?;
        let mut wrong = Vec::new();
        let mut source = SourceEntries { tensors: BTreeMap::new(), values: BTreeMap::new() };
        for (key, (_, like)) in template {
            let shape = match like {
                StateLeaf::Value(_) => None,
                StateLeaf::Tensor(tensor) => Some(tensor.shape()),
                StateLeaf::Sharded(tensor) => Some(tensor.shape()),
                StateLeaf::Merged(tensor) => Some(tensor.shape()),
                StateLeaf::Plain(tensor) => Some(tensor.dims()),
            };
            match (shape, full.get(key).map(|(_, leaf)| leaf)) {
                (None, Some(StateLeaf::Value(value))) => drop(source.values.insert(key.clone(), value.clone())),
                (Some(shape), Some(StateLeaf::Plain(tensor))) if tensor.dims() == shape => {
                    source.tensors.insert(key.clone(), (*tensor).clone());
                }
                (Some(shape), Some(StateLeaf::Plain(tensor))) => {
                    wrong.push(format!("tensor {key:?} of shape {:?} instead of {shape:?}", tensor.dims()));
                }
                (None, _) => wrong.push(format!("no value {key:?}")),
                (Some(_), _) => wrong.push(format!("no plain tensor {key:?}")),
            }
        }
        if wrong.is_empty() {
            return Ok(source);
        }
        let needed = "all entries of the template, whole tensors in the same shapes";
        let fix = "add these entries, or remove them from the template";
        Err(ErrorKind::state().error("full state", wrong.join(", "), needed, fix))
    }
}
