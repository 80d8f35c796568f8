//! Distributed tensors for Rust.
//!
//! Shardwise is to [`candle_core`] what DTensor, FSDP2 and distributed checkpoints are to PyTorch: a program written as if
//! for one device runs on a mesh of ranks, and layouts decide what each rank stores and sends.
//!
//! * [`Mesh`], [`Placement`] and [`Layout`]: which rank owns which part of a tensor, as pure arithmetic.
//! * [`launch`], [`World`], [`Group`]: ranks as threads of one process, and their collectives. Collectives do not hang:
//!   a failure or a mismatched call on one rank is an [`Error`] on all of them, with ranks and source lines.
//! * [`DeviceMesh`] and [`DTensor`]: tensors on a mesh of a running world, redistributed from any layout to any other.
//! * [`picture`]: meshes, layouts and redistributions drawn, as text and SVG.
//! * [`ops`]: operators as methods of [`DTensor`]. Layouts propagate; data moves only where an operator needs it.
//! * [`autograd`]: gradients, which stay partial sums until they are needed.
//! * [`sharded`]: `ShardedTensor`, a tensor as an explicit list of shards, any number per rank, readable by other ranks.
//! * [`optim`]: optimizers whose state has the layouts of the parameters, gradient clipping and learning-rate schedules.
//! * [`text`]: tokenizers and chat templates.
//! * [`data`]: batches in a reproducible order, sharded, resumable on another number of ranks.
//! * [`plan`]: sharding plans, specified separately from the model or found by a planner.
//! * [`mod@checkpoint`]: state saved and loaded in any layout, in PyTorch's, safetensors and native formats.
//! * [`models`]: the `Model` trait, and language models written as if for one device.
//! * [`generate`]: generation of text.
//! * [`train`]: the training loop for any model.
//! * [`DryWorld`]: the program of one rank of a world of any size, with shapes but without data.
//!
//! Local tensors are [`candle_core::Tensor`]s on the CPU. The crate is re-exported as `shardwise::candle_core`:
//! a program uses it from there, and so has the version that Shardwise is built with.
//!
//! ```
//! use shardwise::prelude::*;
//!
//! launch(4, |world| {
//!     let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//!     let x = DTensor::randn((5, 4), &mesh, [Shard(0), Shard(1)])?; // the same numbers in every layout
//!     let y = x.redistribute([Replicate, Shard(0)])?;
//!     assert!(x.equal(&y)?);
//!     Ok(())
//! })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Threads
//!
//! [`launch`] gives every rank an equal share of the cores: parallel kernels of a rank run in a thread pool of that size.
//! Candle has one more pool for large elementwise operations, whose size it reads from the environment variable
//! `CANDLE_NUM_THREADS`; the first launch of more than one rank sets the variable unless it is already set. A program in
//! which C code reads the environment from another thread at that moment must set the variable itself.

// The order of the modules is the architecture: a module uses only modules above it. `tests/communication/architecture` enforces it.

// `#[derive(Module)]` names this crate `shardwise`, inside of it too.
extern crate self as shardwise;

pub mod error;
pub mod read_file;
mod rank_context;
mod module_scope;
mod intern;
mod fnv;
pub mod mesh;
pub mod placement;
pub mod layout;
pub mod random;
pub mod comm;
pub mod redistribute;
pub mod tensor;
pub mod picture;
pub mod rule;
pub mod op;
pub mod ops;
pub mod autograd;
pub mod param;
pub mod nn;
pub mod sharded;
pub mod optim;
pub mod plan;
pub mod text;
pub mod data;
pub mod checkpoint;
pub mod models;
pub mod generate;
pub mod train;
pub mod report;
pub mod guide;

pub use candle_core;

pub use autograd::{BackwardOptions, GradientHook, Gradients, checkpoint_activations, jvp, local_map};
pub use comm::{
    DeviceMesh, DryWorld, ExplicitRedistribution, Group, ThreadWorld, World, explicit_communication_only, launch,
    launch_scoped, with_mesh,
};
pub use error::{Error, ErrorKind, Result};
pub use layout::{Layout, OwnedBox, TensorBox, TensorMeta};
pub use mesh::Mesh;
pub use op::{autocast, detect_anomaly};
pub use optim::ShardedOptimizer;
pub use param::Param;
pub use placement::{Placement, ReduceOp};
pub use random::{Distribution, Generator};
pub use sharded::ShardedTensor;
pub use tensor::{DTensor, Number, Operand, no_grad};

/// The items that most programs need: `use shardwise::prelude::*;`.
pub mod prelude {
    pub use crate::Placement::{Partial, Replicate, Shard};
    pub use crate::nn::{Builder, Forward, FsdpModule, Module};
    pub use crate::optim::{Adam, AdamW, OptimizeModule, Sgd, ShardedOptimizer};
    pub use crate::{
        DTensor, DeviceMesh, Distribution, Error, ErrorKind, Gradients, Group, Layout, Mesh, Param, Placement,
        ReduceOp, Result, TensorMeta, ThreadWorld, World, launch, launch_scoped, no_grad, with_mesh,
    };
    pub use candle_core::DType;
}
