//! Reading a tensor whose elements are in boxes of several stored tensors: split, joined, transposed or converted.

use candle_core::{DType, Device, Tensor};

use crate::checkpoint::bytes::read_tensor::read_box;
use crate::checkpoint::catalogs::catalog::Catalog;
use crate::error::Result;
use crate::layout::{TensorBox, TensorMeta};
use shardwise_kernels::quantized::BlockType;
use shardwise_kernels::{Assembly, placeholder};

/// A box of a tensor that is read, and the box of a stored tensor that has its elements.
#[derive(Debug, Clone)]
pub(crate) struct MappedBox {
    /// Flat key of the stored tensor.
    pub(crate) key: String,
    /// The box of the stored tensor, in its own order of dimensions.
    pub(crate) stored: TensorBox,
    /// Whether the stored box is a matrix that has to be transposed.
    pub(crate) transposed: bool,
    /// Where the box begins in the tensor that is read.
    pub(crate) offsets: Vec<usize>,
    /// Its sizes there; as many elements as the stored box.
    pub(crate) sizes: Vec<usize>,
}

/// Bytes that are held next to a tensor while elements are converted or transposed.
pub(crate) const MAPPED_BUFFER: usize = 16 << 20;

/// Bytes of files that are read at a time: they are held as bytes, as elements and in the type of the tensor, which is up to
/// four times as wide.
const PIECE: usize = MAPPED_BUFFER / 8;

/// Reads a tensor from boxes that make it up. Local.
///
/// A single box in the right order and type is read into the tensor directly; otherwise about [`MAPPED_BUFFER`] bytes are
/// held next to the tensor, or one row if that is larger.
pub(crate) fn read_mapped(catalog: &Catalog, meta: TensorMeta, boxes: &[MappedBox]) -> Result<Tensor> {
    if meta.elem_count() == 0 {
        return Ok(placeholder(&meta)?);
    }
    let direct = |mapped: &MappedBox| -> Result<bool> {
        let same_type = catalog.tensor(&mapped.key)?.element.dtype() == Some(meta.dtype);
        Ok(same_type && !mapped.transposed)
    };
    if let [one] = boxes
        && direct(one)?
    {
        let whole = read_box(&catalog.files, &one.key, catalog.tensor(&one.key)?, &one.stored, meta.dtype)?;
        return Ok(whole.reshape(meta.shape.as_slice())?);
    }
    let dtype = meta.dtype;
    let whole = Assembly::kept(meta)?;
    for mapped in boxes {
        let size = catalog.tensor(&mapped.key)?.element.size_in_bytes();
        for (stored, offsets, sizes) in mapped.pieces(size) {
            let piece = piece(catalog, mapped, &stored, &sizes, dtype)?;
            // SAFETY: one thread; pieces are disjoint, of the tensor's type, and inside it.
            unsafe { whole.paste(&piece, &offsets) };
        }
    }
    // SAFETY: the caller's boxes make up the tensor.
    Ok(unsafe { whole.finish() })
}

/// Reads quantized blocks from boxes that make up a matrix: u8 `[rows, blocks, bytes of a block]`. Local. Boxes are in
/// elements, are not transposed, and begin and end between blocks; `meta` is that of the result.
pub(crate) fn read_mapped_blocks(
    catalog: &Catalog,
    block: BlockType,
    meta: TensorMeta,
    boxes: &[MappedBox],
) -> Result<Tensor> {
    if meta.elem_count() == 0 {
        return Ok(placeholder(&meta)?);
    }
    let whole = Assembly::kept(meta)?;
    for mapped in boxes {
        let tensor = catalog.tensor(&mapped.key)?;
        for (stored, offsets, sizes) in mapped.pieces(tensor.element.size_in_bytes()) {
            let shape = in_blocks(&sizes, block, block.bytes());
            let mut bytes = shardwise_kernels::reserve(shape.iter().product())?;
            bytes.resize(shape.iter().product(), 0u8);
            catalog.files.read_blocks(&mapped.key, tensor, block, &stored, &mut bytes)?;
            let piece = Tensor::from_vec(bytes, shape, &Device::Cpu)?;
            // SAFETY: one thread; pieces are disjoint, of the tensor's type, and inside it.
            unsafe { whole.paste(&piece, &in_blocks(&offsets, block, 0)) };
        }
    }
    // SAFETY: the caller's boxes make up the tensor.
    Ok(unsafe { whole.finish() })
}

/// Sizes or offsets in elements as ones in blocks, with `bytes` in their dimension.
fn in_blocks(elements: &[usize], block: BlockType, bytes: usize) -> Vec<usize> {
    let (columns, leading) = elements.split_last().expect("matrices");
    [leading, &[columns / block.elements(), bytes]].concat()
}

fn piece(catalog: &Catalog, mapped: &MappedBox, stored: &TensorBox, sizes: &[usize], dtype: DType) -> Result<Tensor> {
    let read = read_box(&catalog.files, &mapped.key, catalog.tensor(&mapped.key)?, stored, dtype)?;
    Ok(if mapped.transposed { read.t()? } else { read.reshape(sizes)? })
}

impl MappedBox {
    /// The box in pieces along its first stored dimension, of few enough bytes each: stored box, offsets and sizes in the
    /// tensor.
    fn pieces(&self, element: usize) -> Vec<(TensorBox, Vec<usize>, Vec<usize>)> {
        let Some(&rows) = self.stored.sizes.first() else {
            return vec![(self.stored.clone(), self.offsets.clone(), self.sizes.clone())];
        };
        let row = (self.stored.volume() / rows.max(1) * element).max(1);
        let step = (PIECE / row).clamp(1, rows.max(1));
        // The dimension of the tensor that the first stored one is: the last two change places if transposed.
        let dim = self.sizes.len() - self.stored.sizes.len() + usize::from(self.transposed);
        let piece = |from: usize| {
            let count = step.min(rows - from);
            let (mut stored, mut offsets, mut sizes) = (self.stored.clone(), self.offsets.clone(), self.sizes.clone());
            stored.offsets[0] += from;
            stored.sizes[0] = count;
            offsets[dim] += from;
            sizes[dim] = count;
            (stored, offsets, sizes)
        };
        (0..rows).step_by(step).map(piece).collect()
    }
}
