//! What happens to a block of scores between the two products: soft cap, masks, and dropout.
//!
//! A block has a row per key, whose elements belong to the queries of a [`QueryLanes`].

use std::ops::Range;

use super::block_mask::Seen;
use super::float::AttentionFloat;
use super::problem::{AttentionDropout, Mask, Problem};
use crate::random::{RandomDraw, choice_bound, is_chosen};

/// Queries that are computed together, one per element of a vector.
pub(super) struct QueryLanes<const L: usize> {
    /// Queries in use; the remaining lanes repeat the last of them.
    pub(super) count: usize,
    /// Index of each query's head among all query heads.
    pub(super) head: [usize; L],
    pub(super) query: [usize; L],
    /// Keys that at least one query may see.
    pub(super) seen: Range<usize>,
    key_head: usize,
    /// Indices of all these queries.
    queries: Range<usize>,
    first: [i32; L],
    end: [i32; L],
    /// Position in all scores of the first key of each query, for dropout.
    position: [u64; L],
}

impl<const L: usize> QueryLanes<L> {
    /// The queries of `rows`, where row `r` is query `r / groups` of query head `r % groups` of a key head.
    #[inline(always)]
    pub(super) fn new(problem: &Problem<'_>, key_head: usize, rows: Range<usize>) -> Self {
        let queries = rows.start / problem.groups..(rows.end - 1) / problem.groups + 1;
        let (mut lanes, last) = (
            QueryLanes {
                count: rows.len(),
                head: [0; L],
                query: [0; L],
                seen: problem.seen_by_any(queries.clone()),
                key_head,
                queries,
                first: [0; L],
                end: [0; L],
                position: [0; L],
            },
            rows.end - 1,
        );
        for l in 0..L {
            let row = (rows.start + l).min(last);
            let (query, head) = (row / problem.groups, key_head * problem.groups + row % problem.groups);
            let seen = problem.seen_by(query);
            (lanes.query[l], lanes.head[l]) = (query, head);
            (lanes.first[l], lanes.end[l]) = (seen.start as i32, seen.end as i32);
            if let Some(dropout) = &problem.args.dropout {
                let row = dropout.heads[head].wrapping_mul(dropout.queries as u64) + problem.args.queries[query] as u64;
                lanes.position[l] = row.wrapping_mul(dropout.keys as u64);
            }
        }
        lanes
    }

    /// Whether a query of these may see one of the keys: if not, they can be left out.
    #[inline(always)]
    pub(super) fn sees_any(&self, problem: &Problem<'_>, keys: &Range<usize>) -> bool {
        !keys.is_empty() && self.seen_in_blocks(problem, keys) != Seen::None
    }

    #[inline(always)]
    fn seen_in_blocks(&self, problem: &Problem<'_>, keys: &Range<usize>) -> Seen {
        match problem.args.blocks {
            Some(_) => problem.seen_in_blocks(self.key_head, self.queries.clone(), keys.clone()),
            None => Seen::All,
        }
    }

    /// Whether a query of these does not see one of the keys.
    #[inline(always)]
    fn bounded(&self, keys: &Range<usize>) -> bool {
        (0..L).any(|l| self.first[l] > keys.start as i32 || self.end[l] < keys.end as i32)
    }
}

/// Applies the soft cap and the masks to the scores of `keys`, whose rows are `row` elements apart.
///
/// If there is a soft cap, its slope at every element is written to `slope`, unless that is null.
///
/// # Safety
/// The blocks have a row of `L` elements for each key.
#[inline(always)]
pub(super) unsafe fn mask_scores<F: AttentionFloat, const FMA: bool, const L: usize>(
    problem: &Problem<'_>,
    lanes: &QueryLanes<L>,
    keys: Range<usize>,
    scores: *mut F,
    slope: *mut F,
    row: usize,
) {
    // SAFETY: the caller's promise.
    let line = |first: *mut F, j: usize| unsafe { &mut *first.add(j * row).cast::<[F; L]>() };
    if let Some(cap) = problem.args.soft_cap {
        let (cap, inverse) = (F::narrow(cap), F::narrow(1.0 / cap));
        for j in 0..keys.len() {
            let scores = line(scores, j);
            let bent: [F; L] = scores.map(|score| (score * inverse).hyperbolic_tangent::<FMA>());
            *scores = bent.map(|bent| bent * cap);
            if !slope.is_null() {
                *line(slope, j) = bent.map(|bent| F::ONE - bent * bent);
            }
        }
    }
    if let Some(mask) = &problem.mask {
        add_mask(mask, lanes, keys.clone(), |j| line(scores, j));
    }
    if lanes.seen_in_blocks(problem, &keys) != Seen::All {
        for l in 0..L {
            let Some(row) = problem.mask_row(lanes.head[l], lanes.query[l]) else { continue };
            for (j, &key) in problem.args.keys[keys.clone()].iter().enumerate() {
                if !row.sees(key) {
                    line(scores, j)[l] = F::NEG_INFINITY;
                }
            }
        }
    }
    if lanes.bounded(&keys) {
        for j in 0..keys.len() {
            let (key, scores) = ((keys.start + j) as i32, line(scores, j));
            for (l, score) in scores.iter_mut().enumerate() {
                let seen = lanes.first[l] <= key && key < lanes.end[l];
                *score = if seen { *score } else { F::NEG_INFINITY };
            }
        }
    }
}

/// Keys whose part of a mask is converted at a time.
const MASKED_KEYS: usize = 64;

#[inline(always)]
fn add_mask<'a, F: AttentionFloat, const L: usize>(
    mask: &Mask,
    lanes: &QueryLanes<L>,
    keys: Range<usize>,
    line: impl Fn(usize) -> &'a mut [F; L],
) {
    let boolean = |x: F| if x == F::ZERO { F::NEG_INFINITY } else { F::ZERO };
    let mut buffer = [F::ZERO; MASKED_KEYS];
    for start in keys.clone().step_by(MASKED_KEYS) {
        let part = start..(start + MASKED_KEYS).min(keys.end);
        for l in 0..if mask.shared { 1 } else { lanes.count } {
            // SAFETY: head, query and keys are inside the scores, to which the mask broadcasts; the buffer has room.
            unsafe { mask.operand.load_part(lanes.head[l], lanes.query[l], part.clone(), &mut buffer) };
            for (j, &x) in buffer[..part.len()].iter().enumerate() {
                let added = if mask.boolean { boolean(x) } else { x };
                let scores = line(part.start - keys.start + j);
                if mask.shared {
                    scores.iter_mut().for_each(|score| *score += added);
                } else {
                    scores[l] += added;
                }
            }
        }
    }
}

/// Multiplies the elements of `keys` in a block by zero or by `1 / (1 - p)`.
///
/// # Safety
/// The block has a row of `L` elements for each key.
#[inline(always)]
pub(super) unsafe fn drop_out<F: AttentionFloat, const L: usize>(
    problem: &Problem<'_>,
    dropout: &AttentionDropout<'_>,
    lanes: &QueryLanes<L>,
    keys: Range<usize>,
    blocks: &[*mut F],
    row: usize,
) {
    let (bound, draw) = (choice_bound(1.0 - dropout.p), RandomDraw { seed: dropout.seed, draw: dropout.draw });
    let factor = F::narrow(1.0 / (1.0 - dropout.p));
    for (j, &key) in problem.args.keys[keys].iter().enumerate() {
        let mut factors = [F::ZERO; L];
        for (to, position) in factors.iter_mut().zip(&lanes.position) {
            let is_kept = is_chosen(draw, position.wrapping_add(key as u64), bound);
            *to = if is_kept { factor } else { F::ZERO };
        }
        for block in blocks {
            // SAFETY: the caller's promise.
            let line = unsafe { &mut *block.add(j * row).cast::<[F; L]>() };
            for l in 0..L {
                line[l] *= factors[l];
            }
        }
    }
}
