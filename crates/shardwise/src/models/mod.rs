//! Models, written as if for one device; plans specify separately how they are sharded.
//!
//! A model is anything that implements [`Model`], and its sizes [`ModelSpec`]: language models of this crate as well as models
//! of programs.
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
//!     let ids = DTensor::from_fn(((2, 8), DType::I64), &mesh, batch_placements(&mesh), |i| (i[0] * 8 + i[1]) as f64)?;
//!     let loss = model.loss(&ids, &ids)?;
//!     assert!(loss.item::<f32>()?.is_finite());
//!     Ok(())
//! })?;
//! # Ok::<(), Error>(())
//! ```

mod config;
mod gpt;
mod hf;
mod language;
mod llama;
mod model;
mod names;
mod plans;
mod weights;

pub use config::ModelConfig;
pub use gpt::{Gpt, GptBlock, GptConfig};
pub use hf::{check_export, export_hf};
pub use language::LanguageModel;
pub use llama::{Llama, LlamaBlock, LlamaConfig};
pub use model::{Model, ModelSpec};
pub use names::{Names, WeightName};
pub use plans::{Spread, Weights, batch_placements, build, estimate_step, search_plan};
pub use weights::{export, import};
