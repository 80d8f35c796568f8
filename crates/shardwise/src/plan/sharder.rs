//! What replaces a module, and two such replacements.

use std::fmt;
use std::sync::Arc;

use super::places::Places;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::nn::init::Init;
use crate::nn::{Buffer, Forward, Item, Layer, Module, join};
use crate::param::Param;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// Makes a layer that stands in for a module: other parameters, another computation.
///
/// The layer takes the module's place in its [`Hooks`](crate::nn::Hooks): a forward pass runs it, and parameters, states and optimizers that are
/// made from then on see its own. The module itself must not be changed: a plan that is refused later has changed nothing.
pub trait Sharder: fmt::Debug + Send + Sync {
    /// The layer for one module.
    fn shard(&self, part: &Part) -> Result<Arc<dyn Layer>>;
}

/// A module as a [`Sharder`] sees it.
pub struct Part {
    pub(super) path: String,
    pub(super) kind: &'static str,
    pub(super) params: Vec<(String, Param)>,
    pub(super) buffers: Vec<(String, Buffer)>,
    pub(super) mesh: DeviceMesh,
}

impl Part {
    /// Its path in the model.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The name of its type.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// The mesh of the plan.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Its parameters, with paths inside it.
    pub fn params(&self) -> &[(String, Param)] {
        &self.params
    }

    /// Its buffers, with paths inside it.
    pub fn buffers(&self) -> &[(String, Buffer)] {
        &self.buffers
    }

    /// A parameter by its path inside the module.
    pub fn param(&self, name: &str) -> Option<&Param> {
        self.params.iter().find(|(own, _)| own == name).map(|(_, param)| param)
    }

    /// The weight of a module of one of these kinds.
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

/// Replaces a [`Linear`](crate::nn::Linear) by one whose weight no longer learns, plus a product of two small matrices that
/// does (LoRA). The small matrices are cut as the weight is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LowRankAdapter {
    /// Rank of the product.
    pub rank: usize,
    /// Factor of the product.
    pub scale: f64,
}

impl Sharder for LowRankAdapter {
    fn shard(&self, part: &Part) -> Result<Arc<dyn Layer>> {
        let weight = part.weight(&["Linear"], self)?;
        let (layout, mesh) = (weight.layout(), weight.device_mesh());
        // A matrix that shares one dimension of the weight, at the same place.
        let beside = |dim: usize, shape: [usize; 2]| {
            let keep = |p: &Placement| if p.shard_dim() == Some(dim) { p.clone() } else { Placement::Replicate };
            let placements: Vec<Placement> = layout.placements().iter().map(keep).collect();
            let mut cuts = vec![Vec::new(); 2];
            cuts[dim] = layout.shard_order(dim).to_vec();
            Layout::from_shard_orders(layout.mesh(), &shape, &placements, &cuts)
        };
        let (outputs, inputs) = (layout.shape()[0], layout.shape()[1]);
        let down = Init::KaimingUniform(1.0).make_in(&beside(1, [self.rank, inputs])?, weight.dtype(), mesh)?;
        // The product begins at zero: nothing changes before the first step.
        let up = Init::ZEROS.make_in(&beside(0, [outputs, self.rank])?, weight.dtype(), mesh)?;
        Ok(Arc::new(LowRankLinear {
            weight: Buffer::new(&weight),
            bias: part.param("bias").map(|bias| Buffer::new(&bias.get())),
            down: Param::new(&down),
            up: Param::new(&up),
            scale: self.scale,
        }))
    }
}

/// What [`LowRankAdapter`] makes.
struct LowRankLinear {
    weight: Buffer,
    bias: Option<Buffer>,
    down: Param,
    up: Param,
    scale: f64,
}

impl Module for LowRankLinear {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>)) {
        visit(path, Item::Module("LowRankLinear"));
        let fields: [(&str, &dyn Module); 4] =
            [("weight", &self.weight), ("bias", &self.bias), ("down", &self.down), ("up", &self.up)];
        fields.iter().for_each(|(name, field)| field.walk(&join(path, name), visit));
    }
}

impl Forward for LowRankLinear {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let bias = self.bias.as_ref().map(Buffer::get);
        let adapted = x.linear(&self.down.get(), None)?.linear(&self.up.get(), None)?;
        x.linear(&self.weight.get(), bias.as_ref())?.add(&adapted.mul_scalar(self.scale)?)
    }
}

/// Replaces an [`Embedding`](crate::nn::Embedding) by one whose table is cut into rows along an axis: every rank looks up the
/// ids that it has rows for, and the sum over ranks is carried out at once, whole or scattered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VocabularyParallel {
    /// The mesh axis.
    pub axis: String,
    /// How the output lies along the axis.
    pub output: Placement,
}

impl VocabularyParallel {
    /// Rows cut along an axis, output whole.
    pub fn new(axis: &str) -> Self {
        VocabularyParallel { axis: axis.to_string(), output: Placement::Replicate }
    }
}

impl Sharder for VocabularyParallel {
    fn shard(&self, part: &Part) -> Result<Arc<dyn Layer>> {
        let weight = part.weight(&["Embedding"], self)?;
        let rows = Places::one(&self.axis, &Placement::Shard(0)).layout(weight.layout())?;
        let output = Places::one(&self.axis, &self.output);
        Ok(Arc::new(VocabularyEmbedding { weight: Param::new(&weight.to_layout(&rows)?), output }))
    }
}

/// What [`VocabularyParallel`] makes.
struct VocabularyEmbedding {
    weight: Param,
    output: Places,
}

impl Module for VocabularyEmbedding {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>)) {
        visit(path, Item::Module("VocabularyEmbedding"));
        self.weight.walk(&join(path, "weight"), visit);
    }
}

impl Forward for VocabularyEmbedding {
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        let rows = self.weight.get().embedding(ids)?;
        rows.to_layout(&self.output.layout(rows.layout())?)
    }
}
