//! Runtime dispatch of loops to the widest vector instructions of the processor (AVX-512, AVX2 with FMA, or the baseline).
//!
//! Rust compiles for the baseline of a target (SSE2 on x86-64), whose vectors are a quarter as long as AVX-512's. The
//! environment variable `SHARDWISE_SIMD` (`avx512`, `avx2` or `baseline`) selects a narrower set than the processor has, to
//! compare results or timings. It is read once per process.
//!
//! The loops for AVX-512 and AVX2 execute the same operations on each element, both with fused multiply-add, so their
//! results have the same bits. The baseline of x86-64 has no fused multiply-add and rounds products that the other sets do
//! not; each function of [`math`](crate::math) keeps its error bound there too.

use std::sync::atomic::{AtomicU8, Ordering};

/// A loop that is compiled once per instruction set.
///
/// `run` and everything that it calls must be `#[inline(always)]`: a function that is called instead of inlined is compiled
/// for the baseline.
pub(super) trait Kernel {
    type Output;

    /// Runs the loop. `FMA` is whether `mul_add` is a single instruction; otherwise it would be a slow library call.
    fn run<const FMA: bool>(self) -> Self::Output;
}

/// A set of vector instructions that loops are compiled for, narrowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum InstructionSet {
    /// What every processor of the target has; on aarch64 that includes NEON and FMA.
    Baseline = 1,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2 = 2,
    /// AVX-512 with the extensions VL, DQ and BW, which every processor with AVX-512 has but the Xeon Phi.
    #[cfg(target_arch = "x86_64")]
    Avx512 = 3,
}

impl InstructionSet {
    #[cfg(target_arch = "x86_64")]
    const ALL: &[(&str, Self)] = &[("baseline", Self::Baseline), ("avx2", Self::Avx2), ("avx512", Self::Avx512)];
    #[cfg(not(target_arch = "x86_64"))]
    const ALL: &[(&str, Self)] = &[("baseline", Self::Baseline)];

    /// The sets that this processor has, narrowest first. Detection goes from narrow to wide, so they are all up to the
    /// last one.
    pub(crate) fn available() -> &'static [(&'static str, Self)] {
        let has = |set: Self| match set {
            Self::Baseline => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw")
            }
        };
        let count = Self::ALL.iter().take_while(|(_, set)| has(*set)).count();
        &Self::ALL[..count]
    }

    /// The set that [`run`] uses: the widest one, or that of `SHARDWISE_SIMD`.
    ///
    /// # Panics
    /// If the variable names a set that does not exist or that this processor lacks: results that silently came from another
    /// set would defeat its purpose.
    #[inline]
    pub(crate) fn selected() -> Self {
        /// The selected set, 0 before the first use. Every thread that finds 0 computes the same value.
        static SELECTED: AtomicU8 = AtomicU8::new(0);
        match SELECTED.load(Ordering::Relaxed) {
            #[cfg(target_arch = "x86_64")]
            3 => Self::Avx512,
            #[cfg(target_arch = "x86_64")]
            2 => Self::Avx2,
            1 => Self::Baseline,
            _ => {
                let set = Self::from_environment(std::env::var("SHARDWISE_SIMD").ok().as_deref());
                SELECTED.store(set as u8, Ordering::Relaxed);
                set
            }
        }
    }

    /// The set with this name, or the widest without a name.
    fn from_environment(name: Option<&str>) -> Self {
        let available = Self::available();
        let Some(name) = name.filter(|name| !name.is_empty()) else { return available[available.len() - 1].1 };
        let found = available.iter().find(|(known, _)| *known == name);
        let names = || available.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        found.unwrap_or_else(|| panic!("SHARDWISE_SIMD is {name:?}; this processor has {}", names())).1
    }
}

/// Names of the instruction sets that this processor has, narrowest first, as `SHARDWISE_SIMD` takes them.
pub fn instruction_sets() -> Vec<&'static str> {
    InstructionSet::available().iter().map(|(name, _)| *name).collect()
}

/// Runs a loop with the widest vectors that this processor has, or with the set that `SHARDWISE_SIMD` names.
#[inline]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: only a set that the processor has is selected.
    unsafe { run_unchecked(InstructionSet::selected(), kernel) }
}

/// Runs a loop with the widest vectors that this processor has, whatever `SHARDWISE_SIMD` names.
pub(crate) fn run_on_widest<K: Kernel>(kernel: K) -> K::Output {
    let available = InstructionSet::available();
    // SAFETY: an available set.
    unsafe { run_unchecked(available[available.len() - 1].1, kernel) }
}

/// Runs a loop with one instruction set, so that a test can compare the results of all of them.
///
/// # Panics
/// If the processor lacks the set.
#[cfg(test)]
pub(crate) fn run_on<K: Kernel>(set: InstructionSet, kernel: K) -> K::Output {
    assert!(InstructionSet::available().iter().any(|(_, known)| *known == set), "this processor lacks {set:?}");
    // SAFETY: checked above.
    unsafe { run_unchecked(set, kernel) }
}

/// Runs a loop with one instruction set.
///
/// # Safety
/// The processor has the set.
#[inline]
unsafe fn run_unchecked<K: Kernel>(set: InstructionSet, kernel: K) -> K::Output {
    match set {
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => unsafe { with_avx512(kernel) },
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => unsafe { with_avx2(kernel) },
        InstructionSet::Baseline => kernel.run::<{ cfg!(target_arch = "aarch64") }>(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
fn with_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<true>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<true>()
}

/// Whether the set in use has the 32 registers of 512 bits of AVX-512, for kernels that choose the size of a tile.
pub(super) fn has_wide_registers() -> bool {
    #[cfg(target_arch = "x86_64")]
    return InstructionSet::selected() == InstructionSet::Avx512;
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1 if the loop is compiled with fused multiply-add.
    struct Fused;
    impl Kernel for Fused {
        type Output = bool;
        fn run<const FMA: bool>(self) -> bool {
            FMA
        }
    }

    #[test]
    fn the_variable_selects_a_set_and_refuses_others() {
        let available = InstructionSet::available();
        let widest = available.last().unwrap().1;
        assert_eq!(InstructionSet::from_environment(None), widest);
        assert_eq!(InstructionSet::from_environment(Some("")), widest);
        for (name, set) in available {
            assert_eq!(InstructionSet::from_environment(Some(name)), *set);
            let fused = *set != InstructionSet::Baseline || cfg!(target_arch = "aarch64");
            assert_eq!(run_on(*set, Fused), fused);
        }
        let refused = std::panic::catch_unwind(|| InstructionSet::from_environment(Some("sse9"))).unwrap_err();
        let message = refused.downcast_ref::<String>().unwrap();
        assert!(message.contains("SHARDWISE_SIMD is \"sse9\"") && message.contains("baseline"), "{message}");
    }
}
