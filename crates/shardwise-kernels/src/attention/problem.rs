//! One call of attention: options, operands, and which keys a query sees.

use std::ops::Range;

use candle_core::{DType, Storage, Tensor};

use super::block_mask::{BlockMask, MaskRow, Seen};
use super::float::AttentionFloat;
use crate::convert::{Block, Compute};
use crate::error::{ErrorKind, Result};
use crate::parallel::SharedPtr;
use crate::{check_supported, first_element};

/// Options of [`attention_forward`](super::attention_forward) and [`attention_backward`](super::attention_backward).
///
/// Queries and keys may be parts of a longer sequence: their indices in it decide what is masked and dropped.
#[derive(Debug, Clone)]
pub struct AttentionArgs<'a> {
    /// Factor of the scores.
    pub scale: f64,
    /// Bounds the scores smoothly: `cap * tanh(score / cap)`, before masks.
    pub soft_cap: Option<f64>,
    /// Whether keys after the position of a query are masked.
    pub causal: bool,
    /// How many keys before its position a query sees; `None`: all of them.
    pub window: Option<usize>,
    /// The position of a query is its index plus this number; that of a key is its index.
    pub query_offset: isize,
    /// The indices of the local queries in the sequence, ascending.
    pub queries: &'a [usize],
    /// The indices of the local keys in the sequence, ascending.
    pub keys: &'a [usize],
    /// Added to the scores (floating point), or zero where a key is masked (u8). Broadcasts to the scores
    /// `[batch.., key heads, groups, queries, keys]`.
    pub mask: Option<&'a Tensor>,
    /// A mask by blocks of the whole sequence, in addition to the other masks.
    pub blocks: Option<AttentionBlocks<'a>>,
    /// Dropout of the probabilities.
    pub dropout: Option<AttentionDropout<'a>>,
}

/// A mask by blocks, and the heads of the local queries in it.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBlocks<'a> {
    /// The mask of the scores of all batches, heads, queries and keys.
    pub mask: &'a BlockMask,
    /// Per local query head, flattened with the batch dimensions, its index among all query heads of all batches.
    pub heads: &'a [u64],
    /// Number of query heads of a batch.
    pub heads_per_batch: usize,
}

impl AttentionBlocks<'_> {
    /// The batch and the head of the mask for a local query head.
    fn place(&self, head: usize) -> (usize, usize) {
        let (head, count) = (self.heads[head] as usize, self.heads_per_batch.max(1));
        self.mask.place(head / count, head % count)
    }
}

/// Dropout of probabilities: what is dropped depends on the position of an element in the scores alone.
#[derive(Debug, Clone, Copy)]
pub struct AttentionDropout<'a> {
    /// The probability that an element is dropped, below 1; elements that stay are divided by one minus it.
    pub p: f64,
    /// Key of Philox.
    pub seed: u64,
    /// Number of the draw, the upper half of the counter of Philox. The lower half is the position of an element.
    pub draw: u64,
    /// Per local head, flattened with the batch dimensions, its index among all heads of all batches.
    pub heads: &'a [u64],
    /// Number of queries of the whole sequence.
    pub queries: usize,
    /// Number of keys of the whole sequence.
    pub keys: usize,
}

/// A tensor of vectors: the offset of every head, and the strides of its rows and of the elements of a row.
pub(super) struct Operand {
    first: SharedPtr<u8>,
    dtype: DType,
    heads: Vec<usize>,
    row: usize,
    column: usize,
}

impl Operand {
    /// `storage` and the tensor must outlive the operand.
    pub(super) fn new(tensor: &Tensor, storage: &Storage, layout: &candle_core::Layout) -> Self {
        let (first, dtype) = first_element(storage, layout);
        let outer = tensor.rank() - 2;
        Operand {
            first: SharedPtr::new(first.cast_mut()),
            dtype,
            heads: offsets(&layout.dims()[..outer], &layout.stride()[..outer]),
            row: layout.stride()[outer],
            column: layout.stride()[outer + 1],
        }
    }

    /// The address of a row and the stride between rows, if they can be read as they are.
    #[inline(always)]
    pub(super) fn in_place<F: Compute>(&self, head: usize) -> Option<(*const F, usize)> {
        let direct = self.dtype == F::DTYPE && self.column == 1;
        // SAFETY: heads are inside the tensor.
        direct.then(|| (unsafe { self.first.get().cast::<F>().add(self.heads[head]).cast_const() }, self.row))
    }

    /// Converts rows to `F`, `width` elements each, into a buffer with rows of `stride` elements.
    ///
    /// # Safety
    /// The rows are inside the tensor, whose rows have `width` elements, and the buffer has room for them.
    #[inline(always)]
    pub(super) unsafe fn load<F: Compute>(
        &self,
        head: usize,
        rows: Range<usize>,
        width: usize,
        to: *mut F,
        stride: usize,
    ) {
        // Most rows have a few dozen elements: finding out how to convert them would take longer than copying.
        if let Some((first, pitch)) = self.in_place::<F>(head) {
            for (i, row) in rows.enumerate() {
                // SAFETY: the caller's promise.
                unsafe {
                    let (from, to) = (first.add(row * pitch), to.add(i * stride));
                    if width == 1 { to.write(*from) } else { std::ptr::copy_nonoverlapping(from, to, width) }
                }
            }
            return;
        }
        for (i, row) in rows.enumerate() {
            let block = Block { rows: 1, row_stride: 0, width, stride: self.column };
            let at = (self.heads[head] + row * self.row) * self.dtype.size_in_bytes();
            // SAFETY: the caller's promise.
            unsafe {
                let buffer = std::slice::from_raw_parts_mut(to.add(i * stride).cast(), width);
                F::load(self.dtype, self.first.get().add(at), block, buffer);
            }
        }
    }
}

impl Operand {
    /// Converts a part of one row to `F`.
    ///
    /// # Safety
    /// The part is inside the tensor, and the buffer has room for it.
    pub(super) unsafe fn load_part<F: Compute>(&self, head: usize, row: usize, part: Range<usize>, to: &mut [F]) {
        let block = Block { rows: 1, row_stride: 0, width: part.len(), stride: self.column };
        let at = (self.heads[head] + row * self.row + part.start * self.column) * self.dtype.size_in_bytes();
        // SAFETY: the caller's promise; what is written is initialised.
        unsafe {
            let buffer = std::slice::from_raw_parts_mut(to.as_mut_ptr().cast(), part.len());
            F::load(self.dtype, self.first.get().add(at), block, buffer);
        }
    }
}

/// Writes a row as elements of `dtype`; without a search for the conversion if there is none.
///
/// # Safety
/// As many elements of type `dtype` can be written at `to`.
#[inline(always)]
pub(super) unsafe fn store_row<F: Compute>(dtype: DType, row: &[F], to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype == F::DTYPE {
            true => std::ptr::copy_nonoverlapping(row.as_ptr(), to.cast(), row.len()),
            false => F::store(dtype, row, to),
        }
    }
}

/// A mask that broadcasts to the scores.
pub(super) struct Mask {
    pub(super) operand: Operand,
    /// Whether a zero masks a key, and everything else does nothing.
    pub(super) boolean: bool,
    /// Whether all queries of a key head have the same mask.
    pub(super) shared: bool,
}

/// The offset of every element of some dimensions, the last of which varies fastest.
fn offsets(dims: &[usize], strides: &[usize]) -> Vec<usize> {
    let mut found = vec![0];
    for (&n, &stride) in dims.iter().zip(strides) {
        found = found.iter().flat_map(|from| (0..n).map(move |i| from + i * stride)).collect();
    }
    found
}

/// The operands of one call with their sizes, and the range of keys that each query sees.
pub(super) struct Problem<'a> {
    pub(super) args: &'a AttentionArgs<'a>,
    pub(super) q: Operand,
    pub(super) k: Operand,
    pub(super) v: Operand,
    pub(super) mask: Option<Mask>,
    /// Key heads of all batches.
    pub(super) heads: usize,
    /// Query heads per key head.
    pub(super) groups: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// Elements of a query and of a key.
    pub(super) size: usize,
    /// Elements of a value.
    pub(super) value_size: usize,
    /// Per query the local keys that are neither too late nor too old. Both ends ascend.
    seen: Vec<(u32, u32)>,
}

/// The tensors of a call with their memory, which stays locked as long as this lives.
pub(super) struct Locked<'a> {
    pub(super) tensor: &'a Tensor,
    storage: parking_lot::RwLockReadGuard<'a, Storage>,
    layout: &'a candle_core::Layout,
}

impl<'a> Locked<'a> {
    pub(super) fn new(tensor: &'a Tensor) -> Result<Self> {
        check_supported(tensor)?;
        let (storage, layout) = tensor.storage_and_layout();
        Ok(Locked { tensor, storage, layout })
    }

    pub(super) fn operand(&self) -> Operand {
        Operand::new(self.tensor, &self.storage, self.layout)
    }
}

impl<'a> Problem<'a> {
    /// Checks the shapes: `[batch.., key heads, queries, size]` for the queries, with one more dimension after the key heads
    /// if several query heads share one, and `[batch.., key heads, keys, size]` for keys and values.
    pub(super) fn new(
        [q, k, v]: [&Locked<'_>; 3],
        mask: Option<&Locked<'_>>,
        args: &'a AttentionArgs<'a>,
    ) -> Result<Self> {
        let shapes = [q, k, v].map(|t| t.tensor.dims());
        let fits = || {
            let [[outer_q @ .., queries, size], [outer_k @ .., keys, key_size], [outer_v @ .., values, value_size]] =
                shapes
            else {
                return None;
            };
            let groups = match outer_q.strip_prefix(outer_k)? {
                [] => 1,
                [groups] => *groups,
                _ => return None,
            };
            let same = outer_k == outer_v && size == key_size && keys == values;
            let listed = args.queries.len() == *queries && args.keys.len() == *keys && u32::try_from(*keys).is_ok();
            let heads = outer_k.iter().product();
            (same && listed).then_some((heads, groups, *queries, *keys, *size, *value_size))
        };
        let Some((heads, groups, queries, keys, size, value_size)) = fits() else {
            return Err(ErrorKind::shape(shapes[0]).error(
                "operands",
                format!("queries {:?}, keys {:?} and values {:?} in attention", shapes[0], shapes[1], shapes[2]),
                "equal leading sizes, lengths and sizes, and an index for every query and key",
                "reshape the operands",
            ));
        };
        let mut scores = shapes[0][..shapes[0].len() - 1].to_vec();
        scores.push(keys);
        let mask = mask.map(|mask| masking(mask, &scores)).transpose()?;
        Ok(Problem {
            args,
            q: q.operand(),
            k: k.operand(),
            v: v.operand(),
            mask,
            heads,
            groups,
            queries,
            keys,
            size,
            value_size,
            seen: seen_keys(args),
        })
    }

    /// The local keys that a query may see.
    #[inline(always)]
    pub(super) fn seen_by(&self, query: usize) -> Range<usize> {
        let (first, end) = self.seen[query];
        first as usize..end as usize
    }

    /// The local keys that at least one of some adjacent queries may see.
    #[inline(always)]
    pub(super) fn seen_by_any(&self, queries: Range<usize>) -> Range<usize> {
        self.seen_by(queries.start).start..self.seen_by(queries.end - 1).end
    }

    /// How many of some local keys the mask by blocks lets some adjacent queries of the heads see that share a key head.
    pub(super) fn seen_in_blocks(&self, key_head: usize, queries: Range<usize>, keys: Range<usize>) -> Seen {
        let Some(blocks) = &self.args.blocks else { return Seen::All };
        let span = |indices: &[usize]| indices[0]..indices[indices.len() - 1] + 1;
        let (queries, keys) = (span(&self.args.queries[queries]), span(&self.args.keys[keys]));
        let seen = |group: usize| {
            let (batch, head) = blocks.place(key_head * self.groups + group);
            blocks.mask.seen(batch, head, &queries, &keys)
        };
        let groups = if blocks.mask.sizes()[1] == 1 { 1 } else { self.groups };
        (0..groups).map(seen).reduce(|a, b| if a == b { a } else { Seen::Some }).unwrap_or(Seen::None)
    }

    /// What a local query of a local query head sees by the mask by blocks.
    pub(super) fn mask_row(&self, head: usize, query: usize) -> Option<MaskRow<'_>> {
        let blocks = self.args.blocks.as_ref()?;
        let (batch, head) = blocks.place(head);
        Some(blocks.mask.row(batch, head, self.args.queries[query]))
    }

    /// The number of multiplications of one product over the whole call, as if nothing were masked.
    pub(super) fn product_size(&self) -> usize {
        let rows = self.heads.saturating_mul(self.groups).saturating_mul(self.queries);
        rows.saturating_mul(self.keys).saturating_mul(self.size.max(self.value_size).max(1))
    }

    /// The factor of the scores.
    #[inline(always)]
    pub(super) fn scale<F: AttentionFloat>(&self) -> F {
        F::narrow(self.args.scale)
    }
}

/// Reads a mask as if it had been expanded to the shape of the scores.
fn masking(mask: &Locked<'_>, scores: &[usize]) -> Result<Mask> {
    let boolean = mask.tensor.dtype() == DType::U8;
    if !boolean && !mask.tensor.dtype().is_float() {
        return Err(ErrorKind::dtype(mask.tensor.dtype()).error(
            "mask",
            mask.tensor.dtype().as_str(),
            "a floating-point type, or u8 with zeros for masked keys",
            "convert the mask",
        ));
    }
    let layout = mask.layout.broadcast_as(scores)?;
    let operand = Operand::new(&mask.tensor.broadcast_as(scores)?, &mask.storage, &layout);
    Ok(Mask { shared: operand.row == 0 && operand.heads.windows(2).all(|two| two[0] == two[1]), operand, boolean })
}

/// Per query the range of keys that its position allows.
fn seen_keys(args: &AttentionArgs<'_>) -> Vec<(u32, u32)> {
    let range = |&query: &usize| {
        let position = query as isize + args.query_offset;
        let end = match args.causal {
            true => args.keys.partition_point(|&key| key as isize <= position),
            false => args.keys.len(),
        };
        let first = match args.window {
            Some(window) => {
                let oldest = position.saturating_sub_unsigned(window);
                args.keys.partition_point(|&key| (key as isize) < oldest)
            }
            None => 0,
        };
        (first.min(end) as u32, end as u32)
    };
    args.queries.iter().map(range).collect()
}
