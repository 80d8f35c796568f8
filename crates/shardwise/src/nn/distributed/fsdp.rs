//! How a fully sharded module computes: the types of its weights and activations, and when its weights are gathered.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use crate::comm::World;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::nn::distributed::full_state::{gather_state, load_state};
use crate::nn::module::{Module, ModuleItem};
use crate::nn::state_dict::{IncompatibleKeys, StateDictOptions};
use crate::placement::Placement;
use crate::tensor::{DTensor, check_replicas};

/// Types of a module's weights and activations that differ from those of its parameters: f32 shards, bf16 compute.
///
/// PyTorch's `MixedPrecisionPolicy`. Parameters, optimizer state and checkpoints keep their type.
#[doc(alias = "MixedPrecisionPolicy")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MixedPrecision {
    /// The type in which the module computes. Shards are converted before they are gathered, so that a gather moves bf16
    /// elements of an f32 parameter. `None`: the type of the parameters.
    pub param_dtype: Option<DType>,
    /// The type to which a gradient is rounded once it has been reduced. `None`: `param_dtype`. Terms are always added
    /// in f32 at least, and gradients of micro-batches add up in the type of the parameter.
    pub reduce_dtype: Option<DType>,
    /// The type of floating-point outputs of the module itself. `None`: whatever it computes.
    pub output_dtype: Option<DType>,
    /// Whether floating-point inputs, of the module and of the layers inside, are converted to `param_dtype`; true by default.
    pub cast_forward_inputs: bool,
}

impl Default for MixedPrecision {
    fn default() -> Self {
        MixedPrecision { param_dtype: None, reduce_dtype: None, output_dtype: None, cast_forward_inputs: true }
    }
}

impl MixedPrecision {
    /// Fails unless all types are floating-point ones.
    fn check(&self) -> Result<()> {
        let types = [
            ("param_dtype", self.param_dtype),
            ("reduce_dtype", self.reduce_dtype),
            ("output_dtype", self.output_dtype),
        ];
        for (name, dtype) in types {
            if let Some(dtype) = dtype.filter(|dtype| !dtype.is_float()) {
                let found = format!("{} as {name}", dtype.as_str());
                return Err(ErrorKind::Argument.error(
                    "mixed precision",
                    found,
                    "a floating-point type",
                    "use bf16, f16 or f32",
                ));
            }
        }
        Ok(())
    }
}

/// Settings of modules with sharded parameters, as methods of every [`Module`]; PyTorch's `FSDPModule`.
#[doc(alias = "FSDPModule")]
pub trait FsdpModule: Module {
    /// Computes in other types than those of the parameters; `None` ends that. Local; all ranks must set the same.
    ///
    /// Call it on the whole model first and then on modules inside that differ: the last call for a parameter or layer
    /// counts. Casts are repeated when activations are recomputed
    /// ([`checkpoint_activations`](crate::checkpoint_activations)). Set it between steps: leaves that were used before get no
    /// gradient.
    ///
    /// ```
    /// use shardwise::nn::{FsdpModule, Linear, MixedPrecision};
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let layer = Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 4, 6)?;
    ///     layer.set_mixed_precision(Some(MixedPrecision { param_dtype: Some(DType::BF16), ..Default::default() }))?;
    ///     let y = layer.forward(&DTensor::ones((8, 4), DType::F32, &mesh, [Shard(0)])?)?;
    ///     assert_eq!(y.dtype(), DType::BF16);
    ///     let gradients = y.sum_all()?.backward()?;
    ///     assert_eq!(gradients.get(&layer.weight.get())?.dtype(), DType::F32);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if a type is not a floating-point type, or `output_dtype` is set for a module without
    /// [`Hooks`](crate::nn::Hooks), which convert outputs.
    #[doc(alias = "mp_policy")]
    fn set_mixed_precision(&self, policy: Option<MixedPrecision>) -> Result<()> {
        let policy = policy.unwrap_or_default();
        policy.check()?;
        let mut has_hooks = false;
        self.walk("", &mut |path, item| has_hooks |= is_own_hooks(path, &item));
        if policy.output_dtype.is_some() && !has_hooks {
            return Err(ErrorKind::Model.error(
                "mixed precision",
                "an output_dtype for a module without hooks",
                "a field of type Hooks, which `forward` calls",
                "add one, or convert the output where it is used",
            ));
        }
        let input = policy.param_dtype.filter(|_| policy.cast_forward_inputs);
        self.walk("", &mut |path, item| {
            let output = policy.output_dtype.filter(|_| is_own_hooks(path, &item));
            match item {
                ModuleItem::Hooks(hooks) => hooks.convert(input, output),
                ModuleItem::Param(param) if param.dtype().is_float() => {
                    param.set_forward_dtype(policy.param_dtype, policy.reduce_dtype.or(policy.param_dtype));
                }
                _ => {}
            }
        });
        Ok(())
    }

    /// Keeps weights gathered over `axes` between their first use and the next step (`false`), or gathers them for every use and
    /// again in the backward pass (`true`, as it is for a new module). Local; all ranks must set the same.
    ///
    /// `false` saves the gathers of the backward pass and of further micro-batches, and holds the whole weights. The optimizer's
    /// step, loads and [`reshard`](Self::reshard) drop them.
    fn set_reshard_after_forward(&self, reshard: bool, axes: &[&str]) {
        let kept: &[&str] = if reshard { &[] } else { axes };
        self.named_parameters().iter().for_each(|(_, param)| param.keep_gathered(kept));
    }

    /// Gathers all weights that are to be kept ([`set_reshard_after_forward`](Self::set_reshard_after_forward)) now instead of at
    /// their first use.
    ///
    /// Collective: all ranks of the mesh must call it.
    #[track_caller]
    fn unshard(&self) -> Result<()> {
        self.named_parameters().iter().try_for_each(|(_, param)| param.forward_value().map(drop))
    }

    /// Drops the gathered weights: the next use gathers again. Local.
    fn reshard(&self) {
        self.named_parameters().iter().for_each(|(_, param)| param.reshard());
    }

    /// Gathers the full state dict to one rank: `Some` there, `None` on all other ranks, which hold no full tensor at any time.
    ///
    /// Collective: all ranks of the world must call it.
    ///
    /// ```
    /// use shardwise::nn::Linear;
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let layer = Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 4, 6)?;
    ///     let state = layer.full_state_dict(&world, 0)?;
    ///     assert_eq!(state.is_some(), world.rank() == 0);
    ///     let loaded = layer.load_full_state_dict(&world, 0, state.as_ref(), &Default::default())?;
    ///     assert!(loaded.missing_keys.is_empty());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "get_model_state_dict")]
    #[track_caller]
    fn full_state_dict(&self, world: &World, rank: usize) -> Result<Option<BTreeMap<String, Tensor>>> {
        gather_state(self, world, rank)
    }

    /// Loads the full state dict that rank `src` has; every rank receives its shards. What other ranks pass is ignored.
    /// Returns the names that did not match, as [`Module::load_state_dict_with`] does.
    ///
    /// Collective: all ranks of the world must call it with the same options.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) on all ranks if names or shapes do not fit, or rank `src` has no state; nothing
    /// changes then.
    #[doc(alias = "broadcast_from_rank0")]
    #[doc(alias = "set_model_state_dict")]
    #[track_caller]
    fn load_full_state_dict(
        &self,
        world: &World,
        src: usize,
        state: Option<&BTreeMap<String, Tensor>>,
        options: &StateDictOptions,
    ) -> Result<IncompatibleKeys> {
        load_state(self, world, src, state, options)
    }

    /// Makes replicas equal: on mesh axes that replicate a parameter or buffer, all ranks take the value of the first.
    ///
    /// Collective: all ranks of the mesh must call it. One broadcast per tensor that is replicated over more than one rank.
    #[doc(alias = "_sync_module_states")]
    #[track_caller]
    fn broadcast_replicas(&self) -> Result<()> {
        self.map_tensors(&|tensor| first_replica(tensor))
    }

    /// Fails on every rank if replicas of a parameter or buffer differ, naming it and the ranks.
    ///
    /// Collective: an all-gather of one hash per tensor.
    #[track_caller]
    fn check_replicas(&self) -> Result<()> {
        let site = std::panic::Location::caller();
        let parameters = self.named_parameters().into_iter().map(|(name, param)| (name, param.get().detach()));
        let buffers = self.named_buffers().into_iter().map(|(name, buffer)| (name, buffer.get()));
        for (name, tensor) in parameters.chain(buffers) {
            check_replicas(&tensor, site).map_err(|error| match error {
                Error::Invalid(mut invalid) => {
                    invalid.found = format!("`{name}` with {}", invalid.found);
                    invalid.fix = "call broadcast_replicas, or load the state of one replica".into();
                    Error::Invalid(invalid)
                }
                other => other,
            })?;
        }
        Ok(())
    }
}

impl<M: Module + ?Sized> FsdpModule for M {}

/// Whether an item of a walk is the hooks of the module itself.
fn is_own_hooks(path: &str, item: &ModuleItem<'_>) -> bool {
    matches!(item, ModuleItem::Hooks(_)) && !path.contains('.')
}

/// The value that the first of the ranks with the same shard has.
#[track_caller]
fn first_replica(tensor: &DTensor) -> Result<DTensor> {
    let (mesh, layout) = (tensor.device_mesh(), tensor.layout());
    let replicates = |&axis: &usize| mesh.shape()[axis] > 1 && layout.placements()[axis] == Placement::Replicate;
    let axes: Vec<usize> = (0..mesh.ndim()).filter(replicates).collect();
    if axes.is_empty() || !mesh.contains(mesh.world().rank()) {
        return Ok(tensor.clone());
    }
    let group = mesh.group_of(&axes)?;
    let local = tensor.to_local()?;
    let meta = TensorMeta::new(local.dims(), local.dtype());
    let same = group.broadcast((group.rank() == 0).then_some(&local), &meta, 0)?;
    Ok(DTensor::from_parts(mesh, layout.clone(), same))
}
