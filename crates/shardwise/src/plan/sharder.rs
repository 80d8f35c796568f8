//! The trait of types that replace modules, and one of them.

use std::fmt;
use std::sync::Arc;

use super::target_placements::TargetPlacements;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::nn::{Buffer, Forward, Layer, Module};
use crate::param::Param;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// Builds a layer that replaces a module: other parameters, another computation.
///
/// The layer is stored in the module's [`Hooks`](crate::nn::Hooks): `forward` runs it, and walks find its parameters. Create
/// optimizers afterwards. The module itself must not be changed, because a plan that turns out not to fit must leave
/// everything unchanged.
pub trait Sharder: fmt::Debug + Send + Sync {
    /// Builds the replacement of one module. Called on all ranks of the mesh.
    fn shard(&self, module: &ModuleView) -> Result<Arc<dyn Layer>>;
}

/// A module of a model as a [`Sharder`] or [`ParallelStyle`](super::ParallelStyle) sees it: its path, type and tensors.
pub struct ModuleView {
    pub(super) path: String,
    pub(super) kind: &'static str,
    pub(super) params: Vec<(String, Param)>,
    pub(super) buffers: Vec<(String, Buffer)>,
    pub(super) mesh: DeviceMesh,
}

impl ModuleView {
    /// Path of the module in the model.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Name of the type of the module, such as `Linear`.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// The mesh that the plan is for.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Parameters of the module, with paths relative to it.
    pub fn params(&self) -> &[(String, Param)] {
        &self.params
    }

    /// Buffers of the module, with paths relative to it.
    pub fn buffers(&self) -> &[(String, Buffer)] {
        &self.buffers
    }

    /// Looks up a parameter by its path relative to the module.
    pub fn param(&self, name: &str) -> Option<&Param> {
        self.params.iter().find(|(own, _)| own == name).map(|(_, param)| param)
    }

    /// The weight of a module of one of these types, or an error for `who`.
    fn weight(&self, kinds: &[&str], who: &dyn fmt::Debug) -> Result<DTensor> {
        match self.param("weight") {
            Some(weight) if kinds.contains(&self.kind) => Ok(weight.get().detach()),
            _ => Err(ErrorKind::Plan.error(
                "module",
                format!("a {} at `{}` for {who:?}", self.kind, self.path),
                kinds.join(" or "),
                "correct the path in the plan",
            )),
        }
    }
}

/// Replaces an [`Embedding`](crate::nn::Embedding) by one whose table is sharded over the vocabulary.
///
/// Every rank looks up the ids that it has rows for, and the partial sums are reduced immediately: all-reduced to a
/// replicated output, or reduce- scattered to a sharded one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VocabularyParallel {
    /// Mesh axis that the table is sharded over.
    pub axis: String,
    /// Placement of the output over the axis.
    pub output: Placement,
}

impl VocabularyParallel {
    /// Shards the table over a mesh axis, with a replicated output.
    pub fn new(axis: &str) -> Self {
        VocabularyParallel { axis: axis.to_string(), output: Placement::Replicate }
    }
}

impl Sharder for VocabularyParallel {
    fn shard(&self, module: &ModuleView) -> Result<Arc<dyn Layer>> {
        let weight = module.weight(&["Embedding"], self)?;
        let rows = TargetPlacements::one(&self.axis, &Placement::Shard(0)).layout(weight.layout())?;
        let output = TargetPlacements::one(&self.axis, &self.output);
        Ok(Arc::new(VocabularyEmbedding { weight: Param::new(&weight.to_layout(&rows)?), output }))
    }
}

/// The layer that [`VocabularyParallel`] builds.
#[derive(Module)]
struct VocabularyEmbedding {
    weight: Param,
    #[module(skip)]
    output: TargetPlacements,
}

impl Forward for VocabularyEmbedding {
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        let rows = self.weight.get().embedding(ids)?;
        rows.to_layout(&self.output.layout(rows.layout())?)
    }
}
