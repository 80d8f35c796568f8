//! Boxes read from files: only the bytes that are needed, straight to where they belong.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::catalog::{Chunk, StoredTensor, check_file_name, row_major};
use crate::error::{Error, Result};
use crate::layout::TensorBox;

/// The files of a checkpoint, opened when first read.
pub(super) struct Files {
    directory: PathBuf,
    open: Mutex<HashMap<String, Arc<File>>>,
}

/// Shorter runs are read together with what lies between them.
const SHORT_RUN: usize = 16 << 10;
/// Runs that are further apart are read one by one.
const FAR_APART: u64 = 256 << 10;
/// How many files stay open.
const MAX_OPEN: usize = 32;
/// How much is read at a time for short runs.
const WINDOW: u64 = 4 << 20;

impl Files {
    pub(super) fn new(directory: &Path) -> Self {
        Files { directory: directory.to_path_buf(), open: Mutex::default() }
    }

    /// Size of a file, `None` if there is none.
    pub(super) fn size(&self, name: &str) -> Option<u64> {
        check_file_name(name).ok()?;
        let metadata = std::fs::metadata(self.directory.join(name)).ok()?;
        metadata.is_file().then_some(metadata.len())
    }

    /// Fills `into` with the bytes of a file from `offset` on.
    pub(super) fn read(&self, name: &str, offset: u64, into: &mut [u8]) -> Result<()> {
        let file = self.file(name)?;
        file.read_exact_at(into, offset).map_err(|error| {
            let found = format!("{error} in {name:?} at byte {offset}");
            let needed = format!("{} bytes", into.len());
            Error::invalid("checkpoint file", found, needed, "the file is cut off or unreadable; copy it again")
        })
    }

    fn file(&self, name: &str) -> Result<Arc<File>> {
        check_file_name(name)?;
        let mut open = self.open.lock();
        if let Some(file) = open.get(name) {
            return Ok(Arc::clone(file));
        }
        let path = self.directory.join(name);
        let file = File::open(&path).map_err(|error| {
            let found = format!("{error}: {}", path.display());
            Error::invalid("checkpoint file", found, "a file that can be read", "copy the checkpoint again")
        })?;
        let file = Arc::new(file);
        // All ranks of a process share the number of files that it may have open. Whoever reads one has it.
        if open.len() >= MAX_OPEN {
            open.clear();
        }
        open.insert(name.to_string(), Arc::clone(&file));
        Ok(file)
    }

    /// Fills `into` with a box of a tensor, row-major, from the chunks that have it. A chunk that is read as a whole is
    /// compared with its checksum.
    pub(super) fn read_box(&self, key: &str, tensor: &StoredTensor, part: &TensorBox, into: &mut [u8]) -> Result<()> {
        for chunk in &tensor.chunks {
            let Some(both) = chunk.part.intersect(part) else { continue };
            let size = tensor.element.size_in_bytes();
            let runs = Runs::new(chunk, &both, part, size);
            self.read_runs(chunk, &runs, into)?;
            if let Some(expected) = chunk.crc32
                && both == chunk.part
                && chunk.strides.is_none()
            {
                let mut hasher = crc32fast::Hasher::new();
                runs.for_each(|_, target| {
                    hasher.update(&into[target..target + runs.bytes]);
                    Ok(())
                })?;
                check_crc(key, chunk, expected, hasher.finalize())?;
            }
        }
        Ok(())
    }

    fn read_runs(&self, chunk: &Chunk, runs: &Runs, into: &mut [u8]) -> Result<()> {
        if runs.bytes >= SHORT_RUN || runs.step() > FAR_APART {
            return runs.for_each(|source, target| {
                self.read(&chunk.file, chunk.offset + source, &mut into[target..target + runs.bytes])
            });
        }
        let mut window = Vec::new();
        let mut start = 0u64;
        runs.for_each(|source, target| {
            let end = source + runs.bytes as u64;
            if source < start || end > start + window.len() as u64 {
                start = source;
                window.resize((runs.end - start).min(WINDOW).max(runs.bytes as u64) as usize, 0);
                self.read(&chunk.file, chunk.offset + start, &mut window)?;
            }
            let from = (source - start) as usize;
            into[target..target + runs.bytes].copy_from_slice(&window[from..from + runs.bytes]);
            Ok(())
        })
    }
}

/// An error unless the bytes of a chunk have the checksum that was stored with it.
pub(super) fn check_crc(key: &str, chunk: &Chunk, expected: u32, found: u32) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::invalid(
        "checkpoint",
        format!("checksum {found:08x} for the part of tensor {key:?} at byte {} of {:?}", chunk.offset, chunk.file),
        format!("{expected:08x}"),
        "the file is damaged; copy or save it again",
    ))
}

/// Ranges of bytes that are dense both in a chunk and in a box under construction, in the order of the chunk's.
struct Runs {
    /// Sizes of the dimensions that are walked; what is inside them is one run.
    sizes: Vec<usize>,
    /// Steps in the chunk and in the target for each of these, in bytes.
    source_steps: Vec<u64>,
    target_steps: Vec<usize>,
    source: u64,
    target: usize,
    /// Length of a run.
    bytes: usize,
    /// Behind the last byte that is needed of the chunk.
    end: u64,
}

impl Runs {
    /// The runs of the box `both`, which lies in the chunk and in the box `target`.
    fn new(chunk: &Chunk, both: &TensorBox, target: &TensorBox, size: usize) -> Self {
        let (strides, target_strides) = (chunk.strides(), row_major(&target.sizes));
        let start = |inner: &TensorBox, strides: &[usize]| -> usize {
            both.offsets.iter().zip(&inner.offsets).zip(strides).map(|((b, o), s)| (b - o) * s).sum()
        };
        let (source, offset) = (start(&chunk.part, &strides), start(target, &target_strides));
        let last: usize = both.sizes.iter().zip(&strides).map(|(n, s)| (n - 1) * s).sum();
        // Dimensions join the run from the last one on, as long as both sides are dense.
        let (mut dims, mut run) = (both.sizes.len(), 1);
        while dims > 0 && (both.sizes[dims - 1] == 1 || strides[dims - 1] == run && target_strides[dims - 1] == run) {
            run *= both.sizes[dims - 1];
            dims -= 1;
        }
        // A transposed chunk is walked as it lies in the file, so that each of its bytes is read once.
        let mut order: Vec<usize> = (0..dims).filter(|&dim| both.sizes[dim] != 1).collect();
        order.sort_by_key(|&dim| std::cmp::Reverse(strides[dim]));
        Runs {
            sizes: order.iter().map(|&dim| both.sizes[dim]).collect(),
            source_steps: order.iter().map(|&dim| (strides[dim] * size) as u64).collect(),
            target_steps: order.iter().map(|&dim| target_strides[dim] * size).collect(),
            source: (source * size) as u64,
            target: offset * size,
            bytes: run * size,
            end: ((source + last + 1) * size) as u64,
        }
    }

    /// Distance from one run to the next in the chunk.
    fn step(&self) -> u64 {
        self.source_steps.last().copied().unwrap_or(0)
    }

    fn for_each(&self, mut visit: impl FnMut(u64, usize) -> Result<()>) -> Result<()> {
        let mut index = vec![0; self.sizes.len()];
        let (mut source, mut target) = (self.source, self.target);
        loop {
            visit(source, target)?;
            let mut dim = self.sizes.len();
            loop {
                if dim == 0 {
                    return Ok(());
                }
                dim -= 1;
                index[dim] += 1;
                source += self.source_steps[dim];
                target += self.target_steps[dim];
                if index[dim] < self.sizes[dim] {
                    break;
                }
                source -= self.source_steps[dim] * self.sizes[dim] as u64;
                target -= self.target_steps[dim] * self.sizes[dim];
                index[dim] = 0;
            }
        }
    }
}
