//! Distributed tensors for Rust.
//!
//! A program written as if for one device runs on a mesh of ranks. What is here so far:
//!
//! * [`Mesh`], [`Placement`] and [`Layout`]: which rank owns which part of a tensor, as pure arithmetic;
//! * [`launch`], [`World`], [`Group`]: ranks as threads of one process, and the collectives they make together, which
//!   never hang: whatever goes wrong on one rank is an [`Error`] on the others, naming ranks and places;
//! * [`DeviceMesh`] and [`DTensor`]: tensors on a mesh of a running world, redistributed from any layout to any other;
//! * [`ops`]: operators as methods of [`DTensor`]; layouts propagate, and data moves only when it must;
//! * [`autograd`]: gradients, which may stay pending sums until they are needed;
//! * [`sharded`]: tensors as boxes one by one, any number per rank, with specs, states and reads without the owner's help;
//! * [`optim`]: optimizers whose state lies as the parameters do, with clipping and schedules;
//! * [`data`]: batches for training, in a reproducible order, sharded, resumable on any number of ranks;
//! * [`plan`]: how a model is spread over a mesh, said apart from it or found by planners;
//! * [`mod@checkpoint`]: state saved and loaded in any layout, in the formats that people have;
//! * [`models`]: what a model is, and language models written as if for one device;
//! * [`train`]: the training loop for any model;
//! * [`DryWorld`]: the program of one rank of any number, without data.
//!
//! Local tensors are those of [`candle_core`].
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
//! [`launch`] gives every rank an equal share of the cores: parallel kernels of a rank run in a pool of that size. Candle
//! has one more pool for large elementwise operations, whose size it reads from the variable `CANDLE_NUM_THREADS`; the
//! first launch of more than one rank sets it, unless it is set already. A program in which foreign code reads the
//! environment from other threads at that moment should set it itself.

// The order of the modules is the architecture: each may use those above it, none below. A test holds it so.

pub mod error;
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
pub mod rule;
pub mod op;
pub mod ops;
pub mod autograd;
pub mod param;
pub mod nn;
pub mod sharded;
pub mod optim;
pub mod plan;
pub mod data;
pub mod checkpoint;
pub mod models;
pub mod train;
pub mod guide;

pub use autograd::{BackwardOptions, Gradients, checkpoint_activations, local_map};
pub use comm::{
    DeviceMesh, DryWorld, ExplicitRedistribution, Group, ThreadWorld, World, explicit_communication_only, launch,
    launch_scoped, with_mesh,
};
pub use error::{Error, ErrorKind, Result};
pub use layout::{Layout, OwnedBox, TensorBox, TensorMeta};
pub use mesh::Mesh;
pub use op::detect_anomaly;
pub use optim::ShardedOptimizer;
pub use param::Param;
pub use placement::{Placement, ReduceOp};
pub use random::{Distribution, Generator};
pub use sharded::ShardedTensor;
pub use tensor::{DTensor, Number, Operand, no_grad};

/// What most programs need, in one line: `use shardwise::prelude::*;`.
pub mod prelude {
    pub use crate::Placement::{Partial, Replicate, Shard};
    pub use crate::nn::{Builder, Forward, Module};
    pub use crate::optim::{Adam, AdamW, OptimizeModule, Sgd, ShardedOptimizer};
    pub use crate::{
        DTensor, DeviceMesh, Distribution, Error, ErrorKind, Gradients, Group, Layout, Mesh, Param, Placement,
        ReduceOp, Result, TensorMeta, ThreadWorld, World, launch, launch_scoped, no_grad, with_mesh,
    };
    pub use candle_core::DType;
}
