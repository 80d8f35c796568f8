//! Language models, and what a custom model needs to be planned, trained, saved and exported like them.
//!
//! A model implements [`Model`], its sizes [`ModelSpec`]. Models are written as if for one device; plans specify separately how
//! they are sharded.
//!
//! ```
//! use shardwise::models::{GptConfig, ModelConfig, ParallelismConfig, DataParallelMode, batch_placements, build};
//! use shardwise::prelude::*;
//!
//! let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
//! let config = ModelConfig::Gpt(GptConfig { n_layers: 1, d_model: 32, d_ff: 64, ..GptConfig::default() });
//! let parallelism = ParallelismConfig { data_parallel: DataParallelMode::FullyShard, tensor_parallel: true, sequence_parallel: false };
//! let plan = parallelism.plan(&config, &mesh)?;
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

mod build_model;
mod cache;
mod config;
mod decoder;
mod dry_training;
mod encoder;
mod families;
mod fields;
mod gpt;
mod hf;
mod language;
mod llama;
mod load;
mod load_options;
mod model;
mod names;
mod peft;
mod plans;
mod pooling;
mod pretrained;
mod source;
mod step_options;
mod stored_weights;
mod weights;

pub use build_model::build;
pub use cache::KvCache;
pub use config::ModelConfig;
pub use decoder::{Decoder, DecoderAttention, DecoderBlock, DecoderMlp, Experts, FeatureNorm, MixtureOfExperts};
pub use dry_training::report_step;
pub(crate) use dry_training::{DryTraining, bind, dry_world};
pub use encoder::{Encoder, EncoderBlock, EncoderOutput, Pooling};
pub use gpt::GptConfig;
pub use hf::{check_export, export_hf, export_hf_with_tokenizer};
pub use language::LanguageModel;
pub use llama::LlamaConfig;
pub use load::{dry_load_model, load, load_encoder, load_encoder_with, load_planned, load_with};
pub use load_options::{LoadOptions, ProgressFn};
pub use model::{Model, ModelSpec};
pub use names::{RowOrder, WeightName, WeightNames};
pub use peft::{load_adapter, lora_targets, save_adapter};
pub use plans::{DataParallelMode, ParallelismConfig, batch_placements, estimate_step, search_plan};
pub use pooling::load_pooling;
pub use pretrained::{PretrainedConfig, PretrainedModel};
pub use source::{load_text_files, load_tokenizer};
pub use step_options::StepOptions;
pub use weights::{export, import};
