//! Working states: the tensors and numbers of one parameter that steps change in place.

use candle_core::{DType, Device, Tensor};

use crate::comm::{DeviceMesh, MemoryCharge};
use crate::error::Result;
use crate::layout::{Layout, MergedShape, TensorMeta};
use crate::tensor::DTensor;
use shardwise_kernels::{contiguous, placeholder, reserve};

/// State tensor with the master weights: the copy of a half-precision parameter in the type of the state.
pub(super) const MASTER: &str = "master_param";
/// State number that counts the steps of a parameter.
pub(super) const STEP: &str = "step";

/// The optimizer state of one parameter between steps.
pub(super) struct WorkingState {
    /// In the order of [`Optimizer::numbers`](super::Optimizer::numbers).
    pub(super) numbers: Vec<(&'static str, f64)>,
    /// Whether no step has been taken yet.
    pub(super) first: bool,
    /// In the order of [`Optimizer::state`](super::Optimizer::state), master weights last.
    pub(super) entries: Vec<StateEntry>,
    pub(super) values: StateValues,
    pub(super) mesh: DeviceMesh,
    /// Layout of the stored parameter.
    pub(super) layout: Layout,
    /// The own shape of the parameter, if it is stored with merged dimensions.
    pub(super) merged: Option<MergedShape>,
    pub(super) _charge: MemoryCharge,
}

/// Name and layout of a state tensor.
pub(super) struct StateEntry {
    pub(super) name: &'static str,
    pub(super) layout: Layout,
    /// Its own shape, if it is stored with merged dimensions.
    pub(super) merged: Option<MergedShape>,
}

/// Local shards of all state tensors, in row-major order.
pub(super) enum StateValues {
    F32(Vec<Vec<f32>>),
    F64(Vec<Vec<f64>>),
    /// A dry run has no values, only a type.
    Dry(DType),
}

impl WorkingState {
    /// Element type of all state tensors.
    pub(super) fn dtype(&self) -> DType {
        match &self.values {
            StateValues::F32(_) => DType::F32,
            StateValues::F64(_) => DType::F64,
            StateValues::Dry(dtype) => *dtype,
        }
    }

    /// Whether master weights are kept.
    pub(super) fn has_master(&self) -> bool {
        self.entries.last().is_some_and(|entry| entry.name == MASTER)
    }

    /// Copies one state tensor.
    pub(super) fn tensor(&self, i: usize) -> Result<DTensor> {
        let layout = &self.entries[i].layout;
        let shape = layout.local_shape(self.mesh.world().rank());
        let local = match &self.values {
            StateValues::F32(values) => Tensor::from_slice(&values[i], shape.as_slice(), &Device::Cpu)?,
            StateValues::F64(values) => Tensor::from_slice(&values[i], shape.as_slice(), &Device::Cpu)?,
            StateValues::Dry(dtype) => placeholder(&TensorMeta { shape, dtype: *dtype })?,
        };
        Ok(DTensor::from_parts(&self.mesh, layout.clone(), local))
    }

    /// Replaces one state tensor by one in any layout on its mesh.
    #[track_caller]
    pub(super) fn set_tensor(&mut self, i: usize, tensor: &DTensor) -> Result<()> {
        let layout = &self.entries[i].layout;
        let tensor = placed(tensor, &self.mesh, layout, self.dtype())?;
        let meta = TensorMeta { shape: layout.local_shape(self.mesh.world().rank()), dtype: tensor.dtype() };
        let part = Some(tensor.local().clone());
        match &mut self.values {
            StateValues::F32(values) => values[i] = vector(&part, 0.0, &meta)?,
            StateValues::F64(values) => values[i] = vector(&part, 0.0, &meta)?,
            StateValues::Dry(_) => {}
        }
        Ok(())
    }
}

/// Converts and redistributes a tensor.
#[track_caller]
pub(super) fn placed(tensor: &DTensor, mesh: &DeviceMesh, layout: &Layout, dtype: DType) -> Result<DTensor> {
    let tensor = tensor.to_dtype(dtype)?;
    if tensor.layout().mesh() == layout.mesh() {
        return tensor.to_layout(layout);
    }
    tensor.to_mesh_layout(mesh, layout)
}

/// The elements of a local shard, or that many copies of an initial value.
pub(super) fn vector<T: candle_core::WithDType>(
    part: &Option<Tensor>,
    initial: T,
    meta: &TensorMeta,
) -> Result<Vec<T>> {
    let count = meta.elem_count();
    match part {
        _ if count == 0 => Ok(Vec::new()),
        Some(part) => Ok(contiguous(part)?.flatten_all()?.to_vec1()?),
        None => {
            // Fails instead of aborting if there is no memory; `vec!` of zeros then gets zeroed memory without writing it.
            drop(reserve::<T>(count)?);
            Ok(vec![initial; count])
        }
    }
}
