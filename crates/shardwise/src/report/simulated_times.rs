//! Times of a dry run: estimates in place of the time that planning took.

use std::time::Duration;

use crate::comm::{DeviceMesh, Profile, SpanKind};
use crate::redistribute::collective_us;

use super::traffic::axes_of;

/// Replaces the times of a dry run's spans by estimates: operations by `flops_per_s`, collectives by the links of the mesh, one after
/// the other.
pub(super) fn simulate(profile: &mut Profile, mesh: &DeviceMesh, flops_per_s: f64) {
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); profile.spans.len()];
    let mut roots = Vec::new();
    for (index, span) in profile.spans.iter().enumerate() {
        match span.parent {
            Some(parent) => children[parent].push(index),
            None => roots.push(index),
        }
    }
    let mut clock = Duration::ZERO;
    for root in roots {
        clock = place(profile, mesh, flops_per_s, &children, root, clock);
    }
    profile.duration = clock;
    for event in &mut profile.memory {
        event.at = profile.spans.get(event.spans_begun).map_or(clock, |next| next.start);
    }
}

/// Places a span and what is inside from `start` on; returns its end. Inputs are moved before the operator computes.
fn place(
    profile: &mut Profile,
    mesh: &DeviceMesh,
    flops_per_s: f64,
    children: &[Vec<usize>],
    index: usize,
    start: Duration,
) -> Duration {
    let inside =
        children[index].iter().fold(start, |at, &child| place(profile, mesh, flops_per_s, children, child, at));
    let span = &mut profile.spans[index];
    let own = match span.kind {
        SpanKind::Collective => {
            let phases = if span.name == "all_reduce" { 2 } else { 1 };
            let link = mesh.links().slowest(&axes_of(mesh.mesh(), &span.group));
            collective_us(phases, span.group.len(), span.bytes, link) / 1e6
        }
        SpanKind::Operator => span.flops as f64 / flops_per_s,
        _ => 0.0,
    };
    let end = inside + Duration::try_from_secs_f64(own).unwrap_or(Duration::ZERO);
    (span.start, span.duration, span.waiting) = (start, end - start, Duration::ZERO);
    end
}
