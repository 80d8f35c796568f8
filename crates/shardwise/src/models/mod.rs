//! Language models, written as if for one device. How they are spread over ranks is said apart, by plans.
//!
//! ```
//! use shardwise::models::{GptConfig, ModelConfig, Spread, Weights, batch_placements, build};
//! use shardwise::prelude::*;
//!
//! let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
//! let config = ModelConfig::Gpt(GptConfig { n_layers: 1, d_model: 32, d_ff: 64, ..GptConfig::default() });
//! let spread = Spread { weights: Weights::Sharded, tensor_parallel: true, sequence_parallel: false };
//! let plan = spread.plan(&config, &mesh)?;
//! launch(4, move |world| {
//!     let mesh = world.device_mesh(mesh.clone())?;
//!     let model = build(&config, &plan, &mesh, DType::F32)?;
//!     let ids = DTensor::from_fn((2, 8), DType::I64, &mesh, batch_placements(&mesh), |i| (i[0] * 8 + i[1]) as f64)?;
//!     let loss = model.loss(&ids, &ids)?;
//!     assert!(loss.item::<f32>()?.is_finite());
//!     Ok(())
//! })?;
//! # Ok::<(), Error>(())
//! ```

mod config;
mod gpt;
mod hf;
mod llama;
mod names;
mod plans;

pub use config::{GptConfig, LlamaConfig, ModelConfig};
pub use gpt::{Gpt, GptBlock};
pub use hf::{check_export, export_hf};
pub use llama::{Llama, LlamaBlock};
pub use names::{Entry, Names, export, import};
pub use plans::{Spread, Weights, batch_placements, build, search_plan};

use candle_core::DType;

use crate::error::Result;
use crate::nn::init::Init;
use crate::nn::{Builder, Embedding, Forward, Linear, Module};
use crate::ops::Classes;
use crate::tensor::DTensor;

/// A model that says for every position of `[batch, length]` ids how likely each token is to come next; `forward` gives
/// the logits `[batch, length, vocabulary]`.
pub trait LanguageModel: Module + Forward + Send + Sync {
    /// How the weights are called in files.
    fn names(&self) -> Names;

    /// The mean cross entropy of the tokens that did come next, `[batch, length]`.
    #[track_caller]
    fn loss(&self, ids: &DTensor, targets: &DTensor) -> Result<DTensor> {
        let logits = self.forward(ids)?.flatten(0, 1)?.to_dtype(DType::F32)?;
        logits.cross_entropy(&targets.flatten(0, 1)?, Classes::default())
    }
}

/// The head, with a weight of its own or that of the table of tokens.
fn head(at: &Builder, tokens: &Embedding, tied: bool) -> Result<Linear> {
    if tied {
        return Ok(Linear { weight: tokens.weight.clone(), bias: None, hooks: at.at("head").hooks() });
    }
    let shape = tokens.weight.shape();
    Linear::without_bias(&at.at("head"), shape[1], shape[0])
}

/// Sets what weights begin with: matrices small and random, smaller where blocks add to the stream, so that its size does
/// not grow with their number; biases zero.
fn begin(model: &dyn Module, layers: usize) -> Result<()> {
    const STD: f64 = 0.02;
    for (path, param) in model.named_parameters() {
        let value = param.get();
        let init = match value.rank() {
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
