//! Whether the ranks of a mesh can hold a tensor, asked before anything is computed: one verdict on all of them.

use candle_core::DType;

use crate::error::{Error, ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use shardwise_kernels::memory_bytes;

/// An error if a rank would hold more of the tensor than its machine has memory. All ranks come to the same verdict, because
/// each looks at the parts of all. A dry run holds nothing.
pub(crate) fn check_room(layout: &Layout, dtype: DType, dry: bool) -> Result<()> {
    let bytes = |shape: &[usize]| TensorMeta { shape: shape.to_vec(), dtype }.bytes();
    // Nearly always: even the whole fits.
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

/// An error if a tensor of a description is beyond what memory can address or, whatever its layout, beyond what so many
/// ranks can hold. Asked before a layout is worked out, which may take time in the order of a size.
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
