//! Recurrent layers: `Rnn`, `Lstm`, `Gru` and their cells, with PyTorch's parameters, names and order of gates.
//!
//! The input of a layer is projected for all times at once; then one step per time follows. A sharded batch communicates nothing. To
//! shard the hidden features, place the weights and biases with `StridedShard { dim: 0, split_factor: gates }` (4 gates in an LSTM, 3 in a GRU;
//! `Shard(0)` in an RNN): every rank then computes all gates of its features, and gathers the hidden state once per step.

use crate::error::{Error, ErrorKind, Result};
use crate::nn::build::Builder;
use crate::nn::init::Init;
use crate::nn::module::{Forward, Hooks, Module, ModuleItem, TrainingMode, join};
use crate::param::Param;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// Options of [`Rnn`], [`Lstm`] and [`Gru`], with PyTorch's names and defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecurrentOptions {
    /// Features of the input.
    pub input_size: usize,
    /// Features of the hidden state.
    pub hidden_size: usize,
    /// Layers, each of which takes the output of the one before; 1 by default.
    pub num_layers: usize,
    /// Whether biases are added; true by default.
    pub bias: bool,
    /// Whether input and output are `[n, time, features]` instead of `[time, n, features]`; false by default.
    pub batch_first: bool,
    /// Probability with which elements between two layers are dropped in training; 0 by default.
    pub dropout: f64,
    /// Whether a second set of weights reads the input from its end, and the output has the features of both; false by default.
    pub bidirectional: bool,
    /// Features that the hidden state of an LSTM is projected to; 0, the default, does not project.
    pub proj_size: usize,
}

impl RecurrentOptions {
    /// Default options for these sizes.
    pub fn new(input_size: usize, hidden_size: usize) -> Self {
        RecurrentOptions {
            input_size,
            hidden_size,
            num_layers: 1,
            bias: true,
            batch_first: false,
            dropout: 0.0,
            bidirectional: false,
            proj_size: 0,
        }
    }

    /// Sets `num_layers`.
    pub fn num_layers(self, num_layers: usize) -> Self {
        RecurrentOptions { num_layers, ..self }
    }

    /// Sets `bias`.
    pub fn bias(self, bias: bool) -> Self {
        RecurrentOptions { bias, ..self }
    }

    /// Sets `batch_first`.
    pub fn batch_first(self, batch_first: bool) -> Self {
        RecurrentOptions { batch_first, ..self }
    }

    /// Sets `dropout`.
    pub fn dropout(self, dropout: f64) -> Self {
        RecurrentOptions { dropout, ..self }
    }

    /// Sets `bidirectional`.
    pub fn bidirectional(self, bidirectional: bool) -> Self {
        RecurrentOptions { bidirectional, ..self }
    }

    /// Sets `proj_size`.
    pub fn proj_size(self, proj_size: usize) -> Self {
        RecurrentOptions { proj_size, ..self }
    }

    fn directions(&self) -> usize {
        if self.bidirectional { 2 } else { 1 }
    }

    /// Features of the output of one direction.
    fn output_size(&self) -> usize {
        if self.proj_size > 0 { self.proj_size } else { self.hidden_size }
    }

    fn check(&self, kind: RecurrentKind) -> Result<()> {
        let projects = self.proj_size > 0;
        let fits = self.hidden_size > 0
            && self.num_layers > 0
            && (0.0..=1.0).contains(&self.dropout)
            && (!projects || kind == RecurrentKind::Lstm && self.proj_size < self.hidden_size);
        if fits {
            return Ok(());
        }
        let needed = "at least one layer and hidden feature, a probability of dropout from 0 to 1, and only in an LSTM a projection to fewer \
                      features than the hidden ones";
        Err(ErrorKind::Argument.error("recurrent options", format!("{self:?}"), needed, "correct the options"))
    }
}

/// The hidden state of a recurrent layer, `[layers * directions, n, features]`, or of a cell, `[n, features]`.
#[derive(Clone)]
pub struct RecurrentState {
    /// The last outputs, PyTorch's `h_n`.
    pub hidden: DTensor,
    /// The cell state of an LSTM, PyTorch's `c_n`.
    pub cell: Option<DTensor>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RecurrentKind {
    Tanh,
    Relu,
    Lstm,
    Gru,
}

impl RecurrentKind {
    fn gates(self) -> usize {
        match self {
            RecurrentKind::Tanh | RecurrentKind::Relu => 1,
            RecurrentKind::Gru => 3,
            RecurrentKind::Lstm => 4,
        }
    }

    /// The state after one step, from the projected input of this step.
    #[track_caller]
    fn step(self, weights: &StepWeights, of_input: &DTensor, state: &RecurrentState) -> Result<RecurrentState> {
        let of_hidden = state.hidden.linear(&weights.hidden, weights.bias.as_ref())?;
        let gates = self.gates() as isize;
        let gate = |all: &DTensor, i: isize| all.unflatten(-1, &[gates, -1])?.select(-2, i);
        match self {
            RecurrentKind::Tanh => Ok(RecurrentState { hidden: of_input.add(&of_hidden)?.tanh()?, cell: None }),
            RecurrentKind::Relu => Ok(RecurrentState { hidden: of_input.add(&of_hidden)?.relu()?, cell: None }),
            RecurrentKind::Gru => {
                let both = |i: isize| gate(of_input, i)?.add(&gate(&of_hidden, i)?)?.sigmoid();
                let (reset, update) = (both(0)?, both(1)?);
                let new = gate(of_input, 2)?.add(&reset.mul(&gate(&of_hidden, 2)?)?)?.tanh()?;
                Ok(RecurrentState { hidden: new.add(&update.mul(&state.hidden.sub(&new)?)?)?, cell: None })
            }
            RecurrentKind::Lstm => {
                let all = of_input.add(&of_hidden)?;
                let (input, forget) = (gate(&all, 0)?.sigmoid()?, gate(&all, 1)?.sigmoid()?);
                let (new, output) = (gate(&all, 2)?.tanh()?, gate(&all, 3)?.sigmoid()?);
                let before = state.cell.as_ref().ok_or_else(|| wrong_state("none", "a cell state"))?;
                let cell = forget.mul(before)?.add(&input.mul(&new)?)?;
                let hidden = output.mul(&cell.tanh()?)?;
                let hidden = weights.projection.as_ref().map_or(Ok(hidden.clone()), |p| hidden.linear(p, None))?;
                Ok(RecurrentState { hidden, cell: Some(cell) })
            }
        }
    }

    /// A state of zeros for a batch of `n`.
    fn zeros(self, x: &DTensor, n: usize, output: usize, hidden: usize) -> Result<RecurrentState> {
        let (mesh, replicated) = (x.device_mesh(), vec![Placement::Replicate; x.placements().len()]);
        let zeros = |features: usize| DTensor::zeros((n, features), x.dtype(), mesh, replicated.clone());
        let cell = (self == RecurrentKind::Lstm).then(|| zeros(hidden)).transpose()?;
        Ok(RecurrentState { hidden: zeros(output)?, cell })
    }
}

/// The values that a step uses.
struct StepWeights {
    hidden: DTensor,
    bias: Option<DTensor>,
    projection: Option<DTensor>,
}

/// The parameters of one direction of one layer, or of a cell.
struct RecurrentWeights {
    /// What follows the names of its parameters, such as `_l0_reverse`.
    suffix: String,
    weight_ih: Param,
    weight_hh: Param,
    biases: Option<[Param; 2]>,
    weight_hr: Option<Param>,
}

impl RecurrentWeights {
    fn new(
        builder: &Builder,
        kind: RecurrentKind,
        suffix: String,
        inputs: usize,
        options: &RecurrentOptions,
    ) -> Result<Self> {
        let bound = 1.0 / (options.hidden_size as f64).sqrt();
        let (rows, output) = (kind.gates() * options.hidden_size, options.output_size());
        let param = |name: &str, shape: &[usize]| {
            builder.param(&format!("{name}{suffix}"), shape, Init::Uniform(-bound, bound))
        };
        let (weight_ih, weight_hh) = (param("weight_ih", &[rows, inputs])?, param("weight_hh", &[rows, output])?);
        let biases = || Ok::<_, Error>([param("bias_ih", &[rows])?, param("bias_hh", &[rows])?]);
        let biases = options.bias.then(biases).transpose()?;
        let projects = options.proj_size > 0;
        let weight_hr = projects.then(|| param("weight_hr", &[output, options.hidden_size])).transpose()?;
        Ok(RecurrentWeights { suffix, weight_ih, weight_hh, biases, weight_hr })
    }

    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
        let mut one = |name: &str, param: &Param| param.walk(&join(path, &format!("{name}{}", self.suffix)), visit);
        one("weight_ih", &self.weight_ih);
        one("weight_hh", &self.weight_hh);
        if let Some([input, hidden]) = &self.biases {
            one("bias_ih", input);
            one("bias_hh", hidden);
        }
        if let Some(projection) = &self.weight_hr {
            one("weight_hr", projection);
        }
    }

    /// The part of the gates that the input contributes.
    #[track_caller]
    fn project(&self, x: &DTensor) -> Result<DTensor> {
        let bias = self.biases.as_ref().map(|[input, _]| input.forward_value()).transpose()?;
        x.linear(&self.weight_ih.forward_value()?, bias.as_ref())
    }

    fn values(&self) -> Result<StepWeights> {
        Ok(StepWeights {
            hidden: self.weight_hh.forward_value()?,
            bias: self.biases.as_ref().map(|[_, hidden]| hidden.forward_value()).transpose()?,
            projection: self.weight_hr.as_ref().map(Param::forward_value).transpose()?,
        })
    }
}

fn wrong_state(found: &str, needed: &str) -> Error {
    ErrorKind::Argument.error(
        "recurrent state",
        found.to_string(),
        needed.to_string(),
        "pass the state that this module returned, or none",
    )
}

/// The layers of an `Rnn`, `Lstm` or `Gru`.
struct RecurrentLayers {
    kind: RecurrentKind,
    options: RecurrentOptions,
    /// By layer, forward before reverse.
    weights: Vec<RecurrentWeights>,
    training_mode: TrainingMode,
}

impl RecurrentLayers {
    fn new(builder: &Builder, kind: RecurrentKind, options: RecurrentOptions) -> Result<Self> {
        options.check(kind)?;
        let mut weights = Vec::new();
        for layer in 0..options.num_layers {
            let inputs = match layer {
                0 => options.input_size,
                _ => options.directions() * options.output_size(),
            };
            for direction in ["", "_reverse"].into_iter().take(options.directions()) {
                let suffix = format!("_l{layer}{direction}");
                weights.push(RecurrentWeights::new(builder, kind, suffix, inputs, &options)?);
            }
        }
        Ok(RecurrentLayers { kind, options, weights, training_mode: TrainingMode::default() })
    }

    /// The output for all times, and the state after the last.
    #[track_caller]
    fn run(&self, x: &DTensor, state: Option<&RecurrentState>) -> Result<(DTensor, RecurrentState)> {
        let batched = x.ndim() == 3;
        if !batched && x.ndim() != 2 {
            let needed = "[time, n, features], [n, time, features] with batch_first, or [time, features]";
            let found = format!("an input {}", x.layout());
            return Err(ErrorKind::shape(x.shape()).error("input", found, needed, "reshape the input"));
        }
        let swaps = batched && self.options.batch_first;
        let mut x = match (batched, swaps) {
            (false, _) => x.unsqueeze(1)?,
            (true, true) => x.transpose(0, 1)?,
            (true, false) => x.clone(),
        };
        let first = self.first_states(&x, state, batched)?;
        let mut last = Vec::new();
        let directions = self.options.directions();
        for (layer, weights) in self.weights.chunks(directions).enumerate() {
            if layer > 0 && self.options.dropout > 0.0 {
                x = x.dropout(self.options.dropout, self.training_mode.is_training())?;
            }
            let mut outputs = Vec::new();
            for (direction, weights) in weights.iter().enumerate() {
                let first = first[layer * directions + direction].clone();
                let (output, state) = self.one_direction(&x, weights, direction == 1, first)?;
                outputs.push(output);
                last.push(state);
            }
            x = if directions == 1 { outputs.remove(0) } else { DTensor::cat(&[&outputs[0], &outputs[1]], -1)? };
        }
        let stacked = |of: &dyn Fn(&RecurrentState) -> Option<DTensor>| -> Result<Option<DTensor>> {
            let Some(all) = last.iter().map(of).collect::<Option<Vec<_>>>() else { return Ok(None) };
            let all = DTensor::stack(&all.iter().collect::<Vec<_>>(), 0)?;
            if batched { Ok(Some(all)) } else { all.squeeze(Some(1)).map(Some) }
        };
        let hidden = stacked(&|s| Some(s.hidden.clone()))?.expect("every state has a hidden part");
        let state = RecurrentState { hidden, cell: stacked(&|s| s.cell.clone())? };
        let output = match (batched, swaps) {
            (false, _) => x.squeeze(Some(1))?,
            (true, true) => x.transpose(0, 1)?,
            (true, false) => x,
        };
        Ok((output, state))
    }

    #[track_caller]
    fn one_direction(
        &self,
        x: &DTensor,
        weights: &RecurrentWeights,
        reverse: bool,
        mut state: RecurrentState,
    ) -> Result<(DTensor, RecurrentState)> {
        let values = weights.values()?;
        let mut inputs = weights.project(x)?.unbind(0)?;
        if reverse {
            inputs.reverse();
        }
        let mut outputs = Vec::with_capacity(inputs.len());
        for input in &inputs {
            state = self.kind.step(&values, input, &state)?;
            outputs.push(state.hidden.clone());
        }
        if reverse {
            outputs.reverse();
        }
        Ok((DTensor::stack(&outputs.iter().collect::<Vec<_>>(), 0)?, state))
    }

    /// The states of all layers and directions before the first step.
    #[track_caller]
    fn first_states(&self, x: &DTensor, state: Option<&RecurrentState>, batched: bool) -> Result<Vec<RecurrentState>> {
        let (count, n) = (self.weights.len(), x.shape()[1]);
        let (output, hidden) = (self.options.output_size(), self.options.hidden_size);
        if x.shape()[0] == 0 {
            let found = format!("an input {}", x.layout());
            return Err(ErrorKind::shape(x.shape()).error("input", found, "at least one time", "pass a longer input"));
        }
        let Some(state) = state else {
            return Ok(vec![self.kind.zeros(x, n, output, hidden)?; count]);
        };
        let parts = |tensor: &DTensor, features: usize| -> Result<Vec<DTensor>> {
            let tensor = if batched { tensor.clone() } else { tensor.unsqueeze(1)? };
            if tensor.shape() != [count, n, features] {
                let found = format!("a state {}", tensor.layout());
                return Err(wrong_state(&found, &format!("{:?}", [count, n, features])));
            }
            tensor.unbind(0)
        };
        let hidden_parts = parts(&state.hidden, output)?;
        let cells = match (&state.cell, self.kind) {
            (Some(cell), RecurrentKind::Lstm) => parts(cell, hidden)?.into_iter().map(Some).collect(),
            _ => vec![None; count],
        };
        Ok(hidden_parts.into_iter().zip(cells).map(|(hidden, cell)| RecurrentState { hidden, cell }).collect())
    }
}

impl Module for RecurrentLayers {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
        self.weights.iter().for_each(|weights| weights.walk(path, visit));
        self.training_mode.walk(&join(path, "training_mode"), visit);
    }
}

macro_rules! recurrent {
    ($($(#[$meta:meta])* $name:ident, $kind:ident;)*) => {$(
        $(#[$meta])*
        pub struct $name {
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            layers: RecurrentLayers,
        }

        impl $name {
            /// Builds the layers, with PyTorch's initializer: uniform within `1 / sqrt(hidden_size)`.
            ///
            /// # Errors
            /// [`Error::Invalid`] if the options do not fit each other.
            pub fn new(builder: &Builder, options: RecurrentOptions) -> Result<Self> {
                let layers = RecurrentLayers::new(builder, RecurrentKind::$kind, options)?;
                Ok($name { hooks: builder.hooks(), layers })
            }

            /// Computes the output for all times from an initial state, zeros if there is none; returns it with the state after the
            /// last time, and that after the first for the reverse direction. Hooks see `x` and the output.
            #[track_caller]
            pub fn forward_state(
                &self,
                x: &DTensor,
                state: Option<&RecurrentState>,
            ) -> Result<(DTensor, RecurrentState)> {
                let mut last = None;
                let output = self.hooks.run_own("forward_state", x, |x| {
                    let (output, state) = self.layers.run(x, state)?;
                    last = Some(state);
                    Ok(output)
                })?;
                Ok((output, last.expect("the module ran")))
            }
        }

        impl Module for $name {
            fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
                if self.hooks.walk_replacement(path, "hooks", visit) {
                    return;
                }
                visit(path, ModuleItem::Module(stringify!($name)));
                // The parameters are named as those of the module itself.
                self.layers.walk(path, visit);
                self.hooks.walk(&join(path, "hooks"), visit);
            }
        }

        impl Forward for $name {
            /// Computes the output for all times from a state of zeros.
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                self.hooks.run(x, |x| Ok(self.layers.run(x, None)?.0))
            }
        }
    )*};
}

recurrent! {
    /// Elman network: `h = tanh(W_ih x + b_ih + W_hh h + b_hh)` per time. See [`Rnn::with_relu`] for the other nonlinearity.
    #[doc(alias = "RNN")]
    Rnn, Tanh;
    /// Long short-term memory, with parameters `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, ... as in PyTorch.
    ///
    /// ```
    /// use shardwise::nn::{Lstm, RecurrentOptions};
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let options = RecurrentOptions::new(3, 8).num_layers(2).batch_first(true);
    ///     let lstm = Lstm::new(&Builder::new(&mesh), options)?;
    ///     let x = DTensor::randn((4, 5, 3), &mesh, [Shard(0)])?;
    ///     let (y, state) = lstm.forward_state(&x, None)?;
    ///     assert_eq!((y.shape(), state.hidden.shape()), (&[4, 5, 8][..], &[2, 4, 8][..]));
    ///     assert_eq!(lstm.named_parameters()[4].0, "weight_ih_l1");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "LSTM")]
    Lstm, Lstm;
    /// Gated recurrent unit.
    #[doc(alias = "GRU")]
    Gru, Gru;
}

impl Rnn {
    /// Builds the layers with `relu` in place of `tanh`, PyTorch's `nonlinearity="relu"`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the options do not fit each other.
    pub fn with_relu(builder: &Builder, options: RecurrentOptions) -> Result<Self> {
        let layers = RecurrentLayers::new(builder, RecurrentKind::Relu, options)?;
        Ok(Rnn { hooks: builder.hooks(), layers })
    }
}

/// The parameters of a cell.
struct RecurrentCell {
    kind: RecurrentKind,
    weights: RecurrentWeights,
    hidden_size: usize,
}

impl RecurrentCell {
    fn new(builder: &Builder, kind: RecurrentKind, sizes: (usize, usize), bias: bool) -> Result<Self> {
        let options = RecurrentOptions::new(sizes.0, sizes.1).bias(bias);
        options.check(kind)?;
        let weights = RecurrentWeights::new(builder, kind, String::new(), sizes.0, &options)?;
        Ok(RecurrentCell { kind, weights, hidden_size: sizes.1 })
    }

    #[track_caller]
    fn run(&self, x: &DTensor, state: Option<&RecurrentState>) -> Result<RecurrentState> {
        let batched = x.ndim() == 2;
        let thick = |t: &DTensor| if batched { Ok(t.clone()) } else { t.unsqueeze(0) };
        let thin = |t: DTensor| if batched { Ok(t) } else { t.squeeze(Some(0)) };
        let x = thick(x)?;
        let n = x.shape()[0];
        let state = match state {
            Some(RecurrentState { hidden, cell }) => {
                let cell = cell.as_ref().map(thick).transpose()?;
                RecurrentState { hidden: thick(hidden)?, cell }
            }
            None => self.kind.zeros(&x, n, self.hidden_size, self.hidden_size)?,
        };
        if [Some(&state.hidden), state.cell.as_ref()].into_iter().flatten().any(|t| t.shape() != [n, self.hidden_size])
        {
            let found = format!("a state {} for an input {}", state.hidden.layout(), x.layout());
            return Err(wrong_state(&found, &format!("{:?}", [n, self.hidden_size])));
        }
        let next = self.kind.step(&self.weights.values()?, &self.weights.project(&x)?, &state)?;
        Ok(RecurrentState { hidden: thin(next.hidden)?, cell: next.cell.map(thin).transpose()? })
    }
}

impl Module for RecurrentCell {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
        self.weights.walk(path, visit);
    }
}

macro_rules! cells {
    ($($(#[$meta:meta])* $name:ident, $kind:ident;)*) => {$(
        $(#[$meta])*
        pub struct $name {
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            cell: RecurrentCell,
        }

        impl $name {
            /// Builds the cell, with PyTorch's initializer: uniform within `1 / sqrt(hidden_size)`.
            ///
            /// # Errors
            /// [`Error::Invalid`] if there is no hidden feature.
            pub fn new(builder: &Builder, input_size: usize, hidden_size: usize, bias: bool) -> Result<Self> {
                let cell = RecurrentCell::new(builder, RecurrentKind::$kind, (input_size, hidden_size), bias)?;
                Ok($name { hooks: builder.hooks(), cell })
            }

            /// Computes the state after one input `[n, features]` or `[features]`; a state of zeros comes before if none is given. Hooks see
            /// `x` and the hidden state.
            #[track_caller]
            pub fn forward_state(&self, x: &DTensor, state: Option<&RecurrentState>) -> Result<RecurrentState> {
                let mut cell = None;
                let hidden = self.hooks.run_own("forward_state", x, |x| {
                    let next = self.cell.run(x, state)?;
                    cell = next.cell;
                    Ok(next.hidden)
                })?;
                Ok(RecurrentState { hidden, cell })
            }
        }

        impl Module for $name {
            fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
                if self.hooks.walk_replacement(path, "hooks", visit) {
                    return;
                }
                visit(path, ModuleItem::Module(stringify!($name)));
                self.cell.walk(path, visit);
                self.hooks.walk(&join(path, "hooks"), visit);
            }
        }
    )*};
}

cells! {
    /// One step of an [`Rnn`], with `tanh`.
    #[doc(alias = "RNNCell")]
    RnnCell, Tanh;
    /// One step of an [`Lstm`].
    #[doc(alias = "LSTMCell")]
    LstmCell, Lstm;
    /// One step of a [`Gru`].
    #[doc(alias = "GRUCell")]
    GruCell, Gru;
}
