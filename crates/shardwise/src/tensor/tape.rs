//! How a tensor was made, as far as gradients need it: a graph of calls, each of which knows its way back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use candle_core::DType;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{DTensor, Value};
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::rank_context::{RankContext, in_scope, rank_context};

/// The way back of one call: from gradients of its outputs to gradients of its inputs.
pub trait Backward: Send + Sync {
    /// Name for errors.
    fn name(&self) -> &'static str;

    /// The gradient of every input (`None`: zero, or not wanted), given those of the outputs (`None`: zero).
    fn run(&self, saved: &Saved<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>>;
}

/// Which tensors a call saves for its backward pass, as `ctx.save_for_backward` in PyTorch.
///
/// Saved tensors stay in memory until the backward pass has used them. Of the rest only layout and type are kept.
#[doc(alias = "save_for_backward")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveForBackward {
    /// No tensor: the gradient depends on the gradients of the outputs alone.
    Nothing,
    /// All inputs, in the layouts that they had before the call redistributed them.
    Inputs,
    /// One input, by its position.
    Input(usize),
    /// All outputs.
    Outputs,
    /// All inputs and outputs.
    All,
}

/// Where a tensor comes from: an output of a recorded call, or a leaf.
#[derive(Clone)]
pub(crate) struct Tape {
    pub(crate) node: Arc<Node>,
    pub(crate) output: usize,
}

/// A recorded call or a leaf.
pub(crate) struct Node {
    /// Later calls of a rank have larger numbers.
    pub(crate) number: u64,
    /// Layouts of the outputs; of a leaf, its own.
    outputs: SmallVec<[Layout; 1]>,
    state: Mutex<State>,
}

/// What a node still knows.
enum State {
    Leaf,
    Recorded(Arc<Recording>),
    /// A backward pass went through this call, named here, and freed what it had kept.
    Freed(&'static str),
}

/// What a backward pass needs of a call.
pub(crate) struct Recording {
    /// Per input where it comes from, if it takes part in the gradient. All links to other nodes are here.
    pub(crate) parents: Vec<Option<Tape>>,
    inputs: Vec<Kept>,
    outputs: Vec<Kept>,
    pub(crate) backward: Box<dyn Backward>,
}

/// What is kept of a tensor.
enum Kept {
    Value(Arc<Value>),
    Described { mesh: DeviceMesh, layout: Layout, dtype: DType },
}

impl Kept {
    fn new(tensor: &DTensor, value: bool) -> Self {
        match value {
            true => Kept::Value(Arc::clone(&tensor.value)),
            false => Kept::Described {
                mesh: tensor.device_mesh().clone(),
                layout: tensor.layout().clone(),
                dtype: tensor.dtype(),
            },
        }
    }

    fn layout(&self) -> &Layout {
        match self {
            Kept::Value(value) => &value.layout,
            Kept::Described { layout, .. } => layout,
        }
    }
}

/// One count for all threads: a tensor may be made by one and used by another. Ranks get other numbers, but each rank's own
/// rise in the order of its calls.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// Whether calls are recorded now.
pub(crate) fn is_recording() -> bool {
    !rank_context(|context| context.is_recording_paused.get())
}

/// The number of the next call.
pub(crate) fn next_number() -> u64 {
    NUMBER.load(Relaxed)
}

fn take_number() -> u64 {
    NUMBER.fetch_add(1, Relaxed)
}

/// Runs `body` without recording how tensors are made: what it makes has no gradient.
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

/// Runs `body` with recording on or off, whatever it was.
pub(crate) fn with_recording<R>(on: bool, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| context.is_recording_paused.replace(!on);
    in_scope(enter, |context, before| context.is_recording_paused.set(before), body)
}

/// Whether the gradient of an operator is being computed.
pub(crate) fn is_in_gradient() -> bool {
    rank_context(|context| context.is_in_gradient.get())
}

/// Runs `body` as the gradient of an operator, or as a forward pass inside of one.
pub(crate) fn in_gradient<R>(on: bool, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| context.is_in_gradient.replace(on);
    in_scope(enter, |context, before| context.is_in_gradient.set(before), body)
}

impl DTensor {
    /// The same tensor as a leaf, for which [`backward`](Self::backward) finds a gradient.
    pub fn requires_grad(&self) -> DTensor {
        let outputs = SmallVec::from_elem(self.layout().clone(), 1);
        let node = Node { number: take_number(), outputs, state: Mutex::new(State::Leaf) };
        DTensor { value: Arc::clone(&self.value), tape: Some(Tape { node: Arc::new(node), output: 0 }) }
    }

    /// Whether a gradient can be taken through this tensor.
    pub fn has_gradient(&self) -> bool {
        self.tape.is_some()
    }

    /// The same tensor without its history.
    pub fn detach(&self) -> DTensor {
        DTensor { value: Arc::clone(&self.value), tape: None }
    }

    pub(crate) fn tape(&self) -> Option<&Tape> {
        self.tape.as_ref()
    }

    /// The outputs of a call as tensors that know their way back. Outputs that are not floating-point have none.
    pub(crate) fn recorded(
        outputs: Vec<DTensor>,
        inputs: &[&DTensor],
        saves: SaveForBackward,
        backward: impl FnOnce() -> Box<dyn Backward>,
    ) -> Vec<DTensor> {
        if !is_recording() || inputs.iter().all(|t| t.tape.is_none()) {
            return outputs;
        }
        let input = |i: usize| {
            matches!(saves, SaveForBackward::Inputs | SaveForBackward::All) || saves == SaveForBackward::Input(i)
        };
        let output = matches!(saves, SaveForBackward::Outputs | SaveForBackward::All);
        let recording = Recording {
            parents: inputs.iter().map(|t| t.tape.clone().filter(|_| t.dtype().is_float())).collect(),
            inputs: inputs.iter().enumerate().map(|(i, t)| Kept::new(t, input(i))).collect(),
            outputs: outputs.iter().map(|t| Kept::new(t, output)).collect(),
            backward: backward(),
        };
        let node = Arc::new(Node {
            number: take_number(),
            outputs: outputs.iter().map(|t| t.layout().clone()).collect(),
            state: Mutex::new(State::Recorded(Arc::new(recording))),
        });
        let attach = |(output, tensor): (usize, DTensor)| {
            let tape = tensor.dtype().is_float().then(|| Tape { node: Arc::clone(&node), output });
            DTensor { value: tensor.value, tape }
        };
        outputs.into_iter().enumerate().map(attach).collect()
    }
}

impl Node {
    /// The layout of a leaf or of an output.
    pub(crate) fn layout(&self, output: usize) -> &Layout {
        &self.outputs[output]
    }

    pub(crate) fn outputs(&self) -> usize {
        self.outputs.len()
    }

    pub(crate) fn is_leaf(&self) -> bool {
        matches!(*self.state.lock(), State::Leaf)
    }

    /// What a backward pass needs of this call, `None` for a leaf; an error if an earlier pass freed it.
    pub(crate) fn recording(&self) -> Result<Option<Arc<Recording>>> {
        match &*self.state.lock() {
            State::Leaf => Ok(None),
            State::Recorded(recording) => Ok(Some(Arc::clone(recording))),
            State::Freed(name) => Err(ErrorKind::Gradient.error(
                "graph",
                format!("a second backward pass through {name}, whose saved tensors the first one freed"),
                "a graph that was kept",
                "set retain_graph in the BackwardOptions of all passes but the last, or compute the result again",
            )),
        }
    }

    /// Forgets what was kept for the backward pass.
    pub(crate) fn free(&self) {
        let mut state = self.state.lock();
        if let State::Recorded(recording) = &*state {
            let name = recording.backward.name();
            let freed = std::mem::replace(&mut *state, State::Freed(name));
            // Dropping tensors and links may end in other nodes.
            drop(state);
            drop(freed);
        }
    }
}

/// What is left of a call when its gradient is taken.
pub struct Saved<'a> {
    pub(crate) node: &'a Arc<Node>,
    pub(crate) recording: &'a Recording,
}

impl Saved<'_> {
    /// An input.
    ///
    /// # Panics
    /// If inputs were not to be kept.
    pub fn input(&self, i: usize) -> DTensor {
        let Kept::Value(value) = &self.recording.inputs[i] else { panic!("input {i} is not kept") };
        DTensor { value: Arc::clone(value), tape: self.recording.parents[i].clone() }
    }

    /// An output.
    ///
    /// # Panics
    /// If outputs were not to be kept.
    pub fn output(&self, i: usize) -> DTensor {
        let Kept::Value(value) = &self.recording.outputs[i] else { panic!("output {i} is not kept") };
        DTensor { value: Arc::clone(value), tape: Some(Tape { node: Arc::clone(self.node), output: i }) }
    }

    /// How many inputs the call had.
    pub fn inputs(&self) -> usize {
        self.recording.inputs.len()
    }

    /// Whether the gradient of an input is wanted.
    pub fn wants(&self, i: usize) -> bool {
        self.recording.parents[i].is_some()
    }

    /// How an input lay before the call moved it.
    pub fn layout(&self, i: usize) -> &Layout {
        self.recording.inputs[i].layout()
    }

    /// The shape of an input.
    pub fn shape(&self, i: usize) -> &[usize] {
        self.layout(i).shape()
    }

    /// The element type of an input.
    pub fn dtype(&self, i: usize) -> DType {
        match &self.recording.inputs[i] {
            Kept::Value(value) => value.dtype,
            Kept::Described { dtype, .. } => *dtype,
        }
    }

    /// The mesh of an input.
    pub fn mesh(&self, i: usize) -> &DeviceMesh {
        match &self.recording.inputs[i] {
            Kept::Value(value) => &value.mesh,
            Kept::Described { mesh, .. } => mesh,
        }
    }
}

impl Drop for Recording {
    /// A long chain is taken apart link by link: each dropping the next would need as much stack.
    fn drop(&mut self) {
        let mut links: Vec<Tape> = self.parents.drain(..).flatten().collect();
        while let Some(tape) = links.pop() {
            let state = Arc::into_inner(tape.node).map(|node| node.state.into_inner());
            if let Some(State::Recorded(recording)) = state
                && let Some(mut recording) = Arc::into_inner(recording)
            {
                links.extend(recording.parents.drain(..).flatten());
            }
        }
    }
}
