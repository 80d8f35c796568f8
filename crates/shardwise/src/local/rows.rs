//! Slices of a tensor along one dimension, picked by position.

use candle_core::Tensor;

use super::{Assembly, dense, with_first_element};
use crate::error::Result;
use crate::layout::TensorMeta;

/// A position that is nowhere: zeros stand there.
pub(crate) const NOWHERE: usize = usize::MAX;

/// The slices of `x` along `dim` at some positions, one after the other; zeros for [`NOWHERE`].
pub(crate) fn take(x: &Tensor, dim: usize, positions: &[usize]) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    let (n, elem) = (shape[dim], x.dtype().size_in_bytes());
    shape[dim] = positions.len();
    let outer: usize = shape[..dim].iter().product();
    let bytes: usize = shape[dim + 1..].iter().product::<usize>() * elem;
    let taken = Assembly::new(TensorMeta { shape, dtype: x.dtype() })?;
    let x = dense(x)?;
    with_first_element(&x, |source, _| {
        // SAFETY: the tensor is dense; positions are below `n` or nowhere; the target has room for all of them, and all
        // of it is written.
        unsafe {
            let mut target = taken.range::<u8>(0);
            for row in 0..outer {
                for &position in positions {
                    if position == NOWHERE {
                        target.write_bytes(0, bytes);
                    } else {
                        assert!(position < n, "position {position} of {n}");
                        target.copy_from_nonoverlapping(source.add((row * n + position) * bytes), bytes);
                    }
                    target = target.add(bytes);
                }
            }
            Ok(taken.finish())
        }
    })
}
