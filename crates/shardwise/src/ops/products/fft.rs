//! Fourier transforms of real tensors with a real result, as products with matrices of cosines and sines.
//!
//! A product with an `m` by `n` matrix takes `m n` multiplications per line instead of `n log n`, and has the sharding rules and gradients of
//! products: along a sharded dimension the result is `Partial(Sum)`, and nothing is gathered.

use std::f64::consts::TAU;

use candle_core::DType;

use crate::error::{ErrorKind, Result};
use crate::op::with_autocast;
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::placement::Placement;
use crate::tensor::DTensor;

/// By what a Fourier transform is divided, for PyTorch's names of `norm`; `n` is the number of points of the signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FftNorm {
    /// An inverse transform by `n`.
    #[default]
    Backward,
    /// Every transform by the root of `n`.
    Ortho,
    /// A forward transform by `n`.
    Forward,
}

/// The direction of a transform: the sign of its exponents.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::ops) enum Direction {
    Forward,
    Inverse,
}

impl Direction {
    /// What a transform to `points` is multiplied by.
    pub(in crate::ops) fn factor(self, norm: FftNorm, points: f64) -> f64 {
        match (norm, self) {
            (FftNorm::Ortho, _) => points.sqrt().recip(),
            (FftNorm::Backward, Direction::Inverse) | (FftNorm::Forward, Direction::Forward) => points.recip(),
            _ => 1.0,
        }
    }
}

/// The size of a result as a list; one beyond any tensor must not become -1, the size of the input.
fn one_size(n: usize) -> Vec<isize> {
    vec![isize::try_from(n).unwrap_or(isize::MAX)]
}

impl DTensor {
    /// Returns the inverse of `rfft` along a dimension: this tensor is the half of a Hermitian spectrum, with imaginary parts of zero, of
    /// a real signal of `n` points; `None` is twice the size less two.
    ///
    /// Communicates as [`matmul`](Self::matmul) with a replicated matrix does.
    #[doc(alias = "fft.irfft")]
    #[track_caller]
    pub fn fft_irfft(&self, n: Option<usize>, dim: isize, norm: FftNorm) -> Result<DTensor> {
        let s = n.map(one_size);
        self.real_result("fft_irfft", s.as_deref(), Some(&[dim]), norm, Direction::Inverse)
    }

    /// Returns the Fourier transform along a dimension of a signal that is Hermitian in time: this tensor is half of it, with imaginary
    /// parts of zero. The result has `n` points; `None` is twice the size less two.
    ///
    /// Communicates as [`matmul`](Self::matmul) with a replicated matrix does.
    #[doc(alias = "fft.hfft")]
    #[track_caller]
    pub fn fft_hfft(&self, n: Option<usize>, dim: isize, norm: FftNorm) -> Result<DTensor> {
        let s = n.map(one_size);
        self.real_result("fft_hfft", s.as_deref(), Some(&[dim]), norm, Direction::Forward)
    }

    /// Returns the inverse of `rfftn`: [`fft_irfft`](Self::fft_irfft) along the last of `dims`, and inverse transforms along the dimensions before it.
    ///
    /// `s` are the sizes of the result, -1 for that of this tensor. Without `dims`, they are the last ones, as many as `s` has, or all.
    #[doc(alias = "fft.irfftn")]
    #[doc(alias = "fft.irfft2")]
    #[track_caller]
    pub fn fft_irfftn(&self, s: Option<&[isize]>, dims: Option<&[isize]>, norm: FftNorm) -> Result<DTensor> {
        self.real_result("fft_irfftn", s, dims, norm, Direction::Inverse)
    }

    /// Returns [`fft_hfft`](Self::fft_hfft) along the last of `dims` after Fourier transforms along the dimensions before it.
    ///
    /// `s` and `dims` as for [`fft_irfftn`](Self::fft_irfftn).
    #[doc(alias = "fft.hfftn")]
    #[doc(alias = "fft.hfft2")]
    #[track_caller]
    pub fn fft_hfftn(&self, s: Option<&[isize]>, dims: Option<&[isize]>, norm: FftNorm) -> Result<DTensor> {
        self.real_result("fft_hfftn", s, dims, norm, Direction::Forward)
    }

    /// Moves the zero frequency from the front to the middle of some dimensions, `None` for all.
    ///
    /// Communicates as [`roll`](Self::roll) does.
    #[doc(alias = "fft.fftshift")]
    #[track_caller]
    pub fn fft_fftshift(&self, dims: Option<&[isize]>) -> Result<DTensor> {
        self.turned("fft_fftshift", dims, |n| n / 2)
    }

    /// Moves the zero frequency from the middle back to the front of some dimensions, `None` for all.
    ///
    /// Communicates as [`roll`](Self::roll) does.
    #[doc(alias = "fft.ifftshift")]
    #[track_caller]
    pub fn fft_ifftshift(&self, dims: Option<&[isize]>) -> Result<DTensor> {
        self.turned("fft_ifftshift", dims, |n| n.div_ceil(2))
    }

    #[track_caller]
    fn turned(&self, name: &'static str, dims: Option<&[isize]>, by: fn(usize) -> usize) -> Result<DTensor> {
        let all: Vec<isize> = (0..self.ndim() as isize).collect();
        let dims = dims.unwrap_or(&all);
        let mut shifts = Vec::new();
        for &dim in dims {
            shifts.push(by(self.shape()[self.resolve_dim(name, dim)?]) as isize);
        }
        if dims.is_empty() { Ok(self.clone()) } else { self.roll(&shifts, dims) }
    }

    #[track_caller]
    fn real_result(
        &self,
        name: &'static str,
        s: Option<&[isize]>,
        dims: Option<&[isize]>,
        norm: FftNorm,
        direction: Direction,
    ) -> Result<DTensor> {
        if matches!(self.dtype(), DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.real_result(name, s, dims, norm, direction)?.to_dtype(self.dtype());
        }
        let axes = self.transformed(name, s, dims)?;
        let x = self.to_dtype(dtype::real(self.dtype()))?;
        let (&(last, points), others) = axes.split_last().expect("at least one dimension");
        let (mut real, mut imaginary) = (x, None::<DTensor>);
        let mut total = points as f64;
        for &(dim, n) in others {
            total *= n as f64;
            let (cosines, sines) = (real.waves(dim, n, f64::cos)?, real.waves(dim, n, f64::sin)?);
            let along = |x: &DTensor, by: &DTensor| x.times_along(dim, by);
            let turned = match direction {
                Direction::Inverse => along(&real, &sines)?,
                Direction::Forward => along(&real, &sines)?.neg()?,
            };
            (real, imaginary) = match imaginary {
                None => (along(&real, &cosines)?, Some(turned)),
                Some(i) => {
                    let back = along(&i, &sines)?;
                    let kept = along(&real, &cosines)?;
                    let sum = if direction == Direction::Inverse { kept.sub(&back)? } else { kept.add(&back)? };
                    (sum, Some(along(&i, &cosines)?.add(&turned)?))
                }
            };
        }
        // The other half of the spectrum is the conjugate of this one: all but the first and the middle element count twice.
        let weight = |k: usize| if k == 0 || 2 * k == points { 1.0 } else { 2.0 };
        let half = points / 2 + 1;
        let wave = |function: fn(f64) -> f64| {
            move |k: usize, j: usize| if k < half { weight(k) * function(angle(j, k, points)) } else { 0.0 }
        };
        let mut result = real.times_along(last, &real.matrix(last, points, wave(f64::cos))?)?;
        if let Some(i) = imaginary {
            let sines = i.times_along(last, &i.matrix(last, points, wave(f64::sin))?)?;
            result = if direction == Direction::Inverse { result.sub(&sines)? } else { result.add(&sines)? };
        }
        match direction.factor(norm, total) {
            1.0 => Ok(result),
            factor => result.mul_scalar(factor),
        }
    }

    /// The dimensions to transform, each with the size of the result; the last one has half of a spectrum.
    #[track_caller]
    fn transformed(
        &self,
        name: &'static str,
        s: Option<&[isize]>,
        dims: Option<&[isize]>,
    ) -> Result<Vec<(usize, usize)>> {
        let count = s.map_or(self.ndim(), <[isize]>::len);
        let first = self.ndim() as isize - count as isize;
        let usual: Vec<isize> = (first..self.ndim() as isize).collect();
        let dims = dims.unwrap_or(&usual);
        let mut axes: Vec<(usize, usize)> = Vec::new();
        for (i, &dim) in dims.iter().enumerate() {
            let at = self.resolve_dim(name, dim)?;
            if axes.iter().any(|&(other, _)| other == at) {
                return Err(self.bad_dims(name, dims, "different dimensions"));
            }
            let own = self.shape()[at];
            let usual = if i + 1 == dims.len() { 2 * own.saturating_sub(1) } else { own };
            let size = s.and_then(|s| s.get(i)).and_then(|&n| usize::try_from(n).ok()).unwrap_or(usual);
            if size == 0 {
                let found = format!("0 points along dimension {dim} in {name} of {}", self.layout());
                return Err(ErrorKind::Argument.error("points", found, "at least 1", "pass the number of points"));
            }
            axes.push((at, size));
        }
        if axes.is_empty() || s.is_some_and(|s| s.len() != dims.len()) {
            return Err(self.bad_dims(name, dims, "at least one dimension, and one size for each if sizes are given"));
        }
        Ok(axes)
    }

    /// The matrix of a complex transform to `n` points; elements beyond them do not count.
    #[track_caller]
    fn waves(&self, dim: usize, n: usize, function: fn(f64) -> f64) -> Result<DTensor> {
        self.matrix(dim, n, move |k, j| if k < n { function(angle(j, k, n)) } else { 0.0 })
    }

    /// A replicated matrix with a row for every element along a dimension, and `n` columns.
    #[track_caller]
    fn matrix(&self, dim: usize, n: usize, element: impl Fn(usize, usize) -> f64) -> Result<DTensor> {
        let placements = vec![Placement::Replicate; self.placements().len()];
        DTensor::from_fn((self.shape()[dim], n), self.dtype(), self.device_mesh(), placements, |at| {
            element(at[0], at[1])
        })
    }

    /// Multiplies the vectors along a dimension by a matrix.
    #[track_caller]
    fn times_along(&self, dim: usize, matrix: &DTensor) -> Result<DTensor> {
        let dim = dim as isize;
        let lines = self.movedim(dim, -1)?;
        with_autocast(None, || lines.matmul(matrix))?.movedim(-1, dim)
    }
}

/// `2 pi j k / n`, reduced before it is rounded.
pub(in crate::ops) fn angle(j: usize, k: usize, n: usize) -> f64 {
    TAU * ((j * k) % n) as f64 / n as f64
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "fft_irfft",
        samples,
        apply: |x| Ok(vec![x[0].fft_irfft(None, -1, FftNorm::Backward)?, x[0].fft_irfft(Some(5), 0, FftNorm::Ortho)?]),
    },
    OpEntry {
        name: "fft_hfft",
        samples,
        apply: |x| Ok(vec![x[0].fft_hfft(None, -1, FftNorm::Backward)?, x[0].fft_hfft(Some(3), 0, FftNorm::Forward)?]),
    },
    OpEntry {
        name: "fft_irfftn",
        samples,
        apply: |x| {
            let sizes: &[isize] = &[3, 4];
            let some = x[0].fft_irfftn(Some(sizes), Some(&[-1, 0]), FftNorm::Ortho)?;
            Ok(vec![x[0].fft_irfftn(None, None, FftNorm::Backward)?, some])
        },
    },
    OpEntry { name: "fft_hfftn", samples, apply: |x| Ok(vec![x[0].fft_hfftn(None, None, FftNorm::Backward)?]) },
    OpEntry {
        name: "fft_fftshift",
        samples,
        apply: |x| Ok(vec![x[0].fft_fftshift(None)?, x[0].fft_fftshift(Some(&[0]))?]),
    },
    OpEntry { name: "fft_ifftshift", samples, apply: |x| Ok(vec![x[0].fft_ifftshift(Some(&[-1, 0]))?]) },
];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 3], &[3, 2, 4]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect()
}
