//! Writing and adding elements or slices at given indices.
//!
//! Results do not depend on the number of threads: the targets are divided, and the sources of one target are visited in order.

use candle_core::{DType, Tensor, WithDType};

use super::assembly::copy_to_change;
use super::convert::{Block, Compute};
use super::gather::ElementOffsets;
use super::index_range::{IndexElements, IndexRange, NO_INDEX};
use super::parallel::{SharedPtr, over_ranges};
use super::typed_slice::{LineShape, with_slice};
use super::uninit_buffer::UninitBuffer;
use super::{contiguous, simd, with_first_element, with_type};
use crate::error::Result;

/// Copies `x` with elements of `source` written at `index` along `dim`, as `torch.scatter`.
///
/// `source` has the type of `x` and the shape of `index`. `held` says which indices are where in `x`; elements at missing
/// ones are not written. Of several elements for one place the last is written.
///
/// # Panics
/// If a coordinate is outside of `x`, or the types or shapes differ.
pub fn scatter(x: &Tensor, dim: usize, index: &Tensor, source: &Tensor, held: &IndexRange) -> Result<Tensor> {
    assert!(source.dims() == index.dims() && source.dtype() == x.dtype(), "one source per index");
    let copy = copy_to_change(x)?;
    let (index, source) = (contiguous(index)?, contiguous(source)?);
    let offsets = ElementOffsets::new(x.dims(), dim, index.dims());
    with_type!(x.dtype(), T => with_slice::<T, _>(&source, |source| {
        offsets.for_each_segment(IndexElements::new(&index), held, |segment| {
            for (&offset, &value) in segment.offsets.iter().zip(&source[segment.from..]) {
                if offset != NO_INDEX {
                    // SAFETY: the offset is inside the copy, and elements of one line, which may have the same offset, are
                    // visited on one thread.
                    unsafe { copy.range::<T>(offset).write(value) };
                }
            }
        });
    })?, otherwise unreachable!("checked when copied"));
    // SAFETY: the copy was complete.
    Ok(unsafe { copy.finish() })
}

/// Copies `x`, seen as `[outer, n, inner]`, with slices of `values` written at positions of the middle dimension.
///
/// `values` has the type of `x` and is `[outer, positions.len(), inner]`.
///
/// # Panics
/// If a position is not below `n`, or the sizes or types differ.
pub fn put_slices(x: &Tensor, dims: [usize; 3], positions: &[usize], values: &Tensor) -> Result<Tensor> {
    let ([outer, n, inner], count) = (dims, positions.len());
    assert!(values.dtype() == x.dtype() && x.elem_count() == outer * n * inner, "{:?} as {dims:?}", x.dims());
    assert!(values.elem_count() == outer * count * inner && positions.iter().all(|&p| p < n), "positions below {n}");
    let (copy, values) = (copy_to_change(x)?, contiguous(values)?);
    let bytes = inner * x.dtype().size_in_bytes();
    with_first_element(&values, |source, _| {
        for slice in 0..outer * count {
            let to = slice / count * n + positions[slice % count];
            // SAFETY: both slices are inside, because positions are below `n`.
            unsafe { copy.range::<u8>(to * bytes).copy_from_nonoverlapping(source.add(slice * bytes), bytes) };
        }
    });
    // SAFETY: the copy was complete.
    Ok(unsafe { copy.finish() })
}

/// How elements of a type are added up.
trait Addend: WithDType + Default {
    /// f32 for half precision, otherwise the type itself.
    type Sum: Copy + Default + Send + Sync;

    fn plus(sum: Self::Sum, x: Self) -> Self::Sum;

    fn rounded(sum: Self::Sum) -> Self;
}

macro_rules! addends {
    ($($T:ty as $Sum:ty: |$sum:ident, $x:ident| $add:expr, $rounded:expr;)*) => {$(
        impl Addend for $T {
            type Sum = $Sum;

            #[inline(always)]
            fn plus($sum: $Sum, $x: $T) -> $Sum {
                $add
            }

            #[inline(always)]
            fn rounded($sum: $Sum) -> $T {
                $rounded
            }
        }
    )*};
}
addends! {
    u8 as u8: |sum, x| sum.wrapping_add(x), sum;
    u32 as u32: |sum, x| sum.wrapping_add(x), sum;
    i16 as i16: |sum, x| sum.wrapping_add(x), sum;
    i32 as i32: |sum, x| sum.wrapping_add(x), sum;
    i64 as i64: |sum, x| sum.wrapping_add(x), sum;
    f32 as f32: |sum, x| sum + x, sum;
    f64 as f64: |sum, x| sum + x, sum;
    half::f16 as f32: |sum, x| sum + x.to_f32(), half::f16::from_f32(sum);
    half::bf16 as f32: |sum, x| sum + x.to_f32(), half::bf16::from_f32(sum);
}

/// Adds elements of `source` to zeros of `shape` at `index` along `dim`, as `torch.scatter_add` to zeros.
///
/// `source` has the shape of `index`; the result has its type. `held` says which indices are where in the result; elements at
/// missing ones are not added. f16 and bf16 are added up in f32, integers wrap.
///
/// # Panics
/// If a coordinate is outside of `shape`, or the shapes differ.
pub fn scatter_add(shape: &[usize], dim: usize, index: &Tensor, source: &Tensor, held: &IndexRange) -> Result<Tensor> {
    assert_eq!(source.dims(), index.dims(), "one source per index");
    let (index, source) = (contiguous(index)?, contiguous(source)?);
    let zeros = UninitBuffer::zeroed(source.dtype(), shape.iter().product())?;
    let offsets = ElementOffsets::new(shape, dim, index.dims());
    let elements = IndexElements::new(&index);
    with_type!(source.dtype(), T => with_slice::<T, _>(&source, |source| {
        let add = |sums: SharedPtr<<T as Addend>::Sum>| {
            offsets.for_each_segment(elements, held, |segment| {
                for (&offset, &value) in segment.offsets.iter().zip(&source[segment.from..]) {
                    if offset != NO_INDEX {
                        // SAFETY: the offset is inside, and elements of one line, which may have the same offset, are
                        // visited on one thread.
                        unsafe {
                            let sum = sums.get().add(offset);
                            *sum = T::plus(*sum, value);
                        }
                    }
                }
            });
        };
        if size_of::<<T as Addend>::Sum>() == size_of::<T>() {
            // Of these types the sums have the type of the elements.
            add(SharedPtr::new(zeros.first().cast()));
            return;
        }
        let mut sums = vec![<T as Addend>::Sum::default(); zeros.count()];
        add(SharedPtr::new(sums.as_mut_ptr()));
        for (i, &sum) in sums.iter().enumerate() {
            // SAFETY: there are as many elements as sums.
            unsafe { zeros.first().cast::<T>().add(i).write(T::rounded(sum)) };
        }
    }), otherwise unreachable!("checked when allocated"))?;
    // SAFETY: all elements are zero or sums.
    Ok(unsafe { zeros.finish(shape) })
}

/// Adds slices of `source` to zeros at a vector of indices along `dim`, as `torch.index_add` to zeros.
///
/// The result has the type and shape of `source`, but as many slices as `held` has indices; slices at other indices are not
/// added. f16 and bf16 are added up in f32, integers wrap. Memory of slices without sources is not written, so that pages
/// without any stay unallocated.
///
/// # Panics
/// If there is not one index per slice.
pub fn index_add(dim: usize, index: &Tensor, source: &Tensor, held: &IndexRange) -> Result<Tensor> {
    let LineShape { outer, n, inner } = LineShape::new(source.dims(), dim);
    assert_eq!(index.elem_count(), n, "one index per slice");
    let mut shape = source.dims().to_vec();
    shape[dim] = held.len();
    let (index, source) = (contiguous(index)?, contiguous(source)?);
    let zeros = UninitBuffer::zeroed(source.dtype(), shape.iter().product())?;
    if source.elem_count() == 0 || zeros.count() == 0 {
        // SAFETY: all elements are zero.
        return Ok(unsafe { zeros.finish(shape) });
    }
    let slices = SlicesOfTargets::new(IndexElements::new(&index), n, held);
    let (dtype, elem) = (source.dtype(), source.dtype().size_in_bytes());
    with_first_element(&source, |first, _| {
        let (from, to) = (SharedPtr::new(first.cast_mut()), SharedPtr::new(zeros.first()));
        // The cost of a target is that of its mean number of sources.
        let cost = 1 + inner * n / held.len();
        over_ranges(outer * held.len(), cost, 1, |range| {
            for target in range {
                let (matrix, place) = (target / held.len(), target % held.len());
                let of_target = slices.of(place);
                if of_target.is_empty() {
                    continue;
                }
                let sources = TargetSlice { slices: of_target, width: inner };
                // SAFETY: slices are below `n`, so all of them are inside the source; the target is inside the result, and
                // no other range has it.
                unsafe {
                    let source = from.get().cast_const().add(matrix * n * inner * elem);
                    let to = to.get().add((matrix * held.len() + place) * inner * elem);
                    match dtype {
                        DType::F16 | DType::BF16 => sources.add_halves(dtype, source, to),
                        DType::F32 => sources.add::<f32>(source.cast(), to.cast()),
                        DType::F64 => sources.add::<f64>(source.cast(), to.cast()),
                        DType::U8 => sources.add::<u8>(source.cast(), to.cast()),
                        DType::U32 => sources.add::<u32>(source.cast(), to.cast()),
                        DType::I16 => sources.add::<i16>(source.cast(), to.cast()),
                        DType::I32 => sources.add::<i32>(source.cast(), to.cast()),
                        DType::I64 => sources.add::<i64>(source.cast(), to.cast()),
                        _ => unreachable!("checked when allocated"),
                    }
                }
            }
        });
    });
    // SAFETY: all elements are zero or sums.
    Ok(unsafe { zeros.finish(shape) })
}

/// The numbers of the slices that are added to each target, in ascending order.
struct SlicesOfTargets {
    /// Where the slices of a target begin in `slices`, and one end.
    starts: Vec<usize>,
    slices: Vec<usize>,
}

impl SlicesOfTargets {
    fn new(index: IndexElements<'_>, n: usize, held: &IndexRange) -> Self {
        let mut starts = vec![0; held.len() + 1];
        index.for_each_block(0..n, held, |_, positions| {
            positions.iter().filter(|p| **p != NO_INDEX).for_each(|&p| starts[p + 1] += 1);
        });
        for i in 0..held.len() {
            starts[i + 1] += starts[i];
        }
        let mut slices = vec![0; starts[held.len()]];
        let mut next = starts.clone();
        index.for_each_block(0..n, held, |from, positions| {
            for (i, &p) in positions.iter().enumerate().filter(|(_, p)| **p != NO_INDEX) {
                slices[next[p]] = from + i;
                next[p] += 1;
            }
        });
        SlicesOfTargets { starts, slices }
    }

    fn of(&self, target: usize) -> &[usize] {
        &self.slices[self.starts[target]..self.starts[target + 1]]
    }
}

/// The slices that are added to one target.
#[derive(Clone, Copy)]
struct TargetSlice<'a> {
    slices: &'a [usize],
    width: usize,
}

impl TargetSlice<'_> {
    /// Adds the slices to zeros.
    ///
    /// # Safety
    /// All slices of `source` can be read, and `to` has as many zeros as a slice has elements.
    unsafe fn add<T: Addend<Sum = T>>(self, source: *const T, to: *mut T) {
        for &slice in self.slices {
            // SAFETY: the caller's promise; a tensor that is being built overlaps no other.
            unsafe {
                let slice = std::slice::from_raw_parts(source.add(slice * self.width), self.width);
                simd::run(AddSlice { sums: std::slice::from_raw_parts_mut(to, self.width), slice });
            }
        }
    }

    /// As [`add`](Self::add), in f32 and rounded at the end.
    ///
    /// # Safety
    /// As for [`add`](Self::add), with elements of half precision.
    unsafe fn add_halves(self, dtype: DType, source: *const u8, to: *mut u8) {
        // Elements that are added up at a time: 2 KiB of sums.
        const WIDTH: usize = 512;
        let mut buffer = [std::mem::MaybeUninit::uninit(); WIDTH];
        for from in (0..self.width).step_by(WIDTH) {
            let width = WIDTH.min(self.width - from);
            let (sums, elem) = (&mut [0f32; WIDTH][..width], dtype.size_in_bytes());
            for &slice in self.slices {
                let block = Block { rows: 1, row_stride: 0, width, stride: 1 };
                // SAFETY: the caller's promise; the buffer has the size of the block.
                let slice = unsafe {
                    f32::load(dtype, source.add((slice * self.width + from) * elem), block, &mut buffer[..width]);
                    buffer[..width].assume_init_ref()
                };
                simd::run(AddSlice { sums, slice });
            }
            // SAFETY: the caller's promise.
            unsafe { f32::store(dtype, sums, to.add(from * elem)) };
        }
    }
}

/// Adds a slice to sums.
struct AddSlice<'a, T> {
    sums: &'a mut [T],
    slice: &'a [T],
}

impl<T: Addend<Sum = T>> simd::Kernel for AddSlice<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (sum, &x) in self.sums.iter_mut().zip(self.slice) {
            *sum = T::plus(*sum, x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn half_precision_is_added_up_in_f32_and_integers_wrap() {
        // In bf16, 256 + 1 is 256.
        let (n, width) = (300, 600);
        for (dtype, expected) in [(DType::BF16, 300.0), (DType::F16, 300.0), (DType::F32, 300.0), (DType::U8, 44.0)] {
            let source = Tensor::ones((n, width), dtype, &Device::Cpu).unwrap();
            let index = Tensor::full(7i64, n, &Device::Cpu).unwrap();
            // Of indices 5 to 8, the result holds those from 6 on.
            let held = IndexRange::new([6..9]);
            let slices = index_add(0, &index, &source, &held).unwrap();
            let wide = index.reshape((n, 1)).unwrap().broadcast_as((n, width)).unwrap();
            let elements = scatter_add(&[3, width], 0, &wide, &source, &held).unwrap();
            for sums in [slices, elements] {
                assert_eq!(sums.dtype(), dtype);
                let sums = sums.to_dtype(DType::F64).unwrap().to_vec2::<f64>().unwrap();
                assert_eq!(sums, [vec![0.0; width], vec![expected; width], vec![0.0; width]], "{dtype:?}");
            }
        }
    }

    #[test]
    fn the_last_of_several_elements_is_written_and_missing_indices_are_skipped() {
        let x = Tensor::zeros((2, 4), DType::I64, &Device::Cpu).unwrap();
        let source = Tensor::new(&[[1i64, 2, 3], [4, 5, 6]], &Device::Cpu).unwrap();
        let index = Tensor::new(&[[10u8, 12, 10], [13, 9, 14]], &Device::Cpu).unwrap();
        let got = scatter(&x, 1, &index, &source, &IndexRange::new([10..14])).unwrap();
        assert_eq!(got.to_vec2::<i64>().unwrap(), [[3, 0, 2, 0], [0, 0, 0, 4]]);
        let values = Tensor::new(&[[7i64, 8], [9, 10]], &Device::Cpu).unwrap();
        let got = put_slices(&x, [2, 4, 1], &[1, 3], &values).unwrap();
        assert_eq!(got.to_vec2::<i64>().unwrap(), [[0, 7, 0, 8], [0, 9, 0, 10]]);
        assert_eq!(x.to_vec2::<i64>().unwrap(), [[0; 4]; 2], "the operand is not changed");
    }
}
