//! Communication: worlds, groups of ranks, their collectives, and the engine that runs ranks as threads.
//!
//! Programs use [`Group`] (PyTorch's `ProcessGroup`), whose methods capture the call site. A group wraps a
//! [`Communicator`], the engine: threads of this process in [`threads`], MPI in the crate `shardwise-mpi`, no
//! communication at all in a [`DryWorld`]. A collective reaches the engine as one [`Call`] value, so that checking,
//! recording and describing collectives is written once for all engines.

mod agreement;
mod call;
mod check;
mod current;
mod device_mesh;
mod dry;
mod dump;
pub mod engine;
mod explicit;
mod group;
mod host;
mod lock;
mod measure;
mod memory_kind;
mod profile;
mod memory;
mod origin;
pub mod threads;
mod trace;
mod flops;
mod waiting;
mod world;

pub(crate) use agreement::{agree, all_ok, gather_texts};
pub use call::{Call, RankSizes};
pub use current::{current_mesh, with_mesh};
pub use device_mesh::DeviceMesh;
pub(crate) use device_mesh::MeshIdentity;
pub use dry::{DryRun, DryWorld};
pub use dump::{DUMP_DIR_VARIABLE, DumpedCall, DumpedMessage, RankDump};
pub use explicit::{ExplicitRedistribution, ImplicitRedistribution};
pub(crate) use explicit::{check_relabelling, while_redistributing};
pub use group::Group;
pub use lock::{CommLock, LockedCall, UPDATE_LOCK, check_communication, lock};
pub(crate) use memory::MemoryCharge;
pub use memory::{Memory, MemoryByKind, MemorySample};
pub use memory_kind::MemoryKind;
pub(crate) use origin::{Origin, with_call_origin};
pub(crate) use profile::begin_span;
pub use profile::{MemoryEvent, Profile, ProfileSpan, SpanKind};
pub use threads::{ThreadWorld, launch, launch_scoped};
pub use trace::{
    CommRecord, CommReport, CommTotal, Trace, explicit_communication_only, record_communication, record_operator,
};
pub(crate) use trace::{name_operator, record_implicit_operator};
pub use world::World;

pub use crate::rank_context::Phase;

use std::sync::Arc;

use candle_core::Tensor;

use crate::error::{Result, Site};
use crate::layout::TensorMeta;
use crate::mesh::Network;

/// Tensors that the ranks of a group have made readable to each other with [`Group::expose`].
///
/// Implemented by engines. Dropping it does not wait for other ranks.
pub trait ExposedTensors: Send + Sync {
    /// Reads tensor `index` of a rank of the group.
    ///
    /// One-sided: the owner takes no part. `expected` is the type and shape that the caller knows the tensor to have.
    ///
    /// # Errors
    /// [`Error::Rejected`](crate::Error::Rejected) if the rank has exposed no such tensor, or one of another type or shape.
    fn read(&self, rank: usize, index: usize, expected: &TensorMeta, site: Site) -> Result<Tensor>;
}

/// The engine behind a [`Group`]: what a transport implements, for one rank of one group.
///
/// Programs use [`Group`]. To add a transport, implement this trait with the functions of [`engine`] and pass the group of
/// all ranks to [`World::new`].
#[doc(alias = "Backend")]
pub trait Communicator: Send + Sync {
    /// This rank's position in the group.
    fn rank(&self) -> usize;

    /// Global ranks of the group, in group order.
    fn ranks(&self) -> &[usize];

    /// Executes a collective and returns this rank's results: none, one tensor, or one per rank for [`Call::AllToAll`].
    ///
    /// Collective. The arguments are unchecked: the engine calls [`Call::check`] and turns a rejection into an error on every
    /// rank of the group.
    fn run(&self, call: &Call, inputs: &[Tensor], site: Site) -> Result<Vec<Tensor>>;

    /// Sends a tensor to another rank of the group without waiting for the receiver.
    fn send(&self, tensor: &Tensor, to: usize, tag: u64, site: Site) -> Result<()>;

    /// Waits for the tensor that another rank of the group sends with the same tag.
    fn recv(&self, expected: &TensorMeta, from: usize, tag: u64, site: Site) -> Result<Tensor>;

    /// Returns the group of some ranks of the world, in the order given.
    ///
    /// Local, but every member must call it. `ranks` are distinct global ranks that include this one; equal lists return
    /// the same group.
    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>>;

    /// Makes tensors of this rank readable by every rank of the group. Collective; later reads are one-sided.
    fn expose(&self, tensors: &[Tensor], site: Site) -> Result<Box<dyn ExposedTensors>>;

    /// Makes every pending and later collective of the world fail with `reason`, on all ranks.
    fn abort(&self, reason: &str);

    /// Latency and bandwidth between the ranks of the whole world, the same on every rank.
    ///
    /// Local: planners ask before anything is communicated, so an engine returns constants that were measured for its
    /// transport or configured.
    fn network(&self) -> Network;

    /// Whether tensors are placeholders without data, as in a [`DryWorld`].
    fn is_dry(&self) -> bool {
        false
    }

    /// Whether ranks read each other's tensors in place and may share the memory of a result.
    ///
    /// If so, [`Group`] copies inputs that another rank could still read after the call has returned.
    fn shares_memory(&self) -> bool {
        false
    }
}
