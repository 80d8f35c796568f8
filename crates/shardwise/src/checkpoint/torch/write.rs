//! Writing `torch.save` archives of one tensor or one value.

use std::io::Write;

use super::super::blocks::{BlockChecksums, BlockHasher};
use super::super::content::BoxContent;
use super::super::pickle::PickleWriter;
use super::super::stored::row_major;
use super::super::value::Value;
use super::super::zip::ZipWriter;
use super::names::{CHECKSUMS, STORAGES};
use crate::error::Result;

/// The layout of an archive that was written.
pub(in crate::checkpoint) struct WrittenArchive {
    /// Length of the archive in bytes.
    pub(in crate::checkpoint) length: u64,
    /// Offset of the tensor's elements in the archive.
    pub(in crate::checkpoint) data: u64,
    /// CRC-32 of all elements.
    pub(in crate::checkpoint) crc32: u32,
    /// CRC-32 per block of the elements.
    pub(in crate::checkpoint) blocks: BlockChecksums,
}

/// Writes an archive of one row-major tensor.
pub(in crate::checkpoint) fn write_tensor(
    out: &mut impl Write,
    content: &BoxContent,
    progress: &dyn Fn(u64),
) -> Result<WrittenArchive> {
    let mut archive = ZipWriter::new(out);
    archive.small("archive/data.pkl", &tensor_pickle(content))?;
    begin(&mut archive)?;
    let mut hasher = BlockHasher::new(content.bytes() as u64);
    let (data, _) = archive.entry("archive/data/0", content.bytes() as u64, &mut |put| {
        content.for_each_block(&mut |block| {
            hasher.update(block);
            progress(block.len() as u64);
            put(block)
        })
    })?;
    let (crc32, blocks) = hasher.finish();
    archive.small("archive/version", b"3\n")?;
    archive.small(&format!("archive/{CHECKSUMS}"), &blocks.to_bytes())?;
    Ok(WrittenArchive { length: archive.finish()?, data, crc32, blocks })
}

/// Writes an archive of one value and returns its length.
pub(in crate::checkpoint) fn write_value(out: &mut impl Write, value: &Value) -> Result<u64> {
    let mut pickle = PickleWriter::new();
    pickle.value(value);
    let mut archive = ZipWriter::new(out);
    archive.small("archive/data.pkl", &pickle.finish())?;
    begin(&mut archive)?;
    archive.small("archive/version", b"3\n")?;
    archive.finish()
}

/// Writes the entries between the pickle and the data.
fn begin(archive: &mut ZipWriter<'_, impl Write>) -> Result<()> {
    archive.small("archive/.format_version", b"1")?;
    archive.small("archive/.storage_alignment", b"64")?;
    archive.small("archive/byteorder", b"little")
}

/// The pickle of a tensor that consists of all of storage 0.
fn tensor_pickle(content: &BoxContent) -> Vec<u8> {
    let (element, sizes) = (content.element(), content.shape());
    let storage = STORAGES.iter().find(|(_, of)| *of == element).map(|(name, _)| *name);
    let mut pickle = PickleWriter::new();
    pickle.global("torch._utils", if storage.is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" });
    pickle.begin_tuple();
    pickle.begin_tuple();
    pickle.text("storage");
    match storage {
        Some(name) => pickle.global("torch", name),
        None => pickle.global("torch.storage", "UntypedStorage"),
    }
    pickle.text("0");
    pickle.text("cpu");
    let unit = if storage.is_some() { element.size_in_bytes() } else { 1 };
    pickle.int((content.bytes() / unit) as i64);
    pickle.end_tuple();
    pickle.persistent_id();
    pickle.int(0);
    pickle.sizes(sizes);
    pickle.sizes(&row_major(&sizes.iter().map(|&n| n.max(1)).collect::<Vec<_>>()));
    pickle.bool(false);
    pickle.global("collections", "OrderedDict");
    pickle.empty_tuple();
    pickle.call();
    if storage.is_none() {
        pickle.global("torch", element.torch_name());
    }
    pickle.end_tuple();
    pickle.call();
    pickle.finish()
}
