//! Why a tensor is in its layout, and what its memory is for.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::comm::MemoryKind;
use crate::tensor::DTensor;

impl DTensor {
    /// Why the operator that computed this tensor moved data, and why the result is partial, in one sentence each.
    ///
    /// `None` if the operator moved nothing and the result is not partial, or if no operator computed the tensor. Local. The trace
    /// has the sentence of every collective that an operator made ([`CommRecord::reason`](crate::comm::CommRecord::reason)), and
    /// [`explain`](crate::redistribute::explain) has the alternatives of a redistribution.
    ///
    /// ```
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("tp", 2)])?;
    ///     let x = DTensor::ones((4, 8), DType::F32, &mesh, [Shard(1)])?;
    ///     let w = DTensor::ones((8, 4), DType::F32, &mesh, [Shard(0)])?;
    ///     let why = "the result is P(sum) over tp because matmul reduces over dimension 1 of input 0, which is sharded over tp: \
    ///                every rank has the term of its shard";
    ///     assert_eq!(x.matmul(&w)?.why(), Some(why));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "explain")]
    pub fn why(&self) -> Option<&str> {
        self.value.why.as_deref()
    }

    /// Sets [`why`](Self::why) of a tensor that has just been created.
    pub(crate) fn set_why(&mut self, why: Option<&Arc<str>>) {
        if let (Some(why), Some(value)) = (why, Arc::get_mut(&mut self.value)) {
            value.why = Some(Arc::clone(why));
        }
    }

    /// Counts the memory of this tensor for another kind from now on.
    pub(crate) fn count_as(&self, kind: MemoryKind) {
        let before = MemoryKind::ALL[usize::from(self.value.kind.swap(kind as u8, Relaxed))];
        self.device_mesh().world().memory().count_as(self.value.counted, before, kind, self.value.id.0);
    }
}
