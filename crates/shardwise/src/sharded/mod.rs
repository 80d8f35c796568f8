//! [`ShardedTensor`]: a tensor as a list of shards, any number of them per rank, each a box anywhere in the tensor.
//!
//! Where a [`DTensor`](crate::tensor::DTensor) has one placement per mesh axis, a `ShardedTensor` has a [`ShardingSpec`] that
//! lists its shards one by one, as PyTorch's `torch.distributed._shard.sharded_tensor` does. The two convert into each other
//! ([`ShardedTensor::to_dtensor`], [`ShardedTensor::from_dtensor`]), without a copy where the shards form a layout.
//!
//! ```
//! use shardwise::prelude::*;
//! use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
//!
//! launch(2, |world| {
//!     let mesh = world.mesh([("all", 2)])?;
//!     // rank 1 holds the first and the third chunk of the rows
//!     let rows = ChunkShardingSpec::new(0, ["rank:1/cpu", "rank:0/cpu", "rank:1/cpu"])?;
//!     let x = ShardedTensor::randn(rows, (5, 4), DType::F32, &mesh)?;
//!     assert_eq!(x.local_shards().len(), [1, 2][world.rank()]);
//!     let columns = ChunkShardingSpec::over_ranks(1, [0, 1])?;
//!     let y = x.reshard(columns)?;
//!     assert_eq!(y.local_tensor()?.dims(), [5, 2]);
//!     assert!(x.equal(&y)?);
//!     Ok(())
//! })?;
//! # Ok::<(), Error>(())
//! ```

mod chunk;
mod construct;
mod convert;
mod device;
mod enumerable;
mod exchange;
mod fill;
mod holder;
mod infer;
mod metadata;
mod movement;
mod operators;
mod remote;
mod shard;
mod spec;
mod spec_ops;
mod state;
mod tensor;

pub use chunk::ChunkShardingSpec;
pub use construct::shard_tensor;
pub use device::RemoteDevice;
pub use enumerable::EnumerableShardingSpec;
pub use exchange::{ShardTensorRequest, distribute};
pub use holder::ShardHolder;
pub use metadata::{ShardMetadata, ShardedTensorMetadata};
pub use operators::{call_sharded_op, with_sharded_op};
pub use remote::RemoteShard;
pub use shard::TensorShard;
pub use spec::{AnyShardingSpec, ShardingSpec};
pub use spec_ops::register_spec_op;
pub use state::ShardedTensorState;
pub use tensor::ShardedTensor;
