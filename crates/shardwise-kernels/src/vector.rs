//! Loops compiled for several instruction sets, of which the best one is chosen at run time. Rust compiles for the oldest
//! processor of a kind, whose vectors are a quarter as long as today's.

/// A loop. `run` and all that it calls must be `#[inline(always)]`: only then it is compiled anew for every set.
pub(super) trait Kernel {
    /// What the loop gives.
    type Output;

    /// The loop; `FMA` says whether `mul_add` is one instruction.
    fn run<const FMA: bool>(self) -> Self::Output;
}

/// Runs a loop with the longest vectors that this processor has.
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

/// Runs a loop; other processors have one set of vectors.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<{ cfg!(target_arch = "aarch64") }>()
}
