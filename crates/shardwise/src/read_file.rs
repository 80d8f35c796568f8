//! Opens files to read: the one place that does, for files of any origin.
//!
//! A path of a model or a checkpoint may lead to a directory, a device, a pipe that nobody writes to, or to a file that claims
//! terabytes. Opening waits for nobody, only regular files are read, and files that become memory have a limit.
//!
//! ```
//! use shardwise::read_file::{MOST_CONFIG_BYTES, read_text};
//!
//! // A device without an end.
//! let error = read_text("/dev/zero", MOST_CONFIG_BYTES).unwrap_err();
//! assert!(error.to_string().contains("a character device"), "{error}");
//! ```

use std::fs::{File, FileType};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, openat};

/// Largest configuration, template or index; templates with tools have about 20 KiB, configurations that list added tokens
/// 200 KiB.
pub const MOST_CONFIG_BYTES: u64 = 16 << 20;

/// Opens a regular file to read. Local; waits for nobody.
///
/// # Errors
/// Those of the system, and [`io::ErrorKind::InvalidInput`] that says what is there instead of a file.
pub fn open_file(path: impl AsRef<Path>) -> io::Result<File> {
    open_file_at(CWD, path.as_ref())
}

/// As [`open_file`], relative to an open directory.
pub(crate) fn open_file_at(directory: impl AsFd, path: &Path) -> io::Result<File> {
    // Opening a pipe waits for a writer and opening a terminal takes it over, unless asked not to. Reads of regular files do not
    // know the first flag.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::from(openat(directory, path, flags, Mode::empty())?);
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} instead of a file", name_of(kind))))
}

fn name_of(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_char_device() {
        "a character device"
    } else if kind.is_block_device() {
        "a block device"
    } else {
        "a regular file"
    }
}

/// Reads a file of at most `most` bytes. Local.
///
/// # Errors
/// Those of [`open_file`], and [`io::ErrorKind::FileTooLarge`], before memory is allocated for what is too large.
pub fn read_bytes(path: impl AsRef<Path>, most: u64) -> io::Result<Vec<u8>> {
    let file = open_file(path)?;
    let size = file.metadata()?.len();
    let too_large = |size: &str| {
        io::Error::new(io::ErrorKind::FileTooLarge, format!("{size} bytes, where {most} are the most that are read"))
    };
    if size > most {
        return Err(too_large(&size.to_string()));
    }
    let mut bytes = Vec::with_capacity(size as usize);
    // A file can grow meanwhile, and those of /proc state no size.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most { Err(too_large("more")) } else { Ok(bytes) }
}

/// Reads a file of at most `most` bytes of UTF-8. Local.
///
/// # Errors
/// Those of [`read_bytes`], and [`io::ErrorKind::InvalidData`] if it is not UTF-8.
pub fn read_text(path: impl AsRef<Path>, most: u64) -> io::Result<String> {
    String::from_utf8(read_bytes(path, most)?).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Opens a directory, for what is opened relative to it. Waits for nobody.
pub(crate) fn open_directory(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::DIRECTORY;
    match openat(CWD, path, flags, Mode::empty()) {
        Ok(directory) => Ok(File::from(directory)),
        Err(error) => match std::fs::metadata(path) {
            Ok(found) if !found.is_dir() => {
                let found = format!("{} instead of a directory", name_of(found.file_type()));
                Err(io::Error::new(io::ErrorKind::InvalidInput, found))
            }
            _ => Err(error.into()),
        },
    }
}
