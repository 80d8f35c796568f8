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

mod build;
mod evaluation;
mod hints;
mod hooks;
pub mod init;
mod module;
mod state_dict;
mod distributed;
mod layers;

pub use crate::ops::Activation;
pub use build::Builder;
pub use distributed::distribute::distribute_module;
pub use distributed::fsdp::{FsdpModule, MixedPrecision};
pub(crate) use distributed::full_state::{check_rank, described_by, gather_to, stand_in, text_of};
pub(crate) use evaluation::EvaluationScope;
pub use hints::{Heads, PlanHints};
pub use layers::activation::{
    Celu, Elu, Gelu, GeluTanh, Glu, Hardshrink, Hardsigmoid, Hardswish, Hardtanh, LeakyRelu, LogSigmoid, LogSoftmax,
    Mish, PRelu, RandomizedRelu, Relu, Relu6, Selu, Sigmoid, Silu, Softmax, Softmax2d, Softmin, Softplus, Softshrink,
    Softsign, Tanh, Tanhshrink, Threshold,
};
pub use layers::attention::{AttentionConfig, MultiHeadAttention, RotaryEmbedding};
pub use layers::conv::{
    Conv1d, Conv1dOptions, Conv2d, Conv2dOptions, Conv3d, Conv3dOptions, ConvTranspose1d, ConvTranspose1dOptions,
    ConvTranspose2d, ConvTranspose2dOptions, ConvTranspose3d, ConvTranspose3dOptions,
};
pub use layers::dropout::{AlphaDropout, Dropout, Dropout1d, Dropout2d, Dropout3d, FeatureAlphaDropout};
pub use layers::instance_norm::{InstanceNorm, InstanceNormOptions, LocalResponseNorm};
pub use layers::linear::{Embedding, EmbeddingBag, Linear};
pub use layers::lora::{Lora, LoraLinear, lora_adapters};
pub use layers::loss::{
    BceLoss, BceWithLogitsLoss, CosineEmbeddingLoss, CrossEntropyLoss, CtcLoss, GaussianNllLoss, HingeEmbeddingLoss,
    HuberLoss, KlDivLoss, L1Loss, MarginRankingLoss, MseLoss, MultiMarginLoss, MultilabelMarginLoss,
    MultilabelSoftMarginLoss, NllLoss, PoissonNllLoss, SmoothL1Loss, SoftMarginLoss, TripletMarginLoss,
};
pub use layers::mlp::{Mlp, SwiGlu};
pub use layers::norm::{BatchNorm, GroupNorm, LayerNorm, RmsNorm};
pub use layers::pool::{
    AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d, AdaptiveMaxPool1d, AdaptiveMaxPool2d, AdaptiveMaxPool3d,
    AvgPool1d, AvgPool2d, AvgPool3d, FractionalMaxPool2d, FractionalMaxPool3d, LpPool1d, LpPool2d, LpPool3d, MaxPool1d,
    MaxPool2d, MaxPool3d, MaxUnpool1d, MaxUnpool2d, MaxUnpool3d,
};
pub use layers::recurrent::{Gru, GruCell, Lstm, LstmCell, RecurrentOptions, RecurrentState, Rnn, RnnCell};
pub use layers::sequential::Sequential;
pub use layers::shape::{
    ChannelShuffle, CircularPad, ConstantPad, Flatten, Fold, Identity, PixelShuffle, PixelUnshuffle, ReflectionPad,
    ReplicationPad, Unflatten, Unfold, Upsample, ZeroPad,
};
pub use layers::similarity::{Bilinear, CosineSimilarity, PairwiseDistance};
pub use module::{Buffer, ExtraState, Forward, ForwardAll, Hooks, Layer, Module, ModuleItem, TrainingMode, join};
pub use shardwise_derive::Module;
pub use state_dict::{IncompatibleKeys, StateDictOptions};
