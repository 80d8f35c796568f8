//! Export and import of full weights by the names that files use.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use super::model::Model;
use super::names::{RowOrder, StoredRows, WeightName};
use crate::error::{ErrorKind, Result};
use crate::param::Param;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// Returns the full weights by the names that files use ([`Model::weight_names`]).
///
/// Collective: all ranks must call it. Gathers every weight to every rank; [`export_hf`](super::export_hf) writes files
/// without doing so.
///
/// ```
/// use shardwise::models::{GptConfig, ModelSpec, export, import};
/// use shardwise::nn::Builder;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let config = GptConfig { n_layers: 1, d_model: 8, n_heads: 2, d_ff: 16, ..GptConfig::default() };
///     let model = config.build(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]))?;
///     let weights = export(&model)?;
///     assert_eq!(weights["transformer.h.0.attn.c_attn.weight"].dims(), [24, 8]);
///     import(&model, &weights)?;
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[track_caller]
pub fn export(model: &dyn Model) -> Result<BTreeMap<String, Tensor>> {
    let params: BTreeMap<String, Param> = model.named_parameters().into_iter().collect();
    let mut weights = BTreeMap::new();
    for weight in model.weight_names().0 {
        let parts = weight.paths.iter().map(|path| parameter(&params, path)?.separate());
        let whole = weight.joined(&parts.collect::<Result<Vec<_>>>()?)?.full_tensor()?;
        weights.insert(weight.name, whole);
    }
    Ok(weights)
}

/// Looks up a parameter; a module that was replaced may have none at the path, and files have no quantized ones.
pub(super) fn parameter<'a>(params: &'a BTreeMap<String, Param>, path: &str) -> Result<&'a Param> {
    let Some(param) = params.get(path) else {
        let found = format!("no parameter at `{path}`");
        return Err(ErrorKind::Model.error(
            "model",
            found,
            "the model as it was built",
            "export before modules are replaced",
        ));
    };
    if param.dtype() == DType::U8 {
        let found = format!("quantized blocks {:?} at `{path}`", param.shape());
        let fix = "load the model without `LoadOptions::keep_quantized`";
        return Err(ErrorKind::dtype(DType::U8).error("model", found, "floating-point weights", fix));
    }
    Ok(param)
}

/// Sets the weights of a model from full tensors by the names that files use ([`Model::weight_names`]).
///
/// Each is converted to the type and layout that the parameter has. Every rank takes its shard out of its own copy.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if names or shapes do not fit; nothing changes then.
#[track_caller]
pub fn import(model: &dyn Model, weights: &BTreeMap<String, Tensor>) -> Result<()> {
    let params: BTreeMap<String, Param> = model.named_parameters().into_iter().collect();
    let names = model.weight_names();
    let bad = |found: String| {
        let needed = "the names and shapes of the model's weights";
        Err(ErrorKind::Model.error("weights", found, needed, "load the weights of a model of the same kind and sizes"))
    };
    if let Some(name) = weights.keys().find(|name| !names.0.iter().any(|weight| weight.name == **name)) {
        return bad(format!("unknown name `{name}`"));
    }
    let mut found = Vec::new();
    for weight in &names.0 {
        let WeightName { name, paths, .. } = weight;
        let Some(whole) = weights.get(name) else { return bad(format!("nothing for `{name}`")) };
        let own = paths.iter().map(|path| parameter(&params, path)).collect::<Result<Vec<_>>>()?;
        let shapes: Vec<Vec<usize>> = own.iter().map(|param| param.shape()).collect();
        let needed = WeightName { transposed: false, ..weight.clone() }.stored_shape(&shapes);
        if whole.dims() != needed {
            return bad(format!("`{name}` of shape {:?} instead of {needed:?}", whole.dims()));
        }
        for (part, param) in own.into_iter().enumerate() {
            found.push((param, part_of(weight, part, &shapes, whole)?));
        }
    }
    for (param, (slice, part)) in found {
        let now = param.separate()?;
        let part = part.to_dtype(now.dtype())?;
        let mesh = now.device_mesh();
        let value = match slice {
            None => {
                DTensor::distribute_to_layout(&part, mesh, &now.layout().reduced(), None)?.to_layout(now.layout())?
            }
            Some(index) => {
                let replicated = vec![Placement::Replicate; mesh.ndim()];
                let mut value = now.detach().redistribute(replicated.clone())?;
                let part = DTensor::distribute_tensor(&part.unsqueeze(0)?, mesh, replicated, None)?;
                value.set(index as isize..index as isize + 1, &part)?;
                value.to_layout(now.layout())?
            }
        };
        param.set(&param.to_stored(&value)?.to_layout(&param.layout())?)?;
    }
    Ok(())
}

/// The rows of one parameter in a full tensor, and which slice of the parameter they are.
fn part_of(weight: &WeightName, part: usize, shapes: &[Vec<usize>], whole: &Tensor) -> Result<(Option<usize>, Tensor)> {
    let StoredRows { block, stride, offset } = weight.rows_of(part, shapes);
    if weight.slice.is_some() || weight.paths.len() == 1 {
        return Ok((weight.slice, whole.clone()));
    }
    if weight.rows == RowOrder::Stacked {
        return Ok((None, whole.narrow(1, offset, block)?));
    }
    let groups = whole.dims()[0] / stride;
    let rows = (0..groups).map(|group| whole.narrow(0, group * stride + offset, block));
    Ok((None, Tensor::cat(&rows.collect::<candle_core::Result<Vec<_>>>()?, 0)?))
}
