//! Windows of signal processing.

use std::f64::consts::{PI, TAU};

use candle_core::DType;

use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::placement::Placement;
use crate::tensor::DTensor;
use shardwise_kernels::special::i0;

/// A window function, see [`DTensor::window`].
#[derive(Debug, Clone, PartialEq)]
#[doc(alias = "signal.windows")]
pub enum WindowFunction {
    /// A triangle.
    Bartlett,
    /// Three cosine terms.
    Blackman,
    /// A sine from 0 to pi, at the middles of the points.
    Cosine,
    /// An exponential that falls to both sides of a center; `None` is the middle.
    Exponential {
        /// The center, in points.
        center: Option<f64>,
        /// The number of points along which it falls to 1/e.
        tau: f64,
    },
    /// A Gaussian bell.
    Gaussian {
        /// The standard deviation, in points.
        std: f64,
    },
    /// A sum of cosines with alternating signs, with these coefficients.
    GeneralCosine(Vec<f64>),
    /// Two cosine terms, `alpha` and `1 - alpha`.
    GeneralHamming {
        /// The coefficient.
        alpha: f64,
    },
    /// Two cosine terms, 0.54 and 0.46.
    Hamming,
    /// Two cosine terms, a half each.
    Hann,
    /// A window from the modified Bessel function of order 0.
    Kaiser {
        /// The shape; not negative.
        beta: f64,
    },
    /// Nuttall's four cosine terms.
    Nuttall,
}

impl WindowFunction {
    /// The value at point `i` of `n`; a window that is not symmetric is the first `n` points of one of `n + 1`.
    fn at(&self, i: usize, n: usize, symmetric: bool) -> f64 {
        if n == 1 {
            // PyTorch's one point windows are the middle.
            return match self {
                WindowFunction::Exponential { center: Some(center), tau } => (-center.abs() / tau).exp(),
                _ => 1.0,
            };
        }
        let steps = if symmetric { n - 1 } else { n } as f64;
        let i = i as f64;
        let cosines = |coefficients: &[f64]| {
            let term = |(k, c): (usize, &f64)| {
                let sign = if k % 2 == 0 { 1.0 } else { -1.0 };
                sign * c * (TAU * k as f64 * i / steps).cos()
            };
            coefficients.iter().enumerate().map(term).sum::<f64>()
        };
        match self {
            WindowFunction::Bartlett => 1.0 - (2.0 * i / steps - 1.0).abs(),
            WindowFunction::Blackman => cosines(&[0.42, 0.5, 0.08]),
            WindowFunction::Cosine => (PI * (i + 0.5) / (steps + 1.0)).sin(),
            WindowFunction::Exponential { center, tau } => (-(i - center.unwrap_or(0.5 * steps)).abs() / tau).exp(),
            WindowFunction::Gaussian { std } => (-0.5 * ((i - 0.5 * steps) / std).powi(2)).exp(),
            WindowFunction::GeneralCosine(coefficients) => cosines(coefficients),
            WindowFunction::GeneralHamming { alpha } => cosines(&[*alpha, 1.0 - alpha]),
            WindowFunction::Hamming => cosines(&[0.54, 0.46]),
            WindowFunction::Hann => cosines(&[0.5, 0.5]),
            WindowFunction::Kaiser { beta } => {
                let along = 2.0 * i / steps - 1.0;
                i0(beta * (1.0 - along * along).max(0.0).sqrt()) / i0(*beta)
            }
            WindowFunction::Nuttall => cosines(&[0.3635819, 0.4891775, 0.1365995, 0.0106411]),
        }
    }

    /// Fails if a parameter is out of range.
    fn check(&self, symmetric: bool) -> Result<()> {
        let needed = match self {
            WindowFunction::Exponential { tau, .. } if *tau <= 0.0 || tau.is_nan() => "a tau above 0",
            WindowFunction::Exponential { center: Some(_), .. } if symmetric => "no center for a symmetric window",
            WindowFunction::Gaussian { std } if *std <= 0.0 || std.is_nan() => "a standard deviation above 0",
            WindowFunction::Kaiser { beta } if *beta < 0.0 || beta.is_nan() => "a beta of at least 0",
            WindowFunction::GeneralCosine(coefficients) if coefficients.is_empty() => "at least one coefficient",
            _ => return Ok(()),
        };
        let found = format!("{self:?}{}", if symmetric { ", symmetric" } else { "" });
        Err(ErrorKind::Argument.error("window", found, needed, "change the parameter"))
    }
}

impl DTensor {
    /// Creates a window of signal processing: a vector of `n` points whose largest value is 1. A window that is not `symmetric` is periodic, for
    /// spectral analysis.
    ///
    /// Local: every rank computes its part.
    ///
    /// # Errors
    /// If the type is not a floating-point one, or a parameter of the window is out of range.
    #[doc(alias = "hann_window")]
    #[doc(alias = "kaiser_window")]
    #[track_caller]
    pub fn window(
        window: &WindowFunction,
        symmetric: bool,
        n: usize,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        window.check(symmetric)?;
        if !dtype.is_float() {
            let found = format!("a window of {}", dtype.as_str());
            return Err(ErrorKind::dtype(dtype).error("window", found, "a floating-point type", "pass f32 or f64"));
        }
        DTensor::from_fn(n, dtype, mesh, placements, |at| window.at(at[0], n, symmetric))
    }
}
