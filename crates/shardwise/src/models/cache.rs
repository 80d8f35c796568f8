//! The key/value cache of generation.

use candle_core::Tensor;

use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::placement::Placement;
use crate::tensor::DTensor;
use shardwise_kernels::{contiguous, placeholder};

/// Keys and values of the tokens that a model has seen, so that generation computes new tokens only.
///
/// Keys and values of a layer are distributed tensors `[batch, key heads, positions, head size]`, sharded as the model computes
/// them: over heads with tensor parallelism, over rows with data parallelism. Memory grows in blocks of positions; layers with a sliding
/// window keep no more than the window and a block.
///
/// Rows of different lengths are padded in front: [`with_left_padding`](Self::with_left_padding). Padding is never attended
/// to, and positions count from the first real token of each row.
///
/// Every rank has its own part of the cache. Passing it to a model is collective; its methods are local.
///
/// ```
/// use shardwise::models::KvCache;
///
/// // Two rows; the first is two tokens shorter than the second.
/// let cache = KvCache::with_left_padding(vec![2, 0]);
/// assert!(cache.is_empty());
/// ```
#[doc(alias = "DynamicCache")]
#[doc(alias = "past_key_values")]
#[derive(Default)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    length: usize,
    padding: Option<Vec<usize>>,
    /// The tokens of all positions, while keys may have to be computed again; see [`tokens_to_recompute`](Self::tokens_to_recompute).
    tokens: Option<DTensor>,
}

/// Keys and values of one layer.
#[derive(Default)]
struct LayerCache {
    stored: Option<[PositionBuffer; 2]>,
    /// Position of the first stored key.
    first: usize,
    /// Number of stored keys.
    length: usize,
}

/// The memory of this rank's part of `[batch, heads, positions, size]`, with room for more positions.
struct PositionBuffer {
    mesh: DeviceMesh,
    /// The layout for one position.
    layout: Layout,
    /// Rows after `length` of the layer have not been seen by anybody.
    local: Tensor,
}

/// Positions by which memory grows: few enough to be cheap, and enough that growing, which copies, is rare.
const BLOCK: usize = 128;

/// Where attention finds the keys and values of a layer.
pub(super) struct CachedKeys {
    pub(super) keys: DTensor,
    pub(super) values: DTensor,
    /// Position of the first key.
    pub(super) first: usize,
}

impl KvCache {
    /// An empty cache for rows without padding.
    pub fn new() -> Self {
        KvCache::default()
    }

    /// An empty cache for rows with these numbers of padding tokens in front.
    #[doc(alias = "attention_mask")]
    pub fn with_left_padding(padding: Vec<usize>) -> Self {
        let padding = Some(padding).filter(|padding| padding.iter().any(|&n| n > 0));
        KvCache { padding, ..KvCache::default() }
    }

    /// Number of positions that have been seen, with padding.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether nothing has been seen.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Padding tokens in front of every row; none if no row has any.
    pub fn left_padding(&self) -> Option<&[usize]> {
        self.padding.as_deref()
    }

    /// Bytes of memory that this rank holds, with room for further positions.
    pub fn bytes(&self) -> usize {
        let buffers = self.layers.iter().flat_map(|layer| layer.stored.iter().flatten());
        buffers.map(|buffer| buffer.local.elem_count() * buffer.local.dtype().size_in_bytes()).sum()
    }

    /// Checks that a batch fits the rows of the cache.
    pub(super) fn check_rows(&self, rows: usize) -> Result<()> {
        let known = self.padding.as_ref().map(Vec::len);
        let known = known.or_else(|| Some(self.layers.first()?.stored.as_ref()?[0].layout.shape()[0]));
        match known {
            Some(known) if known != rows => {
                let found = format!("{rows} row(s) for a cache of {known}");
                Err(ErrorKind::Argument.error(
                    "batch",
                    found,
                    "the rows of the cache",
                    "use a new cache for other rows",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Keeps the tokens of sequences of at most `limit` positions, whose keys have other angles than those of longer ones.
    /// When `ids` exceed the limit, forgets the keys and returns all tokens: their keys have to be computed again.
    pub(super) fn tokens_to_recompute(&mut self, ids: &DTensor, limit: usize) -> Result<Option<DTensor>> {
        let [rows, new] = *ids.shape() else { return Ok(None) };
        self.check_rows(rows)?;
        let shortest = self.padding.as_ref().and_then(|padding| padding.iter().min().copied()).unwrap_or(0);
        let limit = limit + shortest;
        if self.length > limit {
            return Ok(None);
        }
        let all = match self.tokens.take() {
            Some(seen) => DTensor::cat(&[&seen, ids], 1)?,
            None => ids.clone(),
        };
        if self.length + new <= limit {
            self.tokens = Some(all);
            return Ok(None);
        }
        let is_first = self.is_empty();
        self.layers.clear();
        self.length = 0;
        Ok((!is_first).then_some(all))
    }

    /// Number of heads of the keys that are stored for a layer, if there are any.
    pub(super) fn stored_heads(&self, layer: usize) -> Option<usize> {
        let [keys, _] = self.layers.get(layer)?.stored.as_ref()?;
        Some(keys.layout.shape()[1])
    }

    /// Counts new positions, once per forward pass and before any layer.
    pub(super) fn extend(&mut self, new: usize, layers: usize) {
        self.length += new;
        self.layers.resize_with(layers, LayerCache::default);
    }

    /// Adds the keys and values `[batch, heads, new, size]` of a layer and returns the ones its queries may see.
    pub(super) fn append(
        &mut self,
        layer: usize,
        window: Option<usize>,
        keys: &DTensor,
        values: &DTensor,
    ) -> Result<CachedKeys> {
        let own = &mut self.layers[layer];
        let new = keys.shape()[2];
        // The keys before the new ones that any of the new queries sees.
        let seen = window.map_or(own.length, |window| own.length.min(window.saturating_sub(1)));
        let capacity = own.stored.as_ref().map_or(0, |[keys, _]| keys.local.dims()[2]);
        let stale = own.length - seen;
        if own.stored.is_none() || own.length + new > capacity || stale > BLOCK {
            let room = (seen + new + if window.is_some() { 0 } else { seen / 2 }).next_multiple_of(BLOCK);
            let grown = |old: Option<&PositionBuffer>, new: &DTensor| match old {
                Some(old) => old.moved(stale, seen, room),
                None => PositionBuffer::new(new, room),
            };
            let [old_keys, old_values] = match &own.stored {
                Some([keys, values]) => [Some(keys), Some(values)],
                None => [None, None],
            };
            own.stored = Some([grown(old_keys, keys)?, grown(old_values, values)?]);
            (own.first, own.length) = (own.first + stale, seen);
        }
        let [stored_keys, stored_values] = own.stored.as_ref().expect("allocated before");
        stored_keys.write(keys, own.length)?;
        stored_values.write(values, own.length)?;
        own.length += new;
        let from = own.length - new - seen;
        Ok(CachedKeys {
            keys: stored_keys.view(from, seen + new)?,
            values: stored_values.view(from, seen + new)?,
            first: own.first + from,
        })
    }
}

impl PositionBuffer {
    /// Memory for tensors that are sharded as `like` is, over rows and heads only.
    fn new(like: &DTensor, room: usize) -> Result<Self> {
        let found = like.layout().reduced();
        let mut placements = found.placements().to_vec();
        let mut orders = found.shard_orders();
        for dim in [2, 3] {
            for axis in std::mem::take(&mut orders[dim]) {
                placements[axis] = Placement::Replicate;
            }
        }
        let mut shape = found.shape().to_vec();
        shape[2] = 1;
        let mesh = like.device_mesh().clone();
        let layout = Layout::from_shard_orders(found.mesh(), &shape, &placements, &orders)?;
        let mut local = layout.local_shape(mesh.world().rank());
        local[2] = room;
        let meta = TensorMeta { shape: local, dtype: like.dtype() };
        Ok(PositionBuffer { local: allocated(&meta, mesh.world().is_dry())?, mesh, layout })
    }

    /// New memory with `count` positions of this one, from `from` on.
    fn moved(&self, from: usize, count: usize, room: usize) -> Result<Self> {
        let mut shape = self.local.dims().to_vec();
        shape[2] = room;
        let dry = self.mesh.world().is_dry();
        let local = allocated(&TensorMeta { shape, dtype: self.local.dtype() }, dry)?;
        if !dry && count > 0 {
            local.slice_set(&contiguous(&self.local.narrow(2, from, count)?)?, 2, 0)?;
        }
        Ok(PositionBuffer { mesh: self.mesh.clone(), layout: self.layout.clone(), local })
    }

    fn layout_of(&self, positions: usize) -> Result<Layout> {
        let mut shape = self.layout.shape().to_vec();
        shape[2] = positions;
        Layout::from_shard_orders(self.layout.mesh(), &shape, self.layout.placements(), &self.layout.shard_orders())
    }

    /// Writes positions that nobody has seen yet, so that tensors that were returned before do not change.
    fn write(&self, new: &DTensor, at: usize) -> Result<()> {
        let placed = new.detach().to_layout(&self.layout_of(new.shape()[2])?)?;
        if !self.mesh.world().is_dry() && placed.local().elem_count() > 0 {
            self.local.slice_set(&contiguous(placed.local())?, 2, at)?;
        }
        Ok(())
    }

    fn view(&self, from: usize, count: usize) -> Result<DTensor> {
        Ok(DTensor::from_parts(&self.mesh, self.layout_of(count)?, self.local.narrow(2, from, count)?))
    }
}

/// Memory for a tensor; none in a dry run.
fn allocated(meta: &TensorMeta, dry: bool) -> Result<Tensor> {
    if dry || meta.elem_count() == 0 {
        return Ok(placeholder(meta)?);
    }
    // `zeros` of the system: pages are provided when positions are written.
    Ok(Tensor::zeros(meta.shape.as_slice(), meta.dtype, &candle_core::Device::Cpu)?)
}
