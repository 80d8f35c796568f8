//! Names of entries and classes in archives of `torch.save`.

use super::super::element::ElementType;

/// The entry with the checksums of the blocks of storage 0, in archives of one tensor that this library wrote. PyTorch does
/// not look at it.
pub(super) const CHECKSUMS: &str = ".shardwise_crc32";

/// The classes of storages that have a type of elements; other types are stored as bytes.
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
