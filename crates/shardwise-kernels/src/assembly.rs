//! A tensor put together from blocks, by one thread or by several at once.

use std::sync::OnceLock;

use candle_core::Tensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::copy::copy_block;
use super::fresh::Fresh;
use super::{check_served, with_first_element};
use crate::error::{ErrorKind, Result};
use crate::meta::TensorMeta;

/// A contiguous tensor whose memory is allocated but not yet filled.
pub struct Assembly {
    meta: TensorMeta,
    strides: Vec<usize>,
    first: *mut u8,
    /// The memory, until it is finished.
    fresh: Mutex<Option<Fresh>>,
    finished: OnceLock<Tensor>,
}

// SAFETY: `first` points into the heap buffer that `fresh` owns; writes through it follow the contract of the unsafe
// methods below, and everything else is behind a lock.
unsafe impl Send for Assembly {}
// SAFETY: as above.
unsafe impl Sync for Assembly {}

impl Assembly {
    /// Reserves memory for a tensor. Its pages are not touched, so that whoever fills a part pays for that part.
    pub fn new(meta: TensorMeta) -> Result<Self> {
        let fresh = Fresh::new(meta.dtype, meta.elem_count())?;
        let mut strides = vec![1usize; meta.shape.len()];
        for dim in (1..strides.len()).rev() {
            strides[dim - 1] = strides[dim].saturating_mul(meta.shape[dim]);
        }
        Ok(Assembly { meta, strides, first: fresh.first(), fresh: Mutex::new(Some(fresh)), finished: OnceLock::new() })
    }

    /// Copies `block` to the place that begins at `offsets`.
    ///
    /// # Safety
    /// The block has this tensor's element type, is on the CPU and fits at `offsets`; no other thread writes to the
    /// same place; [`finish`](Self::finish) is called later.
    pub unsafe fn paste(&self, block: &Tensor, offsets: &[usize]) {
        if block.elem_count() == 0 {
            return;
        }
        let elem = self.meta.dtype.size_in_bytes();
        let start: usize = offsets.iter().zip(&self.strides).map(|(o, s)| o * s).sum();
        with_first_element(block, |src, src_strides| {
            // SAFETY: the source is a live tensor; the destination is inside the reserved buffer because the block fits.
            unsafe { copy_block(src, src_strides, self.first.add(start * elem), &self.strides, block.dims(), elem) };
        });
    }

    /// The memory of elements `from..to` in row-major order, to be written by the caller.
    ///
    /// # Safety
    /// `T` is the element type, the range is inside the tensor, and no other thread writes to the same place.
    pub unsafe fn range<T>(&self, from: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.first.cast::<T>().add(from) }
    }

    /// The finished tensor; all callers get one and the same.
    ///
    /// # Safety
    /// Every element has been written, and the writes happened before this call.
    pub unsafe fn finish(&self) -> Tensor {
        let finish = || {
            let fresh = self.fresh.lock().take().expect("finished once, inside the cell");
            // SAFETY: the caller's promise.
            unsafe { fresh.finish(self.meta.shape.as_slice()) }
        };
        self.finished.get_or_init(finish).clone()
    }
}

/// A tensor with these elements that begin at the start of a dense range of memory: itself wherever that is so. Views
/// without elements are made anew, because candle trips over their offsets.
pub fn dense(tensor: &Tensor) -> Result<Tensor> {
    concat(std::slice::from_ref(tensor), 0)
}

/// The elements in memory that nobody else can write to, and without a place in a graph of candle's gradients.
///
/// Candle changes tensors in place (`Var::set`, `slice_set`) and does not say who shares their memory, so whatever comes in
/// from a program or goes out to it as a plain tensor is copied.
pub fn own_copy(tensor: &Tensor) -> Result<Tensor> {
    let copy = Assembly::new(TensorMeta::new(tensor.dims(), tensor.dtype()))?;
    // SAFETY: one thread; the one block has the type and the shape of the whole and fills it.
    unsafe {
        copy.paste(tensor, &vec![0; tensor.rank()]);
        Ok(copy.finish())
    }
}

/// Joins tensors of one type along `dim`.
///
/// # Errors
/// If there is no tensor, they differ in type or in another dimension, there is no dimension `dim`, or one is of a type or
/// on a device that the kernels do not serve.
pub fn concat(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    if let [single] = parts
        && single.is_contiguous()
        && single.elem_count() > 0
    {
        return Ok(single.clone());
    }
    let mut shape = joined_shape(parts, dim)?;
    // A tensor without dimensions is one element and was returned above, or it is not contiguous, which it cannot be.
    shape[dim] = parts.iter().fold(0, |sum, part| sum.saturating_add(part.dims()[dim]));
    let whole = Assembly::new(TensorMeta { shape, dtype: parts[0].dtype() })?;
    let mut offsets = vec![0; parts[0].rank()];
    for part in parts {
        // SAFETY: one thread; the parts lie side by side along `dim` and fill the tensor.
        unsafe { whole.paste(part, &offsets) };
        offsets[dim] += part.dims()[dim];
    }
    // SAFETY: the parts fill the tensor.
    Ok(unsafe { whole.finish() })
}

/// The shape of the first of some tensors, if all can be joined along `dim`.
fn joined_shape(parts: &[Tensor], dim: usize) -> Result<Vec<usize>> {
    let (found, needed) = match parts {
        [] => ("no tensors".to_string(), "at least one tensor".to_string()),
        [first, ..] if dim >= first.rank() => {
            (format!("dimension {dim} of shape {:?}", first.dims()), format!("a dimension below {}", first.rank()))
        }
        [first, ..] => {
            parts.iter().try_for_each(check_served)?;
            let fits = |part: &&Tensor| {
                let others = |d: &usize| *d != dim && part.dims()[*d] != first.dims()[*d];
                part.dtype() == first.dtype() && part.rank() == first.rank() && !(0..first.rank()).any(|d| others(&d))
            };
            let Some(other) = parts.iter().find(|part| !fits(part)) else { return Ok(first.dims().to_vec()) };
            let describe = |t: &Tensor| format!("{} {:?}", t.dtype().as_str(), t.dims());
            (
                format!("{} and {}", describe(first), describe(other)),
                format!("one type, and one shape but for dimension {dim}"),
            )
        }
    };
    Err(ErrorKind::Operands.error("tensors to join", found, needed, "join tensors that fit together"))
}

/// The pieces of a tensor that is sharded along `dim`, one after the other in a dense range of memory: the tensor itself
/// where they are like that.
///
/// # Errors
/// If there is no dimension `dim`, the sizes do not add up to it, or the tensor is of a type or on a device that the kernels
/// do not serve.
pub fn cut(tensor: &Tensor, dim: usize, sizes: &[usize]) -> Result<Tensor> {
    check_served(tensor)?;
    let extent = tensor.dims().get(dim).copied();
    if extent.is_none() || sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size)) != extent {
        return Err(ErrorKind::shape(tensor.dims()).error(
            "sizes",
            format!("{sizes:?} along dimension {dim} of shape {:?}", tensor.dims()),
            "sizes that add up to the dimension",
            "correct the sizes or the dimension",
        ));
    }
    if tensor.dims()[..dim].iter().all(|&n| n == 1) || tensor.elem_count() == 0 {
        return dense(tensor);
    }
    let (count, elem) = (tensor.elem_count(), tensor.dtype().size_in_bytes());
    let fresh = Fresh::new(tensor.dtype(), count)?;
    let (mut begin, mut to) = (0, fresh.first());
    with_first_element(tensor, |first, strides| {
        let mut block: SmallVec<[usize; 6]> = tensor.dims().into();
        let mut dense: SmallVec<[usize; 6]> = smallvec::smallvec![1; block.len()];
        for &size in sizes {
            block[dim] = size;
            for d in (1..block.len()).rev() {
                dense[d - 1] = dense[d] * block[d];
            }
            // SAFETY: the piece is inside the tensor, and the pieces side by side fill the reserved memory.
            unsafe {
                copy_block(first.add(begin * strides[dim] * elem), strides, to, &dense, &block, elem);
                to = to.add(block.iter().product::<usize>() * elem);
            }
            begin += size;
        }
    });
    // SAFETY: the pieces fill it.
    Ok(unsafe { fresh.finish(count) })
}

#[cfg(test)]
mod tests {
    #[test]
    fn pieces_of_a_cut_lie_one_behind_the_other() {
        let base = Tensor::arange(0u32, 3 * 5 * 4, &Device::Cpu).unwrap().reshape((3, 5, 4)).unwrap();
        for (tensor, dim, sizes) in [
            (base.clone(), 0, [2, 0, 1]),
            (base.clone(), 1, [1, 3, 1]),
            (base.clone(), 2, [0, 4, 0]),
            (base.transpose(0, 2).unwrap(), 1, [2, 2, 1]),
            (base.narrow(0, 1, 1).unwrap(), 1, [2, 2, 1]),
            (base.narrow(1, 2, 0).unwrap(), 2, [2, 1, 1]),
        ] {
            let piece = |r: usize| {
                let piece = tensor.narrow(dim, sizes[..r].iter().sum(), sizes[r]).unwrap();
                if piece.elem_count() == 0 {
                    Vec::new()
                } else {
                    piece.flatten_all().unwrap().to_vec1::<u32>().unwrap()
                }
            };
            let expected: Vec<u32> = (0..3).flat_map(piece).collect();
            let found = cut(&tensor, dim, &sizes).unwrap();
            let found: Vec<u32> =
                if found.elem_count() == 0 { Vec::new() } else { found.flatten_all().unwrap().to_vec1().unwrap() };
            assert_eq!(found, expected);
        }
    }

    use super::*;
    use crate::with_bytes;
    use candle_core::{DType, Device};

    #[test]
    fn functions_for_engines_refuse_what_would_reach_outside_of_memory() {
        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
        let base = zeros(&[3, 4], DType::F32);
        // one element in memory, a million in the shape
        let view = zeros(&[], DType::F32).broadcast_as(1_000_000).unwrap();
        assert!(with_bytes(&view, <[u8]>::len).is_err());
        assert!(with_bytes(&base.t().unwrap(), <[u8]>::len).is_err());
        assert!(with_bytes(&base.to_dtype(DType::F8E4M3).unwrap(), <[u8]>::len).is_err());
        assert_eq!(with_bytes(&base, <[u8]>::len).unwrap(), 48);
        for (dim, sizes) in [(1, vec![4, 4]), (1, vec![1]), (1, vec![usize::MAX, 5]), (2, vec![4]), (0, vec![])] {
            assert!(cut(&base, dim, &sizes).is_err(), "{dim} {sizes:?}");
        }
        let with = |other: Tensor| [base.clone(), other];
        for (parts, dim) in [
            (with(zeros(&[5, 4], DType::F32)), 1),
            (with(zeros(&[3, 5], DType::F32)), 0),
            (with(zeros(&[3, 4, 1], DType::F32)), 0),
            (with(zeros(&[3], DType::F32)), 0),
            (with(zeros(&[3, 4], DType::F64)), 0),
            (with(zeros(&[3, 4], DType::U8)), 1),
            (with(base.to_dtype(DType::F8E4M3).unwrap()), 1),
            (with(base.clone()), 2),
        ] {
            let found = parts.iter().map(|t| t.dims().to_vec()).collect::<Vec<_>>();
            assert!(concat(&parts, dim).is_err(), "{found:?} along {dim}");
        }
        assert!(concat(&[], 0).is_err());
    }

    #[test]
    #[should_panic(expected = "a tensor whose storage has 2")]
    fn a_tensor_that_is_larger_than_its_storage_is_not_read() {
        let storage = candle_core::Storage::Cpu(candle_core::CpuStorage::F32(vec![0.0; 2]));
        let tensor = Tensor::from_storage(storage, 1000, candle_core::op::BackpropOp::none(), false);
        let _ = with_bytes(&tensor, <[u8]>::len);
    }

    #[test]
    fn concat_joins_strided_and_empty_parts_like_the_plain_operation() {
        let base = Tensor::arange(0u32, 2 * 3 * 4 * 5, &Device::Cpu).unwrap().reshape((2, 3, 4, 5)).unwrap();
        for dtype in [DType::U8, DType::F16, DType::BF16, DType::F32, DType::I64, DType::F64] {
            let base = base.to_dtype(dtype).unwrap();
            let views = [
                base.clone(),
                base.transpose(1, 3).unwrap().transpose(1, 3).unwrap().narrow(3, 1, 3).unwrap(),
                base.permute((3, 2, 1, 0)).unwrap(),
                base.narrow(2, 1, 2).unwrap(),
                base.narrow(0, 0, 0).unwrap(),
                base.narrow(1, 0, 1).unwrap().broadcast_as((2, 3, 4, 5)).unwrap(),
            ];
            for view in &views {
                for dim in 0..4 {
                    let parts = [view.clone(), view.narrow(dim, 0, view.dims()[dim].min(1)).unwrap(), view.clone()];
                    let expected = Tensor::cat(&parts, dim).unwrap();
                    let got = concat(&parts, dim).unwrap();
                    assert!(got.is_contiguous());
                    assert_eq!(bytes(&got), bytes(&expected), "{dtype:?} {:?} along {dim}", view.dims());
                    assert_eq!(got.dims(), expected.dims());
                }
            }
        }
    }

    fn bytes(t: &Tensor) -> Vec<f64> {
        t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
    }
}
