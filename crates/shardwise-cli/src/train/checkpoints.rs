//! Checkpoints of a training: what is in them, when they are saved, and how a training goes on from one.

use std::path::{Path, PathBuf};

use shardwise::checkpoint::{self, AsyncSave, Catalog, Series, State, Value};
use shardwise::models::{LanguageModel, ModelConfig};
use shardwise::optim::OptimizerState;
use shardwise::prelude::*;
use shardwise::random::GeneratorState;

use super::settings::{Job, Settings};
use super::trainer::Trainer;

/// Where the checkpoints of a run are, in its output directory.
const CHECKPOINTS: &str = "checkpoints";

/// The checkpoints of the run with an output directory.
pub(crate) fn series(out: &Path) -> Series {
    Series::new(out.join(CHECKPOINTS))
}

/// How far a training has come.
#[derive(Clone, Copy, Default)]
pub(super) struct Position {
    /// Steps taken.
    pub(super) step: u64,
    /// Batches used.
    pub(super) batches: u64,
}

/// A checkpoint to go on from, without its tensors.
pub(super) struct Resumed {
    path: PathBuf,
    config: ModelConfig,
    /// The options of the run that saved it, but for what belongs to that run alone.
    pub(super) settings: Settings,
    pub(super) at: Position,
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
            Error::invalid("checkpoint to resume", found, needed, "name its directory, or train without --resume")
        };
        let read = |catalog: &Catalog| -> Result<Resumed> {
            let number = |name: &str| catalog.value(name)?.read::<i64>();
            let mut settings: Settings = catalog.value("settings")?.read()?;
            settings.seed = Some(number("data.seed")?.cast_unsigned());
            let at =
                Position { step: number("step")?.cast_unsigned(), batches: number("data.batches")?.cast_unsigned() };
            Ok(Resumed { path: path.clone(), config: catalog.value("config")?.read()?, settings, at })
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
        Err(Error::invalid("checkpoint to resume", found, needed, fix))
    }

    /// Brings a new trainer to where the checkpoint was, on its own mesh and in its own layouts.
    pub(super) fn load(&self, world: &World, trainer: &mut Trainer, job: &Job) -> Result<()> {
        let tensors = tensors(&*trainer.model);
        let place = |key: &str, shape: &[usize]| {
            let of_model = key.strip_prefix("model.").and_then(|name| tensors.iter().find(|(other, _)| other == name));
            let of_optimizer = key.strip_prefix("optimizer.state.").and_then(|path| path.rsplit_once('.'));
            let place = match (of_model, of_optimizer) {
                (Some((_, tensor)), _) => Some((tensor.device_mesh().clone(), tensor.layout().settled())),
                (None, Some((param, kind))) => trainer.optimizer.state_layout(param, kind)?,
                (None, None) => None,
            };
            match place.filter(|(_, layout)| layout.shape() == shape) {
                Some(place) => Ok(place),
                None => {
                    let found = format!("tensor {key:?} of shape {shape:?}");
                    let fix = "resume with the model that it was saved from";
                    Err(Error::invalid("checkpoint to resume", found, "weights and moments of the model", fix))
                }
            }
        };
        let state = checkpoint::load_placed(world, &self.path, place)?;
        set_model(&*trainer.model, &state)?;
        let optimizer = state.get("optimizer").map_or_else(|| Err(missing("optimizer")), OptimizerState::try_from)?;
        trainer.optimizer.load_state_dict(&optimizer)?;
        // Options that were changed count from here on.
        trainer.optimizer.groups_mut().iter_mut().zip(&job.groups).for_each(|(own, new)| *own = new.clone());
        let generator = state.get("generator").map_or_else(|| Err(missing("generator")), GeneratorState::try_from)?;
        trainer.mesh.generator().set_state(generator);
        Ok(())
    }
}

fn missing(what: &str) -> Error {
    let needed = "a checkpoint that `shardwise train` saved";
    Error::invalid("checkpoint", format!("no entry `{what}`"), needed, "name another checkpoint")
}

/// Parameters and buffers of a model by path.
fn tensors(model: &dyn LanguageModel) -> Vec<(String, DTensor)> {
    let params = model.named_parameters().into_iter().map(|(name, param)| (name, param.get().detach()));
    let buffers = model.named_buffers().into_iter().map(|(name, buffer)| (name, buffer.get()));
    params.chain(buffers).collect()
}

/// Gives a model the parameters and buffers of a loaded state, in the types that it has.
fn set_model(model: &dyn LanguageModel, state: &State) -> Result<()> {
    for (name, param) in model.named_parameters() {
        param.set(&state.tensor(&format!("model.{name}"))?.to_dtype(param.dtype())?)?;
    }
    for (name, buffer) in model.named_buffers() {
        buffer.set(&state.tensor(&format!("model.{name}"))?.to_dtype(buffer.get().dtype())?);
    }
    Ok(())
}

/// Loads parameters and buffers of a model, each as it lies, and nothing else, from a checkpoint.
pub(crate) fn load_model(world: &World, path: &Path, model: &dyn LanguageModel) -> Result<()> {
    let template = State::map([("model", State::map(tensors(model)))]);
    set_model(model, &checkpoint::load(world, path, &template)?)
}

/// Everything that a training goes on from.
fn state_of(trainer: &Trainer, job: &Job, at: Position) -> Result<State> {
    let data = [("seed", job.seed.cast_signed()), ("batches", at.batches.cast_signed())];
    Ok(State::map([
        ("model", State::map(tensors(&*trainer.model))),
        ("optimizer", State::try_from(&trainer.optimizer.state_dict()?)?),
        ("generator", State::from(trainer.mesh.generator().state())),
        ("step", State::from(at.step.cast_signed())),
        ("data", State::map(data)),
        ("config", State::Value(Value::of(&job.config)?)),
        ("settings", State::Value(Value::of(&job.settings)?)),
    ]))
}

/// Saves while the training goes on, one checkpoint at a time.
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

    /// Begins to save what a training is now, after the save before is complete.
    pub(super) fn save(&mut self, trainer: &Trainer, job: &Job, at: Position) -> Result<()> {
        self.finish()?;
        self.pending = Some(self.series.async_save(self.world, at.step, &state_of(trainer, job, at)?)?);
        self.last = Some(at.step);
        Ok(())
    }

    /// Saves the end, unless it is saved already, and waits until everything is on disk.
    pub(super) fn end(mut self, trainer: &Trainer, job: &Job, at: Position) -> Result<()> {
        if self.last != Some(at.step) {
            self.save(trainer, job, at)?;
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
        return Err(Error::invalid("output directory", found, "no checkpoints of later steps", fix));
    }
    later.iter().try_for_each(|&step| series.remove(step))
}

/// The error for a place that a run cannot write to, with the cause: a full disk, a read-only one, no permission.
pub(super) fn unwritable(what: &'static str, path: &Path, error: &std::io::Error) -> Error {
    let fix = "make room or give permission there, or name another place";
    Error::invalid(what, format!("{}: {error}", path.display()), "a place that can be written to", fix)
}
