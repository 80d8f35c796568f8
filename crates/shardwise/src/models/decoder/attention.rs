//! Attention of decoders and encoders: projections, norms of queries and keys, positions, cache.

use std::sync::Arc;

use super::norm::FeatureNorm;
use super::spec::{AttentionSpec, LayerSpec, NormSpec, QueryKeyNorm};
use crate::error::Result;
use crate::models::cache::{CachedKeys, KvCache};
use crate::nn::{Builder, Forward, Heads, Hooks, Linear, layer};
use crate::ops::{AttentionOptions, RotaryFrequencies};
use crate::tensor::DTensor;

/// Grouped-query attention of a [`Decoder`](super::Decoder) or of an encoder.
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
    spec: AttentionSpec,
    causal: bool,
    window: Option<usize>,
    scale: f64,
}

layer!(DecoderAttention { query, key, value, query_norm, key_norm, output, heads, hooks });

/// What attention needs beside its input.
#[derive(Default)]
pub(in crate::models) struct AttentionCall<'a> {
    /// Position of the first row of the input.
    pub(in crate::models) first: usize,
    pub(in crate::models) rotary: Option<&'a Arc<RotaryFrequencies>>,
    /// Zeros mask keys; `[batch, 1, 1, positions]`.
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
            if let Some(clip) = clip {
                found = found.clamp(Some(-clip), Some(clip))?;
            }
            if let (QueryKeyNorm::AllHeads, Some(norm)) = (query_key_norm, norm) {
                found = norm.forward(&found)?;
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
        };
        let mixed = queries.scaled_dot_product_attention(&keys, &values, options)?;
        self.output.forward(&mixed.transpose(-3, -2)?.flatten(-2, -1)?)
    }
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
