//! The tape of autograd: a graph of recorded calls, each with its backward pass.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use candle_core::DType;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::module_scope::current_path;
use crate::rank_context::{RankContext, in_scope, rank_context};
use crate::tensor::{DTensor, TensorValue};

/// The backward pass of one recorded call: from the gradients of its outputs to those of its inputs.
pub trait Backward: Send + Sync {
    /// Name of the call, for errors.
    fn name(&self) -> &'static str;

    /// Computes the gradient of every input (`None`: zero, or not [needed](SavedTensors::needs_input_grad)) from those of the
    /// outputs (`None`: zero). Every rank runs the same backward passes in the same order, so it may communicate.
    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>>;

    /// Whether it runs a forward pass again, so that leaves that are not inputs of the call may get gradients, too.
    fn recomputes(&self) -> bool {
        false
    }
}

/// The backward pass of a call whose output is its input in another layout or type: the gradient is that of the input, in any
/// layout and type.
pub(crate) struct PassGradient(pub(crate) &'static str);

impl Backward for PassGradient {
    fn name(&self) -> &'static str {
        self.0
    }

    fn run(&self, _: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        Ok(vec![gradients[0].clone()])
    }
}

/// Which tensors a call saves for its backward pass, as `ctx.save_for_backward` in PyTorch.
///
/// Saved tensors stay in memory until the backward pass has used them. Of the rest only layout and type are kept.
#[doc(alias = "save_for_backward")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveForBackward {
    /// No tensor: the gradient depends only on the gradients of the outputs.
    Nothing,
    /// All inputs, in the layouts that they had before the call redistributed them.
    Inputs,
    /// One input, by its position.
    Input(usize),
    /// All outputs.
    Outputs,
    /// All inputs and outputs.
    All,
    /// Some inputs and some outputs, by their positions.
    Only {
        /// Positions of inputs; a position beyond the last input is ignored.
        inputs: &'static [usize],
        /// Positions of outputs.
        outputs: &'static [usize],
    },
}

impl SaveForBackward {
    fn saves_input(self, i: usize) -> bool {
        match self {
            SaveForBackward::Nothing | SaveForBackward::Outputs => false,
            SaveForBackward::Inputs | SaveForBackward::All => true,
            SaveForBackward::Input(saved) => saved == i,
            SaveForBackward::Only { inputs, .. } => inputs.contains(&i),
        }
    }

    fn saves_output(self, i: usize) -> bool {
        match self {
            SaveForBackward::Nothing | SaveForBackward::Inputs | SaveForBackward::Input(_) => false,
            SaveForBackward::Outputs | SaveForBackward::All => true,
            SaveForBackward::Only { outputs, .. } => outputs.contains(&i),
        }
    }
}

/// The place of a tensor in the graph: an output of a recorded call, or a leaf.
#[derive(Clone)]
pub(crate) struct Tape {
    pub(crate) node: Arc<TapeNode>,
    pub(crate) output: usize,
}

/// A recorded call or a leaf.
pub(crate) struct TapeNode {
    /// Increases with every call of a rank, so that a backward pass can visit later calls first.
    pub(crate) number: u64,
    /// Layouts of the outputs; a leaf is its own output.
    outputs: SmallVec<[Layout; 1]>,
    /// Types of the gradient of a leaf.
    pub(crate) gradient_types: GradientTypes,
    state: Mutex<NodeState>,
}

/// Types of the gradient of a leaf; `None` leaves the type that the operators gave it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct GradientTypes {
    /// The type in which contributions are added up and returned.
    pub(crate) accumulated: Option<DType>,
    /// The type to which the reduced gradient is rounded, before it is converted back.
    pub(crate) reduced: Option<DType>,
}

/// What a node still holds for the backward pass.
enum NodeState {
    Leaf,
    Recorded(Arc<Recording>),
    /// A backward pass went through this call, of this name, and freed its saved tensors.
    Freed(&'static str),
}

/// What the backward pass of a call needs.
pub(crate) struct Recording {
    /// Per input its place in the graph, if it needs a gradient. These are the only links to other nodes, so that a long chain
    /// can be dropped without recursion.
    pub(crate) parents: Vec<Option<Tape>>,
    inputs: Vec<RecordedTensor>,
    outputs: Vec<RecordedTensor>,
    pub(crate) backward: Box<dyn Backward>,
    /// Path of the module that made the call, for the trace of the backward pass.
    pub(crate) module: Option<Arc<str>>,
}

/// An input or output of a recorded call: saved, or only described.
enum RecordedTensor {
    Saved(Arc<TensorValue>),
    Described { mesh: DeviceMesh, layout: Layout, dtype: DType },
}

impl RecordedTensor {
    fn new(tensor: &DTensor, value: bool) -> Self {
        match value {
            true => RecordedTensor::Saved(Arc::clone(&tensor.value)),
            false => RecordedTensor::Described {
                mesh: tensor.device_mesh().clone(),
                layout: tensor.layout().clone(),
                dtype: tensor.dtype(),
            },
        }
    }

    fn layout(&self) -> &Layout {
        match self {
            RecordedTensor::Saved(value) => &value.layout,
            RecordedTensor::Described { layout, .. } => layout,
        }
    }
}

/// The number of the next node. One counter for all threads, because a tensor may be created by one thread and used by another.
/// Ranks get different numbers, but those of each rank increase in the order of its calls. 0 is not a number: [`constants_before`].
static NUMBER: AtomicU64 = AtomicU64::new(1);

/// Whether calls are being recorded, that is outside of [`no_grad`].
pub(crate) fn is_recording() -> bool {
    !rank_context(|context| context.is_recording_paused.get())
}

/// The number that the next recorded call will get.
pub(crate) fn next_number() -> u64 {
    NUMBER.load(Relaxed)
}

fn take_number() -> u64 {
    NUMBER.fetch_add(1, Relaxed)
}

/// Runs `body` without recording calls for the backward pass: its results have no gradient and save no tensors. Local.
///
/// ```
/// use shardwise::prelude::*;
/// use shardwise::no_grad;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let w = DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?.requires_grad();
///     assert!(w.exp()?.has_gradient());
///     assert!(!no_grad(|| w.exp())?.has_gradient());
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub fn no_grad<R>(body: impl FnOnce() -> R) -> R {
    with_recording(false, body)
}

/// Runs `body` with recording on or off.
pub(crate) fn with_recording<R>(on: bool, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| context.is_recording_paused.replace(!on);
    in_scope(enter, |context, before| context.is_recording_paused.set(before), body)
}

/// Whether the backward pass of an operator is running.
pub(crate) fn is_in_gradient() -> bool {
    rank_context(|context| context.is_in_gradient.get())
}

/// Runs `body` as the backward pass of an operator, or (`on` is false) as a forward pass inside of one.
pub(crate) fn in_gradient<R>(on: bool, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| context.is_in_gradient.replace(on);
    in_scope(enter, |context, before| context.is_in_gradient.set(before), body)
}

/// Whether a backward pass is recorded as a function of only the gradients that arrive: saved tensors are constants in it.
pub(crate) fn is_linearizing() -> bool {
    rank_context(|context| context.is_linearizing.get())
}

/// Runs `body` with tensors that were recorded before the call of a number, parameters included, as constants.
pub(crate) fn with_constants_before<R>(number: u64, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| context.constants_before.replace(number);
    in_scope(enter, |context, before| context.constants_before.set(before), body)
}

/// The number before which tensors are constants; 0 outside of [`with_constants_before`].
pub(crate) fn constants_before() -> u64 {
    rank_context(|context| context.constants_before.get())
}

/// Runs `body`, a recorded backward pass, with saved tensors as constants.
pub(crate) fn linearizing<R>(body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| context.is_linearizing.replace(true);
    in_scope(enter, |context, before| context.is_linearizing.set(before), body)
}

impl DTensor {
    /// Returns this tensor as a new leaf, for which [`backward`](Self::backward) computes a gradient.
    ///
    /// Local, no copy. Unlike PyTorch's `requires_grad_` it does not change `self`: keep the result, which is the key for
    /// [`Gradients::get`](crate::Gradients::get).
    #[doc(alias = "requires_grad_")]
    pub fn requires_grad(&self) -> DTensor {
        self.requires_grad_in(GradientTypes::default())
    }

    /// As [`requires_grad`](Self::requires_grad), with the types of the gradient.
    pub(crate) fn requires_grad_in(&self, gradient_types: GradientTypes) -> DTensor {
        let outputs = SmallVec::from_elem(self.layout().clone(), 1);
        let node = TapeNode { number: take_number(), outputs, gradient_types, state: Mutex::new(NodeState::Leaf) };
        DTensor { value: Arc::clone(&self.value), tape: Some(Tape { node: Arc::new(node), output: 0 }) }
    }

    /// Whether this tensor is a leaf or was computed from one, so that [`backward`](Self::backward) can pass through it.
    pub fn has_gradient(&self) -> bool {
        self.tape.is_some()
    }

    /// Returns this tensor without its place in the autograd graph. Local, no copy.
    pub fn detach(&self) -> DTensor {
        DTensor { value: Arc::clone(&self.value), tape: None }
    }

    pub(crate) fn tape(&self) -> Option<&Tape> {
        self.tape.as_ref()
    }

    /// Records a call and returns its outputs with their place in the graph. Outputs of integer types have none.
    pub(crate) fn recorded(
        outputs: Vec<DTensor>,
        inputs: &[&DTensor],
        saves: SaveForBackward,
        backward: impl FnOnce() -> Box<dyn Backward>,
    ) -> Vec<DTensor> {
        let first = constants_before();
        let place = |t: &&DTensor| t.tape.clone().filter(|tape| t.dtype().is_float() && tape.node.number >= first);
        if !is_recording() || inputs.iter().all(|t| t.tape.as_ref().is_none_or(|tape| tape.node.number < first)) {
            return outputs;
        }
        let recording = Recording {
            parents: inputs.iter().map(place).collect(),
            inputs: inputs.iter().enumerate().map(|(i, t)| RecordedTensor::new(t, saves.saves_input(i))).collect(),
            outputs: outputs.iter().enumerate().map(|(i, t)| RecordedTensor::new(t, saves.saves_output(i))).collect(),
            backward: backward(),
            module: current_path(),
        };
        let node = Arc::new(TapeNode {
            number: take_number(),
            outputs: outputs.iter().map(|t| t.layout().clone()).collect(),
            gradient_types: GradientTypes::default(),
            state: Mutex::new(NodeState::Recorded(Arc::new(recording))),
        });
        let attach = |(output, tensor): (usize, DTensor)| {
            let tape = tensor.dtype().is_float().then(|| Tape { node: Arc::clone(&node), output });
            DTensor { value: tensor.value, tape }
        };
        outputs.into_iter().enumerate().map(attach).collect()
    }
}

impl TapeNode {
    /// The layout of a leaf or of an output.
    pub(crate) fn layout(&self, output: usize) -> &Layout {
        &self.outputs[output]
    }

    pub(crate) fn outputs(&self) -> usize {
        self.outputs.len()
    }

    pub(crate) fn is_leaf(&self) -> bool {
        matches!(*self.state.lock(), NodeState::Leaf)
    }

    /// The recording of this call, `None` for a leaf; an error if an earlier backward pass freed it.
    pub(crate) fn recording(&self) -> Result<Option<Arc<Recording>>> {
        match &*self.state.lock() {
            NodeState::Leaf => Ok(None),
            NodeState::Recorded(recording) => Ok(Some(Arc::clone(recording))),
            NodeState::Freed(name) => Err(ErrorKind::Gradient.error(
                "graph",
                format!("a second backward pass through {name}, whose saved tensors the first one freed"),
                "a graph that was kept",
                "set retain_graph in the BackwardOptions of all passes but the last, or compute the result again",
            )),
        }
    }

    /// Drops what was saved for the backward pass.
    pub(crate) fn free(&self) {
        let mut state = self.state.lock();
        if let NodeState::Recorded(recording) = &*state {
            let name = recording.backward.name();
            let freed = std::mem::replace(&mut *state, NodeState::Freed(name));
            // Unlocked first: dropping the saved tensors may drop and lock other nodes.
            drop(state);
            drop(freed);
        }
    }
}

/// The saved tensors of a recorded call, and the layouts of tensors that were not saved. PyTorch's `ctx`.
#[doc(alias = "ctx")]
#[doc(alias = "saved_tensors")]
pub struct SavedTensors<'a> {
    pub(crate) node: &'a Arc<TapeNode>,
    pub(crate) recording: &'a Recording,
    /// Per input the sum of the gradients that it has from later calls, if any.
    pub(crate) sums: RefCell<Vec<Option<DTensor>>>,
}

impl SavedTensors<'_> {
    /// Returns a saved input in the layout it had before the call redistributed it.
    ///
    /// # Panics
    /// If the operator did not ask to save it.
    pub fn input(&self, i: usize) -> DTensor {
        let RecordedTensor::Saved(value) = &self.recording.inputs[i] else { panic!("input {i} is not saved") };
        let tape = self.recording.parents[i].clone().filter(|_| !is_linearizing());
        DTensor { value: Arc::clone(value), tape }
    }

    /// Returns a saved output.
    ///
    /// # Panics
    /// If the operator did not ask to save it.
    pub fn output(&self, i: usize) -> DTensor {
        let RecordedTensor::Saved(value) = &self.recording.outputs[i] else { panic!("output {i} is not saved") };
        let tape = (!is_linearizing()).then(|| Tape { node: Arc::clone(self.node), output: i });
        DTensor { value: Arc::clone(value), tape }
    }

    /// Number of inputs of the call.
    pub fn num_inputs(&self) -> usize {
        self.recording.inputs.len()
    }

    /// Calls `body` with the sum of the gradients that an input has from later calls. A body that takes the sum adds it to the
    /// gradient that it returns, in one pass over memory.
    pub(crate) fn with_sum<R>(&self, i: usize, body: impl FnOnce(&mut Option<DTensor>) -> R) -> R {
        let mut sum = self.sums.borrow_mut()[i].take();
        let result = body(&mut sum);
        self.sums.borrow_mut()[i] = sum;
        result
    }

    /// Whether the gradient of an input is needed; if not, skip computing it.
    pub fn needs_input_grad(&self, i: usize) -> bool {
        self.recording.parents[i].is_some()
    }

    /// The layout of an input before the call redistributed it, saved or not.
    pub fn layout(&self, i: usize) -> &Layout {
        self.recording.inputs[i].layout()
    }

    /// The shape of an input, saved or not.
    pub fn shape(&self, i: usize) -> &[usize] {
        self.layout(i).shape()
    }

    /// The element type of an input, saved or not.
    pub fn dtype(&self, i: usize) -> DType {
        match &self.recording.inputs[i] {
            RecordedTensor::Saved(value) => value.dtype,
            RecordedTensor::Described { dtype, .. } => *dtype,
        }
    }

    /// The mesh of an input, saved or not.
    pub fn mesh(&self, i: usize) -> &DeviceMesh {
        match &self.recording.inputs[i] {
            RecordedTensor::Saved(value) => &value.mesh,
            RecordedTensor::Described { mesh, .. } => mesh,
        }
    }
}

impl Drop for Recording {
    /// Drops a long chain link by link: dropping each from within the previous one would overflow the stack.
    fn drop(&mut self) {
        let mut links: Vec<Tape> = self.parents.drain(..).flatten().collect();
        while let Some(tape) = links.pop() {
            let state = Arc::into_inner(tape.node).map(|node| node.state.into_inner());
            if let Some(NodeState::Recorded(recording)) = state
                && let Some(mut recording) = Arc::into_inner(recording)
            {
                links.extend(recording.parents.drain(..).flatten());
            }
        }
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
