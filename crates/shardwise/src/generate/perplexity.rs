//! How well a model predicts tokens.

use candle_core::DType;

use crate::error::{ErrorKind, Result};
use crate::models::LanguageModel;
use crate::nn::EvaluationScope;
use crate::ops::{LossOptions, Reduction};
use crate::tensor::{DTensor, no_grad};

/// The loss of a model over tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Perplexity {
    /// Mean cross entropy per predicted token, in nats.
    pub loss: f64,
    /// Number of predicted tokens.
    pub tokens: u64,
}

impl Perplexity {
    /// The perplexity: `exp(loss)`.
    pub fn value(&self) -> f64 {
        self.loss.exp()
    }
}

/// Measures a model on batches of ids and targets, `[batch, length]` each, as datasets of [`data`](crate::data) give them.
///
/// Every predicted token counts the same, whichever batch it is in; targets of -100 do not count. Collective: all ranks of the
/// mesh must call it with the same batches. The mode of the model does not change, whether this succeeds or not.
///
/// # Errors
/// [`ErrorKind::Data`] if there is no target, and those of the forward pass.
#[track_caller]
pub fn perplexity(
    model: &dyn LanguageModel,
    batches: impl IntoIterator<Item = Result<Vec<DTensor>>>,
) -> Result<Perplexity> {
    let (mut sum, mut tokens) = (0.0, 0);
    let _evaluation = EvaluationScope::new(model);
    for batch in batches {
        let (loss, count) = no_grad(|| sum_of_batch(model, &batch?))?;
        sum += loss;
        tokens += count;
    }
    if tokens == 0 {
        let fix = "use longer texts, or conversations with answers";
        return Err(ErrorKind::Data.error("data", "no token to predict", "one at least", fix));
    }
    Ok(Perplexity { loss: sum / tokens as f64, tokens })
}

/// The sum of the losses of a batch, and the number of its targets.
#[track_caller]
fn sum_of_batch(model: &dyn LanguageModel, batch: &[DTensor]) -> Result<(f64, u64)> {
    let [ids, targets, ..] = batch else {
        let found = format!("{} tensor(s)", batch.len());
        return Err(ErrorKind::Data.error("batch", found, "ids and targets", "use a dataset of sequences"));
    };
    let logits = model.forward(ids)?.flatten(0, 1)?.to_dtype(DType::F32)?;
    let options = LossOptions { reduction: Reduction::Sum, ..LossOptions::default() };
    let loss = logits.cross_entropy(&targets.flatten(0, 1)?, options)?;
    let count = targets.ne(options.ignore_index as f64)?.to_dtype(DType::I64)?.sum_all()?;
    let loss = loss.full_tensor()?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    Ok((loss, count.full_tensor()?.to_dtype(DType::I64)?.to_scalar::<i64>()?.cast_unsigned()))
}
