//! Rules of a program for operators of this crate.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use super::{OpEntry, ops};
use crate::comm::{DeviceMesh, DryWorld};
use crate::error::{Error, ErrorKind, Result, nearest};
use crate::layout::{Layout, TensorMeta};
use crate::op::{ScopedRule, operators_in, with_rule};
use crate::placement::Placement;
use crate::rule::Decision;
use crate::tensor::DTensor;

/// Runs `body`; inside, on tensors of the ranks of `mesh`, the operator called `name` is carried out as `rule` says and not
/// by its own rule: in the layouts of inputs and outputs that it returns, or by its own where it returns `None`.
///
/// The rule is given the layouts of the inputs and descriptions of the outputs. It must hold for the operator: the kernel
/// runs on local parts as they are. Gradients that are taken inside the scope follow it too, where they are made of the
/// same operator. Scopes nest, the innermost rule counts. Every rank of the mesh has to enter the scope with the same rule,
/// and all get an error if one does not. Decisions made inside are not used outside, nor the other way round.
///
/// An operator that is made of others has no rule of its own: the error names those that have one.
///
/// ```
/// use shardwise::ops::override_rule;
/// use shardwise::prelude::*;
/// use shardwise::rule::Decision;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let x = DTensor::ones((4, 4), DType::F32, &mesh, [Replicate])?;
///     assert_eq!(x.exp()?.placements(), [Replicate]);
///     // the same work, shared
///     let rows = |inputs: &[&Layout], _: &[TensorMeta]| {
///         let cut = Layout::new(inputs[0].mesh(), inputs[0].shape(), [Shard(0)])?;
///         Ok(Some(Decision::new([cut.clone()], [cut])))
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
    F: Fn(&[&Layout], &[TensorMeta]) -> Result<Option<Decision>> + 'static,
{
    if mesh.contains(mesh.world().rank()) && mesh.size() > 1 {
        // Functions cannot be compared; the type of a closure says where in the program it was written.
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
        let found = format!("`{name}`, which is made of other operators and has no rule of its own");
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

/// Operators that are carried out in the course of one, found by running it without data.
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
