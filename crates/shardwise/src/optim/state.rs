//! Saved states of optimizers, and their conversion from and to working states.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::algorithm::Algorithm;
use super::group::ParamGroup;
use super::merged::{ParamView, stored};
use super::optimizer::StateTensor;
use super::param_step::ParamStep;
use super::schedule::Schedule;
use super::working_state::{MASTER, STEP, StateEntry, StateValues, WorkingState, placed, vector};
use crate::comm::{DeviceMesh, MemoryKind};
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, MergedShape, TensorMeta};
use crate::placement::Placement;
use crate::tensor::{DTensor, no_grad};
use shardwise_kernels::placeholder;

/// State number of optimizers that do not count steps: 0 before the first step, absent afterwards.
const BEGUN: &str = "begun";

/// The state of a [`ShardedOptimizer`](super::ShardedOptimizer), by names of parameters; `T` is the type of tensors.
///
/// It can be loaded into an optimizer whose parameters have other layouts. To load it in a world of another size, save a
/// checkpoint, or convert it with [`to_full`](OptimizerState::to_full).
#[derive(Debug, Clone)]
pub struct OptimizerState<T = DTensor> {
    /// Number of steps taken so far.
    pub steps: u64,
    /// Learning-rate schedule; `None` keeps that of the optimizer that loads the state.
    pub schedule: Option<Schedule>,
    /// Parameter groups, in order.
    pub groups: Vec<GroupState>,
    /// State per parameter; empty for one that has not had a gradient yet.
    pub params: BTreeMap<String, ParamState<T>>,
}

/// An optimizer state with full tensors, the same on every rank.
#[doc(alias = "full_optim_state_dict")]
pub type FullState = OptimizerState<Tensor>;

/// A parameter group in an [`OptimizerState`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupState {
    /// Settings of the group.
    pub group: ParamGroup,
    /// Names of the parameters of the group.
    pub params: Vec<String>,
}

/// Optimizer state of one parameter, by PyTorch's names.
#[derive(Debug, Clone)]
pub struct ParamState<T = DTensor> {
    /// Numbers, such as `step`. An optimizer that does not count steps has `begun` with the value 0 before its first step.
    pub numbers: BTreeMap<String, f64>,
    /// Tensors, such as `exp_avg`, and `master_param`, the master weights if they are kept.
    pub tensors: BTreeMap<String, T>,
}

impl<T> ParamState<T> {
    /// Whether it has neither numbers nor tensors.
    pub(super) fn is_empty(&self) -> bool {
        self.numbers.is_empty() && self.tensors.is_empty()
    }
}

impl<T> Default for ParamState<T> {
    fn default() -> Self {
        ParamState { numbers: BTreeMap::new(), tensors: BTreeMap::new() }
    }
}

impl OptimizerState {
    /// Gathers full tensors to every rank of the world, also to ranks outside the mesh of a parameter.
    ///
    /// Collective: all ranks of the world must call it.
    #[track_caller]
    pub fn to_full(&self) -> Result<FullState> {
        let mut params = BTreeMap::new();
        for (name, state) in &self.params {
            let mut tensors = BTreeMap::new();
            for (kind, tensor) in &state.tensors {
                tensors.insert(kind.clone(), everywhere(tensor)?);
            }
            params.insert(name.clone(), ParamState { numbers: state.numbers.clone(), tensors });
        }
        Ok(OptimizerState { steps: self.steps, schedule: self.schedule, groups: self.groups.clone(), params })
    }
}

/// The full tensor on every rank of the world.
#[track_caller]
fn everywhere(tensor: &DTensor) -> Result<Tensor> {
    let world = tensor.device_mesh().world();
    if tensor.device_mesh().size() == world.size() {
        return tensor.full_tensor();
    }
    let all = world.mesh([("all", world.size())])?;
    Ok(tensor.to_mesh(&all, [Placement::Replicate])?.local().clone())
}

impl WorkingState {
    /// Creates the state of a parameter from saved tensors; missing ones get their initial values.
    #[track_caller]
    pub(super) fn new(param: &ParamView, group: &ParamGroup, saved: &ParamState<DTensor>) -> Result<Self> {
        let (mesh, layout) = (param.value.device_mesh().clone(), param.value.layout().reduced());
        let (tensors, dtype) = (tensors_of(param, group)?, group.state_dtype_of(param.value.dtype())?);
        let mut entries = Vec::new();
        // In the same order on all ranks, because redistributing is collective.
        let mut parts = Vec::new();
        let mut charge = 0;
        for tensor in &tensors {
            let (to, merged) = layout_of(tensor, param)?;
            let part = match saved.tensors.get(tensor.name) {
                Some(saved) => Some(placed(&stored(saved, merged.as_ref())?, &mesh, &to, dtype)?),
                None if tensor.name == MASTER => Some(placed(&param.value.detach(), &mesh, &to, dtype)?),
                None => None,
            };
            let meta = TensorMeta { shape: to.local_shape(mesh.world().rank()), dtype };
            charge += meta.bytes();
            parts.push((part.map(|part| part.local().clone()), tensor.initial, meta));
            entries.push(StateEntry { name: tensor.name, layout: to, merged });
        }
        let charge = mesh.world().memory().charge(charge, MemoryKind::OptimizerState);
        let values = match dtype {
            _ if mesh.world().is_dry() => StateValues::Dry(dtype),
            DType::F64 => {
                StateValues::F64(parts.iter().map(|(part, x, meta)| vector(part, *x, meta)).collect::<Result<_>>()?)
            }
            _ => StateValues::F32(
                parts.iter().map(|(part, x, meta)| vector(part, *x as f32, meta)).collect::<Result<_>>()?,
            ),
        };
        let number =
            |&(name, initial): &(&'static str, f64)| (name, saved.numbers.get(name).copied().unwrap_or(initial));
        let numbers: Vec<(&'static str, f64)> = group.algorithm.numbers()?.iter().map(number).collect();
        let first = match numbers.iter().find(|(name, _)| *name == STEP) {
            Some((_, steps)) => *steps == 0.0,
            None => {
                let is_kept = |tensor: &StateTensor| tensor.name != MASTER && saved.tensors.contains_key(tensor.name);
                saved.numbers.get(BEGUN) == Some(&0.0) || !tensors.iter().any(is_kept)
            }
        };
        let merged = param.merged.clone();
        Ok(WorkingState { numbers, first, entries, values, mesh, layout, merged, _charge: charge })
    }

    /// Whether this state still fits the parameter and the settings of its group.
    pub(super) fn fits(&self, param: &ParamView, group: &ParamGroup) -> Result<bool> {
        let (tensors, numbers) = (tensors_of(param, group)?, group.algorithm.numbers()?);
        let is_same = |(entry, tensor): (&StateEntry, &StateTensor)| {
            let own = entry.merged.as_ref().map_or_else(|| entry.layout.shape(), MergedShape::shape);
            entry.name == tensor.name && own == tensor.shape.as_slice()
        };
        Ok(self.layout == param.value.layout().reduced()
            && self.merged == param.merged
            && self.mesh.is_same(param.value.device_mesh())
            && self.dtype() == group.state_dtype_of(param.value.dtype())?
            && self.entries.len() == tensors.len()
            && self.entries.iter().zip(&tensors).all(is_same)
            && self.numbers.iter().map(|(name, _)| name).eq(numbers.iter().map(|(name, _)| name)))
    }

    /// Runs one step and returns the new parameter. Parameter and gradient have the layout of the state.
    pub(super) fn step(&mut self, param: DTensor, gradient: &DTensor, group: &ParamGroup, lr: f64) -> Result<DTensor> {
        let before = self.numbers.clone();
        if let Some((_, steps)) = self.numbers.iter_mut().find(|(name, _)| *name == STEP) {
            *steps += 1.0;
        }
        let mut step = ParamStep::new(self, param, gradient, lr, group.maximize);
        let stepped = no_grad(|| group.algorithm.step(&mut step)).map(|()| step.into_param());
        match stepped {
            Ok(_) => self.first = false,
            Err(_) => self.numbers = before,
        }
        stepped
    }

    /// Copies the state into its saved form.
    pub(super) fn saved(&self) -> Result<ParamState> {
        let mut saved = ParamState::default();
        saved.numbers.extend(self.numbers.iter().map(|&(name, number)| (name.to_string(), number)));
        for (i, entry) in self.entries.iter().enumerate() {
            saved.tensors.insert(entry.name.to_string(), self.tensor(i)?);
        }
        if self.first {
            mark_unused(&mut saved);
        }
        Ok(saved)
    }
}

/// The state of a parameter before its first step.
pub(super) fn initial(param: &ParamView, group: &ParamGroup) -> Result<ParamState> {
    let (mesh, dtype) = (param.value.device_mesh(), group.state_dtype_of(param.value.dtype())?);
    let mut saved = ParamState::default();
    for tensor in tensors_of(param, group)? {
        let (layout, _) = layout_of(&tensor, param)?;
        let meta = TensorMeta { shape: layout.local_shape(mesh.world().rank()), dtype };
        let value = match tensor.name {
            MASTER => placed(&param.value, mesh, &layout, dtype)?,
            _ => {
                let local = match tensor.initial {
                    _ if mesh.world().is_dry() || meta.elem_count() == 0 => placeholder(&meta)?,
                    // The system hands out zeroed memory without writing it.
                    0.0 => Tensor::zeros(meta.shape.as_slice(), dtype, &Device::Cpu)?,
                    initial => Tensor::full(initial, meta.shape.as_slice(), &Device::Cpu)?.to_dtype(dtype)?,
                };
                DTensor::from_parts(mesh, layout, local)
            }
        };
        saved.tensors.insert(tensor.name.to_string(), value);
    }
    let numbers = group.algorithm.numbers()?.iter();
    saved.numbers.extend(numbers.map(|&(name, initial)| (name.to_string(), initial)));
    mark_unused(&mut saved);
    Ok(saved)
}

/// Records that no step was taken, if there is no `step` that says so: zeros could also be the moments after a step.
fn mark_unused(saved: &mut ParamState) {
    let has_moments = saved.tensors.keys().any(|name| name != MASTER);
    if has_moments && !saved.numbers.contains_key(STEP) {
        saved.numbers.insert(BEGUN.into(), 0.0);
    }
}

/// The state tensors of a parameter in the shapes that optimizers see, with master weights last.
pub(super) fn tensors_of(param: &ParamView, group: &ParamGroup) -> Result<Vec<StateTensor>> {
    let is_half = matches!(param.value.dtype(), DType::F16 | DType::BF16);
    let master = (group.master && is_half).then(|| StateTensor::zeros(MASTER, param.shape()));
    Ok(group.algorithm.state(param.shape())?.into_iter().chain(master).collect())
}

/// The layout in which a state tensor is stored, and its own shape if its dimensions are merged.
fn layout_of(tensor: &StateTensor, param: &ParamView) -> Result<(Layout, Option<MergedShape>)> {
    let merged = param.merged_state(&tensor.shape);
    let shape = merged.as_ref().map_or_else(|| tensor.shape.clone(), MergedShape::stored);
    Ok((layout_like(&shape, &param.value.layout().reduced())?, merged))
}

/// The layout of a tensor that goes with a parameter: dimensions of the same size are sharded alike.
fn layout_like(shape: &[usize], param: &Layout) -> Result<Layout> {
    let mesh = param.mesh();
    if shape == param.shape() {
        return Ok(param.clone());
    }
    if shape.len() != param.shape().len() {
        return Layout::replicated(mesh, shape);
    }
    let is_kept = |dim: usize| shape[dim] == param.shape()[dim];
    let keep = |p: &Placement| if p.shard_dim().is_some_and(is_kept) { p.clone() } else { Placement::Replicate };
    let placements: Vec<Placement> = param.placements().iter().map(keep).collect();
    let orders = param.shard_orders().into_iter().enumerate();
    let orders: Vec<Vec<usize>> = orders.map(|(dim, axes)| if is_kept(dim) { axes } else { Vec::new() }).collect();
    Layout::from_shard_orders(mesh, shape, &placements, &orders)
}

/// Checks that saved tensors and numbers are those of an optimizer for a parameter of a shape.
pub(super) fn check<T>(
    name: &str,
    saved: &ParamState<T>,
    algorithm: &Algorithm,
    param: &ParamView,
    shape_of: fn(&T) -> &[usize],
) -> Result<()> {
    if saved.is_empty() {
        return Ok(());
    }
    let bad = |found: String, needed: String| {
        let fix = format!("load the state of {} of the same model", algorithm.name());
        ErrorKind::state().error("optimizer state", found, needed, fix)
    };
    let shape = param.shape();
    let tensors = algorithm.state(shape)?;
    let expected: Vec<&str> = tensors.iter().map(|tensor| tensor.name).collect();
    if let Some(missing) = expected.iter().find(|&&kind| !saved.tensors.contains_key(kind)) {
        return Err(bad(format!("no `{missing}` of parameter `{name}`"), format!("{expected:?}")));
    }
    for (kind, saved) in &saved.tensors {
        let needed = match tensors.iter().find(|tensor| tensor.name == kind) {
            Some(tensor) => tensor.shape.as_slice(),
            None if kind == MASTER => shape,
            None => return Err(bad(format!("`{kind}` of parameter `{name}`"), format!("{expected:?}"))),
        };
        // Tensors of merged dimensions are taken in either shape.
        let is_stored = || param.merged_state(needed).is_some_and(|merged| merged.stored() == shape_of(saved));
        if shape_of(saved) != needed && !is_stored() {
            let found = format!("`{kind}` of parameter `{name}` with shape {:?}", shape_of(saved));
            return Err(bad(found, format!("{needed:?} for a parameter of shape {shape:?}")));
        }
    }
    for &(kind, _) in algorithm.numbers()? {
        let found = saved.numbers.get(kind);
        if found.is_none_or(|x| !(x.is_finite() && (kind != STEP || *x >= 0.0))) {
            let found = found.map_or("nothing".into(), f64::to_string);
            return Err(bad(format!("{found} as `{kind}` of parameter `{name}`"), "a number from 0".into()));
        }
    }
    Ok(())
}

/// Mesh and layout of one state tensor of a parameter.
pub(super) fn mesh_and_layout(
    param: &ParamView,
    group: &ParamGroup,
    name: &str,
) -> Result<Option<(DeviceMesh, Layout)>> {
    let tensors = tensors_of(param, group)?;
    let Some(tensor) = tensors.iter().find(|tensor| tensor.name == name) else { return Ok(None) };
    Ok(Some((param.value.device_mesh().clone(), layout_of(tensor, param)?.0)))
}
