//! The rate of multiplications that the processor reaches in registers, as a bound for products in benchmarks.
//!
//! Sums that do not fit the registers would be stored and reloaded in every step, and the rate be that of the memory. So their number
//! follows from the instruction set: 24 of the 32 registers of AVX-512 and NEON, 12 of the 16 of AVX2 and of the baseline of x86-64.
//! Two units with a latency of 4 to 5 cycles need 8 to 10 independent ones.

use crate::simd::{self, InstructionSet, Kernel};

/// Rounds over all sums per block.
const ROUNDS: usize = 16;

struct MultiplyAdds<const LANES: usize>(usize);

impl<const LANES: usize> Kernel for MultiplyAdds<LANES> {
    type Output = f32;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> f32 {
        let mut sums: [f32; LANES] = std::hint::black_box([0.0; LANES]);
        let (factor, summand) = (std::hint::black_box(0.999f32), std::hint::black_box(0.001f32));
        for _ in 0..self.0 * ROUNDS {
            for sum in &mut sums {
                *sum = if FMA { sum.mul_add(factor, summand) } else { *sum * factor + summand };
            }
        }
        sums.iter().sum()
    }
}

/// Lanes of as many registers as hold the sums.
fn lanes() -> usize {
    match InstructionSet::selected() {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => 24 * 16,
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => 12 * 8,
        InstructionSet::Baseline if cfg!(target_arch = "aarch64") => 24 * 4,
        InstructionSet::Baseline => 12 * 4,
    }
}

/// Multiplications with an addition in one block of [`multiply_adds`].
pub fn multiply_adds_per_block() -> usize {
    lanes() * ROUNDS
}

/// Computes `blocks` times [`multiply_adds_per_block`] f32 multiplications with an addition in registers, on the calling
/// thread, and returns their sum.
pub fn multiply_adds(blocks: usize) -> f32 {
    match lanes() {
        384 => simd::run(MultiplyAdds::<384>(blocks)),
        96 => simd::run(MultiplyAdds::<96>(blocks)),
        _ => simd::run(MultiplyAdds::<48>(blocks)),
    }
}
