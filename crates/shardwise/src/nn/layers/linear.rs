//! Linear layers and embeddings.

use crate::error::Result;
use crate::nn::build::Builder;
use crate::nn::init::Init;
use crate::nn::module::{Forward, Hooks};
use crate::ops::{Activation, EmbeddingBagMode, EmbeddingBagOptions, EmbeddingOptions};
use crate::param::Param;
use crate::tensor::DTensor;
use shardwise_derive::Module;

/// Linear layer: `x W^T + b` on the last dimension, with a weight `[out, in]` as in PyTorch.
///
/// The weight may be quantized for inference ([`Param::set_quantized`]).
#[derive(Module)]
pub struct Linear {
    /// Weight `[out, in]`.
    pub weight: Param,
    /// Bias `[out]`.
    pub bias: Option<Param>,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
}

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
        if self.hooks.change_output() || self.weight.quantized().is_some() {
            return activation.apply(&self.forward(x)?);
        }
        self.hooks.run(x, |x| {
            let bias = self.bias.as_ref().map(Param::forward_value).transpose()?;
            x.linear_activation(&self.weight.forward_value()?, bias.as_ref(), activation)
        })
    }
}

impl Forward for Linear {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let bias = self.bias.as_ref().map(Param::forward_value).transpose()?;
            match self.weight.quantized() {
                Some(weight) => x.quantized_linear(&weight, bias.as_ref()),
                None => x.linear(&self.weight.forward_value()?, bias.as_ref()),
            }
        })
    }
}

/// Embedding: looks up rows of a table by ids of any shape. A table sharded over the vocabulary gives partial sums. The table
/// may be quantized, as the weight of [`Linear`]; rows are expanded after the lookup.
#[derive(Module)]
pub struct Embedding {
    /// Table `[vocabulary, features]`.
    pub weight: Param,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    #[module(skip)]
    options: EmbeddingOptions,
}

impl Embedding {
    /// Builds a table with values from the standard normal distribution, as PyTorch does.
    pub fn new(builder: &Builder, vocabulary: usize, features: usize) -> Result<Self> {
        Self::with_options(builder, vocabulary, features, EmbeddingOptions::default())
    }

    /// Builds a table with PyTorch's options. The row `padding_idx` starts with zeros and has no gradient.
    ///
    /// With `max_norm` rows are scaled when they are looked up; PyTorch also changes the table.
    #[doc(alias = "padding_idx")]
    pub fn with_options(
        builder: &Builder,
        vocabulary: usize,
        features: usize,
        options: EmbeddingOptions,
    ) -> Result<Self> {
        let weight = table(builder, vocabulary, features, options.padding_idx)?;
        Ok(Embedding { weight, hooks: builder.hooks(), options })
    }

    /// Returns a layer with the same table and options and with its own hooks, for tables that parts of a model share.
    pub fn shared(&self, hooks: Hooks) -> Self {
        Embedding { weight: self.weight.clone(), hooks, options: self.options }
    }
}

impl Forward for Embedding {
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        self.hooks.run(ids, |ids| {
            if let Some(table) = self.weight.quantized() {
                return table.embedding(ids);
            }
            let weight = self.weight.forward_value()?;
            match self.options == EmbeddingOptions::default() {
                true => weight.embedding(ids),
                false => weight.embedding_with(ids, self.options),
            }
        })
    }
}

/// A table with values from the standard normal distribution, and zeros in the row of the padding.
fn table(builder: &Builder, vocabulary: usize, features: usize, padding_idx: Option<i64>) -> Result<Param> {
    let weight = builder.param("weight", &[vocabulary, features], Init::Normal(0.0, 1.0))?;
    if let Some(padding) = padding_idx {
        let value = weight.get().detach();
        let rows = value.select_scatter(&value.select(0, padding as isize)?.zeros_like()?, 0, padding as isize)?;
        weight.set(&rows.to_layout(value.layout())?)?;
    }
    Ok(weight)
}

/// Embedding of bags of ids: the rows of each bag are summed, averaged or reduced to their maximum.
#[derive(Module)]
pub struct EmbeddingBag {
    /// Table `[vocabulary, features]`.
    pub weight: Param,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    #[module(skip)]
    mode: EmbeddingBagMode,
    #[module(skip)]
    options: EmbeddingOptions,
}

impl EmbeddingBag {
    /// Builds a table with values from the standard normal distribution; `mode` says how the rows of a bag become one.
    pub fn new(builder: &Builder, vocabulary: usize, features: usize, mode: EmbeddingBagMode) -> Result<Self> {
        Self::with_options(builder, vocabulary, features, mode, EmbeddingOptions::default())
    }

    /// Builds a table with PyTorch's options. Ids `padding_idx` do not count in their bags.
    pub fn with_options(
        builder: &Builder,
        vocabulary: usize,
        features: usize,
        mode: EmbeddingBagMode,
        options: EmbeddingOptions,
    ) -> Result<Self> {
        let weight = table(builder, vocabulary, features, options.padding_idx)?;
        Ok(EmbeddingBag { weight, hooks: builder.hooks(), mode, options })
    }

    /// Looks up bags with all arguments of PyTorch: `offsets` is a tensor with the position at which each bag begins, unless `ids` is a
    /// matrix with one bag per row; rows are multiplied by `per_sample_weights`. Hooks see `ids`.
    #[track_caller]
    pub fn forward_weighted(
        &self,
        ids: &DTensor,
        offsets: Option<&DTensor>,
        per_sample_weights: Option<&DTensor>,
    ) -> Result<DTensor> {
        let EmbeddingOptions { padding_idx, max_norm, norm_type, scale_grad_by_freq } = self.options;
        let (mode, include_last_offset) = (self.mode, false);
        let options = EmbeddingBagOptions {
            offsets,
            mode,
            per_sample_weights,
            include_last_offset,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
        };
        self.hooks
            .run_own("forward_weighted", ids, |ids| self.weight.forward_value()?.embedding_bag_with(ids, &options))
    }

    /// Looks up bags of any length: `offsets` has the position in `ids` at which each bag begins. Hooks see `ids`.
    #[track_caller]
    pub fn forward_bags(&self, ids: &DTensor, offsets: &[usize]) -> Result<DTensor> {
        let bags = |ids: &DTensor| self.weight.forward_value()?.embedding_bag(ids, Some(offsets), self.mode);
        self.hooks.run_own("forward_bags", ids, bags)
    }
}

impl Forward for EmbeddingBag {
    /// Looks up bags of one length: one per row of the matrix `ids`.
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        if self.options != EmbeddingOptions::default() {
            return self.forward_weighted(ids, None, None);
        }
        self.hooks.run(ids, |ids| self.weight.forward_value()?.embedding_bag(ids, None, self.mode))
    }
}
