//! Elements of a small tensor as a plain vector, such as the statistics of channels.

use candle_core::{DType, Tensor};

use super::convert::convert;
use crate::error::Result;

/// Copies the elements, converted to f64, in row-major order.
pub fn to_f64_vec(tensor: &Tensor) -> Result<Vec<f64>> {
    match tensor.elem_count() {
        // Candle fails on views without elements whose offset is outside the storage.
        0 => Ok(Vec::new()),
        _ => Ok(convert(tensor, DType::F64)?.flatten_all()?.to_vec1()?),
    }
}
