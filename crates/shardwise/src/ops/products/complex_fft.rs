//! Fourier transforms of complex numbers, and of real signals to half of their spectrum: products with matrices of cosines and sines,
//! as those in [`fft`](crate::ops::fft).

use candle_core::DType;

use crate::error::{ErrorKind, Result};
use crate::op::with_autocast;
use crate::ops::elementwise::complex::ComplexTensor;
use crate::ops::products::fft::{Direction, FftNorm, angle};
use crate::placement::Placement;
use crate::tensor::DTensor;

impl DTensor {
    /// Returns the Fourier transform of a real signal along a dimension: the `n / 2 + 1` frequencies that are not negative. Of the signal
    /// the first `n` elements count, with zeros after it if it is shorter; `None` is its size.
    ///
    /// Communicates as [`matmul`](Self::matmul) with a replicated matrix does: along a sharded dimension the result is `Partial(Sum)`.
    ///
    /// # Errors
    /// If `n` is zero, or there is no such dimension.
    #[doc(alias = "fft.rfft")]
    #[track_caller]
    pub fn fft_rfft(&self, n: Option<usize>, dim: isize, norm: FftNorm) -> Result<ComplexTensor> {
        if matches!(self.dtype(), DType::F16 | DType::BF16) {
            let wide = self.to_dtype(DType::F32)?.fft_rfft(n, dim, norm)?;
            return wide.view_as_real().to_dtype(self.dtype())?.view_as_complex();
        }
        let x = self.to_dtype(crate::ops::arguments::dtype::real(self.dtype()))?;
        let at = x.resolve_dim("fft_rfft", dim)?;
        let n = points("fft_rfft", n, x.shape()[at])?;
        let factor = Direction::Forward.factor(norm, n as f64);
        let by = x.waves_of(&[x.shape()[at], n / 2 + 1, 2], |i| {
            if i[0] < n { factor * turned(angle(i[0], i[1], n), Direction::Forward)[i[2]] } else { 0.0 }
        })?;
        let parts = with_autocast(None, || DTensor::einsum("...k,kno->...no", &[&x.movedim(at as isize, -1)?, &by]))?;
        parts.movedim(-2, at as isize)?.view_as_complex()
    }

    /// A replicated tensor with the type of this one.
    #[track_caller]
    fn waves_of(&self, shape: &[usize], element: impl Fn(&[usize]) -> f64) -> Result<DTensor> {
        let placements = vec![Placement::Replicate; self.placements().len()];
        DTensor::from_fn(shape, self.dtype(), self.device_mesh(), placements, element)
    }
}

impl ComplexTensor {
    /// Returns the Fourier transform along a dimension, with `n` points: the first `n` elements count, with zeros after them if there
    /// are fewer; `None` is the size.
    ///
    /// Communicates as [`matmul`](Self::matmul) with a replicated matrix does: along a sharded dimension the result is `Partial(Sum)`.
    ///
    /// # Errors
    /// If `n` is zero, or there is no such dimension.
    #[doc(alias = "fft.fft")]
    #[track_caller]
    pub fn fft_fft(&self, n: Option<usize>, dim: isize, norm: FftNorm) -> Result<Self> {
        self.transformed_along("fft_fft", n, dim, norm, Direction::Forward)
    }

    /// Returns the inverse of [`fft_fft`](Self::fft_fft).
    #[doc(alias = "fft.ifft")]
    #[track_caller]
    pub fn fft_ifft(&self, n: Option<usize>, dim: isize, norm: FftNorm) -> Result<Self> {
        self.transformed_along("fft_ifft", n, dim, norm, Direction::Inverse)
    }

    /// Returns the real signal of `n` points of which this tensor is half of the spectrum, the inverse of [`DTensor::fft_rfft`]; `None` is
    /// twice the size less two. The imaginary part of the first and, of an even number of points, of the last frequency does not count.
    ///
    /// Communicates as [`fft_fft`](Self::fft_fft) does.
    ///
    /// # Errors
    /// If `n` is zero, or there is no such dimension.
    #[doc(alias = "fft.irfft")]
    #[track_caller]
    pub fn fft_irfft(&self, n: Option<usize>, dim: isize, norm: FftNorm) -> Result<DTensor> {
        if matches!(self.dtype(), DType::F16 | DType::BF16) {
            return self.widened()?.fft_irfft(n, dim, norm)?.to_dtype(self.dtype());
        }
        let at = self.resolved("fft_irfft", dim)?;
        let size = self.shape()[at];
        let n = points("fft_irfft", n, 2 * size.saturating_sub(1))?;
        let factor = Direction::Inverse.factor(norm, n as f64);
        // The other half of the spectrum is the conjugate of this one: all but the first and the middle frequency count twice.
        let weight = |k: usize| if k == 0 || 2 * k == n { 1.0 } else { 2.0 };
        let by = self.view_as_real().waves_of(&[size, 2, n], |i| {
            let (cos, sin) = (angle(i[0], i[2], n).cos(), angle(i[0], i[2], n).sin());
            if i[0] > n / 2 { 0.0 } else { factor * weight(i[0]) * [cos, -sin][i[1]] }
        })?;
        let lines = self.view_as_real().movedim(at as isize, -2)?;
        with_autocast(None, || DTensor::einsum("...kc,kcn->...n", &[&lines, &by]))?.movedim(-1, at as isize)
    }

    #[track_caller]
    fn transformed_along(
        &self,
        name: &'static str,
        n: Option<usize>,
        dim: isize,
        norm: FftNorm,
        direction: Direction,
    ) -> Result<Self> {
        if matches!(self.dtype(), DType::F16 | DType::BF16) {
            let wide = self.widened()?.transformed_along(name, n, dim, norm, direction)?;
            return wide.view_as_real().to_dtype(self.dtype())?.view_as_complex();
        }
        let at = self.resolved(name, dim)?;
        let size = self.shape()[at];
        let n = points(name, n, size)?;
        let factor = direction.factor(norm, n as f64);
        // What the real and the imaginary part of an element are multiplied by for each part of the result.
        let by = self.view_as_real().waves_of(&[size, 2, n, 2], |i| {
            let [real, imaginary] = turned(angle(i[0], i[2], n), direction);
            let parts = [[real, imaginary], [-imaginary, real]];
            if i[0] < n { factor * parts[i[1]][i[3]] } else { 0.0 }
        })?;
        let lines = self.view_as_real().movedim(at as isize, -2)?;
        let parts = with_autocast(None, || DTensor::einsum("...kc,kcno->...no", &[&lines, &by]))?;
        parts.movedim(-2, at as isize)?.view_as_complex()
    }

    #[track_caller]
    fn widened(&self) -> Result<Self> {
        self.view_as_real().to_dtype(DType::F32)?.view_as_complex()
    }

    /// A dimension, counted without that of the parts.
    fn resolved(&self, name: &str, dim: isize) -> Result<usize> {
        let ndim = self.ndim() as isize;
        match usize::try_from(if dim < 0 { dim + ndim } else { dim }) {
            Ok(at) if at < self.ndim() => Ok(at),
            _ => Err(ErrorKind::shape(self.shape()).error(
                "dimension",
                format!("{dim} in {name} of shape {:?}", self.shape()),
                format!("from {} to {}", -ndim, ndim - 1),
                "correct the dimension",
            )),
        }
    }
}

/// `exp(i angle)` for an inverse transform, `exp(-i angle)` for one forward, as real and imaginary part.
fn turned(angle: f64, direction: Direction) -> [f64; 2] {
    match direction {
        Direction::Inverse => [angle.cos(), angle.sin()],
        Direction::Forward => [angle.cos(), -angle.sin()],
    }
}

/// The number of points of a transform.
fn points(name: &str, n: Option<usize>, usual: usize) -> Result<usize> {
    match n.unwrap_or(usual) {
        0 => {
            let found = format!("0 points in {name}");
            Err(ErrorKind::Argument.error("points", found, "at least 1", "pass the number of points"))
        }
        n => Ok(n),
    }
}
