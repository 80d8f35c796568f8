//! Slices of a tensor along one dimension, picked by position.

use candle_core::Tensor;

use super::{Assembly, dense, with_first_element};
use crate::error::Result;
use crate::meta::TensorMeta;

/// A position that is nowhere: zeros stand there.
pub const NOWHERE: usize = usize::MAX;

/// The slices of `x` along `dim` at some positions, one after the other; zeros for [`NOWHERE`].
pub fn take(x: &Tensor, dim: usize, positions: &[usize]) -> Result<Tensor> {
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

/// For every element of `shape` the element of `x` whose coordinate along `dim` is its place (row-major over `shape`) and
/// whose other coordinates are its own; zero for [`NOWHERE`].
pub fn pick(x: &Tensor, dim: usize, places: &[usize], shape: &[usize]) -> Result<Tensor> {
    let elem = x.dtype().size_in_bytes();
    assert_eq!(places.len(), shape.iter().product::<usize>(), "one place per element");
    let picked = Assembly::new(TensorMeta { shape: shape.to_vec(), dtype: x.dtype() })?;
    let x = dense(x)?;
    let numbers = Numbers::new(x.dims(), dim, shape);
    with_first_element(&x, |source, _| {
        // SAFETY: the tensor is dense, the number of an element with a place is inside it, and every element of the
        // target is written once.
        unsafe {
            let target = picked.range::<u8>(0);
            for (i, &place) in places.iter().enumerate() {
                let to = target.add(i * elem);
                match place {
                    NOWHERE => to.write_bytes(0, elem),
                    _ => to.copy_from_nonoverlapping(source.add(numbers.of(i, place) * elem), elem),
                }
            }
            Ok(picked.finish())
        }
    })
}

/// The row-major numbers in a tensor of elements that lie at the coordinates of another shape, but for one dimension.
pub struct Numbers {
    dim: usize,
    /// Strides of the other shape and of the tensor.
    strides: Vec<(usize, usize)>,
    sizes: Vec<usize>,
}

impl Numbers {
    /// For an index of this shape into a tensor of these sizes.
    pub fn new(sizes: &[usize], dim: usize, shape: &[usize]) -> Self {
        let strides =
            |shape: &[usize]| -> Vec<usize> { (0..shape.len()).map(|d| shape[d + 1..].iter().product()).collect() };
        Numbers { dim, strides: strides(shape).into_iter().zip(strides(sizes)).collect(), sizes: sizes.to_vec() }
    }

    /// The number of the element that lies where element `i` of the other shape does, but at `place` along the dimension.
    ///
    /// # Panics
    /// If there is no such element.
    pub fn of(&self, mut i: usize, place: usize) -> usize {
        let mut number = 0;
        for (d, &(other, own)) in self.strides.iter().enumerate() {
            let coordinate = if d == self.dim { place } else { i / other };
            assert!(coordinate < self.sizes[d], "coordinate {coordinate} of {}", self.sizes[d]);
            number += coordinate * own;
            i %= other;
        }
        number
    }
}
