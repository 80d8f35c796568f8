//! The files of one checkpoint, held open so that reads see one save even while later saves replace the path.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{CStr, CString};
use std::fmt;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;
use rustix::fs::{AtFlags, Dir, FileType, statat};
use rustix::io::Errno;

use crate::checkpoint::metadata::stored::{NOT_A_CHECKPOINT, check_file_name};
use crate::error::{Error, ErrorKind, Result};
use crate::fnv::Fnv;
use crate::read_file::{open_directory, open_file_at};

/// Read access to the files of one checkpoint; what a [`CheckpointFormat`](crate::checkpoint::CheckpointFormat) reads from.
///
/// The directory is opened once and files are opened relative to that handle, so a save that puts another checkpoint at the
/// path does not change what is read here. Open files stay readable after they are removed; a file that was removed before it
/// was opened is reported as replaced by another save, never as damaged.
pub struct Files {
    /// The path as the caller gave it, for messages.
    path: PathBuf,
    /// The directory's path: for messages, and to find out whether it was replaced.
    directory: PathBuf,
    /// The file name, if the checkpoint is a single file and not a directory.
    single: Option<String>,
    /// The directory, opened once: files are opened relative to it.
    handle: File,
    open: Mutex<HashMap<String, Arc<File>>>,
    /// Checks that run before the first read of a file, by file name.
    checks: Mutex<HashMap<String, FileCheck>>,
    read: AtomicU64,
    unchecked: AtomicU64,
    unchecked_keys: Mutex<BTreeSet<String>>,
}

/// A check that runs before the first read of a file.
type FileCheck = Arc<dyn Fn(&Files) -> Result<()> + Send + Sync>;

/// How many bytes a rank read from a checkpoint, and which of them could not be verified.
///
/// Checkpoints written by this library have a checksum per block: every byte that is read is verified. Chunks written by
/// versions before block checksums, or by PyTorch, have one checksum each and are verified only where this rank reads the
/// whole chunk. Safetensors files of other tools have no checksums.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Tensor bytes that this rank read.
    pub bytes: u64,
    /// How many of [`bytes`](Self::bytes) no checksum covers.
    pub unchecked_bytes: u64,
    /// Flat keys of the tensors that the unverified bytes belong to.
    pub unchecked: Vec<String>,
}

/// How many files stay open per opened checkpoint. All ranks of a process share its limit of open files, commonly 1024.
const MAX_OPEN: usize = 64;

impl Files {
    /// Opens the directory of the checkpoint at `path`, which is `directory` or a file in it.
    pub(in crate::checkpoint) fn open_at(path: &Path, directory: &Path) -> io::Result<Self> {
        let name = || path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(Files {
            path: path.to_path_buf(),
            directory: directory.to_path_buf(),
            single: path.is_file().then(name).flatten(),
            handle: open_directory(directory)?,
            open: Mutex::default(),
            checks: Mutex::default(),
            read: AtomicU64::new(0),
            unchecked: AtomicU64::new(0),
            unchecked_keys: Mutex::default(),
        })
    }

    /// Opens a file relative to the directory handle, whatever is at the path by now.
    fn open_within(&self, name: &str) -> io::Result<File> {
        open_file_at(&self.handle, Path::new(name))
    }

    /// Size of a file relative to the directory handle; `None` for anything but a regular file.
    fn size_within(&self, name: &CStr) -> Option<u64> {
        let found = statat(&self.handle, name, AtFlags::empty()).ok()?;
        let is_file = FileType::from_raw_mode(found.st_mode).is_file();
        if is_file { u64::try_from(found.st_size).ok() } else { None }
    }

    /// The directory's path, for messages. Reads go through the handle and not through this path.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The file name if the checkpoint was opened as a single file; `None` for a directory.
    pub fn single_file(&self) -> Option<&str> {
        self.single.as_deref()
    }

    /// Names of all regular files in the directory.
    pub fn names(&self) -> Result<BTreeSet<String>> {
        let entries = Dir::read_from(&self.handle).map_err(|error| unreadable(&self.directory, &error.into()))?;
        let mut names = BTreeSet::new();
        for entry in entries {
            let entry = entry.map_err(|error| unreadable(&self.directory, &error.into()))?;
            if self.size_within(entry.file_name()).is_some() {
                names.insert(entry.file_name().to_string_lossy().into_owned());
            }
        }
        Ok(names)
    }

    /// Size of a file in bytes, `None` if it does not exist.
    pub fn size(&self, name: &str) -> Option<u64> {
        check_file_name(name).ok()?;
        let open = self.open.lock().get(name).cloned();
        let Some(file) = open else { return self.size_within(&CString::new(name).ok()?) };
        let metadata = file.metadata().ok()?;
        metadata.is_file().then_some(metadata.len())
    }

    /// Whether there is anything of this name, also what is not a file and cannot be read.
    pub(in crate::checkpoint) fn has(&self, name: &str) -> bool {
        statat(&self.handle, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Reads a whole file of at most `most` bytes, such as an index or a manifest.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if the file is longer: the size is checked before memory is allocated.
    pub fn read_small(&self, name: &str, most: u64) -> Result<Vec<u8>> {
        let size = self.size(name).unwrap_or(0);
        if size > most {
            let found = format!("{name:?} of {size} bytes");
            return Err(ErrorKind::Damaged.error(
                "checkpoint file",
                found,
                format!("{most} bytes at most"),
                NOT_A_CHECKPOINT,
            ));
        }
        let mut bytes = vec![0; size as usize];
        self.read(name, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills `into` with the bytes of a file from byte `offset` on.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if the file ends early, [`ErrorKind::Path`] if it cannot be opened.
    pub fn read(&self, name: &str, offset: u64, into: &mut [u8]) -> Result<()> {
        let file = self.file(name)?;
        file.read_exact_at(into, offset).map_err(|error| {
            let found = format!("{error} in {} at byte {offset}", self.directory.join(name).display());
            let needed = format!("{} bytes", into.len());
            ErrorKind::Damaged.error(
                "checkpoint file",
                found,
                needed,
                "the file is truncated or unreadable; copy it again",
            )
        })
    }

    /// Opens files, up to [`MAX_OPEN`], so that they stay readable after a later save removes them.
    pub(in crate::checkpoint) fn keep<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Result<()> {
        for name in names {
            if self.open.lock().len() >= MAX_OPEN {
                break;
            }
            self.file(name)?;
        }
        Ok(())
    }

    fn file(&self, name: &str) -> Result<Arc<File>> {
        check_file_name(name)?;
        let mut open = self.open.lock();
        if let Some(file) = open.get(name) {
            return Ok(Arc::clone(file));
        }
        // Readers hold the file by `Arc`, so dropping it from the map does not close it under them.
        if open.len() >= MAX_OPEN {
            open.clear();
        }
        let mut opened = self.open_within(name);
        if opened.as_ref().is_err_and(|error| Errno::from_io_error(error) == Some(Errno::MFILE)) {
            open.clear();
            opened = self.open_within(name);
        }
        let file = Arc::new(opened.map_err(|error| match self.is_replaced() {
            true => self.replaced(),
            false => unreadable(&self.directory.join(name), &error),
        })?);
        open.insert(name.to_string(), Arc::clone(&file));
        Ok(file)
    }

    /// Whether another checkpoint, or none, is at the path by now. Writers exchange directories before they remove files, so
    /// a reader that misses a file because of a save always sees the replacement here.
    pub(in crate::checkpoint) fn is_replaced(&self) -> bool {
        let same = |a: &Metadata, b: &Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        let Ok(held) = self.handle.metadata() else { return false };
        !fs::metadata(&self.directory).is_ok_and(|now| same(&held, &now))
    }

    fn replaced(&self) -> Error {
        let found = format!("a newer save, which replaced {} while it was read", self.path.display());
        ErrorKind::path(&self.directory).error(
            "checkpoint",
            found,
            "a checkpoint that stays until it is read",
            "open it again",
        )
    }

    /// A hash of inodes, times and sizes of the open files: different for another save at the same path.
    pub(in crate::checkpoint) fn instance(&self) -> u64 {
        let mut open: Vec<(String, Arc<File>)> =
            self.open.lock().iter().map(|(name, file)| (name.clone(), Arc::clone(file))).collect();
        open.sort_by(|a, b| a.0.cmp(&b.0));
        let mut hash = Fnv::default();
        for (name, file) in open {
            let metadata = file.metadata().map(|m| (m.ino(), m.mtime(), m.mtime_nsec(), m.len()));
            hash.add(format!("{name} {metadata:?}").as_bytes());
        }
        hash.finish()
    }

    /// Registers a check that runs before the first read of a tensor from a file; if it fails, the read fails with its error.
    ///
    /// For what a format knows about a file but [`open`](crate::checkpoint::open) does not read, such as the checksum of a header.
    pub fn check_before_read(&self, name: &str, check: impl Fn(&Files) -> Result<()> + Send + Sync + 'static) {
        self.checks.lock().insert(name.to_string(), Arc::new(check));
    }

    /// Runs the check registered for a file, once.
    pub(in crate::checkpoint) fn check_first(&self, name: &str) -> Result<()> {
        let Some(check) = self.checks.lock().get(name).cloned() else { return Ok(()) };
        check(self)?;
        self.checks.lock().remove(name);
        Ok(())
    }

    /// Counts tensor bytes that were read, verified by a checksum or not.
    pub(in crate::checkpoint) fn count(&self, key: &str, bytes: u64, is_checked: bool) {
        self.read.fetch_add(bytes, Relaxed);
        if !is_checked && bytes > 0 {
            self.unchecked.fetch_add(bytes, Relaxed);
            self.unchecked_keys.lock().insert(key.to_string());
        }
    }

    /// The counts of what was read so far.
    pub(in crate::checkpoint) fn report(&self) -> LoadReport {
        let unchecked = self.unchecked_keys.lock().iter().cloned().collect();
        LoadReport { bytes: self.read.load(Relaxed), unchecked_bytes: self.unchecked.load(Relaxed), unchecked }
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Files({})", self.directory.display())
    }
}

fn unreadable(path: &Path, error: &io::Error) -> Error {
    let fix = match error.kind() {
        io::ErrorKind::PermissionDenied => "give this user permission to read it",
        _ => "copy the checkpoint again",
    };
    ErrorKind::path(path).error("checkpoint file", format!("{error}: {}", path.display()), "a readable file", fix)
}
