//! Linear layers, embeddings and dropout.

use super::build::Builder;
use super::init::Init;
use super::module::{Forward, Hooks, Item, Mode, Module, join};
use crate::error::{ErrorKind, Result};
use crate::ops::EmbeddingBagMode;
use crate::param::Param;
use crate::tensor::DTensor;

/// Declares how the fields of a layer of this crate are walked; other crates derive it.
macro_rules! layer {
    ($name:ident { $($field:ident),* }) => {
        impl Module for $name {
            fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>)) {
                if self.hooks.walk_replacement(path, "hooks", visit) {
                    return;
                }
                visit(path, Item::Module(stringify!($name)));
                $(self.$field.walk(&join(path, stringify!($field)), visit);)*
            }
        }
    };
}
pub(crate) use layer;

/// `x W^T + b` with a weight `[out, in]`.
pub struct Linear {
    /// The weight, `[out, in]`.
    pub weight: Param,
    /// The bias, `[out]`.
    pub bias: Option<Param>,
    /// Hooks.
    pub hooks: Hooks,
}

layer!(Linear { weight, bias, hooks });

impl Linear {
    /// With a bias.
    pub fn new(at: &Builder, inputs: usize, outputs: usize) -> Result<Self> {
        let bound = 1.0 / (inputs.max(1) as f64).sqrt();
        let layer = Self::without_bias(at, inputs, outputs)?;
        Ok(Linear { bias: Some(at.param("bias", &[outputs], Init::Uniform(-bound, bound))?), ..layer })
    }

    /// Without a bias.
    pub fn without_bias(at: &Builder, inputs: usize, outputs: usize) -> Result<Self> {
        let weight = at.param("weight", &[outputs, inputs], Init::LINEAR)?;
        Ok(Linear { weight, bias: None, hooks: at.hooks() })
    }
}

impl Forward for Linear {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let bias = self.bias.as_ref().map(Param::get);
        self.hooks.run(x, |x| x.linear(&self.weight.get(), bias.as_ref()))
    }
}

/// Rows of a table for ids.
pub struct Embedding {
    /// The table, `[vocabulary, features]`.
    pub weight: Param,
    /// Hooks.
    pub hooks: Hooks,
}

layer!(Embedding { weight, hooks });

impl Embedding {
    /// A table that begins normal.
    pub fn new(at: &Builder, vocabulary: usize, features: usize) -> Result<Self> {
        let weight = at.param("weight", &[vocabulary, features], Init::Normal(0.0, 1.0))?;
        Ok(Embedding { weight, hooks: at.hooks() })
    }
}

impl Forward for Embedding {
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        self.hooks.run(ids, |ids| self.weight.get().embedding(ids))
    }
}

/// Rows of a table for bags of ids, one row per bag.
pub struct EmbeddingBag {
    /// The table, `[vocabulary, features]`.
    pub weight: Param,
    /// Hooks.
    pub hooks: Hooks,
    mode: EmbeddingBagMode,
}

layer!(EmbeddingBag { weight, hooks });

impl EmbeddingBag {
    /// A table that begins normal, and how a bag becomes one row.
    pub fn new(at: &Builder, vocabulary: usize, features: usize, mode: EmbeddingBagMode) -> Result<Self> {
        let weight = at.param("weight", &[vocabulary, features], Init::Normal(0.0, 1.0))?;
        Ok(EmbeddingBag { weight, hooks: at.hooks(), mode })
    }

    /// Bags of any length: one begins at every offset of a vector of ids.
    #[track_caller]
    pub fn forward_bags(&self, ids: &DTensor, offsets: &[usize]) -> Result<DTensor> {
        let bags = |ids: &DTensor| self.weight.get().embedding_bag(ids, Some(offsets), self.mode);
        self.hooks.run_own("forward_bags", ids, bags)
    }
}

impl Forward for EmbeddingBag {
    /// A matrix of ids, one bag per row.
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        self.hooks.run(ids, |ids| self.weight.get().embedding_bag(ids, None, self.mode))
    }
}

/// Drops elements while training.
pub struct Dropout {
    /// Hooks.
    pub hooks: Hooks,
    p: f64,
    mode: Mode,
}

layer!(Dropout { mode, hooks });

impl Dropout {
    /// Drops with probability `p`.
    pub fn new(p: f64) -> Result<Self> {
        if !(0.0..=1.0).contains(&p) {
            return Err(ErrorKind::Argument.error("dropout", format!("probability {p}"), "0 to 1", "correct it"));
        }
        Ok(Dropout { hooks: Hooks::default(), p, mode: Mode::default() })
    }
}

impl Forward for Dropout {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.dropout(self.p, self.mode.is_training()))
    }
}
