//! Weights that are stored as small floats with a scale per block, such as `weight` of type `f8` with `weight_scale_inv`.

use candle_core::{DType, Device, Tensor};

use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::bytes::read_tensor::read_box;
use crate::checkpoint::catalogs::catalog::Catalog;
use crate::checkpoint::metadata::stored::StoredTensor;
use crate::error::{ErrorKind, Result};
use crate::layout::TensorBox;

/// What the name of a tensor of scales adds to that of the weight.
pub(in crate::checkpoint) const SCALE_SUFFIX: &str = "_scale_inv";

/// The scales of a matrix: an element is multiplied by the scale of its block.
pub(in crate::checkpoint) struct BlockScales<'a> {
    key: String,
    stored: &'a StoredTensor,
    block: [usize; 2],
}

impl<'a> BlockScales<'a> {
    /// The scales of a tensor, if the checkpoint has them.
    ///
    /// # Errors
    /// [`ErrorKind::State`] unless there is one scale per block of `block` rows and columns.
    pub(in crate::checkpoint) fn of(catalog: &'a Catalog, key: &str, block: [usize; 2]) -> Result<Option<Self>> {
        let of_weight = format!("{key}{SCALE_SUFFIX}");
        let (Some(weight), Some(stored)) = (catalog.tensors.get(key), catalog.tensors.get(&of_weight)) else {
            return Ok(None);
        };
        let blocks = |dim: usize| weight.shape[dim].div_ceil(block[dim].max(1));
        let fits = weight.shape.len() == 2 && block[0] > 0 && block[1] > 0 && stored.shape == [blocks(0), blocks(1)];
        if !fits {
            let found = format!("scales {of_weight:?} of shape {:?}", stored.shape);
            let needed = format!("one per block of {block:?} of {key:?}, a matrix of shape {:?}", weight.shape);
            let fix = "pass the block size that the weights were quantized with";
            return Err(ErrorKind::state().error("block scales", found, needed, fix));
        }
        Ok(Some(BlockScales { key: of_weight, stored, block }))
    }

    /// Reads a box of the weight and multiplies it by the scales of the blocks that it touches, in `f32`.
    pub(in crate::checkpoint) fn read_box(
        &self,
        files: &Files,
        key: &str,
        weight: &StoredTensor,
        part: &TensorBox,
        dtype: DType,
    ) -> Result<Tensor> {
        let first: Vec<usize> = part.offsets.iter().zip(self.block).map(|(offset, block)| offset / block).collect();
        let count = |dim: usize| {
            let end = part.offsets[dim] + part.sizes[dim];
            end.div_ceil(self.block[dim]).saturating_sub(first[dim])
        };
        let of_scales = TensorBox { offsets: first.clone(), sizes: vec![count(0), count(1)] };
        let mut elements =
            read_box(files, key, weight, part, DType::F32)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let scales =
            read_box(files, &self.key, self.stored, &of_scales, DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let (rows, columns) = (part.sizes[0], part.sizes[1]);
        for row in 0..rows {
            let scale_row = (part.offsets[0] + row) / self.block[0] - first[0];
            for column in 0..columns {
                let scale_column = (part.offsets[1] + column) / self.block[1] - first[1];
                elements[row * columns + column] *= scales[scale_row * of_scales.sizes[1] + scale_column];
            }
        }
        Ok(Tensor::from_vec(elements, (rows, columns), &Device::Cpu)?.to_dtype(dtype)?)
    }
}
