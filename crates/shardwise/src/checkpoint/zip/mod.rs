//! The zip archives of `torch.save`: entries stored one after the other as they are, and a directory at the end.
//!
//! Ours and not the `zip` crate. Reading: the crate reserves memory for as many entries as the end of a file claims, two and a
//! half times the size of the file (25 GB for one of 10 GB), before it looks at the first; here a directory is bounded and
//! entries are located in ranges of a file that is held open. Writing: entries begin at multiples of 64 bytes, as PyTorch maps
//! them, in one pass with checksums behind the data.

mod read;
mod records;
mod write;

pub(super) use read::Archive;
pub(super) use write::ZipWriter;

#[cfg(test)]
mod tests;
