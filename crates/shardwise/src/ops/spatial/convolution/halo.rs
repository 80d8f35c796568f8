//! Which indices of one tensor a shard of another reads: layouts of inputs and results of windows, and the boxes that ranks
//! exchange.

use std::ops::Range;

use super::window::Window;
use crate::error::Result;
use crate::layout::{Layout, Runs, TensorBox};
use crate::placement::Placement;
use crate::rule::{Decision, RequiredInput};
use shardwise_kernels::convolution::WindowAxis;

/// The range of one tensor that a range of another needs: `(window, from, to, size)`.
pub(super) type Needed = fn(&Window, usize, usize, usize) -> Range<usize>;

/// The layout of the windows of a tensor in the layout `elements`: a window belongs to the shard that holds its middle.
/// `elements` has one range per rank in every spatial dimension; these are the last.
pub(super) fn window_layout(elements: &Layout, windows: &[Window], counts: &[usize]) -> Result<Layout> {
    let first = elements.shape().len() - windows.len();
    let mut resized = elements.clone();
    for (s, (window, &count)) in windows.iter().zip(counts).enumerate() {
        let n = elements.shape()[first + s];
        let owned = |runs: &Runs| runs.iter().map(|run| window.middles_in(&run, count, n)).sum();
        resized = resized.resized(first + s, count, &owned)?;
    }
    Ok(resized)
}

/// The layout of a tensor of spatial `sizes` whose windows are in the layout `windows`: sharded by the same axes, into plain
/// chunks.
pub(super) fn element_layout(windows: &Layout, sizes: &[usize]) -> Result<Layout> {
    let first = windows.shape().len() - sizes.len();
    let plain = |p: &Placement| match p.shard_dim() {
        Some(dim) if dim >= first => Placement::Shard(dim as isize),
        _ => p.clone(),
    };
    let placements: Vec<Placement> = windows.placements().iter().map(plain).collect();
    let shape = [&windows.shape()[..first], sizes].concat();
    Layout::from_shard_orders(windows.mesh(), &shape, &placements, &windows.shard_orders())
}

/// The mesh axes that shard one of the last `spatial` dimensions.
pub(super) fn spatial_axes(layout: &Layout, spatial: usize) -> Vec<usize> {
    let first = layout.shape().len() - spatial;
    (first..layout.shape().len()).flat_map(|dim| layout.shard_order(dim).to_vec()).collect()
}

/// The layouts with one range per rank in every dimension, if a spatial dimension of one of the first `with_positions` is sharded,
/// or may become so: a box is one range per dimension.
pub(super) fn contiguous_shards<const N: usize>(
    layouts: [&Layout; N],
    with_positions: usize,
    spatial: usize,
) -> Result<[Layout; N]> {
    let sharded = |layout: &&Layout| layout.is_partial() || !spatial_axes(layout, spatial).is_empty();
    let mut found = layouts.map(Layout::clone);
    if layouts[..with_positions].iter().any(sharded) {
        for layout in &mut found {
            *layout = layout.unstrided(&|_| true)?;
        }
    }
    Ok(found)
}

/// Requires of a tensor in the layout `from`, on every rank, what the rank's shard of a tensor in the layout `to` needs along
/// the spatial dimensions, and along other dimensions what the rank holds.
pub(super) fn required(from: Layout, to: &Layout, windows: &[Window], needed: Needed) -> RequiredInput {
    let (of_from, of_to) = (from.shape().len() - windows.len(), to.shape().len() - windows.len());
    let axes = spatial_axes(&from, windows.len());
    if axes.is_empty() && spatial_axes(to, windows.len()).is_empty() {
        return RequiredInput::Layout(from);
    }
    let part = |&rank: &usize| {
        let (mut offsets, mut sizes) = (from.global_offset(rank), from.local_shape(rank));
        let (first, count) = (to.global_offset(rank), to.local_shape(rank));
        for (s, window) in windows.iter().enumerate() {
            let (at, made) = (of_from + s, of_to + s);
            let range = needed(window, first[made], first[made] + count[made], from.shape()[at]);
            (offsets[at], sizes[at]) = (range.start, range.len());
        }
        TensorBox { offsets, sizes }
    };
    let boxes = from.mesh().ranks().iter().map(part).collect();
    RequiredInput::Boxes { from, axes, boxes }
}

/// The geometry of local tensors along one dimension, of which a rank holds these indices.
pub(super) fn local_axis(window: &Window, elements: &Runs, windows: &Runs) -> WindowAxis {
    let (first, element) = (windows.first().unwrap_or(0), elements.first().unwrap_or(0));
    WindowAxis {
        kernel: window.size,
        stride: window.stride,
        dilation: window.dilation,
        base: (first * window.stride) as isize - window.padding as isize - element as isize,
        input: elements.len(),
        output: windows.len(),
    }
}

/// The layout `windows` as one of a tensor with spatial `sizes`, to decide on both together: sharded as `elements` along
/// dimensions that the same axes shard in both, because then only halos are exchanged, else into plain chunks.
pub(super) fn as_elements(windows: &Layout, elements: &Layout, sizes: &[usize]) -> Result<Layout> {
    let plain = element_layout(windows, sizes)?;
    let first = plain.shape().len() - sizes.len();
    let of_elements = elements.shape().len() - sizes.len();
    let alike = |dim: usize| elements.shard_order(of_elements + dim - first) == windows.shard_order(dim);
    let placement = |axis: usize| match plain.placements()[axis].shard_dim() {
        Some(dim) if dim >= first && alike(dim) => elements.placements()[axis].with_dim(dim),
        _ => plain.placements()[axis].clone(),
    };
    let placements: Vec<Placement> = (0..plain.placements().len()).map(placement).collect();
    Ok(Layout::from_shard_orders(plain.mesh(), plain.shape(), &placements, &plain.shard_orders()).unwrap_or(plain))
}

/// The layout of the windows themselves, where a decision on [`as_elements`] chose the layout `chosen`: that of `windows` where
/// the decision keeps it.
pub(super) fn chosen_windows(chosen: &Layout, windows: &Layout, by: &[Window], counts: &[usize]) -> Result<Layout> {
    let first = chosen.shape().len() - by.len();
    let kept = (first..first + by.len()).all(|dim| chosen.shard_order(dim) == windows.shard_order(dim));
    if kept {
        let own = |axis: usize| match chosen.placements()[axis].shard_dim() {
            Some(dim) if dim >= first => windows.placements()[axis].clone(),
            _ => chosen.placements()[axis].clone(),
        };
        let placements: Vec<Placement> = (0..chosen.placements().len()).map(own).collect();
        let shape = [&chosen.shape()[..first], counts].concat();
        // Ragged sizes may depend on axes that shard another dimension now.
        if let Ok(layout) = Layout::from_shard_orders(chosen.mesh(), &shape, &placements, &chosen.shard_orders()) {
            return Ok(layout);
        }
    }
    window_layout(chosen, by, counts)
}

/// The layout `chosen`, but replicated along axes that would shard a spatial dimension of a tensor that `now` replicates: a rank
/// then takes what it needs from its own copy.
pub(super) fn replicated_positions(chosen: &Layout, now: &Layout, spatial: usize) -> Result<Layout> {
    let axes = spatial_axes(chosen, spatial);
    let held: Vec<usize> = axes.into_iter().filter(|&axis| now.placements()[axis] == Placement::Replicate).collect();
    if held.is_empty() { Ok(chosen.clone()) } else { chosen.without_axes(&held) }
}

/// The layouts that a signature chose for inputs.
pub(super) fn chosen_layouts<const N: usize>(decision: &Decision) -> [Layout; N] {
    std::array::from_fn(|i| match &decision.inputs[i] {
        RequiredInput::Layout(layout) | RequiredInput::Boxes { from: layout, .. } => layout.clone(),
    })
}
