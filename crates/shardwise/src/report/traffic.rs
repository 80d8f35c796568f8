//! Bytes by mesh axes and collective, and from rank to rank.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::comm::{Profile, ProfileSpan, SpanKind};
use crate::mesh::Mesh;

/// Totals of one collective over some mesh axes, on one rank. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrafficRow {
    /// Names of the axes, `-` for a group of one rank.
    pub axes: String,
    /// Name of the call.
    pub call: String,
    /// Number of calls.
    pub calls: usize,
    /// Bytes that the rank sends.
    pub bytes: u64,
    /// Time without waiting.
    pub moving: u64,
    /// Time of waiting.
    pub waiting: u64,
}

/// Bytes that one rank sends to another one: sender, receiver, bytes. What a collective sends is divided evenly among the other ranks of
/// its group; which rank really sends to which depends on the algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatrixEntry(
    /// Sender.
    pub usize,
    /// Receiver.
    pub usize,
    /// Bytes.
    pub u64,
);

/// The most ranks of a matrix: more rows are not readable.
pub(super) const MATRIX_RANKS: usize = 64;

/// The axes along which the ranks of a group differ.
pub(super) fn axes_of(mesh: &Mesh, group: &[usize]) -> Vec<usize> {
    let Some(first) = group.first().and_then(|&rank| mesh.coordinate(rank)) else { return Vec::new() };
    // The last rank of a group differs from the first on all of its axes, and so does any rank of a group in another order.
    let mut differs = vec![false; mesh.ndim()];
    for coordinate in group.iter().filter_map(|&rank| mesh.coordinate(rank)) {
        let axes = differs.iter_mut().zip(first.iter().zip(&coordinate));
        axes.for_each(|(differs, (a, b))| *differs |= a != b);
    }
    (0..mesh.ndim()).filter(|&axis| differs[axis]).collect()
}

/// The names of axes, such as `dp,tp`.
pub(super) fn axes_text(mesh: &Mesh, axes: &[usize]) -> String {
    match axes {
        [] => "-".to_string(),
        axes => axes.iter().map(|&axis| mesh.axes()[axis].name.as_str()).collect::<Vec<_>>().join(","),
    }
}

fn collectives(profile: &Profile) -> impl Iterator<Item = &ProfileSpan> {
    profile.spans.iter().filter(|span| span.kind == SpanKind::Collective)
}

/// Totals by axes and call. `axes` gives the axes of a collective as text.
pub(super) fn traffic(profile: &Profile, mut axes: impl FnMut(&ProfileSpan) -> String) -> Vec<TrafficRow> {
    let mut rows: BTreeMap<(String, &str), TrafficRow> = BTreeMap::new();
    for span in collectives(profile) {
        let axes = axes(span);
        let row = rows.entry((axes.clone(), span.name)).or_insert_with(|| TrafficRow {
            axes,
            call: span.name.to_string(),
            calls: 0,
            bytes: 0,
            moving: 0,
            waiting: 0,
        });
        row.calls += 1;
        row.bytes += span.bytes as u64;
        row.moving += (span.duration - span.waiting).as_nanos() as u64;
        row.waiting += span.waiting.as_nanos() as u64;
    }
    rows.into_values().collect()
}

/// Bytes from rank to rank: those of this rank, or in a dry run those of the first [`MATRIX_RANKS`] ranks if each does on its own groups what this
/// one does.
pub(super) fn matrix(profile: &Profile, mesh: &Mesh) -> Vec<MatrixEntry> {
    let mut sent: BTreeMap<(usize, usize), u64> = BTreeMap::new();
    let mut by_axes: BTreeMap<Vec<usize>, u64> = BTreeMap::new();
    for span in collectives(profile).filter(|span| span.bytes > 0) {
        let bytes = span.bytes as u64;
        match span.peer {
            // The owner of what is read sends it.
            Some(peer) if span.name == "fetch" => *sent.entry((peer, profile.rank)).or_default() += bytes,
            Some(peer) => *sent.entry((profile.rank, peer)).or_default() += bytes,
            None if profile.is_dry => *by_axes.entry(axes_of(mesh, &span.group)).or_default() += bytes,
            None => divide(&mut sent, profile.rank, &span.group, bytes),
        }
    }
    let shown = &mesh.ranks()[..mesh.size().min(MATRIX_RANKS)];
    for (axes, bytes) in by_axes {
        for &rank in shown {
            divide(&mut sent, rank, &mesh.group_ranks(&axes, rank), bytes);
        }
        // A group may have all ranks of a large mesh.
        sent.retain(|(from, to), _| shown.contains(from) && shown.contains(to));
    }
    sent.into_iter().map(|((from, to), bytes)| MatrixEntry(from, to, bytes)).collect()
}

/// Divides bytes evenly among the other ranks of a group.
fn divide(sent: &mut BTreeMap<(usize, usize), u64>, from: usize, group: &[usize], bytes: u64) {
    let others = group.len().saturating_sub(1) as u64;
    for (index, &to) in group.iter().filter(|&&rank| rank != from).enumerate() {
        let remainder = u64::from((index as u64) < bytes % others);
        *sent.entry((from, to)).or_default() += bytes / others + remainder;
    }
}
