//! Runtime dispatch of loops to the widest vector instructions of the processor (AVX-512, AVX2 with FMA, or the baseline).
//!
//! Rust compiles for the baseline of a target (SSE2 on x86-64), whose vectors are a quarter as long as AVX-512's.

/// A loop that is compiled once per instruction set.
///
/// `run` and everything that it calls must be `#[inline(always)]`: a function that is called instead of inlined is compiled
/// for the baseline.
pub(super) trait Kernel {
    type Output;

    /// Runs the loop. `FMA` is whether `mul_add` is a single instruction; otherwise it would be a slow library call.
    fn run<const FMA: bool>(self) -> Self::Output;
}

/// Runs a loop with the widest vectors that this processor has.
#[cfg(target_arch = "x86_64")]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { with_avx512(kernel) };
    }
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: as above.
        return unsafe { with_avx2(kernel) };
    }
    kernel.run::<false>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn with_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<true>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<true>()
}

/// Runs a loop. On targets other than x86-64 the baseline is used; on aarch64 that includes NEON and FMA.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<{ cfg!(target_arch = "aarch64") }>()
}

/// Whether the processor has the 32 registers of 512 bits of AVX-512, for kernels that choose the size of a tile.
pub(super) fn has_wide_registers() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    false
}
