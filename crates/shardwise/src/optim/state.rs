//! What an optimizer keeps per parameter: vectors that steps change in place, and their form to save and load.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::algorithm::Algorithm;
use super::group::ParamGroup;
use super::optimizer::StateTensor;
use super::param_state::{Entry, MASTER, STEP, State, Values, placed, vector};
use super::param_step::ParamStep;
use super::schedule::Schedule;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::placement::Placement;
use crate::tensor::{DTensor, no_grad};
use shardwise_kernels::placeholder;

/// Name of the number that marks the state of an optimizer that does not count steps as unused: 0 before the first step.
const BEGUN: &str = "begun";

/// The state of an optimizer, by names of parameters; `T` is what tensors are.
///
/// It can be loaded into an optimizer whose parameters have other layouts. For a world of another size it goes through
/// [`to_full`](OptimizerState::to_full), or through a checkpoint.
#[derive(Debug, Clone)]
pub struct OptimizerState<T = DTensor> {
    /// Steps taken so far.
    pub steps: u64,
    /// The schedule of the learning rates; without one, that of the optimizer that loads it stays.
    pub schedule: Option<Schedule>,
    /// The groups in order.
    pub groups: Vec<GroupState>,
    /// What is kept per parameter. One without content has not had a gradient yet.
    pub params: BTreeMap<String, ParamState<T>>,
}

/// The state with whole tensors, the same on every rank.
pub type FullState = OptimizerState<Tensor>;

/// One group of parameters in a state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupState {
    /// Its settings.
    pub group: ParamGroup,
    /// Names of its parameters.
    pub params: Vec<String>,
}

/// What is kept for one parameter, by the names that PyTorch uses.
#[derive(Debug, Clone)]
pub struct ParamState<T = DTensor> {
    /// Numbers, such as `step`; and `begun` with the value 0 where an optimizer that counts no steps has taken none.
    pub numbers: BTreeMap<String, f64>,
    /// Tensors, such as `exp_avg`; and `master_param`, the f32 copy of the parameter if there is one.
    pub tensors: BTreeMap<String, T>,
}

impl<T> ParamState<T> {
    /// Whether there is nothing in it.
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
    /// The same with whole tensors on every rank of the world, also those outside the mesh of a parameter. All ranks must
    /// call it.
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

/// The whole tensor on every rank of the world.
#[track_caller]
fn everywhere(tensor: &DTensor) -> Result<Tensor> {
    let world = tensor.device_mesh().world();
    if tensor.device_mesh().size() == world.size() {
        return tensor.full_tensor();
    }
    let all = world.mesh([("all", world.size())])?;
    Ok(tensor.to_mesh(&all, [Placement::Replicate])?.local().clone())
}

impl State {
    /// A state for a parameter, with tensors that are there already; others begin anew.
    #[track_caller]
    pub(super) fn new(param: &DTensor, group: &ParamGroup, saved: &ParamState<DTensor>) -> Result<Self> {
        let (mesh, layout) = (param.device_mesh().clone(), param.layout().reduced());
        let (tensors, dtype) = (tensors_of(param, group)?, dtype_of(param));
        let mut entries = Vec::new();
        // In slot order and name order, which is the same on all ranks: moving a tensor takes all of them.
        let mut parts = Vec::new();
        let mut charge = 0;
        for tensor in &tensors {
            let to = layout_of(tensor, &layout)?;
            let part = match saved.tensors.get(tensor.name) {
                Some(saved) => Some(placed(saved, &mesh, &to, dtype)?),
                None if tensor.name == MASTER => Some(placed(&param.detach(), &mesh, &to, dtype)?),
                None => None,
            };
            let meta = TensorMeta { shape: to.local_shape(mesh.world().rank()), dtype };
            charge += meta.bytes();
            parts.push((part.map(|part| part.local().clone()), tensor.initial, meta));
            entries.push(Entry { name: tensor.name, layout: to });
        }
        let charge = mesh.world().memory().charge(charge);
        let values = match dtype {
            _ if mesh.world().is_dry() => Values::Dry(dtype),
            DType::F64 => {
                Values::F64(parts.iter().map(|(part, x, meta)| vector(part, *x, meta)).collect::<Result<_>>()?)
            }
            _ => Values::F32(parts.iter().map(|(part, x, meta)| vector(part, *x as f32, meta)).collect::<Result<_>>()?),
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
        Ok(State { numbers, first, entries, values, mesh, layout, _charge: charge })
    }

    /// Whether this is the state of such a parameter under such settings.
    pub(super) fn fits(&self, param: &DTensor, group: &ParamGroup) -> Result<bool> {
        let (tensors, numbers) = (tensors_of(param, group)?, group.algorithm.numbers()?);
        let is_same = |(entry, tensor): (&Entry, &StateTensor)| {
            entry.name == tensor.name && entry.layout.shape() == tensor.shape.as_slice()
        };
        Ok(self.layout == param.layout().reduced()
            && self.mesh.is_same(param.device_mesh())
            && self.dtype() == dtype_of(param)
            && self.entries.len() == tensors.len()
            && self.entries.iter().zip(&tensors).all(is_same)
            && self.numbers.iter().map(|(name, _)| name).eq(numbers.iter().map(|(name, _)| name)))
    }

    /// The parameter after one more step against a gradient. Both have the layout of the parameter.
    pub(super) fn step(&mut self, param: DTensor, gradient: &DTensor, group: &ParamGroup, lr: f64) -> Result<DTensor> {
        let before = self.numbers.clone();
        if let Some((_, steps)) = self.numbers.iter_mut().find(|(name, _)| *name == STEP) {
            *steps += 1.0;
        }
        let mut at = ParamStep::new(self, param, gradient, lr, group.maximize);
        let stepped = no_grad(|| group.algorithm.step(&mut at)).map(|()| at.into_param());
        match stepped {
            Ok(_) => self.first = false,
            Err(_) => self.numbers = before,
        }
        stepped
    }

    /// A copy to keep.
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

/// The state of a parameter that has not had a gradient yet: what its first step begins with.
pub(super) fn fresh(param: &DTensor, group: &ParamGroup) -> Result<ParamState> {
    let (mesh, dtype) = (param.device_mesh(), dtype_of(param));
    let mut saved = ParamState::default();
    for tensor in tensors_of(param, group)? {
        let layout = layout_of(&tensor, &param.layout().reduced())?;
        let meta = TensorMeta { shape: layout.local_shape(mesh.world().rank()), dtype };
        let made = match tensor.name {
            MASTER => placed(param, mesh, &layout, dtype)?,
            _ => {
                let local = match tensor.initial {
                    _ if mesh.world().is_dry() || meta.elem_count() == 0 => placeholder(&meta)?,
                    // Zeros come from the system without being written.
                    0.0 => Tensor::zeros(meta.shape.as_slice(), dtype, &Device::Cpu)?,
                    initial => Tensor::full(initial, meta.shape.as_slice(), &Device::Cpu)?.to_dtype(dtype)?,
                };
                DTensor::from_parts(mesh, layout, local)
            }
        };
        saved.tensors.insert(tensor.name.to_string(), made);
    }
    let numbers = group.algorithm.numbers()?.iter();
    saved.numbers.extend(numbers.map(|&(name, initial)| (name.to_string(), initial)));
    mark_unused(&mut saved);
    Ok(saved)
}

/// Records that no step was taken where nothing else tells: zeros may also be the moments after a step.
fn mark_unused(saved: &mut ParamState) {
    let has_moments = saved.tensors.keys().any(|name| name != MASTER);
    if has_moments && !saved.numbers.contains_key(STEP) {
        saved.numbers.insert(BEGUN.into(), 0.0);
    }
}

/// The tensors that are kept for a parameter.
fn tensors_of(param: &DTensor, group: &ParamGroup) -> Result<Vec<StateTensor>> {
    let is_half = matches!(param.dtype(), DType::F16 | DType::BF16);
    let master = (group.master && is_half).then(|| StateTensor::zeros(MASTER, param.shape()));
    Ok(group.algorithm.state(param.shape())?.into_iter().chain(master).collect())
}

/// The layout of a tensor of the state of a parameter: dimensions of the same size are sharded alike.
fn layout_of(tensor: &StateTensor, param: &Layout) -> Result<Layout> {
    let (shape, mesh) = (tensor.shape.as_slice(), param.mesh());
    if shape == param.shape() {
        return Ok(param.clone());
    }
    if shape.len() != param.shape().len() {
        return Layout::replicated(mesh, shape);
    }
    let is_kept = |dim: usize| shape[dim] == param.shape()[dim];
    let keep = |p: &Placement| if p.shard_dim().is_some_and(is_kept) { p.clone() } else { Placement::Replicate };
    let placements: Vec<Placement> = param.placements().iter().map(keep).collect();
    let cuts = param.shard_orders().into_iter().enumerate();
    let cuts: Vec<Vec<usize>> = cuts.map(|(dim, axes)| if is_kept(dim) { axes } else { Vec::new() }).collect();
    Layout::from_shard_orders(mesh, shape, &placements, &cuts)
}

/// The type of the state of a parameter.
fn dtype_of(param: &DTensor) -> DType {
    if param.dtype() == DType::F64 { DType::F64 } else { DType::F32 }
}

/// An error unless the tensors and numbers are those of an optimizer on a parameter of a shape.
pub(super) fn check<T>(
    name: &str,
    saved: &ParamState<T>,
    algorithm: &Algorithm,
    shape: &[usize],
    shape_of: fn(&T) -> &[usize],
) -> Result<()> {
    if saved.is_empty() {
        return Ok(());
    }
    let bad = |found: String, needed: String| {
        let fix = format!("load the state of {} of the same model", algorithm.name());
        ErrorKind::state().error("optimizer state", found, needed, fix)
    };
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
        if shape_of(saved) != needed {
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

/// Mesh and layout of one tensor of the state of a parameter.
pub(super) fn place(param: &DTensor, group: &ParamGroup, name: &str) -> Result<Option<(DeviceMesh, Layout)>> {
    let tensors = tensors_of(param, group)?;
    let Some(tensor) = tensors.iter().find(|tensor| tensor.name == name) else { return Ok(None) };
    Ok(Some((param.device_mesh().clone(), layout_of(tensor, &param.layout().reduced())?)))
}
