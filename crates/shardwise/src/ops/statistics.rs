//! Operators made of others: ranks that share a dimension exchange statistics of it, not data.

use candle_core::DType;

use super::{OpEntry, Sample};
use crate::error::{Error, Result};
use crate::tensor::DTensor;

impl DTensor {
    /// `exp(x)` divided by its sum along a dimension.
    #[track_caller]
    pub fn softmax(&self, dim: isize) -> Result<DTensor> {
        let exponentials = self.sub(&self.amax(&[dim], true)?)?.exp()?;
        exponentials.div(&exponentials.sum(&[dim], true)?)
    }

    /// The logarithm of the softmax.
    #[track_caller]
    pub fn log_softmax(&self, dim: isize) -> Result<DTensor> {
        let shifted = self.sub(&self.amax(&[dim], true)?)?;
        shifted.sub(&shifted.exp()?.sum(&[dim], true)?.log()?)
    }

    /// `log(sum(exp(x)))` over some dimensions (all for none named).
    #[track_caller]
    pub fn logsumexp(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        // An infinite shift would turn everything into not-a-number.
        let shift = self.amax(dims, true)?.nan_to_num(f64::NAN, 0.0, 0.0)?;
        let sum = self.sub(&shift)?.exp()?.sum(dims, true)?.log()?;
        let kept = sum.add(&shift)?;
        if keepdim {
            return Ok(kept);
        }
        kept.sum(dims, false) // each sum has one term
    }

    /// The variance over some dimensions (all for none named), with divisor `n - correction`.
    #[track_caller]
    pub fn var(&self, dims: &[isize], correction: f64, keepdim: bool) -> Result<DTensor> {
        let centred = self.sub(&self.mean(dims, true)?)?;
        let squares = centred.square()?.sum(dims, keepdim)?;
        let count = self.elem_count() as f64 / squares.elem_count().max(1) as f64;
        squares.div_scalar((count - correction).max(0.0))
    }

    /// The standard deviation over some dimensions (all for none named), with divisor `n - correction`.
    #[track_caller]
    pub fn std(&self, dims: &[isize], correction: f64, keepdim: bool) -> Result<DTensor> {
        self.var(dims, correction, keepdim)?.sqrt()
    }

    /// The vector norm of an order (infinities included) over some dimensions (all for none named).
    #[track_caller]
    pub fn norm(&self, order: f64, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        let x = self.abs()?;
        match order {
            f64::INFINITY => x.amax(dims, keepdim),
            f64::NEG_INFINITY => x.amin(dims, keepdim),
            0.0 => x.ne(&x.zeros_like()?)?.to_dtype(x.dtype())?.sum(dims, keepdim),
            1.0 => x.sum(dims, keepdim),
            2.0 => x.square()?.sum(dims, keepdim)?.sqrt(),
            p => x.pow_scalar(p)?.sum(dims, keepdim)?.pow_scalar(1.0 / p),
        }
    }

    /// Mean 0 and variance 1 over the last `dims` dimensions, times a weight, plus a bias.
    #[track_caller]
    pub fn layer_norm(
        &self,
        dims: usize,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<DTensor> {
        let last = self.last_dims("layer_norm", dims)?;
        let centred = self.sub(&self.mean(&last, true)?)?;
        let variance = centred.square()?.mean(&last, true)?;
        let normal = centred.mul(&variance.add_scalar(eps)?.rsqrt()?)?;
        let scaled = weight.map_or(Ok(normal.clone()), |w| normal.mul(w))?;
        bias.map_or(Ok(scaled.clone()), |b| scaled.add(b))
    }

    /// Mean square 1 over the last `dims` dimensions, times a weight.
    #[track_caller]
    pub fn rms_norm(&self, dims: usize, weight: Option<&DTensor>, eps: f64) -> Result<DTensor> {
        let last = self.last_dims("rms_norm", dims)?;
        let normal = self.mul(&self.square()?.mean(&last, true)?.add_scalar(eps)?.rsqrt()?)?;
        weight.map_or(Ok(normal.clone()), |w| normal.mul(w))
    }

    fn last_dims(&self, name: &str, dims: usize) -> Result<Vec<isize>> {
        if dims == 0 || dims > self.rank() {
            let found = format!("{dims} dimension(s) in {name} of shape {:?}", self.shape());
            return Err(Error::invalid("dimensions", found, "some of the last ones", "normalise at least one"));
        }
        Ok((1..=dims as isize).map(|d| -d).collect())
    }
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry { name: "softmax", samples, apply: |x| Ok(vec![x[0].softmax(0)?, x[0].softmax(-1)?]) },
    OpEntry { name: "log_softmax", samples, apply: |x| Ok(vec![x[0].log_softmax(0)?, x[0].log_softmax(-1)?]) },
    OpEntry {
        name: "logsumexp",
        samples,
        apply: |x| Ok(vec![x[0].logsumexp(&[0], false)?, x[0].logsumexp(&[], true)?]),
    },
    OpEntry { name: "var", samples, apply: |x| Ok(vec![x[0].var(&[0], 0.0, true)?, x[0].var(&[], 1.0, false)?]) },
    OpEntry { name: "std", samples, apply: |x| Ok(vec![x[0].std(&[-1], 0.0, false)?]) },
    OpEntry {
        name: "norm",
        samples,
        apply: |x| {
            let orders = [1.0, 2.0, 3.0, f64::INFINITY, f64::NEG_INFINITY, 0.0];
            orders.iter().map(|&p| x[0].norm(p, &[0], false)).collect()
        },
    },
    OpEntry { name: "layer_norm", samples, apply: |x| Ok(vec![x[0].layer_norm(1, None, None, 1e-5)?]) },
    OpEntry { name: "rms_norm", samples, apply: |x| Ok(vec![x[0].rms_norm(1, None, 1e-5)?]) },
];

fn samples() -> Vec<Vec<Sample>> {
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 3], &[3, 1]];
    shapes.iter().map(|shape| vec![Sample::new(shape, DType::F64)]).collect()
}
