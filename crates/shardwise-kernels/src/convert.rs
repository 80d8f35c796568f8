//! Conversion of blocks of elements to the types in which kernels compute (f32, f64, i64) and back.
//!
//! f16 and bf16 are computed in f32, integers in i64. Converting i64 back to a narrower integer wraps; floats convert to
//! integers with saturation.

use std::mem::MaybeUninit;

use candle_core::{DType, Tensor, WithDType};
use float8::F8E4M3;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::eight_bit::{f8_to_f32, f32_to_f8};
use super::parallel::{SharedPtr, over_ranges};
use super::uninit_buffer::UninitBuffer;
use super::{check_dtype, check_stored, contiguous, simd, with_first_element, with_type};
use crate::error::Result;

/// Elements that are converted at a time: both sides stay in the first-level cache.
const CONVERT_CHUNK: usize = 4096;

/// Converts the elements of a tensor to another type; between f32 and a half-precision type with vector instructions, on the
/// threads of the pool if the tensor is large.
///
/// # Errors
/// If the kernels do not support the tensor, or memory does not suffice.
pub fn convert(x: &Tensor, dtype: DType) -> Result<Tensor> {
    check_stored(x)?;
    check_dtype(dtype)?;
    match (x.dtype(), dtype) {
        (DType::F32, DType::BF16) => convert_all::<f32, bf16>(x),
        (DType::F32, DType::F16) => convert_all::<f32, f16>(x),
        (DType::BF16, DType::F32) => convert_all::<bf16, f32>(x),
        (DType::F16, DType::F32) => convert_all::<f16, f32>(x),
        (DType::F32, DType::F8E4M3) => convert_all::<f32, F8E4M3>(x),
        (DType::F8E4M3, DType::F32) => convert_all::<F8E4M3, f32>(x),
        (DType::F8E4M3, DType::F8E4M3) => Ok(x.clone()),
        // As in PyTorch, all other types are converted from and to f8 by way of f32. Candle's conversion to f64 does not end.
        (DType::F8E4M3, _) | (_, DType::F8E4M3) => convert(&convert(x, DType::F32)?, dtype),
        _ => Ok(x.to_dtype(dtype)?),
    }
}

fn convert_all<S: Cast<D> + WithDType, D: WithDType>(x: &Tensor) -> Result<Tensor> {
    let (x, count) = (contiguous(x)?, x.elem_count());
    let output = UninitBuffer::new(D::DTYPE, count)?;
    let out = SharedPtr::new(output.first());
    with_first_element(&x, |first, _| {
        let first = SharedPtr::new(first.cast_mut());
        // One unit of cost for reading and one for writing.
        over_ranges(count, 2, CONVERT_CHUNK, |range| {
            for start in range.clone().step_by(CONVERT_CHUNK) {
                let length = CONVERT_CHUNK.min(range.end - start);
                // SAFETY: both sides have `count` elements of these types, and ranges do not overlap.
                unsafe {
                    let from = std::slice::from_raw_parts(first.get().cast::<S>().add(start), length);
                    let to = out.get().cast::<MaybeUninit<D>>().add(start);
                    S::cast_all(from, std::slice::from_raw_parts_mut(to, length));
                }
            }
        });
    });
    // SAFETY: the ranges cover every element.
    Ok(unsafe { output.finish(x.shape()) })
}

/// A strided block of a matrix: `rows` rows of `width` elements, and the strides between rows and between elements.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) rows: usize,
    pub(super) row_stride: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
}

/// A type in which kernels compute: f32, f64 or i64.
pub(super) trait Compute: WithDType {
    /// Converts a block of `dtype` into a buffer, row after row.
    ///
    /// # Safety
    /// Every element that the block reaches from `first` is readable and of type `dtype`; the buffer has `rows * width`
    /// elements.
    unsafe fn load(dtype: DType, first: *const u8, block: Block, buffer: &mut [MaybeUninit<Self>]);

    /// Converts numbers to `dtype` and writes them one after the other.
    ///
    /// # Safety
    /// As many elements of type `dtype` can be written at `first`.
    unsafe fn store(dtype: DType, numbers: &[Self], first: *mut u8);
}

/// Conversion of an element to another type.
trait Cast<To>: Copy {
    fn cast(self) -> To;

    /// Converts a slice; `to` is as long as `from`.
    fn cast_all(from: &[Self], to: &mut [MaybeUninit<To>]) {
        simd::run(CastAll { from, to });
    }
}

struct CastAll<'a, S, D> {
    from: &'a [S],
    to: &'a mut [MaybeUninit<D>],
}

impl<S: Cast<D>, D> simd::Kernel for CastAll<'_, S, D> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            to.write(from.cast());
        }
    }
}

macro_rules! casts {
    ($($($From:ty),* => $To:tt;)*) => {
        $($(casts!(@ $From => $To);)*)*
    };
    (@ $From:ty => ($($To:ty),*)) => {
        $(impl Cast<$To> for $From {
            #[inline(always)]
            fn cast(self) -> $To {
                self as $To
            }
        })*
    };
}
casts! {
    u8, u32, i16, i32 => (f32, f64, i64);
    i64 => (u8);
    f32, f64, i64 => (u32, i16, i32, i64, f32, f64);
}

// Comparisons return u8. Rust's saturating `as u8` does not become vector instructions, so the range is clamped first.
macro_rules! byte_casts {
    ($($T:ty),*) => {$(
        impl Cast<u8> for $T {
            #[inline(always)]
            fn cast(self) -> u8 {
                let inside = self.max(0.0).min(255.0);
                // SAFETY: NaN became 0, and everything else is between 0 and 255 now.
                unsafe { inside.to_int_unchecked::<i32>() as u8 }
            }
        }
    )*};
}
byte_casts!(f32, f64);

macro_rules! half_casts {
    ($($T:ty),*) => {$(
        impl Cast<f64> for $T {
            #[inline(always)]
            fn cast(self) -> f64 {
                self.to_f64()
            }
        }
        impl Cast<i64> for $T {
            #[inline(always)]
            fn cast(self) -> i64 {
                self.to_f64() as i64
            }
        }
        impl Cast<$T> for f64 {
            #[inline(always)]
            fn cast(self) -> $T {
                <$T>::from_f64(self)
            }
        }
        impl Cast<$T> for i64 {
            #[inline(always)]
            fn cast(self) -> $T {
                <$T>::from_f64(self as f64)
            }
        }
    )*};
}
half_casts!(f16, bf16);

// The `half` crate converts slices with the processor's f16 instructions (F16C), if it has them.

impl Cast<f32> for f16 {
    #[inline(always)]
    fn cast(self) -> f32 {
        self.to_f32()
    }

    fn cast_all(from: &[Self], to: &mut [MaybeUninit<f32>]) {
        from.convert_to_f32_slice(zeroed(to));
    }
}

impl Cast<f16> for f32 {
    #[inline(always)]
    fn cast(self) -> f16 {
        f16::from_f32(self)
    }

    fn cast_all(from: &[Self], to: &mut [MaybeUninit<f16>]) {
        zeroed(to).convert_from_f32_slice(from);
    }
}

// bf16 is the upper half of an f32. Written without branches, so that the loop becomes vector instructions.

impl Cast<f32> for bf16 {
    #[inline(always)]
    fn cast(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Cast<bf16> for f32 {
    #[inline(always)]
    fn cast(self) -> bf16 {
        let bits = self.to_bits();
        // Round to nearest, ties to even.
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // A carry beyond the mantissa would turn NaN into infinity; the quiet bit keeps it a NaN.
        let quiet = bits >> 16 | 0x40;
        bf16::from_bits(if self.is_nan() { quiet } else { rounded } as u16)
    }
}

impl Cast<f32> for F8E4M3 {
    #[inline(always)]
    fn cast(self) -> f32 {
        f8_to_f32(self)
    }
}

impl Cast<F8E4M3> for f32 {
    #[inline(always)]
    fn cast(self) -> F8E4M3 {
        f32_to_f8(self)
    }
}

/// Fills the memory with zeros, because the `half` crate takes initialised slices only.
fn zeroed<T: Copy + Default>(memory: &mut [MaybeUninit<T>]) -> &mut [T] {
    memory.fill(MaybeUninit::new(T::default()));
    // SAFETY: every element was just written.
    unsafe { memory.assume_init_mut() }
}

/// Converts a block of `S` into a buffer of `C`.
///
/// # Safety
/// As for [`Compute::load`].
unsafe fn load<S: Cast<C>, C: Copy>(first: *const S, block: Block, buffer: &mut [MaybeUninit<C>]) {
    let Block { rows, row_stride, width, stride } = block;
    if width == 0 {
        return;
    }
    for (row, to) in (0..rows).zip(buffer.chunks_exact_mut(width)) {
        // SAFETY: the caller promises that the block can be read.
        unsafe {
            let first = first.add(row * row_stride);
            match stride {
                0 => to.fill(MaybeUninit::new((*first).cast())),
                1 => S::cast_all(std::slice::from_raw_parts(first, width), to),
                _ => to.iter_mut().enumerate().for_each(|(i, to)| {
                    to.write((*first.add(i * stride)).cast());
                }),
            }
        }
    }
}

macro_rules! computes {
    ($($C:ty),*) => {$(
        impl Compute for $C {
            unsafe fn load(dtype: DType, first: *const u8, block: Block, buffer: &mut [MaybeUninit<Self>]) {
                // SAFETY: the caller's promise.
                with_type!(dtype, S => unsafe { load::<S, $C>(first.cast(), block, buffer) },
                    otherwise unreachable!("callers check the element type"));
            }

            unsafe fn store(dtype: DType, numbers: &[Self], first: *mut u8) {
                with_type!(dtype, D => {
                    // SAFETY: the caller's promise; the memory may be uninitialised, hence `MaybeUninit`.
                    let to = unsafe { std::slice::from_raw_parts_mut(first.cast::<MaybeUninit<D>>(), numbers.len()) };
                    <$C as Cast<D>>::cast_all(numbers, to);
                }, otherwise unreachable!("callers check the element type"));
            }
        }
    )*};
}
computes!(f32, f64, i64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversion_to_u8_saturates() {
        for (x, expected) in [(-1.0, 0), (0.9, 0), (1.0, 1), (255.5, 255), (1e30, 255), (f32::NAN, 0), (-1e30, 0)] {
            let bytes: [u8; 2] = [x.cast(), f64::from(x).cast()];
            assert_eq!(bytes, [expected; 2], "{x}");
        }
    }

    #[test]
    fn tensors_convert_like_their_elements() {
        use candle_core::Device;
        // More than one range, with a remainder, and a view that is not contiguous.
        let x = Tensor::arange(0u32, 80_003, &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
        let x = ((x - 40_000.0).unwrap() * 1.01).unwrap();
        let turned = x.narrow(0, 0, 300).unwrap().reshape((20, 15)).unwrap().t().unwrap();
        for t in [&x, &turned] {
            let numbers = t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let half = convert(t, DType::F16).unwrap();
            let brain = convert(t, DType::BF16).unwrap();
            assert_eq!((half.dims(), brain.dims()), (t.dims(), t.dims()));
            let halves: Vec<f16> = numbers.iter().map(|x| f16::from_f32(*x)).collect();
            let brains: Vec<bf16> = numbers.iter().map(|x| bf16::from_f32(*x)).collect();
            assert_eq!(half.flatten_all().unwrap().to_vec1::<f16>().unwrap(), halves);
            assert_eq!(brain.flatten_all().unwrap().to_vec1::<bf16>().unwrap(), brains);
            let back = |t: &Tensor| convert(t, DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(back(&half), halves.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
            assert_eq!(back(&brain), brains.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
        }
        assert_eq!(convert(&x, DType::I64).unwrap().to_vec1::<i64>().unwrap()[1], -40_398);
    }

    #[test]
    fn bf16_rounding_equals_that_of_the_half_crate() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                let (got, expected): (bf16, bf16) = (x.cast(), bf16::from_f32(x));
                assert!(got == expected || got.is_nan() && expected.is_nan(), "{x:e}: {got} and not {expected}");
                let back: f32 = got.cast();
                assert!(back == got.to_f32() || got.is_nan() && back.is_nan());
            }
        }
    }
}
