//! Names that PyTorch gives the parts of such a checkpoint.

/// The file that makes a directory such a checkpoint.
pub(super) const METADATA: &str = ".metadata";
/// Where PyTorch's classes for it live.
pub(super) const CLASSES: &str = "torch.distributed.checkpoint.metadata";
pub(super) const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";
