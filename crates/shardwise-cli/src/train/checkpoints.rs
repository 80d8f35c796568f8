//! Checkpoints of a training run: what is in them, when they are saved, and how a run resumes from one.

use shardwise::error::ErrorKind;
use std::path::{Path, PathBuf};

use shardwise::checkpoint::{self, AsyncSave, Catalog, Series, State, Value};
use shardwise::models::{LanguageModel, ModelConfig};
use shardwise::prelude::*;

use super::settings::{Job, Settings};
use super::trainer::TrainingRun;

/// Where the checkpoints of a run are, in its output directory.
const CHECKPOINTS: &str = "checkpoints";

/// The checkpoints of the run with an output directory.
pub(crate) fn series(out: &Path) -> Series {
    Series::new(out.join(CHECKPOINTS))
}

/// A checkpoint to go on from, without its tensors.
pub(super) struct Resumed {
    path: PathBuf,
    config: ModelConfig,
    /// The options of the run that saved it, but for what belongs to that run alone.
    pub(super) settings: Settings,
    /// Steps taken.
    pub(super) step: u64,
    /// Sequences in an epoch of its text.
    samples: u64,
    /// Seed of the order in which they were drawn.
    seed: u64,
}

impl Resumed {
    /// Finds the checkpoint that a path leads to: an output directory or a directory of checkpoints, of which the last one
    /// counts, or one checkpoint.
    pub(super) fn find(path: &Path) -> Result<Resumed> {
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
                "name its directory, or train without --resume",
            )
        };
        let read = |catalog: &Catalog| -> Result<Resumed> {
            let number = |name: &str| -> Result<u64> { Ok(catalog.value(name)?.read::<i64>()?.cast_unsigned()) };
            let (step, samples, seed) = (number("step")?, number("data.samples")?, number("data.seed")?);
            let settings = Settings { seed: Some(seed), ..catalog.value("settings")?.read()? };
            Ok(Resumed { path: path.clone(), config: catalog.value("config")?.read()?, settings, step, samples, seed })
        };
        checkpoint::open(&path).and_then(|catalog| read(&catalog)).map_err(bad)
    }

    /// The output directory of the run that saved it.
    pub(super) fn out(&self) -> Option<&Path> {
        self.path.parent()?.parent()
    }

    /// An error that lists what is different, unless the checkpoint is one of the model of a job.
    pub(super) fn check(&self, job: &Job) -> Result<()> {
        let entries = |config: &ModelConfig| -> Result<serde_json::Map<String, serde_json::Value>> {
            let text = serde_json::to_string(config).map_err(Error::other)?;
            serde_json::from_str(&text).map_err(Error::other)
        };
        let (saved, wanted) = (entries(&self.config)?, entries(&job.config)?);
        let nothing = serde_json::Value::Null;
        // Dropout is a matter of training, not of the weights.
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
        let needed = format!("{}, as options and text say", list(&|name| wanted[name].to_string()));
        let fix = "leave out the options for sizes: they come from the checkpoint";
        Err(ErrorKind::Argument.error("checkpoint to resume", found, needed, fix))
    }

    /// Restores a new run to where the checkpoint was, on its own mesh and in its own layouts. Returns whether it draws other
    /// data than the run that saved it: then it begins with the first batch.
    pub(super) fn load(&self, world: &World, run: &mut TrainingRun, job: &Job) -> Result<bool> {
        let TrainingRun { trainer, mesh, batches, step } = run;
        let (model, optimizer) = (&*trainer.model, &mut trainer.optimizer);
        let order = batches.order();
        let other_data = (order.samples(), order.seed()) != (self.samples, Some(self.seed));
        match other_data {
            true => checkpoint::load_into(world, &self.path, (model, &mut *optimizer, &*mesh))?,
            false => checkpoint::load_into(world, &self.path, (model, &mut *optimizer, &*mesh, batches))?,
        };
        *step = self.step;
        // Options that were changed count from here on.
        optimizer.groups_mut().iter_mut().zip(&job.groups).for_each(|(own, new)| *own = new.clone());
        optimizer.set_schedule(job.schedule);
        Ok(other_data)
    }
}

/// Loads parameters and buffers of a model, and nothing else, from a checkpoint.
pub(crate) fn load_model(world: &World, path: &Path, model: &dyn LanguageModel) -> Result<()> {
    checkpoint::load_into(world, path, (model,)).map(drop)
}

/// Everything that a run resumes from.
fn state_of(run: &TrainingRun, job: &Job) -> Result<State> {
    let mut state = State::of((&*run.trainer.model, &run.trainer.optimizer, &run.mesh, &run.batches))?;
    state.extend([
        ("step", State::from(run.step.cast_signed())),
        ("config", State::Value(Value::of(&job.config)?)),
        ("settings", State::Value(Value::of(&job.settings)?)),
    ]);
    Ok(state)
}

/// Saves while the run goes on, one checkpoint at a time.
pub(super) struct Saver<'a> {
    world: &'a World,
    series: Series,
    /// What is being written.
    pending: Option<AsyncSave>,
    /// The last step that was saved.
    last: Option<u64>,
}

impl<'a> Saver<'a> {
    pub(super) fn new(world: &'a World, job: &Job) -> Self {
        Saver { world, series: series(&job.out).keep(job.keep), pending: None, last: None }
    }

    /// Begins to save the state of a run, after the save before is complete.
    pub(super) fn save(&mut self, run: &TrainingRun, job: &Job) -> Result<()> {
        self.finish()?;
        self.pending = Some(self.series.async_save(self.world, run.step, &state_of(run, job)?)?);
        self.last = Some(run.step);
        Ok(())
    }

    /// Saves the end, unless it is saved already, and waits until everything is on disk.
    pub(super) fn end(&mut self, run: &TrainingRun, job: &Job) -> Result<()> {
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

/// Makes sure that the run's checkpoints will be the last ones in its output directory: those of later steps are removed if
/// that is wanted, else they are an error.
pub(super) fn make_way(out: &Path, first: u64, overwrite: bool) -> Result<()> {
    let series = series(out);
    // A place that cannot be written to is found out now and not when the first checkpoint is due.
    let root = out.join(CHECKPOINTS);
    std::fs::create_dir_all(&root).map_err(|error| unwritable("checkpoint directory", &root, &error))?;
    let later: Vec<u64> = series.steps()?.into_iter().filter(|&step| step > first).collect();
    let Some(last) = later.last() else { return Ok(()) };
    if !overwrite {
        let found =
            format!("{} has checkpoints up to step {last}, this training begins after step {first}", out.display());
        let fix = "go on from them with --resume, name another --out, or remove them with --overwrite";
        return Err(ErrorKind::Argument.error("output directory", found, "no checkpoints of later steps", fix));
    }
    later.iter().try_for_each(|&step| series.remove(step))
}

/// The error for a place that a run cannot write to, with the cause: a full disk, a read-only one, no permission.
pub(super) fn unwritable(what: &'static str, path: &Path, error: &std::io::Error) -> Error {
    let fix = "make room or give permission there, or name another place";
    ErrorKind::path(path).error(what, format!("{}: {error}", path.display()), "a place that can be written to", fix)
}
