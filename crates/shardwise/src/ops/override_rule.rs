//! [`override_rule`]: custom sharding rules for operators of this crate.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use super::{OpEntry, ops};
use crate::comm::{DeviceMesh, DryWorld};
use crate::error::{Error, ErrorKind, Result, nearest};
use crate::op::{ScopedRule, operators_in, with_rule};
use crate::placement::Placement;
use crate::rule::{Decision, RuleCall};
use crate::tensor::DTensor;

/// Runs `body` with a custom sharding rule for the operator `name`.
///
/// Inside, calls on tensors of ranks of `mesh` run in the layouts that `rule` returns, or by the default rule where it returns
/// `None`. The rule gets the layouts of the inputs, the shapes and types of the outputs, and the operator's own rule, which depends
/// on its arguments ([`Signature::sharding`](crate::rule::Signature::sharding) of the dimension of an `argmax` is `Never`). It must be
/// valid for the operator: the kernel runs on the local tensors of the layouts that it returns, and a wrong rule gives wrong results. Backward passes
/// inside the scope use the rule for the same operator too. Scopes nest; the innermost rule applies.
///
/// Collective: every rank of the mesh must enter the scope with the same rule; if one does not, all get an error. PyTorch's
/// `register_sharding` is global and permanent; this one ends with the scope.
///
/// # Errors
/// If there is no operator `name`, or if it is composed of other operators and has no rule itself; the error names the operators
/// to override instead.
///
/// ```
/// use shardwise::ops::override_rule;
/// use shardwise::prelude::*;
/// use shardwise::rule::{Decision, RuleCall};
///
/// launch(2, |world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let x = DTensor::ones((4, 4), DType::F32, &mesh, [Replicate])?;
///     assert_eq!(x.exp()?.placements(), [Replicate]);
///     // the same work, sharded over the ranks
///     let rows = |call: &RuleCall| {
///         let sharded = Layout::new(call.inputs[0].mesh(), call.inputs[0].shape(), [Shard(0)])?;
///         Ok(Some(Decision::new([sharded.clone()], [sharded])))
///     };
///     override_rule(&mesh, "exp", rows, || {
///         assert_eq!(x.exp()?.placements(), [Shard(0)]);
///         Ok(())
///     })?;
///     assert_eq!(x.exp()?.placements(), [Replicate]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "register_sharding")]
#[track_caller]
pub fn override_rule<F, R>(mesh: &DeviceMesh, name: &str, rule: F, body: impl FnOnce() -> Result<R>) -> Result<R>
where
    F: Fn(&RuleCall<'_>) -> Result<Option<Decision>> + 'static,
{
    if mesh.contains(mesh.world().rank()) && mesh.size() > 1 {
        // Functions cannot be compared between ranks; the type name of a closure identifies where it was written.
        let values = [number(name), number(std::any::type_name::<F>())];
        mesh.group_of(&(0..mesh.ndim()).collect::<Vec<_>>())?.agree("operator and rule", &values)?;
    }
    let entry = ops().find(|entry| entry.name == name).ok_or_else(|| {
        let near = nearest(name, ops().map(|entry| entry.name));
        ErrorKind::unknown(name).error::<Error>(
            "operator",
            format!("`{name}`"),
            "the name of an operator",
            format!("did you mean {near}?"),
        )
    })?;
    let made_of = operators_of(entry)?;
    if !made_of.contains(&entry.name) {
        let found = format!("`{name}`, which is composed of other operators and has no rule itself");
        return Err(ErrorKind::Argument.error(
            "operator",
            found,
            format!("one of {}", made_of.join(", ")),
            "override these",
        ));
    }
    let rule: Rc<ScopedRule> = Rc::new(rule);
    with_rule(entry.name, mesh.ranks(), rule, body)
}

/// The operators that one consists of, found by a dry run.
fn operators_of(entry: &OpEntry) -> Result<Vec<&'static str>> {
    let ran = DryWorld::new(1)?.run(|world| {
        let mesh = world.mesh([("one", 1)])?;
        let samples = (entry.samples)().swap_remove(0);
        let inputs = samples.iter().map(|s| DTensor::zeros(s.shape.as_slice(), s.dtype, &mesh, [Placement::Replicate]));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let (made, names) = operators_in(|| (entry.apply)(&inputs));
        made.map(|_| names.into_iter().collect())
    })?;
    Ok(ran.value)
}

fn number(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}
