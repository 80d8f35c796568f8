//! What modules say to planners: fields that hold no tensors.

/// Numbers of heads of an attention module, for planners; a field of the module.
///
/// [`TensorParallel`](crate::plan::TensorParallel) shards the linear layers beside it at the borders of heads, whatever the
/// number of ranks: a key head goes to one rank together with its query heads. For that, the features of every such layer
/// have to be ordered by key head: those of key head 0 first. In a projection to queries, keys and values at once, too:
/// `[q.. k v]` of key head 0, then of key head 1.
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
///     let at = Builder::new(&mesh);
///     // three heads of four features
///     let (qkv, out) = (Linear::new(&at.at("qkv"), 12, 36)?, Linear::new(&at.at("out"), 12, 12)?);
///     let attention = Attention { qkv, out, heads: Heads { query: 3, key: 3 } };
///     let table = TensorParallel::new("tp").plan(&attention, &mesh)?.table(&attention)?;
///     assert_eq!(table.0[0].layout.placements(), [Placement::ragged(0, [24, 12])]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub query: usize,
    /// Key and value heads, each of which serves a group of query heads.
    pub key: usize,
}

/// Roles of the layers of a module, for planners; a field of the module. Paths are those below the module.
///
/// Planners recognise layers by usual names (`query`, `up`, `down`, ...); a module whose layers have others says what they
/// are.
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
///     let at = Builder::new(&mesh);
///     let (widen, narrow) = (Linear::new(&at.at("widen"), 4, 16)?, Linear::new(&at.at("narrow"), 16, 4)?);
///     let mixer = Mixer { widen, narrow, hints: PlanHints::new().column("widen").row("narrow") };
///     let table = TensorParallel::new("tp").plan(&mixer, &mesh)?.table(&mixer)?;
///     assert_eq!(table.0[0].layout.placements(), [Shard(0)]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlanHints {
    /// Linear layers that tensor parallelism shards by outputs.
    pub columns: Vec<String>,
    /// Linear layers that take what the columns return: tensor parallelism shards them by inputs.
    pub rows: Vec<String>,
    /// Modules whose input has the batch as its first dimension. Plans that shard weights over the axis of the batch bring
    /// it there: embeddings may return rows of the whole batch.
    pub batch_inputs: Vec<String>,
}

impl PlanHints {
    /// No hints yet.
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
