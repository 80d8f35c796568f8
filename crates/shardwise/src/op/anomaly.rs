//! [`detect_anomaly`]: a scope in which the first operator that returns NaN is an error.

use std::sync::Arc;

use super::call_error::name_call;
use crate::error::{ErrorKind, Result, Site};
use crate::module_scope::{current_path, user_site};
use crate::rank_context::{RankContext, in_scope, rank_context};
use crate::tensor::DTensor;
use shardwise_kernels::{check_arithmetic, first_nan};

/// Where an operator was called in the forward pass.
#[derive(Clone)]
pub(super) struct RecordedAt {
    /// The path of the module whose `forward` was running.
    path: Option<Arc<str>>,
    site: Site,
}

impl RecordedAt {
    pub(super) fn here(site: Site) -> Self {
        RecordedAt { path: current_path(), site: user_site(site) }
    }
}

/// Runs `body` and turns the first NaN that an operator returns on this rank into an error.
///
/// The error names the operator, its tensors, the line of the program and, in a backward pass, the forward call. Local:
/// communicates nothing; the other ranks get the error with their next collective. Every result is read once more, so use it to
/// find a fault, not to train. Scopes nest; each rank enters its own.
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

/// Whether results are checked for NaN now.
pub(super) fn is_detecting() -> bool {
    rank_context(|context| context.anomaly_scopes.get() > 0)
}

/// Runs the backward pass of one call; errors inside name that call.
pub(super) fn in_backward_of<R>(name: &'static str, origin: Option<RecordedAt>, body: impl FnOnce() -> R) -> R {
    let place = origin.map_or(String::new(), |RecordedAt { path, site }| {
        path.map_or(String::new(), |path| format!(" in module `{path}`")) + &format!(", called at {site}")
    });
    let enter = |context: &RankContext| context.backward_calls.borrow_mut().push(format!("{name}{place}"));
    in_scope(enter, |context, ()| drop(context.backward_calls.borrow_mut().pop()), body)
}

/// Fails if an output has NaN on this rank.
pub(super) fn check(name: &'static str, inputs: &[&DTensor], outputs: &[DTensor], site: Site) -> Result<()> {
    for (i, output) in outputs.iter().enumerate() {
        if check_arithmetic(output.dtype()).is_err() {
            continue;
        }
        let Some(at) = first_nan(output.local())? else { continue };
        let rank = output.device_mesh().world().rank();
        let which = if outputs.len() > 1 { format!("result {i} of {name}") } else { format!("the result of {name}") };
        let phase = rank_context(|context| {
            let calls = context.backward_calls.borrow();
            calls.last().map_or(String::new(), |call| format!(", in the backward pass of {call}"))
        });
        let mut nan_inputs = Vec::new();
        for (i, input) in inputs.iter().enumerate() {
            nan_inputs.extend(first_nan(input.local())?.map(|_| i.to_string()));
        }
        let (needed, fix) = match nan_inputs.as_slice() {
            [] => ("numbers".to_string(), "look at what the operands hold at that place"),
            some => {
                (format!("operands without NaN; input(s) {} had it", some.join(", ")), "look at where they come from")
            }
        };
        let found = format!("NaN in {which} at element {at} of the local tensor of rank {rank}{phase}");
        let error = ErrorKind::Gradient.error("value", found, needed, fix);
        return Err(name_call(error, name, inputs, site));
    }
    Ok(())
}
