//! The feed-forward blocks of decoders and encoders.

use super::attention::linear;
use super::spec::MlpSpec;
use crate::error::Result;
use crate::nn::{Activation, Builder, Forward, Hooks, Linear, Module};
use crate::tensor::DTensor;

/// Feed-forward block: `down(activation(up(x)))`, or with a gate `down(activation(gate(x)) * up(x))`.
#[derive(Module)]
pub struct DecoderMlp {
    /// The gate, if there is one.
    pub gate: Option<Linear>,
    /// To the features inside.
    pub up: Linear,
    /// Back to the width of the model.
    pub down: Linear,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    #[module(skip)]
    activation: Activation,
}

impl DecoderMlp {
    pub(in crate::models) fn new(builder: &Builder, width: usize, spec: MlpSpec) -> Result<Self> {
        let MlpSpec { hidden, gated, activation, bias } = spec;
        Ok(DecoderMlp {
            gate: gated.then(|| linear(builder, "gate", [width, hidden], bias)).transpose()?,
            up: linear(builder, "up", [width, hidden], bias)?,
            down: linear(builder, "down", [hidden, width], bias)?,
            hooks: builder.hooks(),
            activation,
        })
    }
}

impl Forward for DecoderMlp {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let inner = match &self.gate {
                Some(gate) => gate.forward_activation(x, self.activation)?.mul(&self.up.forward(x)?)?,
                None => self.up.forward_activation(x, self.activation)?,
            };
            self.down.forward(&inner)
        })
    }
}
