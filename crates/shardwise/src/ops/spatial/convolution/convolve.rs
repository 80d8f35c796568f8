//! Convolutions and transposed convolutions over one, two and three spatial dimensions.

use std::panic::Location;

use candle_core::DType;

use super::operator::{Computes, Convolution};
use super::options::{ConvOptions, ConvTransposeOptions, PerDim};
use super::window::{Window, window_counts};
use crate::error::{ErrorKind, Result};
use crate::op::{for_sum_with, name_call};
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::tensor::DTensor;

impl DTensor {
    /// Convolves `[n, channels, length]` with a weight `[out, channels / groups, size]` and adds a bias `[out]`.
    ///
    /// Communicates nothing if the batch or the output channels are sharded. Sharded input channels give a `Partial(Sum)`
    /// result; a sharded length exchanges halos between neighbours.
    ///
    /// # Errors
    /// If shapes and groups do not fit, or no window fits into the padded input.
    #[track_caller]
    pub fn conv1d<D: Into<PerDim>>(
        &self,
        weight: &DTensor,
        bias: Option<&DTensor>,
        options: ConvOptions<D>,
    ) -> Result<DTensor> {
        self.convolution("conv1d", 1, weight, bias, options)
    }

    /// Convolves `[n, channels, height, width]` with a weight `[out, channels / groups, height, width]` and adds a bias `[out]`.
    ///
    /// Communicates as [`conv1d`](Self::conv1d) does: halos if height or width is sharded.
    ///
    /// # Errors
    /// If shapes and groups do not fit, or no window fits into the padded input.
    #[track_caller]
    pub fn conv2d<D: Into<PerDim>>(
        &self,
        weight: &DTensor,
        bias: Option<&DTensor>,
        options: ConvOptions<D>,
    ) -> Result<DTensor> {
        self.convolution("conv2d", 2, weight, bias, options)
    }

    /// Convolves `[n, channels, depth, height, width]` with a weight `[out, channels / groups, depth, height, width]` and adds a
    /// bias `[out]`.
    ///
    /// Communicates as [`conv1d`](Self::conv1d) does: halos if a spatial dimension is sharded.
    ///
    /// # Errors
    /// If shapes and groups do not fit, or no window fits into the padded input.
    #[track_caller]
    pub fn conv3d<D: Into<PerDim>>(
        &self,
        weight: &DTensor,
        bias: Option<&DTensor>,
        options: ConvOptions<D>,
    ) -> Result<DTensor> {
        self.convolution("conv3d", 3, weight, bias, options)
    }

    /// Applies the transposed convolution of `[n, channels, length]` with a weight `[channels, out / groups, size]`, and adds a
    /// bias `[out]`.
    ///
    /// Communicates nothing if the batch or the output channels are sharded. Sharded input channels give a `Partial(Sum)`
    /// result; a sharded length exchanges halos between neighbours.
    ///
    /// # Errors
    /// If shapes and groups do not fit, or the output padding is not less than stride or dilation.
    #[track_caller]
    pub fn conv_transpose1d<D: Into<PerDim>>(
        &self,
        weight: &DTensor,
        bias: Option<&DTensor>,
        options: ConvTransposeOptions<D>,
    ) -> Result<DTensor> {
        self.transposed("conv_transpose1d", 1, weight, bias, options)
    }

    /// Applies the transposed convolution of `[n, channels, height, width]` with a weight `[channels, out / groups, height, width]`,
    /// and adds a bias `[out]`.
    ///
    /// Communicates as [`conv_transpose1d`](Self::conv_transpose1d) does.
    ///
    /// # Errors
    /// If shapes and groups do not fit, or the output padding is not less than stride or dilation.
    #[track_caller]
    pub fn conv_transpose2d<D: Into<PerDim>>(
        &self,
        weight: &DTensor,
        bias: Option<&DTensor>,
        options: ConvTransposeOptions<D>,
    ) -> Result<DTensor> {
        self.transposed("conv_transpose2d", 2, weight, bias, options)
    }

    /// Applies the transposed convolution of `[n, channels, depth, height, width]` with a weight
    /// `[channels, out / groups, depth, height, width]`, and adds a bias `[out]`.
    ///
    /// Communicates as [`conv_transpose1d`](Self::conv_transpose1d) does.
    ///
    /// # Errors
    /// If shapes and groups do not fit, or the output padding is not less than stride or dilation.
    #[track_caller]
    pub fn conv_transpose3d<D: Into<PerDim>>(
        &self,
        weight: &DTensor,
        bias: Option<&DTensor>,
        options: ConvTransposeOptions<D>,
    ) -> Result<DTensor> {
        self.transposed("conv_transpose3d", 3, weight, bias, options)
    }

    #[track_caller]
    fn convolution<D: Into<PerDim>>(
        &self,
        name: &'static str,
        spatial: usize,
        weight: &DTensor,
        bias: Option<&DTensor>,
        options: ConvOptions<D>,
    ) -> Result<DTensor> {
        // One image without a batch.
        if self.ndim() == spatial + 1 {
            return self.unsqueeze(0)?.convolution(name, spatial, weight, bias, options)?.squeeze(Some(0));
        }
        let groups = options.groups;
        let fits = self.ndim() == spatial + 2
            && weight.ndim() == spatial + 2
            && groups > 0
            && weight.shape()[1].checked_mul(groups) == Some(self.shape()[1])
            && weight.shape()[0].is_multiple_of(groups);
        if !fits {
            let found = format!("{} and {} with {groups} group(s) in {name}", self.layout(), weight.layout());
            let needed = "[n, channels, ...] and [out, channels / groups, ...]";
            return Err(ErrorKind::shape(self.shape()).error("operands", found, needed, "reshape the operands"));
        }
        let [stride, padding, dilation] = [options.stride, options.padding, options.dilation].map(Into::into);
        let windows = self.windows(name, weight, [stride, padding, dilation])?;
        let counts = window_counts(name, &windows, self.shape())
            .map_err(|e| name_call(e, name, &[self, weight], Location::caller()))?;
        let sizes = self.shape()[2..].to_vec();
        let op = Convolution { name, computes: Computes::Result, windows, grouped: groups > 1, sizes, counts };
        self.form(&op, weight, groups, bias)
    }

    #[track_caller]
    fn transposed<D: Into<PerDim>>(
        &self,
        name: &'static str,
        spatial: usize,
        weight: &DTensor,
        bias: Option<&DTensor>,
        options: ConvTransposeOptions<D>,
    ) -> Result<DTensor> {
        if self.ndim() == spatial + 1 {
            return self.unsqueeze(0)?.transposed(name, spatial, weight, bias, options)?.squeeze(Some(0));
        }
        let groups = options.groups;
        let fits = self.ndim() == spatial + 2
            && weight.ndim() == spatial + 2
            && groups > 0
            && weight.shape()[0] == self.shape()[1]
            && self.shape()[1].is_multiple_of(groups);
        if !fits {
            let found = format!("{} and {} with {groups} group(s) in {name}", self.layout(), weight.layout());
            let needed = "[n, channels, ...] and [channels, out / groups, ...]";
            return Err(ErrorKind::shape(self.shape()).error("operands", found, needed, "reshape the operands"));
        }
        let [stride, padding, dilation] = [options.stride, options.padding, options.dilation].map(Into::into);
        let windows = self.windows(name, weight, [stride, padding, dilation])?;
        let more: PerDim = options.output_padding.into();
        let more = more.of(spatial).map(<[usize]>::to_vec).unwrap_or_default();
        // The largest input of which the convolution has so many windows, for the output padding that PyTorch accepts.
        let size = |((window, &n), &more): ((&Window, &usize), &usize)| {
            let inside = more < window.stride.max(window.dilation);
            window.covered(n).and_then(|size| size.checked_add(more)).filter(|&size| inside && size > 0)
        };
        let sizes: Option<Vec<usize>> = windows.iter().zip(&self.shape()[2..]).zip(&more).map(size).collect();
        let Some(sizes) = sizes.filter(|sizes| sizes.len() == spatial) else {
            let found = format!(
                "shape {:?}, windows {windows:?} and output padding {more:?} in {name} of {}",
                self.shape(),
                self.layout()
            );
            return Err(ErrorKind::shape(self.shape()).error(
                "operands",
                found,
                "a result with elements, and output padding less than stride or dilation in every dimension",
                "correct padding or output padding",
            ));
        };
        let counts = self.shape()[2..].to_vec();
        let op = Convolution { name, computes: Computes::Input, windows, grouped: groups > 1, sizes, counts };
        self.form(&op, weight, groups, bias)
    }

    /// The windows of a weight, from stride, padding and dilation.
    fn windows(&self, name: &'static str, weight: &DTensor, options: [PerDim; 3]) -> Result<Vec<Window>> {
        let sizes = weight.shape().get(2..).unwrap_or_default();
        let [Some(stride), Some(padding), Some(dilation)] = options.each_ref().map(|o| o.of(sizes.len())) else {
            let found = format!("options for another number of dimensions in {name} of {}", self.layout());
            return Err(ErrorKind::Argument.error(
                "options",
                found,
                format!("one number, or {}", sizes.len()),
                "pass one number per spatial dimension",
            ));
        };
        let window = |(s, &size): (usize, &usize)| Window {
            size,
            stride: stride[s],
            padding: padding[s],
            dilation: dilation[s],
        };
        Ok(sizes.iter().enumerate().map(window).collect())
    }

    /// Runs the operator, with groups as a dimension of their own, and adds a bias.
    #[track_caller]
    fn form(&self, op: &Convolution, weight: &DTensor, groups: usize, bias: Option<&DTensor>) -> Result<DTensor> {
        let spatial = op.windows.len();
        let out = if op.computes == Computes::Input { weight.shape()[1] * groups } else { weight.shape()[0] };
        if let Some(bias) = bias.filter(|bias| bias.shape() != [out]) {
            let found = format!("shape {:?} in {} of {}", bias.shape(), op.name, self.layout());
            let needed = format!("shape [{out}], one number per channel of the result");
            return Err(ErrorKind::shape(bias.shape()).error("bias", found, needed, "create the bias with that shape"));
        }
        let wide = dtype::promote(self.dtype(), weight.dtype());
        let typed = |t: &DTensor| if t.dtype() == wide { Ok(t.clone()) } else { t.to_dtype(wide) };
        let (x, weight) = (typed(self)?, typed(weight)?);
        let product = if groups == 1 {
            op.run_on(&x, &weight)?
        } else {
            let apart = |t: &DTensor, dim: isize| t.unflatten(dim, &[groups as isize, -1]);
            op.run_on(&apart(&x, 1)?, &apart(&weight, 0)?)?.flatten(1, 2)?
        };
        let Some(bias) = bias else { return Ok(product) };
        let bias = for_sum_with(&product, bias)?;
        product.add(&bias.reshape(&[vec![-1], vec![1; spatial]].concat())?)
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "conv1d",
        samples: lines,
        apply: |x| {
            let wide = ConvOptions { stride: 2, padding: 2, dilation: 2, groups: 1 };
            let bias = x[1].select(1, 0)?.select(1, 0)?;
            Ok(vec![x[0].conv1d(&x[1], None, ConvOptions::default())?, x[0].conv1d(&x[1], Some(&bias), wide)?])
        },
    },
    OpEntry {
        name: "conv2d",
        samples: planes,
        apply: |x| {
            let wide = ConvOptions { stride: 2, padding: 1, ..ConvOptions::default() };
            Ok(vec![x[0].conv2d(&x[1], None, ConvOptions::default())?, x[0].conv2d(&x[1], None, wide)?])
        },
    },
    OpEntry {
        name: "conv3d",
        samples: volumes,
        apply: |x| {
            let each = ConvOptions { stride: [1, 2, 1], padding: [0, 1, 1], dilation: [1, 1, 2], groups: 1 };
            Ok(vec![x[0].conv3d(&x[1], None, each)?])
        },
    },
    OpEntry {
        name: "conv_transpose1d",
        samples: transposed_lines,
        apply: |x| {
            let wide = ConvTransposeOptions { stride: 2, padding: 1, output_padding: 1, ..Default::default() };
            Ok(vec![x[0].conv_transpose1d(&x[1], None, wide)?])
        },
    },
    OpEntry {
        name: "conv_transpose2d",
        samples: transposed_planes,
        apply: |x| {
            let each = ConvTransposeOptions {
                stride: [2, 1],
                padding: [1, 0],
                output_padding: [1, 0],
                dilation: [1, 2],
                groups: 1,
            };
            Ok(vec![x[0].conv_transpose2d(&x[1], None, each)?])
        },
    },
    OpEntry {
        name: "conv_transpose3d",
        samples: transposed_volumes,
        apply: |x| Ok(vec![x[0].conv_transpose3d(&x[1], None, ConvTransposeOptions::default())?]),
    },
];

fn pair(x: &[usize], weight: &[usize]) -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(x, DType::I64), SampleInput::new(weight, DType::I64)]]
}

fn lines() -> Vec<Vec<SampleInput>> {
    pair(&[2, 2, 7], &[3, 2, 3])
}

fn planes() -> Vec<Vec<SampleInput>> {
    pair(&[1, 2, 5, 4], &[2, 2, 3, 2])
}

fn volumes() -> Vec<Vec<SampleInput>> {
    pair(&[1, 2, 3, 4, 4], &[2, 2, 2, 3, 2])
}

fn transposed_lines() -> Vec<Vec<SampleInput>> {
    pair(&[2, 3, 5], &[3, 2, 3])
}

fn transposed_planes() -> Vec<Vec<SampleInput>> {
    pair(&[1, 2, 4, 3], &[2, 2, 3, 2])
}

fn transposed_volumes() -> Vec<Vec<SampleInput>> {
    pair(&[1, 2, 2, 3, 2], &[2, 2, 2, 2, 2])
}
