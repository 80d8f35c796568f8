//! Optimizers for parameters in any layout: every rank updates its local shards, in one pass over memory.
//!
//! [`ShardedOptimizer`] applies an [`Optimizer`] such as [`AdamW`], [`Muon`] or a custom one to the parameters of a model.

mod settings;
mod optimizer;
mod working_state;
mod merged;
mod param_step;
mod adadelta;
mod adafactor;
mod adagrad;
mod adam;
mod adamax;
mod asgd;
mod lion;
mod muon;
mod nadam;
mod radam;
mod rmsprop;
mod sgd;
mod algorithm;
mod clip;
mod group;
mod over;
mod schedule;
mod state;
mod full_state;
mod grad_scaler;

pub use adadelta::Adadelta;
pub use adafactor::Adafactor;
pub use adagrad::Adagrad;
pub use adam::{Adam, AdamW};
pub use adamax::Adamax;
pub use algorithm::Algorithm;
pub use asgd::Asgd;
use clip::split_own;
pub use clip::{clip_grad_norm, clip_grad_value};
pub use grad_scaler::GradScaler;
pub use group::ParamGroup;
pub use lion::Lion;
pub use muon::{AdjustLr, Muon};
pub use nadam::NAdam;
pub use optimizer::{Optimizer, StateTensor};
pub use over::OptimizeModule;
pub use param_step::ParamStep;
pub use radam::RAdam;
pub use rmsprop::RmsProp;
pub use schedule::Schedule;
pub use sgd::Sgd;
pub use shardwise_kernels::Elementwise;
pub use state::{FullState, GroupState, OptimizerState, ParamState};

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;

use candle_core::Tensor;

use crate::autograd::{BackwardOptions, Gradients};
use crate::comm::{DeviceMesh, Phase, SpanKind, begin_span};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::Layout;
use crate::module_scope::in_phase;
use crate::param::Param;
use crate::tensor::DTensor;
use merged::ParamView;
use working_state::WorkingState;

/// An optimizer over named parameters, each in any layout on any mesh of the world.
///
/// A step first brings gradients into the layouts of their parameters, in few large collectives. Elementwise optimizers
/// are local from there on;[`Adafactor`] and [`Muon`] need full matrices and document what else they communicate. The
/// optimizer state of a parameter is sharded like the parameter (ZeRO for fully sharded ones).
///
/// [`backward`](DTensor::backward) returns gradients as values, so there is no `zero_grad`.
///
/// ```
/// use shardwise::optim::{Adam, ParamGroup, ShardedOptimizer};
/// use shardwise::param::Param;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let w = Param::new(&DTensor::full(3.0, 5, DType::F32, &mesh, [Shard(0)])?);
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
    params: Vec<OptimizedParam>,
    schedule: Schedule,
    steps: u64,
}

/// A parameter with its group and state.
struct OptimizedParam {
    name: String,
    param: Param,
    group: usize,
    /// Allocated with the first gradient.
    state: Option<WorkingState>,
}

impl OptimizedParam {
    /// Replaces the parameter, whose value is `leaf`, by that of the next step.
    fn step(&mut self, leaf: &DTensor, gradient: &DTensor, group: &ParamGroup, lr: f64) -> Result<()> {
        // A parameter that is a partial sum is reduced.
        let param = leaf.detach().to_layout(&leaf.layout().reduced())?;
        let param = ParamView::with_value(&self.param, param);
        let fits = self.state.as_ref().map_or(Ok(false), |state| state.fits(&param, group))?;
        if !fits {
            let before = self.state.take().map(|state| state.saved()).transpose()?;
            self.state = Some(WorkingState::new(&param, group, &before.unwrap_or_default())?);
        }
        let state = self.state.as_mut().expect("created above");
        self.param.set(&state.step(param.value, gradient, group, lr)?)
    }
}

impl ShardedOptimizer {
    /// Creates an optimizer with one group of parameters. All ranks must pass the same parameters in the same order.
    ///
    /// `group` is an optimizer such as [`AdamW`], or a [`ParamGroup`] with more settings.
    ///
    /// # Errors
    /// Those of [`add_param_group`](Self::add_param_group).
    pub fn new(params: impl IntoIterator<Item = (String, Param)>, group: impl Into<ParamGroup>) -> Result<Self> {
        let mut new =
            ShardedOptimizer { groups: Vec::new(), params: Vec::new(), schedule: Schedule::Constant, steps: 0 };
        new.add_param_group(params, group)?;
        Ok(new)
    }

    /// Adds a group of parameters with other settings, or another optimizer.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a setting is out of range, a parameter or its name is used already, or the optimizer does not
    /// support its shape or type. Nothing is added then.
    pub fn add_param_group(
        &mut self,
        params: impl IntoIterator<Item = (String, Param)>,
        group: impl Into<ParamGroup>,
    ) -> Result<()> {
        let group = group.into();
        group.check()?;
        let known = self.params.len();
        for (name, param) in params {
            let fits = group.algorithm.check_shape(&param.shape());
            if let Err(error) = fits.and(group.state_dtype_of(param.dtype()).map(drop)) {
                self.params.truncate(known);
                return Err(with_name(error, &name));
            }
            let other = self.params.iter().find(|optimized| optimized.name == name || optimized.param.is_same(&param));
            if let Some(other) = other {
                let found = format!("`{name}` together with `{}`", other.name);
                self.params.truncate(known);
                let needed = "every parameter once, under a name of its own";
                return Err(ErrorKind::Optimizer.error(
                    "parameters",
                    found,
                    needed,
                    "leave one out; shared weights are one parameter",
                ));
            }
            self.params.push(OptimizedParam { name, param, group: self.groups.len(), state: None });
        }
        self.groups.push(group);
        Ok(())
    }

    /// The parameter groups in the order in which they were added.
    #[doc(alias = "param_groups")]
    pub fn groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    /// The parameter groups, to change their settings between steps. All ranks must make the same changes.
    pub fn groups_mut(&mut self) -> &mut [ParamGroup] {
        &mut self.groups
    }

    /// The parameters with their names, in the order in which they were added.
    #[doc(alias = "named_params_with_sharded_tensor")]
    pub fn params(&self) -> impl Iterator<Item = (&str, &Param)> {
        self.params.iter().map(|optimized| (optimized.name.as_str(), &optimized.param))
    }

    /// Looks up a parameter by name.
    pub fn param(&self, name: &str) -> Option<&Param> {
        self.params.iter().find(|optimized| optimized.name == name).map(|optimized| &optimized.param)
    }

    /// Sets the learning-rate schedule of all groups.
    #[must_use]
    pub fn with_schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// Sets the learning-rate schedule of all groups.
    pub fn set_schedule(&mut self, schedule: Schedule) {
        self.schedule = schedule;
    }

    /// The learning-rate schedule of all groups.
    pub fn schedule(&self) -> Schedule {
        self.schedule
    }

    /// Number of steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Updates every parameter that has a gradient. Gradients of other leaves are ignored.
    ///
    /// Collective: all ranks must call it with the gradients of the same backward pass.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a setting is out of range, or there are gradients but none belongs to the current value of a
    /// parameter.
    #[track_caller]
    pub fn step(&mut self, gradients: Gradients) -> Result<()> {
        self.groups.iter().try_for_each(ParamGroup::check)?;
        let leaves: Vec<DTensor> = self.params.iter().map(|optimized| optimized.param.get()).collect();
        let (mut gradients, _) = split_own(gradients, &leaves)?;
        gradients = gradients.in_param_layout()?;
        let site = Location::caller();
        in_phase(Phase::Update, || {
            let _span = begin_span(SpanKind::Operator, "optimizer_step", Some(site));
            self.update(gradients, &leaves)
        })?;
        self.steps += 1;
        Ok(())
    }

    /// Updates the parameters by gradients in their layouts.
    #[track_caller]
    fn update(&mut self, mut gradients: Gradients, leaves: &[DTensor]) -> Result<()> {
        for (optimized, leaf) in self.params.iter_mut().zip(leaves) {
            let Some(gradient) = gradients.take(leaf) else { continue };
            let group = &self.groups[optimized.group];
            optimized.step(leaf, &gradient, group, self.schedule.lr(self.steps, group.lr))?;
        }
        Ok(())
    }

    /// Runs the backward pass of a loss and updates every parameter as soon as its gradient is complete, so that no two
    /// gradients have to be held at one time. Returns the gradients of other leaves.
    ///
    /// Collective. Gradients are reduced one by one instead of in buckets. The result is that of [`step`](Self::step).
    ///
    /// # Errors
    /// As [`step`](Self::step) and [`backward`](DTensor::backward). An error in the pass leaves parameters that were updated
    /// before it.
    #[doc(alias = "_apply_optimizer_in_backward")]
    #[track_caller]
    pub fn step_in_backward(&mut self, loss: &DTensor) -> Result<Gradients> {
        self.groups.iter().try_for_each(ParamGroup::check)?;
        let params = RefCell::new(&mut self.params);
        let update = |gradient: Gradients| {
            let mut params = params.borrow_mut();
            // A value is not held beyond its update, so that old and new values of all parameters never exist together.
            let is_own = |optimized: &OptimizedParam| gradient.contains(&optimized.param.get());
            let Some(optimized) = params.iter_mut().find(|optimized| is_own(optimized)) else { return Ok(gradient) };
            let leaf = optimized.param.get();
            let mut gradient = gradient.in_param_layout()?;
            let group = &self.groups[optimized.group];
            let complete = gradient.take(&leaf).expect("its only entry");
            optimized.step(&leaf, &complete, group, self.schedule.lr(self.steps, group.lr))?;
            Ok(gradient)
        };
        let options = BackwardOptions { on_gradient: Some(&update), ..BackwardOptions::default() };
        let others = loss.backward_with(options)?;
        self.steps += 1;
        Ok(others)
    }

    /// Returns the state to save, each tensor sharded like its parameter, and with merged dimensions if the parameter has them
    /// ([`unmerged_state_dict`](Self::unmerged_state_dict) separates them). Local.
    ///
    /// It is complete even before the first step: a parameter without a gradient so far has its initial state. So the state
    /// of a new optimizer is a template for [`checkpoint::load`](crate::checkpoint::load).
    pub fn state_dict(&self) -> Result<OptimizerState> {
        let (groups, schedule) = (self.group_states(), Some(self.schedule));
        let mut state = OptimizerState { steps: self.steps, schedule, groups, params: BTreeMap::new() };
        for optimized in &self.params {
            let group = &self.groups[optimized.group];
            let saved = match &optimized.state {
                Some(state) => state.saved()?,
                None => state::initial(&ParamView::of(&optimized.param), group)?,
            };
            state.params.insert(optimized.name.clone(), saved);
        }
        Ok(state)
    }

    /// Returns mesh and layout of a state tensor of a parameter; `None` if there is no such parameter or tensor.
    ///
    /// For use with [`checkpoint::load_placed`](crate::checkpoint::load_placed).
    pub fn state_layout(&self, param: &str, tensor: &str) -> Result<Option<(DeviceMesh, Layout)>> {
        let Some(optimized) = self.params.iter().find(|optimized| optimized.name == param) else { return Ok(None) };
        state::mesh_and_layout(&ParamView::of(&optimized.param), &self.groups[optimized.group], tensor)
    }

    /// The initial state of all parameters: a template of a load, without a copy of the current state.
    pub(crate) fn state_template(&self) -> Result<OptimizerState> {
        let of = |optimized: &OptimizedParam| {
            let param = ParamView::of(&optimized.param);
            Ok((optimized.name.clone(), state::initial(&param, &self.groups[optimized.group])?))
        };
        let params = self.params.iter().map(of).collect::<Result<_>>()?;
        Ok(OptimizerState { steps: 0, schedule: None, groups: self.group_states(), params })
    }

    /// Loads a saved state, including settings and schedule. Its tensors may have other layouts than the parameters, also on
    /// other meshes of the world. Those of a parameter with merged dimensions may have them merged or not.
    ///
    /// Collective: tensors are redistributed to the layouts of the parameters.
    ///
    /// # Errors
    /// [`Error::Invalid`] if names, groups, optimizers or shapes do not fit, or if no parameter has moments although steps were
    /// taken; nothing changes then.
    #[track_caller]
    pub fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        let groups = self.check(state, DTensor::shape)?;
        self.load(state, groups, |tensor, _, _| Ok(tensor.clone()))
    }

    /// As [`load_state_dict`](Self::load_state_dict), from full tensors, which may come from a world of another size. Every
    /// rank takes its shard out of its own copy.
    #[track_caller]
    pub fn load_full_state(&mut self, state: &FullState) -> Result<()> {
        let groups = self.check(state, Tensor::dims)?;
        self.load(state, groups, |tensor, mesh, layout| {
            // Tensors of merged dimensions have either shape.
            let tensor = tensor.reshape(layout.shape())?;
            DTensor::distribute_to_layout(&tensor, mesh, layout, None)
        })
    }

    /// Replaces the state of all parameters by saved ones.
    #[track_caller]
    fn load<T>(
        &mut self,
        state: &OptimizerState<T>,
        groups: Vec<ParamGroup>,
        tensor: impl Fn(&T, &DeviceMesh, &Layout) -> Result<DTensor>,
    ) -> Result<()> {
        let mut loaded = Vec::new();
        for optimized in &self.params {
            let saved = &state.params[&optimized.name];
            if saved.is_empty() {
                loaded.push(None);
                continue;
            }
            let param = ParamView::of(&optimized.param);
            let mut tensors = BTreeMap::new();
            let group = &groups[optimized.group];
            for (kind, saved) in &saved.tensors {
                // Master weights of a parameter that no longer has them are dropped.
                if let Some((mesh, layout)) = state::mesh_and_layout(&param, group, kind)? {
                    tensors.insert(kind.clone(), tensor(saved, &mesh, &layout)?);
                }
            }
            let saved = ParamState { numbers: saved.numbers.clone(), tensors };
            loaded.push(Some(WorkingState::new(&param, group, &saved)?));
        }
        self.params.iter_mut().zip(loaded).for_each(|(optimized, state)| optimized.state = state);
        self.groups = groups;
        self.schedule = state.schedule.unwrap_or(self.schedule);
        self.steps = state.steps;
        Ok(())
    }

    /// Checks that a state belongs to these parameters and groups, and returns its groups.
    pub(crate) fn check<T>(&self, state: &OptimizerState<T>, shape_of: fn(&T) -> &[usize]) -> Result<Vec<ParamGroup>> {
        let fix = "load the state of an optimizer of the same model";
        let bad = |found: String, needed: String| Err(ErrorKind::state().error("optimizer state", found, needed, fix));
        for optimized in &self.params {
            if !state.params.contains_key(&optimized.name) {
                return bad(format!("no parameter `{}`", optimized.name), "all parameters of the optimizer".into());
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
            let algorithm = saved.group.algorithm.with_type_of(&own.group.algorithm)?;
            let group = ParamGroup { algorithm, state_dtype: own.group.state_dtype, ..saved.group.clone() };
            group.check()?;
            groups.push(group);
        }
        let mut keeping = Vec::new();
        for optimized in &self.params {
            let (algorithm, param) = (&groups[optimized.group].algorithm, ParamView::of(&optimized.param));
            state::check(&optimized.name, &state.params[&optimized.name], algorithm, &param, shape_of)?;
            if !algorithm.state(param.shape())?.is_empty() {
                keeping.push(optimized);
            }
        }
        // A single parameter without moments may have had no gradient yet; if all lack them, they were not loaded.
        let is_empty = |optimized: &&OptimizedParam| state.params[&optimized.name].is_empty();
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

    /// Settings and parameter names of every group.
    pub(crate) fn group_states(&self) -> Vec<GroupState> {
        let of = |i: usize| {
            self.params.iter().filter(move |optimized| optimized.group == i).map(|optimized| optimized.name.clone())
        };
        let groups = self.groups.iter().enumerate();
        groups.map(|(i, group)| GroupState { group: group.clone(), params: of(i).collect() }).collect()
    }
}

/// Adds the name of the parameter that an error is about.
fn with_name(error: Error, name: &str) -> Error {
    match error {
        Error::Invalid(mut invalid) => {
            invalid.found = format!("`{name}` with {}", invalid.found);
            Error::Invalid(invalid)
        }
        other => other,
    }
}
