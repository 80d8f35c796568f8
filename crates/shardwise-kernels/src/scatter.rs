//! Writing and adding elements or slices at given indices.
//!
//! Results do not depend on the number of threads: the targets are divided, and the sources of one target are visited in order.

use std::mem::MaybeUninit;

use candle_core::{DType, Tensor, WithDType};

use super::assembly::copy_to_change;
use super::convert::{Block, Compute};
use super::gather::{ElementOffsets, neutral_of_sums};
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

/// What [`scatter_add`] and [`index_add`] add to, which is also what elements without sources are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SumsFrom {
    /// Zeros, as in a gradient.
    Zero,
    /// Numbers that change nothing they are added to: -0.0 in floating point. For results that are added to a tensor, whose
    /// zeros keep their signs.
    Neutral,
}

impl SumsFrom {
    /// A buffer of these numbers. Zeros are not written, so that pages without sources stay unallocated.
    fn buffer(self, dtype: DType, count: usize) -> Result<UninitBuffer> {
        if self == SumsFrom::Zero || !dtype.is_float() {
            return UninitBuffer::zeroed(dtype, count);
        }
        let (buffer, number) = (UninitBuffer::new(dtype, count)?, neutral_of_sums(dtype));
        // SAFETY: the buffer has `count` elements of the size of the number, and is aligned for them.
        unsafe {
            match number[..] {
                [a] => fill(buffer.first(), count, a),
                [a, b] => fill(buffer.first(), count, u16::from_ne_bytes([a, b])),
                [a, b, c, d] => fill(buffer.first(), count, u32::from_ne_bytes([a, b, c, d])),
                _ => {
                    fill(
                        buffer.first(),
                        count,
                        u64::from_ne_bytes(number.try_into().expect("the largest has 8 bytes")),
                    );
                }
            }
        }
        Ok(buffer)
    }
}

/// Writes a number `count` times, in vectors.
///
/// # Safety
/// `first` is aligned for `count` numbers and can be written.
unsafe fn fill<T: Copy>(first: *mut u8, count: usize, number: T) {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(first.cast::<MaybeUninit<T>>(), count) }.fill(MaybeUninit::new(number));
}

/// How elements of a type are added up.
trait Addend: WithDType + Default {
    /// f32 for half precision, otherwise the type itself.
    type Sum: Copy + Default + Send + Sync;

    /// What sums begin with that leave the sign of zero to their terms.
    const NEUTRAL: Self::Sum;

    fn plus(sum: Self::Sum, x: Self) -> Self::Sum;

    fn rounded(sum: Self::Sum) -> Self;
}

macro_rules! addends {
    ($($T:ty as $Sum:ty: $neutral:expr, |$sum:ident, $x:ident| $add:expr, $rounded:expr;)*) => {$(
        impl Addend for $T {
            type Sum = $Sum;

            const NEUTRAL: $Sum = $neutral;

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
    u8 as u8: 0, |sum, x| sum.wrapping_add(x), sum;
    u32 as u32: 0, |sum, x| sum.wrapping_add(x), sum;
    i16 as i16: 0, |sum, x| sum.wrapping_add(x), sum;
    i32 as i32: 0, |sum, x| sum.wrapping_add(x), sum;
    i64 as i64: 0, |sum, x| sum.wrapping_add(x), sum;
    f32 as f32: -0.0, |sum, x| sum + x, sum;
    f64 as f64: -0.0, |sum, x| sum + x, sum;
    half::f16 as f32: -0.0, |sum, x| sum + x.to_f32(), half::f16::from_f32(sum);
    half::bf16 as f32: -0.0, |sum, x| sum + x.to_f32(), half::bf16::from_f32(sum);
}

/// Adds elements of `source` to `from` in `shape` at `index` along `dim`, as `torch.scatter_add` to a tensor of such numbers.
///
/// `source` has the shape of `index`; the result has its type. `held` says which indices are where in the result; elements at
/// missing ones are not added. f16 and bf16 are added up in f32, integers wrap.
///
/// # Panics
/// If a coordinate is outside of `shape`, or the shapes differ.
pub fn scatter_add(
    shape: &[usize],
    dim: usize,
    index: &Tensor,
    source: &Tensor,
    held: &IndexRange,
    from: SumsFrom,
) -> Result<Tensor> {
    assert_eq!(source.dims(), index.dims(), "one source per index");
    let (index, source) = (contiguous(index)?, contiguous(source)?);
    let sums = from.buffer(source.dtype(), shape.iter().product())?;
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
            add(SharedPtr::new(sums.first().cast()));
            return;
        }
        let first = if from == SumsFrom::Zero { <T as Addend>::Sum::default() } else { T::NEUTRAL };
        let mut wide = vec![first; sums.count()];
        add(SharedPtr::new(wide.as_mut_ptr()));
        for (i, &sum) in wide.iter().enumerate() {
            // SAFETY: there are as many elements as sums.
            unsafe { sums.first().cast::<T>().add(i).write(T::rounded(sum)) };
        }
    }), otherwise unreachable!("checked when allocated"))?;
    // SAFETY: all elements are written.
    Ok(unsafe { sums.finish(shape) })
}

/// Adds slices of `source` to `from` at a vector of indices along `dim`, as `torch.index_add` to a tensor of such numbers.
///
/// The result has the type and shape of `source`, but as many slices as `held` has indices; slices at other indices are not
/// added. f16 and bf16 are added up in f32, integers wrap. Memory of zeros without sources is not written, so that pages
/// without any stay unallocated.
///
/// # Panics
/// If there is not one index per slice.
pub fn index_add(dim: usize, index: &Tensor, source: &Tensor, held: &IndexRange, from: SumsFrom) -> Result<Tensor> {
    let LineShape { outer, n, inner } = LineShape::new(source.dims(), dim);
    assert_eq!(index.elem_count(), n, "one index per slice");
    let mut shape = source.dims().to_vec();
    shape[dim] = held.len();
    let (index, source) = (contiguous(index)?, contiguous(source)?);
    let sums = from.buffer(source.dtype(), shape.iter().product())?;
    if source.elem_count() == 0 || sums.count() == 0 {
        // SAFETY: all elements are written.
        return Ok(unsafe { sums.finish(shape) });
    }
    let slices = SlicesOfTargets::new(IndexElements::new(&index), n, held);
    let (dtype, elem) = (source.dtype(), source.dtype().size_in_bytes());
    with_first_element(&source, |first, _| {
        let (sources, to) = (SharedPtr::new(first.cast_mut()), SharedPtr::new(sums.first()));
        // The cost of a target is that of its mean number of sources.
        let cost = 1 + inner * n / held.len();
        over_ranges(outer * held.len(), cost, 1, |range| {
            for slice in range {
                let (matrix, place) = (slice / held.len(), slice % held.len());
                let of_target = slices.of(place);
                if of_target.is_empty() {
                    continue;
                }
                let target = TargetSlice { slices: of_target, width: inner, from };
                // SAFETY: slices are below `n`, so all of them are inside the source; the target is inside the result, and
                // no other range has it.
                unsafe {
                    let source = sources.get().cast_const().add(matrix * n * inner * elem);
                    let to = to.get().add((matrix * held.len() + place) * inner * elem);
                    match dtype {
                        DType::F16 | DType::BF16 => target.add_halves(dtype, source, to),
                        DType::F32 => target.add::<f32>(source.cast(), to.cast()),
                        DType::F64 => target.add::<f64>(source.cast(), to.cast()),
                        DType::U8 => target.add::<u8>(source.cast(), to.cast()),
                        DType::U32 => target.add::<u32>(source.cast(), to.cast()),
                        DType::I16 => target.add::<i16>(source.cast(), to.cast()),
                        DType::I32 => target.add::<i32>(source.cast(), to.cast()),
                        DType::I64 => target.add::<i64>(source.cast(), to.cast()),
                        _ => unreachable!("checked when allocated"),
                    }
                }
            }
        });
    });
    // SAFETY: all elements are written.
    Ok(unsafe { sums.finish(shape) })
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
    from: SumsFrom,
}

impl TargetSlice<'_> {
    /// Adds the slices to what sums begin with.
    ///
    /// # Safety
    /// All slices of `source` can be read, and `to` has as many numbers as a slice has elements.
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
            let first = if self.from == SumsFrom::Zero { 0f32 } else { f32::NEUTRAL };
            let (sums, elem) = (&mut [first; WIDTH][..width], dtype.size_in_bytes());
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
            let slices = index_add(0, &index, &source, &held, SumsFrom::Zero).unwrap();
            let wide = index.reshape((n, 1)).unwrap().broadcast_as((n, width)).unwrap();
            let elements = scatter_add(&[3, width], 0, &wide, &source, &held, SumsFrom::Zero).unwrap();
            for sums in [slices, elements] {
                assert_eq!(sums.dtype(), dtype);
                let sums = sums.to_dtype(DType::F64).unwrap().to_vec2::<f64>().unwrap();
                assert_eq!(sums, [vec![0.0; width], vec![expected; width], vec![0.0; width]], "{dtype:?}");
            }
        }
    }

    #[test]
    fn sums_from_neutral_elements_keep_the_sign_of_zero() {
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let source = Tensor::new(&[[-0.0f64, -0.0], [-0.0, 0.0]], &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let index = Tensor::new(&[1i64, 1], &Device::Cpu).unwrap();
            let held = IndexRange::new([0..2]);
            let wide = Tensor::new(&[[1i64, 1], [1, 1]], &Device::Cpu).unwrap();
            for (from, expected) in [(SumsFrom::Zero, [false; 4]), (SumsFrom::Neutral, [true, true, true, false])] {
                let slices = index_add(0, &index, &source, &held, from).unwrap();
                let elements = scatter_add(&[2, 2], 0, &wide, &source, &held, from).unwrap();
                for sums in [slices, elements] {
                    let sums = sums.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
                    let signs: Vec<bool> = sums.iter().map(|x| x.is_sign_negative()).collect();
                    assert_eq!(signs, expected, "{dtype:?} {from:?}");
                }
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
