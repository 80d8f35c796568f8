//! A tensor put together from blocks, by one thread or by several at once.

use std::sync::OnceLock;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Storage, Tensor, WithDType};
use parking_lot::Mutex;

use super::copy::copy_block;
use super::{check_dtype, reserve, with_first_element, with_type};
use crate::error::Result;
use crate::layout::TensorMeta;

/// A contiguous tensor whose memory is allocated but not yet filled.
pub(crate) struct Assembly {
    meta: TensorMeta,
    strides: Vec<usize>,
    first: *mut u8,
    /// Vector of length 0 with the capacity of the whole tensor, until it is finished.
    storage: Mutex<Option<CpuStorage>>,
    finished: OnceLock<Tensor>,
}

// SAFETY: `first` points into the heap buffer that `storage` owns; writes through it follow the contract of the unsafe
// methods below, and everything else is behind a lock.
unsafe impl Send for Assembly {}
// SAFETY: as above.
unsafe impl Sync for Assembly {}

impl Assembly {
    /// Reserves memory for a tensor. Its pages are not touched, so that whoever fills a part pays for that part.
    pub(crate) fn new(meta: TensorMeta) -> Result<Self> {
        check_dtype(meta.dtype)?;
        let count = meta.elem_count();
        let (first, storage) = with_type!(meta.dtype, T => {
            let mut buffer: Vec<T> = reserve(count)?;
            ask_for_large_pages(buffer.as_mut_ptr().cast(), count * size_of::<T>());
            (buffer.as_mut_ptr().cast(), T::to_cpu_storage_owned(buffer))
        }, otherwise unreachable!("checked above"));
        let mut strides = vec![1usize; meta.shape.len()];
        for dim in (1..strides.len()).rev() {
            strides[dim - 1] = strides[dim].saturating_mul(meta.shape[dim]);
        }
        Ok(Assembly { meta, strides, first, storage: Mutex::new(Some(storage)), finished: OnceLock::new() })
    }

    /// Copies `block` to the place that begins at `offsets`.
    ///
    /// # Safety
    /// The block has this tensor's element type, is on the CPU and fits at `offsets`; no other thread writes to the
    /// same place; [`finish`](Self::finish) is called later.
    pub(crate) unsafe fn paste(&self, block: &Tensor, offsets: &[usize]) {
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
    pub(crate) unsafe fn range<T>(&self, from: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.first.cast::<T>().add(from) }
    }

    /// The finished tensor; all callers get one and the same.
    ///
    /// # Safety
    /// Every element has been written, and the writes happened before this call.
    pub(crate) unsafe fn finish(&self) -> Tensor {
        let finish = || {
            let storage = self.storage.lock().take().expect("finished once, inside the cell");
            let count = self.meta.elem_count();
            let storage = with_type!(self.meta.dtype, T => {
                let mut buffer = T::cpu_storage_data(storage).expect("allocated with this type");
                // SAFETY: the capacity is `count`, and the caller promises that all elements are written.
                unsafe { buffer.set_len(count) };
                T::to_cpu_storage_owned(buffer)
            }, otherwise unreachable!("checked when allocated"));
            Tensor::from_storage(Storage::Cpu(storage), self.meta.shape.as_slice(), BackpropOp::none(), false)
        };
        self.finished.get_or_init(finish).clone()
    }
}

/// Large new memory costs most of its time in page faults; with large pages it takes 512 times fewer of them.
#[cfg(target_os = "linux")]
fn ask_for_large_pages(first: *mut u8, bytes: usize) {
    const LARGE_PAGE: usize = 2 << 20;
    let aligned = first.align_offset(LARGE_PAGE);
    if bytes >= 2 * LARGE_PAGE && aligned < bytes {
        // SAFETY: the range lies inside one live allocation, and this advice does not change what memory holds. Where
        // the kernel does not take it, nothing is lost, so the result does not matter.
        unsafe { libc::madvise(first.add(aligned).cast(), bytes - aligned, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn ask_for_large_pages(_: *mut u8, _: usize) {}

/// A tensor with these elements that begin at the start of a dense range of memory: itself wherever that is so. Views
/// without elements are made anew, because candle trips over their offsets.
pub(crate) fn dense(tensor: &Tensor) -> Result<Tensor> {
    concat(std::slice::from_ref(tensor), 0)
}

/// Joins tensors of one type along `dim`, reading each where it lies.
pub(crate) fn concat(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    if let [single] = parts
        && single.is_contiguous()
        && single.elem_count() > 0
    {
        return Ok(single.clone());
    }
    let mut shape = parts[0].dims().to_vec();
    shape[dim] = parts.iter().map(|p| p.dims()[dim]).sum();
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

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

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
