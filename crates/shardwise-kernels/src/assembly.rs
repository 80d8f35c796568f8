//! Tensors assembled from blocks: concatenation, packed splits and contiguous copies.

use std::sync::OnceLock;

use candle_core::Tensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::parallel::{SharedPtr, over_ranges};
use super::strided_copy::{CopyBlock, copy_block, copy_block_on_threads, copy_bytes};
use super::uninit_buffer::UninitBuffer;
use super::{check_stored, with_first_element};
use crate::error::{ErrorKind, Result};
use crate::meta::TensorMeta;

/// A contiguous tensor under construction: blocks are pasted into it by one thread or by several at once.
pub struct Assembly {
    meta: TensorMeta,
    strides: Vec<usize>,
    first: *mut u8,
    /// The memory, until [`finish`](Self::finish) turns it into a tensor.
    memory: Mutex<Option<UninitBuffer>>,
    finished: OnceLock<Tensor>,
}

// SAFETY: `first` points into the heap buffer that `memory` owns; writes through it follow the contract of the unsafe
// methods below, and everything else is behind a lock.
unsafe impl Send for Assembly {}
// SAFETY: as above.
unsafe impl Sync for Assembly {}

impl Assembly {
    /// Reserves memory for a tensor without touching its pages: page faults happen on the threads that fill it.
    ///
    /// # Errors
    /// If the kernels do not support the element type or memory does not suffice.
    pub fn new(meta: TensorMeta) -> Result<Self> {
        let memory = UninitBuffer::new(meta.dtype, meta.elem_count())?;
        Ok(Assembly {
            strides: row_major(&meta.shape),
            meta,
            first: memory.first(),
            memory: Mutex::new(Some(memory)),
            finished: OnceLock::new(),
        })
    }

    /// As [`new`](Self::new), for a tensor that is kept and read often, such as a weight: in huge pages where the system has
    /// them.
    pub fn kept(meta: TensorMeta) -> Result<Self> {
        let tensor = Self::new(meta)?;
        tensor.memory.lock().iter().for_each(UninitBuffer::advise_for_reading);
        Ok(tensor)
    }

    /// Copies `block`, of any strides, into the box that begins at `offsets`.
    ///
    /// # Safety
    /// The block has this tensor's element type, is on the CPU and fits at `offsets`; no other thread writes to the
    /// same box; [`finish`](Self::finish) is called later.
    pub unsafe fn paste(&self, block: &Tensor, offsets: &[usize]) {
        // SAFETY: the caller's promise.
        unsafe { self.paste_by(copy_block, block, offsets) };
    }

    /// Copies `block`, of any strides, in row-major order to the elements from `from` on, whatever the shape of this tensor.
    ///
    /// # Safety
    /// As for [`paste`](Self::paste), of the range of elements that begins at `from`.
    pub unsafe fn paste_flat(&self, block: &Tensor, from: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.copy_to(copy_block, block, from, &row_major(block.dims())) };
    }

    /// Copies `block` with one of the functions of `strided_copy`.
    ///
    /// # Safety
    /// As for [`paste`](Self::paste).
    unsafe fn paste_by(&self, copy: CopyBlock, block: &Tensor, offsets: &[usize]) {
        let start: usize = offsets.iter().zip(&self.strides).map(|(o, s)| o * s).sum();
        // SAFETY: the caller's promise.
        unsafe { self.copy_to(copy, block, start, &self.strides) };
    }

    /// Copies `block` to the elements of these strides from `start` on.
    ///
    /// # Safety
    /// As for [`paste`](Self::paste), of these elements.
    unsafe fn copy_to(&self, copy: CopyBlock, block: &Tensor, start: usize, strides: &[usize]) {
        if block.elem_count() == 0 {
            return;
        }
        let elem = self.meta.dtype.size_in_bytes();
        with_first_element(block, |src, src_strides| {
            // SAFETY: the source is a live tensor; the destination is inside the reserved buffer because the block fits.
            unsafe { copy(src, src_strides, self.first.add(start * elem), strides, block.dims(), elem) };
        });
    }

    /// Address of element `from` in row-major order, for a caller that writes a range of elements itself.
    ///
    /// # Safety
    /// `T` is the element type (or `u8` with `from` counted in bytes), the range that is written is inside the tensor, and
    /// no other thread writes to it.
    pub unsafe fn range<T>(&self, from: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.first.cast::<T>().add(from) }
    }

    /// Returns the finished tensor; all callers get the same one.
    ///
    /// # Safety
    /// Every element has been written, and the writes happened before this call.
    pub unsafe fn finish(&self) -> Tensor {
        let finish = || {
            let memory = self.memory.lock().take().expect("finished once, inside the cell");
            // SAFETY: the caller's promise.
            unsafe { memory.finish(self.meta.shape.as_slice()) }
        };
        self.finished.get_or_init(finish).clone()
    }
}

/// The strides of a contiguous tensor.
fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for dim in (1..strides.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim]);
    }
    strides
}

/// Returns the tensor with its elements in row-major order in memory; without a copy if they already are.
///
/// Differs from candle's `contiguous` in two ways: a large transposed tensor is copied in tiles, and a view without elements
/// becomes a new tensor, because its offset may be outside the storage, on which candle fails.
///
/// # Errors
/// If the kernels do not support the type or device of the tensor.
pub fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    concat(std::slice::from_ref(tensor), 0)
}

/// Copies a tensor to new memory that no other tensor shares, detached from candle's gradient graph.
///
/// Candle writes to tensors in place (`Var::set`, `slice_set`) and does not say which tensors share memory, so every plain
/// tensor that crosses the boundary between a user's program and the library is copied.
pub fn own_copy(tensor: &Tensor) -> Result<Tensor> {
    // SAFETY: the copy is complete.
    Ok(unsafe { copy_to_change(tensor)?.finish() })
}

/// Copies a tensor to new memory in which elements can still be changed.
pub(super) fn copy_to_change(tensor: &Tensor) -> Result<Assembly> {
    let copy = Assembly::new(TensorMeta::new(tensor.dims(), tensor.dtype()))?;
    // SAFETY: the block has the type and shape of the copy and fills it.
    unsafe { copy.paste_by(copy_block_on_threads, tensor, &vec![0; tensor.dims().len()]) };
    Ok(copy)
}

/// Concatenates tensors along `dim`, as `torch.cat`. A single contiguous tensor is returned without a copy.
///
/// Takes tensors of one supported type, any strides, and equal sizes in the other dimensions; parts may be empty.
///
/// # Errors
/// If there is no tensor or no dimension `dim`, if the tensors differ in type or in another dimension, or if the kernels do
/// not support the type or device of one.
pub fn concat(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    if let [single] = parts
        && single.is_contiguous()
        && single.elem_count() > 0
    {
        return Ok(single.clone());
    }
    let mut shape = shape_for_concat(parts, dim)?;
    // There is a dimension: a tensor without dimensions is contiguous and was returned above.
    shape[dim] = parts.iter().fold(0, |sum, part| sum.saturating_add(part.dims()[dim]));
    let whole = Assembly::new(TensorMeta { shape, dtype: parts[0].dtype() })?;
    if concat_rows(parts, dim, &whole) {
        // SAFETY: the rows of all parts were written.
        return Ok(unsafe { whole.finish() });
    }
    let mut offsets = vec![0; parts[0].dims().len()];
    for part in parts {
        // SAFETY: the parts are adjacent along `dim` and fill the tensor.
        unsafe { whole.paste_by(copy_block_on_threads, part, &offsets) };
        offsets[dim] += part.dims()[dim];
    }
    // SAFETY: the parts fill the tensor.
    Ok(unsafe { whole.finish() })
}

/// Rows shorter than this are copied part by part, with functions for short runs.
const MIN_ROW_BYTES: usize = 256;

/// Concatenates contiguous parts row by row, so that the result is written in order; returns whether it did.
///
/// Part by part, every page of the result would be visited once per part.
fn concat_rows(parts: &[Tensor], dim: usize, whole: &Assembly) -> bool {
    let elem = whole.meta.dtype.size_in_bytes();
    let rows: usize = whole.meta.shape[..dim].iter().product();
    let row_bytes = |part: &Tensor| part.dims()[dim..].iter().product::<usize>() * elem;
    let fits = |part: &Tensor| part.is_contiguous() && row_bytes(part) >= MIN_ROW_BYTES;
    if rows < 2 || !parts.iter().all(fits) {
        return false;
    }
    let address = |part: &Tensor| with_first_element(part, |first, _| SharedPtr::new(first.cast_mut()));
    let sources: SmallVec<[_; 4]> = parts.iter().map(|part| (address(part), row_bytes(part))).collect();
    let bytes: usize = sources.iter().map(|(_, bytes)| bytes).sum();
    over_ranges(rows, bytes / 4, 1, |range| {
        for row in range {
            let mut at = row * bytes;
            for (source, bytes) in &sources {
                // SAFETY: the row is inside its part, which is borrowed, and inside the result; no other range has it.
                unsafe {
                    let from = source.get().cast_const().add(row * bytes);
                    copy_bytes(from, whole.range(at), *bytes);
                }
                at += bytes;
            }
        }
    });
    true
}

/// The shape of the first tensor, if all of them can be concatenated along `dim`.
fn shape_for_concat(parts: &[Tensor], dim: usize) -> Result<Vec<usize>> {
    let (found, needed) = match parts {
        [] => ("no tensors".to_string(), "at least one tensor".to_string()),
        [first, ..] if dim >= first.dims().len() => (
            format!("dimension {dim} of shape {:?}", first.dims()),
            format!("a dimension below {}", first.dims().len()),
        ),
        [first, ..] => {
            parts.iter().try_for_each(check_stored)?;
            let fits = |part: &&Tensor| {
                let differs = |d: &usize| *d != dim && part.dims()[*d] != first.dims()[*d];
                part.dtype() == first.dtype()
                    && part.dims().len() == first.dims().len()
                    && !(0..first.dims().len()).any(|d| differs(&d))
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

/// Splits a tensor along `dim` into pieces of `sizes` and packs them one after the other into one contiguous buffer, as a
/// collective sends them.
///
/// Returns a flat tensor of all elements, or a contiguous tensor of the original shape where its memory already has this
/// order: when all dimensions before `dim` have size 1, or there are no elements. Copies at most once.
///
/// # Errors
/// If there is no dimension `dim`, if the sizes do not add up to it, or if the kernels do not support the type or device of
/// the tensor.
pub fn split_packed(tensor: &Tensor, dim: usize, sizes: &[usize]) -> Result<Tensor> {
    check_stored(tensor)?;
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
        return contiguous(tensor);
    }
    let (count, elem) = (tensor.elem_count(), tensor.dtype().size_in_bytes());
    let packed = UninitBuffer::new(tensor.dtype(), count)?;
    let (mut begin, mut to) = (0, packed.first());
    with_first_element(tensor, |first, strides| {
        let mut block: SmallVec<[usize; 6]> = tensor.dims().into();
        let mut strides_to: SmallVec<[usize; 6]> = smallvec::smallvec![1; block.len()];
        for &size in sizes {
            block[dim] = size;
            for d in (1..block.len()).rev() {
                strides_to[d - 1] = strides_to[d] * block[d];
            }
            // SAFETY: the piece is inside the tensor, and the pieces one after the other fill the reserved memory.
            unsafe {
                copy_block(first.add(begin * strides[dim] * elem), strides, to, &strides_to, &block, elem);
                to = to.add(block.iter().product::<usize>() * elem);
            }
            begin += size;
        }
    });
    // SAFETY: the pieces fill it.
    Ok(unsafe { packed.finish(count) })
}

#[cfg(test)]
mod tests {
    #[test]
    fn split_packed_writes_the_pieces_one_after_the_other() {
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
            let found = split_packed(&tensor, dim, &sizes).unwrap();
            let found: Vec<u32> =
                if found.elem_count() == 0 { Vec::new() } else { found.flatten_all().unwrap().to_vec1().unwrap() };
            assert_eq!(found, expected);
        }
    }

    use super::*;
    use crate::with_bytes;
    use candle_core::{DType, Device};

    #[test]
    fn arguments_that_would_reach_outside_of_memory_are_errors() {
        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
        let base = zeros(&[3, 4], DType::F32);
        // one element in memory, a million in the shape
        let view = zeros(&[], DType::F32).broadcast_as(1_000_000).unwrap();
        assert!(with_bytes(&view, <[u8]>::len).is_err());
        assert!(with_bytes(&base.t().unwrap(), <[u8]>::len).is_err());
        assert_eq!(with_bytes(&base.to_dtype(DType::F8E4M3).unwrap(), <[u8]>::len).unwrap(), 12);
        assert_eq!(with_bytes(&base, <[u8]>::len).unwrap(), 48);
        for (dim, sizes) in [(1, vec![4, 4]), (1, vec![1]), (1, vec![usize::MAX, 5]), (2, vec![4]), (0, vec![])] {
            assert!(split_packed(&base, dim, &sizes).is_err(), "{dim} {sizes:?}");
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
    fn concat_of_strided_and_empty_parts_equals_candles_cat() {
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

    #[test]
    fn long_rows_are_concatenated_in_order_on_any_number_of_threads() {
        let part = |from: u32, columns: usize| {
            let count = 300 * columns as u32;
            Tensor::arange(from, from + count, &Device::Cpu).unwrap().reshape((3, 100, columns)).unwrap()
        };
        let parts = [part(0, 100), part(1_000_000, 64), part(5_000_000, 300)];
        for threads in [1, 2, 4] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let got = pool.install(|| concat(&parts, 2)).unwrap();
            assert_eq!(bytes(&got), bytes(&Tensor::cat(&parts, 2).unwrap()), "{threads} threads");
        }
    }

    fn bytes(t: &Tensor) -> Vec<f64> {
        t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
    }
}
