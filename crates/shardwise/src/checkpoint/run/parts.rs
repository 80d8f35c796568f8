//! Saving and restoring a training run in one call: model, optimizer with its schedule, generator, data position, and custom
//! parts.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::Location;
use std::path::Path;

use candle_core::{Device, Tensor};

use crate::checkpoint::bytes::files::LoadReport;
use crate::checkpoint::catalogs::catalog::Catalog;
use crate::checkpoint::catalogs::format::Format;
use crate::checkpoint::load::load_by_template;
use crate::checkpoint::load::load_options::{LoadedState, StateLoadOptions};
use crate::checkpoint::metadata::state::State;
use crate::checkpoint::metadata::value::Value;
use crate::checkpoint::run::torch_optim;
use crate::checkpoint::save::save_options::SaveOptions;
use crate::checkpoint::save::save_with;
use crate::comm::{DeviceMesh, World};
use crate::data::{Batches, Dataset};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::nn::Module;
use crate::optim::{GradScaler, OptimizerState, Schedule, ShardedOptimizer};
use crate::param::MergedTensor;
use crate::random::GeneratorState;
use crate::tensor::DTensor;

/// A part of a training run that can be saved: a module, an optimizer, the generator of a mesh, or a custom type.
///
/// The counterpart of PyTorch's `Stateful` protocol: this trait is its `state_dict`, [`Restore`] its `load_state_dict`.
/// Implemented for references: `&model`, `&optimizer`, `&mesh`, `&batches`.
#[doc(alias = "get_state_dict")]
pub trait Stateful {
    /// Name of the part's entry in a checkpoint, such as `model`.
    fn entry(&self) -> &str;

    /// Returns the state to save. It is also the default template of a load, so it must have all entries. Local.
    fn state(&self) -> Result<State>;

    /// Returns the state to save in `format`: in PyTorch's form if readers of the format expect that.
    fn state_in(&self, format: Format) -> Result<State> {
        let _ = format;
        self.state()
    }
}

/// A [`Stateful`] part that can be restored from a checkpoint.
#[doc(alias = "set_state_dict")]
pub trait Restore: Stateful {
    /// Returns the template to load, for a checkpoint that has this part under `entry`.
    fn template(&self, stored: &Catalog, entry: &str) -> Result<State> {
        let _ = (stored, entry);
        self.state()
    }

    /// Fails if [`restore`](Self::restore) would. Called for all parts before any of them changes, so that a failed load
    /// changes nothing.
    fn check(&self, loaded: &State) -> Result<()> {
        let _ = loaded;
        Ok(())
    }

    /// Sets this part to the state that was loaded with its template.
    fn restore(&mut self, loaded: &State) -> Result<()>;
}

/// A tuple of one to six [`Stateful`] parts, such as `(&model, &optimizer, &mesh)`.
pub trait StatefulParts {
    /// Calls `visit` with every part, in order; stops at the first error.
    fn each(&self, visit: &mut dyn FnMut(&dyn Stateful) -> Result<()>) -> Result<()>;
}

/// A tuple of one to six [`Restore`] parts, such as `(&model, &mut optimizer, &mesh)`.
pub trait RestoreParts {
    /// Calls `visit` with every part, in order; stops at the first error.
    fn each_mut(&mut self, visit: &mut dyn FnMut(&mut dyn Restore) -> Result<()>) -> Result<()>;
}

macro_rules! tuples {
    ($($($T:ident $i:tt),+;)*) => {$(
        impl<$($T: Stateful),+> StatefulParts for ($($T,)+) {
            fn each(&self, visit: &mut dyn FnMut(&dyn Stateful) -> Result<()>) -> Result<()> {
                $(visit(&self.$i)?;)+
                Ok(())
            }
        }

        impl<$($T: Restore),+> RestoreParts for ($($T,)+) {
            fn each_mut(&mut self, visit: &mut dyn FnMut(&mut dyn Restore) -> Result<()>) -> Result<()> {
                $(visit(&mut self.$i)?;)+
                Ok(())
            }
        }
    )*};
}
tuples! {
    A 0;
    A 0, B 1;
    A 0, B 1, C 2;
    A 0, B 1, C 2, D 3;
    A 0, B 1, C 2, D 3, E 4;
    A 0, B 1, C 2, D 3, E 4, F 5;
}

/// Saves the parts of a training run, each under its name. [`load_into`] restores them.
///
/// Collective: every rank of the world must call it. Communicates and writes what [`save`](crate::checkpoint::save()) does. In
/// [`Format::Dcp`] the optimizer's state has the form of PyTorch's `get_optimizer_state_dict`.
///
/// # Errors
/// As [`save`](crate::checkpoint::save()); [`ErrorKind::Argument`] if two parts have the same name.
///
/// ```
/// use shardwise::checkpoint;
/// use shardwise::nn::{Builder, Linear, Module};
/// use shardwise::optim::{AdamW, ParamGroup, ShardedOptimizer};
/// use shardwise::prelude::*;
///
/// # let directory = std::env::temp_dir().join(format!("shardwise-parts-{}", std::process::id()));
/// # let path = directory.clone();
/// launch(2, move |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let model = Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 4, 6)?;
///     let mut optimizer = ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(AdamW::default()))?;
///     checkpoint::save_from(&world, &path, (&model, &optimizer, &mesh))?;
///     let report = checkpoint::load_into(&world, &path, (&model, &mut optimizer, &mesh))?;
///     assert_eq!(report.unchecked_bytes, 0);
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "get_optimizer_state_dict")]
#[track_caller]
pub fn save_from(world: &World, path: impl AsRef<Path>, parts: impl StatefulParts) -> Result<()> {
    save_from_with(world, path, parts, &SaveOptions::default())
}

/// Saves the parts of a training run as [`save_from`] does, with a format and a timeout.
///
/// Collective.
#[track_caller]
#[allow(clippy::needless_pass_by_value)] // parts are references, written in the call as a tuple
pub fn save_from_with(
    world: &World,
    path: impl AsRef<Path>,
    parts: impl StatefulParts,
    options: &SaveOptions,
) -> Result<()> {
    save_with(world, path, &state_of(&parts, options.format)?, options)
}

/// Restores the parts of a training run from a checkpoint, and returns how much this rank read.
///
/// `(&model, &mut optimizer, &mesh)` restores parameters and buffers, the optimizer's state, settings and schedule, and the
/// mesh's generator. Parts are found under `model`, `optimizer`, `generator` and `data`, or under the names given with
/// [`named`]. See [`save_from`] for an example.
///
/// Collective: every rank of the world must call it. The checkpoint may have been saved in any layout by any number of ranks,
/// or by `torch.distributed.checkpoint` with `get_state_dict`.
///
/// # Errors
/// As [`load`](crate::checkpoint::load()): an entry that a part needs and the checkpoint lacks is an error. Then no part has changed.
#[doc(alias = "set_optimizer_state_dict")]
#[doc(alias = "load_sharded_optimizer_state_dict")]
#[track_caller]
pub fn load_into(world: &World, path: impl AsRef<Path>, mut parts: impl RestoreParts) -> Result<LoadReport> {
    restore_parts(world, path.as_ref(), &mut parts, &StateLoadOptions::default(), Location::caller())
}

/// Restores the parts of a training run as [`load_into`] does, with options, such as reads that replicas share.
///
/// Collective: every rank of the world must call it with the same options.
#[track_caller]
pub fn load_into_with(
    world: &World,
    path: impl AsRef<Path>,
    mut parts: impl RestoreParts,
    options: &StateLoadOptions,
) -> Result<LoadReport> {
    restore_parts(world, path.as_ref(), &mut parts, options, Location::caller())
}

/// Loads and restores all parts, or none.
pub(in crate::checkpoint) fn restore_parts(
    world: &World,
    path: &Path,
    parts: &mut dyn RestoreParts,
    options: &StateLoadOptions,
    site: Site,
) -> Result<LoadReport> {
    let parts = RefCell::new(parts);
    let template = |catalog: &Catalog| {
        let mut templates = BTreeMap::new();
        parts.borrow_mut().each_mut(&mut |part| {
            let template = part.template(catalog, part.entry())?;
            match templates.insert(part.entry().to_string(), template) {
                None => Ok(()),
                Some(_) => Err(twice(part.entry())),
            }
        })?;
        Ok(State::Map(templates))
    };
    // Refused while no part has changed: an error of one rank fails the load on all ranks.
    let check = |loaded: &State| parts.borrow_mut().each_mut(&mut |part| part.check(entry_of(loaded, part.entry())?));
    let LoadedState { state, report, .. } = load_by_template(world, path, options, (&template, &check), site)?;
    parts.into_inner().each_mut(&mut |part| {
        let loaded = entry_of(&state, part.entry())?;
        part.restore(loaded)
    })?;
    Ok(report)
}

impl State {
    /// Returns the state that [`save_from`] would save in the native format: each part under its name. Local.
    ///
    /// For adding entries, or for saving it with [`async_save`](crate::checkpoint::async_save).
    #[allow(clippy::needless_pass_by_value)] // parts are references, written in the call as a tuple
    pub fn of(parts: impl StatefulParts) -> Result<State> {
        state_of(&parts, Format::Native)
    }
}

/// The state of all parts, each under its name.
pub(in crate::checkpoint) fn state_of(parts: &impl StatefulParts, format: Format) -> Result<State> {
    let mut entries = BTreeMap::new();
    parts.each(&mut |part| match entries.insert(part.entry().to_string(), part.state_in(format)?) {
        None => Ok(()),
        Some(_) => Err(twice(part.entry())),
    })?;
    Ok(State::Map(entries))
}

fn entry_of<'a>(state: &'a State, entry: &str) -> Result<&'a State> {
    state.get(entry).ok_or_else(|| {
        ErrorKind::unknown(entry).error(
            "checkpoint",
            format!("no entry {entry:?}"),
            "an entry per part",
            "give the part the name that it was saved under, with `checkpoint::named`",
        )
    })
}

fn twice(entry: &str) -> Error {
    let found = format!("two parts under the name {entry:?}");
    ErrorKind::Argument.error("parts", found, "different names", "rename one of them with `checkpoint::named`")
}

/// A part with another entry name, returned by [`named`].
pub struct Named<T>(String, T);

/// Gives a part another entry name: `named("optim", &mut optimizer)`, `named("teacher", &model)`.
pub fn named<T>(name: impl Into<String>, part: T) -> Named<T> {
    Named(name.into(), part)
}

impl<T: Stateful> Stateful for Named<T> {
    fn entry(&self) -> &str {
        &self.0
    }

    fn state(&self) -> Result<State> {
        self.1.state()
    }

    fn state_in(&self, format: Format) -> Result<State> {
        self.1.state_in(format)
    }
}

impl<T: Restore> Restore for Named<T> {
    fn template(&self, stored: &Catalog, entry: &str) -> Result<State> {
        self.1.template(stored, entry)
    }

    fn check(&self, loaded: &State) -> Result<()> {
        self.1.check(loaded)
    }

    fn restore(&mut self, loaded: &State) -> Result<()> {
        self.1.restore(loaded)
    }
}

/// A module's parameters and buffers by path, under `model`. Further entries of the checkpoint are ignored;
/// [`ModelPart`](crate::checkpoint::ModelPart) has options for that.
///
/// In PyTorch's format each batch norm also gets `num_batches_tracked`, which PyTorch requires: 0, since modules here do not
/// count batches, and running averages with a fixed momentum do not depend on it. It is ignored when loading.
impl<M: Module + ?Sized> Stateful for &M {
    fn entry(&self) -> &str {
        "model"
    }

    fn state(&self) -> Result<State> {
        Ok(State::Map(module_entries(*self, "")))
    }

    fn state_in(&self, format: Format) -> Result<State> {
        let own = module_entries(*self, "");
        let mut entries: BTreeMap<String, State> = BTreeMap::new();
        for name in own.keys().filter(|_| format.is_torch_state()) {
            let Some(module) = name.strip_suffix("running_mean") else { continue };
            let count = State::from(Tensor::new(0i64, &Device::Cpu)?);
            entries.insert(format!("{module}num_batches_tracked"), count);
        }
        entries.extend(own);
        Ok(State::Map(entries))
    }
}

impl<M: Module + ?Sized> Restore for &M {
    fn restore(&mut self, loaded: &State) -> Result<()> {
        let wrong = |found: String| {
            ErrorKind::state().error("model state", found, "tensors by path", "load the state of a module")
        };
        let State::Map(entries) = loaded else { return Err(wrong(loaded.to_string())) };
        let mut tensors: BTreeMap<String, DTensor> = BTreeMap::new();
        let extra = self.named_extra_states();
        for (name, entry) in entries.iter().filter(|(name, _)| !extra.iter().any(|(path, _)| path == *name)) {
            let Some(tensor) = entry.stored_tensor() else { return Err(wrong(format!("{entry} at {name:?}"))) };
            tensors.insert(name.clone(), tensor.clone());
        }
        self.load_state_dict(&tensors)?;
        restore_extra_states(*self, loaded, "")
    }
}

/// The entries of a module: its tensors and extra states by path, below a prefix.
pub(in crate::checkpoint) fn module_entries<M: Module + ?Sized>(module: &M, prefix: &str) -> BTreeMap<String, State> {
    let tensors = tensor_entries(module).into_iter();
    let extra = module.named_extra_states().into_iter().map(|(name, extra)| (name, State::from(extra.get())));
    tensors.chain(extra).map(|(name, entry)| (format!("{prefix}{name}"), entry)).collect()
}

/// The parameters and persistent buffers of a module by path; a parameter with merged dimensions in its own shape.
pub(in crate::checkpoint) fn tensor_entries<M: Module + ?Sized>(module: &M) -> BTreeMap<String, State> {
    let tensors = module.state_dict().into_iter().map(|(name, tensor)| (name, State::from(tensor)));
    let merged =
        module.named_parameters().into_iter().filter_map(|(name, param)| Some((name, State::from(param.merged()?))));
    tensors.chain(merged).collect()
}

/// Sets the extra states of a module to those of a loaded state that has them.
pub(in crate::checkpoint) fn restore_extra_states<M: Module + ?Sized>(
    module: &M,
    loaded: &State,
    prefix: &str,
) -> Result<()> {
    let State::Map(entries) = loaded else { return Ok(()) };
    for (name, extra) in module.named_extra_states() {
        match entries.get(&format!("{prefix}{name}")) {
            Some(State::Value(Value::Text(text))) => extra.set(text),
            None => {}
            Some(other) => {
                let found = format!("{other} at {name:?}");
                return Err(ErrorKind::state().error(
                    "model state",
                    found,
                    "a text",
                    "load the state that the module saved",
                ));
            }
        }
    }
    Ok(())
}

/// Loss scale and its settings by PyTorch's names, under `scaler`.
impl Stateful for &GradScaler {
    fn entry(&self) -> &str {
        "scaler"
    }

    fn state(&self) -> Result<State> {
        Ok(State::map([
            ("scale", State::from(self.scale)),
            ("growth_factor", State::from(self.growth_factor)),
            ("backoff_factor", State::from(self.backoff_factor)),
            ("growth_interval", State::from(self.growth_interval.cast_signed())),
            ("_growth_tracker", State::from(self.growth_tracker.cast_signed())),
        ]))
    }
}

impl Stateful for &mut GradScaler {
    fn entry(&self) -> &str {
        "scaler"
    }

    fn state(&self) -> Result<State> {
        (&**self).state()
    }
}

impl Restore for &mut GradScaler {
    fn check(&self, loaded: &State) -> Result<()> {
        scaler_from(loaded).map(drop)
    }

    fn restore(&mut self, loaded: &State) -> Result<()> {
        **self = scaler_from(loaded)?;
        Ok(())
    }
}

fn scaler_from(loaded: &State) -> Result<GradScaler> {
    let count = |name: &str| loaded.value(name)?.read::<u64>();
    let scaler = GradScaler {
        scale: loaded.value("scale")?.read()?,
        growth_factor: loaded.value("growth_factor")?.read()?,
        backoff_factor: loaded.value("backoff_factor")?.read()?,
        growth_interval: count("growth_interval")?,
        growth_tracker: count("_growth_tracker")?,
    };
    scaler.check()?;
    Ok(scaler)
}

/// Seed and offset of the mesh's generator, under `generator`.
impl Stateful for &DeviceMesh {
    fn entry(&self) -> &str {
        "generator"
    }

    fn state(&self) -> Result<State> {
        Ok(State::from(self.generator().state()))
    }
}

impl Restore for &DeviceMesh {
    fn check(&self, loaded: &State) -> Result<()> {
        GeneratorState::try_from(loaded).map(drop)
    }

    fn restore(&mut self, loaded: &State) -> Result<()> {
        self.generator().set_state(GeneratorState::try_from(loaded)?);
        Ok(())
    }
}

/// The position in the data, with the number of samples (of each source and its share, if there are several) and the shuffle seed, under
/// `data`.
impl<D: Dataset> Stateful for &mut Batches<D> {
    fn entry(&self) -> &str {
        "data"
    }

    fn state(&self) -> Result<State> {
        (&**self).state()
    }
}

impl<D: Dataset> Stateful for &Batches<D> {
    fn entry(&self) -> &str {
        "data"
    }

    fn state(&self) -> Result<State> {
        let seed = self.order().seed().map_or(Value::None, |seed| Value::Int(seed.cast_signed()));
        let number = |number: u64| State::from(number.cast_signed());
        // A position in several sources means nothing in one source of as many samples.
        let samples = self
            .order()
            .shares_text()
            .map_or_else(|| number(self.order().samples()), |shares| State::Value(Value::Text(shares)));
        let position = [("position", number(self.position())), ("samples", samples)];
        Ok(State::map(position.into_iter().chain([("seed", State::Value(seed))])))
    }
}

/// Refuses a position in a dataset of another size or in another order: samples would be skipped or repeated.
impl<D: Dataset> Restore for &mut Batches<D> {
    fn check(&self, loaded: &State) -> Result<()> {
        let own = self.state()?;
        for name in ["samples", "seed"] {
            let (stored, own) = (loaded.value(name)?, own.value(name)?);
            if stored != own {
                let found = format!("{name} {stored} in the checkpoint, {own} in the program");
                let fix = "use the dataset and the seed that the checkpoint was saved with";
                return Err(ErrorKind::Data.error("data", found, "the same data in the same order", fix));
            }
        }
        Ok(())
    }

    fn restore(&mut self, loaded: &State) -> Result<()> {
        self.seek(loaded.value("position")?.read::<i64>()?.cast_unsigned());
        Ok(())
    }
}

/// An optimizer's state per parameter, settings, schedule and number of steps, under `optimizer`.
impl Stateful for &ShardedOptimizer {
    fn entry(&self) -> &str {
        "optimizer"
    }

    fn state(&self) -> Result<State> {
        let state = with_own_shapes(State::try_from(&self.state_dict()?)?, self)?;
        with_schedule(state, self.schedule())
    }

    fn state_in(&self, format: Format) -> Result<State> {
        match format.is_torch_state() {
            true => {
                let state = with_own_shapes(torch_optim::to_torch(&self.state_dict()?)?, self)?;
                with_schedule(state, self.schedule())
            }
            false => self.state(),
        }
    }
}

impl Stateful for &mut ShardedOptimizer {
    fn entry(&self) -> &str {
        "optimizer"
    }

    fn state(&self) -> Result<State> {
        (&**self).state()
    }

    fn state_in(&self, format: Format) -> Result<State> {
        (&**self).state_in(format)
    }
}

impl Restore for &mut ShardedOptimizer {
    fn template(&self, stored: &Catalog, entry: &str) -> Result<State> {
        let mut template = match torch_optim::is_torch(stored, entry) {
            true => torch_optim::template(self, stored, entry)?,
            false => State::try_from(&self.state_template()?)?,
        };
        template = with_own_shapes(template, self)?;
        if let State::Map(entries) = &mut template {
            // Settings come from the checkpoint. Older checkpoints have no schedule: then the optimizer keeps its own.
            for name in ["groups", SCHEDULE] {
                let found = stored.value(&format!("{entry}.{name}"));
                entries.extend(found.ok().map(|value| (name.to_string(), State::Value(value))));
            }
        }
        Ok(template)
    }

    fn check(&self, loaded: &State) -> Result<()> {
        ShardedOptimizer::check(self, &optimizer_state(self, loaded)?, DTensor::shape).map(drop)
    }

    fn restore(&mut self, loaded: &State) -> Result<()> {
        let state = optimizer_state(self, loaded)?;
        self.load_state_dict(&state)
    }
}

/// The state of an optimizer in which the tensors of parameters with merged dimensions have the shapes of the parameters.
fn with_own_shapes(mut state: State, optimizer: &ShardedOptimizer) -> Result<State> {
    let State::Map(entries) = &mut state else { return Ok(state) };
    let Some(State::Map(params)) = entries.get_mut("state") else { return Ok(state) };
    for (name, _) in optimizer.params() {
        let Some(State::Map(tensors)) = params.get_mut(name) else { continue };
        for (kind, entry) in tensors {
            // Master weights and moments; numbers are not tensors.
            if let State::Tensor(tensor) = entry
                && let Some(merged) = optimizer.merged_state(name, kind)?
            {
                *entry = State::Merged(MergedTensor::new(tensor, merged.shape())?);
            }
        }
    }
    Ok(state)
}

/// The entry with the schedule, as a string of JSON: a single value, whatever the schedule's structure.
const SCHEDULE: &str = "schedule";

fn with_schedule(mut state: State, schedule: Schedule) -> Result<State> {
    if let State::Map(entries) = &mut state {
        let text = serde_json::to_string(&schedule).map_err(Error::other)?;
        entries.insert(SCHEDULE.to_string(), State::from(text));
    }
    Ok(state)
}

fn optimizer_state(optimizer: &ShardedOptimizer, loaded: &State) -> Result<OptimizerState> {
    let mut state = match loaded.get("param_groups") {
        Some(_) => torch_optim::from_torch(optimizer, loaded)?,
        None => OptimizerState::try_from(loaded)?,
    };
    if let Some(State::Value(Value::Text(text))) = loaded.get(SCHEDULE) {
        let schedule = serde_json::from_str(text).map_err(|error| {
            let found = format!("{text:?} ({error})");
            ErrorKind::state().error::<Error>(
                "optimizer state",
                found,
                "a schedule",
                "set the schedule in the program, and remove the entry from the checkpoint",
            )
        })?;
        state.schedule = Some(schedule);
    }
    Ok(state)
}
