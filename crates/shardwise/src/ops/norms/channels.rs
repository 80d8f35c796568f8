//! Operators on channels: shuffles between channels and pixels, norms of every channel, norms with their statistics.

use candle_core::DType;

use crate::error::{Error, ErrorKind, Result};
use crate::ops::shapes::arrange::signed;
use crate::ops::{OpEntry, SampleInput};
use crate::tensor::DTensor;

impl DTensor {
    /// Moves channels to pixels: `[.., channels * r * r, height, width]` to `[.., channels, height * r, width * r]`.
    ///
    /// Communicates as [`reshape`](Self::reshape) does; nothing if leading dimensions are sharded.
    ///
    /// # Errors
    /// If the channels are not a multiple of the square of `upscale_factor`.
    #[track_caller]
    pub fn pixel_shuffle(&self, upscale_factor: usize) -> Result<DTensor> {
        const NAME: &str = "pixel_shuffle";
        let (r, n) = (upscale_factor, self.ndim());
        let square = r.checked_mul(r).filter(|&square| square > 0);
        if n < 3 || square.is_none_or(|square| !self.shape()[n - 3].is_multiple_of(square)) {
            return Err(self.no_multiple(
                NAME,
                r,
                "[.., channels, height, width] with channels that the square divides",
            ));
        }
        let (channels, n, r) = (self.shape()[n - 3] / (r * r), n as isize, r as isize);
        let apart = self.unflatten(-3, &[channels as isize, r, r])?;
        apart.movedims(&[n - 2, n - 1], &[n - 1, n + 1])?.flatten(n, n + 1)?.flatten(n - 2, n - 1)
    }

    /// Moves pixels to channels: `[.., channels, height * r, width * r]` to `[.., channels * r * r, height, width]`.
    ///
    /// Communicates as [`reshape`](Self::reshape) does; nothing if leading dimensions are sharded.
    ///
    /// # Errors
    /// If height or width are not a multiple of `downscale_factor`.
    #[track_caller]
    pub fn pixel_unshuffle(&self, downscale_factor: usize) -> Result<DTensor> {
        const NAME: &str = "pixel_unshuffle";
        let (r, n) = (downscale_factor, self.ndim());
        if n < 3 || r == 0 || !self.shape()[n - 2..].iter().all(|size| size.is_multiple_of(r)) {
            return Err(self.no_multiple(NAME, r, "[.., channels, height, width] with sizes that it divides"));
        }
        let [height, width] = [n - 2, n - 1].map(|d| (self.shape()[d] / r) as isize);
        let (n, r) = (n as isize, r as isize);
        let apart = self.unflatten(-1, &[width, r])?.unflatten(-3, &[height, r])?;
        apart.movedims(&[n - 1, n + 1], &[n - 2, n - 1])?.flatten(n - 3, n - 1)
    }

    /// Reorders the channels of `[n, channels, ..]`: those at one place of each group come together.
    ///
    /// Communicates as [`reshape`](Self::reshape) does; nothing if other dimensions are sharded.
    ///
    /// # Errors
    /// If the channels are not a multiple of `groups`.
    #[track_caller]
    pub fn channel_shuffle(&self, groups: usize) -> Result<DTensor> {
        const NAME: &str = "channel_shuffle";
        if self.ndim() < 3 || groups == 0 || !self.shape()[1].is_multiple_of(groups) {
            return Err(self.no_multiple(NAME, groups, "[n, channels, ..] with channels that the groups divide"));
        }
        let size = (self.shape()[1] / groups) as isize;
        self.unflatten(1, &[groups as isize, size])?.transpose(1, 2)?.flatten(1, 2)
    }

    fn no_multiple(&self, name: &'static str, factor: usize, needed: &str) -> Error {
        let found = format!("{factor} in {name} of {}", self.layout());
        ErrorKind::Argument.error("factor", found, needed.to_string(), "correct the factor, or pad the tensor")
    }

    /// Normalizes every channel of every image of `[n, channels, ..]`, with its own mean and variance or with given `statistics` per
    /// channel, an optional weight and an optional bias per channel.
    ///
    /// Communicates as [`group_norm`](Self::group_norm) with one channel per group does.
    #[track_caller]
    pub fn instance_norm(
        &self,
        statistics: Option<(&DTensor, &DTensor)>,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<DTensor> {
        if self.ndim() < 2 {
            return Err(self.bad_dims("instance_norm", &[], "[n, channels, ..]"));
        }
        match statistics {
            None => self.group_norm(self.shape()[1], weight, bias, eps),
            given => self.batch_norm(given, weight, bias, eps),
        }
    }

    /// Normalizes the last `dims` dimensions as [`layer_norm`](Self::layer_norm) does; returns the result, the means, and the
    /// reciprocal standard deviations.
    #[track_caller]
    pub fn native_layer_norm(
        &self,
        dims: usize,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<(DTensor, DTensor, DTensor)> {
        let result = self.layer_norm(dims, weight, bias, eps)?;
        let last: Vec<isize> = (1..=dims as isize).map(|d| -d).collect();
        let deviation = self.var(&last, 0.0, true)?.add_scalar(eps)?.rsqrt()?;
        Ok((result, self.mean(&last, true)?, deviation))
    }

    /// Normalizes groups of channels as [`group_norm`](Self::group_norm) does; returns the result, and the means and reciprocal
    /// standard deviations `[n, groups]`.
    #[track_caller]
    pub fn native_group_norm(
        &self,
        groups: usize,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<(DTensor, DTensor, DTensor)> {
        let result = self.group_norm(groups, weight, bias, eps)?;
        let size = self.shape()[1..].iter().product::<usize>() / groups;
        let apart = self.reshape(&[self.shape()[0] as isize, groups as isize, size as isize])?;
        let deviation = apart.var(&[-1], 0.0, false)?.add_scalar(eps)?.rsqrt()?;
        Ok((result, apart.mean(&[-1], false)?, deviation))
    }

    /// Normalizes channels with the statistics of the batch as [`batch_norm`](Self::batch_norm) does; returns the result, and the
    /// means and reciprocal standard deviations of the channels.
    #[track_caller]
    pub fn native_batch_norm(
        &self,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<(DTensor, DTensor, DTensor)> {
        let result = self.batch_norm(None, weight, bias, eps)?;
        let (mean, variance) = self.batch_statistics(0.0)?;
        Ok((result, mean, variance.add_scalar(eps)?.rsqrt()?))
    }

    /// Joins tensors chunk by chunk: each is padded with zeros to `chunks` chunks of one size along a dimension, chunks become rows, and
    /// the rows of all tensors are joined. What a reduce-scatter of several gradients takes.
    ///
    /// # Errors
    /// If there is no tensor, or the dimensions in front differ.
    #[doc(alias = "_chunk_cat")]
    #[track_caller]
    pub fn chunk_cat(tensors: &[&DTensor], dim: isize, chunks: usize) -> Result<DTensor> {
        let row = |x: &&DTensor| -> Result<DTensor> {
            let at = x.resolve_dim("chunk_cat", dim)?;
            if chunks == 0 {
                return Err(x.bad_dims("chunk_cat", &[dim], "at least one chunk"));
            }
            let (n, size) = (x.shape()[at], x.shape()[at].div_ceil(chunks));
            let border = [vec![(0, 0); x.ndim() - 1 - at], vec![(0, size * chunks - n)]].concat();
            let rest = size * x.shape()[at + 1..].iter().product::<usize>();
            x.pad(&border, 0)?.reshape(&[signed(&x.shape()[..at]), vec![chunks as isize, rest as isize]].concat())
        };
        let rows = tensors.iter().map(row).collect::<Result<Vec<_>>>()?;
        DTensor::cat(&rows.iter().collect::<Vec<_>>(), -1)
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "pixel_shuffle", samples: || one(&[2, 8, 3, 2]), apply: |x| Ok(vec![x[0].pixel_shuffle(2)?]) },
    OpEntry { name: "pixel_unshuffle", samples: || one(&[2, 2, 6, 4]), apply: |x| Ok(vec![x[0].pixel_unshuffle(2)?]) },
    OpEntry { name: "channel_shuffle", samples: || one(&[2, 6, 3]), apply: |x| Ok(vec![x[0].channel_shuffle(3)?]) },
    OpEntry {
        name: "instance_norm",
        samples: affine,
        apply: |x| Ok(vec![x[0].instance_norm(None, Some(&x[1]), Some(&x[2]), 1e-3)?]),
    },
    OpEntry {
        name: "native_layer_norm",
        samples: || one(&[4, 2, 3]),
        apply: |x| all(x[0].native_layer_norm(2, None, None, 1e-3)?),
    },
    OpEntry {
        name: "native_group_norm",
        samples: affine,
        apply: |x| all(x[0].native_group_norm(2, Some(&x[1]), Some(&x[2]), 1e-3)?),
    },
    OpEntry {
        name: "native_batch_norm",
        samples: affine,
        apply: |x| all(x[0].native_batch_norm(Some(&x[1]), Some(&x[2]), 1e-3)?),
    },
    OpEntry {
        name: "chunk_cat",
        samples: || vec![vec![SampleInput::new(&[5, 3], DType::F64), SampleInput::new(&[4, 2], DType::F64)]],
        apply: |x| Ok(vec![DTensor::chunk_cat(&[&x[0], &x[1]], 0, 2)?]),
    },
];

fn all((a, b, c): (DTensor, DTensor, DTensor)) -> Result<Vec<DTensor>> {
    Ok(vec![a, b, c])
}

fn one(shape: &[usize]) -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(shape, DType::F64)]]
}

fn affine() -> Vec<Vec<SampleInput>> {
    let vector = SampleInput::new(&[4], DType::F64);
    vec![vec![SampleInput::new(&[3, 4, 5], DType::F64), vector.clone(), vector]]
}
