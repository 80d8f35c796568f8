//! The rate of multiplications that the processor reaches in registers, as a bound for products in benchmarks.

use crate::simd::{self, Kernel};

/// Independent sums: enough to fill the pipelines of two units with vectors of 16 elements and a latency of 4 cycles.
const LANES: usize = 16 * 16;

/// Rounds over all lanes per block.
const ROUNDS: usize = 16;

/// Multiplications with an addition in one block of [`multiply_adds`].
pub const MULTIPLY_ADDS_PER_BLOCK: usize = LANES * ROUNDS;

struct MultiplyAdds(usize);

impl Kernel for MultiplyAdds {
    type Output = f32;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> f32 {
        let mut sums = [0f32; LANES];
        let (factor, summand) = (std::hint::black_box(0.999f32), std::hint::black_box(0.001f32));
        for _ in 0..self.0 * ROUNDS {
            for sum in &mut sums {
                *sum = if FMA { sum.mul_add(factor, summand) } else { *sum * factor + summand };
            }
        }
        sums.iter().sum()
    }
}

/// Computes `blocks` times [`MULTIPLY_ADDS_PER_BLOCK`] f32 multiplications with an addition in registers, on the calling
/// thread, and returns their sum.
pub fn multiply_adds(blocks: usize) -> f32 {
    simd::run(MultiplyAdds(blocks))
}
