//! What the processor reaches at most, as bounds for kernels in benchmarks: multiplications in registers, and bytes moved.
//!
//! A bound that is too low hides slow kernels. Sums that do not fit the registers would be stored and reloaded in every step, so
//! their number follows from the instruction set, and intrinsics keep them there; a test compares the rate with the clock. Two units
//! with a latency of 4 to 5 cycles need 8 to 10 independent operations.

use std::hint::black_box;

use crate::simd::{self, InstructionSet, Kernel};
use crate::stream;
#[cfg(target_arch = "x86_64")]
use crate::strided_copy::copy_with_avx2;

/// Steps per block.
const STEPS: usize = 1024;

/// Elements and sums in registers, for one instruction set.
#[derive(Clone, Copy)]
struct Registers {
    lanes: usize,
    sums: usize,
}

impl Registers {
    fn of(set: InstructionSet) -> Self {
        match set {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => Registers { lanes: 16, sums: 24 },
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => Registers { lanes: 8, sums: 12 },
            InstructionSet::Baseline => Registers { lanes: 4, sums: if cfg!(target_arch = "x86_64") { 6 } else { 24 } },
        }
    }

    fn multiply_adds_per_block(self) -> usize {
        self.lanes * self.sums * STEPS
    }
}

/// Multiplications with an addition in one block of [`multiply_adds`].
pub fn multiply_adds_per_block() -> usize {
    Registers::of(InstructionSet::selected()).multiply_adds_per_block()
}

/// Computes `blocks` times [`multiply_adds_per_block`] f32 multiplications with an addition in registers, on the calling thread.
pub fn multiply_adds(blocks: usize) {
    // SAFETY: only a set that the processor has is selected.
    unsafe { multiply_adds_on(InstructionSet::selected(), blocks) }
}

/// # Safety
/// The processor has the set.
unsafe fn multiply_adds_on(set: InstructionSet, blocks: usize) {
    match set {
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => unsafe { x86::avx512(blocks * STEPS) },
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => unsafe { x86::avx2(blocks * STEPS) },
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Baseline => x86::sse2(blocks * STEPS),
        #[cfg(not(target_arch = "x86_64"))]
        InstructionSet::Baseline => any(blocks * STEPS),
    }
}

/// Multiplications and additions of arrays, which the compiler keeps in registers of 4 elements.
#[cfg(not(target_arch = "x86_64"))]
fn any(steps: usize) {
    let mut sums = black_box([[0f32; 4]; 24]);
    let (factor, summand) = (black_box([1f32; 4]), black_box([1f32; 4]));
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = std::array::from_fn(|i| sum[i].mul_add(factor[i], summand[i]));
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    // A factor of 1 keeps the sums away from infinity and from subnormal numbers, which may be slow.

    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512(steps: usize) {
        let (factor, summand) = (_mm512_set1_ps(black_box(1.0)), _mm512_set1_ps(black_box(1.0)));
        let mut sums = [factor; 24];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, factor, summand);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2(steps: usize) {
        let (factor, summand) = (_mm256_set1_ps(black_box(1.0)), _mm256_set1_ps(black_box(1.0)));
        let mut sums = [factor; 12];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, factor, summand);
            }
        }
        black_box(sums);
    }

    /// As many multiplications as additions, each with registers of its own: one after the other, as a product has them, they would
    /// need twice as many registers as there are.
    pub(super) fn sse2(steps: usize) {
        // SAFETY: every x86-64 processor has the instructions.
        unsafe {
            let (factor, summand) = (_mm_set1_ps(black_box(1.0)), _mm_set1_ps(black_box(1.0)));
            let (mut products, mut sums) = ([factor; 6], [summand; 6]);
            for _ in 0..steps {
                // By constant indices: iterators keep the registers in memory where debug assertions are on.
                for i in 0..6 {
                    products[i] = _mm_mul_ps(products[i], factor);
                    sums[i] = _mm_add_ps(sums[i], summand);
                }
            }
            black_box((products, sums));
        }
    }

    /// Reads memory, except for a rest of less than 256 bytes; with `AHEAD`, what is a page further is requested early.
    #[target_feature(enable = "avx2")]
    pub(super) fn read<const AHEAD: bool>(memory: &[u8]) {
        let mut bits = [_mm256_setzero_si256(); 8];
        for chunk in memory.as_chunks::<256>().0 {
            if AHEAD {
                for line in 0..4 {
                    // A request for any address has no effect on values.
                    _mm_prefetch::<_MM_HINT_T0>(chunk.as_ptr().wrapping_add(4096 + 64 * line).cast());
                }
            }
            for (i, bits) in bits.iter_mut().enumerate() {
                // SAFETY: 32 bytes of the chunk.
                *bits = _mm256_or_si256(*bits, unsafe { _mm256_loadu_si256(chunk.as_ptr().add(32 * i).cast()) });
            }
        }
        black_box(bits);
    }
}

/// Bytes that [`move_bytes`] reads and writes at a time, at most: what the processor can look ahead over.
const BLOCK: usize = 4096;

/// Reads and writes memory once, as fast as it can: what is both read and written is copied. `far` is faster for memory that the caches
/// do not hold: it writes past them, and requests what it reads early. Uses the widest instructions of the processor, whatever the
/// kernels use.
pub fn move_bytes(read: &[u8], write: &mut [u8], far: bool) {
    let common = read.len().min(write.len());
    let longest = read.len().max(write.len());
    let blocks = if write.is_empty() { longest.min(1) } else { longest.div_ceil(BLOCK) };
    if blocks == 0 {
        return;
    }
    let (to_copy, to_read) = read.split_at(common);
    let (to, to_fill) = write.split_at_mut(common);
    let part = |length: usize| length.div_ceil(blocks).next_multiple_of(128).max(1);
    let (copied, rest) = (part(common), part(to_read.len().max(to_fill.len())));
    let (mut sources, mut targets) = (to_copy.chunks(copied), to.chunks_mut(copied));
    let (mut reads, mut fills) = (to_read.chunks(rest), to_fill.chunks_mut(rest));
    for _ in 0..blocks {
        let source = sources.next().zip(targets.next());
        simd::run_on_widest(MoveBlock { source, read: reads.next(), fill: fills.next(), far });
    }
    stream::finish();
}

struct MoveBlock<'a> {
    source: Option<(&'a [u8], &'a mut [u8])>,
    read: Option<&'a [u8]>,
    fill: Option<&'a mut [u8]>,
    far: bool,
}

/// Bytes that are moved in one step: several registers, which the compiler does not turn into a call of memcpy.
const STEP: usize = 128;

impl Kernel for MoveBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        if let Some(read) = self.read {
            #[cfg(target_arch = "x86_64")]
            if FMA {
                // SAFETY: sets with fused multiply-add include AVX2.
                unsafe { if self.far { x86::read::<true>(read) } else { x86::read::<false>(read) } };
            }
            if !(FMA && cfg!(target_arch = "x86_64")) {
                let mut bits = [0u8; STEP];
                for chunk in read.as_chunks::<STEP>().0 {
                    bits.iter_mut().zip(chunk).for_each(|(bits, byte)| *bits |= byte);
                }
                black_box(bits);
            }
        }
        if let Some((from, to)) = self.source {
            if self.far && stream::is_possible::<u8, FMA>(to.as_ptr()) {
                for (to, from) in to.as_chunks_mut::<STEP>().0.iter_mut().zip(from.as_chunks::<STEP>().0) {
                    // SAFETY: the chunk can be written; it is possible for the first address, and so in steps from there on.
                    unsafe { stream::store(*from, to.as_mut_ptr()) };
                }
            } else {
                #[cfg(target_arch = "x86_64")]
                if FMA {
                    // SAFETY: both have this length, and do not overlap; sets with fused multiply-add include AVX2.
                    unsafe { copy_with_avx2(from.as_ptr(), to.as_mut_ptr(), to.len()) };
                }
                if !(FMA && cfg!(target_arch = "x86_64")) {
                    to.copy_from_slice(from);
                }
            }
        }
        if let Some(fill) = self.fill {
            if self.far && stream::is_possible::<u8, FMA>(fill.as_ptr()) {
                for to in fill.as_chunks_mut::<STEP>().0 {
                    // SAFETY: as above.
                    unsafe { stream::store([1; STEP], to.as_mut_ptr()) };
                }
            } else {
                fill.fill(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn seconds(call: impl FnOnce()) -> f64 {
        let start = Instant::now();
        call();
        start.elapsed().as_secs_f64()
    }

    /// A chain of exclusive ors and multiplications, which take 1 and 3 cycles on every x86-64 processor of the last fifteen years.
    fn chain(steps: usize) {
        let (mut x, factor) = (black_box(3u64), black_box(5u64));
        for _ in 0..steps {
            x = (x ^ factor).wrapping_mul(factor);
        }
        black_box(x);
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn every_set_multiplies_full_registers_in_every_cycle() {
        for &(name, set) in InstructionSet::available() {
            let registers = Registers::of(set);
            // Short samples, of which some are not interrupted however much else runs; more of both until the best agree.
            let (mut cycle, mut block) = (f64::INFINITY, f64::INFINITY);
            let mut per_cycle = 0.0;
            for _ in 0..200 {
                for _ in 0..20 {
                    cycle = cycle.min(seconds(|| chain(10_000)) / 40_000.0);
                    // SAFETY: available.
                    block = block.min(seconds(|| unsafe { multiply_adds_on(set, 1) }));
                }
                per_cycle = registers.multiply_adds_per_block() as f64 / registers.lanes as f64 * cycle / block;
                if (0.9..=2.1).contains(&per_cycle) {
                    break;
                }
            }
            // One or two units; sums in memory would allow a fifth of one.
            assert!((0.9..=2.1).contains(&per_cycle), "{name}: {per_cycle} registers per cycle");
        }
    }

    #[test]
    fn all_bytes_are_moved() {
        for (read, write) in
            [(0, 0), (100_000, 0), (0, 100_000), (70_000, 30_000), (30_000, 70_000), (5, 3), (8192, 8192)]
        {
            for far in [false, true] {
                let source: Vec<u8> = (0..read).map(|i| (i % 251) as u8 + 2).collect();
                let mut target = vec![0; write];
                move_bytes(&source, &mut target, far);
                let common = read.min(write) / STEP * STEP;
                assert!(target[..common] == source[..common], "{read} and {write}");
            }
        }
    }
}
