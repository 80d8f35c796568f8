//! Reports of a training step or of any other part of a program: one HTML page without network access, or a trace for Perfetto.
//!
//! A [`RunReport`] is a serializable value. It is built from [profiles](crate::World::profile), of all ranks of a real run or of one
//! rank of a dry run:
//!
//! ```
//! use shardwise::nn::{Builder, Linear};
//! use shardwise::prelude::*;
//! use shardwise::report::{RunReport, page};
//!
//! let page = launch(2, |world| {
//!     let mesh = world.mesh([("dp", 2)])?;
//!     let layer = Linear::new(&Builder::new(&mesh), 4, 4)?;
//!     let x = DTensor::randn((8, 4), &mesh, [Shard(0)])?;
//!     let (_, profile) = world.profile(|| layer.forward(&x)?.sum_all()?.backward())?;
//!     let report = RunReport::new("one layer", &mesh, &layer, &profile)?.gather(&world)?;
//!     Ok(report.map(|report| page(&[report], &[])))
//! })?;
//! assert!(page.unwrap().starts_with("<!doctype html>"));
//! # Ok::<(), Error>(())
//! ```

mod lanes;
mod memory_series;
mod simulated_times;
mod spans;
mod layouts;
mod traffic;
mod build;
mod dry_step;
mod perfetto;
mod html;

pub use dry_step::dry_step;
pub use html::{page, read_page};
pub use lanes::{LaneKind, LaneSegment};
pub use layouts::{LayoutReport, RankBoxes, RedistributionReport};
pub use memory_series::{MemoryPeak, MemoryPoint, PeakSite};
pub use spans::SpanRow;
pub use traffic::{MatrixEntry, TrafficRow};

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What the ranks of a mesh did in a profile, as data, from which the page and the Perfetto trace are rendered.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunReport {
    /// What ran.
    pub title: String,
    /// Whether times are estimated, because it was a dry run of one rank.
    pub is_dry: bool,
    /// The axes of the mesh with their links.
    pub axes: Vec<AxisReport>,
    /// Number of ranks of the mesh.
    pub size: usize,
    /// Modules with the names of their types, in order of declaration.
    pub modules: Vec<ModuleReport>,
    /// Parameters and buffers, in order of declaration.
    pub parameters: Vec<ParameterReport>,
    /// Every layout that is named, by its text.
    pub layouts: BTreeMap<String, LayoutReport>,
    /// Every redistribution that was executed, by its text.
    pub redistributions: BTreeMap<String, RedistributionReport>,
    /// What each rank did; of a dry run one rank.
    pub ranks: Vec<RankReport>,
    /// Bytes between ranks.
    pub matrix: Vec<MatrixEntry>,
}

/// A mesh axis and its link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AxisReport {
    /// Name of the axis.
    pub name: String,
    /// Number of ranks along it.
    pub size: usize,
    /// Latency of its link in microseconds.
    pub latency_us: f64,
    /// Bandwidth of its link.
    pub gb_per_s: f64,
}

/// A module of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModuleReport {
    /// Dotted path, empty for the model itself.
    pub path: String,
    /// Name of its type.
    pub kind: String,
}

/// A parameter or buffer of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterReport {
    /// Dotted path.
    pub path: String,
    /// Element type.
    pub dtype: String,
    /// Its layout, a key of [`RunReport::layouts`].
    pub layout: String,
    /// Bytes that the first rank holds.
    pub local_bytes: usize,
    /// Whether it is a buffer.
    pub is_buffer: bool,
}

/// What one rank did. Times are nanoseconds since the profile began.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// Time of the whole.
    pub duration: u64,
    /// Time of computation: in operators, outside of collectives.
    pub compute: u64,
    /// Time of collectives in which the rank did not wait.
    pub moving: u64,
    /// Time of collectives in which the rank waited for other ranks.
    pub waiting: u64,
    /// Texts that spans and sites refer to by number.
    pub strings: Vec<String>,
    /// Modules, operators, redistributions and collectives, in the order in which they began.
    pub spans: Vec<SpanRow>,
    /// The time line.
    pub lanes: Vec<LaneSegment>,
    /// Bytes in use over time, with the peak among them.
    pub memory: Vec<MemoryPoint>,
    /// What was in use at the peak.
    pub peak: MemoryPeak,
    /// Totals by mesh axes and collective.
    pub traffic: Vec<TrafficRow>,
}
