//! Scaled dot-product attention and rotary position embedding. Both are composed of other operators, which know what to
//! communicate for every sharding.

use candle_core::DType;

use super::{OpEntry, SampleInput};
use crate::error::{ErrorKind, Result};
use crate::placement::Placement;
use crate::tensor::DTensor;

/// Options of [`scaled_dot_product_attention`](DTensor::scaled_dot_product_attention): masking and scale.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionOptions<'a> {
    /// Masks keys that come after the query: query `i` attends to keys `0..=i`, as with `is_causal=True` in PyTorch.
    pub causal: bool,
    /// Added to the scores before the softmax; broadcasts to `[batch, heads, queries, keys]`. PyTorch's `attn_mask`.
    pub mask: Option<&'a DTensor>,
    /// Factor of the scores; by default `1 / sqrt(size of a head)`.
    pub scale: Option<f64>,
}

impl DTensor {
    /// Computes `softmax(q k^T * scale + mask) v` with this tensor as the queries `q`.
    ///
    /// Queries are `[..., heads, queries, size]`, keys and values `[..., heads, keys, size]`. Keys and values may have fewer heads
    /// than queries (grouped-query attention): each of them serves a group of query heads.
    ///
    /// Communicates nothing if batch or heads are sharded. If the keys are sharded (context parallel), ranks exchange the maxima and
    /// sums of the softmax, and the result is `Partial(Sum)`. Materializes the scores `[..., heads, queries, keys]`: this is not
    /// a fused flash attention.
    ///
    /// # Errors
    /// If leading sizes differ or the number of query heads is not a multiple of that of key heads.
    #[track_caller]
    pub fn scaled_dot_product_attention(
        &self,
        keys: &DTensor,
        values: &DTensor,
        options: AttentionOptions<'_>,
    ) -> Result<DTensor> {
        let (heads, groups) = self.check_attention(keys, values)?;
        let size = self.shape()[self.ndim() - 1];
        let scale = options.scale.unwrap_or(1.0 / (size as f64).sqrt());
        // Query heads that use the same key head are adjacent.
        let grouped =
            |x: &DTensor| if groups > 1 { x.unflatten(-3, &[heads as isize, groups as isize]) } else { Ok(x.clone()) };
        let shared = |x: &DTensor| if groups > 1 { x.unsqueeze(-3) } else { Ok(x.clone()) };
        let queries = grouped(&self.mul_scalar(scale)?)?;
        let mut scores = queries.matmul(&shared(keys)?.transpose(-2, -1)?)?;
        if let Some(mask) = options.mask {
            let mask = if groups > 1 && mask.ndim() > 2 { spread_heads(mask, heads, groups)? } else { mask.clone() };
            scores = scores.add(&mask)?;
        }
        if options.causal {
            scores = scores.causal(0, f64::NEG_INFINITY)?;
        }
        let mixed = scores.softmax(-1)?.matmul(&shared(values)?)?;
        if groups > 1 { mixed.flatten(-4, -3) } else { Ok(mixed) }
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

    /// Applies rotary position embedding (RoPE) to `[..., length, size]`.
    ///
    /// Feature `i` of the first half of a head is paired with feature `i` of the second half, and the pair is rotated by
    /// `position * base^(-2 i / size)`. The first row has position `first`. Elementwise along `length`: communicates nothing if
    /// batch, heads or length are sharded.
    ///
    /// # Errors
    /// If `size` is odd or the elements are integers.
    #[track_caller]
    pub fn rotary_embedding(&self, base: f64, first: usize) -> Result<DTensor> {
        let [.., length, size] = *self.shape() else {
            return Err(self.bad_dims("rotary_embedding", &[], "[..., length, size]"));
        };
        if size % 2 == 1 || !self.dtype().is_float() {
            return Err(self.bad_dims("rotary_embedding", &[], "an even number of floating-point features"));
        }
        let half = size / 2;
        let table = |f: fn(f64) -> f64| {
            let replicated = vec![Placement::Replicate; self.placements().len()];
            let angle = move |at: &[usize]| {
                let frequency = base.powf(-2.0 * at[1] as f64 / size as f64);
                f((first + at[0]) as f64 * frequency)
            };
            DTensor::from_fn(((length, half), self.dtype()), self.device_mesh(), replicated, angle)
        };
        let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
        let (a, b) = (self.narrow(-1, 0, half)?, self.narrow(-1, half, half)?);
        let left = a.mul(&cos)?.sub(&b.mul(&sin)?)?;
        let right = b.mul(&cos)?.add(&a.mul(&sin)?)?;
        DTensor::cat(&[&left, &right], -1)
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

pub(super) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "scaled_dot_product_attention",
        samples: heads,
        apply: |x| {
            let mask = x[0].select(0, 0)?.select(0, 0)?.narrow(1, 0, 1)?;
            let masked = AttentionOptions { mask: Some(&mask), ..AttentionOptions::default() };
            let causal = AttentionOptions { causal: true, scale: Some(0.01), ..AttentionOptions::default() };
            let attend = |options| x[0].mul_scalar(0.1)?.scaled_dot_product_attention(&x[1], &x[2], options);
            Ok(vec![attend(AttentionOptions::default())?, attend(causal)?, attend(masked)?])
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
