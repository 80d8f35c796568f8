//! CPU kernels of Shardwise, on local tensors of one process. Nothing here knows ranks, meshes or placements.
//!
//! | task | items |
//! |---|---|
//! | new memory, strided copies, concatenation | [`UninitBuffer`], [`Assembly`], [`contiguous`], [`concat()`], [`split_packed`] |
//! | elementwise functions with broadcasting, conversion | [`pointwise`], [`PointwiseFn`], [`math`], [`convert()`] |
//! | reductions over dimensions, and over operands | [`reduce_dims`], [`reduce_operands`], [`norm_partial`] |
//! | softmax and norms over the last dimension | [`rows`] |
//! | statistics and normalization of channels | [`channels`] |
//! | matrix products | [`batched_matmul`] |
//! | selection by index, scatters | [`index_select`], [`gather`], [`scatter()`], [`index_add`], [`IndexRange`] |
//! | weighted sums of slices | [`weighted_slices()`], [`SliceTable`] |
//! | sorting, order statistics, scans, searches | [`top_k`], [`byte_counts`], [`scan_totals`], [`scan_extremes`], [`bucketize`], [`nonzero_positions`], [`band()`] |
//! | random elements by position | [`random_elements`], [`philox4x32_10`] |
//! | attention in blocks | [`attention`] |
//! | convolutions, maxima and means over windows | [`convolution`], [`pooling`] |
//! | factorizations and solvers of matrices | [`linalg`] |
//! | special functions | [`special`] |
//! | quantized blocks of GGUF files | [`quantized`] |
//! | optimizer steps | [`elementwise_update`], [`Elementwise`] |
//! | types shared with the library | [`TensorMeta`], [`ReduceOp`], [`Number`], [`ErrorKind`] |
//!
//! Kernels take f64, f32, f16, bf16, i64, i32, i16, u32 and u8 unless they say otherwise; copies and conversions take f8e4m3
//! too. f16 and bf16 are computed in f32 or f64 and rounded at the end. Large inputs are divided over the rayon pool of the calling thread; the bits of a result
//! depend neither on the number of threads nor on the strides of the inputs, and are the same with AVX2 and AVX-512 (one
//! exception: a product with few rows is summed in another order if the right factor is transposed). Inputs may have any
//! strides, and a result is a new contiguous tensor.

#![allow(clippy::needless_range_loop, reason = "loops over several arrays by one index become vector instructions")]

#[doc(hidden)]
pub use {candle_core, float8, half};

mod error;
mod parallel;
mod meta;
mod reduce_op;
mod memory_limit;
mod eight_bit;
mod uninit_buffer;
mod assembly;
mod compare;
mod strided_copy;
mod typed_slice;
mod index_range;
mod gather;
mod scatter;
mod scatter_reduce;
mod band;
mod element_vec;
mod simd;
mod stream;
mod matmul;
mod reduce_operands;
pub mod convolution;
pub mod pooling;
pub mod channels;
mod peak;
pub mod math;
mod convert;
mod accumulate;
mod random;
mod pointwise;
#[cfg(test)]
mod math_accuracy;
mod scalar;
mod order;
mod scan;
mod search;
mod weighted_slices;
mod reduce_dims;
pub mod rows;
pub mod attention;
pub mod experts;
mod optimizer_update;
mod norm_partial;
pub mod linalg;
pub mod special;
pub mod quantized;

pub use accumulate::{add_assign, same_storage};
pub use assembly::{Assembly, concat, contiguous, own_copy, split_packed};
pub use band::band;
pub use compare::{all_close, all_equal};
pub use convert::convert;
pub use element_vec::to_f64_vec;
pub use error::{Error, ErrorKind, Invalid, Result};
pub use gather::{gather, index_select, index_select_by};
pub use index_range::{IndexRange, NO_INDEX, first_outside, wrapped_indices};
pub use matmul::{add_batched_matmul, batched_matmul, batched_matmul_bias, batched_matmul_f32, matmul_activation};
pub use memory_limit::{check_bytes, memory_bytes};
pub use meta::TensorMeta;
pub use norm_partial::{NormPartial, norm_partial};
pub use optimizer_update::{Elementwise, StateElement, elementwise_update};
pub use order::{
    BYTE_VALUES, SortOrder, byte_counts, count_before, count_rank, next_byte, nth_of_rank, rank_bytes, top_k,
};
pub use peak::{move_bytes, multiply_adds, multiply_adds_per_block};
pub use pointwise::{ComputeType, PerType, PointwiseFn, ViaF64, pointwise, pointwise_f32};
pub use random::{RandomDraw, RandomNumbers, philox4x32_10, random_elements};
pub use reduce_dims::{DimReduction, reduce_dims};
pub use reduce_op::ReduceOp;
pub use reduce_operands::{Reducible, reduce_operands};
pub use scalar::{Number, integer_range};
pub use scan::{
    ProductScan, ScanKind, ScannedExtremes, add_to_places, carry_extremes, carry_totals, extreme_sums,
    product_gradient, product_parts, scan_extremes, scan_totals,
};
pub use scatter::{SumsFrom, index_add, put_slices, scatter, scatter_add};
pub use scatter_reduce::{ScatterReduction, scatter_reduce};
pub use search::{bucketize, count_nonzero, first_nan, nonzero_positions};
pub use simd::instruction_sets;
pub use typed_slice::with_slice;
pub use uninit_buffer::UninitBuffer;
pub use weighted_slices::{SliceTable, weighted_slices};

use candle_core::{CpuStorage, DType, Device, Layout, Storage, Tensor};

/// Runs `$body` with `$T` as the Rust type of the elements of `$dtype`, like PyTorch's `AT_DISPATCH_ALL_TYPES`.
///
/// Types that the kernels do not support (8-bit floats and those with several elements per byte) evaluate to `$otherwise`.
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

/// As [`with_type!`], for code that stores or moves elements: also with f8.
#[macro_export]
macro_rules! with_stored_type {
    ($dtype:expr, $T:ident => $body:expr, otherwise $otherwise:expr) => {
        match $dtype {
            $crate::candle_core::DType::F8E4M3 => {
                type $T = $crate::float8::F8E4M3;
                $body
            }
            other => $crate::with_type!(other, $T => $body, otherwise $otherwise),
        }
    };
}

/// Checks that the kernels support the device of a tensor, and compute with its element type.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if it is not on the CPU, or the error of [`check_arithmetic`].
pub fn check_supported(tensor: &Tensor) -> Result<()> {
    check_stored(tensor)?;
    check_arithmetic(tensor.dtype())
}

/// Checks that the kernels support the device of a tensor, and store and move elements of its type.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if it is not on the CPU, or the error of [`check_dtype`].
pub fn check_stored(tensor: &Tensor) -> Result<()> {
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

/// Checks that tensors can have an element type: they are stored, moved and converted.
///
/// # Errors
/// [`ErrorKind::DType`] for all but f64, f32, f16, bf16, f8e4m3, i64, i32, i16, u32 and u8.
pub fn check_dtype(dtype: DType) -> Result<()> {
    match dtype {
        DType::F8E4M3 => Ok(()),
        _ => check_arithmetic(dtype),
    }
}

/// Checks that the kernels compute with an element type.
///
/// # Errors
/// [`ErrorKind::DType`] for all but f64, f32, f16, bf16, i64, i32, i16, u32 and u8.
pub fn check_arithmetic(dtype: DType) -> Result<()> {
    with_type!(dtype, T => { let _ = size_of::<T>(); Ok(()) }, otherwise Err(ErrorKind::dtype(dtype).error(
        "element type",
        dtype.as_str(),
        "f64, f32, f16, bf16, i64, i32, i16, u32 or u8",
        match dtype {
            DType::F8E4M3 => "it is a type to store, move and convert, with scaled_mm as its one product: convert it with to_dtype(DType::F32) first",
            _ => "neither this library nor candle computes with it or converts it: keep its bytes as u8",
        },
    )))
}

/// Checks that a device is the CPU.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for CUDA and Metal.
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

/// Detaches a tensor from candle's gradient graph, and copies it if it is a `Var`, which can change in place.
///
/// A tensor that is not a `Var` may still share the memory of one, and candle does not say which. So a tensor that must not
/// change after the call that it was passed to goes through [`own_copy`] instead.
pub fn immutable(tensor: &Tensor) -> Result<Tensor> {
    if tensor.is_variable() { Ok(tensor.copy()?.detach()) } else { Ok(tensor.detach()) }
}

/// Whether the first elements of two tensors have the same address.
pub fn same_memory(a: &Tensor, b: &Tensor) -> bool {
    with_first_element(a, |first, _| first as usize) == with_first_element(b, |first, _| first as usize)
}

/// Returns a tensor filled with one number, as `torch.full`.
///
/// # Errors
/// If the type does not represent the number (see [`Number::fit`]), is not supported, or memory does not suffice.
pub fn filled(value: impl Into<Number>, meta: &TensorMeta) -> Result<Tensor> {
    let value = value.into().fit(meta.dtype)?;
    if meta.dtype == DType::F8E4M3 {
        return convert(&filled(value, &TensorMeta::new(meta.shape.as_slice(), DType::F32))?, meta.dtype);
    }
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

/// Runs `body` with the bytes of a contiguous tensor, without a copy, in the byte order of the machine.
///
/// # Errors
/// If the tensor is not contiguous (see [`contiguous`]), not on the CPU, or of an element type that the kernels do not
/// support.
pub fn with_bytes<R>(tensor: &Tensor, body: impl FnOnce(&[u8]) -> R) -> Result<R> {
    check_stored(tensor)?;
    if !tensor.is_contiguous() {
        let found = format!("shape {:?} with strides {:?}", tensor.dims(), tensor.stride());
        return Err(ErrorKind::shape(tensor.dims()).error(
            "tensor",
            found,
            "a contiguous tensor",
            "pass it through contiguous",
        ));
    }
    let length = tensor.elem_count() * tensor.dtype().size_in_bytes();
    // SAFETY: the elements of a contiguous tensor are `length` initialised bytes, all inside its storage (`first_element`
    // checks it), which nobody changes while the storage is locked.
    Ok(with_first_element(tensor, |first, _| body(unsafe { std::slice::from_raw_parts(first, length) })))
}

/// Copies the elements, in row-major order, to little-endian bytes.
pub fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = contiguous(tensor)?.flatten_all()?;
    if flat.dtype() == DType::F8E4M3 {
        return with_bytes(&flat, <[u8]>::to_vec);
    }
    with_type!(flat.dtype(), T => {
        Ok(flat.to_vec1::<T>()?.into_iter().flat_map(T::to_le_bytes).collect())
    }, otherwise unreachable!("`contiguous` checks it"))
}

/// Allocates an empty vector with capacity for `count` elements.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] if they do not fit into memory, instead of ending the process.
pub fn reserve<T>(count: usize) -> Result<Vec<T>> {
    check_bytes(count, size_of::<T>())?;
    let mut values = Vec::new();
    values
        .try_reserve_exact(count)
        .map_err(|_| memory_limit::out_of_memory(count, size_of::<T>(), "memory that is free now"))?;
    Ok(values)
}

/// Returns a tensor of this shape in the memory of one element (all strides are 0), for dry runs.
pub fn placeholder(meta: &TensorMeta) -> Result<Tensor> {
    Ok(Tensor::zeros((), meta.dtype, &Device::Cpu)?.broadcast_as(meta.shape.as_slice())?)
}

/// Runs `body` with the address of the tensor's first element and its strides. The tensor must be on the CPU and of a
/// supported type.
fn with_first_element<R>(tensor: &Tensor, body: impl FnOnce(*const u8, &[usize]) -> R) -> R {
    let (storage, layout) = tensor.storage_and_layout();
    body(first_element(&storage, layout).0, layout.stride())
}

/// Address of a tensor's first element, and the element type. The tensor must be on the CPU.
///
/// # Panics
/// If an element of the layout is outside the storage: candle's `Tensor::from_storage` combines any two.
fn first_element(storage: &Storage, layout: &Layout) -> (*const u8, DType) {
    let Storage::Cpu(cpu) = storage else { unreachable!("callers check the device") };
    let (base, len, dtype): (*const u8, usize, DType) = match cpu {
        CpuStorage::U8(v) => (v.as_ptr(), v.len(), DType::U8),
        CpuStorage::U32(v) => (v.as_ptr().cast(), v.len(), DType::U32),
        CpuStorage::I16(v) => (v.as_ptr().cast(), v.len(), DType::I16),
        CpuStorage::I32(v) => (v.as_ptr().cast(), v.len(), DType::I32),
        CpuStorage::I64(v) => (v.as_ptr().cast(), v.len(), DType::I64),
        CpuStorage::BF16(v) => (v.as_ptr().cast(), v.len(), DType::BF16),
        CpuStorage::F16(v) => (v.as_ptr().cast(), v.len(), DType::F16),
        CpuStorage::F32(v) => (v.as_ptr().cast(), v.len(), DType::F32),
        CpuStorage::F64(v) => (v.as_ptr().cast(), v.len(), DType::F64),
        CpuStorage::F8E4M3(v) => (v.as_ptr().cast(), v.len(), DType::F8E4M3),
        _ => unreachable!("callers check the element type"),
    };
    // The offset of a view without elements may be outside the storage.
    if layout.dims().contains(&0) {
        return (base, dtype);
    }
    let steps = layout.dims().iter().zip(layout.stride());
    let last =
        steps.fold(layout.start_offset(), |last, (n, stride)| last.saturating_add((n - 1).saturating_mul(*stride)));
    assert!(last < len, "element {last} of a tensor whose storage has {len}");
    // SAFETY: the last element is inside the storage, and so is the first.
    (unsafe { base.add(layout.start_offset() * dtype.size_in_bytes()) }, dtype)
}
