//! Distances, similarities and normalizations by lengths.

use std::panic::Location;

use candle_core::{DType, Device, Tensor};

use crate::comm::record_implicit_operator;
use crate::error::Result;
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::placement::Placement;
use crate::tensor::{DTensor, check_whole};

impl DTensor {
    /// Divides by the norm of order `p` along a dimension, which counts as at least `eps`.
    ///
    /// Communicates as [`norm`](Self::norm) does.
    #[track_caller]
    pub fn normalize(&self, p: f64, dim: isize, eps: f64) -> Result<DTensor> {
        self.div(&self.norm(p, &[dim], true)?.clamp_min(eps)?)
    }

    /// Computes the cosine of the angle between vectors along a dimension, after broadcasting; lengths count as at least `eps`.
    ///
    /// If the dimension is sharded, three numbers per pair are reduced.
    #[track_caller]
    pub fn cosine_similarity(&self, other: &DTensor, dim: isize, eps: f64) -> Result<DTensor> {
        let both = DTensor::broadcast_tensors(&[self, other])?;
        let real = |x: &DTensor| x.to_dtype(dtype::real(x.dtype()))?.without_partials("cosine_similarity", &[dim]);
        let (a, b) = (real(&both[0])?, real(&both[1])?);
        // The bound does not stop the gradient.
        let length = |x: &DTensor| -> Result<DTensor> {
            let norm = x.norm(2.0, &[dim], true)?;
            norm.straight_through(&norm.detach().clamp_min(eps)?)
        };
        a.div(&length(&a)?)?.mul(&b.div(&length(&b)?)?)?.sum(&[dim], false)
    }

    /// Computes the norm of order `p` of the difference of two tensors, after broadcasting.
    #[track_caller]
    pub fn dist(&self, other: &DTensor, p: f64) -> Result<DTensor> {
        self.sub(other)?.norm(p, &[], false)
    }

    /// Computes the distances of all pairs of rows of `[.., n, d]` and `[.., m, d]`, as `[.., n, m]`.
    ///
    /// Rows of either may stay sharded.
    #[track_caller]
    pub fn cdist(&self, other: &DTensor, p: f64) -> Result<DTensor> {
        if self.ndim() < 2 || other.ndim() < 2 || self.shape().last() != other.shape().last() {
            return Err(self.bad_dims("cdist", &[], "matrices with rows of one length"));
        }
        // Reduced before the operands are paired: there are more pairs than rows.
        let (x, y) = (self.without_partials("cdist", &[-1])?, other.without_partials("cdist", &[-1])?);
        let differences = x.unsqueeze(-2)?.sub(&y.unsqueeze(-3)?)?;
        if differences.elem_count() == 0 {
            // No element gives the distance 0, also where there is nothing to take a maximum of.
            return differences.sum(&[-1], false);
        }
        differences.norm(p, &[-1], false)
    }

    /// Computes the distances of all pairs of rows of a matrix: the upper triangle of [`cdist`](Self::cdist), row by row.
    ///
    /// Sharded rows are gathered once, and the pairs are sharded instead.
    #[track_caller]
    pub fn pdist(&self, p: f64) -> Result<DTensor> {
        if self.ndim() != 2 {
            return Err(self.bad_dims("pdist", &[], "a matrix"));
        }
        let n = self.shape()[0];
        // The list of pairs, which every rank has.
        check_whole(&[n, n.saturating_sub(1)], DType::I64)?;
        let pairs: Vec<(i64, i64)> = (0..n as i64).flat_map(|i| (i + 1..n as i64).map(move |j| (i, j))).collect();
        let (left, right): (Vec<i64>, Vec<i64>) = pairs.into_iter().unzip();
        let (x, site) = (self.without_partials("pdist", &[])?, Location::caller());
        let axes = x.layout().shard_order(0).to_vec();
        let by_axis = |axis: usize| if axes.contains(&axis) { Placement::Shard(0) } else { Placement::Replicate };
        let sharded: Vec<Placement> = (0..x.placements().len()).map(by_axis).collect();
        let whole = x.layout().without_axes(&axes)?;
        let x = record_implicit_operator("pdist", || x.to_layout_at(&whole, site))?;
        let index = |list: Vec<i64>| {
            let count = list.len();
            self.constant(&Tensor::from_vec(list, count, &Device::Cpu)?)?.redistribute(sharded.clone())
        };
        let differences = x.index(&index(left)?)?.sub(&x.index(&index(right)?)?)?;
        if differences.elem_count() == 0 {
            return differences.sum(&[-1], false);
        }
        differences.norm(p, &[-1], false)
    }

    /// Scales slices of a dimension whose norm of order `p` exceeds `max_norm` down to it.
    ///
    /// One norm per slice is reduced.
    #[track_caller]
    pub fn renorm(&self, p: f64, dim: isize, max_norm: f64) -> Result<DTensor> {
        const EPS: f64 = 1e-7; // as in PyTorch
        let at = self.resolve_dim("renorm", dim)?;
        let others: Vec<isize> = (0..self.ndim()).filter(|&d| d != at).map(|d| d as isize).collect();
        let norms = match others.is_empty() {
            true => self.abs()?,
            false => self.norm(p, &others, true)?,
        };
        let factor = norms.add_scalar(EPS)?.reciprocal()?.mul_scalar(max_norm)?;
        self.mul(&norms.gt(max_norm)?.where_cond(&factor, 1.0)?)
    }

    /// Normalizes across neighbouring channels (dimension 1): `x / (k + alpha * mean(x^2 of size channels))^beta`.
    #[track_caller]
    pub fn local_response_norm(&self, size: usize, alpha: f64, beta: f64, k: f64) -> Result<DTensor> {
        if self.ndim() < 3 || size == 0 {
            return Err(self.bad_dims("local_response_norm", &[], "[n, channels, ..] and a size of at least 1"));
        }
        if self.elem_count() == 0 {
            return Ok(self.clone());
        }
        let x = self.without_partials("local_response_norm", &[1])?;
        let border = [vec![(0, 0); self.ndim() - 2], vec![(size / 2, (size - 1) / 2)]].concat();
        let sums = x.square()?.pad(&border, 0)?.unfold(1, size, 1)?.sum(&[-1], false)?;
        // The mean of integers is rounded towards zero, as PyTorch's pool does.
        let squares = match self.dtype().is_float() {
            true => sums.div_scalar(size as f64)?,
            false => sums.div_trunc(size as i64)?,
        };
        x.div(&squares.mul_scalar(alpha)?.add_scalar(k)?.pow_scalar(beta)?)
    }

    /// Applies a bilinear map: `out[.., o] = self[.., i] * weight[o, i, j] * other[.., j]`, plus a bias.
    #[track_caller]
    pub fn bilinear(&self, other: &DTensor, weight: &DTensor, bias: Option<&DTensor>) -> Result<DTensor> {
        let product = DTensor::einsum("...i,oij,...j->...o", &[self, weight, other])?;
        bias.map_or(Ok(product.clone()), |bias| product.add(bias))
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "normalize", samples: pairs, apply: |x| Ok(vec![x[0].normalize(2.0, 0, 1e-12)?]) },
    OpEntry { name: "cosine_similarity", samples: pairs, apply: |x| Ok(vec![x[0].cosine_similarity(&x[1], 1, 1e-8)?]) },
    OpEntry { name: "dist", samples: pairs, apply: |x| Ok(vec![x[0].dist(&x[1], 2.0)?]) },
    OpEntry { name: "cdist", samples: pairs, apply: |x| Ok(vec![x[0].cdist(&x[1], 2.0)?, x[0].cdist(&x[1], 1.0)?]) },
    OpEntry { name: "pdist", samples: pairs, apply: |x| Ok(vec![x[0].pdist(2.0)?]) },
    OpEntry { name: "renorm", samples: pairs, apply: |x| Ok(vec![x[0].renorm(2.0, 0, 0.5)?]) },
    OpEntry {
        name: "local_response_norm",
        samples: images,
        apply: |x| Ok(vec![x[0].local_response_norm(3, 0.1, 0.75, 1.0)?]),
    },
    OpEntry { name: "bilinear", samples: maps, apply: |x| Ok(vec![x[0].bilinear(&x[1], &x[2], None)?]) },
];

fn pairs() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5, 3], DType::F64), SampleInput::new(&[5, 3], DType::F64)]]
}

fn images() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[2, 4, 3], DType::F64)]]
}

fn maps() -> Vec<Vec<SampleInput>> {
    vec![vec![
        SampleInput::new(&[5, 3], DType::F64),
        SampleInput::new(&[5, 2], DType::F64),
        SampleInput::new(&[4, 3, 2], DType::F64),
    ]]
}
