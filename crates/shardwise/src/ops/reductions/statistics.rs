//! Statistics: sums without NaN, medians, quantiles, covariances, differences and integrals.

use candle_core::{DType, Device, Tensor};

use crate::error::{ErrorKind, Result};
use crate::ops::shapes::arrange::signed;
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::tensor::{DTensor, Operand};
use shardwise_kernels::SortOrder;

/// How a quantile between two elements is computed, PyTorch's `interpolation`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuantileInterpolation {
    /// Linear between both.
    Linear,
    /// The lower one.
    Lower,
    /// The higher one.
    Higher,
    /// The mean of both.
    Midpoint,
    /// The nearer one; the even position of both at the same distance.
    Nearest,
}

/// The distance of elements for [`gradient`](DTensor::gradient).
#[derive(Clone)]
pub enum Spacing {
    /// The same between all neighbours.
    Distance(f64),
    /// The coordinates of all elements, a vector.
    Coordinates(DTensor),
}

impl DTensor {
    /// Sums over some dimensions, or all if `dims` is empty, with NaN as 0. Communicates as [`sum`](Self::sum) does.
    #[track_caller]
    pub fn nansum(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        if !self.dtype().is_float() {
            return self.sum(dims, keepdim);
        }
        self.isnan()?.where_cond(0.0, self)?.sum(dims, keepdim)
    }

    /// Averages over the elements of some dimensions, or all if `dims` is empty, that are not NaN.
    #[track_caller]
    pub fn nanmean(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        let count = self.detach().isnan()?.logical_not()?.sum(dims, keepdim)?;
        self.nansum(dims, keepdim)?.div(&count.to_dtype(dtype::real(self.dtype()))?)
    }

    /// Returns variance and mean over some dimensions, or all if `dims` is empty. Communicates as [`var`](Self::var) does.
    #[track_caller]
    pub fn var_mean(&self, dims: &[isize], correction: f64, keepdim: bool) -> Result<(DTensor, DTensor)> {
        Ok((self.var(dims, correction, keepdim)?, self.mean(dims, keepdim)?))
    }

    /// Returns standard deviation and mean over some dimensions, or all if `dims` is empty. Communicates as [`std`](Self::std) does.
    #[track_caller]
    pub fn std_mean(&self, dims: &[isize], correction: f64, keepdim: bool) -> Result<(DTensor, DTensor)> {
        Ok((self.std(dims, correction, keepdim)?, self.mean(dims, keepdim)?))
    }

    /// Computes the running `log(sum(exp(x)))` along a dimension, without overflow.
    ///
    /// Works in as many steps as the size of the dimension has bits; each moves slices of a sharded dimension.
    #[track_caller]
    pub fn logcumsumexp(&self, dim: isize) -> Result<DTensor> {
        if let Some(found) = self.as_vector(dim, |x| x.logcumsumexp(0)?.squeeze(Some(0))) {
            return found;
        }
        let at = self.resolve_dim("logcumsumexp", dim)?;
        let n = self.shape()[at];
        let mut sums = self.to_dtype(dtype::real(self.dtype()))?.without_partials("logcumsumexp", &[dim])?;
        let mut reach = 1;
        while reach < n {
            let (head, tail) = (sums.narrow(dim, 0, reach)?, sums.narrow(dim, reach, n - reach)?);
            let before = sums.narrow(dim, 0, n - reach)?;
            sums = DTensor::cat(&[&head, &tail.logaddexp(&before)?], at as isize)?;
            reach *= 2;
        }
        Ok(sums)
    }

    /// Returns the median along a dimension, the lower one of two, and its index (i64); NaN if there is one.
    ///
    /// Communicates as [`kthvalue`](Self::kthvalue) does.
    #[track_caller]
    pub fn median(&self, dim: isize, keepdim: bool) -> Result<(DTensor, DTensor)> {
        if let Some(found) = self.as_vector(dim, |x| x.median(0, false)) {
            return found;
        }
        let at = self.resolve_dim("median", dim)?;
        let (mut values, mut indices) = self.kthvalue(self.shape()[at].max(1).div_ceil(2), dim, true)?;
        if self.dtype().is_float() {
            let nan = self.detach().isnan()?;
            let (any, first) = nan.max_dim(dim, true)?;
            indices = any.where_cond(&first, &indices)?;
            values = self.gather(dim, &indices)?;
        }
        dropped((values, indices), at, keepdim)
    }

    /// Returns the median along a dimension of the elements that are not NaN, the lower one of two, and its index (i64).
    ///
    /// In a long sharded dimension ranks find it by adding up counts, as [`kthvalue`](Self::kthvalue) does; else it is sorted.
    #[track_caller]
    pub fn nanmedian(&self, dim: isize, keepdim: bool) -> Result<(DTensor, DTensor)> {
        if let Some(found) = self.as_vector(dim, |x| x.nanmedian(0, false)) {
            return found;
        }
        let at = self.resolve_dim("nanmedian", dim)?;
        let count = self.detach().isnan()?.logical_not()?.sum(&[dim], true)?;
        let middle = count.add_scalar(-1)?.clamp_min(0)?.div_floor(2)?;
        // NaN comes last.
        let indices = match self.counts_are_fewer(at, 1) {
            true => self.at_places("nanmedian", at, SortOrder::Ascending, &middle)?.indices,
            false => self.detach().sort(dim, false)?.1.gather(dim, &middle)?,
        };
        dropped((self.gather(dim, &indices)?, indices), at, keepdim)
    }

    /// Returns the most frequent element along a dimension, the smallest of several, and its last index (i64).
    ///
    /// Communicates as [`sort`](Self::sort) and [`cummax`](Self::cummax) do.
    #[track_caller]
    pub fn mode(&self, dim: isize, keepdim: bool) -> Result<(DTensor, DTensor)> {
        if let Some(found) = self.as_vector(dim, |x| x.mode(0, false)) {
            return found;
        }
        let at = self.resolve_dim("mode", dim)?;
        let n = self.shape()[at];
        if n == 0 {
            return Err(self.bad_dims("mode", &[dim], "a dimension with elements"));
        }
        let (sorted, order) = self.detach().sort(dim, false)?;
        let mut column = vec![1; self.ndim()];
        column[at] = n;
        let places = (0..n as i64).collect::<Vec<_>>();
        let places = self.constant(&Tensor::from_vec(places, column, &Device::Cpu)?)?;
        // Per element of the sorted line, where its run of equal elements begins.
        let begins = sorted.narrow(dim, 1, n - 1)?.ne(&sorted.narrow(dim, 0, n - 1)?)?;
        let border = [vec![(0, 0); self.ndim() - 1 - at], vec![(1, 0)]].concat();
        let start = begins.pad(&border, 1)?.where_cond(&places, 0)?.cummax(dim)?.0;
        // The first element that is the last of a longest run.
        let (_, best) = places.sub(&start)?.max_dim(dim, true)?;
        let indices = order.gather(dim, &best)?;
        dropped((self.gather(dim, &indices)?, indices), at, keepdim)
    }

    /// Computes quantiles along a dimension, or of all elements: `q` from 0 to 1 is a vector, whose dimension comes first in the
    /// result, or a scalar. NaN if there is one; [`nanquantile`](Self::nanquantile) ignores them.
    ///
    /// In a long sharded dimension ranks find the elements by adding up counts, as [`kthvalue`](Self::kthvalue) does; else it is sorted.
    #[track_caller]
    pub fn quantile(
        &self,
        q: &DTensor,
        dim: Option<isize>,
        keepdim: bool,
        interpolation: QuantileInterpolation,
    ) -> Result<DTensor> {
        self.quantiles("quantile", q, dim, keepdim, interpolation)
    }

    /// Computes quantiles as [`quantile`](Self::quantile) does, of the elements that are not NaN.
    #[track_caller]
    pub fn nanquantile(
        &self,
        q: &DTensor,
        dim: Option<isize>,
        keepdim: bool,
        interpolation: QuantileInterpolation,
    ) -> Result<DTensor> {
        self.quantiles("nanquantile", q, dim, keepdim, interpolation)
    }

    #[track_caller]
    fn quantiles(
        &self,
        name: &'static str,
        q: &DTensor,
        dim: Option<isize>,
        keepdim: bool,
        interpolation: QuantileInterpolation,
    ) -> Result<DTensor> {
        if q.ndim() > 1 || !self.dtype().is_float() || self.elem_count() == 0 {
            let found = format!("{} quantiles of {} {} in {name}", q.layout(), self.dtype().as_str(), self.layout());
            let needed = "a scalar or a vector, and a floating-point tensor with elements";
            return Err(ErrorKind::shape(q.shape()).error("operands", found, needed, "correct the call"));
        }
        // Once: the elements are compared, and both the order and the NaN are looked for.
        if self.layout().is_partial() || q.layout().is_partial() {
            return self.all_reduced(name)?.quantiles(name, &q.all_reduced(name)?, dim, keepdim, interpolation);
        }
        let Some(dim) = dim.filter(|_| self.ndim() > 0) else {
            let flat = self.reshape(&[-1])?.quantiles(name, q, Some(0), false, interpolation)?;
            let ones = if keepdim { vec![1; self.ndim()] } else { Vec::new() };
            return flat.reshape(&[signed(q.shape()), ones].concat());
        };
        let at = self.resolve_dim(name, dim)?;
        let n = self.shape()[at];
        let line = self.movedim(dim, -1)?;
        let last = self.ndim() - 1;
        let between = matches!(interpolation, QuantileInterpolation::Linear | QuantileInterpolation::Midpoint);
        let wanted = q.elem_count() * if between { 2 } else { 1 };
        let sorted = match line.counts_are_fewer(last, wanted) {
            true => None,
            false => Some(line.sort(-1, false)?.0),
        };
        let nan = self.detach().movedim(dim, -1)?.isnan()?;
        let scalar = q.ndim() == 0;
        let q = q.to_dtype(self.dtype())?.reshape(&[-1])?;
        // The places of the quantiles: [.., q]. NaN come last, so that the last element is NaN if there is one.
        let places = match name {
            "nanquantile" => {
                let count = nan.logical_not()?.sum(&[-1], true)?.add_scalar(-1)?.clamp_min(0)?;
                count.to_dtype(self.dtype())?.mul(&q)?
            }
            _ => nan.any(&[-1], true)?.where_cond((n - 1) as f64, &q.mul_scalar((n - 1) as f64)?)?,
        };
        let places = places.to_dtype(self.dtype())?;
        let at_places = |places: &DTensor| {
            let places = places.detach().to_dtype(DType::I64)?;
            match &sorted {
                Some(sorted) => sorted.gather(-1, &places),
                None => line.gather(-1, &line.at_places(name, last, SortOrder::Ascending, &places)?.indices),
            }
        };
        let found = match interpolation {
            QuantileInterpolation::Lower => at_places(&places.floor()?)?,
            QuantileInterpolation::Higher => at_places(&places.ceil()?)?,
            QuantileInterpolation::Nearest => at_places(&places.round()?)?,
            QuantileInterpolation::Midpoint | QuantileInterpolation::Linear => {
                let count = places.shape()[last];
                let found = at_places(&DTensor::cat(&[&places.floor()?, &places.ceil()?], -1)?)?;
                let (low, high) = (found.narrow(-1, 0, count)?, found.narrow(-1, count, count)?);
                match interpolation {
                    QuantileInterpolation::Midpoint => low.lerp(&high, 0.5)?,
                    _ => low.lerp(&high, &places.sub(&places.detach().floor()?)?)?,
                }
            }
        };
        // [.., q] to [q, ..]
        let first = found.movedim(-1, 0)?;
        let kept = if keepdim { first.unsqueeze(at as isize + 1)? } else { first };
        if scalar { kept.squeeze(Some(0)) } else { Ok(kept) }
    }

    /// Computes the covariance matrix of variables, the rows, from observations, the columns, with optional integer frequencies and
    /// real weights per observation. A vector is one variable.
    ///
    /// If observations are sharded, ranks reduce means and products; the observations stay.
    #[track_caller]
    pub fn cov(&self, correction: f64, fweights: Option<&DTensor>, aweights: Option<&DTensor>) -> Result<DTensor> {
        if self.ndim() > 2 {
            return Err(self.bad_dims("cov", &[], "at most two dimensions"));
        }
        // Weights of a wider type widen the result.
        let real = aweights.map_or(dtype::real(self.dtype()), |w| dtype::promote(dtype::real(self.dtype()), w.dtype()));
        let x = self.to_dtype(real)?.without_partials("cov", &[])?;
        let x = if x.ndim() < 2 { x.reshape(&[1, -1])? } else { x };
        let n = x.shape()[1];
        let convert = |w: Option<&DTensor>| w.map(|w| w.to_dtype(x.dtype())).transpose();
        let (frequencies, weights) = (convert(fweights)?, convert(aweights)?);
        let w = match (&frequencies, &weights) {
            (Some(f), Some(a)) => Some(f.mul(a)?),
            (f, a) => f.clone().or_else(|| a.clone()),
        };
        let total = match &w {
            Some(w) => w.sum_all()?,
            None => x.detach().full_scalar(n as f64)?,
        };
        let mean = match &w {
            Some(w) => x.mul(w)?.sum(&[1], true)?.div(&total)?,
            None => x.mean(&[1], true)?,
        };
        let divisor = match (&w, &weights) {
            (Some(w), Some(a)) if correction != 0.0 => {
                total.sub(&w.mul(a)?.sum_all()?.mul_scalar(correction)?.div(&total)?)?
            }
            _ => total.add_scalar(-correction)?,
        };
        let centred = x.sub(&mean)?;
        let scaled = w.as_ref().map_or(Ok(centred.clone()), |w| centred.mul(w))?;
        let product = scaled.matmul(&centred.t()?)?.div(&divisor.clamp_min(0.0)?)?;
        if product.elem_count() == 1 { product.reshape(&[]) } else { Ok(product) }
    }

    /// Computes the correlation coefficients of variables, the rows, from observations, the columns.
    #[track_caller]
    pub fn corrcoef(&self) -> Result<DTensor> {
        let covariance = self.cov(1.0, None, None)?;
        if covariance.ndim() == 0 {
            return covariance.div(&covariance);
        }
        let deviation = covariance.diagonal(0)?.sqrt()?;
        let scaled = covariance.div(&deviation.unsqueeze(1)?)?.div(&deviation.unsqueeze(0)?)?;
        scaled.clamp(Some(-1.0), Some(1.0))
    }

    /// Returns the differences of neighbours along a dimension, `times` times, after joining `prepend` and `append` to it. Those of
    /// u8, the type of comparisons, say whether neighbours differ.
    ///
    /// Communicates as [`narrow`](Self::narrow) and [`sub`](Self::sub) do: what crosses shards.
    #[track_caller]
    pub fn diff(
        &self,
        times: usize,
        dim: isize,
        prepend: Option<&DTensor>,
        append: Option<&DTensor>,
    ) -> Result<DTensor> {
        let at = self.resolve_dim("diff", dim)?;
        if times == 0 {
            return Ok(self.clone());
        }
        let parts: Vec<&DTensor> = [prepend, Some(self), append].into_iter().flatten().collect();
        let mut x = DTensor::cat(&parts, at as isize)?;
        for _ in 0..times {
            let n = x.shape()[at];
            if n == 0 {
                break;
            }
            let (low, high) = (x.narrow(dim, 0, n - 1)?, x.narrow(dim, 1, n - 1)?);
            x = if self.dtype() == DType::U8 { high.logical_xor(&low)? } else { high.sub(&low)? };
        }
        Ok(x)
    }

    /// Integrates along a dimension by the trapezoidal rule. `x` are coordinates, a number their distance.
    #[doc(alias = "trapz")]
    #[track_caller]
    pub fn trapezoid<'a>(&self, x: impl Into<Operand<'a>>, dim: isize) -> Result<DTensor> {
        self.trapezoids("trapezoid", x.into(), dim)?.sum(&[dim], false)
    }

    /// Integrates along a dimension by the trapezoidal rule, up to each element but the first.
    #[track_caller]
    pub fn cumulative_trapezoid<'a>(&self, x: impl Into<Operand<'a>>, dim: isize) -> Result<DTensor> {
        self.trapezoids("cumulative_trapezoid", x.into(), dim)?.cumsum(dim)
    }

    /// The areas between neighbours along a dimension.
    #[track_caller]
    fn trapezoids(&self, name: &'static str, x: Operand<'_>, dim: isize) -> Result<DTensor> {
        let at = self.resolve_dim(name, dim)?;
        let y = self.to_dtype(dtype::real(self.dtype()))?;
        let n = y.shape()[at];
        let pairs = |t: &DTensor, dim: isize, n: usize| -> Result<(DTensor, DTensor)> {
            let count = n.saturating_sub(1);
            Ok((t.narrow(dim, 0, count)?, t.narrow(dim, n - count, count)?))
        };
        let (low, high) = pairs(&y, dim, n)?;
        let heights = low.add(&high)?.mul_scalar(0.5)?;
        match x {
            Operand::Number(distance) => heights.mul_scalar(distance.to_f64()),
            Operand::Tensor(x) => {
                let x = x.to_dtype(dtype::real(x.dtype()))?;
                // A vector of coordinates belongs to the dimension.
                let x = match x.ndim() {
                    1 => x.reshape(&[vec![-1], vec![1; self.ndim() - 1 - at]].concat())?,
                    _ => x,
                };
                let own = x.ndim() as isize - (self.ndim() - at) as isize;
                let (low, high) = pairs(&x, own, x.shape()[own as usize])?;
                heights.mul(&high.sub(&low)?)
            }
        }
    }

    /// Estimates the gradient along each of some dimensions by differences of neighbours: central ones inside, one-sided ones of
    /// order `edge_order` (1 or 2) at the ends.
    #[track_caller]
    pub fn gradient(&self, dims: &[(isize, Spacing)], edge_order: usize) -> Result<Vec<DTensor>> {
        let x = self.to_dtype(dtype::real(self.dtype()))?.without_partials("gradient", &[])?;
        dims.iter().map(|(dim, spacing)| x.slope(*dim, spacing, edge_order)).collect()
    }

    #[track_caller]
    fn slope(&self, dim: isize, spacing: &Spacing, edge_order: usize) -> Result<DTensor> {
        let at = self.resolve_dim("gradient", dim)?;
        let n = self.shape()[at];
        if n <= edge_order || !matches!(edge_order, 1 | 2) {
            let found = format!("{n} elements and edges of order {edge_order} in gradient of {}", self.layout());
            return Err(ErrorKind::Argument.error(
                "dimension",
                found,
                "more elements than the order, 1 or 2",
                "correct it",
            ));
        }
        let column = [vec![-1], vec![1; self.ndim() - 1 - at]].concat();
        let part = |from: usize, len: usize| self.narrow(dim, from, len);
        // Distances of neighbours.
        let steps = match spacing {
            Spacing::Distance(h) => self.detach().full_scalar(*h)?.expand(&[n as isize - 1])?,
            Spacing::Coordinates(c) => {
                let c = c.to_dtype(self.dtype())?;
                c.narrow(0, 1, n - 1)?.sub(&c.narrow(0, 0, n - 1)?)?
            }
        };
        let step = |from: usize, len: usize| steps.narrow(0, from, len)?.reshape(&column);
        let divided = |from: usize| part(from + 1, 1)?.sub(&part(from, 1)?)?.div(&step(from, 1)?);
        let mut parts = Vec::new();
        let (first, last) = match edge_order {
            1 => (divided(0)?, divided(n - 2)?),
            _ => {
                // The parabola through the three outer elements.
                let edge = |a: usize, b: usize, near: usize, far: usize| -> Result<DTensor> {
                    let (h, k) = (step(near, 1)?, step(far, 1)?);
                    let slopes = (divided(a)?, divided(b)?);
                    let curve = slopes.0.sub(&slopes.1)?.mul(&h)?.div(&h.add(&k)?)?;
                    slopes.0.add(&curve)
                };
                (edge(0, 1, 0, 1)?, edge(n - 2, n - 3, n - 2, n - 3)?)
            }
        };
        parts.push(first);
        if n > 2 {
            let m = n - 2;
            let (h, k) = (step(0, m)?, step(1, m)?);
            let (left, middle, right) = (part(0, m)?, part(1, m)?, part(2, m)?);
            let sum = h.add(&k)?;
            let a = k.div(&h)?.div(&sum)?.neg()?;
            let b = k.sub(&h)?.div(&h.mul(&k)?)?;
            let c = h.div(&k)?.div(&sum)?;
            parts.push(left.mul(&a)?.add(&middle.mul(&b)?)?.add(&right.mul(&c)?)?);
        }
        if n > 1 {
            parts.push(last);
        }
        DTensor::cat(&parts.iter().collect::<Vec<_>>(), at as isize)
    }
}

/// Removes the dimension of a reduction, unless it is kept.
#[track_caller]
fn dropped((values, indices): (DTensor, DTensor), at: usize, keepdim: bool) -> Result<(DTensor, DTensor)> {
    if keepdim {
        return Ok((values, indices));
    }
    Ok((values.squeeze(Some(at as isize))?, indices.squeeze(Some(at as isize))?))
}

macro_rules! both {
    ($call:expr) => {{
        let (a, b) = $call?;
        Ok(vec![a, b])
    }};
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "nansum",
        samples: matrices,
        apply: |x| Ok(vec![x[0].nansum(&[0], false)?, x[0].nansum(&[], true)?]),
    },
    OpEntry { name: "nanmean", samples: matrices, apply: |x| Ok(vec![x[0].nanmean(&[0], false)?]) },
    OpEntry { name: "var_mean", samples: matrices, apply: |x| both!(x[0].var_mean(&[0], 1.0, false)) },
    OpEntry { name: "std_mean", samples: matrices, apply: |x| both!(x[0].std_mean(&[-1], 1.0, true)) },
    OpEntry { name: "logcumsumexp", samples: matrices, apply: |x| Ok(vec![x[0].logcumsumexp(0)?]) },
    OpEntry { name: "median", samples: matrices, apply: |x| both!(x[0].median(0, false)) },
    OpEntry { name: "nanmedian", samples: matrices, apply: |x| both!(x[0].nanmedian(0, true)) },
    OpEntry { name: "mode", samples: ties, apply: |x| both!(x[0].mode(0, false)) },
    OpEntry {
        name: "quantile",
        samples: quantiles,
        apply: |x| {
            let q = x[1].sigmoid()?;
            use QuantileInterpolation::{Higher, Linear, Lower, Midpoint, Nearest};
            [Linear, Lower, Higher, Midpoint, Nearest].iter().map(|&i| x[0].quantile(&q, Some(0), false, i)).collect()
        },
    },
    OpEntry {
        name: "nanquantile",
        samples: quantiles,
        apply: |x| Ok(vec![x[0].nanquantile(&x[1].sigmoid()?, None, false, QuantileInterpolation::Linear)?]),
    },
    OpEntry { name: "cov", samples: matrices, apply: |x| Ok(vec![x[0].cov(1.0, None, None)?]) },
    OpEntry { name: "corrcoef", samples: matrices, apply: |x| Ok(vec![x[0].corrcoef()?]) },
    OpEntry {
        name: "diff",
        samples: matrices,
        apply: |x| Ok(vec![x[0].diff(1, 0, None, None)?, x[0].diff(2, 1, None, None)?]),
    },
    OpEntry { name: "trapezoid", samples: matrices, apply: |x| Ok(vec![x[0].trapezoid(0.5, 0)?]) },
    OpEntry {
        name: "cumulative_trapezoid",
        samples: matrices,
        apply: |x| Ok(vec![x[0].cumulative_trapezoid(0.5, 0)?]),
    },
    OpEntry {
        name: "gradient",
        samples: matrices,
        apply: |x| x[0].gradient(&[(0, Spacing::Distance(0.5)), (1, Spacing::Distance(2.0))], 1),
    },
];

fn matrices() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5, 3], DType::F64)], vec![SampleInput::new(&[4, 4], DType::F64)]]
}

fn ties() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::index(&[7, 3], 3)], vec![SampleInput::new(&[4, 4], DType::F64)]]
}

fn quantiles() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5, 3], DType::F64), SampleInput::new(&[2], DType::F64)]]
}
