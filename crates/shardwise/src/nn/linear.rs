//! Linear layers, embeddings and dropout.

use candle_core::DType;

use super::build::Builder;
use super::init::Init;
use super::module::{Forward, Hooks, TrainingMode};
use crate::error::{ErrorKind, Result};
use crate::ops::{Activation, EmbeddingBagMode};
use crate::param::Param;
use crate::tensor::DTensor;

/// Implements `Module` for a layer of this crate. Other crates use `#[derive(Module)]`, which names this crate as
/// `::shardwise` and so cannot be used inside it.
macro_rules! layer {
    ($name:ident { $($field:ident),* }) => {
        impl $crate::nn::Module for $name {
            fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, $crate::nn::ModuleItem<'_>)) {
                if self.hooks.walk_replacement(path, "hooks", visit) {
                    return;
                }
                visit(path, $crate::nn::ModuleItem::Module(stringify!($name)));
                $($crate::nn::Module::walk(&self.$field,&$crate::nn::join(path, stringify!($field)), visit);)*
            }
        }
    };
}
pub(crate) use layer;

/// Linear layer: `x W^T + b` on the last dimension, with a weight `[out, in]` as in PyTorch.
///
/// The weight may be quantized for inference ([`Param::set_quantized`]): u8 blocks `[out, blocks, bytes of a block]`.
pub struct Linear {
    /// Weight `[out, in]`.
    pub weight: Param,
    /// Bias `[out]`.
    pub bias: Option<Param>,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
}

layer!(Linear { weight, bias, hooks });

impl Linear {
    /// Builds a layer with a bias, with PyTorch's initializer: uniform within `1 / sqrt(inputs)`.
    pub fn new(builder: &Builder, inputs: usize, outputs: usize) -> Result<Self> {
        let bound = 1.0 / (inputs.max(1) as f64).sqrt();
        let layer = Self::without_bias(builder, inputs, outputs)?;
        Ok(Linear { bias: Some(builder.param("bias", &[outputs], Init::Uniform(-bound, bound))?), ..layer })
    }

    /// Builds a layer without a bias.
    pub fn without_bias(builder: &Builder, inputs: usize, outputs: usize) -> Result<Self> {
        let weight = builder.param("weight", &[outputs, inputs], Init::LINEAR)?;
        Ok(Linear { weight, bias: None, hooks: builder.hooks() })
    }
}

impl Linear {
    /// Computes `activation(self.forward(x))`, in one pass where nothing has to happen between the two: hooks on the output and
    /// replacements of the layer see what comes before the activation.
    #[track_caller]
    pub fn forward_activation(&self, x: &DTensor, activation: Activation) -> Result<DTensor> {
        let weight = self.weight.get();
        if self.hooks.change_output() || is_quantized(&weight) {
            return activation.apply(&self.forward(x)?);
        }
        let bias = self.bias.as_ref().map(Param::get);
        self.hooks.run(x, |x| x.linear_activation(&weight, bias.as_ref(), activation))
    }
}

impl Forward for Linear {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let (weight, bias) = (self.weight.get(), self.bias.as_ref().map(Param::get));
        self.hooks.run(x, |x| match is_quantized(&weight) {
            true => x.quantized_linear(&weight, bias.as_ref()),
            false => x.linear(&weight, bias.as_ref()),
        })
    }
}

/// Embedding: looks up rows of a table by ids of any shape. A table sharded over the vocabulary gives partial sums. The table
/// may be quantized, as the weight of [`Linear`]; rows are expanded after the lookup.
pub struct Embedding {
    /// Table `[vocabulary, features]`.
    pub weight: Param,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
}

layer!(Embedding { weight, hooks });

impl Embedding {
    /// Builds a table with values from the standard normal distribution, as PyTorch does.
    pub fn new(builder: &Builder, vocabulary: usize, features: usize) -> Result<Self> {
        let weight = builder.param("weight", &[vocabulary, features], Init::Normal(0.0, 1.0))?;
        Ok(Embedding { weight, hooks: builder.hooks() })
    }
}

impl Forward for Embedding {
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        let weight = self.weight.get();
        if !is_quantized(&weight) {
            return self.hooks.run(ids, |ids| weight.embedding(ids));
        }
        let [blocks, bytes] = [1, 2].map(|dim| weight.shape()[dim] as isize);
        self.hooks.run(ids, |ids| weight.flatten(1, 2)?.embedding(ids)?.unflatten(-1, &[blocks, bytes])?.dequantize())
    }
}

/// Whether a weight is a tensor of quantized blocks, `[rows, blocks, bytes of a block]`, instead of a matrix.
fn is_quantized(weight: &DTensor) -> bool {
    weight.ndim() == 3 && weight.dtype() == DType::U8
}

/// Embedding of bags of ids: the rows of each bag are summed, averaged or reduced to their maximum.
pub struct EmbeddingBag {
    /// Table `[vocabulary, features]`.
    pub weight: Param,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    mode: EmbeddingBagMode,
}

layer!(EmbeddingBag { weight, hooks });

impl EmbeddingBag {
    /// Builds a table with values from the standard normal distribution; `mode` says how the rows of a bag become one.
    pub fn new(builder: &Builder, vocabulary: usize, features: usize, mode: EmbeddingBagMode) -> Result<Self> {
        let weight = builder.param("weight", &[vocabulary, features], Init::Normal(0.0, 1.0))?;
        Ok(EmbeddingBag { weight, hooks: builder.hooks(), mode })
    }

    /// Looks up bags of any length: `offsets` has the position in `ids` at which each bag begins. Hooks see `ids`.
    #[track_caller]
    pub fn forward_bags(&self, ids: &DTensor, offsets: &[usize]) -> Result<DTensor> {
        let bags = |ids: &DTensor| self.weight.get().embedding_bag(ids, Some(offsets), self.mode);
        self.hooks.run_own("forward_bags", ids, bags)
    }
}

impl Forward for EmbeddingBag {
    /// Looks up bags of one length: one per row of the matrix `ids`.
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        self.hooks.run(ids, |ids| self.weight.get().embedding_bag(ids, None, self.mode))
    }
}

/// Dropout: zeroes elements with probability `p` in training and scales the rest by `1 / (1 - p)`; the identity in
/// evaluation. The mask is the same for every layout.
pub struct Dropout {
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    p: f64,
    training_mode: TrainingMode,
}

layer!(Dropout { training_mode, hooks });

impl Dropout {
    /// Creates the layer.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) unless `p` is from 0 to 1.
    pub fn new(p: f64) -> Result<Self> {
        if !(0.0..=1.0).contains(&p) {
            return Err(ErrorKind::Argument.error("dropout", format!("probability {p}"), "0 to 1", "correct it"));
        }
        Ok(Dropout { hooks: Hooks::default(), p, training_mode: TrainingMode::default() })
    }
}

impl Forward for Dropout {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.dropout(self.p, self.training_mode.is_training()))
    }
}
