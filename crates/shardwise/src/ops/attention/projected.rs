//! Attention with its projections and the weights of its heads, as `torch.nn.MultiheadAttention` computes it.

use candle_core::DType;

use crate::error::{ErrorKind, Result};
use crate::ops::{OpEntry, SampleInput};
use crate::tensor::DTensor;

/// Weights and options of [`multi_head_attention_forward`](DTensor::multi_head_attention_forward).
#[derive(Clone, Copy)]
pub struct MultiHeadOptions<'a> {
    /// The number of heads, which divides the features.
    pub num_heads: usize,
    /// The projections of queries, keys and values; PyTorch's `in_proj_weight` is the three of them, joined.
    pub in_proj_weight: [&'a DTensor; 3],
    /// Their biases.
    pub in_proj_bias: Option<[&'a DTensor; 3]>,
    /// The projection of the result.
    pub out_proj_weight: &'a DTensor,
    /// Its bias.
    pub out_proj_bias: Option<&'a DTensor>,
    /// One more key and value for every query, PyTorch's `bias_k` and `bias_v`.
    pub bias_kv: Option<[&'a DTensor; 2]>,
    /// Whether one more key and value of zeros is added.
    pub add_zero_attn: bool,
    /// Broadcasts to `[n, heads, queries, keys]`, or is `[n * heads, queries, keys]`: a floating-point mask is added to the scores; in one
    /// of type u8 zeros mask keys, which are the ones that are True in PyTorch.
    pub attn_mask: Option<&'a DTensor>,
}

impl DTensor {
    /// Projects this tensor as queries `[time, n, features]` or `[time, features]`, keys and values, attends with every head, and projects the
    /// result. Returns it and the mean of the weights of all heads, `[n, queries, keys]`.
    ///
    /// Stores the weights; [`scaled_dot_product_attention`](Self::scaled_dot_product_attention) does not. Communicates as
    /// [`linear`](Self::linear), [`matmul`](Self::matmul) and [`softmax`](Self::softmax) do.
    ///
    /// # Errors
    /// If the heads do not divide the features, or shapes do not fit.
    #[doc(alias = "MultiheadAttention")]
    #[track_caller]
    pub fn multi_head_attention_forward(
        &self,
        key: &DTensor,
        value: &DTensor,
        options: &MultiHeadOptions<'_>,
    ) -> Result<(DTensor, DTensor)> {
        let batched = self.ndim() == 3;
        let heads = options.num_heads;
        let width = options.in_proj_weight[0].shape().first().copied().unwrap_or(0);
        let ndims = [self, key, value].map(DTensor::ndim);
        if !(ndims == [3; 3] || ndims == [2; 3]) || heads == 0 || !width.is_multiple_of(heads) {
            let found = format!(
                "{heads} heads in multi_head_attention_forward of {}, {} and {}",
                self.layout(),
                key.layout(),
                value.layout()
            );
            let needed = "queries, keys and values [time, n, features], and heads that divide the features";
            return Err(ErrorKind::shape(self.shape()).error("operands", found, needed, "reshape the tensors"));
        }
        let projected = |x: &DTensor, i: usize| -> Result<DTensor> {
            let x = if batched { x.clone() } else { x.unsqueeze(1)? };
            x.linear(options.in_proj_weight[i], options.in_proj_bias.map(|bias| bias[i]))
        };
        let (q, mut k, mut v) = (projected(self, 0)?, projected(key, 1)?, projected(value, 2)?);
        let mut added = 0;
        let mut join = |of_k: &DTensor, of_v: &DTensor| -> Result<()> {
            let longer = |x: &DTensor, row: &DTensor| {
                let row = row.reshape(&[1, 1, width as isize])?.expand(&[1, x.shape()[1] as isize, width as isize])?;
                DTensor::cat(&[x, &row], 0)
            };
            (k, v, added) = (longer(&k, of_k)?, longer(&v, of_v)?, added + 1);
            Ok(())
        };
        if let Some([of_k, of_v]) = options.bias_kv {
            join(of_k, of_v)?;
        }
        if options.add_zero_attn {
            let zeros = options.in_proj_weight[0].detach().zeros_like()?.narrow(1, 0, 1)?.squeeze(Some(1))?;
            join(&zeros, &zeros)?;
        }
        // [time, n, heads * size] to [n, heads, time, size]
        let apart = |x: &DTensor| x.unflatten(2, &[heads as isize, -1])?.permute(&[1, 2, 0, 3]);
        let (q, k, v) = (apart(&q)?, apart(&k)?, apart(&v)?);
        let scale = (width as f64 / heads as f64).sqrt().recip();
        let mut scores = q.mul_scalar(scale)?.matmul(&k.transpose(-2, -1)?)?;
        if let Some(mask) = options.attn_mask {
            // Added keys are seen.
            let seen = if mask.dtype() == DType::U8 { 1 } else { 0 };
            let mask = if added > 0 { mask.pad(&[(0, added)], seen)? } else { mask.clone() };
            let mask = match mask.ndim() {
                3 if mask.shape()[0] > 1 => mask.unflatten(0, &[-1, heads as isize])?,
                _ => mask,
            };
            scores = match mask.dtype() {
                DType::U8 => mask.where_cond(&scores, f64::NEG_INFINITY)?,
                _ => scores.add(&mask)?,
            };
        }
        let weights = scores.softmax(-1)?;
        let joined = weights.matmul(&v)?.permute(&[2, 0, 1, 3])?.flatten(2, 3)?;
        let output = joined.linear(options.out_proj_weight, options.out_proj_bias)?;
        let mean = weights.mean(&[1], false)?;
        match batched {
            true => Ok((output, mean)),
            false => Ok((output.squeeze(Some(1))?, mean.squeeze(Some(0))?)),
        }
    }
}

pub(super) const PROJECTED: OpEntry = OpEntry {
    name: "multi_head_attention_forward",
    samples: || {
        let sample = |shape: &[usize]| SampleInput::new(shape, DType::F64);
        vec![vec![sample(&[3, 2, 4]), sample(&[4, 4]), sample(&[4])]]
    },
    apply: |x| {
        let options = MultiHeadOptions {
            num_heads: 2,
            in_proj_weight: [&x[1]; 3],
            in_proj_bias: Some([&x[2]; 3]),
            out_proj_weight: &x[1],
            out_proj_bias: None,
            bias_kv: Some([&x[2]; 2]),
            add_zero_attn: true,
            attn_mask: None,
        };
        // The sample is small, so that scores stay where the softmax is not one element.
        let small = x[0].mul_scalar(0.01)?;
        let (output, weights) = small.multi_head_attention_forward(&small, &small, &options)?;
        Ok(vec![output, weights])
    },
};
