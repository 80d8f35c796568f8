//! Selection by index along one dimension: whole slices (`index_select`) or single elements (`gather`).

use candle_core::Tensor;

use super::{Assembly, contiguous, with_first_element};
use crate::error::Result;
use crate::meta::TensorMeta;

/// An index that selects nothing, such as that of an element another rank holds: the result is zero there.
pub const NO_INDEX: usize = usize::MAX;

/// Selects the slices of `x` at `indices` along `dim`, as `torch.index_select`; zeros for [`NO_INDEX`].
///
/// The result has the shape of `x` with `indices.len()` along `dim`. Any supported type; one copy of each slice, on the
/// calling thread.
///
/// # Panics
/// If an index is not below the size of the dimension.
pub fn index_select(x: &Tensor, dim: usize, indices: &[usize]) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    let (n, elem) = (shape[dim], x.dtype().size_in_bytes());
    shape[dim] = indices.len();
    let outer: usize = shape[..dim].iter().product();
    let bytes: usize = shape[dim + 1..].iter().product::<usize>() * elem;
    let selected = Assembly::new(TensorMeta { shape, dtype: x.dtype() })?;
    let x = contiguous(x)?;
    with_first_element(&x, |source, _| {
        // SAFETY: the tensor is contiguous; indices are below `n` or NO_INDEX; the target has room for all slices, and all
        // of it is written.
        unsafe {
            let mut target = selected.range::<u8>(0);
            for row in 0..outer {
                for &index in indices {
                    if index == NO_INDEX {
                        target.write_bytes(0, bytes);
                    } else {
                        assert!(index < n, "index {index} of {n}");
                        target.copy_from_nonoverlapping(source.add((row * n + index) * bytes), bytes);
                    }
                    target = target.add(bytes);
                }
            }
            Ok(selected.finish())
        }
    })
}

/// Selects one element of `x` for every element of `shape`, as `torch.gather`; zero for [`NO_INDEX`].
///
/// `indices`, in row-major order over `shape`, are the coordinates along `dim`; the other coordinates are those of the
/// element of `shape`. Any supported type; runs on the calling thread.
///
/// # Panics
/// If there is not one index per element, or an index is not below the size of the dimension.
pub fn gather(x: &Tensor, dim: usize, indices: &[usize], shape: &[usize]) -> Result<Tensor> {
    let elem = x.dtype().size_in_bytes();
    assert_eq!(indices.len(), shape.iter().product::<usize>(), "one index per element");
    let gathered = Assembly::new(TensorMeta { shape: shape.to_vec(), dtype: x.dtype() })?;
    let x = contiguous(x)?;
    let offsets = GatherOffsets::new(x.dims(), dim, shape);
    with_first_element(&x, |source, _| {
        // SAFETY: the tensor is contiguous, the offset of an element with an index is inside it, and every element of the
        // target is written once.
        unsafe {
            let target = gathered.range::<u8>(0);
            for (i, &index) in indices.iter().enumerate() {
                let to = target.add(i * elem);
                match index {
                    NO_INDEX => to.write_bytes(0, elem),
                    _ => to.copy_from_nonoverlapping(source.add(offsets.offset(i, index) * elem), elem),
                }
            }
            Ok(gathered.finish())
        }
    })
}

/// Offsets into a contiguous tensor for `gather` and `scatter`: the coordinates of an index tensor with one of them
/// replaced by the index.
pub struct GatherOffsets {
    dim: usize,
    /// Per dimension, the stride of the index tensor and of the tensor.
    strides: Vec<(usize, usize)>,
    sizes: Vec<usize>,
}

impl GatherOffsets {
    /// For an index tensor of `index_shape` into dimension `dim` of a contiguous tensor of `sizes`.
    pub fn new(sizes: &[usize], dim: usize, index_shape: &[usize]) -> Self {
        let strides =
            |shape: &[usize]| -> Vec<usize> { (0..shape.len()).map(|d| shape[d + 1..].iter().product()).collect() };
        GatherOffsets {
            dim,
            strides: strides(index_shape).into_iter().zip(strides(sizes)).collect(),
            sizes: sizes.to_vec(),
        }
    }

    /// Offset, in elements, of the element at the coordinates of element `i` of the index tensor, but at `index` along the
    /// dimension.
    ///
    /// # Panics
    /// If a coordinate is outside the tensor.
    pub fn offset(&self, mut i: usize, index: usize) -> usize {
        let mut offset = 0;
        for (d, &(index_stride, stride)) in self.strides.iter().enumerate() {
            let coordinate = if d == self.dim { index } else { i / index_stride };
            assert!(coordinate < self.sizes[d], "coordinate {coordinate} of {}", self.sizes[d]);
            offset += coordinate * stride;
            i %= index_stride;
        }
        offset
    }
}
