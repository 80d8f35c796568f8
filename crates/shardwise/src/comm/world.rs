//! The world: all ranks of a program.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use super::trace::Traced;
use super::work::Work;
use super::{Communicator, Group, Memory, Trace};
use crate::error::Result;
use crate::mesh::Network;

/// All ranks of a program, seen from one of them: a [`Group`] that can make meshes and that keeps a record of what the
/// rank communicates and how much memory its tensors take.
#[doc(alias = "init_process_group")]
#[derive(Clone, Debug)]
pub struct World {
    all: Group,
    trace: Trace,
    memory: Memory,
    work: Work,
    network: Network,
    /// What the first measurement found.
    measured: Arc<OnceLock<Network>>,
}

impl World {
    /// Wraps an engine's end of the group of all ranks.
    pub fn new(engine: Arc<dyn Communicator>) -> Self {
        Self::with_trace(engine, Trace::default())
    }

    /// As [`new`](Self::new), with a trace that may have been set up otherwise.
    pub(super) fn with_trace(engine: Arc<dyn Communicator>, trace: Trace) -> Self {
        let network = engine.network();
        let all = Group::new(Arc::new(Traced::new(engine, trace.clone())));
        let (memory, work, measured) = (Memory::default(), Work::default(), Arc::default());
        World { all, trace, memory, work, network, measured }
    }

    /// How fast the ranks reach each other: what the engine states, unless it was configured otherwise.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// The same world with another network: meshes that are built on it take their links from there.
    ///
    /// Local, but every rank must configure the same network: ranks that price collectives differently may plan different
    /// ones, which is then an error on all of them.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the network does not have all ranks of the world.
    ///
    /// ```
    /// # use shardwise::launch;
    /// launch(4, |world| {
    ///     let world = world.with_network(world.measure_links()?)?;
    ///     let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
    ///     assert_eq!(mesh.link("tp")?, world.network().inside());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn with_network(&self, network: Network) -> Result<Self> {
        network.host_of(self.all.size() - 1)?;
        Ok(World { network, measured: Arc::default(), ..self.clone() })
    }

    /// The network that was measured first, or the one that `measure` finds.
    pub(super) fn measured(&self, measure: impl FnOnce() -> Result<Network>) -> Result<Network> {
        if let Some(network) = self.measured.get() {
            return Ok(network.clone());
        }
        let network = measure()?;
        Ok(self.measured.get_or_init(|| network).clone())
    }

    /// What this rank has communicated.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// How much memory the local tensors of this rank's distributed tensors take.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// How much this rank would compute, in a dry run.
    pub(crate) fn work(&self) -> &Work {
        &self.work
    }

    /// A number that no other world has while this one lives.
    pub(super) fn identity(&self) -> usize {
        self.trace.identity()
    }
}

impl Deref for World {
    type Target = Group;
    fn deref(&self) -> &Group {
        &self.all
    }
}
