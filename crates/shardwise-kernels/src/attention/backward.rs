//! The backward pass: scores are computed again block by block.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::float::AttentionFloat;
use super::forward::rows_of;
use super::problem::{AttentionArgs, Locked, Operand, Problem, store_row};
use super::scores::{QueryLanes, drop_out, mask_scores};
use super::tile::{Factor, product, transpose};
use crate::error::Result;
use crate::parallel::{SharedPtr, over_ranges};
use crate::simd::{self, Kernel};
use crate::uninit_buffer::UninitBuffer;

/// Keys per block, as in the forward pass: probabilities and gradients of a block are 64 KiB in f32.
const KEYS: usize = 128;

/// Vectors of queries per block: the sums of a key's gradients stay in registers for as many queries.
const TILES: usize = 2;

/// Keys per item if the gradients of keys and of queries are computed in separate passes. A multiple of [`KEYS`].
const KEYS_PER_ITEM: usize = 2 * KEYS;

/// Gradients of the inputs of attention, see [`attention_backward`].
pub struct AttentionGradients {
    /// Gradient of the queries.
    pub queries: Tensor,
    /// Gradient of the keys.
    pub keys: Tensor,
    /// Gradient of the values.
    pub values: Tensor,
}

/// The gradients of attention, for the gradient `g` of its output.
///
/// `logs` are the logarithms that [`attention_forward`](super::attention_forward) returned, merged over all keys if each rank
/// has some of them. `dots` are, per query, the dot product of the output and its gradient, minus the gradient of the
/// logarithm. Both are f64 for f64 and f32 otherwise, with the shape of the queries without its last dimension.
/// Gradients have the types `dtypes`, in the order queries, keys, values.
///
/// Uses the threads of the pool for large tensors, and gives the same bits for any number of them.
///
/// # Errors
/// If shapes or types do not fit, or memory does not suffice.
pub fn attention_backward(
    [q, k, v]: [&Tensor; 3],
    g: &Tensor,
    [logs, dots]: [&Tensor; 2],
    dtypes: [DType; 3],
    args: &AttentionArgs<'_>,
) -> Result<AttentionGradients> {
    let locked = [Locked::new(q)?, Locked::new(k)?, Locked::new(v)?];
    let (g, mask) = (Locked::new(g)?, args.mask.map(Locked::new).transpose()?);
    // Rows of one element, so that they are read in the same way as vectors.
    let [logs, dots] = [logs.unsqueeze(logs.rank())?, dots.unsqueeze(dots.rank())?];
    let (logs, dots) = (Locked::new(&logs)?, Locked::new(&dots)?);
    let call = BackwardCall {
        problem: Problem::new([&locked[0], &locked[1], &locked[2]], mask.as_ref(), args)?,
        g: g.operand(),
        logs: logs.operand(),
        dots: dots.operand(),
        dtypes,
    };
    let shapes = [q.dims(), k.dims(), v.dims()];
    match (q.dtype() == DType::F64, simd::has_wide_registers()) {
        (true, true) => backward::<f64, 8, 16>(&call, shapes),
        (true, false) => backward::<f64, 4, 8>(&call, shapes),
        (false, true) => backward::<f32, 8, 32>(&call, shapes),
        (false, false) => backward::<f32, 4, 16>(&call, shapes),
    }
}

struct BackwardCall<'a> {
    problem: Problem<'a>,
    g: Operand,
    logs: Operand,
    dots: Operand,
    dtypes: [DType; 3],
}

/// Addresses of the gradients of queries, keys and values.
type Targets = [SharedPtr<u8>; 3];

fn backward<F: AttentionFloat, const MR: usize, const L: usize>(
    call: &BackwardCall<'_>,
    shapes: [&[usize]; 3],
) -> Result<AttentionGradients> {
    let problem = &call.problem;
    let memory = |i: usize| UninitBuffer::new(call.dtypes[i], shapes[i].iter().product());
    let (queries, keys, values) = (memory(0)?, memory(1)?, memory(2)?);
    let targets = [&queries, &keys, &values].map(|buffer| SharedPtr::new(buffer.first()));
    let run = |heads: Range<usize>, keys: Range<usize>, queries: Range<usize>, passes: Passes| {
        let scratch = BackwardScratch::<F>::new(call, keys.len(), L);
        simd::run(BackwardItems::<F, MR, L> { call, heads, keys, queries, passes, targets, scratch });
    };
    let (all_keys, all_queries) = (0..problem.keys, 0..problem.queries);
    let threads = match problem.product_size() < MIN_WORK_FOR_SEPARATE_PASSES {
        true => 1,
        false => rayon::current_num_threads(),
    };
    // Five products, 20 multiplications of which take about as long as one unit of cost.
    let cost = |items: usize| problem.product_size() / 4 / items.max(1);
    // One pass over the heads computes five products; two passes compute two of them twice, and divide heads.
    if 5 * problem.heads.div_ceil(threads) * threads <= 7 * problem.heads {
        over_ranges(problem.heads, cost(problem.heads), 1, |heads| {
            run(heads, all_keys.clone(), all_queries.clone(), Passes { keys: true, queries: true });
        });
    } else {
        let blocks = problem.keys.div_ceil(KEYS_PER_ITEM);
        over_ranges(problem.heads * blocks, cost(problem.heads * blocks), 1, |items| {
            for item in items {
                let (head, first) = (item / blocks, item % blocks * KEYS_PER_ITEM);
                let keys = first..(first + KEYS_PER_ITEM).min(problem.keys);
                run(head..head + 1, keys, all_queries.clone(), Passes { keys: true, queries: false });
            }
        });
        let block = queries_per_block(problem, L);
        let blocks = problem.queries.div_ceil(block);
        over_ranges(problem.heads * blocks, cost(problem.heads * blocks), 1, |items| {
            for item in items {
                let (head, first) = (item / blocks, item % blocks * block);
                let queries = first..(first + block).min(problem.queries);
                run(head..head + 1, all_keys.clone(), queries, Passes { keys: false, queries: true });
            }
        });
    }
    // SAFETY: every row of every gradient is written by the pass over its head, or over its keys or queries.
    unsafe {
        Ok(AttentionGradients {
            queries: queries.finish(shapes[0]),
            keys: keys.finish(shapes[1]),
            values: values.finish(shapes[2]),
        })
    }
}

/// Calls whose products have fewer multiplications do not ask for the number of threads.
const MIN_WORK_FOR_SEPARATE_PASSES: usize = 1 << 20;

/// Queries per block: as many as fill [`TILES`] vectors together with the heads of a group. A rank may have no query head.
fn queries_per_block(problem: &Problem<'_>, lanes: usize) -> usize {
    (TILES * lanes / problem.groups.max(1)).clamp(1, problem.queries.max(1))
}

/// Which gradients a pass computes: those of keys and values, those of queries, or both.
#[derive(Clone, Copy)]
struct Passes {
    keys: bool,
    queries: bool,
}

/// Memory of one thread. A block has `width` rows of queries, a multiple of the length of a vector.
struct BackwardScratch<F> {
    width: usize,
    /// Rows of queries, times the scale, and of gradients, padded to vectors.
    queries: Vec<F>,
    gradients: Vec<F>,
    /// Their transposes.
    queries_t: Vec<F>,
    gradients_t: Vec<F>,
    /// Sums of the gradients of the queries, transposed.
    sums_t: Vec<F>,
    logs: Vec<F>,
    dots: Vec<F>,
    /// Probabilities, gradients of the scores, and slopes of the soft cap of a block.
    scores: Vec<F>,
    slopes: Vec<F>,
    score_gradients: Vec<F>,
    /// Converted keys and values of a block.
    keys: Vec<F>,
    values: Vec<F>,
    /// Sums of the gradients of keys and values, if these are of another type.
    key_sums: Vec<F>,
    value_sums: Vec<F>,
}

impl<F: AttentionFloat> BackwardScratch<F> {
    fn new(call: &BackwardCall<'_>, keys: usize, lanes: usize) -> Self {
        let problem = &call.problem;
        let (size, value_size) = (problem.size, problem.value_size);
        let width = (queries_per_block(problem, lanes) * problem.groups).next_multiple_of(lanes);
        let block = KEYS.min(problem.keys);
        let zeros = |count: usize| vec![F::ZERO; count];
        let copied = |operand: &Operand, size: usize| match problem.heads == 0 || operand.in_place::<F>(0).is_some() {
            true => Vec::new(),
            false => zeros(block * size),
        };
        let summed = |dtype: DType, size: usize| if dtype == F::DTYPE { Vec::new() } else { zeros(keys * size) };
        BackwardScratch {
            width,
            queries: zeros(width * size.next_multiple_of(lanes)),
            gradients: zeros(width * value_size.next_multiple_of(lanes)),
            queries_t: zeros(width * size),
            gradients_t: zeros(width * value_size),
            sums_t: zeros(width * size),
            logs: zeros(width),
            dots: zeros(width),
            scores: zeros(block * width),
            slopes: if problem.args.soft_cap.is_some() { zeros(block * width) } else { Vec::new() },
            score_gradients: zeros(block * width),
            keys: copied(&problem.k, size),
            values: copied(&problem.v, value_size),
            key_sums: summed(call.dtypes[1], size),
            value_sums: summed(call.dtypes[2], value_size),
        }
    }
}

/// Some heads, with some of their keys and queries.
struct BackwardItems<'a, F, const MR: usize, const L: usize> {
    call: &'a BackwardCall<'a>,
    heads: Range<usize>,
    keys: Range<usize>,
    queries: Range<usize>,
    passes: Passes,
    targets: Targets,
    scratch: BackwardScratch<F>,
}

impl<F: AttentionFloat, const MR: usize, const L: usize> Kernel for BackwardItems<'_, F, MR, L> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(mut self) {
        let problem = &self.call.problem;
        let block = queries_per_block(problem, L);
        for head in self.heads.clone() {
            let sums = self.passes.keys.then(|| self.clear_sums(head));
            let mut first = self.queries.start;
            while first < self.queries.end {
                let queries = first..(first + block).min(self.queries.end);
                self.block_of_queries::<FMA>(head, queries.clone(), sums);
                first = queries.end;
            }
            if self.passes.keys {
                self.store_sums(head);
            }
        }
    }
}

impl<F: AttentionFloat, const MR: usize, const L: usize> BackwardItems<'_, F, MR, L> {
    /// Row `key` of the gradients of keys (1) or values (2) of a head.
    #[inline(always)]
    fn row_of_key(&self, which: usize, head: usize, key: usize) -> *mut u8 {
        let problem = &self.call.problem;
        let size = if which == 1 { problem.size } else { problem.value_size };
        let at = (head * problem.keys + key) * size * self.call.dtypes[which].size_in_bytes();
        // SAFETY: head and key are inside the gradient.
        unsafe { self.targets[which].get().add(at) }
    }

    /// Clears the sums of the gradients of keys and values, and returns their addresses, at the first key of this item.
    ///
    /// Gradients of the type in which sums are computed are summed where they are returned.
    #[inline(always)]
    fn clear_sums(&mut self, head: usize) -> [*mut F; 2] {
        let (problem, first) = (&self.call.problem, self.keys.start);
        let targets = [1, 2].map(|which| self.row_of_key(which, head, first).cast::<F>());
        let in_place = [1, 2].map(|which| self.call.dtypes[which] == F::DTYPE);
        let scratch = [self.scratch.key_sums.as_mut_ptr(), self.scratch.value_sums.as_mut_ptr()];
        let sizes = [problem.size, problem.value_size];
        std::array::from_fn(|i| {
            let sums = if in_place[i] { targets[i] } else { scratch[i] };
            // SAFETY: the gradient, or else the buffer, has a row for each key of this item.
            unsafe { (0..self.keys.len() * sizes[i]).for_each(|at| sums.add(at).write(F::ZERO)) };
            sums
        })
    }

    /// Converts sums that are not where they are returned.
    #[inline(always)]
    fn store_sums(&self, head: usize) {
        for (which, sums) in [(1, &self.scratch.key_sums), (2, &self.scratch.value_sums)] {
            if !sums.is_empty() {
                let to = self.row_of_key(which, head, self.keys.start);
                // SAFETY: the sums have the rows of the keys of this item.
                unsafe { F::store(self.call.dtypes[which], sums, to) };
            }
        }
    }

    /// Adds a block of queries to the gradients of the keys, and computes the gradients of the queries.
    #[inline(always)]
    fn block_of_queries<const FMA: bool>(&mut self, head: usize, queries: Range<usize>, sums: Option<[*mut F; 2]>) {
        let (problem, seen) = (&self.call.problem, self.call.problem.seen_by_any(queries.clone()));
        let rows = queries.start * problem.groups..queries.end * problem.groups;
        let starts = rows.clone().step_by(L);
        let tiles: Vec<QueryLanes<L>> =
            starts.map(|first| QueryLanes::new(problem, head, first..(first + L).min(rows.end))).collect();
        self.pack(&tiles, rows.len());
        let end = self.keys.end.min(seen.end);
        // Blocks begin at multiples of their size, whatever the queries see: so both kinds of passes have the same blocks.
        let mut start = self.keys.start.max(seen.start) / KEYS * KEYS;
        while start < end {
            let keys = start.max(seen.start).max(self.keys.start)..(start + KEYS).min(end);
            if tiles.iter().any(|lanes| lanes.sees_any(problem, &keys)) {
                self.visit::<FMA>(head, &tiles, rows.len(), keys, sums);
            }
            start += KEYS;
        }
        if self.passes.queries {
            self.store_query_gradients(&tiles);
        }
    }

    /// Loads queries, gradients and statistics of a block.
    #[inline(always)]
    fn pack(&mut self, tiles: &[QueryLanes<L>], rows: usize) {
        let (problem, scratch) = (&self.call.problem, &mut self.scratch);
        let (size, value_size, width) = (problem.size, problem.value_size, scratch.width);
        let (row, value_row) = (size.next_multiple_of(L), value_size.next_multiple_of(L));
        let scale = problem.scale::<F>();
        // QueryLanes without a query: an infinite logarithm gives probabilities of zero.
        scratch.logs.fill(F::INFINITY);
        scratch.dots.fill(F::ZERO);
        for (t, lanes) in tiles.iter().enumerate() {
            for l in 0..lanes.count {
                let (head, query, at) = (lanes.head[l], lanes.query[l], t * L + l);
                // SAFETY: the queries are inside the tensors, and there is room for a block of them.
                unsafe {
                    problem.q.load(head, query..query + 1, size, scratch.queries[at * row..].as_mut_ptr(), size);
                    let to = scratch.gradients[at * value_row..].as_mut_ptr();
                    self.call.g.load(head, query..query + 1, value_size, to, value_size);
                    self.call.logs.load(head, query..query + 1, 1, &raw mut scratch.logs[at], 1);
                    self.call.dots.load(head, query..query + 1, 1, &raw mut scratch.dots[at], 1);
                }
                // A query that sees no key has a logarithm of -inf, and probabilities of zero.
                if scratch.logs[at] == F::NEG_INFINITY {
                    scratch.logs[at] = F::INFINITY;
                }
                scratch.queries[at * row..at * row + size].iter_mut().for_each(|x| *x *= scale);
            }
        }
        // SAFETY: the transposes have a row of `width` elements for each element of a query or gradient.
        unsafe {
            transpose(rows, size, scratch.queries.as_ptr(), row, F::ONE, scratch.queries_t.as_mut_ptr(), width);
            let to = scratch.gradients_t.as_mut_ptr();
            transpose(rows, value_size, scratch.gradients.as_ptr(), value_row, F::ONE, to, width);
        }
        scratch.sums_t.fill(F::ZERO);
    }

    /// Computes the scores and their gradients of a block of queries and keys, and adds to the gradients of both.
    #[inline(always)]
    fn visit<const FMA: bool>(
        &mut self,
        head: usize,
        tiles: &[QueryLanes<L>],
        rows: usize,
        keys: Range<usize>,
        sums: Option<[*mut F; 2]>,
    ) {
        let (problem, scratch, first) = (&self.call.problem, &mut self.scratch, self.keys.start);
        let (size, value_size, width, count) = (problem.size, problem.value_size, scratch.width, keys.len());
        let used = tiles.len() * L;
        let (row, value_row) = (size.next_multiple_of(L), value_size.next_multiple_of(L));
        // SAFETY: the blocks of scores have a row of `width` elements for each key; rows of queries and gradients are padded
        // to vectors; the sums begin at key `first`.
        unsafe {
            let k = rows_of(&problem.k, head, keys.clone(), size, &mut scratch.keys);
            let v = rows_of(&problem.v, head, keys.clone(), value_size, &mut scratch.values);
            let (scores, gradients) = (scratch.scores.as_mut_ptr(), scratch.score_gradients.as_mut_ptr());
            let slopes = if scratch.slopes.is_empty() { std::ptr::null_mut() } else { scratch.slopes.as_mut_ptr() };
            product::<F, FMA, MR, L, true>(count, size, used, k, scratch.queries_t.as_ptr(), width, scores, width);
            let gradients_t = scratch.gradients_t.as_ptr();
            product::<F, FMA, MR, L, true>(count, value_size, used, v, gradients_t, width, gradients, width);
            for (t, lanes) in tiles.iter().enumerate() {
                let at = |block: *mut F| if block.is_null() { block } else { block.add(t * L) };
                let (scores, gradients, slopes) = (at(scores), at(gradients), at(slopes));
                mask_scores::<F, FMA, L>(problem, lanes, keys.clone(), scores, slopes, width);
                let logs = *scratch.logs[t * L..].first_chunk::<L>().expect("a number per row");
                let dots = *scratch.dots[t * L..].first_chunk::<L>().expect("a number per row");
                if let Some(dropout) = &problem.args.dropout {
                    drop_out(problem, dropout, lanes, keys.clone(), &[gradients], width);
                }
                for j in 0..count {
                    let p = &mut *scores.add(j * width).cast::<[F; L]>();
                    let g = &mut *gradients.add(j * width).cast::<[F; L]>();
                    for l in 0..L {
                        p[l] = (p[l] - logs[l]).exponential::<FMA>();
                        g[l] = p[l] * (g[l] - dots[l]);
                    }
                    if !slopes.is_null() {
                        let slopes = &*slopes.add(j * width).cast::<[F; L]>();
                        for l in 0..L {
                            g[l] *= slopes[l];
                        }
                    }
                }
                if let (Some(dropout), true) = (&problem.args.dropout, self.passes.keys) {
                    drop_out(problem, dropout, lanes, keys.clone(), &[scores], width);
                }
            }
            if let Some([key_sums, value_sums]) = sums {
                let block = |first| Factor { first, row: width, column: 1 };
                let to = value_sums.add((keys.start - first) * value_size);
                let (p, g) = (block(scores.cast_const()), block(gradients.cast_const()));
                let rows_g = scratch.gradients.as_ptr();
                product::<F, FMA, MR, L, false>(count, rows, value_size, p, rows_g, value_row, to, value_size);
                let to = key_sums.add((keys.start - first) * size);
                product::<F, FMA, MR, L, false>(count, rows, size, g, scratch.queries.as_ptr(), row, to, size);
            }
            if self.passes.queries {
                let k_t = Factor { first: k.first, row: k.column, column: k.row };
                let to = scratch.sums_t.as_mut_ptr();
                product::<F, FMA, MR, L, false>(size, count, used, k_t, gradients, width, to, width);
            }
        }
    }

    /// Writes the gradients of a block of queries.
    #[inline(always)]
    fn store_query_gradients(&mut self, tiles: &[QueryLanes<L>]) {
        let (problem, scratch) = (&self.call.problem, &mut self.scratch);
        let (size, scale) = (problem.size, problem.scale());
        for (t, lanes) in tiles.iter().enumerate() {
            // SAFETY: a row for each query, which no other item has; the rows of queries are no longer needed.
            unsafe {
                let (from, to) = (scratch.sums_t[t * L..].as_ptr(), scratch.queries.as_mut_ptr());
                transpose(size, lanes.count, from, scratch.width, scale, to, size);
                for l in 0..lanes.count {
                    let row = lanes.head[l] * problem.queries + lanes.query[l];
                    let to = self.targets[0].get().add(row * size * self.call.dtypes[0].size_in_bytes());
                    store_row(self.call.dtypes[0], &scratch.queries[l * size..(l + 1) * size], to);
                }
            }
        }
    }
}
