//! Optimizers over parameters of any layout: every rank updates what it holds, in one pass over memory.
//!
//! An optimizer is a type with the trait [`Optimizer`]; those of this crate are in files of their own beside this one.

mod settings;
mod optimizer;
mod param_state;
mod param_step;
mod adadelta;
mod adafactor;
mod adagrad;
mod adam;
mod adamax;
mod lion;
mod muon;
mod nadam;
mod rmsprop;
mod sgd;
mod algorithm;
mod clip;
mod group;
mod over;
mod schedule;
mod state;

pub use adadelta::Adadelta;
pub use adafactor::Adafactor;
pub use adagrad::Adagrad;
pub use adam::{Adam, AdamW};
pub use adamax::Adamax;
pub use algorithm::Algorithm;
pub use clip::{clip_grad_norm, clip_grad_value};
pub use group::ParamGroup;
pub use lion::Lion;
pub use muon::{AdjustLr, Muon};
pub use nadam::NAdam;
pub use optimizer::{Optimizer, StateTensor};
pub use over::OptimizeModule;
pub use param_step::ParamStep;
pub use rmsprop::RmsProp;
pub use schedule::Schedule;
pub use sgd::Sgd;
pub use shardwise_kernels::Elementwise;
pub use state::{FullState, GroupState, OptimizerState, ParamState};

use std::collections::{BTreeMap, BTreeSet};

use candle_core::Tensor;

use crate::autograd::Gradients;
use crate::comm::DeviceMesh;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::Layout;
use crate::param::Param;
use crate::tensor::DTensor;
use param_state::State;

/// An optimizer over named parameters, each in any layout on any mesh of the world.
///
/// A step first brings gradients into the layouts of their parameters, in few large collectives. Elementwise optimizers
/// are local from there on; those that see whole matrices ([`Adafactor`], [`Muon`]) say what else they communicate. The
/// state of a parameter is sharded like the parameter.
///
/// Gradients are values of one [`backward`](DTensor::backward): nothing has to be set to zero between steps.
///
/// ```
/// use shardwise::optim::{Adam, ParamGroup, ShardedOptimizer};
/// use shardwise::param::Param;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let w = Param::new(&DTensor::full(3.0, (5, DType::F32), &mesh, [Shard(0)])?);
///     let group = ParamGroup::new(Adam::default()).with_lr(0.1);
///     let mut optimizer = ShardedOptimizer::new([("w".to_string(), w.clone())], group)?;
///     for _ in 0..200 {
///         let loss = w.get().sub_scalar(1.0)?.square()?.sum_all()?;
///         optimizer.step(loss.backward()?)?;
///     }
///     let found = w.get().full_tensor()?.to_vec1::<f32>()?;
///     assert!(found.iter().all(|x| (x - 1.0).abs() < 0.01), "{found:?}");
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub struct ShardedOptimizer {
    groups: Vec<ParamGroup>,
    slots: Vec<Slot>,
    schedule: Schedule,
    steps: u64,
}

/// One parameter.
struct Slot {
    name: String,
    param: Param,
    group: usize,
    /// Allocated when the first gradient comes.
    state: Option<State>,
}

impl ShardedOptimizer {
    /// An optimizer with one group of parameters. All ranks must name the same ones in the same order.
    ///
    /// `group` is an optimizer such as [`AdamW`], or a [`ParamGroup`] with more settings.
    pub fn new(params: impl IntoIterator<Item = (String, Param)>, group: impl Into<ParamGroup>) -> Result<Self> {
        let mut new =
            ShardedOptimizer { groups: Vec::new(), slots: Vec::new(), schedule: Schedule::Constant, steps: 0 };
        new.add_param_group(params, group)?;
        Ok(new)
    }

    /// Adds parameters that are optimized in another way, also by another optimizer.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a setting makes no sense, a parameter is there already, or the optimizer cannot take its shape.
    pub fn add_param_group(
        &mut self,
        params: impl IntoIterator<Item = (String, Param)>,
        group: impl Into<ParamGroup>,
    ) -> Result<()> {
        let group = group.into();
        group.check()?;
        let known = self.slots.len();
        for (name, param) in params {
            if let Err(error) = group.algorithm.check_shape(&param.shape()) {
                self.slots.truncate(known);
                return Err(named(error, &name));
            }
            let other = self.slots.iter().find(|slot| slot.name == name || slot.param.is_same(&param));
            if let Some(other) = other {
                let found = format!("`{name}` beside `{}`", other.name);
                self.slots.truncate(known);
                let needed = "every parameter once, under a name of its own";
                return Err(ErrorKind::Optimizer.error(
                    "parameters",
                    found,
                    needed,
                    "leave one out; shared weights are one parameter",
                ));
            }
            self.slots.push(Slot { name, param, group: self.groups.len(), state: None });
        }
        self.groups.push(group);
        Ok(())
    }

    /// The groups in the order in which they were added.
    pub fn groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    /// The groups, to change their settings between steps, alike on all ranks.
    pub fn groups_mut(&mut self) -> &mut [ParamGroup] {
        &mut self.groups
    }

    /// The parameters with their names, in the order in which they were added.
    #[doc(alias = "named_params_with_sharded_tensor")]
    pub fn params(&self) -> impl Iterator<Item = (&str, &Param)> {
        self.slots.iter().map(|slot| (slot.name.as_str(), &slot.param))
    }

    /// A parameter by its name.
    pub fn param(&self, name: &str) -> Option<&Param> {
        self.slots.iter().find(|slot| slot.name == name).map(|slot| &slot.param)
    }

    /// The same with learning rates of all groups that follow a schedule.
    #[must_use]
    pub fn with_schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// Has the learning rates of all groups follow a schedule.
    pub fn set_schedule(&mut self, schedule: Schedule) {
        self.schedule = schedule;
    }

    /// The schedule that the learning rates of all groups follow.
    pub fn schedule(&self) -> Schedule {
        self.schedule
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// One step: every parameter that has a gradient gets a new value. Gradients of other leaves are not looked at.
    #[track_caller]
    pub fn step(&mut self, gradients: Gradients) -> Result<()> {
        self.groups.iter().try_for_each(ParamGroup::check)?;
        let leaves: Vec<DTensor> = self.slots.iter().map(|slot| slot.param.get()).collect();
        let given = gradients.len();
        let (own, _) = gradients.split(&leaves);
        if own.is_empty() && given > 0 {
            return Err(ErrorKind::Optimizer.error(
                "gradients",
                format!("{given} gradient(s), none of them of a parameter of the optimizer"),
                "gradients of the current values of the parameters",
                "call get() on the parameters anew in every forward pass, after the step before",
            ));
        }
        let mut own = own.in_param_layout()?;
        for (slot, leaf) in self.slots.iter_mut().zip(&leaves) {
            let Some(gradient) = own.take(leaf) else { continue };
            let group = &self.groups[slot.group];
            // A parameter that is a pending sum becomes the sum.
            let param = leaf.detach().to_layout(&leaf.layout().settled())?;
            let fits = slot.state.as_ref().map_or(Ok(false), |state| state.fits(&param, group))?;
            if !fits {
                let before = slot.state.take().map(|state| state.saved()).transpose()?;
                slot.state = Some(State::new(&param, group, &before.unwrap_or_default())?);
            }
            let state = slot.state.as_mut().expect("made above");
            let new = state.step(param, &gradient, group, self.schedule.lr(self.steps, group.lr))?;
            slot.param.set(&new)?;
        }
        self.steps += 1;
        Ok(())
    }

    /// The state to save, each tensor sharded like its parameter.
    ///
    /// It is complete, also before the first step: a parameter that has not had a gradient yet has the state that its first
    /// step begins with. So the state of a new optimizer is a template for [`checkpoint::load`](crate::checkpoint::load).
    pub fn state_dict(&self) -> Result<OptimizerState> {
        let (groups, schedule) = (self.group_states(), Some(self.schedule));
        let mut state = OptimizerState { steps: self.steps, schedule, groups, params: BTreeMap::new() };
        for slot in &self.slots {
            let group = &self.groups[slot.group];
            let saved = match &slot.state {
                Some(state) => state.saved()?,
                None => state::fresh(&slot.param.get().detach(), group)?,
            };
            state.params.insert(slot.name.clone(), saved);
        }
        Ok(state)
    }

    /// Mesh and layout in which a tensor of the state of a parameter is kept; none if there is no such parameter or tensor.
    ///
    /// For programs that load states by [`checkpoint::load_placed`](crate::checkpoint::load_placed).
    pub fn state_layout(&self, param: &str, tensor: &str) -> Result<Option<(DeviceMesh, Layout)>> {
        let Some(slot) = self.slots.iter().find(|slot| slot.name == param) else { return Ok(None) };
        state::place(&slot.param.get(), &self.groups[slot.group], tensor)
    }

    /// The state that all parameters begin with, in the layouts of the parameters: what is to be loaded, without a copy of what
    /// is there.
    pub(crate) fn state_template(&self) -> Result<OptimizerState> {
        let of = |slot: &Slot| {
            let param = slot.param.get().detach();
            Ok((slot.name.clone(), state::fresh(&param, &self.groups[slot.group])?))
        };
        let params = self.slots.iter().map(of).collect::<Result<_>>()?;
        Ok(OptimizerState { steps: 0, schedule: None, groups: self.group_states(), params })
    }

    /// Continues from a saved state, with the settings and the schedule in it. Its tensors may have other layouts than the
    /// parameters, also on other meshes of the world.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it does not fit, or is that of an optimizer that has taken steps and has no moments; nothing
    /// changes then.
    #[track_caller]
    pub fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        let groups = self.check(state, DTensor::shape)?;
        self.load(state, groups, |tensor, _, _| Ok(tensor.clone()))
    }

    /// As [`load_state_dict`](Self::load_state_dict) from whole tensors, which may come from a world of another size. Every
    /// rank takes its part out of its own copy.
    #[track_caller]
    pub fn load_full_state(&mut self, state: &FullState) -> Result<()> {
        let groups = self.check(state, Tensor::dims)?;
        self.load(state, groups, |tensor, mesh, layout| {
            DTensor::distribute_tensor(tensor, mesh, layout.placements().to_vec(), None)
        })
    }

    /// Puts states made of saved ones in place of those that are.
    #[track_caller]
    fn load<T>(
        &mut self,
        state: &OptimizerState<T>,
        groups: Vec<ParamGroup>,
        tensor: impl Fn(&T, &DeviceMesh, &Layout) -> Result<DTensor>,
    ) -> Result<()> {
        let mut loaded = Vec::new();
        for slot in &self.slots {
            let saved = &state.params[&slot.name];
            if saved.is_empty() {
                loaded.push(None);
                continue;
            }
            let param = slot.param.get().detach();
            let mut tensors = BTreeMap::new();
            let group = &groups[slot.group];
            for (kind, saved) in &saved.tensors {
                // An f32 copy of a parameter that has none any more is left out.
                if let Some((mesh, layout)) = state::place(&param, group, kind)? {
                    tensors.insert(kind.clone(), tensor(saved, &mesh, &layout)?);
                }
            }
            let saved = ParamState { numbers: saved.numbers.clone(), tensors };
            loaded.push(Some(State::new(&param, group, &saved)?));
        }
        self.slots.iter_mut().zip(loaded).for_each(|(slot, state)| slot.state = state);
        self.groups = groups;
        self.schedule = state.schedule.unwrap_or(self.schedule);
        self.steps = state.steps;
        Ok(())
    }

    /// The groups of a state; an error if it is not one of these parameters in these groups.
    pub(crate) fn check<T>(&self, state: &OptimizerState<T>, shape_of: fn(&T) -> &[usize]) -> Result<Vec<ParamGroup>> {
        let fix = "load the state of an optimizer of the same model";
        let bad = |found: String, needed: String| Err(ErrorKind::state().error("optimizer state", found, needed, fix));
        for slot in &self.slots {
            if !state.params.contains_key(&slot.name) {
                return bad(format!("no parameter `{}`", slot.name), "all parameters of the optimizer".into());
            }
        }
        if let Some(name) = state.params.keys().find(|name| self.param(name).is_none()) {
            return bad(format!("parameter `{name}`"), "parameters of the optimizer only".into());
        }
        if state.groups.len() != self.groups.len() {
            return bad(format!("{} group(s)", state.groups.len()), format!("{}", self.groups.len()));
        }
        let mut groups = Vec::new();
        for (i, (saved, own)) in state.groups.iter().zip(self.group_states()).enumerate() {
            let set = |names: &[String]| names.iter().cloned().collect::<BTreeSet<_>>();
            if set(&saved.params) != set(&own.params) {
                return bad(format!("parameters {:?} in group {i}", saved.params), format!("{:?}", own.params));
            }
            let (found, needed) = (saved.group.algorithm.name(), own.group.algorithm.name());
            if found != needed {
                return bad(format!("{found} in group {i}"), needed.into());
            }
            let algorithm = saved.group.algorithm.bound_to(&own.group.algorithm)?;
            let group = ParamGroup { algorithm, ..saved.group.clone() };
            group.check()?;
            groups.push(group);
        }
        let mut keeping = Vec::new();
        for slot in &self.slots {
            let (algorithm, shape) = (&groups[slot.group].algorithm, slot.param.shape());
            state::check(&slot.name, &state.params[&slot.name], algorithm, &shape, shape_of)?;
            if !algorithm.state(&shape)?.is_empty() {
                keeping.push(slot);
            }
        }
        // One parameter without moments may have had no gradient; all of them were not loaded.
        let is_empty = |slot: &&Slot| state.params[&slot.name].is_empty();
        if state.steps > 0 && !keeping.is_empty() && keeping.iter().all(is_empty) {
            let found = format!("no moments of any parameter after {} step(s)", state.steps);
            let fix = "load into the state_dict() of an optimizer, which has an entry for every moment";
            return Err(ErrorKind::state().error(
                "optimizer state",
                found,
                "those of the parameters that were updated",
                fix,
            ));
        }
        Ok(groups)
    }

    /// Settings and names of parameters of every group.
    pub(crate) fn group_states(&self) -> Vec<GroupState> {
        let of = |i: usize| self.slots.iter().filter(move |slot| slot.group == i).map(|slot| slot.name.clone());
        let groups = self.groups.iter().enumerate();
        groups.map(|(i, group)| GroupState { group: group.clone(), params: of(i).collect() }).collect()
    }
}

/// An error about a parameter, with its name.
fn named(error: Error, name: &str) -> Error {
    match error {
        Error::Invalid(mut invalid) => {
            invalid.found = format!("`{name}` with {}", invalid.found);
            Error::Invalid(invalid)
        }
        other => other,
    }
}
