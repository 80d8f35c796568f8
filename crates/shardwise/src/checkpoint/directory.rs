//! Directories that change as a whole: a crash at any moment leaves the old contents or the new ones.
//!
//! New contents are written beside the target, under a name that says so, made durable, and then exchanged with it in one
//! step of the file system. Where that step does not exist (systems other than Linux and macOS, some network file systems),
//! the old directory is first moved aside; a reader that finds none takes the one that was moved aside. Old contents are removed after the exchange, so that a reader who misses a file
//! can see that there is something newer.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use super::format::Format;
use crate::error::{Error, ErrorKind, Result};

/// A directory where new contents are put together, for as long as this lives; then it is gone, committed or not.
pub(super) struct Staging {
    path: PathBuf,
    target: PathBuf,
}

/// Targets for which this process is putting contents together.
static ACTIVE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

const STAGED: &str = "incoming-";
const ASIDE: &str = "previous";

/// The name of the directory where a process puts new contents together. `id` tells saves apart.
pub(super) fn staged_path(target: &Path, process: u32, id: u64) -> PathBuf {
    beside(target, &format!("{STAGED}{process}-{id:016x}"))
}

impl Staging {
    /// Makes the directory, after what crashed saves have left is gone. An error if this process is writing there already, or
    /// if something is there that is not a checkpoint: it would be lost.
    pub(super) fn new(target: &Path, id: u64) -> Result<Self> {
        check_replaceable(target)?;
        let parent = parent_of(target);
        fs::create_dir_all(&parent).map_err(|error| unwritable(&parent, &error))?;
        if !ACTIVE.lock().insert(target.to_path_buf()) {
            let found = format!("another save to {} that is under way", target.display());
            return Err(ErrorKind::path(target).error("path", found, "one save at a time", "wait for it first"));
        }
        let staging = Staging { path: staged_path(target, std::process::id(), id), target: target.to_path_buf() };
        sweep(target)?;
        fs::create_dir(&staging.path).map_err(|error| unwritable(&staging.path, &error))?;
        Ok(staging)
    }

    /// Where to write.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the contents, which are complete and durable, in the place of the target.
    pub(super) fn commit(self) -> Result<()> {
        commit(&self.path, &self.target)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = remove(&self.path);
        ACTIVE.lock().remove(&self.target);
    }
}

fn beside(target: &Path, suffix: &str) -> PathBuf {
    let name = target.file_name().map_or_else(|| "checkpoint".into(), |n| n.to_string_lossy().into_owned());
    target.with_file_name(format!(".{name}.{suffix}"))
}

/// An error if replacing a path would lose anything but a checkpoint.
fn check_replaceable(target: &Path) -> Result<()> {
    if !target.exists() {
        return Ok(());
    }
    let kept = |found: String| {
        let needed = "no directory, an empty one, or a checkpoint and nothing else";
        Err(ErrorKind::path(target).error("path", found, needed, "choose another path, or move these files away"))
    };
    if !target.is_dir() {
        return kept(format!("a file: {}", target.display()));
    }
    for entry in fs::read_dir(target)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !Format::any_owns(&name) || !entry.file_type()?.is_file() {
            return kept(format!("{name:?} in {}, which would be lost", target.display()));
        }
    }
    Ok(())
}

/// Makes the files of a directory, and that they are in it, durable.
pub(super) fn sync(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_file() {
            make_durable(&path)?;
        }
    }
    make_durable(directory)
}

fn make_durable(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(|error| unwritable(path, &error))
}

fn commit(staged: &Path, target: &Path) -> Result<()> {
    let parent = parent_of(target);
    let moved = |from: &Path, to: &Path| fs::rename(from, to).map_err(|error| unwritable(to, &error));
    if !target.exists() {
        moved(staged, target)?;
        // What a crash may have left aside is older than this.
        remove(&aside(target))?;
    } else if exchange(staged, target).is_ok() {
        make_durable(&parent)?;
        remove(staged)?;
    } else {
        let aside = aside(target);
        if aside.exists() {
            remove(&aside)?;
        }
        moved(target, &aside)?;
        moved(staged, target)?;
        make_durable(&parent)?;
        remove(&aside)?;
    }
    make_durable(&parent)
}

/// Where the old contents of a target are while new ones take their place, and after a crash in that moment.
pub(super) fn aside(target: &Path) -> PathBuf {
    beside(target, ASIDE)
}

/// What the system says about a path that cannot be written.
pub(super) fn unwritable(path: &Path, error: &io::Error) -> Error {
    let fix = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "free some space, raise the limit, or save to another disk"
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "choose a path that this user can write to"
        }
        _ => "choose another path, or look at the file system",
    };
    let found = format!("{error}: {}", path.display());
    ErrorKind::path(path).error("checkpoint file", found, "a place that can be written to", fix)
}

/// Removes what saves to `target` have left by processes that are no more, and by this one.
fn sweep(target: &Path) -> Result<()> {
    let prefix = beside(target, STAGED).file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    for entry in fs::read_dir(parent_of(target))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(rest) = name.strip_prefix(&prefix) else { continue };
        let process: Option<u32> = rest.split('-').next().and_then(|digits| digits.parse().ok());
        if !process.is_some_and(may_run) {
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
    match if path.is_file() { fs::remove_file(path) } else { fs::remove_dir_all(path) } {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(|error| unwritable(path, &error)),
    }
}

/// Exchanges two directories in one step.
#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

/// Other systems have no call for it: the old directory is moved aside first.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Whether a process that is not this one may still be running. Only Linux lists processes as files; elsewhere what another
/// process left is kept rather than taken away from it.
fn may_run(process: u32) -> bool {
    process != std::process::id() && (!cfg!(target_os = "linux") || Path::new(&format!("/proc/{process}")).exists())
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
            let staging = Staging::new(&target, 7).unwrap();
            assert!(Staging::new(&target, 8).err().unwrap().to_string().contains("under way"));
            fs::write(staging.path().join("x.safetensors"), content).unwrap();
            sync(staging.path()).unwrap();
            let staged = staging.path().to_path_buf();
            staging.commit().unwrap();
            assert_eq!(fs::read_to_string(target.join("x.safetensors")).unwrap(), content);
            assert!(!staged.exists());
        }
        // a process that is no more, and one that is
        fs::create_dir(staged_path(&target, 0x7fff_ffff, 8)).unwrap();
        fs::create_dir(staged_path(&target, 1, 8)).unwrap();
        drop(Staging::new(&target, 9).unwrap());
        assert_eq!(fs::read_dir(&root).unwrap().count(), 2);
        // what is not a checkpoint stays
        fs::write(target.join("notes.txt"), "mine").unwrap();
        assert!(Staging::new(&target, 10).err().unwrap().to_string().contains("notes.txt"));
        assert!(Staging::new(&target.join("notes.txt"), 10).err().unwrap().to_string().contains("a file"));
        fs::remove_file(target.join("notes.txt")).unwrap();
        fs::remove_dir_all(&root).unwrap();
    }
}
