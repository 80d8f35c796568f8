//! Language models: what they have in common.

use candle_core::DType;

use super::model::Model;
use super::plans::batch_placements;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::nn::init::Init;
use crate::nn::{Builder, Embedding, Forward, Linear, Module};
use crate::ops::LossOptions;
use crate::tensor::DTensor;

/// A model that returns for every position of `[batch, length]` ids how likely each token is to come next; `forward` returns
/// the logits `[batch, length, vocabulary]`.
pub trait LanguageModel: Model + Forward {
    /// The mean cross entropy of the tokens that did come next, `[batch, length]`.
    #[track_caller]
    fn loss(&self, ids: &DTensor, targets: &DTensor) -> Result<DTensor> {
        let logits = self.forward(ids)?.flatten(0, 1)?.to_dtype(DType::F32)?;
        logits.cross_entropy(&targets.flatten(0, 1)?, LossOptions::default())
    }
}

/// The loss of a batch of ids and targets.
#[track_caller]
pub(super) fn batch_loss(model: &dyn LanguageModel, batch: &[DTensor]) -> Result<DTensor> {
    let [ids, targets] = batch else {
        let found = format!("{} tensor(s)", batch.len());
        let fix = "use a dataset such as `data::TokenSequences`";
        return Err(ErrorKind::Model.error("batch of a language model", found, "ids and targets", fix));
    };
    model.loss(ids, targets)
}

/// Ids and targets as [`TokenSequences`](crate::data::TokenSequences) has them.
pub(super) fn example_batch(samples: usize, length: usize, mesh: &DeviceMesh) -> Result<Vec<DTensor>> {
    let ids = DTensor::zeros((samples, length), DType::I64, mesh, batch_placements(mesh))?;
    Ok(vec![ids.clone(), ids])
}

/// Sizes that all language models have.
pub(super) struct Sizes {
    pub(super) model: &'static str,
    pub(super) vocab_size: usize,
    pub(super) seq_len: usize,
    pub(super) width: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) key_heads: usize,
    pub(super) d_ff: usize,
    pub(super) dropout: f64,
}

impl Sizes {
    /// An error if the sizes do not fit together.
    pub(super) fn check(&self) -> Result<()> {
        let bad = |found: String, needed: &str, fix: &str| Err(ErrorKind::Model.error("model", found, needed, fix));
        let Sizes { model, width, heads, key_heads, dropout, .. } = *self;
        let sizes = [self.vocab_size, self.seq_len, width, self.layers, heads, self.d_ff];
        if sizes.contains(&0) || key_heads == 0 {
            let found =
                format!("{model} with a size of 0 among vocabulary, length, width, layers, heads, MLP {sizes:?}");
            return bad(found, "sizes of at least 1", "correct the size");
        }
        if !width.is_multiple_of(heads) || !heads.is_multiple_of(key_heads) {
            let found = format!("{model} of width {width} with {heads} query heads and {key_heads} key heads");
            return bad(
                found,
                "a width that is a multiple of the heads, and these of the key heads",
                "change the heads",
            );
        }
        if !(0.0..1.0).contains(&dropout) {
            return bad(format!("dropout {dropout}"), "0 to below 1", "correct it");
        }
        Ok(())
    }
}

/// The head, with a weight of its own or that of the table of tokens.
pub(super) fn head(at: &Builder, tokens: &Embedding, tied: bool) -> Result<Linear> {
    if tied {
        return Ok(Linear { weight: tokens.weight.clone(), bias: None, hooks: at.at("head").hooks() });
    }
    let shape = tokens.weight.shape();
    Linear::without_bias(&at.at("head"), shape[1], shape[0])
}

/// Sets what weights begin with: matrices small and random, smaller where blocks add to the stream, so that its size does
/// not grow with their number; biases zero.
pub(super) fn begin(model: &dyn Module, layers: usize) -> Result<()> {
    const STD: f64 = 0.02;
    for (path, param) in model.named_parameters() {
        let value = param.get();
        let init = match value.ndim() {
            2 if path.ends_with("output.weight") || path.ends_with("down.weight") => {
                Init::Normal(0.0, STD / ((2 * layers) as f64).sqrt())
            }
            2 => Init::Normal(0.0, STD),
            _ if path.ends_with("bias") => Init::ZEROS,
            _ => continue,
        };
        param.set(&init.make_in(value.layout(), value.dtype(), value.device_mesh())?)?;
    }
    Ok(())
}
