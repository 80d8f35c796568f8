//! Sharding rules of a program that replace the rule of an operator within a scope, see `ops::override_rule`.
//!
//! A scope belongs to the thread of a rank. Decisions are cached under the number of the rule that made them, so decisions of
//! a scope are never used outside of it, nor decisions of the operator's default rule inside.

use std::collections::{BTreeSet, HashSet};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::OpPlan;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::mesh::Mesh;
use crate::rank_context::{RankContext, in_scope, rank_context};
use crate::rule::{Decision, RequiredInput, RuleCall};

/// Decides the layouts of a call; `None` leaves it to the default rule.
pub(crate) type ScopedRule = dyn Fn(&RuleCall<'_>) -> Result<Option<Decision>>;

#[derive(Clone)]
pub(super) struct RuleScope {
    /// Unique in this process.
    pub(super) number: u64,
    name: &'static str,
    /// The ranks that agreed on the rule.
    ranks: Rc<HashSet<usize>>,
    rule: Rc<ScopedRule>,
}

/// Stands for the default rule of an operator.
pub(super) const DEFAULT_RULE: u64 = 0;

static NUMBER: AtomicU64 = AtomicU64::new(DEFAULT_RULE + 1);

/// Runs `body`; inside, `rule` decides calls of the operator `name` on meshes whose ranks are all in `ranks`.
pub(crate) fn with_rule<R>(name: &'static str, ranks: &[usize], rule: Rc<ScopedRule>, body: impl FnOnce() -> R) -> R {
    let number = NUMBER.fetch_add(1, Relaxed);
    let scoped = RuleScope { number, name, ranks: Rc::new(ranks.iter().copied().collect()), rule };
    let enter = |context: &RankContext| {
        context.rules.with(|rules: &mut Vec<RuleScope>| rules.push(scoped));
        context.rule_count.replace(context.rule_count.get() + 1)
    };
    let leave = |context: &RankContext, before| {
        context.rules.with(Vec::<RuleScope>::pop);
        context.rule_count.set(before);
    };
    in_scope(enter, leave, body)
}

/// The innermost scoped rule for an operator on a mesh.
pub(super) fn rule_for(name: &'static str, mesh: &Mesh) -> Option<RuleScope> {
    if rank_context(|context| context.rule_count.get()) == 0 {
        return None;
    }
    let fits = |s: &&RuleScope| s.name == name && mesh.ranks().iter().all(|rank| s.ranks.contains(rank));
    rank_context(|context| context.rules.with(|rules: &mut Vec<RuleScope>| rules.iter().rev().find(fits).cloned()))
}

impl RuleScope {
    /// The decision of the rule. Shapes and meshes are checked; that the layouts are right for the operator cannot be: a wrong
    /// rule gives wrong results.
    pub(super) fn decide(&self, plan: &OpPlan, inputs: &[&Layout]) -> Result<Option<Decision>> {
        let call = RuleCall { inputs, outputs: &plan.outputs, signature: &plan.signature };
        let Some(decision) = (self.rule)(&call)? else { return Ok(None) };
        let wanted = |need: &RequiredInput| match need {
            RequiredInput::Layout(layout) | RequiredInput::Boxes { from: layout, .. } => layout.clone(),
        };
        let boxes_fit = |need: &RequiredInput| match need {
            RequiredInput::Layout(_) => true,
            RequiredInput::Boxes { from, boxes, .. } => {
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
        Err(ErrorKind::Layout.error("rule", found, needed, "build the layouts from the shapes that the rule gets"))
    }
}

/// Runs `body` and returns the names of the operators that it executed on this thread.
pub(crate) fn operators_in<R>(body: impl FnOnce() -> R) -> (R, BTreeSet<&'static str>) {
    rank_context(|context| context.operator_names.replace(Some(BTreeSet::new())));
    let result = body();
    (result, rank_context(|context| context.operator_names.take()).unwrap_or_default())
}

/// Records an operator for [`operators_in`].
pub(super) fn note(name: &'static str) {
    rank_context(|context| context.operator_names.borrow_mut().as_mut().map(|names| names.insert(name)));
}
