//! Directories that change as a whole: a crash at any moment leaves the old contents or the new ones.
//!
//! New contents are written beside the target, under a name that says so, made durable, and then exchanged with it in one
//! step of the file system. Where that step does not exist, the old directory is first moved aside; a reader that finds
//! none takes the one that was moved aside.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The directory where new contents for `target` are put together. `id` tells saves apart.
pub(super) fn staging(target: &Path, id: u64) -> PathBuf {
    beside(target, &format!("{STAGED}{id:016x}"))
}

const STAGED: &str = "incoming-";
const ASIDE: &str = "previous";

fn beside(target: &Path, suffix: &str) -> PathBuf {
    let name = target.file_name().map_or_else(|| "checkpoint".into(), |n| n.to_string_lossy().into_owned());
    target.with_file_name(format!(".{name}.{suffix}"))
}

/// Makes the files of a directory, and that they are in it, durable.
pub(super) fn sync(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_file() {
            File::open(&path)?.sync_all()?;
        }
    }
    Ok(File::open(directory)?.sync_all()?)
}

/// Puts the contents of a staged directory, which is complete and durable, in the place of `target`.
pub(super) fn commit(staged: &Path, target: &Path) -> Result<()> {
    let parent = parent_of(target);
    if !target.exists() {
        fs::rename(staged, target)?;
    } else if exchange(staged, target).is_ok() {
        File::open(&parent)?.sync_all()?;
        remove(staged)?;
    } else {
        let aside = beside(target, ASIDE);
        if aside.exists() {
            remove(&aside)?;
        }
        fs::rename(target, &aside)?;
        fs::rename(staged, target)?;
        File::open(&parent)?.sync_all()?;
        remove(&aside)?;
    }
    Ok(File::open(&parent)?.sync_all()?)
}

/// The directory of a checkpoint: the named one, or what a crash left aside of it.
pub(super) fn resolve(target: &Path) -> PathBuf {
    let aside = beside(target, ASIDE);
    if !target.exists() && aside.exists() { aside } else { target.to_path_buf() }
}

/// Removes what crashed saves to `target` have left.
pub(super) fn sweep(target: &Path) -> Result<()> {
    let prefix = beside(target, STAGED).file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let parent = parent_of(target);
    if !parent.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(&parent)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

pub(super) fn parent_of(target: &Path) -> PathBuf {
    match target.parent() {
        Some(parent) if parent != Path::new("") => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => Ok(other?),
    }
}

/// Exchanges two directories in one step.
fn exchange(a: &Path, b: &Path) -> Result<()> {
    let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(Error::other);
    let (a, b) = (text(a)?, text(b)?);
    // SAFETY: both are texts that end with a zero byte and live until the call is over.
    let result =
        unsafe { libc::renameat2(libc::AT_FDCWD, a.as_ptr(), libc::AT_FDCWD, b.as_ptr(), libc::RENAME_EXCHANGE) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_replaced_as_a_whole_and_leftovers_are_swept() {
        let root = std::env::temp_dir().join(format!("shardwise-directory-{}", std::process::id()));
        let target = root.join("state");
        fs::create_dir_all(&root).unwrap();
        for content in ["one", "two", "three"] {
            let staged = staging(&target, 7);
            fs::create_dir(&staged).unwrap();
            fs::write(staged.join("file"), content).unwrap();
            sync(&staged).unwrap();
            commit(&staged, &target).unwrap();
            assert_eq!(fs::read_to_string(target.join("file")).unwrap(), content);
            assert!(!staged.exists());
        }
        fs::create_dir(staging(&target, 8)).unwrap();
        sweep(&target).unwrap();
        assert_eq!(fs::read_dir(&root).unwrap().count(), 1);
        fs::rename(&target, beside(&target, ASIDE)).unwrap();
        assert_eq!(fs::read_to_string(resolve(&target).join("file")).unwrap(), "three");
        fs::remove_dir_all(&root).unwrap();
    }
}
