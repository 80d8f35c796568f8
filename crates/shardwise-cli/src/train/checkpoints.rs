//! Checkpoints of a training run: their contents, saving, and resuming.

use shardwise::error::ErrorKind;
use std::path::{Path, PathBuf};

use shardwise::checkpoint::{self, AsyncSave, Series, State, Value};
use shardwise::models::{ModelConfig, PretrainedModel};
use shardwise::prelude::*;
use shardwise::text::TextFiles;

use super::settings::{TrainJob, TrainSettings};
use super::trainer::TrainingRun;

/// The directory of the checkpoints in the output directory.
const CHECKPOINTS: &str = "checkpoints";

/// The checkpoints in an output directory.
pub(crate) fn series(out: &Path) -> Series {
    Series::new(out.join(CHECKPOINTS))
}

/// Whether this is the output directory of a training run.
pub(crate) fn is_run(directory: &Path) -> bool {
    directory.join(CHECKPOINTS).is_dir()
}

/// The metadata of a checkpoint to resume from.
pub(super) struct ResumePoint {
    path: PathBuf,
    pub(super) config: ModelConfig,
    /// The options of the run that saved it, without its output paths.
    pub(super) settings: TrainSettings,
    /// Number of steps done.
    pub(super) step: u64,
    /// Number of sequences per epoch, or those of several sources with their shares.
    samples: Value,
    /// Seed of the shuffling.
    seed: u64,
    /// Checkpoints of earlier steps of the same run, the latest one first.
    older: Vec<PathBuf>,
    /// Checkpoints of later steps whose metadata are damaged.
    skipped: Vec<SkippedCheckpoint>,
}

/// A damaged checkpoint, in whose place an older one was resumed from.
#[derive(Clone)]
pub(super) struct SkippedCheckpoint {
    path: PathBuf,
    error: String,
}

impl std::fmt::Display for SkippedCheckpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "passing over {}: {}", self.path.display(), self.error)
    }
}

/// The checkpoint that a run was resumed from.
pub(super) struct ResumedFrom {
    pub(super) path: PathBuf,
    /// Whether the run has other data than the one that saved it, so that it starts with the first batch.
    pub(super) other_data: bool,
    /// Newer checkpoints that are damaged.
    pub(super) skipped: Vec<SkippedCheckpoint>,
}

impl ResumePoint {
    /// Reads the metadata of the checkpoint at a path: the latest one in an output directory or in a directory of checkpoints
    /// that is not damaged, or a single checkpoint.
    pub(super) fn find(path: &Path) -> Result<ResumePoint> {
        let mut found = checkpoints_in(path, &series(path))?;
        if found.is_empty() {
            found = checkpoints_in(path, &Series::new(path))?;
        }
        if found.is_empty() {
            found.push(path.to_path_buf());
        }
        let mut skipped = Vec::new();
        let mut first = None;
        for (position, path) in found.iter().enumerate() {
            match ResumePoint::read(path) {
                Ok(point) => return Ok(ResumePoint { older: found[position + 1..].to_vec(), skipped, ..point }),
                Err(error) => {
                    skipped.push(SkippedCheckpoint { path: path.clone(), error: error.to_string() });
                    first.get_or_insert((path, error));
                }
            }
        }
        let (path, error) = first.expect("there is one path at least");
        let (place, found) = (path.display().to_string(), error.found());
        let found = if found.contains(&place) { found } else { format!("{place}: {found}") };
        let needed = "a checkpoint that `shardwise train` saved";
        let fix = "pass the directory of one, or train without --resume";
        Err(ErrorKind::Argument.error("checkpoint to resume", found, needed, fix))
    }

    /// Reads the metadata of one checkpoint.
    fn read(path: &Path) -> Result<ResumePoint> {
        let catalog = checkpoint::open(path)?;
        let number = |name: &str| -> Result<u64> { Ok(catalog.value(name)?.read::<i64>()?.cast_unsigned()) };
        let (step, seed) = (number("step")?, number("data.seed")?);
        let samples = catalog.value("data.samples")?;
        let settings = TrainSettings { seed: Some(seed), ..catalog.value("settings")?.read()? };
        let config = catalog.value("config")?.read()?;
        let (path, older, skipped) = (path.to_path_buf(), Vec::new(), Vec::new());
        Ok(ResumePoint { path, config, settings, step, samples, seed, older, skipped })
    }

    /// The checkpoints that were passed over so far.
    pub(super) fn skipped(&self) -> &[SkippedCheckpoint] {
        &self.skipped
    }

    /// Tokenizer and chat template of a run that began with a model of another library, from its output directory.
    pub(super) fn text_files(&self) -> Option<Result<TextFiles>> {
        let ModelConfig::Pretrained { config, .. } = &self.config else { return None };
        let out = self.out().filter(|out| out.join("tokenizer.json").exists())?;
        Some(TextFiles::read(out).map(|files| TextFiles { config: config.json().clone(), ..files }))
    }

    /// The output directory of the run that saved it.
    pub(super) fn out(&self) -> Option<&Path> {
        self.path.parent()?.parent()
    }

    /// Fails with the differences if the checkpoint is not one of the job's model.
    pub(super) fn check(&self, job: &TrainJob) -> Result<()> {
        let entries = |config: &ModelConfig| -> Result<serde_json::Map<String, serde_json::Value>> {
            let text = serde_json::to_string(config).map_err(Error::other)?;
            serde_json::from_str(&text).map_err(Error::other)
        };
        let (saved, wanted) = (entries(&self.config)?, entries(&job.config)?);
        let nothing = serde_json::Value::Null;
        // Dropout does not affect the weights.
        let differ = |(name, value): &(&String, &serde_json::Value)| {
            name.as_str() != "dropout" && saved.get(name.as_str()) != Some(*value)
        };
        let other: Vec<_> = wanted.iter().filter(differ).collect();
        if other.is_empty() {
            return Ok(());
        }
        let list = |of: &dyn Fn(&str) -> String| {
            other.iter().map(|(name, _)| format!("{name} {}", of(name))).collect::<Vec<_>>().join(", ")
        };
        let found =
            format!("{} with {}", self.path.display(), list(&|name| saved.get(name).unwrap_or(&nothing).to_string()));
        let needed = format!("{}, from options and text", list(&|name| wanted[name].to_string()));
        let fix = "leave out the options for the model's sizes, which come from the checkpoint";
        Err(ErrorKind::Argument.error("checkpoint to resume", found, needed, fix))
    }

    /// Loads the checkpoint into a new run, in the layouts of that run; an older one if the tensors of this one are damaged, which
    /// only reading them shows. Collective.
    pub(super) fn load(&self, world: &World, run: &mut TrainingRun, job: &TrainJob) -> Result<ResumedFrom> {
        let first = match self.load_this(world, run, job) {
            Ok(other_data) => {
                return Ok(ResumedFrom { path: self.path.clone(), other_data, skipped: self.skipped.clone() });
            }
            Err(error) => error,
        };
        let skip =
            |path: &Path, error: &Error| SkippedCheckpoint { path: path.to_path_buf(), error: error.to_string() };
        let mut skipped = self.skipped.clone();
        skipped.push(skip(&self.path, &first));
        for path in &self.older {
            // Every rank needs the metadata; that of the first one decides, so that all of them go on to the same checkpoint.
            let loaded = world.on_first_rank(|| ResumePoint::read(path).map(drop)).and_then(|_| {
                let point = ResumePoint::read(path)?;
                point.check(job)?;
                point.load_this(world, run, job)
            });
            match loaded {
                Ok(other_data) => return Ok(ResumedFrom { path: path.clone(), other_data, skipped }),
                Err(error) => skipped.push(skip(path, &error)),
            }
        }
        Err(first)
    }

    /// Loads this checkpoint and no other; whether the run has other data. Changes nothing if it fails. Collective.
    fn load_this(&self, world: &World, run: &mut TrainingRun, job: &TrainJob) -> Result<bool> {
        let TrainingRun { trainer, mesh, batches, step } = run;
        let (model, optimizer) = (&trainer.model, &mut trainer.optimizer);
        let own = State::of((&*batches,))?;
        let other_data = own.value("data.samples")? != self.samples || batches.order().seed() != Some(self.seed);
        match other_data {
            true => checkpoint::load_into(world, &self.path, (model, &mut *optimizer, &*mesh))?,
            false => checkpoint::load_into(world, &self.path, (model, &mut *optimizer, &*mesh, batches))?,
        };
        *step = self.step;
        // Changed options apply from here on.
        optimizer.groups_mut().iter_mut().zip(&job.groups).for_each(|(own, new)| *own = new.clone());
        optimizer.set_schedule(job.schedule);
        Ok(other_data)
    }
}

/// The checkpoints of a series in or at a directory, the latest one first.
fn checkpoints_in(path: &Path, series: &Series) -> Result<Vec<PathBuf>> {
    let unreadable = |error: Error| -> Error {
        let found = format!("{}: {}", path.display(), error.found());
        let fix = "pass the directory of a run, or train without --resume";
        ErrorKind::Argument.error("checkpoint to resume", found, "a directory that can be read", fix)
    };
    let steps = series.steps().map_err(unreadable)?;
    Ok(steps.into_iter().rev().map(|step| series.path(step)).collect())
}

/// Loads only the parameters and buffers of a model from a checkpoint. Collective.
pub(crate) fn load_model(world: &World, path: &Path, model: &PretrainedModel) -> Result<()> {
    checkpoint::load_into(world, path, (model,)).map(drop)
}

/// The contents of a checkpoint.
fn state_of(run: &TrainingRun, job: &TrainJob) -> Result<State> {
    let mut state = State::of((&run.trainer.model, &run.trainer.optimizer, &run.mesh, &run.batches))?;
    state.extend([
        ("step", State::from(run.step.cast_signed())),
        ("config", State::Value(Value::of(&job.config)?)),
        ("settings", State::Value(Value::of(&job.settings)?)),
    ]);
    Ok(state)
}

/// Saves checkpoints in the background, one at a time.
pub(super) struct Saver<'a> {
    world: &'a World,
    series: Series,
    /// The save in progress.
    pending: Option<AsyncSave>,
    /// The last step that was saved.
    last: Option<u64>,
}

impl<'a> Saver<'a> {
    pub(super) fn new(world: &'a World, job: &TrainJob) -> Self {
        Saver { world, series: series(&job.out).keep(job.keep), pending: None, last: None }
    }

    /// Starts to save a checkpoint, after the previous save has completed. Collective.
    pub(super) fn save(&mut self, run: &TrainingRun, job: &TrainJob) -> Result<()> {
        self.finish()?;
        self.pending = Some(self.series.async_save(self.world, run.step, &state_of(run, job)?)?);
        self.last = Some(run.step);
        Ok(())
    }

    /// Saves the last checkpoint unless this run has, and waits until it is on disk. Collective.
    pub(super) fn end(&mut self, run: &TrainingRun, job: &TrainJob) -> Result<()> {
        if self.last != Some(run.step) {
            self.save(run, job)?;
        }
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        let Some(pending) = self.pending.take() else { return Ok(()) };
        pending.wait()?;
        self.series.prune(self.world, self.last.expect("the step of what was pending"))
    }
}

/// Creates the directory of the checkpoints: one that is not writable fails now, not when the first checkpoint is due.
pub(super) fn create_directory(out: &Path) -> Result<()> {
    let root = out.join(CHECKPOINTS);
    std::fs::create_dir_all(&root).map_err(|error| cannot_write("checkpoint directory", &root, &error))
}

/// Makes sure that the run's checkpoints will be the latest ones in its output directory: deletes those of later steps.
pub(super) fn clear_later_checkpoints(
    out: &Path,
    first: u64,
    skipped: &[SkippedCheckpoint],
    overwrite: bool,
) -> Result<()> {
    let series = series(out);
    later_checkpoints(out, first, skipped, overwrite)?.iter().try_for_each(|&step| series.remove(step))
}

/// The steps of checkpoints later than the `first` of a run, in its output directory.
///
/// Without `overwrite` they are an error, because `--resume` would find them first. The damaged ones that it has passed over
/// stay: what is left of them may be worth something to their owner, and `--resume` passes over them again.
pub(super) fn later_checkpoints(
    out: &Path,
    first: u64,
    skipped: &[SkippedCheckpoint],
    overwrite: bool,
) -> Result<Vec<u64>> {
    if !is_run(out) {
        return Ok(Vec::new());
    }
    let series = series(out);
    let is_skipped = |step: u64| skipped.iter().any(|skipped| is_same(&skipped.path, &series.path(step)));
    let later: Vec<u64> = series.steps()?.into_iter().filter(|&step| step > first).collect();
    match later.iter().rfind(|&&step| !is_skipped(step)) {
        Some(last) if !overwrite => {
            let found =
                format!("{} has checkpoints up to step {last}, this run starts after step {first}", out.display());
            let fix = "continue from them with --resume, choose another --out, or delete them with --overwrite";
            Err(ErrorKind::Argument.error("output directory", found, "no checkpoints of later steps", fix))
        }
        _ if overwrite => Ok(later),
        _ => Ok(Vec::new()),
    }
}

/// Whether two paths lead to the same file or directory, which exists.
pub(super) fn is_same(one: &Path, other: &Path) -> bool {
    one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}

/// The error for a path that a run cannot write to, with its cause, such as a full disk or a missing permission.
pub(super) fn cannot_write(what: &'static str, path: &Path, error: &std::io::Error) -> Error {
    let fix = "free disk space or grant permission, or choose another path";
    let found = match path.is_symlink() && !path.exists() {
        true => format!("{}, a link that leads nowhere", path.display()),
        false => format!("{}: {error}", path.display()),
    };
    ErrorKind::path(path).error(what, found, "a writable path", fix)
}
