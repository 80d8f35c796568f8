//! The lock of an output directory: two runs that write to one directory at the same time would mix their files.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::Path;

use shardwise::error::ErrorKind;
use shardwise::read_file::{MOST_CONFIG_BYTES, open_file, read_text};
use shardwise::{Error, Result};

use super::checkpoints::cannot_write;

/// Name of the lock file, which stays in the directory: deleting it would let two runs lock two different files.
const LOCK_FILE: &str = ".train.lock";

/// Holds an output directory until it is dropped. The system releases the lock when the process ends, however it ends.
pub(super) struct OutputLock {
    /// None where the file system has no locks.
    _locked: Option<File>,
}

impl OutputLock {
    /// Creates the directory if it is absent, and locks it. Rank 0 calls it.
    pub(super) fn take(out: &Path) -> Result<OutputLock> {
        std::fs::create_dir_all(out).map_err(|error| cannot_write("output directory", out, &error))?;
        let path = out.join(LOCK_FILE);
        let mut open = OpenOptions::new();
        // Nothing is read; a pipe that is opened for both waits for nobody.
        let opened = open.read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = opened.map_err(|error| cannot_write("output directory", &path, &error))?;
        let is_locked = lock(&file, out)?;
        // Only names the holder in the error of another run.
        let _ = file.set_len(0).and_then(|()| write!(file, "{}", holder()));
        Ok(OutputLock { _locked: is_locked.then_some(file) })
    }
}

/// Refuses a directory that another run has locked. Writes nothing.
pub(super) fn check_unused(out: &Path) -> Result<()> {
    // Without a lock file, or where it cannot be opened, there is no run that could be disturbed, or `take` says why.
    open_file(out.join(LOCK_FILE)).map_or(Ok(()), |file| lock(&file, out).map(drop))
}

/// Locks a file; whether the file system has locks. Some of clusters have none, and runs there go on without.
fn lock(file: &File, out: &Path) -> Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Err(in_use(out)),
        Err(TryLockError::Error(_)) => Ok(false),
    }
}

/// This process, as another run names it.
fn holder() -> String {
    let host = read_text("/proc/sys/kernel/hostname", MOST_CONFIG_BYTES).unwrap_or_default();
    match host.trim() {
        "" => format!("process {}", std::process::id()),
        host => format!("process {} on {host}", std::process::id()),
    }
}

fn in_use(out: &Path) -> Error {
    let holder = read_text(out.join(LOCK_FILE), 200).unwrap_or_default();
    let by = if holder.is_empty() { String::new() } else { format!(" ({holder})") };
    let found = format!("{}, which another run writes to{by}", out.display());
    let fix = "choose another --out, or wait until that run ends";
    ErrorKind::path(out).error("output directory", found, "a directory that no other run is using", fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_free_again_when_its_run_has_ended() {
        let out = std::env::temp_dir().join(format!("shardwise-lock-{}", std::process::id()));
        check_unused(&out).unwrap();
        let held = OutputLock::take(&out).unwrap();
        let pid = format!("process {}", std::process::id());
        for refused in [OutputLock::take(&out).map(drop), check_unused(&out)] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(&pid) && error.contains("choose another --out"), "{error}");
        }
        drop(held);
        check_unused(&out).unwrap();
        OutputLock::take(&out).unwrap();
        std::fs::remove_dir_all(&out).unwrap();
    }
}
