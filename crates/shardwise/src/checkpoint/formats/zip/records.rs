//! Signatures and lengths of zip records.

/// Signatures of the local header, central directory entry, end of central directory (32 and 64 bits), its locator, and
/// the data descriptor.
pub(super) const LOCAL: u32 = 0x0403_4b50;
pub(super) const CENTRAL: u32 = 0x0201_4b50;
pub(super) const END: u32 = 0x0605_4b50;
pub(super) const END_64: u32 = 0x0606_4b50;
pub(super) const LOCATOR_64: u32 = 0x0706_4b50;
pub(super) const DESCRIPTOR: u32 = 0x0807_4b50;
/// Lengths of the fixed parts of these records.
pub(super) const LOCAL_LENGTH: u64 = 30;
pub(super) const CENTRAL_LENGTH: usize = 46;
pub(super) const END_LENGTH: u64 = 22;
pub(super) const END_64_LENGTH: u64 = 56;
pub(super) const LOCATOR_64_LENGTH: u64 = 20;
/// Tag of the Zip64 extra field.
pub(super) const EXTRA_64: u16 = 1;
