//! Memory over time, and what was in use at the peak.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use crate::comm::{MemoryEvent, MemoryKind, Profile};

const KINDS: usize = MemoryKind::ALL.len();

/// Bytes in use from a time on (in nanoseconds), by [`MemoryKind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPoint(
    /// Time.
    pub u64,
    /// Bytes by kind.
    pub [u64; KINDS],
);

/// The memory of a rank when it used the most.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPeak {
    /// Time in nanoseconds.
    pub at: u64,
    /// Bytes in use.
    pub bytes: u64,
    /// Bytes by [`MemoryKind`].
    pub by_kind: [u64; KINDS],
    /// Who allocated them, the largest first.
    pub sites: Vec<PeakSite>,
}

/// Tensors in use at the peak that were allocated by one operator at one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeakSite {
    /// What they are for.
    pub kind: MemoryKind,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
    /// The operator, or what else allocated them.
    pub operator: String,
    /// Path of the module, with `*` for numbers.
    pub module: String,
    /// Source line.
    pub site: String,
}

/// The most samples of a series: about two per pixel of a wide screen.
const SAMPLES: usize = 1500;

/// The most sites that are listed.
const SITES: usize = 24;

/// The series of a profile, thinned out so that it keeps the largest of neighbouring samples, and its peak.
pub(super) fn memory_series(profile: &Profile) -> (Vec<MemoryPoint>, MemoryPeak) {
    let mut now: [i64; KINDS] = profile.memory_before.map(|bytes| bytes as i64);
    let sample = |at: u64, now: &[i64; KINDS]| MemoryPoint(at, now.map(|bytes| bytes.max(0) as u64));
    let mut series = vec![sample(0, &now)];
    let (mut peak, mut events_before) = (series[0], 0);
    for (index, event) in profile.memory.iter().enumerate() {
        now[event.kind as usize] += event.bytes as i64;
        let new = sample(event.at.as_nanos() as u64, &now);
        if total(&new) > total(&peak) {
            (peak, events_before) = (new, index + 1);
        }
        series.push(new);
    }
    series.push(sample(profile.duration.as_nanos() as u64, &now));
    let sites = sites(profile, &profile.memory[..events_before]);
    let found = MemoryPeak { at: peak.0, bytes: total(&peak), by_kind: peak.1, sites };
    (thinned(series), found)
}

fn total(sample: &MemoryPoint) -> u64 {
    sample.1.iter().sum()
}

/// Keeps the largest of every few samples, and the first and the last one.
fn thinned(series: Vec<MemoryPoint>) -> Vec<MemoryPoint> {
    if series.len() <= SAMPLES {
        return series;
    }
    let each = series.len().div_ceil(SAMPLES);
    let mut kept = vec![series[0]];
    kept.extend(series.chunks(each).filter_map(|chunk| chunk.iter().max_by_key(|sample| total(sample))));
    kept.push(series[series.len() - 1]);
    kept
}

/// Who allocated what is in use after some events.
fn sites(profile: &Profile, events: &[MemoryEvent]) -> Vec<PeakSite> {
    let mut alive: HashMap<(u64, MemoryKind), &MemoryEvent> = HashMap::new();
    let mut before: [i64; KINDS] = profile.memory_before.map(|bytes| bytes as i64);
    let mut unnamed = [0i64; KINDS];
    for event in events {
        let key = (event.tensor, event.kind);
        match (event.tensor == u64::MAX, event.bytes > 0) {
            (true, _) => unnamed[event.kind as usize] += event.bytes as i64,
            (false, true) => drop(alive.insert(key, event)),
            (false, false) => {
                if alive.remove(&key).is_none() {
                    before[event.kind as usize] += event.bytes as i64;
                }
            }
        }
    }
    let mut grouped: BTreeMap<(MemoryKind, String, String, String), (u64, usize)> = BTreeMap::new();
    let mut add = |kind: MemoryKind, operator: &str, module: String, site: String, bytes: i64, tensors: usize| {
        if bytes > 0 {
            let entry = grouped.entry((kind, operator.to_string(), module, site)).or_default();
            (entry.0, entry.1) = (entry.0 + bytes as u64, entry.1 + tensors);
        }
    };
    for event in alive.values() {
        let span = event.span.map(|span| &profile.spans[span]);
        let (operator, module) = (span.map_or("-", |s| s.name), span.and_then(|s| s.module.as_deref()));
        let site = span.and_then(|s| s.site).map(ToString::to_string);
        let module = module.map(without_numbers).unwrap_or_default();
        add(event.kind, operator, module, site.unwrap_or_default(), event.bytes as i64, 1);
    }
    for kind in MemoryKind::ALL {
        add(kind, "in use before the step", String::new(), String::new(), before[kind as usize], 0);
        add(kind, "not of a tensor", String::new(), String::new(), unnamed[kind as usize], 0);
    }
    let site =
        |((kind, operator, module, site), (bytes, tensors))| PeakSite { kind, bytes, tensors, operator, module, site };
    let mut sites: Vec<PeakSite> = grouped.into_iter().map(site).collect();
    sites.sort_by_key(|site| std::cmp::Reverse(site.bytes));
    sites.truncate(SITES);
    sites
}

/// A path with `*` in place of numbers, so that equal blocks count as one.
fn without_numbers(path: &str) -> String {
    let part = |part: &str| if part.parse::<usize>().is_ok() { "*".to_string() } else { part.to_string() };
    path.split('.').map(part).collect::<Vec<_>>().join(".")
}
