//! The trace format of Chrome, which Perfetto (ui.perfetto.dev) and `chrome://tracing` open.

use serde_json::{Value, json};

use super::lanes::LaneKind;
use super::{RankReport, RunReport};
use crate::comm::{MemoryKind, SpanKind};

/// The lanes of a rank: number and name.
const PROGRAM: (u32, &str) = (1, "modules and operators");
const COMPUTE: (u32, &str) = (2, "compute");
const MOVING: (u32, &str) = (3, "moving");
const WAITING: (u32, &str) = (4, "waiting");

impl RunReport {
    /// The report as a trace in JSON for Perfetto: a process per rank, with lanes for modules and operators, computing, moving data
    /// and waiting, and a counter of the memory by kind.
    #[doc(alias = "export_chrome_trace")]
    pub fn to_perfetto(&self) -> String {
        let mut events = Vec::new();
        for rank in &self.ranks {
            let pid = rank.rank;
            let name = |what: &str, tid: u32, name: &str| json!({ "ph": "M", "pid": pid, "tid": tid, "name": what, "args": { "name": name } });
            events.push(name("process_name", 0, &format!("rank {pid}")));
            events.extend([PROGRAM, COMPUTE, MOVING, WAITING].map(|(tid, lane)| name("thread_name", tid, lane)));
            rank.add_spans(&mut events);
            rank.add_lanes(&mut events);
            for sample in &rank.memory {
                let kinds =
                    MemoryKind::ALL.iter().map(|&kind| (kind.name().to_string(), sample.1[kind as usize].into()));
                let args = Value::Object(kinds.collect());
                events.push(
                    json!({ "ph": "C", "pid": pid, "tid": 0, "ts": us(sample.0), "name": "memory", "args": args }),
                );
            }
        }
        json!({ "displayTimeUnit": "ns", "traceEvents": events, "otherData": { "title": self.title } }).to_string()
    }
}

impl RankReport {
    fn text(&self, number: u32) -> &str {
        &self.strings[number as usize]
    }

    fn add_spans(&self, events: &mut Vec<Value>) {
        for span in &self.spans {
            let texts = |numbers: &[u32]| numbers.iter().map(|&n| self.text(n)).collect::<Vec<_>>();
            let module = span.module.map(|module| self.text(module));
            let name = match span.kind {
                SpanKind::Module => module.unwrap_or("module").to_string(),
                SpanKind::Gradient => format!("gradient of {}", self.text(span.name)),
                _ => self.text(span.name).to_string(),
            };
            let mut args = json!({ "module": module, "phase": span.phase });
            let mut add = |key: &str, value: Value| args[key] = value;
            if !span.inputs.is_empty() {
                add("inputs", texts(&span.inputs).into());
                add("outputs", texts(&span.outputs).into());
            }
            span.site.into_iter().for_each(|site| add("line", self.text(site).into()));
            span.reason.into_iter().for_each(|reason| add("reason", self.text(reason).into()));
            if let Some(axes) = span.axes {
                add("axes", self.text(axes).into());
                add("bytes", span.bytes.into());
            }
            events.push(json!({
                "ph": "X", "pid": self.rank, "tid": PROGRAM.0, "ts": us(span.start), "dur": us(span.duration),
                "name": name, "cat": span.kind, "args": args
            }));
        }
    }

    fn add_lanes(&self, events: &mut Vec<Value>) {
        for segment in &self.lanes {
            let (lane, _) = match segment.0 {
                LaneKind::Compute => COMPUTE,
                LaneKind::Moving => MOVING,
                LaneKind::Waiting => WAITING,
            };
            let span = &self.spans[segment.3 as usize];
            let bytes = (segment.0 == LaneKind::Moving).then_some(span.bytes);
            events.push(json!({
                "ph": "X", "pid": self.rank, "tid": lane, "ts": us(segment.1), "dur": us(segment.2),
                "name": self.text(span.name), "cat": segment.0, "args": { "bytes": bytes }
            }));
        }
    }
}

/// Microseconds, with the nanoseconds as decimals.
fn us(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e3
}
