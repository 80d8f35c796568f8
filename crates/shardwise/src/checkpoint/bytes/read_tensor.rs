//! Reading the local part of a tensor in memory from a checkpoint.

use candle_core::{DType, Device, Tensor};

use crate::checkpoint::bytes::cast::to_tensor;
use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::stored::StoredTensor;
use crate::checkpoint::metadata::value::Value;
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::layout::{Layout, OwnedBox, TensorBox, TensorMeta};
use crate::param::MergedTensor;
use crate::sharded::ShardedTensor;
use crate::tensor::DTensor;
use shardwise_kernels::{Assembly, convert, placeholder};

/// Reads a one-element tensor as a number.
pub(in crate::checkpoint) fn read_number(files: &Files, key: &str, stored: &StoredTensor) -> Result<Value> {
    let dtype = stored.element.widened()?;
    let number = read_box(files, key, stored, &whole_box(&stored.shape), dtype)?.flatten_all()?;
    Ok(match stored.element {
        ElementType::Bool => Value::Bool(number.to_vec1::<u8>()?[0] != 0),
        _ if dtype.is_float() => Value::Float(number.to_dtype(DType::F64)?.to_vec1::<f64>()?[0]),
        _ => Value::Int(number.to_dtype(DType::I64)?.to_vec1::<i64>()?[0]),
    })
}

/// A number as a 0-D tensor.
pub(in crate::checkpoint) fn to_scalar(value: &Value, dtype: DType) -> Result<Tensor> {
    let number = match value {
        Value::Int(n) => Tensor::new(*n, &Device::Cpu)?,
        Value::Float(x) => Tensor::new(*x, &Device::Cpu)?,
        Value::Bool(b) => Tensor::new(u8::from(*b), &Device::Cpu)?,
        _ => unreachable!("match_template accepts only numbers here"),
    };
    Ok(convert(&number, dtype)?)
}

/// Reads a box of one tensor.
pub(in crate::checkpoint) type ReadBox<'a> = dyn Fn(&TensorBox) -> Result<Tensor> + 'a;

/// Reads this rank's local part of a tensor.
pub(in crate::checkpoint) fn read_tensor(
    read: &ReadBox<'_>,
    mesh: &DeviceMesh,
    layout: Layout,
    dtype: DType,
) -> Result<DTensor> {
    let rank = mesh.world().rank();
    let meta = TensorMeta { shape: layout.local_shape(rank), dtype };
    let boxes = layout.boxes_of(rank);
    let local = match boxes.as_slice() {
        [] => placeholder(&meta)?,
        [single] => read(&single.global)?,
        several => {
            let whole = Assembly::kept(meta)?;
            for OwnedBox { global, local_offsets, .. } in several {
                // SAFETY: one thread; the boxes are disjoint.
                unsafe { whole.paste(&read(global)?, local_offsets) };
            }
            // SAFETY: the boxes of a rank make up its local tensor.
            unsafe { whole.finish() }
        }
    };
    Ok(DTensor::from_parts(mesh, layout, local))
}

pub(in crate::checkpoint) fn read_sharded(read: &ReadBox<'_>, like: &ShardedTensor) -> Result<ShardedTensor> {
    let mut loaded = like.clone();
    loaded.set_shards(&|part| read(&part.as_box()))?;
    Ok(loaded)
}

/// Reads this rank's rows of a tensor that is stored with merged dimensions.
pub(in crate::checkpoint) fn read_merged(read: &ReadBox<'_>, like: &MergedTensor) -> Result<MergedTensor> {
    let (mesh, layout) = (like.stored().device_mesh(), like.stored().layout().reduced());
    let rank = mesh.world().rank();
    let meta = TensorMeta { shape: layout.local_shape(rank), dtype: like.stored().dtype() };
    let boxes = like.boxes_of(rank);
    let local = match boxes.is_empty() {
        true => placeholder(&meta)?,
        false => {
            let whole = Assembly::kept(meta)?;
            for OwnedBox { global, local_offsets, .. } in &boxes {
                let rows = read(global)?.reshape(like.merged_shape().stored_sizes(global))?;
                // SAFETY: one thread; the boxes are disjoint.
                unsafe { whole.paste(&rows, local_offsets) };
            }
            // SAFETY: the boxes of a rank make up its local tensor.
            unsafe { whole.finish() }
        }
    };
    Ok(like.with_stored(DTensor::from_parts(mesh, layout, local)))
}

/// The box that is a whole tensor.
pub(in crate::checkpoint) fn whole_box(shape: &[usize]) -> TensorBox {
    TensorBox { offsets: vec![0; shape.len()], sizes: shape.to_vec() }
}

/// Reads a box of a stored tensor, directly into the tensor's memory unless its type has to be converted.
pub(in crate::checkpoint) fn read_box(
    files: &Files,
    key: &str,
    stored: &StoredTensor,
    part: &TensorBox,
    dtype: DType,
) -> Result<Tensor> {
    if stored.element.dtype() == Some(dtype) {
        let memory = Assembly::kept(TensorMeta { shape: part.sizes.clone(), dtype })?;
        let length = part.volume() * dtype.size_in_bytes();
        // SAFETY: the memory is `length` bytes long and not shared; it is zeroed before it is seen as bytes, and any bit
        // pattern is an element of these types.
        unsafe {
            let first = memory.range::<u8>(0);
            first.write_bytes(0, length);
            files.read_box(key, stored, part, std::slice::from_raw_parts_mut(first, length))?;
            return Ok(memory.finish());
        }
    }
    let mut bytes = shardwise_kernels::reserve(part.volume() * stored.element.size_in_bytes())?;
    bytes.resize(part.volume() * stored.element.size_in_bytes(), 0);
    files.read_box(key, stored, part, &mut bytes)?;
    Ok(convert(&to_tensor(&bytes, stored.element)?, dtype)?.reshape(part.sizes.as_slice())?)
}
