//! The convolution as an operator, with its gradients: a trilinear form of which one tensor is computed from the two that are given.

use std::panic::Location;

use candle_core::Tensor;

use super::halo::{
    as_elements, chosen_layouts, chosen_windows, contiguous_shards, element_layout, local_axis, replicated_positions,
    required, window_layout,
};
use super::window::Window;
use crate::error::{Error, Result};
use crate::layout::{Layout, Runs, TensorMeta};
use crate::op::{Gradient, KernelContext, Op, OpKind, OpPlan, dispatch};
use crate::rule::{Decision, RequiredInput, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::contiguous;
use shardwise_kernels::convolution::{ConvGeometry, WindowAxis, convolve, convolve_input, convolve_weight};

/// Which tensor of the form is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Computes {
    /// The result `[n, out, ...]`, from the input and the weight.
    Result,
    /// The input `[n, channels, ...]`, from (the gradient of) the result and the weight: a transposed convolution.
    Input,
    /// The weight `[out, channels, ...]`, from (the gradient of) the result and the input.
    Weight,
}

/// The sum of products of a result, a weight and an input over all windows, without one of the three.
///
/// With groups, channels are two dimensions: `[n, groups, channels, ...]` and a weight `[groups, out, channels, ...]`. Each of
/// the three is the gradient of another one, so any number of backward passes stays in this operator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Convolution {
    pub(super) name: &'static str,
    pub(super) computes: Computes,
    pub(super) windows: Vec<Window>,
    pub(super) grouped: bool,
    /// The sizes of the spatial dimensions of the input, and the numbers of windows along them.
    pub(super) sizes: Vec<usize>,
    pub(super) counts: Vec<usize>,
}

impl Convolution {
    #[track_caller]
    pub(super) fn run_on(&self, a: &DTensor, b: &DTensor) -> Result<DTensor> {
        Ok(dispatch(self, &[a, b], Location::caller())?.swap_remove(0))
    }

    /// The names of the dimensions of input, weight and result.
    fn named(&self) -> [Vec<Option<usize>>; 3] {
        let spatial = self.windows.len();
        let (n, out, channel) = (Some(0), Some(1), Some(2));
        let positions: Vec<Option<usize>> = (3..3 + spatial).map(Some).collect();
        let group: Vec<Option<usize>> = if self.grouped { vec![Some(3 + spatial)] } else { Vec::new() };
        let inside = vec![None; spatial];
        [
            [&[n], &group[..], &[channel], &positions].concat(),
            [&group[..], &[out, channel], &inside].concat(),
            [&[n], &group[..], &[out], &positions].concat(),
        ]
    }

    /// Decides on a gradient of the weight, in which sharded positions are summed over.
    fn decide_weight(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        let spatial = self.windows.len();
        let [result, input] = contiguous_shards([inputs[0], inputs[1]], 2, spatial)?;
        let with_elements = as_elements(&result, &input, &self.sizes)?;
        let shape = plan.outputs[0].shape.as_slice();
        let decision = plan.signature.decide(&[&with_elements, &input], elem, &[shape])?;
        let [chosen, from] = chosen_layouts(&decision);
        let to = chosen_windows(&chosen, &result, &self.windows, &self.counts)?;
        let from = replicated_positions(&from, &input, spatial)?;
        let input = required(from, &to, &self.windows, Window::needed);
        Ok(Decision { inputs: vec![RequiredInput::Layout(to), input], outputs: decision.outputs })
    }
}

impl Op for Convolution {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (a, b) = (&inputs[0], &inputs[1]);
        let [input, weight, result] = self.named();
        let lead = 1 + usize::from(self.grouped);
        // Dimensions before the channels, then the channels, then positions or the window.
        let shape = |lead: &[usize], channels: usize, rest: &[usize]| [lead, &[channels], rest].concat();
        let (names, output, shape) = match self.computes {
            Computes::Result => ([input, weight], result, shape(&a.shape[..lead], b.shape[lead - 1], &self.counts)),
            Computes::Input => ([result, weight], input, shape(&a.shape[..lead], b.shape[lead], &self.sizes)),
            Computes::Weight => {
                let sizes: Vec<usize> = self.windows.iter().map(|w| w.size).collect();
                let group = &a.shape[1..lead];
                ([result, input], weight, [group, &[a.shape[lead], b.shape[lead]], &sizes].concat())
            }
        };
        let signature = Signature::product(names, output);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: a.dtype }] })
    }

    fn kind(&self) -> OpKind {
        OpKind::Product
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        if self.computes == Computes::Weight {
            return self.decide_weight(plan, inputs, elem);
        }
        // Decided as if the result had as many positions as what it is computed from.
        let spatial = self.windows.len();
        let [source, weight] = contiguous_shards([inputs[0], inputs[1]], 1, spatial)?;
        let shape = &plan.outputs[0].shape;
        let first = shape.len() - spatial;
        let as_source = [&shape[..first], &source.shape()[first..]].concat();
        let mut decision = plan.signature.decide(&[&source, &weight], elem, &[&as_source])?;
        let [from] = chosen_layouts(&decision);
        let from = replicated_positions(&from, &source, spatial)?;
        (decision.outputs[0], decision.inputs[0]) = match self.computes {
            Computes::Result => {
                let to = window_layout(&decision.outputs[0], &self.windows, &self.counts)?;
                let source = required(from, &to, &self.windows, Window::needed);
                (to, source)
            }
            _ => {
                let to = element_layout(&decision.outputs[0], &self.sizes)?;
                let source = required(from, &to, &self.windows, Window::touching);
                (to, source)
            }
        };
        Ok(decision)
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let shape = context.local_shape(0);
        let (a, b) = (&inputs[0], &inputs[1]);
        if [a.elem_count(), b.elem_count(), shape.iter().product()].contains(&0) {
            return Ok(vec![Tensor::zeros(shape, a.dtype(), a.device())?]);
        }
        let lead = 2 + usize::from(self.grouped);
        let runs = |s: usize| -> (Runs, Runs) {
            let of_input = |i: usize| context.input_runs(i, lead + s);
            let of_output = || context.output_runs(0, lead + s);
            match self.computes {
                Computes::Result => (of_input(0), of_output()),
                Computes::Input => (of_output(), of_input(0)),
                Computes::Weight => (of_input(1), of_input(0)),
            }
        };
        let axes: Vec<WindowAxis> = self
            .windows
            .iter()
            .enumerate()
            .map(|(s, window)| {
                let (elements, windows) = runs(s);
                local_axis(window, &elements, &windows)
            })
            .collect();
        let groups = match (self.grouped, self.computes) {
            (false, _) => 1,
            (true, Computes::Weight) => shape[0],
            (true, _) => shape[1],
        };
        let geometry = ConvGeometry::new(&axes, groups);
        // The kernel takes groups and channels as one dimension.
        let merged = |shape: &[usize], at: usize| match self.grouped {
            true => [&shape[..at], &[shape[at] * shape[at + 1]], &shape[at + 2..]].concat(),
            false => shape.to_vec(),
        };
        let flat = |x: &Tensor, at: usize| Ok::<_, Error>(contiguous(x)?.reshape(merged(x.dims(), at))?);
        let found = match self.computes {
            Computes::Result => convolve(&flat(a, 1)?, &flat(b, 0)?, &geometry, &merged(shape, 1))?,
            Computes::Input => convolve_input(&flat(a, 1)?, &flat(b, 0)?, &geometry, &merged(shape, 1))?,
            Computes::Weight => convolve_weight(&flat(a, 1)?, &flat(b, 1)?, &geometry, &merged(shape, 0))?,
        };
        Ok(vec![found.reshape(shape)?])
    }

    /// One multiplication and one addition per element of the result, channel and element of the window.
    fn flops(&self, inputs: &[&[usize]], outputs: &[&[usize]]) -> u64 {
        let count = |shape: &[usize]| shape.iter().product::<usize>() as u64;
        let lead = 1 + usize::from(self.grouped);
        let (result, weight) = match self.computes {
            Computes::Result => (outputs[0], inputs[1]),
            Computes::Input => (inputs[0], inputs[1]),
            Computes::Weight => (inputs[0], outputs[0]),
        };
        2 * count(result) * count(&weight[lead..])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None; 2]) };
            let form =
                |computes: Computes, a: &DTensor, b: &DTensor| Convolution { computes, ..op.clone() }.run_on(a, b);
            let (a, b) = (saved.input(0), saved.input(1));
            let needed = |i: usize, f: &dyn Fn() -> Result<DTensor>| saved.needs_input_grad(i).then(f).transpose();
            use Computes::{Input, Result as Windows, Weight};
            Ok(match op.computes {
                Windows => vec![needed(0, &|| form(Input, g, &b))?, needed(1, &|| form(Weight, g, &a))?],
                Input => vec![needed(0, &|| form(Windows, g, &b))?, needed(1, &|| form(Weight, &a, g))?],
                Weight => vec![needed(0, &|| form(Windows, &b, g))?, needed(1, &|| form(Input, &a, g))?],
            })
        })
    }
}
