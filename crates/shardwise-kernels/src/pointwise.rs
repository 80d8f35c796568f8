//! Elements as plain vectors, for operators that look at them one by one.

use candle_core::{DType, Tensor};

use crate::error::Result;

/// The elements in row-major order.
pub fn reals(tensor: &Tensor) -> Result<Vec<f64>> {
    match tensor.elem_count() {
        0 => Ok(Vec::new()),
        _ => Ok(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?),
    }
}

/// The elements in row-major order, as integers.
pub fn wholes(tensor: &Tensor) -> Result<Vec<i64>> {
    match tensor.elem_count() {
        0 => Ok(Vec::new()),
        _ => Ok(tensor.to_dtype(DType::I64)?.flatten_all()?.to_vec1()?),
    }
}

/// A tensor of a type from numbers in row-major order.
pub fn from_reals(values: Vec<f64>, shape: &[usize], dtype: DType) -> Result<Tensor> {
    Ok(Tensor::from_vec(values, shape, &candle_core::Device::Cpu)?.to_dtype(dtype)?)
}

/// A tensor of a type from integers in row-major order.
pub fn from_wholes(values: Vec<i64>, shape: &[usize], dtype: DType) -> Result<Tensor> {
    Ok(Tensor::from_vec(values, shape, &candle_core::Device::Cpu)?.to_dtype(dtype)?)
}
