//! The training step that is planned.

use candle_core::DType;

use crate::mesh::{Link, Network};
use crate::optim::ParamGroup;
use crate::plan::DEFAULT_FLOPS_PER_S;

/// The training step that [`search_plan`](super::search_plan), [`estimate_step`](super::estimate_step) and
/// [`report_step`](super::report_step) run without data, and what they price it by.
///
/// ```
/// use shardwise::mesh::{Link, Network};
/// use shardwise::models::StepOptions;
///
/// let cable = Link { latency_us: 30.0, gb_per_s: 1.25 };
/// let two_hosts = Network::of_hosts([0, 0, 1, 1], Link::THREADS, cable)?;
/// let options = StepOptions::new(32, two_hosts).memory_limit(8 << 30);
/// assert_eq!(options.batch, 32);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct StepOptions {
    /// Samples of a batch, over all ranks.
    pub batch: usize,
    /// Links between the ranks, by which collectives are priced: [`World::network`](crate::World::network) of the world
    /// that the model will run in.
    pub network: Network,
    /// Most bytes that a rank may need; no limit by default.
    pub memory_limit: usize,
    /// Elementary operations that a rank does in a second; 20e9 by default, about one core.
    pub flops_per_s: f64,
    /// The link along each mesh axis, in place of those of the network.
    pub links: Option<Vec<Link>>,
    /// Element type of the parameters; f32 by default.
    pub dtype: DType,
    /// The optimizer whose update is a part of the step; none by default. Parameters that it does not support use
    /// [`AdamW`](crate::optim::AdamW).
    pub optimizer: Option<ParamGroup>,
}

impl StepOptions {
    /// A step on batches of `batch` samples, on a network.
    pub fn new(batch: usize, network: Network) -> Self {
        StepOptions {
            batch,
            network,
            memory_limit: usize::MAX,
            flops_per_s: DEFAULT_FLOPS_PER_S,
            links: None,
            dtype: DType::F32,
            optimizer: None,
        }
    }

    /// Sets `links`.
    pub fn links(self, links: impl Into<Vec<Link>>) -> Self {
        StepOptions { links: Some(links.into()), ..self }
    }

    /// Sets `dtype`.
    pub fn dtype(self, dtype: DType) -> Self {
        StepOptions { dtype, ..self }
    }

    /// Sets `optimizer`.
    pub fn optimizer(self, group: impl Into<ParamGroup>) -> Self {
        StepOptions { optimizer: Some(group.into()), ..self }
    }

    /// Sets `memory_limit`.
    pub fn memory_limit(self, bytes: usize) -> Self {
        StepOptions { memory_limit: bytes, ..self }
    }

    /// Sets `flops_per_s`.
    pub fn flops_per_s(self, rate: f64) -> Self {
        StepOptions { flops_per_s: rate, ..self }
    }
}
