//! Reverse-mode automatic differentiation of distributed tensors: gradients are computed by distributed operators, too.

mod bucket;
mod gradients;
mod checkpoint_activations;
mod jvp;
mod local_map;

pub use checkpoint_activations::checkpoint_activations;
pub use gradients::Gradients;
pub use jvp::jvp;
pub use local_map::local_map;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;
use std::sync::{Arc, LazyLock};

use crate::comm::Phase;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::module_scope::{in_module, in_phase, with_reason};
use crate::placement::{Placement, ReduceOp};
use crate::rank_context::{RankContext, in_scope, rank_context};
use crate::tensor::{DTensor, Recording, SavedTensors, Tape, TapeNode, in_gradient, with_recording};

/// Why the gradient of a leaf is moved during a backward pass, for the trace.
static SHARDED_LIKE_LEAF: LazyLock<Arc<str>> = LazyLock::new(|| {
    "the last use of a sharded parameter has contributed to its gradient, which is sharded like it from here on".into()
});

/// Options of a backward pass; see [`DTensor::backward_with`].
#[derive(Clone, Copy, Default)]
pub struct BackwardOptions<'a> {
    /// The gradient of the tensor itself, of the same shape. `None`: 1, for a tensor with one element.
    #[doc(alias = "grad_tensors")]
    pub cotangent: Option<&'a DTensor>,
    /// Keeps the saved tensors, so that another backward pass can go through the same calls.
    pub retain_graph: bool,
    /// Records the backward pass itself, so that gradients can be differentiated again. Implies `retain_graph`.
    pub create_graph: bool,
    /// Leaves the gradients of sharded leaves as partial sums, as PyTorch's `no_sync` does, instead of reduce-scattering each
    /// when it is complete. [`Gradients::accumulate`] adds such gradients of several micro-batches without communication, and
    /// [`Gradients::in_param_layout`] reduces their sum once. Until then every rank holds gradients of the full size.
    ///
    /// ```
    /// use shardwise::BackwardOptions;
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let w = DTensor::ones((4, 3), DType::F32, &mesh, [Shard(0)])?.requires_grad();
    ///     let x = DTensor::ones((8, 4), DType::F32, &mesh, [Shard(0)])?;
    ///     let no_sync = BackwardOptions { defer_reduction: true, ..Default::default() };
    ///     let first = x.matmul(&w)?.sum_all()?.backward_with(no_sync)?;
    ///     let second = x.matmul(&w)?.sum_all()?.backward_with(no_sync)?;
    ///     let sum = first.accumulate(second)?;
    ///     assert_eq!(sum.get(&w)?.placements(), [Partial(ReduceOp::Sum)]);
    ///     let sum = sum.in_param_layout()?; // one reduce_scatter
    ///     assert_eq!(sum.get(&w)?.full_tensor()?.to_vec2::<f32>()?[3], [16.0; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "no_sync")]
    #[doc(alias = "set_requires_gradient_sync")]
    pub defer_reduction: bool,
    /// Called with the gradient of each leaf, as soon as nothing can be added to it any more; what it returns is kept. It gets
    /// [`Gradients`] with one entry, in the order in which all ranks complete them, so it may communicate. A function that
    /// takes the gradient and returns an empty [`Gradients`] keeps the memory of all other gradients free: an optimizer that
    /// steps in the backward pass ([`ShardedOptimizer::step_in_backward`](crate::ShardedOptimizer::step_in_backward)).
    ///
    /// With [`checkpoint_activations`], gradients are complete when the last recomputed call has been passed.
    #[doc(alias = "register_post_accumulate_grad_hook")]
    #[doc(alias = "register_hook")]
    pub on_gradient: Option<GradientHook<'a>>,
}

/// A function of the gradient of one leaf; see [`BackwardOptions::on_gradient`].
pub type GradientHook<'a> = &'a dyn Fn(Gradients) -> Result<Gradients>;

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
    /// [`Error::Invalid`](crate::Error::Invalid) if the tensor has more than one element, depends on no leaf, or its graph was freed.
    #[doc(alias = "zero_grad")]
    #[track_caller]
    pub fn backward(&self) -> Result<Gradients> {
        self.backward_with(BackwardOptions::default())
    }

    /// Computes gradients as [`backward`](Self::backward) does, for a tensor of any shape and its gradient `cotangent` (the vector
    /// of a vector-Jacobian product). Collective.
    #[track_caller]
    pub fn backward_from(&self, cotangent: &DTensor) -> Result<Gradients> {
        self.backward_with(BackwardOptions { cotangent: Some(cotangent), ..BackwardOptions::default() })
    }

    /// Computes gradients as [`backward`](Self::backward) does and records the pass, so that the gradients can be differentiated
    /// again. The graph is kept. Collective.
    #[doc(alias = "create_graph")]
    #[track_caller]
    pub fn backward_graph(&self) -> Result<Gradients> {
        self.backward_with(BackwardOptions { create_graph: true, ..BackwardOptions::default() })
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
    ///     loss.backward_with(BackwardOptions { retain_graph: true, ..Default::default() })?;
    ///     loss.backward()?;
    ///     assert!(loss.backward().is_err()); // the pass before freed the graph
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn backward_with(&self, options: BackwardOptions<'_>) -> Result<Gradients> {
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
        let pass = || backward_pass(vec![(tape, cotangent)], 0, keep, options.on_gradient);
        let pass = || with_recording(options.create_graph, pass);
        let found = in_phase(Phase::Backward, || deferring_reductions(options.defer_reduction, pass))?;
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
                "reduce it, or use backward_from",
            ));
        }
        let whole = vec![Placement::Replicate; self.placements().len()];
        DTensor::full(1.0, self.shape(), self.dtype(), self.device_mesh(), whole)
    }
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

/// Runs `body` with reductions of the gradients of sharded leaves deferred, in passes through recomputed calls, too.
fn deferring_reductions<R>(on: bool, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| context.is_reduction_deferred.replace(on);
    in_scope(enter, |context, before| context.is_reduction_deferred.set(before), body)
}

/// Counts how often each leaf is used by the calls that a pass goes through, and the calls that recompute. An error if one of
/// these calls was freed: it is detected here, before anything is communicated.
fn count_uses(seeds: &[(Tape, DTensor)], first: u64) -> Result<(BTreeMap<u64, usize>, usize)> {
    let (mut uses, mut recomputing) = (BTreeMap::new(), 0);
    let mut seen = BTreeSet::new();
    let mut open: Vec<Arc<TapeNode>> = seeds.iter().map(|(tape, _)| Arc::clone(&tape.node)).collect();
    while let Some(node) = open.pop() {
        if node.number < first || !seen.insert(node.number) {
            continue;
        }
        let Some(recording) = node.recording()? else { continue };
        recomputing += usize::from(recording.backward.recomputes());
        for parent in recording.parents.iter().flatten() {
            match parent.node.is_leaf() {
                true => *uses.entry(parent.node.number).or_default() += 1,
                false => open.push(Arc::clone(&parent.node)),
            }
        }
    }
    Ok((uses, recomputing))
}

/// Shards a complete gradient like its leaf, so that no rank keeps a whole gradient of a sharded leaf. On mesh axes that shard
/// the leaf, a partial sum is reduce-scattered, and a replicated gradient is sliced, which needs no communication.
fn shard_like_leaf(gradient: DTensor, leaf: &Layout) -> Result<DTensor> {
    let own = gradient.layout().clone();
    let sum = Placement::Partial(ReduceOp::Sum);
    let reduces = !rank_context(|context| context.is_reduction_deferred.get());
    let should_shard = |axis: usize| {
        let now = &own.placements()[axis];
        leaf.placements()[axis].is_shard(None) && (reduces && *now == sum || now.is_replicate())
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
fn backward_pass(
    seeds: Vec<(Tape, DTensor)>,
    first: u64,
    keep: bool,
    hook: Option<GradientHook<'_>>,
) -> Result<PassResult> {
    let (mut uses, mut recomputing) = count_uses(&seeds, first)?;
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
            found.leaves.append(&mut hooked(hook, node, gradient)?);
            continue;
        };
        let sums = take_sums(&recording, &mut open);
        let saved = SavedTensors { node: &node, recording: &recording, sums: RefCell::new(sums) };
        let module = recording.module.clone();
        let inputs = in_module(module.clone(), Location::caller(), || {
            in_gradient(true, || recording.backward.run(&saved, &gradients))
        })?;
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
        recomputing -= usize::from(recording.backward.recomputes());
        if !keep {
            node.free();
        }
        // Dropped before the next call allocates, to lower peak memory.
        drop((recording, gradients));
        for leaf in done {
            let complete = || complete_leaf(&leaf, &mut open, &mut arrived);
            let Some(gradient) = in_module(module.clone(), Location::caller(), complete)? else { continue };
            // A call that recomputes may yet contribute to any leaf.
            if hook.is_some() && recomputing == 0 {
                open.remove(&leaf.number);
                found.leaves.append(&mut hooked(hook, leaf, gradient)?);
            } else {
                arrived.push((Tape { node: leaf, output: 0 }, gradient));
            }
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
        let gradient = gradients::accumulated(gradient, &tape.node)?;
        *slot = Some(match slot.take() {
            Some(sum) => sum.plus(gradient)?,
            None => gradient,
        });
    }
    Ok(())
}

/// Completes the gradient of a leaf to which its last use has contributed: adds the contributions, those in `open` and the new ones
/// in `arrived`, and shards the sum like the leaf.
fn complete_leaf(
    leaf: &Arc<TapeNode>,
    open: &mut OpenCalls,
    arrived: &mut Vec<(Tape, DTensor)>,
) -> Result<Option<DTensor>> {
    let is_own = |(tape, _): &mut (Tape, DTensor)| Arc::ptr_eq(&tape.node, leaf);
    let own: Vec<DTensor> = arrived.extract_if(.., is_own).map(|(_, gradient)| gradient).collect();
    let before = open.get_mut(&leaf.number).and_then(|(_, gradients)| gradients[0].take());
    let own = own.into_iter().map(|gradient| gradients::accumulated(gradient, leaf));
    let Some(sum) = before.into_iter().map(Ok).chain(own).reduce(|a, b| a?.plus(b?)).transpose()? else {
        return Ok(None);
    };
    let gradient = with_reason(&SHARDED_LIKE_LEAF, || shard_like_leaf(sum, leaf.layout(0)))?;
    gradients::rounded(gradient, leaf).map(Some)
}

/// What is kept of the complete gradient of a leaf: all of it, or what the hook returns.
fn hooked(
    hook: Option<GradientHook<'_>>,
    leaf: Arc<TapeNode>,
    gradient: DTensor,
) -> Result<BTreeMap<u64, (Arc<TapeNode>, DTensor)>> {
    let one = BTreeMap::from([(leaf.number, (leaf, gradient))]);
    match hook {
        None => Ok(one),
        Some(hook) => Ok(hook(Gradients { leaves: one })?.leaves),
    }
}
