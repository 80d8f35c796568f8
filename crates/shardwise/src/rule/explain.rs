//! Why a decision moves data, and why it leaves results partial: one sentence each.

use super::{Decision, DimSharding, RequiredInput, Signature};
use crate::layout::Layout;
use crate::placement::Placement;

impl Signature {
    /// Why the decision moves input `i`, in one sentence; `None` if it does not, or only narrows what ranks have.
    pub(crate) fn why_moved(&self, name: &str, i: usize, inputs: &[&Layout], decision: &Decision) -> Option<String> {
        let now = inputs[i];
        let to = match &decision.inputs[i] {
            RequiredInput::Layout(to) => to,
            RequiredInput::Boxes { .. } => {
                return Some(format!(
                    "{name} fetches parts of input {i}: every rank needs elements other than its own shard"
                ));
            }
        };
        if now == to {
            return None;
        }
        let (from, into) = (placements(now), placements(to));
        if now.placements() == to.placements() {
            return Some(format!(
                "{name} redistributes input {i} because its axes shard in another order than {name} needs"
            ));
        }
        let moves = |&axis: &usize| {
            let before = &now.placements()[axis];
            now.mesh().shape()[axis] > 1 && !before.is_replicate() && *before != to.placements()[axis]
        };
        let axes: Vec<usize> = (0..now.mesh().ndim()).filter(moves).collect();
        if axes.is_empty() {
            return None;
        }
        let mut clauses: Vec<String> = axes.iter().map(|&axis| self.clause(name, i, axis, inputs, decision)).collect();
        clauses.dedup();
        Some(format!("{name} redistributes input {i} from {from} to {into} because {}", clauses.join(", and ")))
    }

    /// Why the placement of input `i` along an axis cannot stay, as a part of a sentence.
    fn clause(&self, name: &str, i: usize, axis: usize, inputs: &[&Layout], decision: &Decision) -> String {
        let now = &inputs[i].placements()[axis];
        let axis_name = &inputs[i].mesh().axes()[axis].name;
        if let Some(op) = now.reduction() {
            let passes = self.passes.iter().any(|pass| pass.inputs.get(i) == Some(&Some(op)));
            return match passes {
                true => {
                    format!("its {now} over {axis_name} does not combine with the other inputs before it is reduced")
                }
                false => format!("{name} needs the complete value of its {now} over {axis_name}"),
            };
        }
        let dim = now.shard_dim().unwrap_or(0);
        let number = self.inputs.get(i).and_then(|dims| dims.get(dim).copied().flatten());
        match number.map(|number| self.dims[number]) {
            None => return format!("every rank needs all of its dimension {dim}, sharded over {axis_name}"),
            Some(DimSharding::Never) => {
                return format!("{name} needs its dimension {dim} whole, which is sharded over {axis_name}");
            }
            Some(_) => {}
        }
        let stays = |&j: &usize| {
            j != i && needed(decision, j) == Some(inputs[j]) && !inputs[j].placements()[axis].is_replicate()
        };
        match (0..inputs.len()).find(stays) {
            Some(j) => {
                let other = &inputs[j].placements()[axis];
                format!("input {j} stays {other} over {axis_name}, which moves fewer bytes")
            }
            None => format!("its {now} over {axis_name} does not fit the other inputs"),
        }
    }

    /// Why output `o` of the decision is partial, in one sentence; `None` if it is not.
    pub(crate) fn why_partial(&self, name: &str, o: usize, inputs: &[&Layout], decision: &Decision) -> Option<String> {
        let output = &decision.outputs[o];
        let mesh = output.mesh();
        let mut clauses = Vec::new();
        for (axis, placement) in output.placements().iter().enumerate().filter(|(_, p)| p.is_partial()) {
            let axis_name = &mesh.axes()[axis].name;
            // An input that is sharded on a dimension over which the operator reduces: rather one that came so than a replicated
            // one of which ranks take the part that goes with it.
            let reduced = |i: usize| {
                let dim = needed(decision, i)?.placements()[axis].shard_dim()?;
                let number = self.inputs.get(i)?.get(dim).copied().flatten()?;
                matches!(self.dims[number], DimSharding::Reduces(_)).then_some((i, dim))
            };
            let came = |(i, dim): &(usize, usize)| inputs[*i].placements()[axis].shard_dim() == Some(*dim);
            let reducing = || (0..decision.inputs.len()).filter_map(reduced);
            let reduced = reducing().find(came).or_else(|| reducing().next());
            let partial = |i: &usize| needed(decision, *i).is_some_and(|l| l.placements()[axis].is_partial());
            clauses.push(match (reduced, (0..decision.inputs.len()).find(partial)) {
                (Some((i, dim)), _) => format!(
                    "{placement} over {axis_name} because {name} reduces over dimension {dim} of input {i}, \
                     which is sharded over {axis_name}: every rank has the term of its shard"
                ),
                (None, Some(i)) => format!(
                    "{placement} over {axis_name} because input {i} is, and {name} of its terms are terms of the result"
                ),
                (None, None) => format!("{placement} over {axis_name} by the rule of {name}"),
            });
        }
        (!clauses.is_empty()).then(|| format!("the result is {}", clauses.join(", and ")))
    }
}

/// The layout that a decision needs of an input.
fn needed(decision: &Decision, i: usize) -> Option<&Layout> {
    match &decision.inputs[i] {
        RequiredInput::Layout(layout) => Some(layout),
        RequiredInput::Boxes { .. } => None,
    }
}

fn placements(layout: &Layout) -> String {
    layout.placements().iter().map(Placement::to_string).collect::<Vec<_>>().join(", ")
}
