//! Modules and layers, written as if for one device; `torch.nn` for Rust.
//!
//! A module is a struct with `#[derive(Module)]` ([`Module`]) that implements [`Forward`]. A [`Builder`] creates its
//! parameters under dotted paths, in layouts that are chosen separately from the model.
//!
//! ```
//! use shardwise::nn::{Builder, Forward, Linear, Module};
//! use shardwise::prelude::*;
//!
//! #[derive(Module)]
//! struct Mlp {
//!     up: Linear,
//!     down: Linear,
//! }
//!
//! impl Mlp {
//!     fn new(builder: &Builder, width: usize) -> Result<Self> {
//!         Ok(Mlp { up: Linear::new(&builder.child("up"), width, 4 * width)?, down: Linear::new(&builder.child("down"), 4 * width, width)? })
//!     }
//! }
//!
//! impl Forward for Mlp {
//!     fn forward(&self, x: &DTensor) -> Result<DTensor> {
//!         self.down.forward(&self.up.forward(x)?.gelu()?)
//!     }
//! }
//!
//! launch(2, |world| {
//!     let mesh = world.mesh([("tp", 2)])?;
//!     // layouts are specified separately from the model
//!     let builder = Builder::new(&mesh).placed(|path, _| match path {
//!         "up.weight" | "up.bias" => vec![Shard(0)],
//!         "down.weight" => vec![Shard(1)],
//!         _ => vec![Replicate],
//!     });
//!     let mlp = Mlp::new(&builder, 8)?;
//!     let y = mlp.forward(&DTensor::randn((4, 8), &mesh, [Replicate])?)?;
//!     assert_eq!(y.placements(), [Partial(ReduceOp::Sum)]);
//!     assert_eq!(mlp.named_parameters().iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
//!         ["up.weight", "up.bias", "down.weight", "down.bias"]);
//!     Ok(())
//! })?;
//! # Ok::<(), Error>(())
//! ```

mod activation;
mod attention;
mod build;
mod conv;
mod distribute;
mod hints;
mod hooks;
pub mod init;
mod linear;
mod lora;
mod mlp;
mod module;
mod norm;
mod pool;
mod sequential;
mod state_dict;

pub use crate::ops::Activation;
pub use activation::{Elu, Gelu, GeluTanh, LeakyRelu, LogSoftmax, Relu, Sigmoid, Silu, Softmax, Softplus, Tanh};
pub use attention::{AttentionConfig, MultiHeadAttention, RotaryEmbedding};
pub use build::Builder;
pub use conv::{
    Conv1d, Conv1dOptions, Conv2d, Conv2dOptions, Conv3d, Conv3dOptions, ConvTranspose1d, ConvTranspose1dOptions,
    ConvTranspose2d, ConvTranspose2dOptions, ConvTranspose3d, ConvTranspose3dOptions,
};
pub use distribute::distribute_module;
pub use hints::{Heads, PlanHints};
pub(crate) use linear::layer;
pub use linear::{Dropout, Embedding, EmbeddingBag, Linear};
pub use lora::{Lora, LoraLinear, lora_adapters};
pub use mlp::{Mlp, SwiGlu};
pub use module::{Buffer, Forward, ForwardAll, Hooks, Layer, Module, ModuleItem, TrainingMode, join};
pub use norm::{BatchNorm, GroupNorm, LayerNorm, RmsNorm};
pub use pool::{AvgPool1d, AvgPool2d, ConstantPad, Flatten, MaxPool1d, MaxPool2d};
pub use sequential::Sequential;
pub use shardwise_derive::Module;
pub use state_dict::{IncompatibleKeys, StateDictOptions};
