//! Parameters that are stored with merged dimensions: optimizers see the shape that modules see.

use crate::error::Result;
use crate::layout::MergedShape;
use crate::param::{MergedTensor, Param};
use crate::tensor::DTensor;

/// The value of a parameter, and its own shape if it is stored with merged dimensions.
pub(super) struct ParamView {
    /// Detached, as it is stored.
    pub(super) value: DTensor,
    pub(super) merged: Option<MergedShape>,
}

impl ParamView {
    /// The current value of a parameter.
    pub(super) fn of(param: &Param) -> Self {
        ParamView::with_value(param, param.get().detach())
    }

    /// Another value of a parameter.
    pub(super) fn with_value(param: &Param, value: DTensor) -> Self {
        ParamView { value, merged: param.merged().map(|merged| merged.merged_shape().clone()) }
    }

    /// The shape that optimizers see.
    pub(super) fn shape(&self) -> &[usize] {
        self.merged.as_ref().map_or_else(|| self.value.shape(), MergedShape::shape)
    }

    /// How a state tensor of a shape is stored: merged too if it has the merged dimensions of the parameter, so that it is sharded
    /// with it.
    pub(super) fn merged_state(&self, shape: &[usize]) -> Option<MergedShape> {
        let merged = self.merged.as_ref()?;
        let has_dims = shape.len() == merged.shape().len() && shape[..merged.dims()] == merged.shape()[..merged.dims()];
        if has_dims { MergedShape::new(shape, merged.dims()).ok() } else { None }
    }
}

/// A stored tensor in the shape that optimizers see. Collective if shards cross the borders of merged dimensions.
#[track_caller]
pub(super) fn separated(stored: DTensor, merged: Option<&MergedShape>) -> Result<DTensor> {
    match merged {
        Some(merged) => MergedTensor::new(&stored, merged.shape())?.separate(),
        None => Ok(stored),
    }
}

/// A tensor in the shape that optimizers see, or as it is stored, as it is stored. Collective if a merged dimension is sharded.
pub(super) fn stored(tensor: &DTensor, merged: Option<&MergedShape>) -> Result<DTensor> {
    match merged.filter(|merged| merged.shape() == tensor.shape()) {
        Some(merged) => tensor.flatten(0, merged.dims() as isize - 1),
        None => Ok(tensor.clone()),
    }
}
