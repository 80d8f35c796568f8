//! Spans as compact rows.

use serde::{Deserialize, Serialize};

use crate::comm::{Phase, SpanKind};

/// A [`ProfileSpan`](crate::comm::ProfileSpan) whose texts are numbers of [`RankReport::strings`](super::RankReport::strings). Times are in
/// nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "SpanTuple", into = "SpanTuple")]
pub struct SpanRow {
    /// What it is.
    pub kind: SpanKind,
    /// Name of the operator or collective.
    pub name: u32,
    /// Index of the span around it.
    pub parent: Option<u32>,
    /// Begin.
    pub start: u64,
    /// Time from begin to end.
    pub duration: u64,
    /// Waiting time of a collective.
    pub waiting: u64,
    /// Path of the module.
    pub module: Option<u32>,
    /// The part of a training step.
    pub phase: Phase,
    /// Layouts of the inputs.
    pub inputs: Vec<u32>,
    /// Layouts of the outputs.
    pub outputs: Vec<u32>,
    /// Mesh axes of the group of a collective.
    pub axes: Option<u32>,
    /// Bytes that the rank sends.
    pub bytes: u64,
    /// Estimated operations.
    pub flops: u64,
    /// Source line.
    pub site: Option<u32>,
    /// Why data moved.
    pub reason: Option<u32>,
    /// Text of the redistribution, a key of [`RunReport::redistributions`](super::RunReport::redistributions).
    pub redistribution: Option<u32>,
}

/// A row without the names of its fields: a report has tens of thousands of them.
type SpanTuple = (
    u8,
    u32,
    Option<u32>,
    u64,
    u64,
    u64,
    Option<u32>,
    u8,
    Vec<u32>,
    Vec<u32>,
    Option<u32>,
    u64,
    u64,
    Option<u32>,
    Option<u32>,
    Option<u32>,
);

/// The kinds by their numbers in a row.
const KINDS: [SpanKind; 5] =
    [SpanKind::Module, SpanKind::Operator, SpanKind::Gradient, SpanKind::Redistribution, SpanKind::Collective];

impl TryFrom<SpanTuple> for SpanRow {
    type Error = &'static str;

    fn try_from(row: SpanTuple) -> Result<Self, Self::Error> {
        Ok(SpanRow {
            kind: *KINDS.get(usize::from(row.0)).ok_or("unknown kind of span")?,
            name: row.1,
            parent: row.2,
            start: row.3,
            duration: row.4,
            waiting: row.5,
            module: row.6,
            phase: *Phase::ALL.get(usize::from(row.7)).ok_or("unknown part of a step")?,
            inputs: row.8,
            outputs: row.9,
            axes: row.10,
            bytes: row.11,
            flops: row.12,
            site: row.13,
            reason: row.14,
            redistribution: row.15,
        })
    }
}

impl From<SpanRow> for SpanTuple {
    fn from(row: SpanRow) -> Self {
        (
            row.kind as u8,
            row.name,
            row.parent,
            row.start,
            row.duration,
            row.waiting,
            row.module,
            row.phase as u8,
            row.inputs,
            row.outputs,
            row.axes,
            row.bytes,
            row.flops,
            row.site,
            row.reason,
            row.redistribution,
        )
    }
}
