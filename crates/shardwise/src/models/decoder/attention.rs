//! Attention of decoders and encoders: projections, norms of queries and keys, positions, cache.

use std::sync::Arc;

use candle_core::DType;

use super::norm::FeatureNorm;
use super::spec::{AttentionSpec, LayerSpec, NormSpec, QueryKeyNorm};
use crate::error::Result;
use crate::layout::Layout;
use crate::models::cache::{CachedKeys, KvCache};
use crate::nn::{Builder, Forward, Heads, Hooks, Linear, Module};
use crate::ops::{AttentionOptions, RotaryFrequencies};
use crate::placement::Placement;
use crate::tensor::DTensor;

/// Grouped-query attention of a [`Decoder`](super::Decoder) or of an encoder.
#[derive(Module)]
pub struct DecoderAttention {
    /// Query projection.
    pub query: Linear,
    /// Key projection.
    pub key: Linear,
    /// Value projection.
    pub value: Linear,
    /// Norm of the queries.
    pub query_norm: Option<FeatureNorm>,
    /// Norm of the keys.
    pub key_norm: Option<FeatureNorm>,
    /// Output projection.
    pub output: Linear,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    heads: Heads,
    #[module(skip)]
    spec: AttentionSpec,
    causal: bool,
    window: Option<usize>,
    scale: f64,
}

/// What attention needs apart from its input.
#[derive(Default)]
pub(in crate::models) struct AttentionCall<'a> {
    /// Position of the first row of the input.
    pub(in crate::models) first: usize,
    pub(in crate::models) rotary: Option<&'a Arc<RotaryFrequencies>>,
    /// Zeros mask keys; `[batch, 1, 1, positions]`, or `[batch, 1, positions, positions]` without a cache.
    pub(in crate::models) mask: Option<&'a DTensor>,
    /// The cache, and the number of the layer.
    pub(in crate::models) cache: Option<(&'a mut KvCache, usize)>,
}

impl DecoderAttention {
    pub(in crate::models) fn new(
        builder: &Builder,
        width: usize,
        spec: &AttentionSpec,
        norm: NormSpec,
        layer: &LayerSpec,
        causal: bool,
    ) -> Result<Self> {
        let AttentionSpec { heads, key_heads, head_dim, bias, output_bias, query_key_norm, .. } = *spec;
        let norm_of = |name: &str, heads: usize| {
            let features = match query_key_norm {
                QueryKeyNorm::None => return Ok(None),
                QueryKeyNorm::PerHead => head_dim,
                QueryKeyNorm::AllHeads => heads * head_dim,
            };
            FeatureNorm::new(&builder.child(name), features, norm).map(Some)
        };
        Ok(DecoderAttention {
            query: linear(builder, "query", [width, heads * head_dim], bias)?,
            key: linear(builder, "key", [width, key_heads * head_dim], bias)?,
            value: linear(builder, "value", [width, key_heads * head_dim], bias)?,
            query_norm: norm_of("query_norm", heads)?,
            key_norm: norm_of("key_norm", key_heads)?,
            output: linear(builder, "output", [heads * head_dim, width], output_bias)?,
            hooks: builder.hooks(),
            heads: Heads { query: heads, key: key_heads },
            spec: spec.clone(),
            causal,
            window: layer.window,
            scale: layer.scale,
        })
    }

    /// The output for `[batch, length, width]`.
    #[track_caller]
    pub(in crate::models) fn attend(&self, x: &DTensor, call: AttentionCall<'_>) -> Result<DTensor> {
        if call.cache.is_some() {
            return self.hooks.run_own("attention with a cache", x, |x| self.mix(x, call));
        }
        self.hooks.run(x, |x| self.mix(x, call))
    }

    #[track_caller]
    fn mix(&self, x: &DTensor, call: AttentionCall<'_>) -> Result<DTensor> {
        let AttentionSpec { heads, key_heads, query_key_norm, clip, soft_cap, .. } = self.spec;
        let AttentionCall { first, rotary, mask, cache } = call;
        let projected = |linear: &Linear, norm: Option<&FeatureNorm>, heads: usize| -> Result<DTensor> {
            let mut found = linear.forward(x)?;
            if let (QueryKeyNorm::AllHeads, Some(norm)) = (query_key_norm, norm) {
                found = norm.forward(&found)?;
            }
            if let Some(clip) = clip {
                found = found.clamp(Some(-clip), Some(clip))?;
            }
            found = found.unflatten(-1, &[heads as isize, -1])?;
            if let (QueryKeyNorm::PerHead, Some(norm)) = (query_key_norm, norm) {
                found = norm.forward(&found)?;
            }
            found.transpose(-3, -2)
        };
        let turned = |t: DTensor| rotary.map_or_else(|| Ok(t.clone()), |rotary| t.rotary_by_frequencies(rotary, first));
        let queries = turned(projected(&self.query, self.query_norm.as_ref(), heads)?)?;
        let keys = turned(projected(&self.key, self.key_norm.as_ref(), key_heads)?)?;
        let values = projected(&self.value, None, key_heads)?;
        let stored_heads = cache.as_ref().and_then(|(cache, layer)| cache.stored_heads(*layer));
        let [keys, values] = repeated_key_heads(&queries, keys, values, stored_heads)?;
        let CachedKeys { keys, values, first: first_key } = match cache {
            Some((cache, layer)) => cache.append(layer, self.window, &keys, &values)?,
            None => CachedKeys { keys, values, first },
        };
        let seen = keys.shape()[2];
        let mask = match mask {
            Some(mask) if mask.shape()[3] != seen => Some(mask.narrow(3, first_key, seen)?),
            mask => mask.cloned(),
        };
        let options = AttentionOptions {
            causal: self.causal,
            mask: mask.as_ref(),
            scale: Some(self.scale),
            // Our window does not count the position itself, theirs does.
            window: self.window.map(|window| window.saturating_sub(1)),
            soft_cap,
            dropout: 0.0,
            query_offset: first as isize - first_key as isize,
            block_mask: None,
        };
        let mixed = queries.scaled_dot_product_attention(&keys, &values, options)?;
        self.output.forward(&mixed.transpose(-3, -2)?.flatten(-2, -1)?)
    }
}

/// Keys and values `[batch, key heads, length, size]` as they are or, if queries are sharded over a mesh axis that key heads are
/// replicated over, repeated for every query head and sharded like those. Communicates nothing in the second case. What a cache has
/// stored decides for what follows: how queries are sharded may depend on the number of tokens.
#[track_caller]
fn repeated_key_heads(
    queries: &DTensor,
    keys: DTensor,
    values: DTensor,
    stored_heads: Option<usize>,
) -> Result<[DTensor; 2]> {
    let (heads, key_heads) = (queries.shape()[1], keys.shape()[1]);
    let (sharded, by) = (queries.layout().shard_order(1), keys.layout().shard_order(1));
    let group = heads / key_heads;
    let stays = match stored_heads {
        Some(stored) => stored == key_heads,
        None => group == 1 || sharded.iter().all(|axis| by.contains(axis)),
    };
    if stays {
        return Ok([keys, values]);
    }
    let layout = queries.layout();
    let placement = |axis: usize| match sharded.contains(&axis) {
        true => layout.placements()[axis].with_dim(0),
        false => Placement::Replicate,
    };
    let placements: Vec<Placement> = (0..layout.placements().len()).map(placement).collect();
    let layout = Layout::from_shard_orders(layout.mesh(), &[heads], &placements, &[sharded.to_vec()])?;
    let mesh = queries.device_mesh();
    let key_head = |i: &[usize]| (i[0] / group) as f64;
    let key_of = DTensor::from_fn(heads, DType::U32, mesh, placements, key_head)?.to_layout(&layout)?;
    Ok([keys.index_select(1, &key_of)?, values.index_select(1, &key_of)?])
}

/// A linear layer from and to these numbers of features.
pub(in crate::models) fn linear(
    builder: &Builder,
    name: &str,
    [inputs, outputs]: [usize; 2],
    bias: bool,
) -> Result<Linear> {
    match bias {
        true => Linear::new(&builder.child(name), inputs, outputs),
        false => Linear::without_bias(&builder.child(name), inputs, outputs),
    }
}
