//! What an optimizer keeps per parameter: vectors that steps change in place, and their form to save and load.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::algorithm::{Algorithm, ParamGroup};
use super::rules::{self, Moment};
use super::schedule::Schedule;
use crate::comm::{Charge, DeviceMesh};
use crate::error::{Error, Result};
use crate::layout::{Layout, TensorMeta};
use crate::local::{dense, placeholder, reserve};
use crate::placement::Placement;
use crate::tensor::DTensor;

/// Name of the finer copy of a parameter.
const MASTER: &str = "master_param";
/// Name of the number that tells a momentum of zeros from one that has not begun: the first gradient is not dampened.
const BEGUN: &str = "begun";

/// The state of an optimizer, by names of parameters; `T` is what tensors are.
///
/// It can be loaded into an optimizer whose parameters lie otherwise. For a world of another size it goes through
/// [`to_full`](OptimizerState::to_full).
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
    /// Numbers: `step` (not of SGD), `mu_product` of NAdam, and `begun` of SGD with momentum: 0 before the first gradient.
    pub numbers: BTreeMap<String, f64>,
    /// Tensors of the shape of the parameter, such as `exp_avg`; and `master_param`, its f32 copy if there is one.
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

/// What is kept for a parameter while an optimizer works.
pub(super) struct State {
    step: u64,
    mu_product: f64,
    /// Whether the momentum has not begun yet.
    first: bool,
    names: Vec<&'static str>,
    /// This rank's part of every tensor, in row-major order.
    values: Values,
    mesh: DeviceMesh,
    layout: Layout,
    _charge: Charge,
}

enum Values {
    F32(Vec<Vec<f32>>),
    F64(Vec<Vec<f64>>),
    /// In a dry run there are none.
    Dry(DType),
}

impl State {
    /// A state for a parameter, with tensors that are there already; others begin anew.
    #[track_caller]
    pub(super) fn new(param: &DTensor, group: &ParamGroup, saved: &ParamState<DTensor>) -> Result<Self> {
        let (mesh, layout) = (param.device_mesh().clone(), param.layout().settled());
        let names = names(param, group);
        let dtype = dtype_of(param);
        let meta = TensorMeta { shape: layout.local_shape(mesh.world().rank()), dtype };
        // In slot order and name order, which is the same on all ranks: moving a tensor takes all of them.
        let mut parts = Vec::new();
        for &name in &names {
            let tensor = match saved.tensors.get(name) {
                Some(tensor) => Some(placed(tensor, param, dtype)?),
                None if name == MASTER => Some(placed(&param.detach(), param, dtype)?),
                None => None,
            };
            parts.push(tensor.map(|tensor| tensor.local().clone()));
        }
        let charge = mesh.world().memory().charge(names.len() * meta.bytes());
        let initial = group.algorithm.initial();
        let values = match dtype {
            _ if mesh.world().is_dry() => Values::Dry(dtype),
            DType::F64 => Values::F64(parts.iter().map(|part| vector(part, initial, &meta)).collect::<Result<_>>()?),
            _ => Values::F32(parts.iter().map(|part| vector(part, initial as f32, &meta)).collect::<Result<_>>()?),
        };
        Ok(State {
            step: saved.numbers.get("step").map_or(0, |&step| step as u64),
            mu_product: saved.numbers.get("mu_product").copied().unwrap_or(1.0),
            first: saved.numbers.get(BEGUN) == Some(&0.0) || !saved.tensors.contains_key("momentum_buffer"),
            names,
            values,
            mesh,
            layout,
            _charge: charge,
        })
    }

    /// Whether this is the state of such a parameter under such settings.
    pub(super) fn fits(&self, param: &DTensor, group: &ParamGroup) -> bool {
        let dtype = match &self.values {
            Values::F32(_) => DType::F32,
            Values::F64(_) => DType::F64,
            Values::Dry(dtype) => *dtype,
        };
        self.layout == param.layout().settled()
            && self.mesh.is_same(param.device_mesh())
            && dtype == dtype_of(param)
            && self.names == names(param, group)
    }

    /// The parameter after one more step against a gradient. Both lie as the state does.
    pub(super) fn step(&mut self, param: &DTensor, gradient: &DTensor, group: &ParamGroup, lr: f64) -> Result<DTensor> {
        let step = self.step + 1;
        let mu_product = match &group.algorithm {
            Algorithm::NAdam(settings) => self.mu_product * rules::momentum_of(settings, step),
            _ => self.mu_product,
        };
        let at = Moment { lr, maximize: group.maximize, step, first: self.first, mu_product };
        let (p, g) = (param.local(), gradient.local());
        let has_master = self.names.last() == Some(&MASTER);
        let local = match &mut self.values {
            Values::Dry(_) => p.clone(),
            _ if p.elem_count() == 0 => p.clone(),
            Values::F32(values) => {
                let (state, master) = values.split_at_mut(self.names.len() - usize::from(has_master));
                rules::step(&group.algorithm, &at, p, g, state, master.first_mut())?
            }
            Values::F64(values) => rules::step(&group.algorithm, &at, p, g, values, None)?,
        };
        (self.step, self.mu_product, self.first) = (step, mu_product, false);
        Ok(DTensor::from_parts(&self.mesh, self.layout.clone(), local))
    }

    /// A copy to keep.
    pub(super) fn saved(&self, algorithm: &Algorithm) -> Result<ParamState> {
        let mut saved = ParamState::default();
        if !matches!(algorithm, Algorithm::Sgd(_)) {
            saved.numbers.insert("step".into(), self.step as f64);
        }
        if matches!(algorithm, Algorithm::NAdam(_)) {
            saved.numbers.insert("mu_product".into(), self.mu_product);
        }
        let shape = self.layout.local_shape(self.mesh.world().rank());
        for (i, &name) in self.names.iter().enumerate() {
            let local = match &self.values {
                Values::F32(values) => Tensor::from_slice(&values[i], shape.as_slice(), &Device::Cpu)?,
                Values::F64(values) => Tensor::from_slice(&values[i], shape.as_slice(), &Device::Cpu)?,
                Values::Dry(dtype) => placeholder(&TensorMeta { shape: shape.clone(), dtype: *dtype })?,
            };
            let tensor = DTensor::from_parts(&self.mesh, self.layout.clone(), local);
            saved.tensors.insert(name.to_string(), tensor);
        }
        Ok(saved)
    }
}

/// The state of a parameter that has not had a gradient yet: what its first step begins with.
pub(super) fn fresh(param: &DTensor, group: &ParamGroup) -> Result<ParamState> {
    let (mesh, layout, dtype) = (param.device_mesh(), param.layout().settled(), dtype_of(param));
    let mut saved = ParamState::default();
    for name in names(param, group) {
        let meta = TensorMeta { shape: layout.local_shape(mesh.world().rank()), dtype };
        let tensor = match name {
            MASTER => placed(param, param, dtype)?,
            _ => {
                let local = match group.algorithm.initial() {
                    _ if mesh.world().is_dry() || meta.elem_count() == 0 => placeholder(&meta)?,
                    // Zeros come from the system without being written.
                    0.0 => Tensor::zeros(meta.shape.as_slice(), dtype, &Device::Cpu)?,
                    initial => Tensor::full(initial, meta.shape.as_slice(), &Device::Cpu)?.to_dtype(dtype)?,
                };
                DTensor::from_parts(mesh, layout.clone(), local)
            }
        };
        saved.tensors.insert(name.to_string(), tensor);
    }
    match group.algorithm {
        Algorithm::Sgd(_) if saved.tensors.contains_key("momentum_buffer") => {
            saved.numbers.insert(BEGUN.into(), 0.0);
        }
        Algorithm::Sgd(_) => {}
        _ => drop(saved.numbers.insert("step".into(), 0.0)),
    }
    if matches!(group.algorithm, Algorithm::NAdam(_)) {
        saved.numbers.insert("mu_product".into(), 1.0);
    }
    Ok(saved)
}

/// The tensors that are kept for a parameter.
fn names(param: &DTensor, group: &ParamGroup) -> Vec<&'static str> {
    let is_half = matches!(param.dtype(), DType::F16 | DType::BF16);
    let master = (group.master && is_half).then_some(MASTER);
    group.algorithm.tensors().iter().copied().chain(master).collect()
}

/// The type of the state of a parameter.
fn dtype_of(param: &DTensor) -> DType {
    if param.dtype() == DType::F64 { DType::F64 } else { DType::F32 }
}

/// A tensor moved to where a parameter lies, in a type.
#[track_caller]
fn placed(tensor: &DTensor, param: &DTensor, dtype: DType) -> Result<DTensor> {
    let (tensor, layout) = (tensor.to_dtype(dtype)?, param.layout().settled());
    if tensor.layout().mesh() == layout.mesh() {
        return tensor.to_layout(&layout);
    }
    tensor.to_mesh(param.device_mesh(), layout.placements().to_vec())?.to_layout(&layout)
}

/// The elements of a part, or as many times one number.
fn vector<T: candle_core::WithDType>(part: &Option<Tensor>, initial: T, meta: &TensorMeta) -> Result<Vec<T>> {
    let count = meta.elem_count();
    match part {
        _ if count == 0 => Ok(Vec::new()),
        Some(part) => Ok(dense(part)?.flatten_all()?.to_vec1()?),
        None => {
            // Zeros of this kind come from the system without being written.
            drop(reserve::<T>(count)?);
            Ok(vec![initial; count])
        }
    }
}

/// An error unless the tensors and numbers are those of an algorithm on a parameter of a shape.
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
        Error::invalid("optimizer state", found, needed, fix)
    };
    let expected = algorithm.tensors();
    if let Some(missing) = expected.iter().find(|&&kind| !saved.tensors.contains_key(kind)) {
        return Err(bad(format!("no `{missing}` of parameter `{name}`"), format!("{expected:?}")));
    }
    if let Some(unknown) = saved.tensors.keys().find(|kind| !expected.contains(&kind.as_str()) && *kind != MASTER) {
        return Err(bad(format!("`{unknown}` of parameter `{name}`"), format!("{expected:?}")));
    }
    if let Some((kind, tensor)) = saved.tensors.iter().find(|(_, tensor)| shape_of(tensor) != shape) {
        let found = format!("`{kind}` of parameter `{name}` with shape {:?}", shape_of(tensor));
        return Err(bad(found, format!("{shape:?}, the shape of the parameter")));
    }
    let numbers: &[&str] = match algorithm {
        Algorithm::Sgd(_) => &[],
        Algorithm::NAdam(_) => &["step", "mu_product"],
        _ => &["step"],
    };
    for &kind in numbers {
        let found = saved.numbers.get(kind);
        if found.is_none_or(|x| !(*x >= 0.0 && x.is_finite())) {
            let found = found.map_or("nothing".into(), f64::to_string);
            return Err(bad(format!("{found} as `{kind}` of parameter `{name}`"), "a number from 0".into()));
        }
    }
    Ok(())
}
