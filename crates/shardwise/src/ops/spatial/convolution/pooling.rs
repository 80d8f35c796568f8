//! Maxima and means over windows.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::halo::{
    Needed, as_elements, chosen_layouts, chosen_windows, contiguous_shards, element_layout, local_axis,
    replicated_positions, required, window_layout,
};
use super::window::{Window, window_counts};
use crate::error::Result;
use crate::layout::{Layout, Runs, TensorMeta};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch, name_call};
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::placement::ReduceOp;
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::check_bytes;
use shardwise_kernels::convolution::{ConvGeometry, WindowAxis};
use shardwise_kernels::pooling::{Pooling, pool};

/// A function of windows of `[n, channels, ...]`, or of its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum PoolFn {
    /// The maximum of every window of `[x]`.
    Max,
    /// What the first of `[u, x]` has at the maximum of every window of the second.
    Pick,
    /// The gradient of [`Max`](Self::Max) and of [`Pick`](Self::Pick), from `[g, x]`.
    MaxBackward,
    /// The mean of every window of `[x]`.
    Mean,
    /// The gradient of [`Mean`](Self::Mean), from `[g]`.
    MeanBackward,
}

/// A pooling operator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Pool {
    name: &'static str,
    function: PoolFn,
    windows: Vec<Window>,
    /// The sizes of the spatial dimensions of the input, and the numbers of windows along them.
    sizes: Vec<usize>,
    counts: Vec<usize>,
}

impl DTensor {
    /// Averages over windows of `[n, channels, length]`; `stride` defaults to `size`, and padding counts as zeros.
    ///
    /// Exchanges halos if the length is sharded and windows cross shards.
    #[track_caller]
    pub fn avg_pool1d(&self, size: usize, stride: Option<usize>, padding: usize) -> Result<DTensor> {
        self.pooling("avg_pool1d", PoolFn::Mean, 1, size, stride, padding)
    }

    /// Averages over windows of `[n, channels, height, width]`; `stride` defaults to `size`, and padding counts as zeros.
    ///
    /// Exchanges halos if height or width is sharded and windows cross shards.
    #[track_caller]
    pub fn avg_pool2d(&self, size: usize, stride: Option<usize>, padding: usize) -> Result<DTensor> {
        self.pooling("avg_pool2d", PoolFn::Mean, 2, size, stride, padding)
    }

    /// Takes the maximum over windows of `[n, channels, length]`; `stride` defaults to `size`.
    ///
    /// The gradient goes to the first of equal elements. Exchanges halos if the length is sharded and windows cross shards.
    #[track_caller]
    pub fn max_pool1d(&self, size: usize, stride: Option<usize>, padding: usize) -> Result<DTensor> {
        self.pooling("max_pool1d", PoolFn::Max, 1, size, stride, padding)
    }

    /// Takes the maximum over windows of `[n, channels, height, width]`; `stride` defaults to `size`.
    ///
    /// The gradient goes to the first of equal elements. Exchanges halos if height or width is sharded and windows cross shards.
    #[track_caller]
    pub fn max_pool2d(&self, size: usize, stride: Option<usize>, padding: usize) -> Result<DTensor> {
        self.pooling("max_pool2d", PoolFn::Max, 2, size, stride, padding)
    }

    #[track_caller]
    fn pooling(
        &self,
        name: &'static str,
        function: PoolFn,
        spatial: usize,
        size: usize,
        stride: Option<usize>,
        padding: usize,
    ) -> Result<DTensor> {
        if self.ndim() != spatial + 2 || padding > size / 2 {
            let needed = "[n, channels, ...] and padding of half a window at most";
            return Err(self.bad_dims(name, &[padding as isize], needed));
        }
        let window = Window { size, stride: stride.unwrap_or(size), padding, dilation: 1 };
        let real = dtype::real(self.dtype());
        // Sums of i64 are divided towards zero, as in PyTorch.
        if function == PoolFn::Mean && self.dtype() != real && self.dtype() != DType::I64 {
            return self.to_dtype(real)?.pooling(name, function, spatial, size, stride, padding);
        }
        // Every element of a window is visited, in the padding too.
        let elements = (0..spatial).fold(1usize, |elements, _| elements.saturating_mul(size));
        check_bytes(elements, real.size_in_bytes())
            .map_err(|e| name_call(e.into(), name, &[self], Location::caller()))?;
        let windows = vec![window; spatial];
        let counts =
            window_counts(name, &windows, self.shape()).map_err(|e| name_call(e, name, &[self], Location::caller()))?;
        Pool { name, function, windows, sizes: self.shape()[2..].to_vec(), counts }.run_on(&[self])
    }
}

impl Pool {
    #[track_caller]
    fn run_on(&self, inputs: &[&DTensor]) -> Result<DTensor> {
        Ok(dispatch(self, inputs, Location::caller())?.swap_remove(0))
    }

    fn with(&self, function: PoolFn) -> Self {
        Pool { function, ..self.clone() }
    }

    /// Whether the result has the positions of the input, not one per window.
    fn returns_elements(&self) -> bool {
        matches!(self.function, PoolFn::MaxBackward | PoolFn::MeanBackward)
    }

    /// Decides on a gradient of maxima: a rank that holds elements needs all windows that contain one of them, and all
    /// elements of those windows.
    fn decide_max_backward(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        let spatial = self.windows.len();
        let [g, x] = contiguous_shards([inputs[0], inputs[1]], 2, spatial)?;
        let with_elements = as_elements(&g, &x, &self.sizes)?;
        let mut decision = plan.signature.decide(&[&with_elements, &x], elem, &[&plan.outputs[0].shape])?;
        let [of_g, of_x] = chosen_layouts(&decision);
        let to = decision.outputs[0].clone();
        let of_g = replicated_positions(&chosen_windows(&of_g, &g, &self.windows, &self.counts)?, &g, spatial)?;
        let of_x = replicated_positions(&of_x, &x, spatial)?;
        let around = |window: &Window, from: usize, to: usize, n: usize| {
            // All windows there could be: those beyond the last read nothing that is inside.
            let touching = window.touching(from, to, usize::MAX);
            let count = window.count(n).unwrap_or(0);
            window.needed(touching.start.min(count), touching.end.min(count), n)
        };
        decision.inputs =
            vec![required(of_g, &to, &self.windows, Window::touching), required(of_x, &to, &self.windows, around)];
        decision.outputs = vec![to];
        Ok(decision)
    }
}

impl Op for Pool {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let dims: Vec<Option<usize>> = (0..x.shape.len()).map(Some).collect();
        let signature = Signature::new(vec![DimSharding::Free; dims.len()], vec![dims.clone(); inputs.len()], [dims]);
        let signature = match self.function {
            PoolFn::Max => signature.allow_partial([Some(ReduceOp::Max)], ReduceOp::Max),
            // Quotients of partial sums that are rounded do not add up to that of the sum.
            _ if !x.dtype.is_float() => signature,
            _ => [ReduceOp::Sum, ReduceOp::Avg].into_iter().fold(signature, |signature, op| {
                signature.allow_partial((0..inputs.len()).map(|i| (i == 0).then_some(op)), op)
            }),
        };
        let spatial = if self.returns_elements() { &self.sizes } else { &self.counts };
        let shape = [&x.shape[..2], spatial].concat();
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: x.dtype }] })
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        if self.function == PoolFn::MaxBackward {
            return self.decide_max_backward(plan, inputs, elem);
        }
        // Decided as if the result had as many positions as what it is computed from.
        let spatial = self.windows.len();
        let [first, last] = contiguous_shards([inputs[0], inputs[inputs.len() - 1]], 2, spatial)?;
        let now = &[&first, &last][..inputs.len()];
        let mut decision = plan.signature.decide(now, elem, &[first.shape()])?;
        let to = &decision.outputs[0];
        let (to, needed): (Layout, Needed) = match self.function {
            PoolFn::MeanBackward => (element_layout(to, &self.sizes)?, Window::touching),
            _ => (window_layout(to, &self.windows, &self.counts)?, Window::needed),
        };
        for (input, now) in decision.inputs.iter_mut().zip(now) {
            let RequiredInput::Layout(from) = &*input else { unreachable!("a signature decides on layouts") };
            *input = required(replicated_positions(from, now, spatial)?, &to, &self.windows, needed);
        }
        decision.outputs[0] = to;
        Ok(decision)
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let shape = context.local_shape(0);
        if inputs.iter().any(|x| x.elem_count() == 0) || shape.contains(&0) {
            return Ok(vec![Tensor::zeros(shape, inputs[0].dtype(), inputs[0].device())?]);
        }
        let axis = |(s, window): (usize, &Window)| -> WindowAxis {
            let of_input = |i: usize| context.input_runs(i, 2 + s);
            let of_output = || context.output_runs(0, 2 + s);
            match self.function {
                PoolFn::MaxBackward => local_axis(window, &of_input(1), &of_input(0)),
                PoolFn::MeanBackward => local_axis(window, &of_output(), &of_input(0)),
                _ => local_axis(window, &of_input(0), &of_output()),
            }
        };
        let axes: Vec<WindowAxis> = self.windows.iter().enumerate().map(axis).collect();
        // Elements before and after elements that windows reach, which have no gradient and of which no halo was fetched.
        let (mut reached, mut margins) = (shape.to_vec(), vec![(0, 0); shape.len()]);
        let pooling = match self.function {
            PoolFn::Max => Pooling::Max,
            PoolFn::Pick => Pooling::Pick,
            PoolFn::Mean => Pooling::Mean,
            PoolFn::MeanBackward => Pooling::MeanBackward,
            PoolFn::MaxBackward => {
                let mut kept = [0..1, 0..1, 0..1];
                for s in 0..self.windows.len() {
                    let range = |runs: Runs| {
                        let first = runs.first().unwrap_or(0);
                        first..first + runs.len()
                    };
                    let (own, held) = (range(context.output_runs(0, 2 + s)), range(context.input_runs(1, 2 + s)));
                    let both = own.start.max(held.start)..own.end.min(held.end);
                    if both.is_empty() {
                        return Ok(vec![Tensor::zeros(shape, inputs[0].dtype(), inputs[0].device())?]);
                    }
                    reached[2 + s] = both.len();
                    margins[2 + s] = (both.start - own.start, own.end - both.end);
                    kept[3 - self.windows.len() + s] = both.start - held.start..both.end - held.start;
                }
                Pooling::MaxBackward(kept)
            }
        };
        let axes = ConvGeometry::new(&axes, 1).axes;
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let mut result = pool(&pooling, &inputs, &axes, &reached)?;
        for (dim, &(before, after)) in margins.iter().enumerate().filter(|(_, margin)| **margin != (0, 0)) {
            result = result.pad_with_zeros(dim, before, after)?;
        }
        Ok(vec![result])
    }

    fn gradient(&self) -> Gradient<Self> {
        let saves = match self.function {
            PoolFn::Mean | PoolFn::MeanBackward => SaveForBackward::Nothing,
            PoolFn::Max => SaveForBackward::Inputs,
            PoolFn::Pick | PoolFn::MaxBackward => SaveForBackward::Input(1),
        };
        Gradient::From(saves, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            // The positions of maxima do not change with the elements: no gradient goes through them.
            Ok(match op.function {
                PoolFn::Max => vec![Some(op.with(PoolFn::MaxBackward).run_on(&[g, &saved.input(0)])?)],
                PoolFn::Pick => vec![Some(op.with(PoolFn::MaxBackward).run_on(&[g, &saved.input(1)])?), None],
                PoolFn::MaxBackward => vec![Some(op.with(PoolFn::Pick).run_on(&[g, &saved.input(1)])?), None],
                PoolFn::Mean => vec![Some(op.with(PoolFn::MeanBackward).run_on(&[g])?)],
                PoolFn::MeanBackward => vec![Some(op.with(PoolFn::Mean).run_on(&[g])?)],
            })
        })
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
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
        apply: |x| {
            Ok(vec![x[0].max_pool2d(2, None, 0)?, x[0].max_pool2d(3, Some(2), 1)?, x[0].max_pool2d(1, Some(3), 0)?])
        },
    },
];

fn line() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[2, 2, 7], DType::F64)]]
}

fn plane() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[1, 2, 6, 5], DType::F64)]]
}
