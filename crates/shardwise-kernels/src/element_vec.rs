//! Elements of a tensor as plain vectors, for operators that look at them one by one.
//!
//! Each function allocates a vector or a tensor of all elements and runs on the calling thread.

use candle_core::{DType, Tensor};

use crate::error::Result;

/// Copies the elements, converted to f64, in row-major order.
pub fn to_f64_vec(tensor: &Tensor) -> Result<Vec<f64>> {
    match tensor.elem_count() {
        // Candle fails on views without elements whose offset is outside the storage.
        0 => Ok(Vec::new()),
        _ => Ok(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?),
    }
}

/// Builds a tensor of this shape and type from values in row-major order.
///
/// # Errors
/// If the number of values is not that of the shape.
pub fn from_f64_vec(values: Vec<f64>, shape: &[usize], dtype: DType) -> Result<Tensor> {
    Ok(Tensor::from_vec(values, shape, &candle_core::Device::Cpu)?.to_dtype(dtype)?)
}
