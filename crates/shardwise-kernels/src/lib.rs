//! CPU kernels on local tensors: blocks copied into a tensor under construction, operands reduced, functions of elements
//! and reductions over dimensions. Nothing here knows of ranks or meshes. A kernel runs on one thread, since every rank
//! has its own.

#[doc(hidden)]
pub use {candle_core, half};

mod error;
mod meta;
mod reduce_op;
mod room;
mod fresh;
mod assembly;
mod compare;
mod copy;
mod pick;
mod pointwise;
mod product;
mod reduce;
mod vector;
pub mod math;
mod convert;
mod map;
mod number;
mod fold;
pub mod rows;
mod update;
mod power;

pub use assembly::{Assembly, concat, cut, dense, own_copy};
pub use compare::{all_close, all_equal};
pub use error::{Error, ErrorKind, Invalid, Result};
pub use fold::{Fold, fold};
pub use fresh::Fresh;
pub use map::{Arithmetic, Each, Function, Wide, map};
pub use meta::TensorMeta;
pub use number::{Number, limits};
pub use pick::{NOWHERE, Numbers, pick, take};
pub use pointwise::{from_reals, from_wholes, reals, wholes};
pub use power::{Power, measure};
pub use product::product;
pub use reduce::{Reducible, reduce_block};
pub use reduce_op::ReduceOp;
pub use room::{check_bytes, memory_bytes};
pub use update::{Elementwise, Stored, update};

use candle_core::{CpuStorage, DType, Device, Layout, Storage, Tensor};

/// Runs `$body` with `$T` standing for the Rust type of `$dtype`; types whose elements are not whole bytes in memory
/// evaluate to `$otherwise`.
#[macro_export]
macro_rules! with_type {
    ($dtype:expr, $T:ident => $body:expr, otherwise $otherwise:expr) => {
        match $dtype {
            $crate::candle_core::DType::U8 => {
                type $T = u8;
                $body
            }
            $crate::candle_core::DType::U32 => {
                type $T = u32;
                $body
            }
            $crate::candle_core::DType::I16 => {
                type $T = i16;
                $body
            }
            $crate::candle_core::DType::I32 => {
                type $T = i32;
                $body
            }
            $crate::candle_core::DType::I64 => {
                type $T = i64;
                $body
            }
            $crate::candle_core::DType::BF16 => {
                type $T = $crate::half::bf16;
                $body
            }
            $crate::candle_core::DType::F16 => {
                type $T = $crate::half::f16;
                $body
            }
            $crate::candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            _ => $otherwise,
        }
    };
}

/// The error for an element type or a device that the CPU kernels do not serve.
pub fn check_served(tensor: &Tensor) -> Result<()> {
    if !tensor.device().is_cpu() {
        return Err(ErrorKind::Unsupported.error(
            "tensor",
            format!("a tensor on {:?}", tensor.device().location()),
            "a tensor on the CPU",
            "move it with candle's to_device(&Device::Cpu) first",
        ));
    }
    check_dtype(tensor.dtype())
}

/// The error for an element type that the CPU kernels do not serve.
pub fn check_dtype(dtype: DType) -> Result<()> {
    with_type!(dtype, T => { let _ = size_of::<T>(); Ok(()) }, otherwise Err(ErrorKind::dtype(dtype).error(
        "element type",
        dtype.as_str(),
        "f64, f32, f16, bf16, i64, i32, i16, u32 or u8",
        match dtype {
            DType::F8E4M3 => "there are no kernels for it: convert the plain tensor with candle's to_dtype(DType::F32) first",
            _ => "neither this library nor candle computes with it or converts it: keep its bytes as u8",
        },
    )))
}

/// The error for a device on which nothing is computed here.
pub fn check_cpu(device: &Device) -> Result<()> {
    let name = match device {
        Device::Cpu => return Ok(()),
        Device::Cuda(_) => "cuda",
        Device::Metal(_) => "metal",
    };
    Err(ErrorKind::Unsupported.error(
        "device",
        format!("`{name}`, which candle knows and this library does not compute on"),
        "`cpu`, the one device with kernels",
        "keep distributed tensors on the CPU, and copy what to_local returns to the other device",
    ))
}

/// The tensor without a place in a graph of candle's gradients, and in memory of its own if it is a variable. Other tensors
/// may share the memory of a variable too, and candle does not say which: what has to outlive the call it was passed to goes
/// through `own_copy`.
pub fn immutable(tensor: &Tensor) -> Result<Tensor> {
    if tensor.is_variable() { Ok(tensor.copy()?.detach()) } else { Ok(tensor.detach()) }
}

/// Whether two tensors begin at the same place in memory.
pub fn same_memory(a: &Tensor, b: &Tensor) -> bool {
    with_first_element(a, |first, _| first as usize) == with_first_element(b, |first, _| first as usize)
}

/// A tensor filled with one number; an error if its type does not hold it.
pub fn filled(value: impl Into<Number>, meta: &TensorMeta) -> Result<Tensor> {
    let value = value.into().fit(meta.dtype)?;
    let output = Assembly::new(meta.clone())?;
    with_type!(meta.dtype, T => {
        // SAFETY: the memory is that of a tensor with this type and number of elements, and nobody else writes to it.
        unsafe {
            let first = output.range::<T>(0);
            let element = value.element::<T>();
            (0..meta.elem_count()).for_each(|i| first.add(i).write(element));
            Ok(output.finish())
        }
    }, otherwise unreachable!("checked when reserved"))
}

/// Runs `body` with the elements of a dense tensor as they are in memory.
///
/// # Errors
/// If the tensor is not on the CPU, has an element type that the kernels do not serve, or is not dense: see [`dense`].
pub fn with_bytes<R>(tensor: &Tensor, body: impl FnOnce(&[u8]) -> R) -> Result<R> {
    check_served(tensor)?;
    if !tensor.is_contiguous() {
        let found = format!("shape {:?} with strides {:?}", tensor.dims(), tensor.stride());
        return Err(ErrorKind::shape(tensor.dims()).error(
            "tensor",
            found,
            "elements one after the other in memory",
            "pass it through dense",
        ));
    }
    let length = tensor.elem_count() * tensor.dtype().size_in_bytes();
    // SAFETY: the elements of a contiguous tensor are so many initialised bytes, all inside its storage (checked where the
    // address is taken), which nobody changes while the storage is locked.
    Ok(with_first_element(tensor, |first, _| body(unsafe { std::slice::from_raw_parts(first, length) })))
}

/// The elements in row-major order, in little-endian bytes.
pub fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = dense(tensor)?.flatten_all()?;
    with_type!(flat.dtype(), T => {
        Ok(flat.to_vec1::<T>()?.into_iter().flat_map(T::to_le_bytes).collect())
    }, otherwise unreachable!("checked when the tensor was made"))
}

/// A vector with room for so many elements, or an error where memory ends.
pub fn reserve<T>(count: usize) -> Result<Vec<T>> {
    check_bytes(count, size_of::<T>())?;
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(|_| room::refused(count, size_of::<T>(), "memory that is free now"))?;
    Ok(values)
}

/// A tensor of any size in the memory of one element, for dry runs.
pub fn placeholder(meta: &TensorMeta) -> Result<Tensor> {
    Ok(Tensor::zeros((), meta.dtype, &Device::Cpu)?.broadcast_as(meta.shape.as_slice())?)
}

/// Runs `body` with the address of the tensor's first element and its strides. The tensor must be on the CPU.
fn with_first_element<R>(tensor: &Tensor, body: impl FnOnce(*const u8, &[usize]) -> R) -> R {
    let (storage, layout) = tensor.storage_and_layout();
    body(first_element(&storage, layout).0, layout.stride())
}

/// The address of a tensor's first element and its type. The tensor must be on the CPU.
///
/// # Panics
/// If an element of the layout is outside the storage: candle lets anybody put the two together.
fn first_element(storage: &Storage, layout: &Layout) -> (*const u8, DType) {
    let Storage::Cpu(cpu) = storage else { unreachable!("callers check the device") };
    let (base, held, dtype): (*const u8, usize, DType) = match cpu {
        CpuStorage::U8(v) => (v.as_ptr(), v.len(), DType::U8),
        CpuStorage::U32(v) => (v.as_ptr().cast(), v.len(), DType::U32),
        CpuStorage::I16(v) => (v.as_ptr().cast(), v.len(), DType::I16),
        CpuStorage::I32(v) => (v.as_ptr().cast(), v.len(), DType::I32),
        CpuStorage::I64(v) => (v.as_ptr().cast(), v.len(), DType::I64),
        CpuStorage::BF16(v) => (v.as_ptr().cast(), v.len(), DType::BF16),
        CpuStorage::F16(v) => (v.as_ptr().cast(), v.len(), DType::F16),
        CpuStorage::F32(v) => (v.as_ptr().cast(), v.len(), DType::F32),
        CpuStorage::F64(v) => (v.as_ptr().cast(), v.len(), DType::F64),
        _ => unreachable!("callers check the element type"),
    };
    // The offset of a view without elements may point anywhere.
    if layout.dims().contains(&0) {
        return (base, dtype);
    }
    let steps = layout.dims().iter().zip(layout.stride());
    let last =
        steps.fold(layout.start_offset(), |last, (n, stride)| last.saturating_add((n - 1).saturating_mul(*stride)));
    assert!(last < held, "element {last} of a tensor whose storage has {held}");
    // SAFETY: the last element is inside the storage, and so is the first.
    (unsafe { base.add(layout.start_offset() * dtype.size_in_bytes()) }, dtype)
}
