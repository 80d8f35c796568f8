//! The world: all ranks of a program.

use std::ops::Deref;
use std::sync::Arc;

use super::trace::Traced;
use super::work::Work;
use super::{Communicator, Group, Memory, Trace};

/// All ranks of a program, seen from one of them: a [`Group`] that can make meshes and that keeps a record of what the
/// rank communicates and how much memory its tensors take.
#[doc(alias = "init_process_group")]
#[derive(Clone, Debug)]
pub struct World {
    all: Group,
    trace: Trace,
    memory: Memory,
    work: Work,
}

impl World {
    /// Wraps an engine's end of the group of all ranks.
    pub fn new(engine: Arc<dyn Communicator>) -> Self {
        Self::with_trace(engine, Trace::default())
    }

    /// As [`new`](Self::new), with a trace that may have been set up otherwise.
    pub(super) fn with_trace(engine: Arc<dyn Communicator>, trace: Trace) -> Self {
        let all = Group::new(Arc::new(Traced::new(engine, trace.clone())));
        World { all, trace, memory: Memory::default(), work: Work::default() }
    }

    /// What this rank has communicated.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// How much memory the local tensors of this rank's distributed tensors take.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// How much this rank would compute, in a dry run.
    pub(crate) fn work(&self) -> &Work {
        &self.work
    }

    /// A number that no other world has while this one lives.
    pub(super) fn identity(&self) -> usize {
        self.trace.identity()
    }
}

impl Deref for World {
    type Target = Group;
    fn deref(&self) -> &Group {
        &self.all
    }
}
