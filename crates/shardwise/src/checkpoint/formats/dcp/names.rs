//! File and module names in DCP checkpoints.

/// The metadata file; a directory that has it is a DCP checkpoint.
pub(super) const METADATA: &str = ".metadata";
/// Python module of the metadata classes.
pub(super) const CLASSES: &str = "torch.distributed.checkpoint.metadata";
/// Python module of `TensorProperties` in checkpoints before PyTorch 2.3.
pub(super) const OLD_PROPERTIES: &str = "torch.distributed._shard.sharded_tensor.metadata";
/// Python module of `_StorageInfo`.
pub(super) const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";
