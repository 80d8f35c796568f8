//! Scaled dot-product attention and rotary position embedding.

mod composed;
mod operator;
mod params;
mod projected;
mod rotary;

use std::panic::Location;

use candle_core::DType;

use crate::error::{ErrorKind, Result};
use crate::op::{for_product, product_dtype};
use crate::ops::arguments::scalar::Scalar;
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::random::Distribution;
use crate::tensor::{DTensor, agreed_draw};
use composed::Composed;
use params::{AttentionParams, DropoutDraw};
pub use projected::MultiHeadOptions;
pub(crate) use rotary::RotaryFrequencies;
pub use shardwise_kernels::attention::BlockMask;

/// Options of [`scaled_dot_product_attention`](DTensor::scaled_dot_product_attention): what a query sees, and what happens to its
/// scores.
///
/// ```
/// use shardwise::ops::AttentionOptions;
///
/// // The last of 100 cached positions, in a model whose queries see 32 earlier keys.
/// let options = AttentionOptions { causal: true, window: Some(32), query_offset: 99, ..Default::default() };
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionOptions<'a> {
    /// Masks keys that come after the query: query `i` attends to keys `0..=i`, as with `is_causal=True` in PyTorch.
    #[doc(alias = "is_causal")]
    pub causal: bool,
    /// Broadcasts to `[batch, heads, queries, keys]`: a floating-point mask is added to the scores before the softmax; in one
    /// of type u8, zeros mask keys. PyTorch's `attn_mask`. Read by strides, never expanded.
    #[doc(alias = "attn_mask")]
    pub mask: Option<&'a DTensor>,
    /// Factor of the scores; by default `1 / sqrt(size of a head)`.
    pub scale: Option<f64>,
    /// How many keys before its own position a query sees; by default all. The left window of FlashAttention: a Mistral model
    /// with `sliding_window` `n` has `n - 1` here, because the key of the position itself is not counted.
    #[doc(alias = "sliding_window")]
    pub window: Option<usize>,
    /// Bounds the scores to `-cap..cap` smoothly, by `cap * tanh(score / cap)` before masks, as Gemma 2 does.
    #[doc(alias = "logit_softcapping")]
    pub soft_cap: Option<f64>,
    /// Probability with which elements of the softmax are dropped; the rest is divided by `1 - dropout`. Draws from the
    /// generator of the mesh, and drops the same elements in every layout. PyTorch's `dropout_p`: zero it outside of training.
    #[doc(alias = "dropout_p")]
    pub dropout: f64,
    /// The position of the first query, counted from the first key, for `causal` and `window`. With a key/value cache it is
    /// the number of keys minus that of queries, PyTorch's `causal_lower_right`; the default 0 is `causal_upper_left`.
    #[doc(alias = "causal_lower_right")]
    pub query_offset: isize,
    /// A mask by blocks, in addition to the masks above: blocks of scores in which nothing is seen are skipped. PyTorch's
    /// `block_mask` of `flex_attention`. Belongs to the full scores, whatever the layouts are; the same on every rank.
    ///
    /// ```
    /// use shardwise::ops::{AttentionOptions, BlockMask};
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("tp", 2)])?;
    ///     let x = DTensor::randn((1, 4, 96, 8), &mesh, [Shard(1)])?; // heads are sharded
    ///     let documents = BlockMask::documents(&[[vec![0; 40], vec![1; 56]].concat()])?;
    ///     let mask = documents.and(&BlockMask::causal(96, 96))?;
    ///     let options = AttentionOptions { block_mask: Some(&mask), ..Default::default() };
    ///     assert_eq!(x.scaled_dot_product_attention(&x, &x, options)?.placements(), [Shard(1)]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "create_block_mask")]
    pub block_mask: Option<&'a BlockMask>,
}

impl DTensor {
    /// Computes `softmax(q k^T * scale + mask) v` with this tensor as the queries `q`.
    ///
    /// Queries are `[..., heads, queries, size]`, keys and values `[..., heads, keys, size]`. Keys and values may have fewer heads
    /// than queries (grouped-query attention): each of them serves a group of query heads. A query that sees no key has the
    /// result 0.
    ///
    /// Never stores the scores: memory beyond inputs and outputs is linear in the lengths, in the backward pass too, which
    /// computes them again (FlashAttention). Exceptions: a mask that has a gradient, and second derivatives.
    ///
    /// Communicates nothing if batch, heads or queries are sharded. If the keys are sharded (context parallel), each rank attends to
    /// its own, ranks exchange the statistics of the softmax, and the result is `Partial(Sum)`; keys never move, in the
    /// backward pass neither. Collective if anything is redistributed or dropped.
    ///
    /// # Errors
    /// If leading sizes or types differ, the number of query heads is not a multiple of that of key heads, the mask does not
    /// broadcast to the scores, a block mask has other sizes, or `dropout` is not at least 0 and below 1.
    #[doc(alias = "flash_attention")]
    #[doc(alias = "flex_attention")]
    #[doc(alias = "sdpa")]
    #[track_caller]
    pub fn scaled_dot_product_attention(
        &self,
        keys: &DTensor,
        values: &DTensor,
        options: AttentionOptions<'_>,
    ) -> Result<DTensor> {
        let ndim = self.ndim().max(keys.ndim()).max(values.ndim());
        if [self, keys, values].iter().any(|t| t.ndim() >= 3 && t.ndim() < ndim) {
            let [queries, keys, values] = with_batch_dims([self, keys, values], ndim)?;
            return queries.scaled_dot_product_attention(&keys, &values, options);
        }
        let [result, _] = self.attend(keys, values, options)?;
        Ok(result)
    }

    /// Computes [`scaled_dot_product_attention`](Self::scaled_dot_product_attention) and, for every query, the logarithm of the sum
    /// of the exponentials of its scores, `[..., heads, queries]`.
    ///
    /// Results over different keys merge by these logarithms: each counts `exp(its logarithm - logarithm of all)`. They are
    /// f64 for f64 and otherwise f32, -inf where a query sees no key, and differentiable.
    ///
    /// # Errors
    /// As `scaled_dot_product_attention`.
    #[doc(alias = "_scaled_dot_product_flash_attention")]
    #[doc(alias = "return_lse")]
    #[track_caller]
    pub fn attention_with_logsumexp(
        &self,
        keys: &DTensor,
        values: &DTensor,
        options: AttentionOptions<'_>,
    ) -> Result<(DTensor, DTensor)> {
        let [result, logsumexp] = self.attend(keys, values, options)?;
        Ok((result, logsumexp))
    }

    #[track_caller]
    fn attend(&self, keys: &DTensor, values: &DTensor, options: AttentionOptions<'_>) -> Result<[DTensor; 2]> {
        let all = [self, keys, values];
        if all.iter().any(|x| product_dtype(x.dtype()) != x.dtype()) && all.iter().all(|x| x.dtype() != DType::F64) {
            let mask = options.mask.map(for_product).transpose()?;
            let options = AttentionOptions { mask: mask.as_ref(), ..options };
            return for_product(self)?.attend(&for_product(keys)?, &for_product(values)?, options);
        }
        let dtype = dtype::promote(dtype::promote(self.dtype(), keys.dtype()), values.dtype());
        if dtype.is_float() && [self, keys, values].iter().any(|x| x.dtype() != dtype) {
            return self.to_dtype(dtype)?.attend(&keys.to_dtype(dtype)?, &values.to_dtype(dtype)?, options);
        }
        let (heads, groups) = self.check_attention(keys, values)?;
        let grouped = groups > 1;
        let params = self.attention_params(keys, &options, grouped)?;
        // Query heads that use the same key head are adjacent.
        let spread = [heads as isize, groups as isize];
        let queries = if grouped { self.unflatten(-3, &spread)? } else { self.clone() };
        let mask = match options.mask {
            Some(mask) if grouped && mask.ndim() > 2 => Some(spread_heads(mask, heads, groups)?),
            mask => mask.cloned(),
        };
        let [result, logsumexp] = match &mask {
            Some(mask) if mask.has_gradient() => {
                Composed { params: &params, q: &queries, k: keys, v: values, mask: Some(mask) }.forward()?
            }
            _ => {
                let inputs: Vec<&DTensor> = [&queries, keys, values].into_iter().chain(&mask).collect();
                operator::attend(params, &inputs, Location::caller())?
            }
        };
        match grouped {
            true => Ok([result.flatten(-4, -3)?, logsumexp.flatten(-3, -2)?]),
            false => Ok([result, logsumexp]),
        }
    }

    #[track_caller]
    fn attention_params(
        &self,
        keys: &DTensor,
        options: &AttentionOptions<'_>,
        grouped: bool,
    ) -> Result<AttentionParams> {
        let [ref batch @ .., heads, length, size] = *self.shape() else { unreachable!("checked before") };
        if !(0.0..1.0).contains(&options.dropout) || options.soft_cap.is_some_and(|cap| cap.is_nan() || cap <= 0.0) {
            let found = format!("dropout {} and soft cap {:?}", options.dropout, options.soft_cap);
            return Err(ErrorKind::Argument.error(
                "options",
                format!("{found} in scaled_dot_product_attention"),
                "a dropout of at least 0 and below 1, and a soft cap above 0",
                "correct the options",
            ));
        }
        if let Some(mask) = options.block_mask {
            let scores = [batch.iter().product(), heads, length, keys.shape()[keys.ndim() - 2]];
            let sizes = mask.sizes();
            if !(0..4).all(|d| sizes[d] == scores[d] || d < 2 && sizes[d] == 1) {
                let found =
                    format!("{sizes:?} in scaled_dot_product_attention of {} and {}", self.layout(), keys.layout());
                let needed = format!("{scores:?} [batches, heads, queries, keys], or 1 batch or head for all");
                return Err(ErrorKind::shape(&sizes).error(
                    "sizes of a block mask",
                    found,
                    needed,
                    "build it for these scores",
                ));
            }
        }
        let dropout = match options.dropout {
            0.0 => None,
            p => {
                let mesh = self.device_mesh();
                let (distribution, scores) =
                    (Distribution::Bernoulli { p: 1.0 - p }, [length, keys.shape()[keys.ndim() - 2]]);
                let draw =
                    agreed_draw(distribution, &scores, self.dtype(), mesh, mesh.generator(), Location::caller())?;
                Some(DropoutDraw { p: Scalar(p), draw })
            }
        };
        Ok(AttentionParams {
            scale: Scalar(options.scale.unwrap_or(1.0 / (size as f64).sqrt())),
            causal: options.causal,
            window: options.window,
            soft_cap: options.soft_cap.map(Scalar),
            query_offset: options.query_offset,
            blocks: options.block_mask.cloned(),
            dropout,
            grouped,
        })
    }

    /// The number of key heads, and of query heads per key head.
    fn check_attention(&self, keys: &DTensor, values: &DTensor) -> Result<(usize, usize)> {
        let (q, k, v) = (self.shape(), keys.shape(), values.shape());
        let fits = || {
            let [batch_q @ .., heads, _, size] = q else { return None };
            let [batch_k @ .., shared, keys, key_size] = k else { return None };
            let [batch_v @ .., value_heads, values, _] = v else { return None };
            let whole = *shared > 0 && heads.is_multiple_of(*shared) && shared == value_heads;
            let same = batch_q == batch_k && batch_k == batch_v && size == key_size && keys == values;
            (whole && same).then(|| (*shared, heads / shared))
        };
        fits().ok_or_else(|| {
            ErrorKind::shape(self.shape()).error(
                "operands",
                format!(
                    "queries {}, keys {} and values {} in scaled_dot_product_attention",
                    self.layout(),
                    keys.layout(),
                    values.layout()
                ),
                "[..., heads, length, size] with equal leading sizes, and query heads that are a multiple of key heads",
                "reshape the operands",
            )
        })
    }
}

/// Splits the head dimension of a mask into groups, like that of the queries.
#[track_caller]
fn spread_heads(mask: &DTensor, heads: usize, groups: usize) -> Result<DTensor> {
    match mask.shape()[mask.ndim() - 3] {
        1 => mask.unsqueeze(-3),
        _ => mask.unflatten(-3, &[heads as isize, groups as isize]),
    }
}

/// Queries, keys and values with as many dimensions: missing ones, and those of size 1, before the heads are expanded.
#[track_caller]
fn with_batch_dims(tensors: [&DTensor; 3], ndim: usize) -> Result<[DTensor; 3]> {
    let size = |t: &DTensor, d: usize| (d + t.ndim()).checked_sub(ndim).map_or(1, |own| t.shape()[own]);
    let batch: Vec<isize> =
        (0..ndim - 3).map(|d| tensors.iter().map(|t| size(t, d)).find(|&n| n != 1).unwrap_or(1) as isize).collect();
    let expanded = |t: &DTensor| t.expand(&[batch.as_slice(), &[-1, -1, -1]].concat());
    let [queries, keys, values] = tensors;
    Ok([expanded(queries)?, expanded(keys)?, expanded(values)?])
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "scaled_dot_product_attention",
        samples: heads,
        apply: |x| {
            let q = x[0].mul_scalar(0.1)?;
            let mask = x[0].select(0, 0)?.select(0, 0)?.narrow(1, 0, 1)?;
            let masked = AttentionOptions { mask: Some(&mask), ..AttentionOptions::default() };
            let causal = AttentionOptions { causal: true, scale: Some(0.01), ..AttentionOptions::default() };
            // The same draw every time, so that runs can be compared.
            let all = AttentionOptions {
                causal: true,
                mask: None,
                scale: Some(0.1),
                window: Some(1),
                soft_cap: Some(2.0),
                dropout: 0.4,
                query_offset: 1,
                block_mask: None,
            };
            q.device_mesh().manual_seed(7);
            let (result, logsumexp) = q.attention_with_logsumexp(&x[1], &x[2], all)?;
            let attend = |options| q.scaled_dot_product_attention(&x[1], &x[2], options);
            let plain = attend(AttentionOptions::default())?;
            let [.., heads, queries, _] = *q.shape() else { unreachable!("attention has succeeded") };
            let sizes = [1, heads, queries, x[1].shape()[x[1].ndim() - 2]];
            let blocks = BlockMask::from_fn(sizes, |_, head, query, key| !(head + query + 2 * key).is_multiple_of(3));
            let blocks = AttentionOptions { block_mask: Some(&blocks), ..AttentionOptions::default() };
            Ok(vec![plain, attend(causal)?, attend(masked)?, attend(blocks)?, result, logsumexp])
        },
    },
    OpEntry {
        name: "rotary_embedding",
        samples: rotated,
        apply: |x| Ok(vec![x[0].rotary_embedding(10000.0, 0)?, x[0].rotary_embedding(100.0, 3)?]),
    },
];

fn heads() -> Vec<Vec<SampleInput>> {
    let all = |q: &[usize], k: &[usize]| {
        vec![SampleInput::new(q, DType::F64), SampleInput::new(k, DType::F64), SampleInput::new(k, DType::F64)]
    };
    vec![all(&[1, 2, 3, 2], &[1, 2, 3, 2]), all(&[1, 4, 3, 2], &[1, 2, 3, 2])]
}

fn rotated() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[2, 5, 6], DType::F64)], vec![SampleInput::new(&[3, 2], DType::F64)]]
}

/// Composed operators.
pub(super) const COMPOSED_OPS: &[OpEntry] = &[projected::PROJECTED];
