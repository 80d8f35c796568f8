//! [`StepReport`]: what one training step takes on one rank, as a value that prints and serializes.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::comm::{CommLock, CommRecord, DeviceMesh, LockedCall, MemoryByKind, MemoryKind, MemorySample, Phase};
use crate::layout::Layout;
use crate::mesh::{Axis, Link, Mesh};
use crate::picture::{bytes_text, count_text, time_text};
use crate::redistribute::collective_us;

/// Memory, communication and time of one training step on one rank.
///
/// [`models::report_step`](crate::models::report_step) fills it from a dry run. Prints as tables of at most 80 columns, and
/// serializes completely: it is what reports are rendered from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Name of the model.
    pub model: String,
    /// Number of parameters of the model, over all ranks.
    pub parameter_count: usize,
    /// The mesh that the model is sharded over.
    pub mesh: Mesh,
    /// The link along each mesh axis, by which collectives are priced.
    pub links: Vec<Link>,
    /// The rank that the report is about: the first one of the mesh, which is among the busiest.
    pub rank: usize,
    /// Name of the sharding plan, as in `fsdp+tp`.
    pub plan: String,
    /// Samples of a batch, over all ranks.
    pub batch: usize,
    /// Types and shapes of the tensors of a batch, over all ranks.
    pub inputs: Vec<String>,
    /// Element type of the parameters.
    pub dtype: String,
    /// Name of the optimizer; empty without one.
    pub optimizer: String,
    /// Bytes between two steps.
    pub held: MemoryByKind,
    /// Per kind the most bytes during the step; these need not be in use at the same time.
    pub largest: MemoryByKind,
    /// Bytes when the most are in use.
    pub peak: MemoryByKind,
    /// When that is.
    pub peak_at: Option<StepPlace>,
    /// Most bytes that the rank may use, if known.
    pub memory_limit: Option<usize>,
    /// Bytes in use over the step, thinned out to at most some hundred samples; of those left out, none was larger than the next.
    pub timeline: Vec<MemorySample>,
    /// Computation and communication by part of the step.
    pub phases: Vec<PhaseEstimate>,
    /// Communication by mesh axes and collective.
    pub traffic: Vec<AxisTraffic>,
    /// Every collective of the step in order.
    pub calls: Vec<StepCall>,
    /// The parameters with their layouts.
    pub parameters: Vec<PlacedParameter>,
    /// What would make the step fit into memory, in one sentence each.
    pub advice: Vec<String>,
}

/// A place in a training step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepPlace {
    /// The part of the step.
    pub phase: Phase,
    /// Path of the module whose forward or backward pass is running, if any.
    pub module: Option<Arc<str>>,
}

/// Computation and communication in one part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PhaseEstimate {
    /// The part of the step.
    pub phase: Phase,
    /// Elementary operations of the rank.
    pub flops: u64,
    /// Estimated time of the computation in microseconds.
    pub compute_us: f64,
    /// Estimated time of the communication in microseconds.
    pub communication_us: f64,
}

/// The calls of one collective along some mesh axes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AxisTraffic {
    /// Mesh axes, as in `dp,tp`; `-` for a group that is none of the mesh.
    pub axes: String,
    /// Name of the collective.
    pub call: String,
    /// Number of calls.
    pub calls: usize,
    /// Bytes that the rank sends.
    pub bytes: usize,
    /// Estimated time in microseconds.
    pub us: f64,
}

/// One collective of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepCall {
    /// Name of the collective.
    pub call: String,
    /// Mesh axes, as in `dp,tp`; `-` for a group that is none of the mesh.
    pub axes: String,
    /// Number of ranks that take part.
    pub ranks: usize,
    /// Bytes that the rank sends.
    pub bytes: usize,
    /// Estimated time in microseconds.
    pub us: f64,
    /// The part of the step.
    pub phase: Phase,
    /// Path of the module, if any.
    pub module: Option<Arc<str>>,
    /// The operator, if any.
    pub operator: Option<String>,
    /// The placements before and after the redistribution that the call is a part of, and the shape of the tensor.
    pub moved: Option<MovedTensor>,
    /// Why the data moves; `None` if the program asked for it.
    pub reason: Option<Arc<str>>,
    /// Source line of the call.
    pub site: String,
}

/// What a redistribution does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedTensor {
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Placements before, as in `S(0), R`.
    pub from: String,
    /// Placements after.
    pub to: String,
}

/// A parameter with its layout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlacedParameter {
    /// Path in the model.
    pub path: String,
    /// Element type.
    pub dtype: String,
    /// Shape and placements over the mesh.
    pub layout: Layout,
    /// Bytes on the rank of the report.
    pub bytes: usize,
}

/// Most samples of a [`StepReport::timeline`]: enough for a curve as wide as a page.
const MAX_SAMPLES: usize = 600;

impl StepReport {
    /// Bytes that are in use at most.
    pub fn peak_bytes(&self) -> usize {
        self.peak.total()
    }

    /// Whether the step fits into memory; `None` without a limit.
    pub fn fits(&self) -> Option<bool> {
        self.memory_limit.map(|limit| self.peak_bytes() <= limit)
    }

    /// Estimated time of the computation in microseconds.
    pub fn compute_us(&self) -> f64 {
        self.phases.iter().map(|phase| phase.compute_us).sum()
    }

    /// Estimated time of the communication in microseconds.
    pub fn communication_us(&self) -> f64 {
        self.phases.iter().map(|phase| phase.communication_us).sum()
    }

    /// Estimated time of the step in microseconds if ranks compute and communicate in turns, as this library does.
    pub fn us(&self) -> f64 {
        self.compute_us() + self.communication_us()
    }

    /// Estimated time in microseconds if, within each part of the step, all communication were hidden by computation or the
    /// other way round: a lower bound.
    pub fn overlapped_us(&self) -> f64 {
        self.phases.iter().map(|phase| phase.compute_us.max(phase.communication_us)).sum()
    }
}

impl StepReport {
    /// The communication of the step, for a lockfile.
    pub fn lock(&self) -> CommLock {
        self.calls.iter().map(LockedCall::from).collect()
    }
}

impl<'a> From<&'a StepCall> for LockedCall<'a> {
    fn from(call: &'a StepCall) -> Self {
        LockedCall {
            phase: call.phase,
            module: call.module.as_deref(),
            operator: call.operator.as_deref(),
            axes: (call.axes != "-").then_some(&*call.axes),
            call: &call.call,
            bytes: call.bytes,
        }
    }
}

impl StepCall {
    /// The estimate for a record of a rank, by the links of a mesh.
    pub fn new(record: &CommRecord, mesh: &DeviceMesh) -> Self {
        let texts =
            |layout: &Layout| layout.placements().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let moved = record.layouts.as_ref().map(|(from, to)| MovedTensor {
            shape: from.shape().to_vec(),
            from: texts(from),
            to: texts(to),
        });
        StepCall {
            call: record.call.to_string(),
            axes: record.axes.as_deref().unwrap_or("-").to_string(),
            ranks: record.group.len(),
            bytes: record.bytes,
            us: time_of(record, mesh),
            phase: record.phase,
            module: record.module.clone(),
            operator: record.operator.map(String::from),
            moved,
            reason: record.reason.clone(),
            site: record.site.to_string(),
        }
    }
}

/// Sums of calls by mesh axes and collective, most bytes first.
pub(crate) fn traffic_of(calls: &[StepCall]) -> Vec<AxisTraffic> {
    let mut rows: Vec<AxisTraffic> = Vec::new();
    for call in calls {
        let same = |row: &&mut AxisTraffic| row.axes == call.axes && row.call == call.call;
        match rows.iter_mut().find(same) {
            Some(row) => {
                (row.calls, row.bytes, row.us) = (row.calls + 1, row.bytes + call.bytes, row.us + call.us);
            }
            None => rows.push(AxisTraffic {
                axes: call.axes.clone(),
                call: call.call.clone(),
                calls: 1,
                bytes: call.bytes,
                us: call.us,
            }),
        }
    }
    rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| (&a.axes, &a.call).cmp(&(&b.axes, &b.call))));
    rows
}

/// Thins samples out: of neighbours the largest stays, so that the peak does.
pub(crate) fn thinned(samples: Vec<MemorySample>) -> Vec<MemorySample> {
    let width = samples.len().div_ceil(MAX_SAMPLES).max(1);
    let largest = |part: &[MemorySample]| part.iter().max_by_key(|sample| sample.bytes.total()).cloned();
    if width == 1 { samples } else { samples.chunks(width).filter_map(largest).collect() }
}

/// The time of one collective in microseconds, by the slowest link between ranks of its group.
pub(super) fn time_of(record: &CommRecord, mesh: &DeviceMesh) -> f64 {
    let named = record.axes.as_deref().and_then(|axes| mesh.mesh().axis_positions(axes.split(',')).ok());
    let axes = named.unwrap_or_else(|| {
        let coordinates: Vec<Vec<usize>> = record.group.iter().filter_map(|&rank| mesh.coordinate(rank)).collect();
        let differ = |&axis: &usize| coordinates.windows(2).any(|pair| pair[0][axis] != pair[1][axis]);
        (0..mesh.ndim()).filter(differ).collect()
    });
    // A ring all-reduce is a reduce-scatter and an all-gather.
    let phases = if record.call == "all_reduce" { 2 } else { 1 };
    collective_us(phases, record.group.len(), record.bytes, mesh.links().slowest(&axes))
}

impl fmt::Display for StepPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = match self.phase {
            Phase::Forward => "the forward pass",
            Phase::Backward => "the backward pass",
            Phase::Update => "the update",
        };
        match &self.module {
            Some(module) => write!(f, "{phase} of {module}"),
            None => f.write_str(phase),
        }
    }
}

impl StepReport {
    /// What the times are estimated for.
    fn assumptions(&self) -> Vec<String> {
        let sum = |of: fn(&PhaseEstimate) -> f64| self.phases.iter().map(of).sum::<f64>();
        let (flops, us) = (sum(|phase| phase.flops as f64), sum(|phase| phase.compute_us));
        // The prefixes of `--flops`, which are not those of parameters.
        let rate = |rate: f64| count_text(rate as usize).replace('B', "G");
        let rate = (us > 0.0).then(|| format!("assumes {} operations/s per rank", rate(flops / us * 1e6)));
        let link = |(axis, link): (&Axis, &Link)| {
            format!("assumes {} GB/s and {} us along {}", link.gb_per_s, link.latency_us, axis.name)
        };
        rate.into_iter().chain(self.mesh.axes().iter().zip(&self.links).map(link)).collect()
    }
}

impl fmt::Display for StepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StepReport { model, mesh, plan, dtype, optimizer, .. } = self;
        writeln!(f, "{model}, {} parameters ({})", count_text(self.parameter_count), self.parameter_count)?;
        let optimizer = if optimizer.is_empty() { "no optimizer" } else { optimizer };
        writeln!(f, "mesh {mesh} ({} ranks), plan {plan}, {dtype}, {optimizer}", mesh.size())?;
        writeln!(f, "batch of {}: {}", self.batch, self.inputs.join(", "))?;
        writeln!(f, "\n{:<18} {:>14} {:>14} {:>14}", "memory per rank", "between steps", "most", "at the peak")?;
        for kind in MemoryKind::ALL {
            let cells = [self.held[kind], self.largest[kind], self.peak[kind]].map(bytes_text);
            writeln!(f, "{:<18} {:>14} {:>14} {:>14}", kind.name(), cells[0], cells[1], cells[2])?;
        }
        let totals = [self.held.total(), self.peak.total()].map(bytes_text);
        writeln!(f, "{:<18} {:>14} {:>14} {:>14}", "total", totals[0], "", totals[1])?;
        if let Some(place) = &self.peak_at {
            writeln!(f, "the peak is in {place}")?;
        }
        writeln!(f, "\n{:<18} {:<18} {:>8} {:>14} {:>14}", "mesh axes", "collective", "calls", "bytes", "time")?;
        for AxisTraffic { axes, call, calls, bytes, us } in &self.traffic {
            let (bytes, time) = (bytes_text(*bytes), time_text(*us));
            writeln!(f, "{axes:<18} {call:<18} {calls:>8} {bytes:>14} {time:>14}")?;
        }
        if self.traffic.is_empty() {
            writeln!(f, "nothing is communicated")?;
        }
        writeln!(f, "\n{:<18} {:>14} {:>14} {:>14}", "time per step", "operations", "compute", "communicate")?;
        for PhaseEstimate { phase, flops, compute_us, communication_us } in &self.phases {
            let times = [time_text(*compute_us), time_text(*communication_us)];
            let flops = count_text(usize::try_from(*flops).unwrap_or(usize::MAX));
            writeln!(f, "{phase:<18} {flops:>14} {:>14} {:>14}", times[0], times[1])?;
        }
        let (turns, overlapped) = (time_text(self.us()), time_text(self.overlapped_us()));
        write!(f, "a step takes {turns} without overlap, {overlapped} with full overlap")?;
        self.assumptions().iter().try_for_each(|assumed| write!(f, "\n{assumed}"))?;
        if let Some(limit) = self.memory_limit {
            let (peak, limit) = (bytes_text(self.peak_bytes()), bytes_text(limit));
            match self.fits() {
                Some(true) => write!(f, "\n\nfits: {peak} of {limit} per rank")?,
                _ => write!(f, "\n\ndoes not fit: {peak} per rank, {limit} available")?,
            }
        }
        self.advice.iter().try_for_each(|advice| write!(f, "\n- {advice}"))
    }
}
