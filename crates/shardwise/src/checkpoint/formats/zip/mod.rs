//! The zip archives of `torch.save`: uncompressed entries one after the other, and a central directory at the end.
//!
//! Not the `zip` crate. Reading: the crate allocates memory for as many entries as the end of a file claims, up to two and a
//! half times the size of the file (25 GB for one of 10 GB), before it looks at the first; here the directory's length is bounded
//! and entries are located in byte ranges of an open file. Writing: entries begin at multiples of 64 bytes, so that PyTorch can
//! map them, and are written in one pass with checksums after the data.

mod read;
mod records;
mod write;

pub(in crate::checkpoint) use read::Archive;
pub(in crate::checkpoint) use write::ZipWriter;

#[cfg(test)]
mod tests;
