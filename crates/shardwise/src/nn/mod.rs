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
mod dropout;
mod evaluation;
mod fsdp;
mod full_state;
mod hints;
mod hooks;
pub mod init;
mod instance_norm;
mod linear;
mod lora;
mod loss;
mod mlp;
mod module;
mod norm;
mod pool;
mod recurrent;
mod sequential;
mod shape;
mod similarity;
mod state_dict;

pub use crate::ops::Activation;
pub use activation::{
    Celu, Elu, Gelu, GeluTanh, Glu, Hardshrink, Hardsigmoid, Hardswish, Hardtanh, LeakyRelu, LogSigmoid, LogSoftmax,
    Mish, PRelu, RandomizedRelu, Relu, Relu6, Selu, Sigmoid, Silu, Softmax, Softmax2d, Softmin, Softplus, Softshrink,
    Softsign, Tanh, Tanhshrink, Threshold,
};
pub use attention::{AttentionConfig, MultiHeadAttention, RotaryEmbedding};
pub use build::Builder;
pub use conv::{
    Conv1d, Conv1dOptions, Conv2d, Conv2dOptions, Conv3d, Conv3dOptions, ConvTranspose1d, ConvTranspose1dOptions,
    ConvTranspose2d, ConvTranspose2dOptions, ConvTranspose3d, ConvTranspose3dOptions,
};
pub use distribute::distribute_module;
pub use dropout::{AlphaDropout, Dropout, Dropout1d, Dropout2d, Dropout3d, FeatureAlphaDropout};
pub(crate) use evaluation::EvaluationScope;
pub use fsdp::{FsdpModule, MixedPrecision};
pub(crate) use full_state::{check_rank, described_by, gather_to, stand_in, text_of};
pub use hints::{Heads, PlanHints};
pub use instance_norm::{InstanceNorm, InstanceNormOptions, LocalResponseNorm};
pub use linear::{Embedding, EmbeddingBag, Linear};
pub use lora::{Lora, LoraLinear, lora_adapters};
pub use loss::{
    BceLoss, BceWithLogitsLoss, CosineEmbeddingLoss, CrossEntropyLoss, CtcLoss, GaussianNllLoss, HingeEmbeddingLoss,
    HuberLoss, KlDivLoss, L1Loss, MarginRankingLoss, MseLoss, MultiMarginLoss, MultilabelMarginLoss,
    MultilabelSoftMarginLoss, NllLoss, PoissonNllLoss, SmoothL1Loss, SoftMarginLoss, TripletMarginLoss,
};
pub use mlp::{Mlp, SwiGlu};
pub use module::{Buffer, ExtraState, Forward, ForwardAll, Hooks, Layer, Module, ModuleItem, TrainingMode, join};
pub use norm::{BatchNorm, GroupNorm, LayerNorm, RmsNorm};
pub use pool::{
    AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d, AdaptiveMaxPool1d, AdaptiveMaxPool2d, AdaptiveMaxPool3d,
    AvgPool1d, AvgPool2d, AvgPool3d, FractionalMaxPool2d, FractionalMaxPool3d, LpPool1d, LpPool2d, LpPool3d, MaxPool1d,
    MaxPool2d, MaxPool3d, MaxUnpool1d, MaxUnpool2d, MaxUnpool3d,
};
pub use recurrent::{Gru, GruCell, Lstm, LstmCell, RecurrentOptions, RecurrentState, Rnn, RnnCell};
pub use sequential::Sequential;
pub use shape::{
    ChannelShuffle, CircularPad, ConstantPad, Flatten, Fold, Identity, PixelShuffle, PixelUnshuffle, ReflectionPad,
    ReplicationPad, Unflatten, Unfold, Upsample, ZeroPad,
};
pub use shardwise_derive::Module;
pub use similarity::{Bilinear, CosineSimilarity, PairwiseDistance};
pub use state_dict::{IncompatibleKeys, StateDictOptions};
