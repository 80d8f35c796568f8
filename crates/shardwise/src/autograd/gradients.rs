//! The gradients of a backward pass.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, LazyLock};

use super::bucket;
use crate::comm::Phase;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::Layout;
use crate::module_scope::{in_phase, with_reason};
use crate::placement::Placement;
use crate::tensor::{DTensor, TapeNode, is_recording};

/// Why gradients are moved after a backward pass, for the trace.
static REDUCED_FOR_PARAMETERS: LazyLock<Arc<str>> = LazyLock::new(|| {
    "gradients are brought into the layouts of their parameters, in which ranks hold terms of a sum until now".into()
});

/// The gradients of the leaves that a result depends on, as [`DTensor::backward`] returns them.
///
/// Unlike PyTorch's they are not stored in the leaves. A gradient has the layout that the operators gave it, often a partial sum
/// (`Partial(Sum)`), which is reduced once, when it is needed: [`in_param_layout`](Self::in_param_layout) does so for all.
pub struct Gradients {
    /// By number of the leaf, so that all ranks iterate in the same order.
    pub(super) leaves: BTreeMap<u64, (Arc<TapeNode>, DTensor)>,
}

impl std::fmt::Debug for Gradients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.leaves.values().map(|(_, gradient)| gradient.layout().to_string())).finish()
    }
}

impl Gradients {
    /// Returns the gradient of a leaf, which must be the tensor that `requires_grad` returned or a clone of it. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the tensor is not a leaf, or the result does not depend on it.
    pub fn get(&self, leaf: &DTensor) -> Result<&DTensor> {
        let tape = leaf.tape().ok_or_else(|| {
            let fix = "keep the tensor that requires_grad() returned";
            ErrorKind::Gradient.error::<Error>("leaf", leaf.layout(), "a tensor that requires a gradient", fix)
        })?;
        self.leaves.get(&tape.node.number).map(|(_, gradient)| gradient).ok_or_else(|| {
            let needed = "a leaf that the result depends on";
            ErrorKind::Gradient.error("leaf", leaf.layout(), needed, "check that the leaf, not a copy, was used")
        })
    }

    /// Whether a leaf has a gradient. Local.
    pub fn contains(&self, leaf: &DTensor) -> bool {
        leaf.tape().is_some_and(|tape| self.leaves.contains_key(&tape.node.number))
    }

    /// Adds a gradient of zeros for every leaf that has none, in the layout of the leaf: of parameters that the result did not
    /// depend on, such as an expert without tokens, so that weight decay and moments treat them like all parameters. Local.
    ///
    /// Tensors that require no gradient, such as frozen parameters, are skipped.
    #[doc(alias = "find_unused_parameters")]
    pub fn with_zeros(mut self, leaves: impl IntoIterator<Item = DTensor>) -> Result<Gradients> {
        for leaf in leaves {
            let Some(tape) = leaf.tape().filter(|tape| tape.node.is_leaf()) else { continue };
            if let Entry::Vacant(missing) = self.leaves.entry(tape.node.number) {
                let dtype = tape.node.gradient_types.accumulated.unwrap_or(leaf.dtype());
                let zeros = leaf.detach().zeros_like()?.to_dtype(dtype)?;
                missing.insert((Arc::clone(&tape.node), zeros));
            }
        }
        Ok(self)
    }

    /// Number of leaves that have a gradient.
    pub fn len(&self) -> usize {
        self.leaves.len()
    }

    /// Whether no leaf has a gradient.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// Iterates over the gradients, in an order that is the same on all ranks.
    pub fn iter(&self) -> impl Iterator<Item = &DTensor> {
        self.leaves.values().map(|(_, gradient)| gradient)
    }

    /// Replaces every gradient by a function of it, called in the same order on all ranks. The shape must stay the same.
    pub fn map(mut self, mut function: impl FnMut(&DTensor) -> Result<DTensor>) -> Result<Gradients> {
        for (node, gradient) in self.leaves.values_mut() {
            let new = function(gradient)?;
            if new.shape() != node.layout(0).shape() {
                let (found, needed) = (format!("shape {:?}", new.shape()), format!("{:?}", node.layout(0).shape()));
                return Err(ErrorKind::shape(new.shape()).error(
                    "gradient",
                    found,
                    needed,
                    "keep the shape of the leaf",
                ));
            }
            *gradient = new;
        }
        Ok(self)
    }

    /// Splits into the gradients of some leaves and all remaining ones. Local.
    pub fn split(mut self, leaves: &[DTensor]) -> (Gradients, Gradients) {
        let mut chosen = BTreeMap::new();
        for tape in leaves.iter().filter_map(DTensor::tape) {
            chosen.extend(self.leaves.remove_entry(&tape.node.number));
        }
        (Gradients { leaves: chosen }, self)
    }

    /// Removes and returns the gradient of a leaf, if it has one.
    pub(crate) fn take(&mut self, leaf: &DTensor) -> Option<DTensor> {
        self.leaves.remove(&leaf.tape()?.node.number).map(|(_, gradient)| gradient)
    }

    /// Adds the gradients of another backward pass, for gradient accumulation over micro-batches. Partial sums are added without
    /// being reduced.
    #[track_caller]
    pub fn accumulate(mut self, other: Gradients) -> Result<Gradients> {
        for (number, (node, gradient)) in other.leaves {
            let sum = match self.leaves.remove(&number) {
                Some((_, so_far)) => so_far.plus(gradient)?,
                None => gradient,
            };
            self.leaves.insert(number, (node, sum));
        }
        Ok(self)
    }

    /// Multiplies all gradients by a number. Local.
    #[track_caller]
    pub fn scale(mut self, factor: f64) -> Result<Gradients> {
        for (_, gradient) in self.leaves.values_mut() {
            *gradient = gradient.mul_scalar(factor)?;
        }
        Ok(self)
    }

    /// Brings every gradient into the layout of its leaf: partial sums are all-reduced for replicated leaves and
    /// reduce-scattered for sharded ones.
    ///
    /// Collective: every rank of the mesh must call it. Gradients with the same reduction share a collective, in buckets of up to
    /// 25 MiB as in PyTorch's DDP. Gradients of a recorded pass ([`backward_graph`](DTensor::backward_graph)) are moved one by one,
    /// because a bucket has no backward pass.
    #[doc(alias = "reduce_scatter_grads")]
    #[track_caller]
    pub fn in_param_layout(self) -> Result<Gradients> {
        let site = std::panic::Location::caller();
        let wanted: Vec<(DTensor, Layout)> =
            self.leaves.values().map(|(node, g)| (g.clone(), node.layout(0).reduced())).collect();
        // A bucket cannot be differentiated, so gradients that are part of a graph are moved one by one.
        let one_by_one = is_recording() && wanted.iter().any(|(g, _)| g.has_gradient());
        let moved = in_phase(Phase::Backward, || {
            with_reason(&REDUCED_FOR_PARAMETERS, || match one_by_one {
                true => wanted.iter().map(|(g, layout)| g.to_layout_at(layout, site)).collect::<Result<Vec<_>>>(),
                false => Ok(bucket::to_layouts(&wanted, site)?.iter().map(DTensor::detach).collect()),
            })
        })?;
        // What was complete has been rounded when it was. A sum of such gradients, of several micro-batches, stays as it is.
        let rounded = |((number, (node, before)), gradient): ((u64, (Arc<TapeNode>, DTensor)), DTensor)| {
            let gradient = if is_partial(&before) { rounded(gradient, &node)? } else { gradient };
            Ok((number, (node, gradient)))
        };
        Ok(Gradients { leaves: self.leaves.into_iter().zip(moved).map(rounded).collect::<Result<_>>()? })
    }
}

/// Rounds a reduced gradient to the type in which its leaf wants it reduced. Partial sums are rounded after their reduction.
pub(super) fn rounded(gradient: DTensor, leaf: &TapeNode) -> Result<DTensor> {
    let narrower = |dtype: &candle_core::DType| dtype.size_in_bytes() < gradient.dtype().size_in_bytes();
    match leaf.gradient_types.reduced.filter(narrower) {
        Some(dtype) if !is_partial(&gradient) => gradient.to_dtype(dtype)?.to_dtype(gradient.dtype()),
        _ => Ok(gradient),
    }
}

/// Whether ranks hold terms of the gradient.
fn is_partial(gradient: &DTensor) -> bool {
    gradient.placements().iter().any(Placement::is_partial)
}

/// Converts a contribution to the gradient of a leaf to the type in which the leaf adds them up.
pub(super) fn accumulated(gradient: DTensor, leaf: &TapeNode) -> Result<DTensor> {
    match leaf.gradient_types.accumulated {
        Some(dtype) if dtype != gradient.dtype() && !gradient.has_gradient() => gradient.with_terms_as(dtype),
        Some(dtype) => gradient.to_dtype(dtype),
        None => Ok(gradient),
    }
}
