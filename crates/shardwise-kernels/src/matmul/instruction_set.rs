//! Runs an inner loop with the registers of the processor.

use super::registers::{Plain, Register};
use crate::simd::InstructionSet;

/// An inner loop that is compiled once per kind of register.
///
/// Everything that `run` calls must be `#[inline(always)]`: a function that is called instead of inlined is compiled for the
/// baseline.
pub(super) trait RegisterKernel<T> {
    type Output;

    /// # Safety
    /// The processor has the instructions of `V`.
    unsafe fn run<V: Register<Element = T>>(self) -> Self::Output;
}

/// An element type with registers: f32 or f64.
pub(super) trait Vectorized: Copy + Default + Send + Sync + 'static {
    /// Runs the loop with the longest registers in use.
    fn run<K: RegisterKernel<Self>>(kernel: K) -> K::Output;
}

macro_rules! vectorized {
    ($($T:ty: $Avx512:ident, $Avx2:ident;)*) => {$(
        impl Vectorized for $T {
            #[inline]
            fn run<K: RegisterKernel<$T>>(kernel: K) -> K::Output {
                match InstructionSet::selected() {
                    // SAFETY: the processor has the instructions.
                    #[cfg(target_arch = "x86_64")]
                    InstructionSet::Avx512 => unsafe { avx512::<$T, super::registers::$Avx512, K>(kernel) },
                    // SAFETY: as above.
                    #[cfg(target_arch = "x86_64")]
                    InstructionSet::Avx2 => unsafe { avx2::<$T, super::registers::$Avx2, K>(kernel) },
                    // SAFETY: no instructions beyond the baseline.
                    InstructionSet::Baseline => unsafe { kernel.run::<Plain<$T>>() },
                }
            }
        }
    )*};
}
vectorized! {
    f32: F32x16, F32x8;
    f64: F64x8, F64x4;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
unsafe fn avx512<T, V: Register<Element = T>, K: RegisterKernel<T>>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.run::<V>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<T, V: Register<Element = T>, K: RegisterKernel<T>>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.run::<V>() }
}
