//! The time line of a rank: computing, moving data and waiting apart.

use serde::{Deserialize, Serialize};

use crate::comm::{ProfileSpan, SpanKind};

/// What a rank spends a stretch of time on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaneKind {
    /// In an operator, outside of collectives.
    Compute,
    /// In a collective, not waiting.
    Moving,
    /// In a collective, waiting for other ranks.
    Waiting,
}

/// A stretch of a lane, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneSegment(
    /// The lane.
    #[serde(with = "lane_number")]
    pub LaneKind,
    /// Begin.
    pub u64,
    /// Length.
    pub u64,
    /// Index of the span that it is a part of.
    pub u32,
);

/// A lane as a number, for short rows.
mod lane_number {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    use super::LaneKind;

    const LANES: [LaneKind; 3] = [LaneKind::Compute, LaneKind::Moving, LaneKind::Waiting];

    #[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
    pub(super) fn serialize<S: Serializer>(lane: &LaneKind, serializer: S) -> Result<S::Ok, S::Error> {
        (*lane as u8).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<LaneKind, D::Error> {
        let number = usize::deserialize(deserializer)?;
        LANES.get(number).copied().ok_or_else(|| de::Error::custom("unknown lane"))
    }
}

/// Divides the time of spans into lanes. A collective is drawn as waiting first, then moving.
pub(super) fn lanes(spans: &[ProfileSpan]) -> Vec<LaneSegment> {
    let mut found = Vec::new();
    // The end of the outermost span that computes, and how much of it is divided.
    let mut open: Option<(usize, u64, u64)> = None;
    let compute = |found: &mut Vec<LaneSegment>, span: usize, from: u64, to: u64| {
        if to > from {
            found.push(LaneSegment(LaneKind::Compute, from, to - from, span as u32));
        }
    };
    for (index, span) in spans.iter().enumerate() {
        let (start, length) = (span.start.as_nanos() as u64, span.duration.as_nanos() as u64);
        if let Some((outer, cursor, end)) = open
            && !is_inside(spans, index, outer)
        {
            compute(&mut found, outer, cursor, end);
            open = None;
        }
        match span.kind {
            SpanKind::Collective => {
                if let Some((outer, cursor, end)) = open {
                    compute(&mut found, outer, cursor, start);
                    open = Some((outer, (start + length).max(cursor), end));
                }
                let waiting = span.waiting.as_nanos() as u64;
                if waiting > 0 {
                    found.push(LaneSegment(LaneKind::Waiting, start, waiting, index as u32));
                }
                found.push(LaneSegment(LaneKind::Moving, start + waiting, length - waiting, index as u32));
            }
            SpanKind::Module => {}
            _ if open.is_none() => open = Some((index, start, start + length)),
            _ => {}
        }
    }
    if let Some((outer, cursor, end)) = open {
        compute(&mut found, outer, cursor, end);
    }
    found
}

/// Whether a span is inside another one.
fn is_inside(spans: &[ProfileSpan], mut span: usize, outer: usize) -> bool {
    while let Some(parent) = spans[span].parent {
        if parent == outer {
            return true;
        }
        if parent < outer {
            return false;
        }
        span = parent;
    }
    false
}

/// Total length of a lane.
pub(super) fn total(lanes: &[LaneSegment], lane: LaneKind) -> u64 {
    lanes.iter().filter(|segment| segment.0 == lane).map(|segment| segment.2).sum()
}
