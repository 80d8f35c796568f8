//! Blocks of linear layers.

use super::build::Builder;
use super::linear::{Linear, layer};
use super::module::{Forward, Hooks, Item, Module, join};
use crate::error::Result;
use crate::tensor::DTensor;

/// The function between two linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// The positive part.
    Relu,
    /// `x * Phi(x)`.
    Gelu,
    /// The tanh approximation of gelu.
    GeluTanh,
    /// `x * sigmoid(x)`.
    Silu,
}

impl Activation {
    fn apply(self, x: &DTensor) -> Result<DTensor> {
        match self {
            Activation::Relu => x.relu(),
            Activation::Gelu => x.gelu(),
            Activation::GeluTanh => x.gelu_tanh(),
            Activation::Silu => x.silu(),
        }
    }
}

/// A linear layer up, a function, a linear layer down.
pub struct Mlp {
    /// The layer up.
    pub up: Linear,
    /// The layer down.
    pub down: Linear,
    /// Hooks.
    pub hooks: Hooks,
    activation: Activation,
}

layer!(Mlp { up, down, hooks });

impl Mlp {
    /// From `width` features to `hidden` and back.
    pub fn new(at: &Builder, width: usize, hidden: usize, activation: Activation) -> Result<Self> {
        let (up, down) = (Linear::new(&at.at("up"), width, hidden)?, Linear::new(&at.at("down"), hidden, width)?);
        Ok(Mlp { up, down, hooks: at.hooks(), activation })
    }
}

impl Forward for Mlp {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| self.down.forward(&self.activation.apply(&self.up.forward(x)?)?))
    }
}

/// `down(silu(gate(x)) * up(x))`, without biases.
pub struct SwiGlu {
    /// The layer whose result is the gate.
    pub gate: Linear,
    /// The layer up.
    pub up: Linear,
    /// The layer down.
    pub down: Linear,
    /// Hooks.
    pub hooks: Hooks,
}

layer!(SwiGlu { gate, up, down, hooks });

impl SwiGlu {
    /// From `width` features to `hidden` and back.
    pub fn new(at: &Builder, width: usize, hidden: usize) -> Result<Self> {
        Ok(SwiGlu {
            gate: Linear::without_bias(&at.at("gate"), width, hidden)?,
            up: Linear::without_bias(&at.at("up"), width, hidden)?,
            down: Linear::without_bias(&at.at("down"), hidden, width)?,
            hooks: at.hooks(),
        })
    }
}

impl Forward for SwiGlu {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| self.down.forward(&self.gate.forward(x)?.silu()?.mul(&self.up.forward(x)?)?))
    }
}
