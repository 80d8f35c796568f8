//! Reducing elements of a source into those of a tensor at given indices: products, maxima and minima.

use candle_core::{DType, Device, Tensor};

use super::{contiguous, to_f64_vec};
use crate::error::Result;

/// How elements for one place are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScatterReduction {
    /// The product.
    Product,
    /// The maximum; NaN if there is one.
    Max,
    /// The minimum; NaN if there is one.
    Min,
}

impl ScatterReduction {
    fn real(self, a: f64, b: f64) -> f64 {
        match self {
            ScatterReduction::Product => a * b,
            ScatterReduction::Max if a > b || a.is_nan() => a,
            ScatterReduction::Min if a < b || a.is_nan() => a,
            ScatterReduction::Max | ScatterReduction::Min => b,
        }
    }

    fn integer(self, a: i64, b: i64) -> i64 {
        match self {
            ScatterReduction::Product => a.wrapping_mul(b),
            ScatterReduction::Max => a.max(b),
            ScatterReduction::Min => a.min(b),
        }
    }
}

/// Copies `x` with elements of `source` reduced into it at `index` along `dim`, as `torch.scatter_reduce`.
///
/// `source` has the shape of `index`. Without `include_self` a place that has a source begins with the first of them. Computed in
/// f64, integers in i64.
///
/// # Panics
/// If a coordinate is outside of `x`, or the shapes differ.
pub fn scatter_reduce(
    x: &Tensor,
    dim: usize,
    index: &Tensor,
    source: &Tensor,
    reduction: ScatterReduction,
    include_self: bool,
) -> Result<Tensor> {
    assert_eq!(source.dims(), index.dims(), "one source per index");
    let places = places(x.dims(), dim, index)?;
    if x.dtype().is_float() {
        let (mut out, values) = (to_f64_vec(x)?, to_f64_vec(source)?);
        fold(&mut out, &places, &values, include_self, |a, b| reduction.real(a, b));
        return Ok(Tensor::from_vec(out, x.dims(), &Device::Cpu)?.to_dtype(x.dtype())?);
    }
    let integers =
        |t: &Tensor| -> Result<Vec<i64>> { Ok(contiguous(t)?.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?) };
    let (mut out, values) = (integers(x)?, integers(source)?);
    fold(&mut out, &places, &values, include_self, |a, b| reduction.integer(a, b));
    Ok(Tensor::from_vec(out, x.dims(), &Device::Cpu)?.to_dtype(x.dtype())?)
}

fn fold<T: Copy>(out: &mut [T], places: &[usize], values: &[T], include_self: bool, f: impl Fn(T, T) -> T) {
    let mut begun = vec![include_self; out.len()];
    for (&place, &value) in places.iter().zip(values) {
        out[place] = if begun[place] { f(out[place], value) } else { value };
        begun[place] = true;
    }
}

/// For each element of an index, the place in the row-major order of a tensor that it names.
fn places(shape: &[usize], dim: usize, index: &Tensor) -> Result<Vec<usize>> {
    let mut strides = vec![1; shape.len()];
    for d in (0..shape.len().saturating_sub(1)).rev() {
        strides[d] = strides[d + 1] * shape[d + 1];
    }
    let indices = contiguous(index)?.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let place = |(mut at, &along): (usize, &i64)| {
        let mut place = 0;
        for d in (0..shape.len()).rev() {
            let size = index.dims()[d];
            place += strides[d] * if d == dim { along as usize } else { at % size };
            at /= size;
        }
        place
    };
    Ok(indices.iter().enumerate().map(place).collect())
}
