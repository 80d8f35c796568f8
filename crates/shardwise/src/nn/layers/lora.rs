//! Low-rank adapters (LoRA): trainable matrices of low rank next to frozen linear layers.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::DType;

use crate::error::{ErrorKind, Result, nearest};
use crate::layout::Layout;
use crate::nn::init::Init;
use crate::nn::layers::dropout::Dropout;
use crate::nn::module::{Forward, Hooks, Module, ModuleItem};
use crate::param::Param;
use crate::placement::Placement;
use crate::tensor::{DTensor, no_grad};
use shardwise_derive::Module;

/// Settings of low-rank adapters, with the defaults of the PEFT library.
///
/// [`apply`](Self::apply) puts an adapter next to linear layers and freezes everything else; [`merge`](Self::merge) adds the
/// trained adapters to the weights.
///
/// ```
/// use shardwise::nn::{Activation, Forward, Lora, Mlp};
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let builder = Builder::new(&mesh).placed(|_, _| vec![Shard(0)]);
///     let model = Mlp::new(&builder, 4, 6, Activation::Gelu)?;
///     let lora = Lora { rank: 2, ..Lora::default() };
///     lora.apply(&model, |path| path == "up")?;
///     let names: Vec<_> = model.trainable_parameters().into_iter().map(|(path, _)| path).collect();
///     assert_eq!(names, ["up.lora_a", "up.lora_b"]);
///     let mut optimizer = AdamW::default().over(&model)?;
///     let x = DTensor::randn((3, 4), &mesh, [Replicate])?;
///     optimizer.step(model.forward(&x)?.square()?.sum_all()?.backward()?)?;
///     lora.merge(&model)?;
///     assert_eq!(model.named_parameters().len(), 4);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "LoraConfig")]
#[doc(alias = "PEFT")]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lora {
    /// Rank of the adapters: rows of `A` and columns of `B`.
    #[doc(alias = "r")]
    pub rank: usize,
    /// The product of both matrices is multiplied by `alpha / rank`.
    #[doc(alias = "lora_alpha")]
    pub alpha: f64,
    /// Dropout probability of the input of the adapters in training.
    #[doc(alias = "lora_dropout")]
    pub dropout: f64,
}

impl Default for Lora {
    fn default() -> Self {
        Lora { rank: 8, alpha: 8.0, dropout: 0.0 }
    }
}

impl Lora {
    /// Factor of the product of both matrices.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// Puts an adapter next to every linear layer whose path `is_target` accepts, and freezes all parameters but those of adapters. Returns
    /// the paths of the layers with an adapter.
    ///
    /// The layers keep their weights and hooks; paths of parameters stay the same, with `lora_a` and `lora_b` next to `weight`.
    /// `lora_a` is random and `lora_b` zero, so that outputs are unchanged at first. The adapter of a sharded weight is sharded
    /// with it: on its columns `lora_a`, on its rows `lora_b`; no operator communicates more than before, except for
    /// `rank` features per row where a weight is sharded on its columns.
    ///
    /// Local: communicates nothing. All ranks must make the same call. Apply sharding plans before.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if a setting is out of range, no layer is accepted, or one has an adapter
    /// already. Nothing changes then.
    pub fn apply(&self, module: &dyn Module, is_target: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        self.check()?;
        let layers = linear_layers(module);
        let chosen: BTreeMap<&String, &LinearParts> = layers.iter().filter(|(path, _)| is_target(path)).collect();
        if let Some((path, _)) = chosen.iter().find(|(_, parts)| parts.adapter.is_some()) {
            let fix = "merge it first, or train the one that is there";
            return Err(ErrorKind::Model.error("adapter", format!("one at `{path}` already"), "a layer without", fix));
        }
        if chosen.is_empty() {
            let some = nearest("attention.query", layers.keys().cloned());
            let fix = format!("choose by path, for example {some}");
            return Err(ErrorKind::Model.error("targets of adapters", "no linear layer", "one at least", fix));
        }
        let mut adapted = Vec::new();
        for (path, parts) in chosen {
            let (Some(weight), Some(hooks)) = (&parts.weight, &parts.hooks) else { continue };
            adapted.push((path.clone(), hooks.clone(), self.beside(weight, parts.bias.clone())?));
        }
        module.set_requires_grad(false);
        for (a, b) in layers.values().filter_map(|parts| parts.adapter.as_ref()) {
            a.set_requires_grad(true);
            b.set_requires_grad(true);
        }
        let paths = adapted.iter().map(|(path, ..)| path.clone()).collect();
        adapted.into_iter().for_each(|(_, hooks, layer)| hooks.replace(Arc::new(layer)));
        Ok(paths)
    }

    /// Adds the adapters to the weights and removes them, after which the model is as before, with trained weights. Returns the
    /// paths of the layers. All parameters are trainable again.
    ///
    /// Collective: all ranks must call it. Communicates nothing for weights that are sharded on one dimension: each rank has the
    /// matching part of both matrices.
    #[track_caller]
    pub fn merge(&self, module: &dyn Module) -> Result<Vec<String>> {
        let layers = linear_layers(module);
        let mut merged = Vec::new();
        for (path, parts) in &layers {
            let (Some((a, b)), Some(weight)) = (&parts.adapter, &parts.weight) else { continue };
            merged.push((path, parts, weight, no_grad(|| self.merged(&weight.get(), &a.get(), &b.get()))?));
        }
        for (_, parts, weight, value) in &merged {
            weight.set(value)?;
            parts.hooks.iter().for_each(Hooks::restore);
        }
        let paths = merged.iter().map(|(path, ..)| (*path).clone()).collect();
        module.set_requires_grad(true);
        Ok(paths)
    }

    /// The weight plus the product of the adapter, in the layout and type of the weight.
    #[track_caller]
    fn merged(&self, weight: &DTensor, a: &DTensor, b: &DTensor) -> Result<DTensor> {
        let change = b.detach().matmul(&a.detach())?.mul_scalar(self.scale())?;
        let sum = weight.detach().to_dtype(change.dtype())?.add(&change.to_layout(weight.layout())?)?;
        sum.to_dtype(weight.dtype())?.to_layout(weight.layout())
    }

    fn check(&self) -> Result<()> {
        let bad = |found: String, needed: &str| Err(ErrorKind::Argument.error("adapter", found, needed, "correct it"));
        if self.rank == 0 {
            return bad("rank 0".into(), "a rank of at least 1");
        }
        if !self.alpha.is_finite() {
            return bad(format!("alpha {}", self.alpha), "a finite number");
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return bad(format!("dropout {}", self.dropout), "0 to below 1");
        }
        Ok(())
    }

    /// A layer with the same weight and bias, and a new adapter.
    fn beside(&self, weight: &Param, bias: Option<Param>) -> Result<LoraLinear> {
        let value = weight.get();
        let mesh = value.device_mesh();
        let (outputs, inputs) = (value.shape()[0], value.shape()[1]);
        // Adapters are small, and their updates too small for half precision.
        let dtype = if value.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let tensor = |dim: usize, shape: [usize; 2], init: Init| -> Result<Param> {
            let layout = sharded_alike(value.layout(), dim, shape)?;
            Ok(Param::new(&init.create_in(&layout, dtype, mesh)?))
        };
        Ok(LoraLinear {
            weight: weight.clone(),
            bias,
            lora_a: tensor(1, [self.rank, inputs], Init::LINEAR)?,
            lora_b: tensor(0, [outputs, self.rank], Init::ZEROS)?,
            dropout: Dropout::new(self.dropout)?,
            hooks: Hooks::default(),
            scale: self.scale(),
        })
    }
}

/// The layout of a matrix whose dimension `dim` has the size that it has in `weight` and is sharded as there; the other one is
/// not sharded.
fn sharded_alike(weight: &Layout, dim: usize, shape: [usize; 2]) -> Result<Layout> {
    let on_dim = |p: &Placement| if p.shard_dim() == Some(dim) { p.clone() } else { Placement::Replicate };
    let placements: Vec<Placement> = weight.placements().iter().map(on_dim).collect();
    let mut orders = vec![Vec::new(), Vec::new()];
    orders[dim] = weight.shard_order(dim).to_vec();
    Layout::from_shard_orders(weight.mesh(), &shape, &placements, &orders)
}

/// What a walk finds of a linear layer, with or without an adapter.
#[derive(Default)]
struct LinearParts {
    weight: Option<Param>,
    bias: Option<Param>,
    adapter: Option<(Param, Param)>,
    hooks: Option<Hooks>,
}

/// The linear layers of a module by path.
fn linear_layers(module: &dyn Module) -> BTreeMap<String, LinearParts> {
    let mut layers: BTreeMap<String, LinearParts> = BTreeMap::new();
    let mut first: Option<Param> = None;
    module.walk("", &mut |path, item| {
        let (parent, field) = path.rsplit_once('.').unwrap_or(("", path));
        match item {
            ModuleItem::Module("Linear" | "LoraLinear") => {
                layers.insert(path.to_string(), LinearParts::default());
            }
            ModuleItem::Param(param) => {
                let Some(layer) = layers.get_mut(parent) else { return };
                match field {
                    "weight" => layer.weight = Some(param.clone()),
                    "bias" => layer.bias = Some(param.clone()),
                    "lora_a" => first = Some(param.clone()),
                    "lora_b" => layer.adapter = first.take().map(|a| (a, param.clone())),
                    _ => {}
                }
            }
            ModuleItem::Hooks(hooks) => {
                if let Some(layer) = layers.get_mut(parent) {
                    layer.hooks = Some(hooks.clone());
                }
            }
            _ => {}
        }
    });
    layers
}

/// Returns the matrices `A` and `B` of all adapters by the paths of their layers.
///
/// Local. `A` is `[rank, inputs]`, `B` is `[outputs, rank]`.
pub fn lora_adapters(module: &dyn Module) -> BTreeMap<String, (Param, Param)> {
    let adapters = linear_layers(module).into_iter().filter_map(|(path, parts)| Some((path, parts.adapter?)));
    adapters.collect()
}

/// A linear layer with an adapter: `x W^T + b + scale (x A^T) B^T`. [`Lora::apply`] creates them.
#[derive(Module)]
pub struct LoraLinear {
    /// Weight `[out, in]` of the layer, frozen.
    pub weight: Param,
    /// Bias `[out]` of the layer, frozen.
    pub bias: Option<Param>,
    /// `A`, `[rank, in]`.
    pub lora_a: Param,
    /// `B`, `[out, rank]`.
    pub lora_b: Param,
    /// Dropout of the adapter's input.
    pub dropout: Dropout,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    scale: f64,
}

impl Forward for LoraLinear {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let bias = self.bias.as_ref().map(Param::forward_value).transpose()?;
            let y = x.linear(&self.weight.forward_value()?, bias.as_ref())?;
            let (a, b) = (self.lora_a.forward_value()?, self.lora_b.forward_value()?);
            let few = self.dropout.forward(x)?.to_dtype(a.dtype())?.linear(&a, None)?;
            // Scaling `rank` features is cheaper than scaling all outputs.
            let change = few.mul_scalar(self.scale)?.linear(&b, None)?;
            y.add(&change.to_dtype(y.dtype())?)
        })
    }
}
