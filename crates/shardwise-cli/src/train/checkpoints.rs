//! Checkpoints of a training run: their contents, saving, and resuming.

use shardwise::error::ErrorKind;
use std::path::{Path, PathBuf};

use shardwise::checkpoint::{self, AsyncSave, Catalog, Series, State, Value};
use shardwise::models::{LanguageModel, ModelConfig};
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
    /// Number of sequences per epoch.
    samples: u64,
    /// Seed of the shuffling.
    seed: u64,
}

impl ResumePoint {
    /// Reads the metadata of the checkpoint at a path: the latest one in an output directory or in a directory of checkpoints,
    /// or a single checkpoint.
    pub(super) fn find(path: &Path) -> Result<ResumePoint> {
        let latest = match series(path).latest()? {
            Some(latest) => Some(latest),
            None => Series::new(path).latest()?,
        };
        let path = latest.unwrap_or_else(|| path.to_path_buf());
        let bad = |error: Error| {
            let (found, needed) = (format!("{}: {error}", path.display()), "a checkpoint that `shardwise train` saved");
            ErrorKind::Argument.error(
                "checkpoint to resume",
                found,
                needed,
                "pass the directory of one, or train without --resume",
            )
        };
        let read = |catalog: &Catalog| -> Result<ResumePoint> {
            let number = |name: &str| -> Result<u64> { Ok(catalog.value(name)?.read::<i64>()?.cast_unsigned()) };
            let (step, samples, seed) = (number("step")?, number("data.samples")?, number("data.seed")?);
            let settings = TrainSettings { seed: Some(seed), ..catalog.value("settings")?.read()? };
            Ok(ResumePoint {
                path: path.clone(),
                config: catalog.value("config")?.read()?,
                settings,
                step,
                samples,
                seed,
            })
        };
        checkpoint::open(&path).and_then(|catalog| read(&catalog)).map_err(bad)
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

    /// Loads the checkpoint into a new run, in the layouts of that run. Collective.
    ///
    /// Returns whether the run has other data than the one that saved the checkpoint: then it starts with the first batch.
    pub(super) fn load(&self, world: &World, run: &mut TrainingRun, job: &TrainJob) -> Result<bool> {
        let TrainingRun { trainer, mesh, batches, step } = run;
        let (model, optimizer) = (&*trainer.model, &mut trainer.optimizer);
        let order = batches.order();
        let other_data = (order.samples(), order.seed()) != (self.samples, Some(self.seed));
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

/// Loads only the parameters and buffers of a model from a checkpoint. Collective.
pub(crate) fn load_model(world: &World, path: &Path, model: &dyn LanguageModel) -> Result<()> {
    checkpoint::load_into(world, path, (model,)).map(drop)
}

/// The contents of a checkpoint.
fn state_of(run: &TrainingRun, job: &TrainJob) -> Result<State> {
    let mut state = State::of((&*run.trainer.model, &run.trainer.optimizer, &run.mesh, &run.batches))?;
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

    /// Saves the last checkpoint unless it exists, and waits until it is on disk. Collective.
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

/// Makes sure that the run's checkpoints will be the latest ones in its output directory: deletes those of later steps.
pub(super) fn clear_later_checkpoints(out: &Path, first: u64, overwrite: bool) -> Result<()> {
    // A directory that is not writable fails now, not when the first checkpoint is due.
    let root = out.join(CHECKPOINTS);
    std::fs::create_dir_all(&root).map_err(|error| cannot_write("checkpoint directory", &root, &error))?;
    let series = series(out);
    later_checkpoints(out, first, overwrite)?.iter().try_for_each(|&step| series.remove(step))
}

/// The steps of checkpoints later than the `first` of a run, in its output directory.
///
/// Without `overwrite` they are an error, because `--resume` would find them first.
pub(super) fn later_checkpoints(out: &Path, first: u64, overwrite: bool) -> Result<Vec<u64>> {
    if !is_run(out) {
        return Ok(Vec::new());
    }
    let later: Vec<u64> = series(out).steps()?.into_iter().filter(|&step| step > first).collect();
    match later.last() {
        Some(last) if !overwrite => {
            let found =
                format!("{} has checkpoints up to step {last}, this run starts after step {first}", out.display());
            let fix = "continue from them with --resume, choose another --out, or delete them with --overwrite";
            Err(ErrorKind::Argument.error("output directory", found, "no checkpoints of later steps", fix))
        }
        _ => Ok(later),
    }
}

/// The error for a path that a run cannot write to, with its cause, such as a full disk or a missing permission.
pub(super) fn cannot_write(what: &'static str, path: &Path, error: &std::io::Error) -> Error {
    let fix = "free disk space or grant permission, or choose another path";
    ErrorKind::path(path).error(what, format!("{}: {error}", path.display()), "a writable path", fix)
}
