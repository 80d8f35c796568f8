//! The forward pass: an online softmax over blocks of keys.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::float::AttentionFloat;
use super::problem::{AttentionArgs, Locked, Operand, Problem, store_row};
use super::scores::{QueryLanes, drop_out, mask_scores};
use super::tile::{Factor, product, transpose};
use crate::error::Result;
use crate::parallel::{SharedPtr, over_ranges};
use crate::simd::{self, Kernel};
use crate::uninit_buffer::UninitBuffer;

/// Keys per block. Their scores with a vector of queries (16 KiB in f32) stay in the first-level cache, and they
/// themselves in the second-level cache while several vectors of queries visit them. Blocks of 256 are 4% slower in the
/// product with the values.
const KEYS: usize = 128;

/// Rows (a query of one head each) per item: as many visit a block of keys while it is in the cache.
const ROWS: usize = 128;

/// Attention of local queries to local keys: `softmax(q k^T * scale + mask) v`, and the logarithm of the sum of exponentials of
/// every query's scores.
///
/// Queries are `[batch.., key heads, queries, size]`, or `[batch.., key heads, groups, queries, size]` if several query heads
/// share a key head; keys and values are `[batch.., key heads, keys, size]`. All have one floating-point type and any strides.
/// The output has the shape of the queries with the size of the values, in type `dtype`; the logarithms are f64 for f64 and
/// f32 otherwise. A query that sees no key has the output 0 and the logarithm -inf.
///
/// Uses the threads of the pool for large tensors. Memory beyond inputs and outputs does not grow with the lengths, except for
/// two numbers per query.
///
/// # Errors
/// If shapes or types do not fit, or memory does not suffice.
pub fn attention_forward(operands: [&Tensor; 3], dtype: DType, args: &AttentionArgs<'_>) -> Result<(Tensor, Tensor)> {
    let [out, logs, _] = attend(operands, dtype, args, Statistics::Logarithm)?;
    Ok((out, logs))
}

/// [`attention_forward`] over a part of the keys. Returns the maximum of every query's scores and the sum of exponentials of
/// its scores minus the maximum, in place of the logarithm: the logarithm of a large number would lose digits of the weight
/// that the part has among all parts. The maximum is -inf and the sum 0 where no key is seen.
///
/// # Errors
/// As `attention_forward`.
pub fn attention_part(operands: [&Tensor; 3], dtype: DType, args: &AttentionArgs<'_>) -> Result<[Tensor; 3]> {
    attend(operands, dtype, args, Statistics::MaximumAndSum)
}

/// What is returned in addition to the output.
#[derive(Clone, Copy, PartialEq)]
enum Statistics {
    Logarithm,
    MaximumAndSum,
}

fn attend(
    [q, k, v]: [&Tensor; 3],
    dtype: DType,
    args: &AttentionArgs<'_>,
    statistics: Statistics,
) -> Result<[Tensor; 3]> {
    let locked = [Locked::new(q)?, Locked::new(k)?, Locked::new(v)?];
    let mask = args.mask.map(Locked::new).transpose()?;
    let problem = Problem::new([&locked[0], &locked[1], &locked[2]], mask.as_ref(), args)?;
    // The queries that share keys are the lanes of a vector. While a model generates text there are as many as query heads share a
    // key head: lanes beyond those would compute nothing.
    let rows = problem.groups * problem.queries;
    if q.dtype() != DType::F64 && rows <= 8 {
        return match rows {
            0..=4 => forward::<f32, 8, 4>(&problem, q.dims(), dtype, statistics),
            _ => forward::<f32, 8, 8>(&problem, q.dims(), dtype, statistics),
        };
    }
    // Eight rows of two vectors each fill half of the registers of AVX-512; AVX2 has half as many, half as long.
    match (q.dtype() == DType::F64, simd::has_wide_registers()) {
        (true, true) => forward::<f64, 8, 16>(&problem, q.dims(), dtype, statistics),
        (true, false) => forward::<f64, 4, 8>(&problem, q.dims(), dtype, statistics),
        (false, true) => forward::<f32, 8, 32>(&problem, q.dims(), dtype, statistics),
        (false, false) => forward::<f32, 4, 16>(&problem, q.dims(), dtype, statistics),
    }
}

fn forward<F: AttentionFloat, const MR: usize, const L: usize>(
    problem: &Problem<'_>,
    shape: &[usize],
    dtype: DType,
    statistics: Statistics,
) -> Result<[Tensor; 3]> {
    let rows = &shape[..shape.len() - 1];
    let count: usize = rows.iter().product();
    let sums_shape: &[usize] = if statistics == Statistics::MaximumAndSum { rows } else { &[0] };
    let out = UninitBuffer::new(dtype, count * problem.value_size)?;
    let logs = UninitBuffer::new(F::DTYPE, count)?;
    let sums = UninitBuffer::new(F::DTYPE, sums_shape.iter().product())?;
    let targets = ForwardTargets {
        out: SharedPtr::new(out.first()),
        logs: SharedPtr::new(logs.first().cast::<F>()),
        sums: (statistics == Statistics::MaximumAndSum).then(|| SharedPtr::new(sums.first().cast::<F>())),
    };
    if count > 0 {
        let block = (ROWS / problem.groups).clamp(1, problem.queries);
        let blocks = problem.queries.div_ceil(block);
        let items = problem.heads * blocks;
        // Two products, 20 multiplications of which take about as long as one unit of cost.
        over_ranges(items, problem.product_size() / 10 / items, 1, |items| {
            let scratch = ForwardScratch::<F>::new(problem, block, L);
            simd::run(ForwardItems::<F, MR, L> { problem, dtype, items, block, targets, scratch });
        });
    }
    // SAFETY: the items are all queries of all heads, and each writes its output and statistics.
    unsafe { Ok([out.finish([rows, &[problem.value_size]].concat()), logs.finish(rows), sums.finish(sums_shape)]) }
}

/// Where results are written.
#[derive(Clone, Copy)]
struct ForwardTargets<F> {
    out: SharedPtr<u8>,
    /// Logarithms; or maxima, if there are sums.
    logs: SharedPtr<F>,
    sums: Option<SharedPtr<F>>,
}

/// Memory of one thread.
struct ForwardScratch<F> {
    /// Rows of queries, or of outputs.
    rows: Vec<F>,
    /// Transposed queries and outputs of each vector of queries, its maxima and its sums.
    queries: Vec<F>,
    outputs: Vec<F>,
    highest: Vec<F>,
    sums: Vec<F>,
    scores: Vec<F>,
    keys: Vec<F>,
    values: Vec<F>,
}

impl<F: AttentionFloat> ForwardScratch<F> {
    fn new(problem: &Problem<'_>, block: usize, lanes: usize) -> Self {
        let rows = (block * problem.groups).next_multiple_of(lanes);
        let keys = KEYS.min(problem.keys);
        let zeros = |count: usize| vec![F::ZERO; count];
        let copied = |operand: &Operand, size: usize| match operand.in_place::<F>(0) {
            Some(_) => Vec::new(),
            None => zeros(keys * size),
        };
        ForwardScratch {
            rows: zeros(lanes * problem.size.max(problem.value_size)),
            queries: zeros(rows * problem.size),
            outputs: zeros(rows * problem.value_size),
            highest: zeros(rows),
            sums: zeros(rows),
            scores: zeros(keys * lanes),
            keys: copied(&problem.k, problem.size),
            values: copied(&problem.v, problem.value_size),
        }
    }
}

/// Some blocks of queries of some key heads.
struct ForwardItems<'a, F, const MR: usize, const L: usize> {
    problem: &'a Problem<'a>,
    dtype: DType,
    items: Range<usize>,
    /// Queries per item.
    block: usize,
    targets: ForwardTargets<F>,
    scratch: ForwardScratch<F>,
}

impl<F: AttentionFloat, const MR: usize, const L: usize> Kernel for ForwardItems<'_, F, MR, L> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(mut self) {
        let problem = self.problem;
        let blocks = problem.queries.div_ceil(self.block);
        for item in self.items.clone() {
            let (head, first) = (item / blocks, item % blocks * self.block);
            self.attend::<FMA>(head, first..(first + self.block).min(problem.queries));
        }
    }
}

impl<F: AttentionFloat, const MR: usize, const L: usize> ForwardItems<'_, F, MR, L> {
    /// Computes the outputs of some queries of all query heads that share a key head.
    #[inline(always)]
    fn attend<const FMA: bool>(&mut self, head: usize, queries: Range<usize>) {
        let (problem, seen) = (self.problem, self.problem.seen_by_any(queries.clone()));
        let rows = queries.start * problem.groups..queries.end * problem.groups;
        let starts = rows.clone().step_by(L);
        let tiles: Vec<QueryLanes<L>> =
            starts.map(|first| QueryLanes::new(problem, head, first..(first + L).min(rows.end))).collect();
        tiles.iter().enumerate().for_each(|(tile, lanes)| self.pack_queries(tile, lanes));
        let mut start = seen.start;
        while start < seen.end {
            let keys = start..(start + KEYS).min(seen.end);
            start = keys.end;
            let part = |lanes: &QueryLanes<L>| keys.start.max(lanes.seen.start)..keys.end.min(lanes.seen.end);
            let is_visited = |lanes: &QueryLanes<L>| lanes.sees_any(problem, &part(lanes));
            if !tiles.iter().any(is_visited) {
                continue;
            }
            let (k, v) = self.keys_and_values(head, keys.clone());
            for (tile, lanes) in tiles.iter().enumerate().filter(|(_, lanes)| is_visited(lanes)) {
                self.visit::<FMA>(tile, lanes, part(lanes), keys.start, k, v);
            }
        }
        tiles.iter().enumerate().for_each(|(tile, lanes)| self.finish(tile, lanes));
    }

    /// Transposes the queries of a tile, times the scale, and clears its sums.
    #[inline(always)]
    fn pack_queries(&mut self, tile: usize, lanes: &QueryLanes<L>) {
        let (problem, scratch) = (self.problem, &mut self.scratch);
        let size = problem.size;
        for l in 0..lanes.count {
            let (row, to) = (lanes.query[l], scratch.rows[l * size..].as_mut_ptr());
            // SAFETY: the queries are inside the tensor, and there is room for a tile of them.
            unsafe { problem.q.load(lanes.head[l], row..row + 1, size, to, size) };
        }
        let to = scratch.queries[tile * L * size..].as_mut_ptr();
        // SAFETY: as above.
        unsafe { transpose(lanes.count, size, scratch.rows.as_ptr(), size, problem.scale(), to, L) };
        scratch.outputs[tile * L * problem.value_size..(tile + 1) * L * problem.value_size].fill(F::ZERO);
        scratch.highest[tile * L..(tile + 1) * L].fill(F::NEG_INFINITY);
        scratch.sums[tile * L..(tile + 1) * L].fill(F::ZERO);
    }

    /// The keys and values of a block, converted if they cannot be read in place.
    #[inline(always)]
    fn keys_and_values(&mut self, head: usize, keys: Range<usize>) -> (Factor<F>, Factor<F>) {
        let problem = self.problem;
        // SAFETY: the keys are inside of the tensors, and the buffers have room for a block.
        unsafe {
            (
                rows_of(&problem.k, head, keys.clone(), problem.size, &mut self.scratch.keys),
                rows_of(&problem.v, head, keys, problem.value_size, &mut self.scratch.values),
            )
        }
    }

    /// Adds some keys to the softmax of a tile. `k` and `v` begin at key `origin`.
    #[inline(always)]
    fn visit<const FMA: bool>(
        &mut self,
        tile: usize,
        lanes: &QueryLanes<L>,
        keys: Range<usize>,
        origin: usize,
        k: Factor<F>,
        v: Factor<F>,
    ) {
        let (problem, scratch) = (self.problem, &mut self.scratch);
        let (count, size, value_size) = (keys.len(), problem.size, problem.value_size);
        let scores = scratch.scores.as_mut_ptr();
        let (queries, outputs) = (&scratch.queries[tile * L * size..], &mut scratch.outputs[tile * L * value_size..]);
        // SAFETY: the block of scores has a row of a vector for each key; the factors begin at `origin`.
        unsafe {
            let k = Factor { first: k.first.add((keys.start - origin) * k.row), ..k };
            product::<F, FMA, MR, L, true>(count, size, L, k, queries.as_ptr(), L, scores, L);
            mask_scores::<F, FMA, L>(problem, lanes, keys.clone(), scores, std::ptr::null_mut(), L);
        }
        let highest = scratch.highest[tile * L..].first_chunk_mut::<L>().expect("a vector per tile");
        let sums = scratch.sums[tile * L..].first_chunk_mut::<L>().expect("a vector per tile");
        let (block, _) = scratch.scores[..count * L].as_chunks_mut::<L>();
        let mut maxima = *highest;
        for line in &*block {
            for l in 0..L {
                maxima[l] = if line[l] > maxima[l] { line[l] } else { maxima[l] };
            }
        }
        // Without a key so far everything is masked: any finite number gives exponentials of zero.
        let shift = maxima.map(|m| if m == F::NEG_INFINITY { F::ZERO } else { m });
        let mut fresh = [F::ZERO; L];
        for line in &mut *block {
            for l in 0..L {
                line[l] = (line[l] - shift[l]).exponential::<FMA>();
                fresh[l] += line[l];
            }
        }
        let mut rescaled = false;
        let mut factors = [F::ONE; L];
        for l in 0..L {
            factors[l] = (highest[l] - shift[l]).exponential::<FMA>();
            rescaled |= highest[l] != maxima[l];
            sums[l] = sums[l].multiply_add::<FMA>(factors[l], fresh[l]);
        }
        *highest = maxima;
        if rescaled {
            let (outputs, _) = outputs[..value_size * L].as_chunks_mut::<L>();
            for line in outputs {
                for l in 0..L {
                    line[l] *= factors[l];
                }
            }
        }
        // SAFETY: as above; the sum has a row of a vector for each element of a value.
        unsafe {
            if let Some(dropout) = &problem.args.dropout {
                drop_out(problem, dropout, lanes, keys.clone(), &[scores], L);
            }
            let v = Factor { first: v.first.add((keys.start - origin) * v.row), row: v.column, column: v.row };
            product::<F, FMA, MR, L, false>(value_size, count, L, v, scores, L, outputs.as_mut_ptr(), L);
        }
    }

    /// Writes the outputs and logarithms of a tile.
    #[inline(always)]
    fn finish(&mut self, tile: usize, lanes: &QueryLanes<L>) {
        let (problem, scratch) = (self.problem, &mut self.scratch);
        let (size, queries) = (problem.value_size, problem.queries);
        let sums = &scratch.sums[tile * L..(tile + 1) * L];
        let outputs = &mut scratch.outputs[tile * L * size..(tile + 1) * L * size];
        let factors: [F; L] = std::array::from_fn(|l| if sums[l] == F::ZERO { F::ZERO } else { F::ONE / sums[l] });
        for line in outputs.as_chunks_mut::<L>().0 {
            for l in 0..L {
                line[l] *= factors[l];
            }
        }
        // SAFETY: a row of the output for each query of the tile, which no other item has.
        unsafe {
            transpose(size, lanes.count, outputs.as_ptr(), L, F::ONE, scratch.rows.as_mut_ptr(), size);
            for l in 0..lanes.count {
                let row = lanes.head[l] * queries + lanes.query[l];
                let to = self.targets.out.get().add(row * size * self.dtype.size_in_bytes());
                store_row(self.dtype, &scratch.rows[l * size..(l + 1) * size], to);
                let (sum, highest) = (sums[l], scratch.highest[tile * L + l]);
                let log = match self.targets.sums {
                    Some(sums) => {
                        sums.get().add(row).write(sum);
                        highest
                    }
                    None if sum == F::ZERO => F::NEG_INFINITY,
                    None => F::narrow(highest.wide() + sum.wide().ln()),
                };
                self.targets.logs.get().add(row).write(log);
            }
        }
    }
}

/// Rows of an operand, in place or converted into a buffer.
///
/// # Safety
/// The rows are inside the tensor, and the buffer has room for them if they cannot be read in place.
#[inline(always)]
pub(super) unsafe fn rows_of<F: AttentionFloat>(
    operand: &Operand,
    head: usize,
    rows: Range<usize>,
    width: usize,
    buffer: &mut [F],
) -> Factor<F> {
    // SAFETY: the caller's promise.
    unsafe {
        match operand.in_place::<F>(head) {
            Some((first, row)) => Factor { first: first.add(rows.start * row), row, column: 1 },
            None => {
                operand.load(head, rows, width, buffer.as_mut_ptr(), width);
                Factor { first: buffer.as_ptr(), row: width, column: 1 }
            }
        }
    }
}
