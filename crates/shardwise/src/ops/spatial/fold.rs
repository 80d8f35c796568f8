//! Sums of overlapping windows, the inverse direction of `im2col`; padding that keeps the size of a convolution; resampling by factors.

use candle_core::{DType, Device, Tensor};

use crate::error::{ErrorKind, Result};
use crate::ops::shapes::arrange::signed;
use crate::ops::spatial::windows::per_dim;
use crate::ops::{InterpolateOptions, OpEntry, PerDim, SampleInput};
use crate::tensor::{DTensor, check_whole};

impl DTensor {
    /// Adds columns `[n, channels * window, windows]`, or without `n`, to the places of their windows in images of `output_size`:
    /// `[n, channels, height, width]`. PyTorch's `nn.functional.fold`; the transpose of [`im2col`](Self::im2col).
    ///
    /// Communicates as [`index_add`](Self::index_add) does: nothing if images or channels are sharded.
    ///
    /// # Errors
    /// If the rows are not a multiple of the window, or the columns are not as many as windows fit.
    #[doc(alias = "fold")]
    #[track_caller]
    pub fn col2im(
        &self,
        output_size: &[usize],
        kernel_size: &[usize],
        dilation: &[usize],
        padding: &[usize],
        stride: &[usize],
    ) -> Result<DTensor> {
        let axis = |s: usize| {
            let n = per_dim(output_size, s, 1);
            let (size, stride) = (per_dim(kernel_size, s, 1), per_dim(stride, s, 1).max(1));
            let (dilation, padding) = (per_dim(dilation, s, 1), per_dim(padding, s, 0));
            let padded = padding.checked_mul(2)?.checked_add(n)?;
            let span = dilation.checked_mul(size.checked_sub(1)?)?.checked_add(1)?;
            let place = move |window: usize, i: usize| window * stride + i * dilation;
            Some(((n, padded), padding, size, padded.checked_sub(span)? / stride + 1, place))
        };
        let wrong = || {
            let found = format!("windows of {kernel_size:?} for {output_size:?} in col2im of {}", self.layout());
            let needed = "columns [n, channels * window, windows], as many as windows fit into the padded image";
            ErrorKind::shape(self.shape()).error("columns", found, needed, "correct the sizes")
        };
        let (Some(tall), Some(wide)) = (axis(0), axis(1)) else { return Err(wrong()) };
        let ((height, top, rows, down, y), (width, left, columns, across, x)) = (tall, wide);
        let n = self.ndim();
        let fits = (n == 2 || n == 3)
            && rows.checked_mul(columns).is_some_and(|window| self.shape()[n - 2].is_multiple_of(window))
            && down.checked_mul(across) == Some(self.shape()[n - 1]);
        if !fits {
            return Err(wrong());
        }
        let ((height, width), padded) = ((height.0, width.0), (height.1, width.1));
        let channels = self.shape()[n - 2] / (rows * columns);
        let lead = [&self.shape()[..n - 2], &[channels][..]].concat();
        // Of no channels there are as many columns as anybody wants.
        check_whole(&[rows * columns, down * across], DType::I64)?;
        let images: Vec<usize> = lead.iter().map(|&count| count.max(1)).chain([padded.0, padded.1]).collect();
        check_whole(&images, self.dtype())?;
        let mut places = Vec::with_capacity(rows * columns * down * across);
        for element in 0..rows * columns {
            for window in 0..down * across {
                let (i, j) = (y(window / across, element / columns), x(window % across, element % columns));
                places.push((i * padded.1 + j) as i64);
            }
        }
        let flat = self.reshape(&[signed(&lead), vec![places.len() as isize]].concat())?;
        let zeros = Tensor::zeros([lead.as_slice(), &[padded.0 * padded.1]].concat(), self.dtype(), &Device::Cpu)?;
        let places = self.constant(&Tensor::from_vec(places.clone(), places.len(), &Device::Cpu)?)?;
        let image = self.constant(&zeros)?.index_add(-1, &places, &flat)?;
        let image = image.reshape(&[signed(&lead), vec![padded.0 as isize, padded.1 as isize]].concat())?;
        image.narrow(-2, top, height)?.narrow(-1, left, width)
    }

    /// Pads the spatial dimensions with zeros, so that a convolution with windows of `kernel_size` in steps of 1 keeps their sizes; an odd
    /// border is longer at the end. PyTorch's `padding="same"`.
    ///
    /// Communicates as [`pad`](Self::pad) does.
    #[doc(alias = "same")]
    #[track_caller]
    pub fn pad_same(&self, kernel_size: &[usize], dilation: impl Into<PerDim>) -> Result<DTensor> {
        let (dilation, spatial) = (dilation.into(), kernel_size.len());
        let Some(dilation) = dilation.of(spatial).filter(|_| spatial > 0 && spatial < self.ndim()) else {
            let found =
                format!("windows of {kernel_size:?} with dilation {dilation:?} in pad_same of {}", self.layout());
            let needed = "one size per spatial dimension, and one dilation or one for each";
            return Err(ErrorKind::Argument.error("window", found, needed, "correct the sizes"));
        };
        let border = |s: usize| {
            let total = dilation[s].saturating_mul(kernel_size[s].saturating_sub(1));
            (total / 2, total - total / 2)
        };
        self.pad(&(0..spatial).rev().map(border).collect::<Vec<_>>(), 0)
    }

    /// Resamples the last dimensions by factors, one for each: PyTorch's `interpolate(scale_factor=...)`. Sizes are rounded down.
    ///
    /// Communicates as [`interpolate`](Self::interpolate) does. The factors are also used for positions, unless the options have factors.
    #[doc(alias = "scale_factor")]
    #[track_caller]
    pub fn interpolate_by(&self, factors: &[f64], options: &InterpolateOptions) -> Result<DTensor> {
        let fits = factors.len() <= self.ndim() && factors.iter().all(|f| f.is_finite() && *f > 0.0);
        if !fits {
            let found = format!("factors {factors:?} in interpolate_by of {}", self.layout());
            let needed = "one positive factor per resampled dimension";
            return Err(ErrorKind::Argument.error("factors", found, needed, "correct the factors"));
        }
        let own = &self.shape()[self.ndim() - factors.len()..];
        let sizes: Vec<usize> = own.iter().zip(factors).map(|(&n, f)| (n as f64 * f).floor() as usize).collect();
        let scale_factor = options.scale_factor.clone().or_else(|| Some(factors.to_vec()));
        self.interpolate(&sizes, &InterpolateOptions { scale_factor, ..options.clone() })
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "col2im",
        samples: || vec![vec![sample(&[2, 8, 9])], vec![sample(&[4, 9])]],
        apply: |x| Ok(vec![x[0].col2im(&[4, 5], &[2], &[1], &[1], &[2, 2])?]),
    },
    OpEntry {
        name: "pad_same",
        samples: || vec![vec![sample(&[2, 3, 4, 5])]],
        apply: |x| Ok(vec![x[0].pad_same(&[3, 2], [1, 3])?]),
    },
    OpEntry {
        name: "interpolate_by",
        samples: || vec![vec![sample(&[2, 3, 4, 5])]],
        apply: |x| Ok(vec![x[0].interpolate_by(&[1.5, 2.0], &InterpolateOptions::default())?]),
    },
];

fn sample(shape: &[usize]) -> SampleInput {
    SampleInput::new(shape, DType::F64)
}
