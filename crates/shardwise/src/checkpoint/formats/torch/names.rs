//! Names of entries and classes in `torch.save` archives.

use crate::checkpoint::metadata::element::ElementType;

/// The entry with the block checksums of storage 0, in single-tensor archives that this library wrote. PyTorch ignores it.
pub(super) const CHECKSUMS: &str = ".shardwise_crc32";

/// Typed storage classes; elements of other types are stored in an `UntypedStorage`.
pub(super) const STORAGES: &[(&str, ElementType)] = &[
    ("FloatStorage", ElementType::F32),
    ("DoubleStorage", ElementType::F64),
    ("HalfStorage", ElementType::F16),
    ("BFloat16Storage", ElementType::BF16),
    ("LongStorage", ElementType::I64),
    ("IntStorage", ElementType::I32),
    ("ShortStorage", ElementType::I16),
    ("CharStorage", ElementType::I8),
    ("ByteStorage", ElementType::U8),
    ("BoolStorage", ElementType::Bool),
    ("ComplexFloatStorage", ElementType::C64),
];
