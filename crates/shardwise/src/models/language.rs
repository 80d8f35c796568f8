//! The trait of language models, and what they have in common.

use candle_core::DType;

use super::model::Model;
use super::plans::batch_placements;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::nn::init::Init;
use crate::nn::{Forward, Module};
use crate::ops::LossOptions;
use crate::tensor::DTensor;

/// A causal language model: `forward` takes ids `[batch, length]` and returns logits `[batch, length, vocabulary]` of the next
/// token.
#[doc(alias = "CausalLM")]
pub trait LanguageModel: Model + Forward {
    /// Returns the mean cross entropy of the targets, `[batch, length]`, computed in f32.
    ///
    /// Collective. Logits that are sharded on the vocabulary are not gathered.
    #[track_caller]
    fn loss(&self, ids: &DTensor, targets: &DTensor) -> Result<DTensor> {
        loss_of_logits(&self.forward(ids)?, targets)
    }
}

/// The mean cross entropy of targets `[batch, length]`, computed in f32.
#[track_caller]
pub(super) fn loss_of_logits(logits: &DTensor, targets: &DTensor) -> Result<DTensor> {
    let logits = logits.flatten(0, 1)?.to_dtype(DType::F32)?;
    logits.cross_entropy(&targets.flatten(0, 1)?, LossOptions::default())
}

/// The loss of a batch of two tensors, ids and targets.
#[track_caller]
pub(super) fn batch_loss(model: &dyn LanguageModel, batch: &[DTensor]) -> Result<DTensor> {
    let [ids, targets] = batch else {
        let found = format!("{} tensor(s)", batch.len());
        let fix = "use a dataset such as `data::TokenSequences`";
        return Err(ErrorKind::Model.error("batch of a language model", found, "ids and targets", fix));
    };
    model.loss(ids, targets)
}

/// Zeros in the shapes of a batch of [`TokenSequences`](crate::data::TokenSequences).
pub(super) fn example_batch(samples: usize, length: usize, mesh: &DeviceMesh) -> Result<Vec<DTensor>> {
    let ids = DTensor::zeros((samples, length), DType::I64, mesh, batch_placements(mesh))?;
    Ok(vec![ids.clone(), ids])
}

/// Sizes that all language models have.
pub(super) struct LanguageModelSizes {
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

/// Layers are built one by one; no model that is known has a tenth of these.
const MAX_LAYERS: usize = 4096;

impl LanguageModelSizes {
    /// Checks that the sizes fit together.
    pub(super) fn check(&self) -> Result<()> {
        let bad = |found: String, needed: &str, fix: &str| Err(ErrorKind::Model.error("model", found, needed, fix));
        let LanguageModelSizes { model, width, heads, key_heads, dropout, .. } = *self;
        let sizes = [self.vocab_size, self.seq_len, width, self.layers, heads, self.d_ff];
        if sizes.contains(&0) || key_heads == 0 {
            let found =
                format!("{model} with a size of 0 among vocabulary, length, width, layers, heads, MLP {sizes:?}");
            return bad(found, "sizes of at least 1", "correct the size");
        }
        if self.layers > MAX_LAYERS {
            return bad(format!("{model} with {} layers", self.layers), "at most 4096", "correct the number");
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

/// Initializes weights as GPT-2 does: matrices normal with standard deviation 0.02, the ones that write to the residual stream
/// divided by the root of their number, so that its variance does not grow with depth; biases zero.
pub(super) fn initialize_weights(model: &dyn Module, layers: usize) -> Result<()> {
    const STD: f64 = 0.02;
    for (path, param) in model.named_parameters() {
        let value = param.get();
        let init = match param.shape().len() {
            2 if path.ends_with("output.weight") || path.ends_with("down.weight") => {
                Init::Normal(0.0, STD / ((2 * layers) as f64).sqrt())
            }
            2 => Init::Normal(0.0, STD),
            _ if path.ends_with("bias") => Init::ZEROS,
            _ => continue,
        };
        param.set(&init.create_in(value.layout(), value.dtype(), value.device_mesh())?)?;
    }
    Ok(())
}
