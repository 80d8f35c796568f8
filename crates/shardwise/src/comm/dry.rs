//! [`DryWorld`]: runs the program of one rank with shapes but without data.

use std::sync::Arc;

use candle_core::Tensor;

use super::check::CallEntry;
use super::trace::CommRecord;
use super::{Call, Communicator, ExposedTensors, Trace, World};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::layout::TensorMeta;
use crate::mesh::{MAX_RANKS, Network};
use shardwise_kernels::placeholder;

/// A dry run: the program of one rank of a world of any size, without data and without the other ranks.
///
/// Local tensors have the right shapes and types but share one element of memory, so a model that does not fit this
/// machine can be planned on it: collectives are checked and recorded, bytes and operations are counted. What PyTorch does
/// with `FakeTensorMode` and a fake process group.
///
/// ```
/// # use shardwise::{DryWorld, prelude::*};
/// let run = DryWorld::new(16_384)?.run(|world| {
///     let mesh = world.mesh([("dp", 128), ("tp", 128)])?;
///     let weight = DTensor::zeros((1 << 20, 1 << 16), DType::F32, &mesh, [Shard(0), Shard(1)])?;
///     weight.redistribute([Replicate, Shard(1)])
/// })?;
/// assert_eq!(run.value.local_shape(), [1 << 20, 1 << 9]);
/// assert_eq!(run.records[0].call, "all_gather");
/// assert_eq!(run.peak_bytes, (1 << 31) + (1 << 24)); // the gathered tensor and its shard
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "FakeTensorMode")]
#[doc(alias = "FakeStore")]
#[derive(Debug, Clone)]
pub struct DryWorld {
    size: usize,
    rank: usize,
    network: Network,
}

/// The result of a dry run.
#[derive(Debug)]
pub struct DryRun<T> {
    /// The value that the program returned.
    pub value: T,
    /// Every collective of the rank, in order.
    pub records: Vec<CommRecord>,
    /// Peak memory of the rank's local tensors in bytes, as [`Memory::peak`](super::Memory::peak) counts it.
    pub peak_bytes: usize,
    /// Estimated operations of the rank: two per multiply-add of matrix products, one per element of other operators.
    pub flops: u64,
}

impl DryWorld {
    /// Creates a dry world of `size` ranks, of which rank 0 runs, with the [network](Self::network) of thread ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] for 0 ranks or more than 2^24.
    pub fn new(size: usize) -> Result<Self> {
        if size == 0 || size > MAX_RANKS {
            let needed = format!("1 to {MAX_RANKS} ranks");
            return Err(ErrorKind::Launch.error(
                "world",
                format!("{size} ranks"),
                needed,
                "pass the number of ranks of the world",
            ));
        }
        Ok(DryWorld { size, rank: 0, network: Network::THREADS })
    }

    /// Sets the rank whose program runs.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the world has no such rank.
    pub fn as_rank(mut self, rank: usize) -> Result<Self> {
        if rank >= self.size {
            return Err(ErrorKind::Rank { rank, size: self.size }.error(
                "rank",
                rank,
                format!("a rank below {}", self.size),
                "choose a rank of the world",
            ));
        }
        self.rank = rank;
        Ok(self)
    }

    /// Sets the latency and bandwidth between ranks, from which planners estimate times.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the network does not have all ranks of the world.
    ///
    /// ```
    /// # use shardwise::DryWorld;
    /// # use shardwise::mesh::{Link, Network};
    /// let cable = Link { latency_us: 30.0, gb_per_s: 1.25 };
    /// let hosts: Vec<usize> = (0..16).map(|rank| rank / 8).collect(); // 2 hosts of 8 ranks
    /// let dry = DryWorld::new(16)?.network(Network::of_hosts(hosts, Link::THREADS, cable)?)?;
    /// let link = dry.run(|world| world.mesh([("dp", 2), ("tp", 8)])?.link("dp"))?.value;
    /// assert_eq!(link, cable);
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn network(mut self, network: Network) -> Result<Self> {
        network.host_of(self.size - 1)?;
        self.network = network;
        Ok(self)
    }

    /// Runs the program of the rank on a new thread, so that the caches of the rank end with the run.
    pub fn run<T: Send>(&self, program: impl FnOnce(World) -> Result<T> + Send) -> Result<DryRun<T>> {
        let ranks: Arc<[usize]> = (0..self.size).collect();
        let network = self.network.clone();
        let engine = Arc::new(DryMember { me: self.rank, world: self.size, ranks, network });
        let world = World::with_trace(engine, Trace::keeping(usize::MAX));
        let (trace, memory, flops) = (world.trace().clone(), world.memory().clone(), world.flops().clone());
        let run = std::thread::scope(|scope| scope.spawn(|| program(world)).join());
        let value = run.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(DryRun { value, records: trace.records(), peak_bytes: memory.peak(), flops: flops.total() })
    }
}

struct DryMember {
    me: usize,
    world: usize,
    ranks: Arc<[usize]>,
    network: Network,
}

impl Communicator for DryMember {
    fn rank(&self) -> usize {
        self.me
    }

    fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    fn run(&self, call: &Call, inputs: &[Tensor], site: Site) -> Result<Vec<Tensor>> {
        if let Err(error) = call.check(self.me, self.ranks.len(), inputs) {
            let call = CallEntry::new(call, inputs, site, self.me, self.ranks.len()).describe(&self.ranks, self.me);
            return Err(Error::Rejected { call, source: Box::new(error) });
        }
        call.outputs(self.me, inputs).iter().map(|meta| Ok(placeholder(meta)?)).collect()
    }

    fn send(&self, _: &Tensor, to: usize, _: u64, _: Site) -> Result<()> {
        self.check_rank(to)
    }

    fn recv(&self, expected: &TensorMeta, from: usize, _: u64, _: Site) -> Result<Tensor> {
        self.check_rank(from)?;
        Ok(placeholder(expected)?)
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        let me = self.ranks[self.me];
        let me = ranks.iter().position(|&r| r == me).expect("the group has checked that the asking rank is a member");
        if let Some(rank) = ranks.iter().find(|&&r| r >= self.world) {
            return Err(ErrorKind::Rank { rank: *rank, size: self.world }.error(
                "group",
                format!("rank {rank}"),
                format!("ranks below {}, the size of the world", self.world),
                "use ranks of this world",
            ));
        }
        let (world, network) = (self.world, self.network.clone());
        Ok(Arc::new(DryMember { me, world, ranks: ranks.into(), network }))
    }

    fn expose(&self, _: &[Tensor], _: Site) -> Result<Box<dyn ExposedTensors>> {
        Ok(Box::new(PlaceholderTensors))
    }

    fn abort(&self, _: &str) {}

    fn network(&self) -> Network {
        self.network.clone()
    }

    fn is_dry(&self) -> bool {
        true
    }
}

/// Exposed tensors of ranks that do not run: reads return placeholders.
struct PlaceholderTensors;

impl ExposedTensors for PlaceholderTensors {
    fn read(&self, _: usize, _: usize, expected: &TensorMeta, _: Site) -> Result<Tensor> {
        Ok(placeholder(expected)?)
    }
}

impl DryMember {
    fn check_rank(&self, rank: usize) -> Result<()> {
        if rank < self.ranks.len() {
            return Ok(());
        }
        let needed = format!("a rank below {}", self.ranks.len());
        Err(ErrorKind::Rank { rank, size: self.ranks.len() }.error(
            "rank",
            rank,
            needed,
            "ranks count within the group",
        ))
    }
}
