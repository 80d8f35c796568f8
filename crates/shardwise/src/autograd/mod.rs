//! Reverse-mode automatic differentiation of distributed tensors: gradients are computed by distributed operators, too.

mod bucket;
mod checkpoint_activations;
mod local_map;

pub use checkpoint_activations::checkpoint_activations;
pub use local_map::local_map;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::layout::Layout;
use crate::placement::{Placement, ReduceOp};
use crate::rank_context::rank_context;
use crate::tensor::{DTensor, Recording, SavedTensors, Tape, TapeNode, in_gradient, is_recording, with_recording};

/// Options of a backward pass; see [`DTensor::backward_options`].
#[derive(Clone, Copy, Default)]
pub struct BackwardOptions<'a> {
    /// The gradient of the tensor itself, of the same shape. `None`: 1, for a tensor with one element.
    #[doc(alias = "grad_tensors")]
    pub cotangent: Option<&'a DTensor>,
    /// Keeps the saved tensors, so that another backward pass can go through the same calls.
    pub retain_graph: bool,
    /// Records the backward pass itself, so that gradients can be differentiated again. Implies `retain_graph`.
    pub create_graph: bool,
}

/// The gradients of the leaves that a result depends on, as [`DTensor::backward`] returns them.
///
/// Unlike PyTorch's they are not stored in the leaves. A gradient has the layout that the operators gave it, often a partial sum
/// (`Partial(Sum)`), which is reduced once, when it is needed: [`in_param_layout`](Self::in_param_layout) does so for all.
pub struct Gradients {
    /// By number of the leaf, so that all ranks iterate in the same order.
    leaves: BTreeMap<u64, (Arc<TapeNode>, DTensor)>,
}

impl std::fmt::Debug for Gradients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.leaves.values().map(|(_, gradient)| gradient.layout().to_string())).finish()
    }
}

impl DTensor {
    /// Computes the gradients of this tensor, which must have one element, with respect to every leaf that it depends on (see
    /// [`requires_grad`](Self::requires_grad)).
    ///
    /// Collective: every rank of the mesh must call it. Communicates what the gradients of the operators need. Frees the saved
    /// tensors of every call that it has passed, even if the result is still alive: a second pass through the same calls is an
    /// error, unless [`retain_graph`](BackwardOptions::retain_graph) was set for the first.
    ///
    /// ```
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let x = DTensor::ones((4, 3), DType::F32, &mesh, [Shard(0)])?;
    ///     let w = DTensor::ones((3, 2), DType::F32, &mesh, [Replicate])?.requires_grad();
    ///     let grads = x.matmul(&w)?.sum_all()?.backward()?;
    ///     // every rank has the term of its rows; nothing was communicated
    ///     assert_eq!(grads.get(&w)?.placements(), [Partial(ReduceOp::Sum)]);
    ///     assert_eq!(grads.get(&w)?.full_tensor()?.to_vec2::<f32>()?, [[4.0, 4.0], [4.0, 4.0], [4.0, 4.0]]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if the tensor has more than one element, depends on no leaf, or its graph was freed.
    #[track_caller]
    pub fn backward(&self) -> Result<Gradients> {
        self.backward_options(BackwardOptions::default())
    }

    /// Computes gradients as [`backward`](Self::backward) does, for a tensor of any shape and its gradient `cotangent` (the vector
    /// of a vector-Jacobian product). Collective.
    #[track_caller]
    pub fn backward_with(&self, cotangent: &DTensor) -> Result<Gradients> {
        self.backward_options(BackwardOptions { cotangent: Some(cotangent), ..BackwardOptions::default() })
    }

    /// Computes gradients as [`backward`](Self::backward) does and records the pass, so that the gradients can be differentiated
    /// again. The graph is kept. Collective.
    #[doc(alias = "create_graph")]
    #[track_caller]
    pub fn backward_graph(&self) -> Result<Gradients> {
        self.backward_options(BackwardOptions { create_graph: true, ..BackwardOptions::default() })
    }

    /// Computes gradients as [`backward`](Self::backward) does, with options. Collective.
    ///
    /// ```
    /// use shardwise::BackwardOptions;
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let w = DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?.requires_grad();
    ///     let loss = w.exp()?.sum_all()?;
    ///     loss.backward_options(BackwardOptions { retain_graph: true, ..Default::default() })?;
    ///     loss.backward()?;
    ///     assert!(loss.backward().is_err()); // the pass before freed the graph
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn backward_options(&self, options: BackwardOptions<'_>) -> Result<Gradients> {
        let cotangent = match options.cotangent {
            None => self.one()?,
            Some(given) if given.shape() == self.shape() && given.device_mesh() == self.device_mesh() => {
                given.to_dtype(self.dtype())?
            }
            Some(given) => {
                let found = format!("{} for {}", given.layout(), self.layout());
                return Err(ErrorKind::shape(given.shape()).error(
                    "cotangent",
                    found,
                    "one of the same shape on the same mesh",
                    "reshape it",
                ));
            }
        };
        let tape = self.taped()?.clone();
        let keep = options.retain_graph || options.create_graph;
        let found = with_recording(options.create_graph, || backward_pass(vec![(tape, cotangent)], 0, keep))?;
        Ok(Gradients { leaves: found.leaves })
    }

    fn taped(&self) -> Result<&Tape> {
        self.tape().ok_or_else(|| {
            ErrorKind::Gradient.error(
                "gradient",
                format!("{}, which depends on no leaf", self.layout()),
                "a result of operators on tensors that require a gradient",
                "call requires_grad() on the parameters, and backward() outside no_grad",
            )
        })
    }

    /// The number 1 in the shape of this tensor, which must have one element.
    #[track_caller]
    fn one(&self) -> Result<DTensor> {
        if self.elem_count() != 1 {
            let found = format!("backward of {}", self.layout());
            return Err(ErrorKind::shape(self.shape()).error(
                "result",
                found,
                "a single number",
                "reduce it, or use backward_with",
            ));
        }
        let whole = vec![Placement::Replicate; self.placements().len()];
        DTensor::full(1.0, (self.shape(), self.dtype()), self.device_mesh(), whole)
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
        let moved = match is_recording() && wanted.iter().any(|(g, _)| g.has_gradient()) {
            true => wanted.iter().map(|(g, layout)| g.to_layout_at(layout, site)).collect::<Result<Vec<_>>>()?,
            false => bucket::to_layouts(&wanted, site)?.iter().map(DTensor::detach).collect(),
        };
        let leaves = self.leaves.into_iter().zip(moved).map(|((number, (node, _)), g)| (number, (node, g)));
        Ok(Gradients { leaves: leaves.collect() })
    }
}

/// Refuses a recorded backward pass, for calls whose gradient cannot be differentiated again.
pub(crate) fn first_derivative_only(name: &str) -> Result<()> {
    if !is_recording() {
        return Ok(());
    }
    let found = format!("the gradient of the gradient of {name}");
    Err(ErrorKind::Gradient.error(
        "gradient",
        found,
        "a first derivative",
        "use backward, or operators with second derivatives",
    ))
}

/// The gradients at which one backward pass ended.
struct PassResult {
    leaves: BTreeMap<u64, (Arc<TapeNode>, DTensor)>,
    /// Gradients of outputs of calls before the first one that the pass goes through.
    earlier: Vec<(Tape, DTensor)>,
}

/// Gradients of tensors that a checkpointed function captured instead of taking them as inputs.
type Replayed = Vec<(Tape, DTensor)>;

/// The leaves for which this call was the last one to contribute a gradient: no earlier call uses them.
fn finished_leaves(recording: &Recording, uses: &mut BTreeMap<u64, usize>) -> Vec<Arc<TapeNode>> {
    let mut leaves = Vec::new();
    for parent in recording.parents.iter().flatten() {
        if let Some(left) = uses.get_mut(&parent.node.number) {
            *left -= 1;
            if *left == 0 {
                leaves.push(Arc::clone(&parent.node));
            }
        }
    }
    leaves
}

/// Counts how often each leaf is used by the calls that a pass goes through. An error if one of these calls was freed: it is
/// detected here, before anything is communicated.
fn count_uses(seeds: &[(Tape, DTensor)], first: u64) -> Result<BTreeMap<u64, usize>> {
    let mut uses = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let mut open: Vec<Arc<TapeNode>> = seeds.iter().map(|(tape, _)| Arc::clone(&tape.node)).collect();
    while let Some(node) = open.pop() {
        if node.number < first || !seen.insert(node.number) {
            continue;
        }
        let Some(recording) = node.recording()? else { continue };
        for parent in recording.parents.iter().flatten() {
            match parent.node.is_leaf() {
                true => *uses.entry(parent.node.number).or_default() += 1,
                false => open.push(Arc::clone(&parent.node)),
            }
        }
    }
    Ok(uses)
}

/// Shards a complete gradient like its leaf, so that no rank keeps a whole gradient of a sharded leaf. On mesh axes that shard
/// the leaf, a partial sum is reduce-scattered, and a replicated gradient is sliced, which needs no communication.
fn shard_like_leaf(gradient: DTensor, leaf: &Layout) -> Result<DTensor> {
    let own = gradient.layout().clone();
    let sum = Placement::Partial(ReduceOp::Sum);
    let should_shard = |axis: usize| {
        let now = &own.placements()[axis];
        leaf.placements()[axis].is_shard(None) && (*now == sum || now.is_replicate())
    };
    let axes: Vec<usize> = (0..own.mesh().ndim()).filter(|&axis| should_shard(axis)).collect();
    if axes.is_empty() {
        return Ok(gradient);
    }
    let mut placements = own.placements().to_vec();
    axes.iter().for_each(|&axis| placements[axis] = leaf.placements()[axis].clone());
    let order = |dim: usize| {
        let leading = leaf.shard_order(dim).iter().copied();
        let other = own.shard_order(dim).iter().copied().filter(|a| !leaf.shard_order(dim).contains(a));
        leading.chain(other).filter(|&a| placements[a].is_shard(Some(dim))).collect::<Vec<_>>()
    };
    let cuts: Vec<Vec<usize>> = (0..own.shape().len()).map(order).collect();
    let to = Layout::from_shard_orders(own.mesh(), own.shape(), &placements, &cuts).unwrap_or_else(|_| leaf.reduced());
    gradient.to_layout(&to)
}

/// Runs a backward pass from `seeds`, later calls first, so that all uses of an output have contributed when its call is reached.
/// Stops at calls before number `first`. Frees every call it has passed, unless `keep` is set.
fn backward_pass(seeds: Vec<(Tape, DTensor)>, first: u64, keep: bool) -> Result<PassResult> {
    let mut uses = count_uses(&seeds, first)?;
    let mut open = OpenCalls::new();
    let mut found = PassResult { leaves: BTreeMap::new(), earlier: Vec::new() };
    let mut arrived = seeds;
    loop {
        add_up(&mut open, &mut arrived)?;
        let Some((number, (node, mut gradients))) = open.pop_last() else { return Ok(found) };
        if number < first {
            let each = gradients.into_iter().enumerate();
            let earlier = each.filter_map(|(output, g)| Some((Tape { node: Arc::clone(&node), output }, g?)));
            found.earlier.extend(earlier);
            continue;
        }
        let Some(recording) = node.recording()? else {
            let gradient = gradients.swap_remove(0).expect("something arrived");
            found.leaves.insert(number, (node, gradient));
            continue;
        };
        let sums = take_sums(&recording, &mut open);
        let saved = SavedTensors { node: &node, recording: &recording, sums: RefCell::new(sums) };
        let inputs = in_gradient(true, || recording.backward.run(&saved, &gradients))?;
        debug_assert_eq!(inputs.len(), recording.parents.len(), "{}", recording.backward.name());
        // Sums that were not added to a gradient come before it.
        for (parent, sum) in recording.parents.iter().zip(saved.sums.take()) {
            arrived.extend(parent.clone().zip(sum));
        }
        for (i, (parent, gradient)) in recording.parents.iter().zip(inputs).enumerate() {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                debug_assert_eq!(gradient.shape(), saved.shape(i), "input {i} of {}", recording.backward.name());
                arrived.push((parent.clone(), gradient));
            }
        }
        let done = finished_leaves(&recording, &mut uses);
        if !keep {
            node.free();
        }
        // Dropped before the next call allocates, to lower peak memory.
        drop((recording, gradients));
        for leaf in done {
            complete_leaf(leaf, &mut open, &mut arrived)?;
        }
        arrived.append(&mut rank_context(|context| context.replayed_gradients.replace(Replayed::new())));
    }
}

/// Calls whose outputs have gradients and whose backward pass has not run, by number, with these gradients so far.
type OpenCalls = BTreeMap<u64, (Arc<TapeNode>, Vec<Option<DTensor>>)>;

/// Takes the sums of the gradients that the inputs of a call have so far, so that its backward pass can add to them in place.
fn take_sums(recording: &Recording, open: &mut OpenCalls) -> Vec<Option<DTensor>> {
    let mut take = |parent: &Tape| open.get_mut(&parent.node.number)?.1[parent.output].take();
    recording.parents.iter().map(|parent| take(parent.as_ref()?)).collect()
}

/// Adds new gradients to those of the same outputs.
fn add_up(open: &mut OpenCalls, arrived: &mut Vec<(Tape, DTensor)>) -> Result<()> {
    for (tape, gradient) in arrived.drain(..) {
        let new = || (Arc::clone(&tape.node), vec![None; tape.node.outputs()]);
        let (_, gradients) = open.entry(tape.node.number).or_insert_with(new);
        let slot = &mut gradients[tape.output];
        *slot = Some(match slot.take() {
            Some(sum) => sum.plus(gradient)?,
            None => gradient,
        });
    }
    Ok(())
}

/// Completes the gradient of a leaf to which its last use has contributed: adds the contributions, those in `open` and the new ones
/// in `arrived`, and shards the sum like the leaf.
fn complete_leaf(leaf: Arc<TapeNode>, open: &mut OpenCalls, arrived: &mut Vec<(Tape, DTensor)>) -> Result<()> {
    let is_own = |(tape, _): &mut (Tape, DTensor)| Arc::ptr_eq(&tape.node, &leaf);
    let own: Vec<DTensor> = arrived.extract_if(.., is_own).map(|(_, gradient)| gradient).collect();
    let before = open.get_mut(&leaf.number).and_then(|(_, gradients)| gradients[0].take());
    let Some(sum) = before.into_iter().chain(own).map(Ok).reduce(|a, b| a?.plus(b?)).transpose()? else {
        return Ok(());
    };
    let gradient = shard_like_leaf(sum, leaf.layout(0))?;
    arrived.push((Tape { node: leaf, output: 0 }, gradient));
    Ok(())
}
