//! A scope in which the operator that first gives NaN is an error.

use std::sync::Arc;

use crate::error::{ErrorKind, Result, Site};
use crate::module_scope::{current_path, user_site};
use crate::rank_context::{RankContext, in_scope, rank_context};
use crate::tensor::DTensor;
use shardwise_kernels::to_f64_vec;

/// Where an operator was called.
#[derive(Clone)]
pub(super) struct RecordedAt {
    /// Path of the module whose `forward` was running.
    path: Option<Arc<str>>,
    site: Site,
}

impl RecordedAt {
    pub(super) fn here(site: Site) -> Self {
        RecordedAt { path: current_path(), site: user_site(site) }
    }
}

/// Runs `body`; inside, an operator whose result has NaN on this rank is an error that names it, its tensors and the place in
/// the program, in the forward pass and in the backward pass alike.
///
/// Local: nothing is communicated. Every result is read once more, so it is for finding a fault and not for training. Other
/// ranks get the error of this one with their next collective. Scopes nest; each rank is in its own.
///
/// ```
/// use shardwise::{detect_anomaly, prelude::*};
///
/// let error = launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let x = DTensor::zeros(4, DType::F32, &mesh, [Shard(0)])?;
///     detect_anomaly(|| x.exp()?.sub_scalar(2.0)?.sqrt()?.sum_all()?.item::<f32>())
/// });
/// assert!(error.unwrap_err().to_string().contains("NaN in the result of sqrt"));
/// ```
#[doc(alias = "set_detect_anomaly")]
pub fn detect_anomaly<R>(body: impl FnOnce() -> R) -> R {
    let count = |context: &RankContext| context.anomaly_scopes.replace(context.anomaly_scopes.get() + 1);
    in_scope(count, |context, before| context.anomaly_scopes.set(before), body)
}

/// Whether results are looked at now.
pub(super) fn is_detecting() -> bool {
    rank_context(|context| context.anomaly_scopes.get() > 0)
}

/// Runs the backward pass of one call, so that what it computes is reported as that.
pub(super) fn in_backward_of<R>(name: &'static str, origin: Option<RecordedAt>, body: impl FnOnce() -> R) -> R {
    let place = origin.map_or(String::new(), |RecordedAt { path, site }| {
        path.map_or(String::new(), |path| format!(" in module `{path}`")) + &format!(", called at {site}")
    });
    let enter = |context: &RankContext| context.backward_calls.borrow_mut().push(format!("{name}{place}"));
    in_scope(enter, |context, ()| drop(context.backward_calls.borrow_mut().pop()), body)
}

/// An error if an output has NaN on this rank.
pub(super) fn check(name: &'static str, inputs: &[&DTensor], outputs: &[DTensor], site: Site) -> Result<()> {
    for (i, output) in outputs.iter().enumerate() {
        let Some(at) = first_nan(output)? else { continue };
        let rank = output.device_mesh().world().rank();
        let which = if outputs.len() > 1 { format!("result {i} of {name}") } else { format!("the result of {name}") };
        let phase = rank_context(|context| {
            let calls = context.backward_calls.borrow();
            calls.last().map_or(String::new(), |call| format!(", in the backward pass of {call}"))
        });
        let mut spoilt = Vec::new();
        for (i, input) in inputs.iter().enumerate() {
            spoilt.extend(first_nan(input)?.map(|_| i.to_string()));
        }
        let (needed, fix) = match spoilt.as_slice() {
            [] => ("numbers".to_string(), "look at what the operands hold at that place"),
            some => {
                (format!("operands without NaN; input(s) {} had it", some.join(", ")), "look at where they come from")
            }
        };
        let found = format!("NaN in {which} at element {at} of the part of rank {rank}{phase}");
        let error = ErrorKind::Gradient.error("value", found, needed, fix);
        return Err(super::name_call(error, name, inputs, site));
    }
    Ok(())
}

/// The first element of this rank's part that is NaN.
fn first_nan(tensor: &DTensor) -> Result<Option<usize>> {
    match tensor.dtype().is_float() {
        true => Ok(to_f64_vec(tensor.local())?.iter().position(|x| x.is_nan())),
        false => Ok(None),
    }
}
