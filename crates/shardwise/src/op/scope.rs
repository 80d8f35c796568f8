//! Rules that a program puts in the place of an operator's own, for as long as a scope lasts.
//!
//! A scope belongs to a thread, as a rank does. Decisions made under a rule are kept under its number: inside the scope no
//! decision of the operator's own rule is found, and outside none of the program's.

use std::collections::{BTreeSet, HashSet};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::OpPlan;
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::mesh::Mesh;
use crate::rank_context::{RankContext, in_scope, rank_context};
use crate::rule::{Decision, Need};

/// How an operator is carried out on inputs that lie so, given what its outputs are; `None` leaves it to the operator.
pub(crate) type ScopedRule = dyn Fn(&[&Layout], &[TensorMeta]) -> Result<Option<Decision>>;

#[derive(Clone)]
pub(super) struct Scoped {
    /// No two scopes have the same.
    pub(super) number: u64,
    name: &'static str,
    /// The ranks that agreed on it.
    ranks: Rc<HashSet<usize>>,
    rule: Rc<ScopedRule>,
}

/// The number of decisions by an operator's own rule.
pub(super) const OWN: u64 = 0;

static NUMBER: AtomicU64 = AtomicU64::new(OWN + 1);

/// Runs `body`; inside, the operator called `name` is carried out by `rule` where all its ranks are in `ranks`.
pub(crate) fn with_rule<R>(name: &'static str, ranks: &[usize], rule: Rc<ScopedRule>, body: impl FnOnce() -> R) -> R {
    let number = NUMBER.fetch_add(1, Relaxed);
    let scoped = Scoped { number, name, ranks: Rc::new(ranks.iter().copied().collect()), rule };
    let enter = |context: &RankContext| {
        context.rules.with(|rules: &mut Vec<Scoped>| rules.push(scoped));
        context.rule_count.replace(context.rule_count.get() + 1)
    };
    let leave = |context: &RankContext, before| {
        context.rules.with(Vec::<Scoped>::pop);
        context.rule_count.set(before);
    };
    in_scope(enter, leave, body)
}

/// The innermost rule for an operator on a mesh.
pub(super) fn rule_for(name: &'static str, mesh: &Mesh) -> Option<Scoped> {
    if rank_context(|context| context.rule_count.get()) == 0 {
        return None;
    }
    let fits = |s: &&Scoped| s.name == name && mesh.ranks().iter().all(|rank| s.ranks.contains(rank));
    rank_context(|context| context.rules.with(|rules: &mut Vec<Scoped>| rules.iter().rev().find(fits).cloned()))
}

impl Scoped {
    /// What the rule says, checked as far as it can be: a rule that is wrong about its operator gives wrong results.
    pub(super) fn decide(&self, plan: &OpPlan, inputs: &[&Layout]) -> Result<Option<Decision>> {
        let Some(decision) = (self.rule)(inputs, &plan.outputs)? else { return Ok(None) };
        let wanted = |need: &Need| match need {
            Need::As(layout) | Need::Boxes { from: layout, .. } => layout.clone(),
        };
        let boxes_fit = |need: &Need| match need {
            Need::As(_) => true,
            Need::Boxes { from, boxes, .. } => {
                boxes.len() == from.mesh().size() && boxes.iter().all(|b| b.sizes.len() == from.shape().len())
            }
        };
        let mesh = inputs[0].mesh();
        let outputs: Vec<&[usize]> = plan.outputs.iter().map(|m| m.shape.as_slice()).collect();
        let given: Vec<&[usize]> = inputs.iter().map(|l| l.shape()).collect();
        let needs: Vec<Layout> = decision.inputs.iter().map(wanted).collect();
        let fits = |layouts: &[Layout], shapes: &[&[usize]]| {
            layouts.len() == shapes.len()
                && layouts.iter().zip(shapes).all(|(l, s)| l.shape() == *s && l.mesh() == mesh)
        };
        if fits(&needs, &given) && fits(&decision.outputs, &outputs) && decision.inputs.iter().all(boxes_fit) {
            return Ok(Some(decision));
        }
        let found = format!("a rule for {} with inputs {needs:?} and outputs {:?}", self.name, decision.outputs);
        let needed = format!("layouts of shapes {given:?} and {outputs:?} on mesh {mesh}");
        Err(ErrorKind::Layout.error("rule", found, needed, "make the layouts of the shapes that the rule is given"))
    }
}

/// Runs `body` and says which operators it carried out, on this thread.
pub(crate) fn operators_in<R>(body: impl FnOnce() -> R) -> (R, BTreeSet<&'static str>) {
    rank_context(|context| context.operator_names.replace(Some(BTreeSet::new())));
    let result = body();
    (result, rank_context(|context| context.operator_names.take()).unwrap_or_default())
}

/// Notes an operator for [`operators_in`].
pub(super) fn note(name: &'static str) {
    rank_context(|context| context.operator_names.borrow_mut().as_mut().map(|names| names.insert(name)));
}
