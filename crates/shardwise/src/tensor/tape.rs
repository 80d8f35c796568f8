//! How a tensor was made, as far as gradients need it: a graph of calls, each of which knows its way back.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use candle_core::DType;

use super::{DTensor, Value};
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::layout::Layout;

/// The way back of one call: from gradients of its outputs to gradients of its inputs.
pub trait Backward: Send + Sync {
    /// Name for errors.
    fn name(&self) -> &'static str;

    /// The gradient of every input (`None`: zero, or not wanted), given those of the outputs (`None`: zero).
    fn run(&self, saved: &Saved<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>>;
}

/// Which tensors of a call its gradient needs; of the others only the layout is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeps {
    /// None.
    Nothing,
    /// The inputs, as they lay before the call moved them.
    Inputs,
    /// One of the inputs.
    Input(usize),
    /// The outputs.
    Outputs,
    /// Both.
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
    /// Per input where it comes from, if it takes part in the gradient. All links to other nodes are here.
    pub(crate) parents: Vec<Option<Tape>>,
    inputs: Vec<Kept>,
    /// Of a leaf: itself, described.
    outputs: Vec<Kept>,
    /// Nothing for a leaf.
    pub(crate) backward: Option<Box<dyn Backward>>,
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

thread_local! {
    static PAUSED: Cell<usize> = const { Cell::new(0) };
}

/// Whether calls are recorded now.
pub(crate) fn is_recording() -> bool {
    PAUSED.get() == 0
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
    /// Also when the body panics.
    struct Restore(usize);
    impl Drop for Restore {
        fn drop(&mut self) {
            PAUSED.set(self.0);
        }
    }
    let _restore = Restore(PAUSED.replace(usize::from(!on)));
    body()
}

impl DTensor {
    /// The same tensor as a leaf, for which [`backward`](Self::backward) finds a gradient.
    pub fn requires_grad(&self) -> DTensor {
        let outputs = vec![Kept::new(self, false)];
        let node = Node { number: take_number(), parents: Vec::new(), inputs: Vec::new(), outputs, backward: None };
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
        keeps: Keeps,
        backward: impl FnOnce() -> Box<dyn Backward>,
    ) -> Vec<DTensor> {
        if !is_recording() || inputs.iter().all(|t| t.tape.is_none()) {
            return outputs;
        }
        let input = |i: usize| matches!(keeps, Keeps::Inputs | Keeps::All) || keeps == Keeps::Input(i);
        let output = matches!(keeps, Keeps::Outputs | Keeps::All);
        let node = Arc::new(Node {
            number: take_number(),
            parents: inputs.iter().map(|t| t.tape.clone().filter(|_| t.dtype().is_float())).collect(),
            inputs: inputs.iter().enumerate().map(|(i, t)| Kept::new(t, input(i))).collect(),
            outputs: outputs.iter().map(|t| Kept::new(t, output)).collect(),
            backward: Some(backward()),
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
        self.outputs[output].layout()
    }

    pub(crate) fn outputs(&self) -> usize {
        self.outputs.len()
    }
}

/// What is left of a call when its gradient is taken.
pub struct Saved<'a>(pub(crate) &'a Arc<Node>);

impl Saved<'_> {
    /// An input.
    ///
    /// # Panics
    /// If inputs were not to be kept.
    pub fn input(&self, i: usize) -> DTensor {
        let Kept::Value(value) = &self.0.inputs[i] else { panic!("input {i} is not kept") };
        DTensor { value: Arc::clone(value), tape: self.0.parents[i].clone() }
    }

    /// An output.
    ///
    /// # Panics
    /// If outputs were not to be kept.
    pub fn output(&self, i: usize) -> DTensor {
        let Kept::Value(value) = &self.0.outputs[i] else { panic!("output {i} is not kept") };
        DTensor { value: Arc::clone(value), tape: Some(Tape { node: Arc::clone(self.0), output: i }) }
    }

    /// How many inputs the call had.
    pub fn inputs(&self) -> usize {
        self.0.inputs.len()
    }

    /// Whether the gradient of an input is wanted.
    pub fn wants(&self, i: usize) -> bool {
        self.0.parents[i].is_some()
    }

    /// How an input lay before the call moved it.
    pub fn layout(&self, i: usize) -> &Layout {
        self.0.inputs[i].layout()
    }

    /// The shape of an input.
    pub fn shape(&self, i: usize) -> &[usize] {
        self.layout(i).shape()
    }

    /// The element type of an input.
    pub fn dtype(&self, i: usize) -> DType {
        match &self.0.inputs[i] {
            Kept::Value(value) => value.dtype,
            Kept::Described { dtype, .. } => *dtype,
        }
    }

    /// The mesh of an input.
    pub fn mesh(&self, i: usize) -> &DeviceMesh {
        match &self.0.inputs[i] {
            Kept::Value(value) => &value.mesh,
            Kept::Described { mesh, .. } => mesh,
        }
    }
}

impl Drop for Node {
    /// A long chain is taken apart link by link: each dropping the next would need as much stack.
    fn drop(&mut self) {
        let mut links: Vec<Tape> = self.parents.drain(..).flatten().collect();
        while let Some(tape) = links.pop() {
            if let Some(mut node) = Arc::into_inner(tape.node) {
                links.extend(node.parents.drain(..).flatten());
            }
        }
    }
}
