//! Fields of modules that inform planners; they hold no tensors.

/// Numbers of heads of an attention module, for planners; a field of the module.
///
/// With it, [`TensorParallel`](crate::plan::TensorParallel) never splits a head between ranks, whatever the number of ranks:
/// a key head goes to one rank together with its query heads. This requires that the features of the linear layers are
/// ordered by key head, those of key head 0 first. That holds for a fused projection too: `[q.. k v]` of key head 0, then of
/// key head 1.
///
/// ```
/// use shardwise::nn::{Builder, Heads, Linear, Module};
/// use shardwise::plan::{ShardingPlanner, TensorParallel};
/// use shardwise::prelude::*;
///
/// #[derive(Module)]
/// struct Attention {
///     qkv: Linear,
///     out: Linear,
///     heads: Heads,
/// }
///
/// launch(2, |world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let builder = Builder::new(&mesh);
///     // three heads of four features
///     let (qkv, out) = (Linear::new(&builder.child("qkv"), 12, 36)?, Linear::new(&builder.child("out"), 12, 12)?);
///     let attention = Attention { qkv, out, heads: Heads { query: 3, key: 3 } };
///     let table = TensorParallel::new("tp").plan(&attention, &mesh)?.table(&attention)?;
///     assert_eq!(table.0[0].layout.placements(), [Placement::ragged(0, [24, 12])]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Number of query heads.
    pub query: usize,
    /// Number of key and value heads, each shared by a group of query heads.
    pub key: usize,
}

/// Roles of the layers of a module, for planners; a field of the module. Paths are relative to the module.
///
/// Planners recognize layers by common names (`query`, `up`, `down`, ...). A module whose layers have other names lists
/// them here. A path that names no layer is an error when a plan is built.
///
/// ```
/// use shardwise::nn::{Builder, Linear, PlanHints};
/// use shardwise::plan::{ShardingPlanner, TensorParallel};
/// use shardwise::prelude::*;
///
/// #[derive(Module)]
/// struct Mixer {
///     widen: Linear,
///     narrow: Linear,
///     hints: PlanHints,
/// }
///
/// launch(2, |world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let builder = Builder::new(&mesh);
///     let (widen, narrow) = (Linear::new(&builder.child("widen"), 4, 16)?, Linear::new(&builder.child("narrow"), 16, 4)?);
///     let mixer = Mixer { widen, narrow, hints: PlanHints::new().column("widen").row("narrow") };
///     let table = TensorParallel::new("tp").plan(&mixer, &mesh)?.table(&mixer)?;
///     assert_eq!(table.0[0].layout.placements(), [Shard(0)]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlanHints {
    /// Linear layers that tensor parallelism shards by columns (output features).
    pub columns: Vec<String>,
    /// Linear layers after them, which tensor parallelism shards by rows (input features).
    pub rows: Vec<String>,
    /// Modules whose input has the batch as its first dimension. Fully sharded plans redistribute it to `Shard(0)` over the
    /// batch axis, since a lookup in a sharded embedding may return the rows of the whole batch.
    pub batch_inputs: Vec<String>,
}

impl PlanHints {
    /// Empty hints.
    pub fn new() -> Self {
        PlanHints::default()
    }

    /// Adds a linear layer to the [`columns`](Self::columns).
    #[must_use]
    pub fn column(mut self, path: &str) -> Self {
        self.columns.push(path.to_string());
        self
    }

    /// Adds a linear layer to the [`rows`](Self::rows).
    #[must_use]
    pub fn row(mut self, path: &str) -> Self {
        self.rows.push(path.to_string());
        self
    }

    /// Adds a module to the [`batch_inputs`](Self::batch_inputs).
    #[must_use]
    pub fn batch_input(mut self, path: &str) -> Self {
        self.batch_inputs.push(path.to_string());
        self
    }
}
