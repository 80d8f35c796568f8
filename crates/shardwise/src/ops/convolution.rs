//! Convolutions and pooling as products and reductions over unfolded windows. If a spatial dimension is sharded, ranks
//! exchange halos: the rows that their windows reach beyond their own shard.

use std::panic::Location;

use candle_core::{DType, Tensor, WithDType};

use super::scalar::Scalar;
use super::{OpEntry, SampleInput};
use crate::comm::record_implicit_operator;
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, Runs, TensorBox, TensorMeta};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{DTensor, SaveForBackward, is_recording};
use shardwise_kernels::{contiguous, from_f64_vec, reserve, to_f64_vec, with_type};

/// The sliding window of a convolution or pooling along one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Window {
    size: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
}

/// Extracts all windows (im2col): from `[n, c, spatial...]` to `[n, c, offsets in the window..., windows...]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Unfold {
    name: &'static str,
    windows: Vec<Window>,
    /// The value of the padding.
    border: Scalar,
}

/// Options of a convolution, the same for all spatial dimensions.
///
/// PyTorch passes them as separate arguments, with the same defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvOptions {
    /// Distance between windows.
    pub stride: usize,
    /// Zeros added on both sides of each spatial dimension.
    pub padding: usize,
    /// Distance between the elements of a window.
    pub dilation: usize,
    /// Number of groups of channels; each output channel sees the input channels of its group only.
    pub groups: usize,
}

impl Default for ConvOptions {
    fn default() -> Self {
        ConvOptions { stride: 1, padding: 0, dilation: 1, groups: 1 }
    }
}

impl DTensor {
    /// Convolves `[n, channels, length]` with a weight `[out, channels / groups, size]` and adds a bias `[out]`.
    ///
    /// Communicates nothing if the batch or the output channels are sharded. Sharded input channels give a `Partial(Sum)`
    /// result; a sharded length exchanges halos between neighbours.
    ///
    /// # Errors
    /// If shapes and groups do not fit, or no window fits into the padded input.
    #[track_caller]
    pub fn conv1d(&self, weight: &DTensor, bias: Option<&DTensor>, options: ConvOptions) -> Result<DTensor> {
        self.convolution("conv1d", 1, weight, bias, options)
    }

    /// Convolves `[n, channels, height, width]` with a weight `[out, channels / groups, height, width]` and adds a bias `[out]`.
    ///
    /// Communicates as [`conv1d`](Self::conv1d) does: halos if height or width is sharded.
    ///
    /// # Errors
    /// If shapes and groups do not fit, or no window fits into the padded input.
    #[track_caller]
    pub fn conv2d(&self, weight: &DTensor, bias: Option<&DTensor>, options: ConvOptions) -> Result<DTensor> {
        self.convolution("conv2d", 2, weight, bias, options)
    }

    /// Averages over windows of `[n, channels, length]`; `stride` defaults to `size`, and padding counts as zeros.
    ///
    /// Exchanges halos if the length is sharded and windows cross shards.
    #[track_caller]
    pub fn avg_pool1d(&self, size: usize, stride: Option<usize>, padding: usize) -> Result<DTensor> {
        self.pooling("avg_pool1d", 1, size, stride, padding, 0.0)?.mean(&[2], false)
    }

    /// Averages over windows of `[n, channels, height, width]`; `stride` defaults to `size`, and padding counts as zeros.
    ///
    /// Exchanges halos if height or width is sharded and windows cross shards.
    #[track_caller]
    pub fn avg_pool2d(&self, size: usize, stride: Option<usize>, padding: usize) -> Result<DTensor> {
        self.pooling("avg_pool2d", 2, size, stride, padding, 0.0)?.mean(&[2, 3], false)
    }

    /// Takes the maximum over windows of `[n, channels, length]`; `stride` defaults to `size`.
    ///
    /// Exchanges halos if the length is sharded and windows cross shards.
    #[track_caller]
    pub fn max_pool1d(&self, size: usize, stride: Option<usize>, padding: usize) -> Result<DTensor> {
        self.pooling("max_pool1d", 1, size, stride, padding, f64::NEG_INFINITY)?.largest_of(1)
    }

    /// Takes the maximum over windows of `[n, channels, height, width]`; `stride` defaults to `size`.
    ///
    /// Exchanges halos if height or width is sharded and windows cross shards.
    #[track_caller]
    pub fn max_pool2d(&self, size: usize, stride: Option<usize>, padding: usize) -> Result<DTensor> {
        self.pooling("max_pool2d", 2, size, stride, padding, f64::NEG_INFINITY)?.largest_of(2)
    }

    /// The maximum of every window. Among equal elements the first gets the gradient, as in PyTorch; without a gradient the
    /// cheaper `amax` does.
    #[track_caller]
    fn largest_of(&self, spatial: usize) -> Result<DTensor> {
        if !self.has_gradient() {
            return self.amax(&(2..2 + spatial as isize).collect::<Vec<_>>(), false);
        }
        Ok(self.flatten(2, 1 + spatial as isize)?.max_dim(2, false)?.0)
    }

    #[track_caller]
    fn convolution(
        &self,
        name: &'static str,
        spatial: usize,
        weight: &DTensor,
        bias: Option<&DTensor>,
        options: ConvOptions,
    ) -> Result<DTensor> {
        let ConvOptions { stride, padding, dilation, groups } = options;
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
        // Unfolding copies every element into many windows, so inputs are reduced or gathered before it, not after.
        let ndim = if self.device_mesh() == weight.device_mesh() { self.device_mesh().ndim() } else { 0 };
        let axes = |wanted: &dyn Fn(usize) -> bool| (0..ndim).filter(|&a| wanted(a)).collect::<Vec<_>>();
        let partial = axes(&|a| self.placements()[a].is_partial() && !weight.placements()[a].is_replicate());
        // A weight sharded inside the window would only give a partial sum in the forward pass, but the backward pass would
        // gather the gradients of all windows.
        let trains = self.has_gradient() && is_recording();
        let inside = axes(&|a| trains && weight.placements()[a].shard_dim().is_some_and(|d| d >= 2));
        let site = Location::caller();
        let without = |t: &DTensor, axes: &[usize]| {
            let to = t.layout().without_axes(axes)?;
            record_implicit_operator(name, || t.to_layout_at(&to, site))
        };
        let (x, weight) = (without(self, &partial)?, without(weight, &inside)?);
        let windows = weight.shape()[2..].iter().map(|&size| Window { size, stride, padding, dilation }).collect();
        let windows = x.unfold(&Unfold { name, windows, border: Scalar(0.0) })?;
        let product = if groups == 1 {
            let terms = if spatial == 1 { (["nciw", "oci"], "now") } else { (["ncijhw", "ocij"], "nohw") };
            windows.contract(&weight, terms.0, terms.1)?
        } else {
            let apart = windows.unflatten(1, &[groups as isize, -1])?;
            let weight = weight.unflatten(0, &[groups as isize, -1])?;
            let terms = if spatial == 1 { (["ngciw", "goci"], "ngow") } else { (["ngcijhw", "gocij"], "ngohw") };
            apart.contract(&weight, terms.0, terms.1)?.flatten(1, 2)?
        };
        let Some(bias) = bias else { return Ok(product) };
        product.add(&bias.reshape(&[vec![-1], vec![1; spatial]].concat())?)
    }

    #[track_caller]
    fn pooling(
        &self,
        name: &'static str,
        spatial: usize,
        size: usize,
        stride: Option<usize>,
        padding: usize,
        border: f64,
    ) -> Result<DTensor> {
        if self.ndim() != spatial + 2 || padding > size / 2 {
            return Err(self.bad_dims(
                name,
                &[padding as isize],
                "[n, channels, ...] and padding of half a window at most",
            ));
        }
        let window = Window { size, stride: stride.unwrap_or(size), padding, dilation: 1 };
        self.unfold(&Unfold { name, windows: vec![window; spatial], border: Scalar(border) })
    }

    #[track_caller]
    fn unfold(&self, op: &Unfold) -> Result<DTensor> {
        Ok(dispatch(op, &[self], Location::caller())?.swap_remove(0))
    }
}

impl Window {
    /// The extent of a window with its dilation. Cannot overflow for a window that fits, see [`count`](Self::count).
    fn reach(&self) -> usize {
        (self.size - 1) * self.dilation + 1
    }

    /// The number of windows in a dimension; `None` if none fits or the padded dimension is not addressable.
    fn count(&self, n: usize) -> Option<usize> {
        let reach = (self.size - 1).checked_mul(self.dilation)?.checked_add(1)?;
        let padded = self.padding.checked_mul(2)?.checked_add(n).filter(|&n| n <= isize::MAX as usize)?;
        Some(padded.checked_sub(reach)? / self.stride + 1)
    }

    /// How many of `count` windows have their middle in a range of indices. Middles ascend, so two binary searches suffice.
    fn middles_in(&self, range: &std::ops::Range<usize>, count: usize, n: usize) -> usize {
        let before = |index: usize| {
            let (mut low, mut high) = (0, count);
            while low < high {
                let window = low + (high - low) / 2;
                if self.middle(window, n) < index { low = window + 1 } else { high = window }
            }
            low
        };
        if n == 0 { 0 } else { before(range.end) - before(range.start) }
    }

    /// The index in the middle of a window: the rank that holds it computes the window.
    fn middle(&self, window: usize, n: usize) -> usize {
        (window * self.stride + self.reach() / 2).saturating_sub(self.padding).min(n - 1)
    }

    /// The windows, of `count`, that contain any of the indices `from..to`.
    fn touching(&self, from: usize, to: usize, count: usize) -> std::ops::Range<usize> {
        if from >= to {
            return 0..0;
        }
        let first = (from + self.padding + 1).saturating_sub(self.reach()).div_ceil(self.stride).min(count);
        let last = ((to - 1 + self.padding) / self.stride + 1).clamp(first, count);
        first..last
    }

    /// The indices that windows `from..to` read, without the padding.
    fn needed(&self, from: usize, to: usize, n: usize) -> std::ops::Range<usize> {
        if from >= to {
            return 0..0;
        }
        let start = (from * self.stride).saturating_sub(self.padding).min(n);
        let end = ((to - 1) * self.stride + self.reach()).saturating_sub(self.padding).clamp(start, n);
        start..end
    }
}

/// A decision in which every rank requires the box of the input that its shard of the output reads. Spatial dimensions begin
/// at `of_input` and `of_output`; along all dimensions before them a rank keeps what it holds.
fn fetching(
    from: Layout,
    axes: Vec<usize>,
    to: Layout,
    windows: &[Window],
    [of_input, of_output]: [usize; 2],
    needed: fn(&Window, usize, usize, usize) -> std::ops::Range<usize>,
) -> Decision {
    let part = |&rank: &usize| {
        let (mut offsets, mut sizes) = (from.global_offset(rank), from.local_shape(rank));
        let (first, count) = (to.global_offset(rank), to.local_shape(rank));
        for (s, window) in windows.iter().enumerate() {
            let (at, made) = (of_input + s, of_output + s);
            let range = needed(window, first[made], first[made] + count[made], from.shape()[at]);
            (offsets[at], sizes[at]) = (range.start, range.len());
        }
        TensorBox { offsets, sizes }
    };
    let boxes = from.mesh().ranks().iter().map(part).collect();
    Decision { inputs: vec![RequiredInput::Boxes { from, axes, boxes }], outputs: vec![to] }
}

impl Op for Unfold {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let bad = |window: &Window| window.size == 0 || window.stride == 0 || window.dilation == 0;
        let counts: Option<Vec<usize>> = match self.windows.iter().any(bad) {
            true => None,
            false => self.windows.iter().zip(&x.shape[2..]).map(|(w, &n)| w.count(n)).collect(),
        };
        let Some(counts) = counts else {
            let found = format!("shape {:?} and windows {:?} in {}", x.shape, self.windows, self.name);
            return Err(ErrorKind::shape(&x.shape).error(
                "operands",
                found,
                "room for at least one window, in a padded dimension that memory can address",
                "correct padding, dilation or the size of the window",
            ));
        };
        let dims: Vec<Option<usize>> = (0..x.shape.len()).map(Some).collect();
        let inside = vec![None; self.windows.len()];
        let signature = Signature::new(
            dims.iter().map(|_| DimSharding::Free),
            [dims.clone()],
            [[&dims[..2], &inside, &dims[2..]].concat()],
        );
        let signature = match self.border.0 {
            0.0 => signature.allow_all_partial(),
            _ => signature.allow_partial([Some(ReduceOp::Max)], ReduceOp::Max),
        };
        let sizes: Vec<usize> = self.windows.iter().map(|w| w.size).collect();
        let shape = [&x.shape[..2], &sizes, &counts].concat();
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: x.dtype }] })
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        let spatial = self.windows.len();
        let shape = &plan.outputs[0].shape;
        let mut from = inputs[0].clone();
        // Padding other than zero is right for partial maxima only.
        let kept = |p: &Placement| self.border.0 == 0.0 || *p == Placement::Partial(ReduceOp::Max);
        let reduced: Vec<usize> = (0..from.mesh().ndim())
            .filter(|&a| from.placements()[a].is_partial() && !kept(&from.placements()[a]))
            .collect();
        from = from.without_axes(&reduced)?;
        let axes: Vec<usize> = (0..spatial).flat_map(|s| from.shard_order(2 + s).to_vec()).collect();
        if !axes.is_empty() {
            from = from.unstrided(&|_| true)?;
        }
        // A window belongs to the shard that holds its middle.
        let mut resized = from.clone();
        for (s, window) in self.windows.iter().enumerate() {
            let (n, count) = (from.shape()[2 + s], shape[2 + spatial + s]);
            let owned = |runs: &Runs| runs.iter().map(|run| window.middles_in(&run, count, n)).sum();
            resized = resized.resized(2 + s, count, &owned)?;
        }
        let (mut placements, mut orders) = (resized.placements().to_vec(), resized.shard_orders());
        for placement in &mut placements {
            if let Some(dim) = placement.shard_dim().filter(|&d| d >= 2) {
                *placement = placement.with_dim(dim + spatial);
            }
        }
        orders.splice(2..2, vec![Vec::new(); spatial]);
        let to = Layout::from_shard_orders(from.mesh(), shape, &placements, &orders)?;
        if axes.is_empty() {
            return Ok(Decision { inputs: vec![RequiredInput::Layout(from)], outputs: vec![to] });
        }
        Ok(fetching(from, axes, to, &self.windows, [2, 2 + spatial], Window::needed))
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let x = contiguous(&inputs[0])?;
        let spatial = self.windows.len();
        let outer = x.dims()[0] * x.dims()[1];
        // Per spatial dimension, offset and window the local index; `None` in the padding.
        let mut tables: Vec<Vec<Vec<Option<usize>>>> = Vec::new();
        for (s, window) in self.windows.iter().enumerate() {
            let (held, own) = (context.input_runs(0, 2 + s), context.output_runs(0, 2 + spatial + s));
            let n = context.input_shape(0)[2 + s];
            let start = held.first().unwrap_or(0);
            let place = |w: usize, offset: usize| {
                let index = (w * window.stride + offset * window.dilation).checked_sub(window.padding)?;
                (index < n).then(|| index - start)
            };
            let line = |offset: usize| own.iter().flatten().map(|w| place(w, offset)).collect();
            tables.push((0..window.size).map(line).collect());
        }
        let counts: Vec<usize> = tables.iter().map(|t| t[0].len()).collect();
        let sizes: Vec<usize> = self.windows.iter().map(|w| w.size).collect();
        let shape = [&x.dims()[..2], &sizes, &counts].concat();
        let total: usize = shape.iter().product();
        with_type!(x.dtype(), T => {
            let border = T::from_f64(self.border.0);
            let values: Vec<T> = if x.elem_count() == 0 { Vec::new() } else { x.flatten_all()?.to_vec1()? };
            let mut out: Vec<T> = reserve(total)?;
            let single = [vec![Some(0)]];
            // One spatial dimension is treated as a plane of one row.
            let (rows, columns) = if spatial == 1 { (&single[..], &tables[0][..]) } else { (&tables[0][..], &tables[1][..]) };
            let width = x.dims()[x.rank() - 1];
            let height = if spatial == 1 { 1 } else { x.dims()[2] };
            for plane in 0..outer {
                let plane = &values[plane * width * height..(plane + 1) * width * height];
                for row in rows {
                    for column in columns {
                        for r in row {
                            out.extend(column.iter().map(|c| match (r, c) {
                                (Some(r), Some(c)) => plane[r * width + c],
                                _ => border,
                            }));
                        }
                    }
                }
            }
            Ok(vec![Tensor::from_vec(out, shape.as_slice(), x.device())?])
        }, otherwise unreachable!("tensors of a mesh have served types"))
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let sizes = saved.shape(0)[2..].to_vec();
            let fold = Fold { name: op.name, windows: op.windows.clone(), sizes };
            Ok(vec![Some(dispatch(&fold, &[gradient], Location::caller())?.swap_remove(0))])
        })
    }
}

/// The backward pass of [`Unfold`] (col2im): every element is the sum over all windows that contain it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Fold {
    name: &'static str,
    windows: Vec<Window>,
    /// The sizes of the spatial dimensions of the result.
    sizes: Vec<usize>,
}

impl Op for Fold {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (x, spatial) = (&inputs[0], self.windows.len());
        let dims: Vec<Option<usize>> = (0..2 + spatial).map(Some).collect();
        let inside = vec![None; spatial];
        let signature = Signature::new(
            dims.iter().map(|_| DimSharding::Free),
            [[&dims[..2], &inside, &dims[2..]].concat()],
            [dims.clone()],
        );
        let shape = [&x.shape[..2], &self.sizes].concat();
        let signature = signature
            .allow_partial([Some(ReduceOp::Sum)], ReduceOp::Sum)
            .allow_partial([Some(ReduceOp::Avg)], ReduceOp::Avg);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: x.dtype }] })
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        let spatial = self.windows.len();
        let shape = &plan.outputs[0].shape;
        let sums = |p: &Placement| matches!(p, Placement::Partial(ReduceOp::Sum | ReduceOp::Avg));
        let whole: Vec<usize> = (0..inputs[0].mesh().ndim())
            .filter(|&a| {
                let p = &inputs[0].placements()[a];
                p.is_partial() && !sums(p) || p.shard_dim().is_some_and(|d| (2..2 + spatial).contains(&d))
            })
            .collect();
        let mut from = inputs[0].without_axes(&whole)?;
        let axes: Vec<usize> = (0..spatial).flat_map(|s| from.shard_order(2 + spatial + s).to_vec()).collect();
        if !axes.is_empty() {
            from = from.unstrided(&|_| true)?;
        }
        // Axes that shard the windows shard the spatial dimensions of the result, into plain chunks.
        let placements: Vec<Placement> = from
            .placements()
            .iter()
            .map(|p| match p.shard_dim() {
                Some(dim) if dim >= 2 => Placement::Shard((dim - spatial) as isize),
                _ => p.clone(),
            })
            .collect();
        let mut orders = from.shard_orders();
        orders.drain(2..2 + spatial);
        let to = Layout::from_shard_orders(from.mesh(), shape, &placements, &orders)?;
        if axes.is_empty() {
            return Ok(Decision { inputs: vec![RequiredInput::Layout(from)], outputs: vec![to] });
        }
        Ok(fetching(from, axes, to, &self.windows, [2 + spatial, 2], Window::touching))
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let x = contiguous(&inputs[0])?;
        let spatial = self.windows.len();
        let shape = context.local_shape(0).to_vec();
        let total: usize = shape.iter().product();
        if x.elem_count() == 0 || total == 0 {
            return Ok(vec![Tensor::zeros(shape, x.dtype(), x.device())?]);
        }
        // Per spatial dimension, offset and window the local index it adds to; `None` outside of this shard.
        let mut tables: Vec<Vec<Vec<Option<usize>>>> = Vec::new();
        for (s, window) in self.windows.iter().enumerate() {
            let (held, own) = (context.input_runs(0, 2 + spatial + s), context.output_runs(0, 2 + s));
            let start = own.first().unwrap_or(0);
            let place = |w: usize, offset: usize| {
                let index = (w * window.stride + offset * window.dilation).checked_sub(window.padding)?;
                index.checked_sub(start).filter(|&local| local < own.len())
            };
            let line = |offset: usize| held.iter().flatten().map(|w| place(w, offset)).collect();
            tables.push((0..window.size).map(line).collect());
        }
        let single = [vec![Some(0)]];
        let (rows, columns) =
            if spatial == 1 { (&single[..], &tables[0][..]) } else { (&tables[0][..], &tables[1][..]) };
        let width = shape[shape.len() - 1];
        let plane: usize = shape[2..].iter().product();
        let mut sums = vec![0.0; total];
        let mut values = to_f64_vec(&x)?.into_iter();
        for plane in sums.chunks_exact_mut(plane) {
            for row in rows {
                for column in columns {
                    for r in row {
                        for (c, value) in column.iter().zip(values.by_ref()) {
                            if let (Some(r), Some(c)) = (r, c) {
                                plane[r * width + c] += value;
                            }
                        }
                    }
                }
            }
        }
        Ok(vec![from_f64_vec(sums, &shape, x.dtype())?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let windows = Unfold { name: op.name, windows: op.windows.clone(), border: Scalar(0.0) };
            Ok(vec![Some(gradient.unfold(&windows)?)])
        })
    }
}

pub(super) const OPS: &[OpEntry] = &[
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
        name: "avg_pool1d",
        samples: line,
        apply: |x| Ok(vec![x[0].avg_pool1d(2, None, 0)?, x[0].avg_pool1d(3, Some(1), 1)?]),
    },
    OpEntry { name: "max_pool1d", samples: line, apply: |x| Ok(vec![x[0].max_pool1d(2, None, 1)?]) },
    OpEntry { name: "avg_pool2d", samples: plane, apply: |x| Ok(vec![x[0].avg_pool2d(2, None, 0)?]) },
    OpEntry {
        name: "max_pool2d",
        samples: plane,
        apply: |x| Ok(vec![x[0].max_pool2d(2, None, 0)?, x[0].max_pool2d(3, Some(2), 1)?]),
    },
];

fn lines() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[2, 2, 7], DType::I64), SampleInput::new(&[3, 2, 3], DType::I64)]]
}

fn planes() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[1, 2, 5, 4], DType::I64), SampleInput::new(&[2, 2, 3, 2], DType::I64)]]
}

fn line() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[2, 2, 7], DType::F64)]]
}

fn plane() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[1, 2, 6, 5], DType::F64)]]
}
