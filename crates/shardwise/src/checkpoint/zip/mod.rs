//! The zip archives of `torch.save`: entries stored one after the other as they are, and a directory at the end.

mod read;
mod write;

pub(super) use read::Archive;
pub(super) use write::Writer;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END_64: u32 = 0x0606_4b50;
const LOCATOR_64: u32 = 0x0706_4b50;
const DESCRIPTOR: u32 = 0x0807_4b50;
/// Length of the fixed parts of these records.
const LOCAL_LENGTH: u64 = 30;
const CENTRAL_LENGTH: usize = 46;
const END_LENGTH: u64 = 22;
const END_64_LENGTH: u64 = 56;
const LOCATOR_64_LENGTH: u64 = 20;
/// Tag of the extra field with numbers of 64 bits.
const EXTRA_64: u16 = 1;

#[cfg(test)]
mod tests;
