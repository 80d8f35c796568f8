//! Masks of attention by blocks: which blocks of scores no query sees, which all see, and the bits of the rest.

use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::error::{ErrorKind, Result};

/// Queries and keys of a block. As many bits are one machine word.
const BLOCK: usize = 64;

/// Which keys every query sees, by blocks of 64 queries and keys: attention skips blocks in which nothing is seen, and masks
/// elements in blocks alone in which some are.
///
/// PyTorch's `create_block_mask` of flex attention. Built from a predicate ([`from_fn`](Self::from_fn)) or from parts
/// ([`causal`](Self::causal), [`window`](Self::window), [`documents`](Self::documents)), which combine with [`and`](Self::and) and
/// [`or`](Self::or). Holds four bytes per block, and the bits of blocks that are seen in part; never a number per score. Build it
/// once for all layers and steps: a clone shares the memory. Describes the scores of full tensors, whatever their layouts are.
///
/// ```
/// use shardwise_kernels::attention::BlockMask;
///
/// // Two documents of 100 and 156 tokens in a sequence, each of which sees itself, up to the present token.
/// let ids = vec![[vec![0; 100], vec![1; 156]].concat()];
/// let mask = BlockMask::documents(&ids)?.and(&BlockMask::causal(256, 256))?;
/// assert!(mask.sees(0, 0, 150, 120) && !mask.sees(0, 0, 150, 80));
/// // In 8 of 16 blocks of 64 x 64 nothing is seen.
/// assert_eq!(mask.sparsity(), 0.5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "create_block_mask")]
#[doc(alias = "flex_attention")]
#[derive(Debug, Clone)]
pub struct BlockMask(Arc<MaskBlocks>);

#[derive(Debug, PartialEq, Eq)]
struct MaskBlocks {
    /// Batches, query heads, queries and keys.
    sizes: [usize; 4],
    /// Per batch, head, block of queries and block of keys: [`EMPTY`], [`FULL`], or the position of its bits.
    table: Vec<u32>,
    /// Per query of a block that is seen in part a bit for each key, the first of which is the lowest.
    bits: Vec<[u64; BLOCK]>,
    /// Hash of all of this.
    digest: u64,
}

/// A block in which no query sees a key.
const EMPTY: u32 = u32::MAX;
/// A block in which every query sees every key.
const FULL: u32 = u32::MAX - 1;

/// How much of some scores is masked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    None,
    Some,
    All,
}

impl PartialEq for BlockMask {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

impl Eq for BlockMask {}

impl Hash for BlockMask {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.digest.hash(state);
    }
}

impl BlockMask {
    /// Builds the mask in which a query sees a key if `sees(batch, head, query, key)`. Local.
    ///
    /// `sizes` are the numbers of batches, query heads, queries and keys; 1 for batches or heads that all have the same mask. Calls
    /// the function once per combination of these.
    ///
    /// ```
    /// use shardwise_kernels::attention::BlockMask;
    ///
    /// // All tokens see the first eight, and those before them.
    /// let mask = BlockMask::from_fn([1, 1, 128, 128], |_, _, query, key| key < 8 || key <= query);
    /// assert!(mask.sees(0, 0, 3, 7) && !mask.sees(0, 0, 3, 8));
    /// ```
    #[doc(alias = "mask_mod")]
    pub fn from_fn(sizes: [usize; 4], sees: impl Fn(usize, usize, usize, usize) -> bool) -> Self {
        Self::build(sizes, |_, _, _| None, sees)
    }

    /// Keys after a query's own position are masked: query `i` sees keys `0..=i`.
    #[doc(alias = "is_causal")]
    pub fn causal(queries: usize, keys: usize) -> Self {
        let all = |_: usize, q: &Range<usize>, k: &Range<usize>| match k.end <= q.start + 1 {
            true => Some(true),
            false => (k.start >= q.end).then_some(false),
        };
        Self::build([1, 1, queries, keys], all, |_, _, query, key| key <= query)
    }

    /// A query sees the key of its own position, `before` earlier and `after` later ones.
    #[doc(alias = "sliding_window")]
    pub fn window(queries: usize, keys: usize, before: usize, after: usize) -> Self {
        let sees = move |query: usize, key: usize| key + before >= query && key <= query.saturating_add(after);
        let all = move |_: usize, q: &Range<usize>, k: &Range<usize>| {
            let corners = sees(q.start, k.end - 1) && sees(q.end - 1, k.start);
            let apart = k.end - 1 + before < q.start || k.start > (q.end - 1).saturating_add(after);
            if corners { Some(true) } else { apart.then_some(false) }
        };
        Self::build([1, 1, queries, keys], all, move |_, _, query, key| sees(query, key))
    }

    /// A query sees the keys of its own document: `ids` has a row per batch, with the document of every token.
    ///
    /// # Errors
    /// If there is no row, or rows have different lengths.
    #[doc(alias = "document_mask")]
    pub fn documents(ids: &[Vec<u32>]) -> Result<Self> {
        let length = ids.first().map_or(0, Vec::len);
        if ids.is_empty() || ids.iter().any(|row| row.len() != length) {
            let found = format!("rows of lengths {:?}", ids.iter().map(Vec::len).collect::<Vec<_>>());
            let needed = "at least one row, all of one length";
            return Err(ErrorKind::Argument.error("documents of a mask", found, needed, "pad the shorter rows"));
        }
        let range = |row: &[u32]| (*row.iter().min().expect("a token"), *row.iter().max().expect("a token"));
        // Per block of every row the lowest and the highest document.
        let ranges: Vec<Vec<(u32, u32)>> = ids.iter().map(|row| row.chunks(BLOCK).map(range).collect()).collect();
        let all = |batch: usize, q: &Range<usize>, k: &Range<usize>| {
            let (a, b) = (ranges[batch][q.start / BLOCK], ranges[batch][k.start / BLOCK]);
            match a == b && a.0 == a.1 {
                true => Some(true),
                false => (a.1 < b.0 || b.1 < a.0).then_some(false),
            }
        };
        let sees = |batch: usize, _: usize, query: usize, key: usize| ids[batch][query] == ids[batch][key];
        Ok(Self::build([ids.len(), 1, length, length], all, sees))
    }

    /// The keys that both masks allow. Batches and heads of which one mask has 1 are those of the other.
    ///
    /// # Errors
    /// If sizes differ.
    #[doc(alias = "and_masks")]
    pub fn and(&self, other: &BlockMask) -> Result<Self> {
        self.combined(other, |a, b| a & b)
    }

    /// The keys that one of the masks allows, or both. Sizes as for [`and`](Self::and).
    ///
    /// # Errors
    /// If sizes differ.
    #[doc(alias = "or_masks")]
    pub fn or(&self, other: &BlockMask) -> Result<Self> {
        self.combined(other, |a, b| a | b)
    }

    /// The numbers of batches, query heads, queries and keys.
    pub fn sizes(&self) -> [usize; 4] {
        self.0.sizes
    }

    /// Whether a query sees a key.
    ///
    /// # Panics
    /// If a number is outside of the sizes.
    pub fn sees(&self, batch: usize, head: usize, query: usize, key: usize) -> bool {
        self.row(batch, head, query).sees(key)
    }

    /// The share of blocks that attention skips, from 0 to 1.
    pub fn sparsity(&self) -> f64 {
        let empty = self.0.table.iter().filter(|code| **code == EMPTY).count();
        empty as f64 / self.0.table.len().max(1) as f64
    }

    /// The mask as a tensor of type u8 `[batches, heads, queries, keys]`, with zeros for masked keys.
    ///
    /// # Errors
    /// If memory does not suffice.
    #[doc(alias = "create_mask")]
    pub fn to_tensor(&self) -> Result<Tensor> {
        let [batches, heads, queries, keys] = self.0.sizes;
        let mut elements = Vec::with_capacity(batches * heads * queries * keys);
        for row in 0..batches * heads * queries {
            let line = self.row(row / (heads * queries), row / queries % heads, row % queries);
            elements.extend((0..keys).map(|key| u8::from(line.sees(key))));
        }
        Ok(Tensor::from_vec(elements, &self.0.sizes, &Device::Cpu)?)
    }

    /// Numbers of blocks of queries and of keys.
    fn grid(&self) -> [usize; 2] {
        [self.0.sizes[2].div_ceil(BLOCK), self.0.sizes[3].div_ceil(BLOCK)]
    }

    /// The codes of all blocks of keys, of a block of queries.
    fn line(&self, batch: usize, head: usize, block: usize) -> &[u32] {
        let [rows, columns] = self.grid();
        let first = ((batch * self.0.sizes[1] + head) * rows + block) * columns;
        &self.0.table[first..first + columns]
    }

    /// What one query sees.
    pub(super) fn row(&self, batch: usize, head: usize, query: usize) -> MaskRow<'_> {
        MaskRow { codes: self.line(batch, head, query / BLOCK), bits: &self.0.bits, at: query % BLOCK }
    }

    /// How many of the keys of a range some adjacent queries see; `Some` where blocks reach beyond the ranges, too.
    pub(super) fn seen(&self, batch: usize, head: usize, queries: &Range<usize>, keys: &Range<usize>) -> Seen {
        let mut found = None;
        for block in queries.start / BLOCK..queries.end.div_ceil(BLOCK) {
            for code in &self.line(batch, head, block)[keys.start / BLOCK..keys.end.div_ceil(BLOCK)] {
                let this = match *code {
                    EMPTY => Seen::None,
                    FULL => Seen::All,
                    _ => return Seen::Some,
                };
                if found.is_some_and(|before| before != this) {
                    return Seen::Some;
                }
                found = Some(this);
            }
        }
        found.unwrap_or(Seen::None)
    }

    /// Builds a mask; `all` knows of some blocks, by batch, queries and keys, that everything or nothing is seen.
    fn build(
        sizes: [usize; 4],
        all: impl Fn(usize, &Range<usize>, &Range<usize>) -> Option<bool>,
        sees: impl Fn(usize, usize, usize, usize) -> bool,
    ) -> Self {
        Self::from_blocks(sizes, |batch, head, queries, keys| match all(batch, queries, keys) {
            Some(true) => filled_bits(queries.len(), keys.len()),
            Some(false) => [0; BLOCK],
            None => {
                let mut bits = [0; BLOCK];
                for (line, query) in bits.iter_mut().zip(queries.clone()) {
                    let seen = keys.clone().enumerate().filter(|(_, key)| sees(batch, head, query, *key));
                    *line = seen.fold(0, |line, (at, _)| line | 1 << at);
                }
                bits
            }
        })
    }

    /// Builds a mask from the bits of every block.
    fn from_blocks(
        sizes: [usize; 4],
        block: impl Fn(usize, usize, &Range<usize>, &Range<usize>) -> [u64; BLOCK],
    ) -> Self {
        let [batches, heads, queries, keys] = sizes;
        let ranges = |n: usize| (0..n).step_by(BLOCK).map(move |start| start..(start + BLOCK).min(n));
        let (mut table, mut bits, mut digest) = (Vec::new(), Vec::new(), Digest::new());
        sizes.iter().for_each(|&n| digest.add(n as u64));
        for (batch, head) in (0..batches).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
            for (queries, keys) in ranges(queries).flat_map(|q| ranges(keys).map(move |k| (q.clone(), k))) {
                let found = block(batch, head, &queries, &keys);
                let code = if found == [0; BLOCK] {
                    EMPTY
                } else if found == filled_bits(queries.len(), keys.len()) {
                    FULL
                } else {
                    found.iter().for_each(|line| digest.add(*line));
                    bits.push(found);
                    bits.len() as u32 - 1
                };
                digest.add(u64::from(code));
                table.push(code);
            }
        }
        BlockMask(Arc::new(MaskBlocks { sizes, table, bits, digest: digest.0 }))
    }

    fn combined(&self, other: &BlockMask, combine: impl Fn(u64, u64) -> u64) -> Result<Self> {
        let (a, b) = (self.0.sizes, other.0.sizes);
        let fits = |d: usize| a[d] == b[d] || d < 2 && (a[d] == 1 || b[d] == 1);
        if !(0..4).all(fits) {
            let needed = "one number of queries and of keys, and of batches and heads unless it is 1";
            let found = format!("masks of {a:?} and {b:?} [batches, heads, queries, keys]");
            return Err(ErrorKind::Argument.error("masks", found, needed, "build both for the same scores"));
        }
        let sizes = [a[0].max(b[0]), a[1].max(b[1]), a[2], a[3]];
        Ok(Self::from_blocks(sizes, |batch, head, queries, keys| {
            let bits = |mask: &BlockMask| {
                let (batch, head) = mask.place(batch, head);
                match mask.line(batch, head, queries.start / BLOCK)[keys.start / BLOCK] {
                    EMPTY => [0; BLOCK],
                    FULL => filled_bits(queries.len(), keys.len()),
                    code => mask.0.bits[code as usize],
                }
            };
            let (a, b) = (bits(self), bits(other));
            std::array::from_fn(|line| combine(a[line], b[line]))
        }))
    }

    /// The batch and the head whose mask a batch and a head have.
    pub(super) fn place(&self, batch: usize, head: usize) -> (usize, usize) {
        let [batches, heads, ..] = self.0.sizes;
        (if batches == 1 { 0 } else { batch }, if heads == 1 { 0 } else { head })
    }
}

/// What one query sees.
pub(super) struct MaskRow<'a> {
    codes: &'a [u32],
    bits: &'a [[u64; BLOCK]],
    at: usize,
}

impl MaskRow<'_> {
    #[inline(always)]
    pub(super) fn sees(&self, key: usize) -> bool {
        match self.codes[key / BLOCK] {
            EMPTY => false,
            FULL => true,
            code => self.bits[code as usize][self.at] >> (key % BLOCK) & 1 == 1,
        }
    }
}

/// The bits of a block of so many queries and keys that are all seen.
fn filled_bits(queries: usize, keys: usize) -> [u64; BLOCK] {
    let line = u64::MAX >> (BLOCK - keys);
    std::array::from_fn(|query| if query < queries { line } else { 0 })
}

/// FNV-1a over words.
struct Digest(u64);

impl Digest {
    fn new() -> Self {
        Digest(0xCBF2_9CE4_8422_2325)
    }

    fn add(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01B3);
        self.0 ^= self.0 >> 29; // the upper bits of a word reach the lower ones
    }
}
