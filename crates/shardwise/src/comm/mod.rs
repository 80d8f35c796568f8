//! Communication: groups of ranks, the collectives they make together, and the world of threads.
//!
//! A [`Group`] is what programs use: typed methods, call sites captured. Behind it stands a [`Communicator`], the
//! engine: threads of this process here, MPI in a crate of its own. A collective travels to the engine as one
//! [`Call`] value, so that checking, recording and describing it is written once for all engines.

mod agreement;
mod call;
mod check;
mod current;
mod device_mesh;
mod dry;
pub mod engine;
mod explicit;
mod group;
mod host;
mod measure;
mod memory;
mod purpose;
pub mod threads;
mod trace;
mod work;
mod world;

pub(crate) use agreement::{agree, texts, together};
pub use call::{Call, Sizes};
pub use current::{current_mesh, with_mesh};
pub use device_mesh::DeviceMesh;
pub(crate) use device_mesh::MeshIdentity;
pub use dry::{DryRun, DryWorld};
pub(crate) use explicit::while_moving;
pub use explicit::{ExplicitRedistribution, ImplicitRedistribution};
pub use group::Group;
pub(crate) use memory::Charge;
pub use memory::Memory;
pub(crate) use purpose::{Origin, on_behalf_of};
pub use threads::{ThreadWorld, launch, launch_scoped};
pub(crate) use trace::implicitly;
pub use trace::{Record, Report, Total, Trace, explicit_communication_only, operator};
pub use world::World;

use std::sync::Arc;

use candle_core::Tensor;

use crate::error::{Result, Site};
use crate::layout::TensorMeta;
use crate::mesh::Network;

/// Tensors of all ranks of a group that each of them can read at any time, as an engine provides them.
pub trait Exposed: Send + Sync {
    /// Tensor `index` of a rank of the group, which is described by `expected`. The rank takes no part.
    fn read(&self, rank: usize, index: usize, expected: &TensorMeta, site: Site) -> Result<Tensor>;
}

/// One rank's end of a group, as an engine provides it. Programs use [`Group`].
pub trait Communicator: Send + Sync {
    /// This rank's position in the group.
    fn rank(&self) -> usize;

    /// Global ranks of the group, in group order.
    fn ranks(&self) -> &[usize];

    /// Carries out a collective that all ranks of the group enter. Returns what this rank gets: nothing, one tensor,
    /// or for [`Call::AllToAll`] one tensor per rank. Arguments are as the program gave them: an engine checks them
    /// ([`Call::check`]) so that a refusal reaches every rank of the group.
    fn run(&self, call: &Call, inputs: &[Tensor], site: Site) -> Result<Vec<Tensor>>;

    /// Hands a tensor to another rank of the group without waiting for it.
    fn send(&self, tensor: &Tensor, to: usize, tag: u64, site: Site) -> Result<()>;

    /// Waits for the tensor that another rank of the group sends with the same tag.
    fn recv(&self, expected: &TensorMeta, from: usize, tag: u64, site: Site) -> Result<Tensor>;

    /// The group of some ranks of this world, given as distinct global ranks, this one among them, in the order that
    /// the group shall have. Every member asks for it; asking again gives the same group.
    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>>;

    /// Lets every rank of the group read these tensors of this one from now on, without its help. All ranks of the group
    /// enter it.
    fn expose(&self, tensors: &[Tensor], site: Site) -> Result<Box<dyn Exposed>>;

    /// Brings every pending and later collective of this world to an error that carries `reason`.
    fn abort(&self, reason: &str);

    /// How fast the ranks of the whole world reach each other, the same on every rank. Local: planners ask for it before
    /// anything is communicated. An engine states figures of its own, which it has measured or was configured with.
    fn network(&self) -> Network;

    /// Whether tensors are placeholders without data, because only shapes are wanted.
    fn is_dry(&self) -> bool {
        false
    }

    /// Whether ranks read each other's tensors where they are, and may hold one memory: then what a program passes in is
    /// copied where another rank could read it after the call has returned.
    fn shares_memory(&self) -> bool {
        false
    }
}
