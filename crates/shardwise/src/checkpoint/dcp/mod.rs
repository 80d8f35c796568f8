//! PyTorch's distributed checkpoint: `.metadata` says what is where, and `.distcp` files hold one archive of `torch.save` per
//! chunk or value.

mod read;
mod write;

pub(super) use read::open;
pub(super) use write::{Place, metadata_bytes, write_file};

/// The file that makes a directory such a checkpoint.
pub(super) const METADATA: &str = ".metadata";
/// Where PyTorch's classes for it live.
const CLASSES: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";

#[cfg(test)]
mod tests;
