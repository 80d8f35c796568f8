//! Collectives that a rank takes part in.

use shardwise::prelude::*;

/// Runs `body` and returns the names of the collectives of this rank in it, in order; agreements move no elements and do not count.
pub fn counted<T>(world: &World, body: impl FnOnce() -> Result<T>) -> Result<(T, Vec<&'static str>)> {
    world.trace().clear();
    let value = body()?;
    let calls = world.trace().records().iter().map(|record| record.call).filter(|call| *call != "agree").collect();
    Ok((value, calls))
}

/// Collectives forward and backward of a function of leaves: the backward pass starts from a cotangent of ones in the layout of the
/// result, reduced where it is partial, and ends with gradients as they are, not in the layout of the leaves.
pub fn counted_both_ways(
    world: &World,
    function: impl FnOnce() -> Result<DTensor>,
) -> Result<(DTensor, Gradients, [Vec<&'static str>; 2])> {
    let (y, forward) = counted(world, function)?;
    let cotangent = y.detach().ones_like()?;
    let (gradients, backward) = counted(world, || y.backward_from(&cotangent))?;
    Ok((y, gradients, [forward, backward]))
}
