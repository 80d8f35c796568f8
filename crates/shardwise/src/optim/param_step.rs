//! `ParamStep`: what an optimizer reads and writes in a step of one parameter.

use candle_core::Tensor;

use super::merged::{separated, stored};
use super::working_state::{MASTER, STEP, StateValues, WorkingState, placed};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::MergedShape;
use crate::tensor::DTensor;
use shardwise_kernels::{Elementwise, StateElement, elementwise_update};

/// One step of one parameter: what [`Optimizer::step`](super::Optimizer::step) reads and writes.
///
/// Tensors are read as [`DTensor`]s in the layout of the parameter and the type of the state: f32, f64 for a parameter
/// of f64, or the group's [`state_dtype`](super::ParamGroup::state_dtype).
pub struct ParamStep<'a> {
    state: &'a mut WorkingState,
    value: DTensor,
    gradient: &'a DTensor,
    lr: f64,
    sign: f64,
}

impl<'a> ParamStep<'a> {
    pub(super) fn new(
        state: &'a mut WorkingState,
        value: DTensor,
        gradient: &'a DTensor,
        lr: f64,
        maximize: bool,
    ) -> Self {
        ParamStep { state, value, gradient, lr, sign: if maximize { -1.0 } else { 1.0 } }
    }

    pub(super) fn into_param(self) -> DTensor {
        self.value
    }

    /// Learning rate of this step, by the schedule.
    pub fn lr(&self) -> f64 {
        self.lr
    }

    /// Number of this step of the parameter, from 1; the state number `step`. 0 if the optimizer does not list it in its
    /// [`numbers`](super::Optimizer::numbers).
    pub fn count(&self) -> u64 {
        self.state.numbers.iter().find(|(name, _)| *name == STEP).map_or(0, |(_, steps)| *steps as u64)
    }

    /// Whether this is the first step of the parameter; saved and loaded with the state.
    pub fn is_first(&self) -> bool {
        self.state.first
    }

    /// Returns a state number by name.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the optimizer does not list it.
    pub fn number(&self, name: &str) -> Result<f64> {
        let found = self.state.numbers.iter().find(|(other, _)| *other == name);
        found.map(|(_, number)| *number).ok_or_else(|| self.unknown("number", name))
    }

    /// Sets a state number. All ranks must set the same value.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the optimizer does not list it.
    pub fn set_number(&mut self, name: &str, number: f64) -> Result<()> {
        match self.state.numbers.iter_mut().find(|(other, _)| *other == name) {
            Some((_, kept)) => *kept = number,
            None => return Err(self.unknown("number", name)),
        }
        Ok(())
    }

    /// Shape of the full parameter, as its module declared it.
    pub fn shape(&self) -> &[usize] {
        self.state.merged.as_ref().map_or_else(|| self.value.shape(), MergedShape::shape)
    }

    /// Element type of the parameter.
    pub fn dtype(&self) -> candle_core::DType {
        self.value.dtype()
    }

    /// Returns the parameter, or its master weight if one is kept.
    ///
    /// Local, unless the parameter has merged dimensions ([`Param::merge_dims`](crate::Param::merge_dims)): then shards that cross
    /// their borders are gathered, here and in [`gradient`](Self::gradient) and [`state`](Self::state).
    pub fn param(&self) -> Result<DTensor> {
        let value = self.value.to_dtype(self.state.dtype())?;
        if !self.state.has_master() {
            return separated(value, self.state.merged.as_ref());
        }
        // Where the parameter is not the rounded master weight, the program has set it since, and its value is used.
        let copy = self.state.tensor(self.index(MASTER)?)?;
        let rounded = copy.to_dtype(self.value.dtype())?.to_dtype(value.dtype())?;
        separated(rounded.eq(&value)?.where_cond(&copy, &value)?, self.state.merged.as_ref())
    }

    /// Returns the gradient, negated if the objective is maximized.
    pub fn gradient(&self) -> Result<DTensor> {
        let gradient = self.gradient.detach().to_dtype(self.state.dtype())?;
        let gradient = if self.sign < 0.0 { gradient.neg()? } else { gradient };
        separated(gradient, self.state.merged.as_ref())
    }

    /// Returns a state tensor by name.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the optimizer does not list it.
    pub fn state(&self, name: &str) -> Result<DTensor> {
        let i = self.index(name)?;
        separated(self.state.tensor(i)?, self.state.entries[i].merged.as_ref())
    }

    /// Replaces a state tensor by one in any layout. Collective if the layout differs.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the optimizer does not list it, or lists it with another shape.
    #[track_caller]
    pub fn set_state(&mut self, name: &str, tensor: &DTensor) -> Result<()> {
        let i = self.index(name)?;
        let tensor = stored(tensor, self.state.entries[i].merged.as_ref())?;
        self.state.set_tensor(i, &tensor)
    }

    /// Updates parameter and state element by element, in one pass over the memory of the local shards. Local.
    ///
    /// `state` names tensors of the shape of the parameter, in the order in which the rule takes their elements. The
    /// arithmetic is f64 (of some rules partly f32 if the state is), rounded once when the results are stored: it does not depend on the layout.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the optimizer does not list one of the tensors, or with another shape.
    pub fn elementwise<const K: usize>(&mut self, state: [&str; K], rule: impl Elementwise<K>) -> Result<()> {
        let gradient = self.gradient;
        self.run(gradient, state, SignedGradientRule { rule, sign: self.sign })
    }

    /// As [`elementwise`](Self::elementwise), with `change` in place of the gradient.
    ///
    /// `change` has the shape of the parameter, in any layout on its mesh; it is redistributed to that of the parameter.
    #[track_caller]
    pub fn apply<const K: usize>(
        &mut self,
        change: &DTensor,
        state: [&str; K],
        rule: impl Elementwise<K>,
    ) -> Result<()> {
        let dtype = change.dtype();
        let change = stored(change, self.state.merged.as_ref())?;
        let change = placed(&change, &self.state.mesh, &self.state.layout, dtype)?;
        self.run(&change, state, rule)
    }

    /// Replaces the parameter by a tensor in any layout on its mesh. Collective if the layout differs.
    #[track_caller]
    pub fn set_param(&mut self, value: &DTensor) -> Result<()> {
        self.apply(value, [], |_: f64, new: f64, []: [f64; 0]| (new, []))
    }

    fn run<const K: usize>(&mut self, change: &DTensor, names: [&str; K], rule: impl Elementwise<K>) -> Result<()> {
        let mut indices = [0; K];
        for (index, name) in indices.iter_mut().zip(names) {
            *index = self.index(name)?;
            let layout = &self.state.entries[*index].layout;
            if *layout != self.state.layout {
                let found = format!("`{name}` of shape {:?}", layout.shape());
                let needed = format!("tensors of the shape of the parameter, {:?}", self.shape());
                let fix = "use `state` and `set_state` for tensors of other shapes";
                return Err(ErrorKind::Optimizer.error("state of an elementwise step", found, needed, fix));
            }
        }
        let (p, g) = (self.value.local(), change.local());
        let masters = usize::from(self.state.has_master());
        // A rank with an empty shard creates a new tensor too: ranks compare the histories of tensors.
        let local = match &mut self.state.values {
            StateValues::Dry(_) => p.clone(),
            _ if p.elem_count() == 0 => p.clone(),
            StateValues::F32(values) => run_on(values, masters, indices, rule, p, g)?,
            StateValues::F64(values) => run_on(values, masters, indices, rule, p, g)?,
        };
        self.value = DTensor::from_parts(&self.state.mesh, self.state.layout.clone(), local);
        Ok(())
    }

    fn index(&self, name: &str) -> Result<usize> {
        let found = self.state.entries.iter().position(|entry| entry.name == name);
        found.ok_or_else(|| self.unknown("tensor", name))
    }

    fn unknown(&self, what: &str, name: &str) -> Error {
        let tensors: Vec<&str> = self.state.entries.iter().map(|entry| entry.name).collect();
        let numbers: Vec<&str> = self.state.numbers.iter().map(|(name, _)| *name).collect();
        let needed = format!("one of the tensors {tensors:?} or numbers {numbers:?}");
        ErrorKind::unknown(name).error(
            "optimizer state",
            format!("no {what} `{name}`"),
            needed,
            "list it in the optimizer's state",
        )
    }
}

/// One pass over a parameter and some of its state; if `masters` is 1, the last vector holds the master weights.
fn run_on<S: StateElement, const K: usize>(
    values: &mut [Vec<S>],
    masters: usize,
    indices: [usize; K],
    rule: impl Elementwise<K>,
    p: &Tensor,
    g: &Tensor,
) -> Result<Tensor> {
    let (state, master) = values.split_at_mut(values.len() - masters);
    let state = state.get_disjoint_mut(indices).map_err(|_| {
        let fix = "name every tensor once, and not the master weights";
        ErrorKind::Optimizer.error::<Error>(
            "state of an elementwise step",
            "a tensor named twice",
            "different tensors",
            fix,
        )
    })?;
    Ok(elementwise_update(rule, p, g, state.map(Vec::as_mut_slice), master.first_mut().map(Vec::as_mut_slice))?)
}

/// A rule on the gradient times 1, or -1 to maximize.
#[derive(Clone, Copy)]
struct SignedGradientRule<R> {
    rule: R,
    sign: f64,
}

impl<R: Elementwise<K>, const K: usize> Elementwise<K> for SignedGradientRule<R> {
    #[inline(always)]
    fn update(self, p: f64, g: f64, state: [f64; K]) -> (f64, [f64; K]) {
        self.rule.update(p, self.sign * g, state)
    }

    #[inline(always)]
    fn update_f32(self, p: f32, g: f32, state: [f32; K]) -> (f32, [f32; K]) {
        self.rule.update_f32(p, self.sign as f32 * g, state)
    }
}
