//! Checks that tensors fit into memory, before anything is computed and with the same result on all ranks.

use candle_core::DType;

use crate::error::{Error, ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use shardwise_kernels::memory_bytes;

/// Checks that the local part of every rank fits into the memory of the machine. Each rank looks at the parts of all, so all get
/// the same error. A dry run allocates nothing.
pub(crate) fn check_memory(layout: &Layout, dtype: DType, dry: bool) -> Result<()> {
    let bytes = |shape: &[usize]| TensorMeta { shape: shape.to_vec(), dtype }.bytes();
    // The common case: even the whole tensor fits, so no local shape has to be computed.
    if dry || bytes(layout.shape()) <= memory_bytes() {
        return Ok(());
    }
    let too_much = |&&rank: &&usize| bytes(&layout.local_shape(rank)) > memory_bytes();
    match layout.mesh().ranks().iter().find(too_much) {
        None => Ok(()),
        Some(&rank) => Err(refused(
            &format!("{} {layout}, of which rank {rank} would hold {:?}", dtype.as_str(), layout.local_shape(rank)),
            bytes(&layout.local_shape(rank)),
        )),
    }
}

/// Checks that tensors can be addressed and that some layout of them on `ranks` ranks fits into memory. Called before a layout is
/// computed, which may take time proportional to a size.
pub(crate) fn check_metas(metas: &[TensorMeta], ranks: usize, dry: bool) -> Result<()> {
    for meta in metas {
        Layout::check_shape(&meta.shape)?;
        let share = meta.bytes() / ranks;
        if !dry && share > memory_bytes() {
            return Err(refused(&format!("{} {:?} on {ranks} rank(s)", meta.dtype.as_str(), meta.shape), share));
        }
    }
    Ok(())
}

/// Checks that a tensor of which every rank has all elements, or a table of as many, fits into memory.
pub(crate) fn check_whole(shape: &[usize], dtype: DType) -> Result<()> {
    check_metas(&[TensorMeta { shape: shape.to_vec(), dtype }], 1, false)
}

#[cold]
fn refused(found: &str, bytes: usize) -> Error {
    let gigabytes = |bytes: usize| format!("{:.1} GB", bytes as f64 / 1e9);
    ErrorKind::OutOfMemory { bytes: bytes as u64, limit: memory_bytes() as u64 }.error(
        "tensor",
        format!("{found}, {}", gigabytes(bytes)),
        format!("at most {} per rank, the memory of this machine", gigabytes(memory_bytes())),
        "check the sizes, shard the tensor over more ranks, or try the program in a dry run",
    )
}
