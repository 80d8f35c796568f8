//! The classes and functions that a checkpoint's pickle may name. None of them is ever called.

use crate::error::{ErrorKind, Result};

/// Refuses a class or function that PyTorch does not put into checkpoints.
pub(super) fn check(module: &str, name: &str) -> Result<()> {
    let listed = match module {
        "torch" => TORCH.contains(&name) || name.strip_suffix("Storage").is_some_and(|kind| STORAGES.contains(&kind)),
        "torch._utils" => {
            matches!(name, "_rebuild_tensor_v2" | "_rebuild_tensor_v3" | "_rebuild_parameter" | "_rebuild_tensor")
        }
        "torch._tensor" => name == "_rebuild_from_type_v2",
        "torch.nn.parameter" => matches!(name, "Parameter" | "Buffer"),
        "torch.storage" => matches!(name, "UntypedStorage" | "TypedStorage"),
        "torch.serialization" => name == "_get_layout",
        "collections" => name == "OrderedDict",
        "pathlib" | "pathlib._local" => {
            matches!(name, "PosixPath" | "WindowsPath" | "PurePosixPath" | "PureWindowsPath")
        }
        "torch.distributed.checkpoint.metadata" => METADATA.contains(&name),
        // Where `TensorProperties` was before PyTorch 2.3.
        "torch.distributed._shard.sharded_tensor.metadata" => {
            matches!(name, "TensorProperties" | "MEM_FORMAT_ENCODING")
        }
        "torch.distributed.checkpoint.filesystem" => name == "_StorageInfo",
        _ => false,
    };
    if listed {
        return Ok(());
    }
    Err(ErrorKind::Damaged.error(
        "pickle",
        format!("a reference to {module}.{name}"),
        "only what PyTorch puts into checkpoints",
        "nothing was executed; if the file is from a source you trust, save it again with tensors and plain values only",
    ))
}

const TORCH: &[&str] = &[
    "Size",
    "Tensor",
    "bfloat16",
    "bool",
    "complex128",
    "complex64",
    "device",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
];

const STORAGES: &[&str] = &[
    "BFloat16",
    "Bool",
    "Byte",
    "Char",
    "ComplexDouble",
    "ComplexFloat",
    "Double",
    "Float",
    "Half",
    "Int",
    "Long",
    "Short",
    "Untyped",
];

const METADATA: &[&str] = &[
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
];
