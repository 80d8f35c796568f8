//! Signatures and lengths of the records of an archive.

pub(super) const LOCAL: u32 = 0x0403_4b50;
pub(super) const CENTRAL: u32 = 0x0201_4b50;
pub(super) const END: u32 = 0x0605_4b50;
pub(super) const END_64: u32 = 0x0606_4b50;
pub(super) const LOCATOR_64: u32 = 0x0706_4b50;
pub(super) const DESCRIPTOR: u32 = 0x0807_4b50;
/// Length of the fixed parts of these records.
pub(super) const LOCAL_LENGTH: u64 = 30;
pub(super) const CENTRAL_LENGTH: usize = 46;
pub(super) const END_LENGTH: u64 = 22;
pub(super) const END_64_LENGTH: u64 = 56;
pub(super) const LOCATOR_64_LENGTH: u64 = 20;
/// Tag of the extra field with numbers of 64 bits.
pub(super) const EXTRA_64: u16 = 1;
