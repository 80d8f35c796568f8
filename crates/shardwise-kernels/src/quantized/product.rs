//! Products with a quantized matrix: with few rows the blocks are multiplied as they are, with many they are expanded first.

use std::array::from_fn;
use std::marker::PhantomData;
use std::ops::Range;

use candle_core::{DType, Tensor};

use super::BlockType;
use super::packed::{GROUP, Group, LANES, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, QuantizedBlock};
use crate::error::{ErrorKind, Result};
use crate::parallel::{SharedPtr, over_ranges};
use crate::simd::{self, Kernel};
use crate::typed_slice::{filled_by, with_slice};
use crate::{batched_matmul, concat, contiguous, with_bytes};

/// With more rows than this a matrix is expanded to f32 first: reading blocks once for four rows costs as much as expanding
/// and multiplying does with about this many.
const MAX_ROWS: usize = 16;
/// Rows of a matrix that are expanded at a time: with usual sizes a few megabytes.
const EXPANDED_ROWS: usize = 256;

/// Multiplies rows by the transpose of a quantized matrix: f32 `[.., blocks, elements of a block]` and u8
/// `[out, blocks, bytes of a block]` give f32 `[.., out]`.
///
/// Elements of the matrix are expanded in registers and all sums are f32, so the result is that of an expanded matrix up to
/// the order of summation. Large products use the rayon pool of the calling thread; the bits do not depend on the number
/// of threads, and are the same with AVX2 and AVX-512.
///
/// # Errors
/// [`ErrorKind::Shape`] or [`ErrorKind::DType`] if the operands are not of these shapes and types.
pub fn quantized_matmul(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let block = block_type(weight)?;
    let weight = &contiguous(weight)?;
    let [out, blocks, _] = *weight.dims() else { unreachable!("checked by block_type") };
    let (leading, last) = x.dims().split_at(x.dims().len().saturating_sub(2));
    if last != [blocks, block.elements()] || x.dtype() != DType::F32 {
        return Err(ErrorKind::shape(x.dims()).error(
            "operands",
            format!("{} {:?} and {block} blocks {:?}", x.dtype().as_str(), x.dims(), weight.dims()),
            format!("f32 [.., {blocks}, {}]", block.elements()),
            "unflatten the features of the input",
        ));
    }
    let (rows, shape) = (leading.iter().product::<usize>(), [leading, &[out]].concat());
    let columns = blocks * block.elements();
    if rows > MAX_ROWS && out > 0 {
        let x = x.reshape((rows, columns))?;
        let parts = (0..out).step_by(EXPANDED_ROWS).map(|first| {
            let count = EXPANDED_ROWS.min(out - first);
            let part = dequantize(&weight.narrow(0, first, count)?)?;
            batched_matmul(&x, &part.reshape((count, columns))?.t()?, 0, 1)
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        return Ok(concat(&parts, 1)?.reshape(shape)?);
    }
    with_slice(x, |x: &[f32]| {
        with_bytes(weight, |weight| {
            let product = QuantizedProduct { x, sums: &group_sums(x), weight, rows, columns, out };
            match block {
                BlockType::Q8_0 => product.compute::<Q8_0>(&shape),
                BlockType::Q4_0 => product.compute::<Q4_0>(&shape),
                BlockType::Q4_1 => product.compute::<Q4_1>(&shape),
                BlockType::Q5_0 => product.compute::<Q5_0>(&shape),
                BlockType::Q5_1 => product.compute::<Q5_1>(&shape),
                BlockType::Q4K => product.compute::<Q4K>(&shape),
                BlockType::Q5K => product.compute::<Q5K>(&shape),
                BlockType::Q6K => product.compute::<Q6K>(&shape),
                _ => product.compute_expanded(block, &shape),
            }
        })
    })??
}

/// Expands blocks, u8 `[.., bytes of a block]`, to f32 `[.., elements of a block]`.
///
/// # Errors
/// [`ErrorKind::Shape`] or [`ErrorKind::DType`] if it is no tensor of blocks.
pub fn dequantize(blocks: &Tensor) -> Result<Tensor> {
    let block = block_type(blocks)?;
    let blocks = &contiguous(blocks)?;
    let mut shape = blocks.dims().to_vec();
    shape.pop();
    let count: usize = shape.iter().product();
    shape.push(block.elements());
    with_bytes(blocks, |bytes| {
        // SAFETY: the ranges of blocks cover all elements.
        unsafe {
            filled_by(&shape, |to: SharedPtr<f32>| {
                // About half a nanosecond per element.
                over_ranges(count, block.elements() * 2, 1, |range| {
                    let (first, length) = (range.start * block.elements(), range.len() * block.elements());
                    let to = std::slice::from_raw_parts_mut(to.get().add(first), length);
                    let bytes = &bytes[range.start * block.bytes()..range.end * block.bytes()];
                    block.dequantize(bytes, to).expect("as many elements as the blocks have");
                });
            })
        }
    })?
}

/// The type of blocks of a u8 tensor, by its last dimension.
fn block_type(blocks: &Tensor) -> Result<BlockType> {
    let found = blocks.dims().last().and_then(|&bytes| BlockType::of_size(bytes));
    match found {
        Some(block) if blocks.dtype() == DType::U8 => Ok(block),
        _ => Err(ErrorKind::shape(blocks.dims()).error(
            "quantized blocks",
            format!("{} {:?}", blocks.dtype().as_str(), blocks.dims()),
            "u8 [.., bytes of a block]",
            "read them from a GGUF file",
        )),
    }
}

/// The sum of every 32 elements: offsets of blocks are multiplied by it.
fn group_sums(x: &[f32]) -> Vec<f32> {
    x.chunks(GROUP).map(|group| group.iter().sum()).collect()
}

/// A product of few rows.
#[derive(Clone, Copy)]
struct QuantizedProduct<'a> {
    /// `[rows, columns]`, and the sums of its groups.
    x: &'a [f32],
    sums: &'a [f32],
    /// The blocks of `[out, columns]`.
    weight: &'a [u8],
    rows: usize,
    columns: usize,
    out: usize,
}

impl QuantizedProduct<'_> {
    fn compute<P: QuantizedBlock>(self, shape: &[usize]) -> Result<Tensor> {
        debug_assert_eq!((P::ELEMENTS, P::BYTES), (P::TYPE.elements(), P::TYPE.bytes()));
        // SAFETY: the ranges cover all columns of the result, and each is computed for all rows.
        unsafe {
            filled_by(shape, |to: SharedPtr<f32>| {
                // About a tenth of a nanosecond per element of the matrix.
                over_ranges(self.out, (self.columns * self.rows).div_ceil(3), 4, |range| {
                    simd::run(OutputRange::<P> { product: self, range, to, blocks: PhantomData });
                });
            })
        }
    }

    /// Types that are rare: rows of the matrix are expanded one by one.
    fn compute_expanded(self, block: BlockType, shape: &[usize]) -> Result<Tensor> {
        let row_bytes = self.columns / block.elements() * block.bytes();
        // SAFETY: as in `compute`.
        unsafe {
            filled_by(shape, |to: SharedPtr<f32>| {
                over_ranges(self.out, self.columns * (1 + self.rows), 1, |range| {
                    let mut row = vec![0.0; self.columns];
                    for out in range {
                        let bytes = &self.weight[out * row_bytes..(out + 1) * row_bytes];
                        block.dequantize(bytes, &mut row).expect("a row has whole blocks");
                        for m in 0..self.rows {
                            let x = &self.x[m * self.columns..(m + 1) * self.columns];
                            let sum: f32 = x.iter().zip(&row).map(|(x, w)| x * w).sum();
                            to.get().add(m * self.out + out).write(sum);
                        }
                    }
                });
            })
        }
    }
}

/// The columns `range` of the result of a product.
struct OutputRange<'a, P> {
    product: QuantizedProduct<'a>,
    range: Range<usize>,
    to: SharedPtr<f32>,
    blocks: PhantomData<P>,
}

impl<P: QuantizedBlock> Kernel for OutputRange<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let mut row = 0;
        while row < self.product.rows {
            // Four sums at a time: enough to hide the latency of an addition, few enough for the registers of AVX2.
            row += match self.product.rows - row {
                1 => self.rows::<FMA, 4, 1>(row),
                2 | 3 => self.rows::<FMA, 2, 2>(row),
                _ => self.rows::<FMA, 1, 4>(row),
            };
        }
    }
}

impl<P: QuantizedBlock> OutputRange<'_, P> {
    /// Computes `M` rows of the result, `R` columns at a time. Returns `M`.
    #[inline(always)]
    fn rows<const FMA: bool, const R: usize, const M: usize>(&self, row: usize) -> usize {
        let mut column = self.range.start;
        while column + R <= self.range.end {
            self.tile::<FMA, R, M>(row, column);
            column += R;
        }
        while column < self.range.end {
            self.tile::<FMA, 1, M>(row, column);
            column += 1;
        }
        M
    }

    #[inline(always)]
    fn tile<const FMA: bool, const R: usize, const M: usize>(&self, row: usize, column: usize) {
        let QuantizedProduct { x, sums, weight, columns, out, .. } = self.product;
        let (blocks, groups) = (columns / P::ELEMENTS, columns / GROUP);
        let x: [&[f32]; M] = from_fn(|m| &x[(row + m) * columns..(row + m + 1) * columns]);
        let sums: [&[f32]; M] = from_fn(|m| &sums[(row + m) * groups..(row + m + 1) * groups]);
        let row_bytes = blocks * P::BYTES;
        let weight: [&[u8]; R] = from_fn(|r| &weight[(column + r) * row_bytes..(column + r + 1) * row_bytes]);
        let (mut lanes, mut offsets) = ([[[0.0; LANES]; M]; R], [[0.0; M]; R]);
        for block in 0..blocks {
            for group in 0..P::ELEMENTS / GROUP {
                let at = block * (P::ELEMENTS / GROUP) + group;
                for r in 0..R {
                    let decoded = P::group(&weight[r][block * P::BYTES..(block + 1) * P::BYTES], group);
                    for m in 0..M {
                        lanes[r][m] = add::<P, FMA>(lanes[r][m], &decoded, &x[m][at * GROUP..(at + 1) * GROUP]);
                        offsets[r][m] = fused::<FMA>(decoded.offset, sums[m][at], offsets[r][m]);
                    }
                }
            }
        }
        for r in 0..R {
            for m in 0..M {
                // SAFETY: the column is in the range of this call, which no other thread writes, and the row is in the result.
                unsafe { self.to.get().add((row + m) * out + column + r).write(total(lanes[r][m]) + offsets[r][m]) };
            }
        }
    }
}

/// `lanes` plus the products of a group. Takes and returns values, because sums behind a reference do not stay in registers.
#[inline(always)]
fn add<P: QuantizedBlock, const FMA: bool>(mut lanes: [f32; LANES], group: &Group, x: &[f32]) -> [f32; LANES] {
    let (mut first, mut second) = ([0.0; LANES], [0.0; LANES]);
    first.copy_from_slice(&x[..LANES]);
    second.copy_from_slice(&x[LANES..GROUP]);
    if P::ONE_SCALE {
        for i in 0..LANES {
            first[i] *= group.integers[0][i];
        }
        for i in 0..LANES {
            first[i] = fused::<FMA>(group.integers[1][i], second[i], first[i]);
        }
        for i in 0..LANES {
            lanes[i] = fused::<FMA>(group.scales[0], first[i], lanes[i]);
        }
        return lanes;
    }
    for i in 0..LANES {
        lanes[i] = fused::<FMA>(group.scales[0], group.integers[0][i] * first[i], lanes[i]);
    }
    for i in 0..LANES {
        lanes[i] = fused::<FMA>(group.scales[1], group.integers[1][i] * second[i], lanes[i]);
    }
    lanes
}

#[inline(always)]
fn fused<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// The sum of all lanes, pairwise.
#[inline(always)]
fn total(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{InstructionSet, run_on};
    use candle_core::Device;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    /// Where the half floats of a block begin: random bits there would be NaN.
    fn halves(block: BlockType) -> &'static [usize] {
        match block {
            BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q8_1 | BlockType::Q4K | BlockType::Q5K => &[0, 2],
            BlockType::Q2K => &[80, 82],
            BlockType::Q3K => &[108],
            BlockType::Q6K => &[208],
            BlockType::Q8K => &[],
            _ => &[0],
        }
    }

    fn random_blocks(rng: &mut StdRng, block: BlockType, shape: (usize, usize)) -> Tensor {
        let mut bytes: Vec<u8> = (0..shape.0 * shape.1 * block.bytes()).map(|_| rng.random()).collect();
        for one in bytes.chunks_mut(block.bytes()) {
            for &at in halves(block) {
                // Normal and subnormal numbers of both signs.
                let bits: u16 = rng.random_range(0..0x2c00) | if rng.random() { 0x8000 } else { 0 };
                one[at..at + 2].copy_from_slice(&bits.to_le_bytes());
            }
            if block == BlockType::Q8K {
                one[..4].copy_from_slice(&0.01f32.to_le_bytes());
            }
        }
        Tensor::from_vec(bytes, (shape.0, shape.1, block.bytes()), &Device::Cpu).unwrap()
    }

    fn random_rows(rng: &mut StdRng, rows: usize, blocks: usize, elements: usize) -> Tensor {
        let values: Vec<f32> = (0..rows * blocks * elements).map(|_| rng.random_range(-1.0..1.0)).collect();
        Tensor::from_vec(values, (rows, blocks, elements), &Device::Cpu).unwrap()
    }

    #[test]
    fn products_are_those_of_the_expanded_matrix() {
        let mut rng = StdRng::seed_from_u64(1);
        for &block in BlockType::ALL {
            for (rows, out) in [(1, 9), (2, 4), (3, 5), (4, 1), (7, 6), (17, 300), (0, 3), (1, 0)] {
                let blocks = 3;
                let weight = random_blocks(&mut rng, block, (out, blocks));
                let x = random_rows(&mut rng, rows, blocks, block.elements());
                let found = quantized_matmul(&x, &weight).unwrap();
                assert_eq!(found.dims(), [rows, out]);
                let columns = blocks * block.elements();
                let expanded = dequantize(&weight).unwrap().reshape((out, columns)).unwrap();
                let (w, x) =
                    (expanded.to_vec2::<f32>().unwrap(), x.reshape((rows, columns)).unwrap().to_vec2::<f32>().unwrap());
                let found = found.to_vec2::<f32>().unwrap();
                for (m, x) in x.iter().enumerate() {
                    for (n, w) in w.iter().enumerate() {
                        let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                        let (sum, size) = terms.fold((0.0, 1e-6), |(sum, size), term| (sum + term, size + term.abs()));
                        let error = (f64::from(found[m][n]) - sum).abs();
                        // Offsets are multiplied by sums, which are rounded at the size of the elements before they cancel.
                        assert!(error <= 2e-5 * size, "{block} {rows} x {out}: {} instead of {sum}", found[m][n]);
                    }
                }
            }
        }
    }

    #[test]
    fn bits_are_the_same_on_all_vector_instructions_and_threads() {
        let mut rng = StdRng::seed_from_u64(2);
        let (rows, out, blocks) = (3, 700, 16);
        let weight = random_blocks(&mut rng, BlockType::Q4_1, (out, blocks));
        let x = random_rows(&mut rng, rows, blocks, 32);
        let pool = |threads: usize| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let one = pool(1).install(|| quantized_matmul(&x, &weight).unwrap()).to_vec2::<f32>().unwrap();
        assert_eq!(pool(3).install(|| quantized_matmul(&x, &weight).unwrap()).to_vec2::<f32>().unwrap(), one);
        let x = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let weight = weight.flatten_all().unwrap().to_vec1::<u8>().unwrap();
        let (columns, sums) = (blocks * 32, group_sums(&x));
        let mut fused: Vec<Vec<f32>> = Vec::new();
        for (_, set) in InstructionSet::available() {
            let mut result = vec![0.0; rows * out];
            let product = QuantizedProduct { x: &x, sums: &sums, weight: &weight, rows, columns, out };
            let to = SharedPtr::new(result.as_mut_ptr());
            run_on(*set, OutputRange::<Q4_1> { product, range: 0..out, to, blocks: PhantomData });
            if *set != InstructionSet::Baseline {
                fused.push(result);
            }
        }
        assert!(fused.windows(2).all(|pair| pair[0] == pair[1]));
    }

    #[test]
    fn operands_of_other_shapes_are_refused() {
        let weight = Tensor::zeros((4, 2, 34), DType::U8, &Device::Cpu).unwrap();
        for x in [(1, 2, 16), (1, 3, 32)] {
            let x = Tensor::zeros(x, DType::F32, &Device::Cpu).unwrap();
            assert!(quantized_matmul(&x, &weight).is_err());
        }
        let x = Tensor::zeros((1, 2, 32), DType::F64, &Device::Cpu).unwrap();
        assert!(quantized_matmul(&x, &weight).is_err());
        assert!(dequantize(&Tensor::zeros((4, 33), DType::U8, &Device::Cpu).unwrap()).is_err());
        assert!(dequantize(&Tensor::zeros((4, 34), DType::U32, &Device::Cpu).unwrap()).is_err());
        // An infinite scale stays infinite, as in an expanded matrix.
        let mut bytes = vec![1u8; 34];
        bytes[..2].copy_from_slice(&0x7c00u16.to_le_bytes());
        let weight = Tensor::from_vec(bytes, (1, 1, 34), &Device::Cpu).unwrap();
        let x = Tensor::ones((1, 1, 32), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(quantized_matmul(&x, &weight).unwrap().to_vec2::<f32>().unwrap(), [[f32::INFINITY]]);
    }
}
