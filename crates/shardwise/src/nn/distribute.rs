//! A module's parameters laid out, and its input and output prepared, in one call.

use super::module::{Hooks, Item, Module};
use crate::error::{ErrorKind, Result};
use crate::param::Param;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// Lays out every parameter as `partition` says (by path and shape; `None` leaves it as it is), and applies `input` and
/// `output` to what goes in and comes out of the module.
///
/// The module needs a field of type [`Hooks`] of its own for the latter, as the layers of this crate have.
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
    let mut own: Option<Hooks> = None;
    module.walk("", &mut |path, item| {
        if let Item::Hooks(hooks) = item
            && !path.contains('.')
        {
            own = Some(hooks.clone());
        }
    });
    if (input.is_some() || output.is_some()) && own.is_none() {
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
    if let Some(hooks) = own {
        input.into_iter().for_each(|hook| hooks.on_input(hook));
        output.into_iter().for_each(|hook| hooks.on_output(hook));
    }
    Ok(())
}

/// A function of what goes into or comes out of a module.
type HookFn = Box<dyn Fn(&DTensor) -> Result<DTensor> + Send + Sync>;
