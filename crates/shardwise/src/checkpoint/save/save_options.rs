//! Options of a save.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::checkpoint::catalogs::format::Format;
use crate::checkpoint::save::plan_cache::PlanCache;
use crate::error::{ErrorKind, Result};

/// Options of a save: format, timeout, and what happens around the moment at which the checkpoint becomes visible.
#[doc(alias = "FileSystemWriter")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveOptions {
    /// The file format; [`Format::Native`] by default.
    pub format: Format,
    /// How long the coordinator, which completes the checkpoint, waits for the files of the other ranks; 240 s by default, less
    /// than the 300 s of collectives, so that the error names the missing files and is not a timeout of the next collective.
    pub deadline: Duration,
    /// Whether a checkpoint that exists at the path is replaced; true by default. If false, it is an error and stays.
    pub overwrite: bool,
    /// The rank that creates the directory, completes the checkpoint and makes it visible; 0 by default.
    #[doc(alias = "coordinator_rank")]
    pub coordinator: usize,
    /// Runs on the coordinator when all files have been written, before the checkpoint replaces the one at the path. Gets the
    /// directory with the new files. An error fails the save on all ranks, and the old checkpoint stays.
    pub before_commit: Option<CommitHook>,
    /// Runs on the coordinator when the checkpoint is visible, with its path. An error is that of the save, and the checkpoint
    /// stays.
    pub after_commit: Option<CommitHook>,
    /// Keeps the plan of a save for the next one, so that a state of the same structure is not planned again; none by default.
    #[doc(alias = "enable_plan_caching")]
    pub plan_cache: Option<PlanCache>,
}

impl Default for SaveOptions {
    fn default() -> Self {
        SaveOptions {
            format: Format::Native,
            deadline: Duration::from_secs(240),
            overwrite: true,
            coordinator: 0,
            before_commit: None,
            after_commit: None,
            plan_cache: None,
        }
    }
}

impl SaveOptions {
    /// Fails unless the coordinator is a rank of a world of `size` ranks.
    pub(in crate::checkpoint) fn check(&self, size: usize) -> Result<()> {
        if self.coordinator < size {
            return Ok(());
        }
        let needed = format!("a rank of the world, below {size}");
        Err(ErrorKind::Rank { rank: self.coordinator, size }.error(
            "coordinator of the save",
            self.coordinator,
            needed,
            "0 is the first rank",
        ))
    }
}

/// A function that a save calls around its commit: [`SaveOptions::before_commit`] and [`SaveOptions::after_commit`].
///
/// It runs on the thread that writes and must not communicate.
///
/// ```
/// use shardwise::checkpoint::{self, CommitHook, SaveOptions, State};
/// use shardwise::prelude::*;
///
/// # let directory = std::env::temp_dir().join(format!("shardwise-hook-{}", std::process::id()));
/// # let path = directory.clone();
/// launch(2, move |world| {
///     let announce = CommitHook::new(|path| {
///         println!("saved {}", path.display());
///         Ok(())
///     });
///     let options = SaveOptions { after_commit: Some(announce), ..SaveOptions::default() };
///     checkpoint::save_with(&world, &path, &State::map([("step", 1)]), &options)
/// })?;
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct CommitHook(Arc<CommitFn>);

type CommitFn = dyn Fn(&Path) -> Result<()> + Send + Sync;

impl CommitHook {
    /// Wraps a function of a path.
    pub fn new(hook: impl Fn(&Path) -> Result<()> + Send + Sync + 'static) -> Self {
        CommitHook(Arc::new(hook))
    }

    pub(in crate::checkpoint) fn run(&self, path: &Path) -> Result<()> {
        (self.0)(path)
    }
}

impl PartialEq for CommitHook {
    /// Hooks are equal if they are clones of one.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for CommitHook {}

impl fmt::Debug for CommitHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CommitHook")
    }
}
