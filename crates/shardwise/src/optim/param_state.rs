//! The tensors and numbers that steps change in place for one parameter.

use candle_core::{DType, Device, Tensor};

use crate::comm::{DeviceMesh, MemoryCharge};
use crate::error::Result;
use crate::layout::{Layout, TensorMeta};
use crate::tensor::DTensor;
use shardwise_kernels::{contiguous, placeholder, reserve};

/// Name of the f32 copy of a half-precision parameter.
pub(super) const MASTER: &str = "master_param";
/// Name of the number of steps of a parameter.
pub(super) const STEP: &str = "step";

/// What is kept for a parameter while an optimizer works.
pub(super) struct State {
    /// Those that the optimizer lists, in its order.
    pub(super) numbers: Vec<(&'static str, f64)>,
    /// Whether no step has been taken.
    pub(super) first: bool,
    /// The tensors in the order of the optimizer; the f32 copy of the parameter stands last.
    pub(super) entries: Vec<Entry>,
    pub(super) values: Values,
    pub(super) mesh: DeviceMesh,
    /// Layout of the parameter.
    pub(super) layout: Layout,
    pub(super) _charge: MemoryCharge,
}

/// Name and layout of a tensor.
pub(super) struct Entry {
    pub(super) name: &'static str,
    pub(super) layout: Layout,
}

/// This rank's part of every tensor, in row-major order.
pub(super) enum Values {
    F32(Vec<Vec<f32>>),
    F64(Vec<Vec<f64>>),
    /// In a dry run there are none.
    Dry(DType),
}

impl State {
    /// Type of all tensors.
    pub(super) fn dtype(&self) -> DType {
        match &self.values {
            Values::F32(_) => DType::F32,
            Values::F64(_) => DType::F64,
            Values::Dry(dtype) => *dtype,
        }
    }

    /// Whether there is an f32 copy of the parameter.
    pub(super) fn has_master(&self) -> bool {
        self.entries.last().is_some_and(|entry| entry.name == MASTER)
    }

    /// A copy of one tensor.
    pub(super) fn tensor(&self, i: usize) -> Result<DTensor> {
        let layout = &self.entries[i].layout;
        let shape = layout.local_shape(self.mesh.world().rank());
        let local = match &self.values {
            Values::F32(values) => Tensor::from_slice(&values[i], shape.as_slice(), &Device::Cpu)?,
            Values::F64(values) => Tensor::from_slice(&values[i], shape.as_slice(), &Device::Cpu)?,
            Values::Dry(dtype) => placeholder(&TensorMeta { shape, dtype: *dtype })?,
        };
        Ok(DTensor::from_parts(&self.mesh, layout.clone(), local))
    }

    /// Replaces one tensor by another in any layout on its mesh.
    #[track_caller]
    pub(super) fn set_tensor(&mut self, i: usize, tensor: &DTensor) -> Result<()> {
        let layout = &self.entries[i].layout;
        let tensor = placed(tensor, &self.mesh, layout, self.dtype())?;
        let meta = TensorMeta { shape: layout.local_shape(self.mesh.world().rank()), dtype: tensor.dtype() };
        let part = Some(tensor.local().clone());
        match &mut self.values {
            Values::F32(values) => values[i] = vector(&part, 0.0, &meta)?,
            Values::F64(values) => values[i] = vector(&part, 0.0, &meta)?,
            Values::Dry(_) => {}
        }
        Ok(())
    }
}

/// A tensor in a layout on a mesh, in a type.
#[track_caller]
pub(super) fn placed(tensor: &DTensor, mesh: &DeviceMesh, layout: &Layout, dtype: DType) -> Result<DTensor> {
    let tensor = tensor.to_dtype(dtype)?;
    if tensor.layout().mesh() == layout.mesh() {
        return tensor.to_layout(layout);
    }
    tensor.to_mesh(mesh, layout.placements().to_vec())?.to_layout(layout)
}

/// The elements of a part, or as many times one number.
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
            // Zeros of this kind come from the system without being written.
            drop(reserve::<T>(count)?);
            Ok(vec![initial; count])
        }
    }
}
