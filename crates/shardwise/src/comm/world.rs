//! The world: the group of all ranks, with its trace, memory statistics and network.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use super::flops::FlopCounter;
use super::profile::{self, Profile};
use super::trace::Traced;
use super::{Communicator, Group, Memory, Trace};
use crate::error::Result;
use crate::mesh::Network;

/// The group of all ranks, as one rank sees it.
///
/// Dereferences to [`Group`], so collectives over all ranks are methods of it. It also creates meshes
/// ([`mesh`](World::mesh)), records what this rank communicates ([`trace`](World::trace)) and counts the bytes of its
/// tensors ([`memory`](World::memory)). A launch passes one to each rank's program. Clones are the same world.
#[doc(alias = "init_process_group")]
#[derive(Clone, Debug)]
pub struct World {
    all: Group,
    trace: Trace,
    memory: Memory,
    flops: FlopCounter,
    network: Network,
    /// The result of the first `measure_links`.
    measured: Arc<OnceLock<Network>>,
}

impl World {
    /// Creates a world from an engine's group of all ranks; for engines in other crates.
    pub fn new(engine: Arc<dyn Communicator>) -> Self {
        Self::with_trace(engine, Trace::default())
    }

    /// As [`new`](Self::new), with a given trace: dry runs keep every record.
    pub(super) fn with_trace(engine: Arc<dyn Communicator>, trace: Trace) -> Self {
        let network = engine.network();
        let all = Group::new(Arc::new(Traced::new(engine, trace.clone())));
        let (memory, flops, measured) = (Memory::default(), FlopCounter::default(), Arc::default());
        World { all, trace, memory, flops, network, measured }
    }

    /// Latency and bandwidth between the ranks: what the engine states, or what [`with_network`](Self::with_network) set.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the same world with another network, from which new meshes take the links of their axes.
    ///
    /// Local, but every rank must pass the same network: ranks that estimate costs differently may plan different
    /// collectives, which is then an error on all of them.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the network does not have all ranks of the world.
    ///
    /// ```
    /// # use shardwise::launch;
    /// launch(4, |world| {
    ///     let world = world.with_network(world.measure_links()?)?;
    ///     let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
    ///     assert_eq!(mesh.link("tp")?, world.network().intra_host());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn with_network(&self, network: Network) -> Result<Self> {
        network.host_of(self.all.size() - 1)?;
        Ok(World { network, measured: Arc::default(), ..self.clone() })
    }

    /// Returns the stored measurement, or stores the result of `measure`.
    pub(super) fn measured(&self, measure: impl FnOnce() -> Result<Network>) -> Result<Network> {
        if let Some(network) = self.measured.get() {
            return Ok(network.clone());
        }
        let network = measure()?;
        Ok(self.measured.get_or_init(|| network).clone())
    }

    /// The record of this rank's collectives, sends and receives.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Current and peak bytes of this rank's local tensors.
    #[doc(alias = "max_memory_allocated")]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Runs `body` and records what this rank does in it: modules, operators, redistributions and collectives as spans of time
    /// with their layouts, and the memory over time.
    ///
    /// Local: other ranks may record or not. Costs about 1 us per span; outside of this scope nothing is recorded. A
    /// [`RunReport`](crate::report::RunReport) shows profiles as a page or in Perfetto.
    ///
    /// # Errors
    /// That of `body`.
    ///
    /// ```
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("tp", 2)])?;
    ///     let x = DTensor::ones((4, 4), DType::F32, &mesh, [Shard(1)])?;
    ///     let (_, profile) = world.profile(|| x.matmul(&x)?.exp())?;
    ///     let names: Vec<&str> = profile.spans.iter().map(|span| span.name).collect();
    ///     assert!(names.contains(&"matmul") && names.contains(&"exp"), "{names:?}");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "torch.profiler.profile")]
    pub fn profile<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<(R, Profile)> {
        let (rank, is_dry, memory_before) = (self.global_rank(), self.is_dry(), self.memory.by_kind().as_array());
        let (result, duration, spans, memory) = profile::recorded(body);
        Ok((result?, Profile { rank, is_dry, duration, memory_before, spans, memory }))
    }

    /// Floating-point operations of this rank, counted in dry runs only.
    pub(crate) fn flops(&self) -> &FlopCounter {
        &self.flops
    }

    /// A number that is unique among the worlds alive in this process.
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
