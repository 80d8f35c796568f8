//! Mixtures of experts: a router chooses a few gated MLPs for every token.

use candle_core::DType;

use super::attention::linear;
use super::mlp::DecoderMlp;
use super::spec::{ExpertsSpec, MlpSpec};
use crate::error::{ErrorKind, Result};
use crate::nn::init::Init;
use crate::nn::{Activation, Builder, Forward, Hooks, Linear, Module};
use crate::param::Param;
use crate::tensor::DTensor;

/// A mixture of experts: the weighted sum of the gated MLPs that a router chooses for each token.
///
/// Every rank computes its part of the experts only on the tokens that chose them. Stacks may be sharded over
/// experts or over the features inside them.
#[derive(Module)]
pub struct MixtureOfExperts {
    /// Scores of the experts.
    pub router: Linear,
    /// The experts.
    pub experts: Experts,
    /// An expert that every token uses, if there is one.
    pub shared: Option<DecoderMlp>,
    /// Its gate: one number per token.
    pub shared_gate: Option<Linear>,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    #[module(skip)]
    spec: ExpertsSpec,
}

/// The stacked weights of the experts of a [`MixtureOfExperts`].
///
/// They may be quantized for inference, all three of them ([`Param::set_quantized`]).
#[derive(Module)]
pub struct Experts {
    /// Gates `[experts, hidden, width]`.
    pub gate: Param,
    /// Up-projections `[experts, hidden, width]`.
    pub up: Param,
    /// Down-projections `[experts, width, hidden]`.
    pub down: Param,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    #[module(skip)]
    activation: Activation,
}

impl MixtureOfExperts {
    pub(in crate::models) fn new(builder: &Builder, width: usize, spec: ExpertsSpec, mlp: MlpSpec) -> Result<Self> {
        let ExpertsSpec { count, hidden, shared_hidden, .. } = spec;
        let stacks = builder.child("experts");
        // As a linear layer of one expert would start.
        let stack = |name: &str, rows: usize, columns: usize| {
            let bound = 1.0 / (columns as f64).sqrt();
            stacks.param(name, &[count, rows, columns], Init::Uniform(-bound, bound))
        };
        let shared = |hidden: usize| DecoderMlp::new(&builder.child("shared"), width, MlpSpec { hidden, ..mlp });
        let shared_gate = shared_hidden.map(|_| linear(builder, "shared_gate", [width, 1], false));
        Ok(MixtureOfExperts {
            router: linear(builder, "router", [width, count], false)?,
            experts: Experts {
                gate: stack("gate", hidden, width)?,
                up: stack("up", hidden, width)?,
                down: stack("down", width, hidden)?,
                hooks: stacks.hooks(),
                activation: mlp.activation,
            },
            shared: shared_hidden.map(shared).transpose()?,
            shared_gate: shared_gate.transpose()?,
            hooks: builder.hooks(),
            spec,
        })
    }
}

impl Forward for MixtureOfExperts {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let scores = self.router.forward(x)?;
            // In f32 at least, as transformers does; narrower scores would depend on how sums were divided over ranks.
            let precise = if scores.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            let scores = scores.to_dtype(precise)?.softmax(-1)?;
            let (mut weights, chosen) = scores.topk(self.spec.per_token, -1, true)?;
            if self.spec.normalized {
                weights = weights.div(&weights.sum(&[-1], true)?)?;
            }
            let found = self.experts.mix(x, &chosen, &weights.to_dtype(x.dtype())?)?;
            match (&self.shared, &self.shared_gate) {
                (Some(shared), Some(gate)) => found.add(&shared.forward(x)?.mul(&gate.forward(x)?.sigmoid()?)?),
                _ => Ok(found),
            }
        })
    }
}

impl Experts {
    /// The weighted sum of the chosen experts of `[batch, length, width]`.
    #[track_caller]
    fn mix(&self, x: &DTensor, chosen: &DTensor, weights: &DTensor) -> Result<DTensor> {
        self.hooks.run_own("experts", x, |x| {
            let [batch, length, _] = *x.shape() else {
                let needed = "[batch, length, width]";
                return Err(ErrorKind::shape(x.shape()).error("input of experts", x.layout(), needed, "reshape it"));
            };
            let rows = |t: &DTensor| t.flatten(0, 1);
            let (x, chosen, weights) = (rows(x)?, rows(chosen)?, rows(weights)?);
            let quantized = [self.gate.quantized(), self.up.quantized(), self.down.quantized()];
            let found = match &quantized {
                [Some(gate), Some(up), Some(down)] => {
                    x.quantized_expert_mlp(&chosen, &weights, [gate, up, down], self.activation)?
                }
                _ => {
                    let [gate, up, down] = [&self.gate, &self.up, &self.down].map(Param::forward_value);
                    x.expert_mlp(&chosen, &weights, [&gate?, &up?, &down?], self.activation)?
                }
            };
            found.unflatten(0, &[batch as isize, length as isize])
        })
    }
}
