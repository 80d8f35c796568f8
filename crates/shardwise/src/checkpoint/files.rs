//! The files of one checkpoint, held so that they stay those of one save while others follow at the same path.

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
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;

use super::stored::{NOT_OURS, check_file_name};
use crate::error::{Error, ErrorKind, Result};
use crate::fnv::Fnv;

/// The files of a checkpoint. The directory is opened once, and files are found in what was opened: a save that puts another
/// checkpoint at the path does not change what is read here. Files that are open are read even after they are removed; one
/// that was removed before it was opened is reported as replaced by another save, never as damaged.
pub struct Files {
    /// As the caller named it: what a checkpoint is at now is compared with what was opened.
    path: PathBuf,
    /// The directory, for messages.
    directory: PathBuf,
    /// The file that the checkpoint is, if it was named and not a directory.
    single: Option<String>,
    /// The directory as it was opened.
    handle: File,
    open: Mutex<HashMap<String, Arc<File>>>,
    /// What is to be checked before something is first read of a file, by file.
    checks: Mutex<HashMap<String, FileCheck>>,
    read: AtomicU64,
    unchecked: AtomicU64,
    unchecked_keys: Mutex<BTreeSet<String>>,
}

/// Looks at a file before something is first read of it.
type FileCheck = Arc<dyn Fn(&Files) -> Result<()> + Send + Sync>;

/// What one rank read of a checkpoint, and what of it no checksum vouches for.
///
/// Checkpoints of this library have a checksum per block, and everything that is read of them is checked. Parts that were
/// written before, or by PyTorch, have one checksum each: they are checked where this rank reads them whole. Safetensors files
/// of others have none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Bytes of tensors that were read.
    pub bytes: u64,
    /// Bytes of these without a checksum.
    pub unchecked_bytes: u64,
    /// The tensors that they are of.
    pub unchecked: Vec<String>,
}

/// How many files stay open: all ranks of a process share the number of files that it may have open.
const MAX_OPEN: usize = 64;

impl Files {
    /// Holds the directory of the checkpoint at `path`, which is `directory` or a file in it.
    pub(super) fn hold(path: &Path, directory: &Path) -> io::Result<Self> {
        let name = || path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(Files {
            path: path.to_path_buf(),
            directory: directory.to_path_buf(),
            single: path.is_file().then(name).flatten(),
            handle: File::open(directory)?,
            open: Mutex::default(),
            checks: Mutex::default(),
            read: AtomicU64::new(0),
            unchecked: AtomicU64::new(0),
            unchecked_keys: Mutex::default(),
        })
    }

    /// Opens a file of the directory that was opened, whatever is at its name now.
    fn open_within(&self, name: &str) -> io::Result<File> {
        Ok(File::from(openat(&self.handle, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?))
    }

    /// Size of a file of the directory that was opened; `None` for anything but a file.
    fn size_within(&self, name: &CStr) -> Option<u64> {
        let found = statat(&self.handle, name, AtFlags::empty()).ok()?;
        let is_file = FileType::from_raw_mode(found.st_mode).is_file();
        if is_file { u64::try_from(found.st_size).ok() } else { None }
    }

    /// The directory, for messages; what is read comes from the directory that was opened.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The name of the file that the checkpoint is, if the path names a file and not a directory.
    pub fn single(&self) -> Option<&str> {
        self.single.as_deref()
    }

    /// Names of all files in the directory.
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

    /// Size of a file, `None` if there is none.
    pub fn size(&self, name: &str) -> Option<u64> {
        check_file_name(name).ok()?;
        let open = self.open.lock().get(name).cloned();
        let Some(file) = open else { return self.size_within(&CString::new(name).ok()?) };
        let metadata = file.metadata().ok()?;
        metadata.is_file().then_some(metadata.len())
    }

    /// All bytes of a file that has `most` at most.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the file is longer: its size is checked before memory is allocated.
    pub fn read_small(&self, name: &str, most: u64) -> Result<Vec<u8>> {
        let size = self.size(name).unwrap_or(0);
        if size > most {
            let found = format!("{name:?} of {size} bytes");
            return Err(ErrorKind::Damaged.error("checkpoint file", found, format!("{most} bytes at most"), NOT_OURS));
        }
        let mut bytes = vec![0; size as usize];
        self.read(name, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills `into` with the bytes of a file from `offset` on.
    pub fn read(&self, name: &str, offset: u64, into: &mut [u8]) -> Result<()> {
        let file = self.file(name)?;
        file.read_exact_at(into, offset).map_err(|error| {
            let found = format!("{error} in {} at byte {offset}", self.directory.join(name).display());
            let needed = format!("{} bytes", into.len());
            ErrorKind::Damaged.error(
                "checkpoint file",
                found,
                needed,
                "the file is cut off or unreadable; copy it again",
            )
        })
    }

    /// Opens files, as many as stay open, so that they can be read although a later save removes them.
    pub(super) fn keep<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Result<()> {
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
        // Whoever reads a file has it while others take its place here.
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

    /// Whether another checkpoint, or none, is at the path by now. A writer exchanges directories before it removes files.
    pub(super) fn is_replaced(&self) -> bool {
        let same = |a: &Metadata, b: &Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        let Ok(held) = self.handle.metadata() else { return false };
        !fs::metadata(&self.directory).is_ok_and(|now| same(&held, &now))
    }

    fn replaced(&self) -> Error {
        let found = format!("another save at {} while it was read", self.path.display());
        ErrorKind::path(&self.directory).error("checkpoint", found, "one that stays until it is read", "open it again")
    }

    /// A number for the files that were opened, which another save at the path does not have.
    pub(super) fn instance(&self) -> u64 {
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

    /// Runs `check` before something is first read of a file; a read fails with its error. For what a format knows of a file
    /// and [`open`](super::open) does not read, such as the checksum of a header.
    pub fn check_before_read(&self, name: &str, check: impl Fn(&Files) -> Result<()> + Send + Sync + 'static) {
        self.checks.lock().insert(name.to_string(), Arc::new(check));
    }

    /// An error if what is to be checked of a file is not as it should be.
    pub(super) fn check_first(&self, name: &str) -> Result<()> {
        let Some(check) = self.checks.lock().get(name).cloned() else { return Ok(()) };
        check(self)?;
        self.checks.lock().remove(name);
        Ok(())
    }

    /// Counts bytes of a tensor that were read, with a checksum or without.
    pub(super) fn count(&self, key: &str, bytes: u64, is_checked: bool) {
        self.read.fetch_add(bytes, Relaxed);
        if !is_checked && bytes > 0 {
            self.unchecked.fetch_add(bytes, Relaxed);
            self.unchecked_keys.lock().insert(key.to_string());
        }
    }

    /// What was read so far.
    pub(super) fn report(&self) -> LoadReport {
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
        io::ErrorKind::PermissionDenied => "give this user the right to read it",
        _ => "copy the checkpoint again",
    };
    ErrorKind::path(path).error(
        "checkpoint file",
        format!("{error}: {}", path.display()),
        "a file that can be read",
        fix,
    )
}
