//! How the models are spread over a mesh: where every weight lies, and in which layout activations pass between layers.
//!
//! Axis `dp` shares the batch, axis `tp` the heads and the features inside an MLP.

use candle_core::DType;

use super::LanguageModel;
use super::config::ModelConfig;
use crate::comm::DeviceMesh;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::nn::{Builder, Item};
use crate::placement::Placement::{self, Replicate, Shard};

/// What ranks that share the batch hold of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// All: gradients are reduced.
    Replicated,
    /// A part: weights are gathered where they are used, gradients are scattered.
    Sharded,
}

/// How a model is spread over the axes `dp` and `tp` of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spread {
    /// What ranks along `dp` hold of the weights.
    pub weights: Weights,
    /// Whether ranks along `tp` share heads, features inside MLPs, and the vocabulary.
    pub tensor_parallel: bool,
    /// Whether they share positions where they do not share features: between attention and MLP.
    pub sequence_parallel: bool,
}

/// What a parameter or module is for, as far as layouts care.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Makes features that ranks share.
    Column,
    /// Takes features that ranks share.
    Row,
    /// The table of tokens: ranks share the vocabulary.
    Table,
    Norm,
    Other,
}

impl Role {
    /// Of the module that something belongs to: a path without its last part.
    fn of(path: &str) -> Role {
        match path.rsplit_once('.').map_or("", |(module, _)| module.rsplit('.').next().expect("at least one part")) {
            "query" | "key" | "value" | "up" | "gate" | "head" => Role::Column,
            "output" | "down" => Role::Row,
            "tokens" => Role::Table,
            "norm" | "before_attention" | "before_mlp" => Role::Norm,
            _ => Role::Other,
        }
    }
}

impl Spread {
    /// How a batch `[batch, length]` lies.
    pub fn batch(&self, mesh: &Mesh) -> Vec<Placement> {
        each_axis(mesh, |axis| if axis == "dp" { Shard(0) } else { Replicate })
    }

    /// How activations `[batch, length, width]` lie between blocks.
    fn stream(&self, mesh: &Mesh) -> Vec<Placement> {
        each_axis(mesh, |axis| match axis {
            "dp" => Shard(0),
            "tp" if self.sequence_parallel => Shard(1),
            _ => Replicate,
        })
    }

    /// How a parameter lies.
    pub fn placements(&self, mesh: &Mesh, path: &str, shape: &[usize]) -> Vec<Placement> {
        let cut = match Role::of(path) {
            _ if !self.tensor_parallel => None,
            Role::Column | Role::Table => Some(0),
            Role::Row if shape.len() == 2 => Some(1),
            _ => None,
        };
        each_axis(mesh, |axis| match axis {
            "tp" => cut.map_or(Replicate, Shard),
            // Vectors are not worth a collective each: their gradients are reduced together. Of a matrix the dimension is
            // taken that the other axis leaves whole.
            "dp" if self.weights == Weights::Sharded && shape.len() == 2 => Shard(if cut == Some(0) { 1 } else { 0 }),
            _ => Replicate,
        })
    }

    /// An error if a model cannot be spread so over a mesh.
    pub fn check(&self, config: &ModelConfig, mesh: &Mesh) -> Result<()> {
        config.check()?;
        let size = |name: &str| mesh.axes().iter().find(|axis| axis.name == name).map_or(1, |axis| axis.size);
        if let Some(axis) = mesh.axes().iter().find(|axis| !["dp", "tp"].contains(&&*axis.name)) {
            let found = format!("axis `{}` in mesh {mesh}", axis.name);
            let needed = "axes `dp` (ranks share the batch) and `tp` (ranks share heads and features)";
            return Err(Error::invalid("mesh", found, needed, "rename the axis"));
        }
        let tp = size("tp");
        if !self.tensor_parallel && tp > 1 {
            let found = format!("mesh {mesh} with a plan that leaves axis `tp` idle");
            return Err(Error::invalid("mesh", found, "axis `dp` alone", "use a plan with tp, or make the axis dp"));
        }
        if self.tensor_parallel && !mesh.axes().iter().any(|axis| axis.name == "tp") {
            let found = format!("mesh {mesh} with a plan for tensor parallelism");
            return Err(Error::invalid("mesh", found, "an axis `tp`", "use a mesh such as tp=2 or dp=2,tp=2"));
        }
        if self.weights == Weights::Sharded && !mesh.axes().iter().any(|axis| axis.name == "dp") {
            let found = format!("mesh {mesh} with a plan that shards weights over the batch axis");
            return Err(Error::invalid("mesh", found, "an axis `dp`", "use a mesh such as dp=2 or dp=2,tp=2"));
        }
        let (heads, key_heads) = config.heads();
        if !heads.is_multiple_of(tp) || !key_heads.is_multiple_of(tp) {
            let found = format!("{heads} query heads and {key_heads} key heads on {tp} ranks along `tp`");
            let fix = "change the mesh, or the number of heads";
            return Err(Error::invalid("mesh", found, format!("multiples of {tp}: every rank has whole heads"), fix));
        }
        Ok(())
    }

    /// A new model, spread so.
    pub fn build(&self, config: &ModelConfig, mesh: &DeviceMesh, dtype: DType) -> Result<Box<dyn LanguageModel>> {
        self.check(config, mesh)?;
        let (spread, plain) = (*self, mesh.mesh().clone());
        let place = move |path: &str, shape: &[usize]| spread.placements(&plain, path, shape);
        let model = config.build(&Builder::new(mesh).dtype(dtype).placed(place))?;
        self.attach(&*model, mesh);
        Ok(model)
    }

    /// Has activations pass in their layouts: sums over ranks are carried out where layers end, once.
    fn attach(&self, model: &dyn LanguageModel, mesh: &Mesh) {
        if !self.tensor_parallel {
            return;
        }
        let (stream, whole) = (self.stream(mesh), self.batch(mesh));
        model.walk("", &mut |path, item| {
            let Item::Hooks(hooks) = item else { return };
            let to = match Role::of(path) {
                Role::Row | Role::Table => stream.clone(),
                Role::Norm if self.sequence_parallel => whole.clone(),
                _ => return,
            };
            hooks.on_output(move |x| x.redistribute(to.clone()));
        });
    }
}

fn each_axis(mesh: &Mesh, place: impl Fn(&str) -> Placement) -> Vec<Placement> {
    mesh.axes().iter().map(|axis| place(&axis.name)).collect()
}
