//! The checkpoints of a training run: one directory per step, of which the last few are kept.

use std::fs;
use std::panic::Location;
use std::path::{Path, PathBuf};

use crate::checkpoint::bytes::files::LoadReport;
use crate::checkpoint::catalogs::directory::{remove, remove_leftovers};
use crate::checkpoint::catalogs::open::format_of;
use crate::checkpoint::load::load_options::StateLoadOptions;
use crate::checkpoint::metadata::state::State;
use crate::checkpoint::run::parts::{RestoreParts, StatefulParts, restore_parts, state_of};
use crate::checkpoint::save::plan_cache::PlanCache;
use crate::checkpoint::save::save_options::SaveOptions;
use crate::checkpoint::save::{AsyncSave, async_save, save_with};
use crate::comm::{World, all_ok, gather_texts};
use crate::error::{ErrorKind, Result};

/// What a checkpoint is called while it is removed, before its step.
const REMOVED_PREFIX: &str = ".removed-";

/// A directory with one checkpoint per training step, `step-00000010` and so on.
///
/// Every rank builds it with the same arguments. It keeps the plan of its last save for the next one ([`PlanCache`]), and no
/// other state but the path.
///
/// ```
/// use shardwise::checkpoint::{Series, State};
/// use shardwise::prelude::*;
///
/// # let directory = std::env::temp_dir().join(format!("shardwise-series-{}", std::process::id()));
/// let series = Series::new(&directory).keep(2);
/// # let kept = series.clone();
/// launch(2, move |world| {
///     for step in [10, 20, 30] {
///         series.save(&world, step, &State::map([("step", step as i64)]))?;
///     }
///     Ok(())
/// })?;
/// # let series = kept;
/// assert_eq!(series.steps()?, [20, 30]);
/// assert!(series.latest()?.unwrap().ends_with("step-00000030"));
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "CheckpointManager")]
#[derive(Debug, Clone)]
pub struct Series {
    root: PathBuf,
    keep: Option<usize>,
    options: SaveOptions,
}

/// The checkpoint that [`Series::resume`] restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resumed {
    /// The step that was restored.
    pub step: u64,
    /// How much this rank read.
    pub report: LoadReport,
    /// Steps of newer checkpoints that could not be loaded, each with its error.
    pub skipped: Vec<(u64, String)>,
}

impl Series {
    /// A series in the directory `root` that keeps all checkpoints. Local; creates nothing.
    pub fn new(root: impl AsRef<Path>) -> Self {
        let options = SaveOptions { plan_cache: Some(PlanCache::default()), ..SaveOptions::default() };
        Series { root: root.as_ref().to_path_buf(), keep: None, options }
    }

    /// Keeps only the last `count` checkpoints, at least one. Older ones are removed when a newer one is complete.
    #[must_use]
    pub fn keep(mut self, count: usize) -> Self {
        self.keep = Some(count.max(1));
        self
    }

    /// Sets the options of saves. Without a [`PlanCache`] among them, the series keeps its own.
    #[must_use]
    pub fn options(mut self, options: SaveOptions) -> Self {
        let plan_cache = options.plan_cache.or(self.options.plan_cache);
        self.options = SaveOptions { plan_cache, ..options };
        self
    }

    /// Removes the checkpoint of a step. Local: call it on one rank.
    ///
    /// The directory is renamed first, so that no reader sees half a checkpoint.
    ///
    /// # Errors
    /// [`ErrorKind::Path`] if the directory cannot be changed.
    pub fn remove(&self, step: u64) -> Result<()> {
        let (path, aside) = (self.path(step), self.root.join(format!("{REMOVED_PREFIX}{step:08}")));
        // One that a killed process has not removed completely would be in the way.
        remove(&aside)?;
        let removed = fs::rename(&path, &aside).and_then(|()| fs::remove_dir_all(&aside));
        removed.map_err(|error| {
            let found = format!("{}, which could not be removed: {error}", path.display());
            ErrorKind::path(path).error(
                "checkpoint",
                found,
                "a directory that can be removed",
                "check its permissions and its disk",
            )
        })
    }

    /// Path of the checkpoint of a step, whether it exists or not.
    pub fn path(&self, step: u64) -> PathBuf {
        self.root.join(format!("step-{step:08}"))
    }

    /// Returns the steps that have a complete checkpoint, ascending. Local: reads the directory.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps = Vec::new();
        if !self.root.is_dir() {
            return Ok(steps);
        }
        for entry in fs::read_dir(&self.root)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let step = name.strip_prefix("step-").and_then(|digits| digits.parse::<u64>().ok());
            let is_own = |step: &u64| self.path(*step).file_name() == Some(&entry.file_name());
            steps.extend(step.filter(is_own).filter(|_| format_of(&entry.path()).is_ok()));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// Returns the path of the newest complete checkpoint. Local.
    pub fn latest(&self) -> Result<Option<PathBuf>> {
        Ok(self.steps()?.last().map(|&step| self.path(step)))
    }

    /// Saves state as the checkpoint of `step`, then removes checkpoints beyond [`keep`](Self::keep).
    ///
    /// Collective.
    ///
    /// # Errors
    /// As [`save`](crate::checkpoint::save()).
    #[track_caller]
    pub fn save(&self, world: &World, step: u64, state: &State) -> Result<()> {
        save_with(world, self.path(step), state, &self.options)?;
        self.prune(world, step)
    }

    /// Saves the parts of a training run as the checkpoint of `step`, then removes checkpoints beyond [`keep`](Self::keep).
    ///
    /// Collective; see [`checkpoint::save_from`](crate::checkpoint::save_from).
    #[track_caller]
    #[allow(clippy::needless_pass_by_value)] // parts are references, written in the call as a tuple
    pub fn save_from(&self, world: &World, step: u64, parts: impl StatefulParts) -> Result<()> {
        let state = state_of(&parts, self.options.format)?;
        self.save(world, step, &state)
    }

    /// Restores the parts of a training run from the newest checkpoint that can be loaded; `None` if there is no checkpoint.
    ///
    /// Collective: every rank of the world must call it, and all restore the same step. A checkpoint that cannot be loaded is
    /// skipped in favour of the next older one and listed in [`Resumed::skipped`]. See [`load_into`](crate::checkpoint::load_into).
    ///
    /// # Errors
    /// If there are checkpoints and none can be loaded: the error of the newest one. Then no part has changed.
    #[track_caller]
    pub fn resume(&self, world: &World, mut parts: impl RestoreParts) -> Result<Option<Resumed>> {
        let site = Location::caller();
        // Rank 0 lists the steps for all: other hosts may see files of a shared disk later.
        let steps = all_ok(world, if world.rank() == 0 { self.steps() } else { Ok(Vec::new()) }, site)?;
        let text = steps.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let steps = gather_texts(world, &text, site)?.swap_remove(0);
        let (mut skipped, mut first) = (Vec::new(), None);
        for step in steps.split_whitespace().rev().filter_map(|step| step.parse::<u64>().ok()) {
            match restore_parts(world, &self.path(step), &mut parts, &StateLoadOptions::default(), site) {
                Ok(report) => return Ok(Some(Resumed { step, report, skipped })),
                Err(error) => {
                    skipped.push((step, error.to_string()));
                    first.get_or_insert(error);
                }
            }
        }
        first.map_or(Ok(None), Err)
    }

    /// Starts to save the checkpoint of `step` in the background; see [`checkpoint::async_save`](crate::checkpoint::async_save).
    ///
    /// Collective. Removes no old checkpoint: call [`prune`](Self::prune) after [`AsyncSave::wait`].
    #[track_caller]
    pub fn async_save(&self, world: &World, step: u64, state: &State) -> Result<AsyncSave> {
        async_save(world, self.path(step), state, &self.options)
    }

    /// Removes checkpoints beyond [`keep`](Self::keep), counting back from `step`, and what killed processes have left of saves and
    /// removals.
    ///
    /// Collective: rank 0 removes them. Checkpoints of later steps, which a run that was restarted from an earlier one has left,
    /// stay.
    #[track_caller]
    pub fn prune(&self, world: &World, step: u64) -> Result<()> {
        let removed = || {
            if let Some(keep) = self.keep {
                let mut steps = self.steps()?;
                steps.retain(|&s| s <= step);
                let old = &steps[..steps.len().saturating_sub(keep)];
                old.iter().try_for_each(|&step| self.remove(step))?;
            }
            let digits = |name: &str| name.strip_prefix(REMOVED_PREFIX).is_some_and(|step| step.parse::<u64>().is_ok());
            if self.root.is_dir() { remove_leftovers(&self.root, &digits) } else { Ok(()) }
        };
        all_ok(world, if world.rank() == 0 { removed() } else { Ok(()) }, Location::caller())
    }
}

/// Restores the parts of a training run from the newest checkpoint in `directory` that can be loaded; `None` if there is none.
///
/// Collective. Short for [`Series::resume`]; checkpoints saved in any layout by any number of ranks can be resumed from.
///
/// ```
/// use shardwise::checkpoint::{self, Series};
/// use shardwise::nn::Linear;
/// use shardwise::prelude::*;
///
/// # let directory = std::env::temp_dir().join(format!("shardwise-resume-{}", std::process::id()));
/// # let run = directory.clone();
/// launch(2, move |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let model = Linear::new(&Builder::new(&mesh), 4, 6)?;
///     let mut optimizer = AdamW::default().over(&model)?;
///     assert!(checkpoint::resume(&world, &run, (&model, &mut optimizer, &mesh))?.is_none());
///     Series::new(&run).save_from(&world, 10, (&model, &optimizer, &mesh))?;
///     let resumed = checkpoint::resume(&world, &run, (&model, &mut optimizer, &mesh))?;
///     assert_eq!(resumed.map(|resumed| resumed.step), Some(10));
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// If there are checkpoints and none can be loaded: the error of the newest one. Then no part has changed.
#[track_caller]
pub fn resume(world: &World, directory: impl AsRef<Path>, parts: impl RestoreParts) -> Result<Option<Resumed>> {
    Series::new(directory).resume(world, parts)
}
