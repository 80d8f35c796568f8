//! Checkpoints of a run: one directory per step, the last few of them kept.

use std::fs;
use std::panic::Location;
use std::path::{Path, PathBuf};

use super::files::LoadReport;
use super::open::format_of;
use super::parts::{Parts, RestoreParts, restored, state_of};
use super::save::{AsyncSave, SaveOptions, async_save, save_with};
use super::state::State;
use crate::comm::{World, all_ok, gather_texts};
use crate::error::{ErrorKind, Result};

/// A directory of checkpoints by step.
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
#[derive(Debug, Clone)]
pub struct Series {
    root: PathBuf,
    keep: Option<usize>,
    options: SaveOptions,
}

/// What a training run goes on from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resumed {
    /// The step of the checkpoint.
    pub step: u64,
    /// What this rank has read of it.
    pub report: LoadReport,
    /// Newer checkpoints that could not be loaded, and why.
    pub passed_over: Vec<(u64, String)>,
}

impl Series {
    /// Checkpoints in a directory, all of them kept.
    pub fn new(root: impl AsRef<Path>) -> Self {
        Series { root: root.as_ref().to_path_buf(), keep: None, options: SaveOptions::default() }
    }

    /// Keeps the last `count` only, one at least. An older one goes when a newer one is complete.
    #[must_use]
    pub fn keep(mut self, count: usize) -> Self {
        self.keep = Some(count.max(1));
        self
    }

    /// Saves with these options.
    #[must_use]
    pub fn options(mut self, options: SaveOptions) -> Self {
        self.options = options;
        self
    }

    /// Removes the checkpoint of a step: it is no longer one before its first file goes. Local: one rank makes the call.
    pub fn remove(&self, step: u64) -> Result<()> {
        let (path, aside) = (self.path(step), self.root.join(format!(".removed-{step:08}")));
        let removed = fs::rename(&path, &aside).and_then(|()| fs::remove_dir_all(&aside));
        removed.map_err(|error| {
            let found = format!("{}, which could not be removed: {error}", path.display());
            ErrorKind::path(path).error(
                "checkpoint",
                found,
                "a directory that may be changed",
                "look at its permissions and its disk",
            )
        })
    }

    /// Where the checkpoint of a step is.
    pub fn path(&self, step: u64) -> PathBuf {
        self.root.join(format!("step-{step:08}"))
    }

    /// The steps with a complete checkpoint, in order.
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

    /// The checkpoint of the last step, if there is one.
    pub fn latest(&self) -> Result<Option<PathBuf>> {
        Ok(self.steps()?.last().map(|&step| self.path(step)))
    }

    /// Saves the state of a step, and removes checkpoints that are no longer kept. All ranks of the world make the call.
    #[track_caller]
    pub fn save(&self, world: &World, step: u64, state: &State) -> Result<()> {
        save_with(world, self.path(step), state, &self.options)?;
        self.prune(world, step)
    }

    /// As [`save`](Self::save), of the parts of a training run; see [`save_from`](super::save_from).
    #[track_caller]
    #[allow(clippy::needless_pass_by_value)] // parts are references, written in the call as a tuple
    pub fn save_from(&self, world: &World, step: u64, parts: impl Parts) -> Result<()> {
        let state = state_of(&parts, self.options.format)?;
        self.save(world, step, &state)
    }

    /// Restores the parts of a training run from the newest checkpoint that can be loaded; see [`load_into`](super::load_into).
    /// Returns `None`, and changes nothing, if there is no checkpoint.
    ///
    /// Collective: all ranks of the world make the call and restore the same step. One that cannot be loaded is passed over
    /// for an older one, and named in the result.
    ///
    /// # Errors
    /// That of the newest checkpoint, if none can be loaded.
    #[track_caller]
    pub fn resume(&self, world: &World, mut parts: impl RestoreParts) -> Result<Option<Resumed>> {
        let site = Location::caller();
        // The first rank looks: others may see files of a shared disk later.
        let steps = all_ok(world, if world.rank() == 0 { self.steps() } else { Ok(Vec::new()) }, site)?;
        let text = steps.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let steps = gather_texts(world, &text, site)?.swap_remove(0);
        let (mut passed_over, mut first) = (Vec::new(), None);
        for step in steps.split_whitespace().rev().filter_map(|step| step.parse::<u64>().ok()) {
            match restored(world, &self.path(step), &mut parts, site) {
                Ok(report) => return Ok(Some(Resumed { step, report, passed_over })),
                Err(error) => {
                    passed_over.push((step, error.to_string()));
                    first.get_or_insert(error);
                }
            }
        }
        first.map_or(Ok(None), Err)
    }

    /// As [`save`](Self::save), but returns as soon as it is clear what will be written. Nothing is removed: call
    /// [`prune`](Self::prune) when the save is over.
    #[track_caller]
    pub fn async_save(&self, world: &World, step: u64, state: &State) -> Result<AsyncSave> {
        async_save(world, self.path(step), state, &self.options)
    }

    /// Removes checkpoints that are no longer kept now that there is one of `step`. Those of later steps, which a run that went
    /// back has left behind, stay. All ranks of the world make the call.
    #[track_caller]
    pub fn prune(&self, world: &World, step: u64) -> Result<()> {
        let removed = match (self.keep, world.rank()) {
            (Some(keep), 0) => self.steps().and_then(|mut steps| {
                steps.retain(|&s| s <= step);
                let old = &steps[..steps.len().saturating_sub(keep)];
                old.iter().try_for_each(|&step| self.remove(step))
            }),
            _ => Ok(()),
        };
        all_ok(world, removed, Location::caller())
    }
}

/// Restores the parts of a training run from the newest checkpoint of a directory that can be loaded, in any layout; nothing
/// changes if there is none. Collective: [`Series::resume`] in one call.
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
/// That of the newest checkpoint, if there are some and none can be loaded.
#[track_caller]
pub fn resume(world: &World, directory: impl AsRef<Path>, parts: impl RestoreParts) -> Result<Option<Resumed>> {
    Series::new(directory).resume(world, parts)
}
