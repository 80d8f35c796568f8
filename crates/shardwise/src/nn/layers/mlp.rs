//! Feed-forward blocks of transformers.

use crate::error::Result;
use crate::nn::build::Builder;
use crate::nn::layers::linear::Linear;
use crate::nn::module::{Forward, Hooks};
use crate::ops::Activation;
use crate::tensor::DTensor;
use shardwise_derive::Module;

/// Feed-forward block: `down(activation(up(x)))`.
#[derive(Module)]
pub struct Mlp {
    /// From `width` to `hidden` features; tensor parallelism shards it by columns.
    pub up: Linear,
    /// From `hidden` to `width` features; tensor parallelism shards it by rows.
    pub down: Linear,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    #[module(skip)]
    activation: Activation,
}

impl Mlp {
    /// Builds the block, with `width` features outside and `hidden` inside.
    pub fn new(builder: &Builder, width: usize, hidden: usize, activation: Activation) -> Result<Self> {
        let (up, down) =
            (Linear::new(&builder.child("up"), width, hidden)?, Linear::new(&builder.child("down"), hidden, width)?);
        Ok(Mlp { up, down, hooks: builder.hooks(), activation })
    }
}

impl Forward for Mlp {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| self.down.forward(&self.up.forward_activation(x, self.activation)?))
    }
}

/// Gated feed-forward block of Llama: `down(silu(gate(x)) * up(x))`, without biases.
#[derive(Module)]
pub struct SwiGlu {
    /// From `width` to `hidden` features, through SiLU.
    pub gate: Linear,
    /// From `width` to `hidden` features; tensor parallelism shards it by columns.
    pub up: Linear,
    /// From `hidden` to `width` features; tensor parallelism shards it by rows.
    pub down: Linear,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
}

impl SwiGlu {
    /// Builds the block, with `width` features outside and `hidden` inside.
    pub fn new(builder: &Builder, width: usize, hidden: usize) -> Result<Self> {
        Ok(SwiGlu {
            gate: Linear::without_bias(&builder.child("gate"), width, hidden)?,
            up: Linear::without_bias(&builder.child("up"), width, hidden)?,
            down: Linear::without_bias(&builder.child("down"), hidden, width)?,
            hooks: builder.hooks(),
        })
    }
}

impl Forward for SwiGlu {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let gate = self.gate.forward_activation(x, Activation::Silu)?;
            self.down.forward(&gate.mul(&self.up.forward(x)?)?)
        })
    }
}
