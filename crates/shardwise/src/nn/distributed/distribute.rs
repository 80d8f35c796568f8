//! `distribute_module`.

use crate::error::{ErrorKind, Result};
use crate::nn::module::{Hooks, Module, ModuleItem};
use crate::param::Param;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// Redistributes the parameters of a module and registers hooks for its input and output.
///
/// `partition` returns the placements of a parameter by path; `None` leaves it unchanged. `input` and `output` need a field
/// of type [`Hooks`] in the module, as the layers of this crate have. Plans do the same by name:
/// [`ShardingPlan`](crate::plan::ShardingPlan).
///
/// Collective: all ranks of the mesh must call it, because redistributing communicates. Optimizers created before see the
/// new layouts, since parameters are shared cells.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if there is a hook but no such field, or placements do not fit a parameter.
///
/// ```
/// use shardwise::nn::{Builder, Forward, Linear, Module, distribute_module};
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let layer = Linear::new(&Builder::new(&mesh), 4, 6)?;
///     distribute_module(&layer, &|_, _| Some(vec![Shard(0)]), None, Some(Box::new(|y| y.redistribute([Replicate]))))?;
///     let y = layer.forward(&DTensor::ones((2, 4), DType::F32, &mesh, [Replicate])?)?;
///     assert_eq!(y.placements(), [Replicate]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub fn distribute_module(
    module: &dyn Module,
    partition: &dyn Fn(&str, &Param) -> Option<Vec<Placement>>,
    input: Option<HookFn>,
    output: Option<HookFn>,
) -> Result<()> {
    let mut root_hooks: Option<Hooks> = None;
    module.walk("", &mut |path, item| {
        if let ModuleItem::Hooks(hooks) = item
            && !path.contains('.')
        {
            root_hooks = Some(hooks.clone());
        }
    });
    if (input.is_some() || output.is_some()) && root_hooks.is_none() {
        let found = "a module without a field of type Hooks";
        return Err(ErrorKind::Model.error(
            "module",
            found,
            "a place for functions of input and output",
            "add such a field",
        ));
    }
    for (path, param) in module.named_parameters() {
        if let Some(placements) = partition(&path, &param) {
            param.set(&param.get().detach().redistribute(placements)?)?;
        }
    }
    if let Some(hooks) = root_hooks {
        input.into_iter().for_each(|hook| hooks.on_input(hook));
        output.into_iter().for_each(|hook| hooks.on_output(hook));
    }
    Ok(())
}

/// A hook for the input or output of a module.
type HookFn = Box<dyn Fn(&DTensor) -> Result<DTensor> + Send + Sync>;
