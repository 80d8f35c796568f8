//! Atomic replacement of a directory: a crash at any moment leaves the old contents or the new ones.
//!
//! New contents are written to a staging directory next to the target, synced to disk, and then exchanged with the target by
//! one system call. Where that call does not exist (systems other than Linux and macOS, some network file systems), the old
//! directory is first renamed to `.NAME.previous`; a reader that finds no target opens that one. Old contents are removed
//! after the exchange, so that a reader that misses a file can see that the checkpoint was replaced.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use crate::checkpoint::catalogs::format::Format;
use crate::error::{Error, ErrorKind, Result};

/// A staging directory for new contents; removed on drop unless it was committed.
pub(in crate::checkpoint) struct Staging {
    path: PathBuf,
    target: PathBuf,
}

/// Targets that this process has a staging directory for.
static ACTIVE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

const STAGING_PREFIX: &str = "incoming-";
const PREVIOUS: &str = "previous";

/// Path of the staging directory of a process; `id` distinguishes its saves.
pub(in crate::checkpoint) fn staged_path(target: &Path, process: u32, id: u64) -> PathBuf {
    sibling_path(target, &format!("{STAGING_PREFIX}{process}-{id:016x}"))
}

impl Staging {
    /// Creates the staging directory, after removing the ones that crashed saves have left. Fails if this process is already
    /// saving to the target, or if the target has files that are not a checkpoint's: they would be lost.
    pub(in crate::checkpoint) fn new(target: &Path, id: u64) -> Result<Self> {
        Self::replacing(target, id, &|_| false)
    }

    /// As [`new`](Self::new), for a target that may also have files of these names, which are replaced too.
    pub(in crate::checkpoint) fn replacing(target: &Path, id: u64, others: &dyn Fn(&str) -> bool) -> Result<Self> {
        check_no_scheme(target)?;
        // The directory that a link leads to is replaced, not the link, which may lead to another disk.
        let target = &real_target(target)?;
        check_replaceable(target, others)?;
        let parent = parent_of(target);
        fs::create_dir_all(&parent).map_err(|error| unwritable(&parent, &error))?;
        if !ACTIVE.lock().insert(target.to_path_buf()) {
            let found = format!("another save to {} in progress", target.display());
            return Err(ErrorKind::path(target).error("path", found, "one save at a time", "wait for the first one"));
        }
        let staging = Staging { path: staged_path(target, std::process::id(), id), target: target.to_path_buf() };
        remove_stale_staging(target)?;
        fs::create_dir(&staging.path).map_err(|error| unwritable(&staging.path, &error))?;
        Ok(staging)
    }

    /// The directory to write to.
    pub(in crate::checkpoint) fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the target with the staged contents, which must be complete and synced.
    pub(in crate::checkpoint) fn commit(self) -> Result<()> {
        commit(&self.path, &self.target)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = remove(&self.path);
        ACTIVE.lock().remove(&self.target);
    }
}

fn sibling_path(target: &Path, suffix: &str) -> PathBuf {
    let name = target.file_name().map_or_else(|| "checkpoint".into(), |n| n.to_string_lossy().into_owned());
    target.with_file_name(format!(".{name}.{suffix}"))
}

/// The directory that a save to `target` replaces: where its links lead. The path of a directory without a name, such as `.`,
/// gets one.
fn real_target(target: &Path) -> Result<PathBuf> {
    let is_link = target.is_symlink();
    if !is_link && target.file_name().is_some() {
        return Ok(target.to_path_buf());
    }
    match fs::canonicalize(target) {
        Err(error) if is_link => {
            let to = fs::read_link(target).map_or_else(|_| String::new(), |to| format!(" to {}", to.display()));
            let found = format!("{}, a link{to} that leads nowhere: {error}", target.display());
            let fix = "create the directory that the link leads to, or remove the link";
            Err(ErrorKind::path(target).error("path", found, "a directory, or no file yet", fix))
        }
        found => found.map_err(|error| unwritable(target, &error)),
    }
}

/// Refuses a path with a URL scheme: it would be taken for a relative path.
pub(in crate::checkpoint) fn check_no_scheme(path: &Path) -> Result<()> {
    let text = path.to_string_lossy();
    let Some((scheme, _)) = text.split_once("://") else { return Ok(()) };
    let is_scheme = scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    if scheme.is_empty() || !is_scheme {
        return Ok(());
    }
    let found = format!("the URL {text}");
    let fix = "mount the store, or copy the checkpoint from or to a local directory";
    Err(ErrorKind::path(path).error("path", found, "a path of the file system: no URL scheme is served", fix))
}

/// Refuses a target that exists, unless it may be overwritten; an empty directory may always be.
pub(in crate::checkpoint) fn check_overwrite(target: &Path, overwrite: bool) -> Result<()> {
    let is_empty = || fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_none());
    if overwrite || !(target.exists() || previous_path(target).exists()) || is_empty() {
        return Ok(());
    }
    let found = format!("something at {} already", target.display());
    let fix = "choose another path, or save with `overwrite: true`";
    Err(ErrorKind::path(target).error("path", found, "a path without a checkpoint", fix))
}

/// Refuses a target whose replacement would lose anything but a checkpoint and the `others`.
fn check_replaceable(target: &Path, others: &dyn Fn(&str) -> bool) -> Result<()> {
    if !target.exists() {
        return Ok(());
    }
    let refuse = |found: String| {
        let needed = "no directory, an empty one, or a checkpoint and nothing else";
        Err(ErrorKind::path(target).error("path", found, needed, "choose another path, or move these files away"))
    };
    if !target.is_dir() {
        return refuse(format!("a file: {}", target.display()));
    }
    for entry in fs::read_dir(target)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !(Format::any_owns(&name) || others(&name)) || !entry.file_type()?.is_file() {
            return refuse(format!("{name:?} in {}, which would be lost", target.display()));
        }
    }
    Ok(())
}

/// Syncs the files of a directory and the directory itself to disk.
pub(in crate::checkpoint) fn sync(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_file() {
            sync_path(&path)?;
        }
    }
    sync_path(directory)
}

fn sync_path(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(|error| unwritable(path, &error))
}

fn commit(staged: &Path, target: &Path) -> Result<()> {
    let parent = parent_of(target);
    let rename = |from: &Path, to: &Path| fs::rename(from, to).map_err(|error| unwritable(to, &error));
    if !target.exists() {
        rename(staged, target)?;
        // A previous directory that a crash may have left is older than this.
        remove(&previous_path(target))?;
    } else if exchange(staged, target).is_ok() {
        sync_path(&parent)?;
        remove(staged)?;
    } else {
        let previous = previous_path(target);
        if previous.exists() {
            remove(&previous)?;
        }
        rename(target, &previous)?;
        rename(staged, target)?;
        sync_path(&parent)?;
        remove(&previous)?;
    }
    sync_path(&parent)
}

/// Where the old contents of a target are while new ones replace them, and after a crash at that moment.
pub(in crate::checkpoint) fn previous_path(target: &Path) -> PathBuf {
    // Next to the directory that a link leads to. At that moment the link leads nowhere, but says where.
    match fs::read_link(target) {
        Ok(to) => sibling_path(&parent_of(target).join(to), PREVIOUS),
        Err(_) => sibling_path(target, PREVIOUS),
    }
}

/// The error for a path that cannot be written.
pub(crate) fn unwritable(path: &Path, error: &io::Error) -> Error {
    let fix = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "free some space, raise the limit, or save to another disk"
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "choose a path that this user can write to"
        }
        _ => "choose another path, or check the file system",
    };
    let found = format!("{error}: {}", path.display());
    ErrorKind::path(path).error("checkpoint file", found, "a writable path", fix)
}

/// Removes staging directories for `target` that this process, or processes that no longer run, have left.
fn remove_stale_staging(target: &Path) -> Result<()> {
    let prefix =
        sibling_path(target, STAGING_PREFIX).file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    remove_where(&parent_of(target), &|name| {
        name.strip_prefix(&prefix).is_some_and(|rest| !staging_process(rest).is_some_and(may_be_running))
    })
}

/// Removes what killed saves and removals to any target in `root` have left: their staging directories, and what was renamed
/// to be removed. `is_removed` says which names the latter have.
pub(in crate::checkpoint) fn remove_leftovers(root: &Path, is_removed: &dyn Fn(&str) -> bool) -> Result<()> {
    let infix = format!(".{STAGING_PREFIX}");
    // This process may be saving another target right now.
    let is_active = |name: &str| ACTIVE.lock().iter().any(|target| target.file_name().is_some_and(|own| own == name));
    remove_where(root, &|name| {
        let staging = name.strip_prefix('.').and_then(|name| name.split_once(&infix));
        let is_stale =
            |(target, rest)| staging_process(rest).is_some_and(|id| !may_be_running(id)) && !is_active(target);
        is_removed(name) || staging.is_some_and(is_stale)
    })
}

/// The process in the name of a staging directory, from what follows the prefix.
fn staging_process(rest: &str) -> Option<u32> {
    rest.split_once('-').and_then(|(digits, _)| digits.parse().ok())
}

fn remove_where(directory: &Path, is_stale: &dyn Fn(&str) -> bool) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if is_stale(&entry.file_name().to_string_lossy()) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

pub(in crate::checkpoint) fn parent_of(target: &Path) -> PathBuf {
    match target.parent() {
        Some(parent) if parent != Path::new("") => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

pub(in crate::checkpoint) fn remove(path: &Path) -> Result<()> {
    match if path.is_file() { fs::remove_file(path) } else { fs::remove_dir_all(path) } {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(|error| unwritable(path, &error)),
    }
}

/// Exchanges two directories atomically.
#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

/// Other systems have no such call: [`commit`] renames the old directory first.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Whether another process may still be running. Only Linux lists processes as files; on other systems the answer is always
/// yes, which keeps a stale directory rather than removing one in use.
fn may_be_running(process: u32) -> bool {
    process != std::process::id() && (!cfg!(target_os = "linux") || Path::new(&format!("/proc/{process}")).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_replaced_atomically_and_stale_staging_is_removed() {
        let root = std::env::temp_dir().join(format!("shardwise-directory-{}", std::process::id()));
        let target = root.join("state");
        fs::create_dir_all(&root).unwrap();
        for content in ["one", "two", "three"] {
            let staging = Staging::new(&target, 7).unwrap();
            assert!(Staging::new(&target, 8).err().unwrap().to_string().contains("in progress"));
            fs::write(staging.path().join("x.safetensors"), content).unwrap();
            sync(staging.path()).unwrap();
            let staged = staging.path().to_path_buf();
            staging.commit().unwrap();
            assert_eq!(fs::read_to_string(target.join("x.safetensors")).unwrap(), content);
            assert!(!staged.exists());
        }
        // staging of a process that no longer runs, and of one that does
        fs::create_dir(staged_path(&target, 0x7fff_ffff, 8)).unwrap();
        fs::create_dir(staged_path(&target, 1, 8)).unwrap();
        drop(Staging::new(&target, 9).unwrap());
        assert_eq!(fs::read_dir(&root).unwrap().count(), 2);
        // other files stay
        fs::write(target.join("notes.txt"), "mine").unwrap();
        assert!(Staging::new(&target, 10).err().unwrap().to_string().contains("notes.txt"));
        assert!(Staging::new(&target.join("notes.txt"), 10).err().unwrap().to_string().contains("a file"));
        fs::remove_file(target.join("notes.txt")).unwrap();
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    #[cfg(unix)]
    fn a_link_stays_and_the_directory_that_it_leads_to_is_replaced() {
        let root = std::env::temp_dir().join(format!("shardwise-directory-link-{}", std::process::id()));
        let (disk, link) = (root.join("disk"), root.join("link"));
        fs::create_dir_all(disk.join("state")).unwrap();
        std::os::unix::fs::symlink("disk/state", &link).unwrap();
        for content in ["one", "two"] {
            let staging = Staging::new(&link, 1).unwrap();
            // next to the real directory, which may be on another disk than the link
            assert!(staging.path().starts_with(disk.canonicalize().unwrap()), "{:?}", staging.path());
            fs::write(staging.path().join("x.safetensors"), content).unwrap();
            staging.commit().unwrap();
            assert!(link.is_symlink());
            assert_eq!(fs::read_to_string(disk.join("state/x.safetensors")).unwrap(), content);
            assert_eq!((fs::read_dir(&root).unwrap().count(), fs::read_dir(&disk).unwrap().count()), (2, 1));
        }
        assert_eq!(previous_path(&link).file_name().unwrap(), ".state.previous");
        // a link that leads nowhere is named with where it leads
        fs::remove_dir_all(&disk).unwrap();
        let error = Staging::new(&link, 1).err().unwrap().to_string();
        assert!(error.contains("disk/state") && error.contains("remove the link"), "{error}");
        assert!(link.is_symlink());
        fs::remove_dir_all(&root).unwrap();
    }
}
