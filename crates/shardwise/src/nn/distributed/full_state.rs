//! Full state dicts that one rank has: gathered to it, or loaded from it.

use std::collections::BTreeMap;

use candle_core::Tensor;

use crate::comm::{World, gather_texts};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::mesh::Mesh;
use crate::nn::module::Module;
use crate::nn::state_dict::{IncompatibleKeys, StateDictOptions};
use crate::param::MergedTensor;
use crate::placement::Placement;
use crate::tensor::DTensor;
use shardwise_kernels::placeholder;

/// Gathers the full tensor to one rank: `None` on all other ranks.
#[track_caller]
pub(crate) fn gather_to(tensor: &DTensor, world: &World, rank: usize) -> Result<Option<Tensor>> {
    let one = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![rank])?)?;
    let tensor = tensor.detach();
    let whole = tensor.to_layout(&tensor.layout().reduced())?.to_mesh(&one, [Placement::Replicate])?;
    (world.rank() == rank).then(|| whole.to_local()).transpose()
}

/// Fails unless the world has this rank.
pub(crate) fn check_rank(world: &World, rank: usize) -> Result<()> {
    if rank < world.size() {
        return Ok(());
    }
    let found = format!("rank {rank} of {}", world.size());
    Err(ErrorKind::Argument.error("full state", found, "a rank of the world", "correct the rank"))
}

/// Gives all ranks what rank `src` describes. Its text must not be empty.
pub(crate) fn described_by(world: &World, src: usize, text: Option<String>, site: Site) -> Result<String> {
    let all = gather_texts(world, &text.unwrap_or_default(), site)?;
    all.into_iter().nth(src).filter(|text| !text.is_empty()).ok_or_else(|| {
        ErrorKind::state().error::<Error>(
            "full state",
            format!("no state on rank {src}"),
            "the full state on the rank that is its source",
            "pass `Some` on that rank",
        )
    })
}

/// Shape and type of a tensor, as ranks send them.
pub(crate) type TensorText = (Vec<usize>, String);

pub(crate) fn text_of(tensor: &Tensor) -> TensorText {
    (tensor.dims().to_vec(), tensor.dtype().as_str().to_string())
}

/// A tensor that states shape and type only, for ranks that receive its elements.
pub(crate) fn stand_in((shape, dtype): &TensorText) -> Result<Tensor> {
    let dtype = dtype.parse().map_err(|_| Error::other(format!("element type {dtype:?}")))?;
    Ok(placeholder(&TensorMeta { shape: shape.clone(), dtype })?)
}

/// See [`FsdpModule::full_state_dict`](crate::nn::FsdpModule::full_state_dict).
#[track_caller]
pub(in crate::nn) fn gather_state<M: Module + ?Sized>(
    module: &M,
    world: &World,
    rank: usize,
) -> Result<Option<BTreeMap<String, Tensor>>> {
    check_rank(world, rank)?;
    let mut gathered = BTreeMap::new();
    for (name, tensor) in module.state_dict() {
        gathered.extend(gather_to(&tensor, world, rank)?.map(|whole| (name, whole)));
    }
    for (name, merged) in merged_parameters(module) {
        if let Some(whole) = gathered.get_mut(&name) {
            *whole = whole.reshape(merged.shape())?;
        }
    }
    Ok((world.rank() == rank).then_some(gathered))
}

/// The parameters that are stored with merged dimensions.
fn merged_parameters<M: Module + ?Sized>(module: &M) -> BTreeMap<String, MergedTensor> {
    module.named_parameters().into_iter().filter_map(|(name, param)| Some((name, param.merged()?))).collect()
}

/// See [`FsdpModule::load_full_state_dict`](crate::nn::FsdpModule::load_full_state_dict).
#[track_caller]
pub(in crate::nn) fn load_state<M: Module + ?Sized>(
    module: &M,
    world: &World,
    src: usize,
    state: Option<&BTreeMap<String, Tensor>>,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    check_rank(world, src)?;
    let describe = |state: &BTreeMap<String, Tensor>| {
        let texts: BTreeMap<&String, TensorText> = state.iter().map(|(name, tensor)| (name, text_of(tensor))).collect();
        serde_json::to_string(&texts).map_err(Error::other)
    };
    let mine = state.filter(|_| world.rank() == src);
    let text = world.all_ok(mine.map(describe).transpose())?;
    let text = described_by(world, src, text, std::panic::Location::caller())?;
    let described: BTreeMap<String, TensorText> = serde_json::from_str(&text).map_err(Error::other)?;
    let (own, merged) = (module.state_dict(), merged_parameters(module));
    let mut tensors = BTreeMap::new();
    // Names that the module lacks are compared without their elements.
    for (name, text) in &described {
        let mut whole = match mine {
            Some(state) => state[name].clone(),
            None => stand_in(text)?,
        };
        let own_name = name.strip_prefix(&*options.prefix);
        let like = own_name.and_then(|name| own.get(name));
        if let Some(merged) = own_name.and_then(|name| merged.get(name)).filter(|m| m.shape() == whole.dims()) {
            // A stand-in is replaced: reshaping it would allocate the whole tensor.
            whole = match mine {
                Some(_) => whole.reshape(merged.stored().shape())?,
                None => stand_in(&(merged.stored().shape().to_vec(), text.1.clone()))?,
            };
        }
        let fits = like.is_some_and(|like| like.shape() == whole.dims());
        let value = match like.or(own.values().next()) {
            None => continue,
            Some(like) if fits => {
                let mesh = like.device_mesh();
                let position = mesh.mesh().ranks().iter().position(|&rank| rank == src);
                let position = position.ok_or_else(|| {
                    let found = format!("rank {src}, which is not on the mesh {} of `{name}`", mesh.mesh());
                    ErrorKind::Argument.error::<Error>(
                        "full state",
                        found,
                        "a rank of the mesh",
                        "load from another rank",
                    )
                })?;
                DTensor::distribute_to_layout(&whole, mesh, like.layout(), Some(position))?
            }
            Some(any) => {
                let everywhere = vec![Placement::Replicate; any.placements().len()];
                let layout = Layout::new(any.layout().mesh(), whole.dims(), everywhere)?;
                DTensor::unallocated(any.device_mesh(), layout, whole.dtype())?
            }
        };
        tensors.insert(name.clone(), value);
    }
    module.load_state_dict_with(&tensors, options)
}
