//! Sums that are written over one of their terms, for tensors whose memory no other tensor uses.

use std::cell::RefCell;
use std::mem::MaybeUninit;

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Storage, Tensor};

use super::convert::{Block, Compute};
use super::parallel::{SharedPtr, over_ranges};
use super::{contiguous, first_element, simd};
use crate::error::Result;

/// Elements per block of a half-precision sum: three buffers of f32 stay in the first-level cache.
const CHUNK: usize = 1024;

/// Adds `addend` to `target` in place, rounded once.
///
/// Both have one shape and floating-point type, and `target` is contiguous. Whoever calls it knows that no other tensor uses the
/// memory of `target`: it would change, too. Large tensors are divided over the threads of the pool.
///
/// # Panics
/// If shapes or types differ, or `target` is not contiguous.
pub fn add_assign(target: &Tensor, addend: &Tensor) -> Result<()> {
    assert!(target.dims() == addend.dims() && target.dtype() == addend.dtype(), "{target:?} and {addend:?}");
    let (addend, count) = (contiguous(addend)?, target.elem_count());
    if count == 0 {
        return Ok(());
    }
    let (storage, layout) = addend.storage_and_layout();
    let from = SharedPtr::new(first_element(&storage, layout).0.cast_mut());
    over_memory(target, |to| {
        let to = SharedPtr::new(to);
        over_ranges(count.div_ceil(CHUNK), 3 * CHUNK, 1, |chunks| {
            let range = chunks.start * CHUNK..(chunks.end * CHUNK).min(count);
            // SAFETY: both tensors are contiguous with `count` elements of their type; ranges do not overlap, and neither do
            // the tensors, since the memory of one is locked for writing.
            unsafe {
                match target.dtype() {
                    DType::F32 => add_slices::<f32>(to.get(), from.get(), range),
                    DType::F64 => add_slices::<f64>(to.get(), from.get(), range),
                    dtype => range.clone().step_by(CHUNK).for_each(|start| {
                        add_converted(dtype, to.get(), from.get(), start, CHUNK.min(range.end - start));
                    }),
                }
            }
        });
        Ok(())
    })
}

/// Calls `body` with the address of the first element of a contiguous tensor, whose memory is locked for writing meanwhile.
///
/// # Panics
/// If the tensor is not contiguous.
pub(crate) fn over_memory(target: &Tensor, body: impl FnOnce(*mut u8) -> Result<()>) -> Result<()> {
    assert!(target.is_contiguous(), "{:?}", target.layout());
    if target.elem_count() == 0 {
        // Candle refuses a tensor without elements.
        return body(std::ptr::NonNull::<f64>::dangling().as_ptr().cast());
    }
    let call = MemoryCall { body: RefCell::new(Some(body)), found: RefCell::new(Ok(())) };
    target.inplace_op1(&call)?;
    call.found.into_inner()
}

/// A function of the address of a tensor, as an operation of candle, which alone gives access for writing.
struct MemoryCall<F> {
    body: RefCell<Option<F>>,
    found: RefCell<Result<()>>,
}

impl<F: FnOnce(*mut u8) -> Result<()>> InplaceOp1 for MemoryCall<F> {
    fn name(&self) -> &'static str {
        "accumulate"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let body = self.body.borrow_mut().take().expect("called once");
        // The address comes from an exclusive borrow of the elements.
        let first = match storage {
            CpuStorage::F32(v) => v.as_mut_ptr().cast::<u8>(),
            CpuStorage::F64(v) => v.as_mut_ptr().cast(),
            CpuStorage::F16(v) => v.as_mut_ptr().cast(),
            CpuStorage::BF16(v) => v.as_mut_ptr().cast(),
            _ => unreachable!("sums of gradients are floating point"),
        };
        let at = layout.start_offset() * storage_dtype(storage).size_in_bytes();
        // SAFETY: the tensor is inside its storage.
        *self.found.borrow_mut() = body(unsafe { first.add(at) });
        Ok(())
    }
}

fn storage_dtype(storage: &CpuStorage) -> DType {
    match storage {
        CpuStorage::F64(_) => DType::F64,
        CpuStorage::F16(_) => DType::F16,
        CpuStorage::BF16(_) => DType::BF16,
        _ => DType::F32,
    }
}

/// # Safety
/// Both addresses have the elements `range`, of type `T`, which nobody else uses; they do not overlap.
unsafe fn add_slices<T: Copy + std::ops::AddAssign>(to: *mut u8, from: *const u8, range: std::ops::Range<usize>) {
    // SAFETY: the caller's promise.
    unsafe {
        let to = std::slice::from_raw_parts_mut(to.cast::<T>().add(range.start), range.len());
        let from = std::slice::from_raw_parts(from.cast::<T>().add(range.start), range.len());
        simd::run(AddSlices { to, from });
    }
}

/// # Safety
/// As [`add_slices`], with elements of type `dtype`; `count` is at most [`CHUNK`].
unsafe fn add_converted(dtype: DType, to: *mut u8, from: *const u8, start: usize, count: usize) {
    let mut buffers = [[MaybeUninit::<f32>::uninit(); CHUNK]; 2];
    let block = Block { rows: 1, row_stride: 0, width: count, stride: 1 };
    // SAFETY: the caller's promise; `load` writes all elements.
    unsafe {
        let (to, from) = (to.add(start * dtype.size_in_bytes()), from.add(start * dtype.size_in_bytes()));
        let [sums, addends] = &mut buffers;
        f32::load(dtype, to, block, &mut sums[..count]);
        f32::load(dtype, from, block, &mut addends[..count]);
        let sums = sums[..count].assume_init_mut();
        simd::run(AddSlices { to: sums, from: addends[..count].assume_init_ref() });
        f32::store(dtype, sums, to);
    }
}

/// `to += from`, element by element.
pub(crate) struct AddSlices<'a, T> {
    pub(crate) to: &'a mut [T],
    pub(crate) from: &'a [T],
}

impl<T: Copy + std::ops::AddAssign> simd::Kernel for AddSlices<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        self.to.iter_mut().zip(self.from).for_each(|(to, from)| *to += *from);
    }
}

/// Whether two tensors are views of one storage.
pub fn same_storage(a: &Tensor, b: &Tensor) -> bool {
    let base = |t: &Tensor| {
        let (storage, _) = t.storage_and_layout();
        let whole = Layout::contiguous(0);
        match &*storage {
            Storage::Cpu(_) => first_element(&storage, &whole).0,
            _ => std::ptr::null(),
        }
    };
    base(a) == base(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn sums_in_place_equal_those_of_new_tensors() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            for count in [0, 1, 17, CHUNK, 3 * CHUNK + 5, 200_000] {
                let numbers = |phase: f64| {
                    let values: Vec<f64> = (0..count).map(|i| (i as f64 * 0.37 + phase).sin()).collect();
                    Tensor::from_vec(values, count, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
                };
                let (a, b) = (numbers(0.3), numbers(1.9));
                let wide = |t: &Tensor| t.to_dtype(DType::F64).unwrap();
                let summed_in = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
                let sum = (a.to_dtype(summed_in).unwrap() + b.to_dtype(summed_in).unwrap()).unwrap();
                let sum = sum.to_dtype(dtype).unwrap();
                add_assign(&a, &b).unwrap();
                assert_eq!(
                    wide(&a).to_vec1::<f64>().unwrap(),
                    wide(&sum).to_vec1::<f64>().unwrap(),
                    "{count} {dtype:?}"
                );
            }
        }
    }

    #[test]
    fn views_share_their_storage() {
        let x = Tensor::zeros((4, 6), DType::F32, &Device::Cpu).unwrap();
        assert!(same_storage(&x, &x.narrow(1, 2, 3).unwrap().t().unwrap()));
        assert!(!same_storage(&x, &x.copy().unwrap()));
    }
}
