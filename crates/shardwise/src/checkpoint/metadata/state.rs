//! Nested state dicts of tensors and values, which checkpoints save and load.

use std::collections::BTreeMap;

use candle_core::Tensor;

use crate::checkpoint::metadata::value::{Key, Value, flat_key};
use crate::error::{Error, ErrorKind, Result};
use crate::optim::{OptimizerState, ParamState};
use crate::param::MergedTensor;
use crate::random::GeneratorState;
use crate::sharded::ShardedTensor;
use crate::tensor::DTensor;

/// A nested state dict: a tree of maps and lists with tensors and values as leaves.
///
/// What [`save`](crate::checkpoint::save()) writes; as a template, what [`load`](crate::checkpoint::load()) fills. Anything that converts to a leaf
/// (`DTensor`, [`ShardedTensor`], [`MergedTensor`], candle's `Tensor`, numbers, strings) converts to a `State`.
///
/// ```
/// use shardwise::checkpoint::State;
///
/// let state = State::map([("step", State::from(7)), ("names", State::list(["a", "b"]))]);
/// assert_eq!(state.get("names.1").map(ToString::to_string), Some("\"b\"".to_string()));
/// ```
#[doc(alias = "STATE_DICT_TYPE")]
#[derive(Clone)]
pub enum State {
    /// A distributed tensor; each rank saves and loads its local part.
    Tensor(DTensor),
    /// A sharded tensor; each rank saves and loads its local shards.
    Sharded(ShardedTensor),
    /// A distributed tensor that is stored with its leading dimensions merged; it is saved and loaded in its own shape.
    Merged(MergedTensor),
    /// A plain tensor, which must be the same on all ranks. It is written once.
    Plain(Tensor),
    /// A non-tensor value, which must be the same on all ranks.
    Value(Value),
    /// Entries by name.
    Map(BTreeMap<String, State>),
    /// Entries by position.
    List(Vec<State>),
}

/// A leaf of a [`State`], by reference.
pub(in crate::checkpoint) enum StateLeaf<'a> {
    Tensor(&'a DTensor),
    Sharded(&'a ShardedTensor),
    Merged(&'a MergedTensor),
    Plain(&'a Tensor),
    Value(Value),
}

impl State {
    /// Builds a map from names and entries.
    pub fn map<N: Into<String>, S: Into<State>>(entries: impl IntoIterator<Item = (N, S)>) -> State {
        State::Map(entries.into_iter().map(|(name, state)| (name.into(), state.into())).collect())
    }

    /// Builds a list of entries.
    pub fn list<S: Into<State>>(entries: impl IntoIterator<Item = S>) -> State {
        State::List(entries.into_iter().map(Into::into).collect())
    }

    /// Returns the entry at a dotted path of names and list positions, such as `"optimizer.groups.0"`.
    pub fn get(&self, path: &str) -> Option<&State> {
        if path.is_empty() {
            return Some(self);
        }
        match self {
            // Names of parameters have dots themselves.
            State::Map(entries) => entries.iter().find_map(|(name, state)| {
                let rest = path.strip_prefix(name.as_str())?;
                match rest.strip_prefix('.') {
                    Some(rest) => state.get(rest),
                    None => rest.is_empty().then_some(state),
                }
            }),
            State::List(entries) => {
                let (first, rest) = path.split_once('.').unwrap_or((path, ""));
                entries.get(first.parse::<usize>().ok()?)?.get(rest)
            }
            _ => None,
        }
    }

    /// Returns the distributed tensor at a dotted path.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownName`] if there is none.
    pub fn tensor(&self, path: &str) -> Result<&DTensor> {
        match self.get(path) {
            Some(State::Tensor(tensor)) => Ok(tensor),
            other => {
                let found = other.map_or_else(|| "nothing".to_string(), ToString::to_string);
                let needed = format!("a distributed tensor at {path:?}");
                Err(ErrorKind::unknown(path).error("state", found, needed, "use the path of an entry of the state"))
            }
        }
    }

    /// Returns the value at a dotted path; for a map or list of values, all of it.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownName`] if there is none, or if it contains tensors.
    pub fn value(&self, path: &str) -> Result<Value> {
        self.get(path).and_then(State::as_value).ok_or_else(|| {
            ErrorKind::unknown(path).error(
                "state",
                "nothing, or tensors",
                format!("a value at {path:?}"),
                "use the path of an entry of the state",
            )
        })
    }

    /// The tensor of a module or optimizer as it is stored there.
    pub(in crate::checkpoint) fn stored_tensor(&self) -> Option<&DTensor> {
        match self {
            State::Tensor(tensor) => Some(tensor),
            State::Merged(tensor) => Some(tensor.stored()),
            _ => None,
        }
    }

    fn as_value(&self) -> Option<Value> {
        match self {
            State::Value(value) => Some(value.clone()),
            State::Map(entries) => {
                let entry = |(name, state): (&String, &State)| Some((name.clone(), state.as_value()?));
                entries.iter().map(entry).collect::<Option<_>>().map(Value::Map)
            }
            State::List(entries) => entries.iter().map(State::as_value).collect::<Option<_>>().map(Value::List),
            _ => None,
        }
    }

    /// All leaves by flat key, with their paths. Maps are always flattened, lists only if they contain a tensor or a map: as
    /// `flatten_state_dict` of PyTorch does, so that either library finds the keys of the other.
    pub(in crate::checkpoint) fn flatten(&self) -> Result<BTreeMap<String, (Vec<Key>, StateLeaf<'_>)>> {
        let mut flat = BTreeMap::new();
        self.collect(&mut Vec::new(), &mut flat)?;
        Ok(flat)
    }

    fn collect<'a>(
        &'a self,
        path: &mut Vec<Key>,
        flat: &mut BTreeMap<String, (Vec<Key>, StateLeaf<'a>)>,
    ) -> Result<()> {
        let leaf = match self {
            State::Tensor(tensor) => StateLeaf::Tensor(tensor),
            State::Sharded(tensor) => StateLeaf::Sharded(tensor),
            State::Merged(tensor) => StateLeaf::Merged(tensor),
            State::Plain(tensor) => StateLeaf::Plain(tensor),
            // A map without entries is a value, unless it is the whole state, which then has none.
            State::Map(entries) if !entries.is_empty() || path.is_empty() => {
                for (name, state) in entries {
                    path.push(Key::Name(name.clone()));
                    state.collect(path, flat)?;
                    path.pop();
                }
                return Ok(());
            }
            State::List(entries) if self.as_value().is_none_or(|value| has_map(&value)) => {
                for (i, state) in entries.iter().enumerate() {
                    path.push(Key::Index(i));
                    state.collect(path, flat)?;
                    path.pop();
                }
                return Ok(());
            }
            State::Value(value) if has_map(value) && !matches!(value, Value::Tuple(_)) => {
                return collect_value(value, path, flat);
            }
            State::Map(_) => StateLeaf::Value(Value::Map(BTreeMap::new())),
            State::List(_) | State::Value(_) => {
                StateLeaf::Value(self.as_value().expect("lists with tensors were flattened above"))
            }
        };
        insert(path, leaf, flat)
    }

    /// Builds the tree with these leaves.
    pub(in crate::checkpoint) fn unflatten(mut leaves: Vec<(Vec<Key>, State)>) -> State {
        // List positions must come in numeric order, which differs from that of flat keys ("10" < "9").
        leaves.sort_by(|a, b| a.0.cmp(&b.0));
        let mut root = State::Map(BTreeMap::new());
        for (path, leaf) in leaves {
            place(&mut root, &path, leaf);
        }
        root
    }
}

/// Inserts a leaf at its path. Leaves come in ascending order of list positions.
fn place(at: &mut State, path: &[Key], leaf: State) {
    let Some((first, rest)) = path.split_first() else {
        *at = leaf;
        return;
    };
    let fresh = || State::Map(BTreeMap::new());
    match first {
        Key::Name(name) => {
            if !matches!(at, State::Map(_)) {
                *at = fresh();
            }
            let State::Map(entries) = at else { unreachable!("replaced above") };
            place(entries.entry(name.clone()).or_insert_with(fresh), rest, leaf);
        }
        Key::Index(i) => {
            if !matches!(at, State::List(_)) {
                *at = State::List(Vec::new());
            }
            let State::List(entries) = at else { unreachable!("replaced above") };
            // A list with missing positions is closed up: filtered checkpoints have them.
            let i = (*i).min(entries.len());
            if i == entries.len() {
                entries.push(fresh());
            }
            place(&mut entries[i], rest, leaf);
        }
    }
}

fn has_map(value: &Value) -> bool {
    match value {
        Value::Map(entries) => !entries.is_empty(),
        Value::List(entries) => entries.iter().any(|e| matches!(e, Value::Map(_)) || has_map(e)),
        _ => false,
    }
}

fn collect_value<'a>(
    value: &Value,
    path: &mut Vec<Key>,
    flat: &mut BTreeMap<String, (Vec<Key>, StateLeaf<'a>)>,
) -> Result<()> {
    let entries: Vec<(Key, &Value)> = match value {
        Value::Map(entries) if !entries.is_empty() => {
            entries.iter().map(|(name, value)| (Key::Name(name.clone()), value)).collect()
        }
        Value::List(entries) if has_map(value) => {
            entries.iter().enumerate().map(|(i, value)| (Key::Index(i), value)).collect()
        }
        _ => return insert(path, StateLeaf::Value(value.clone()), flat),
    };
    for (key, value) in entries {
        path.push(key);
        collect_value(value, path, flat)?;
        path.pop();
    }
    Ok(())
}

fn insert<'a>(path: &[Key], leaf: StateLeaf<'a>, flat: &mut BTreeMap<String, (Vec<Key>, StateLeaf<'a>)>) -> Result<()> {
    let key = flat_key(path);
    match flat.insert(key.clone(), (path.to_vec(), leaf)) {
        None => Ok(()),
        Some((other, _)) => {
            let found = format!("paths {other:?} and {path:?}, which have the same flat key {key:?}");
            Err(ErrorKind::state().error("state", found, "different flat keys", "rename one of the entries"))
        }
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            State::Tensor(tensor) => write!(f, "{} {}", tensor.dtype().as_str(), tensor.layout()),
            State::Sharded(tensor) => {
                write!(f, "{} {:?}: {}", tensor.dtype().as_str(), tensor.shape(), tensor.sharding_spec())
            }
            State::Merged(tensor) => {
                let stored = tensor.stored();
                write!(f, "{} {:?} stored as {}", stored.dtype().as_str(), tensor.shape(), stored.layout())
            }
            State::Plain(tensor) => write!(f, "{} {:?}", tensor.dtype().as_str(), tensor.dims()),
            State::Value(value) => write!(f, "{value}"),
            State::Map(entries) => write!(f, "a map of {} entries", entries.len()),
            State::List(entries) => write!(f, "a list of {} entries", entries.len()),
        }
    }
}

impl From<DTensor> for State {
    fn from(tensor: DTensor) -> Self {
        State::Tensor(tensor)
    }
}

impl From<ShardedTensor> for State {
    fn from(tensor: ShardedTensor) -> Self {
        State::Sharded(tensor)
    }
}

impl From<MergedTensor> for State {
    fn from(tensor: MergedTensor) -> Self {
        State::Merged(tensor)
    }
}

impl From<Tensor> for State {
    fn from(tensor: Tensor) -> Self {
        State::Plain(tensor)
    }
}

impl<V: Into<Value>> From<V> for State {
    fn from(value: V) -> Self {
        State::Value(value.into())
    }
}

impl From<BTreeMap<String, DTensor>> for State {
    fn from(tensors: BTreeMap<String, DTensor>) -> Self {
        State::map(tensors)
    }
}

impl From<BTreeMap<String, State>> for State {
    fn from(entries: BTreeMap<String, State>) -> Self {
        State::Map(entries)
    }
}

/// Returns the entries of a map.
///
/// # Errors
/// [`ErrorKind::State`] if the state is not a map.
impl TryFrom<State> for BTreeMap<String, State> {
    type Error = Error;

    fn try_from(state: State) -> Result<Self> {
        match state {
            State::Map(entries) => Ok(entries),
            other => Err(ErrorKind::state().error("state", other, "a map", "pass an entry of the state that is a map")),
        }
    }
}

/// Collects names and entries into a map.
impl<N: Into<String>, S: Into<State>> FromIterator<(N, S)> for State {
    fn from_iter<I: IntoIterator<Item = (N, S)>>(entries: I) -> Self {
        State::map(entries)
    }
}

/// Adds entries to a map, replacing those of the same name.
///
/// # Panics
/// If the state is not a map.
impl<N: Into<String>, S: Into<State>> Extend<(N, S)> for State {
    #[track_caller]
    fn extend<I: IntoIterator<Item = (N, S)>>(&mut self, more: I) {
        let State::Map(entries) = self else { panic!("entries by name can be added to a map only, not to {self}") };
        entries.extend(more.into_iter().map(|(name, state)| (name.into(), state.into())));
    }
}

/// Iterates over the entries of a map in the order of names; a list, a tensor and a value have none.
impl IntoIterator for State {
    type Item = (String, State);
    type IntoIter = std::collections::btree_map::IntoIter<String, State>;

    fn into_iter(self) -> Self::IntoIter {
        match self {
            State::Map(entries) => entries.into_iter(),
            _ => BTreeMap::new().into_iter(),
        }
    }
}

/// Converts the state of an optimizer: settings, numbers and tensors by the names of its parameters. Without the learning-rate
/// schedule, which [`save_from`](crate::checkpoint::save_from) adds.
impl TryFrom<&OptimizerState> for State {
    type Error = Error;

    fn try_from(state: &OptimizerState) -> Result<State> {
        let of_param = |(name, param): (&String, &ParamState)| {
            let numbers = param.numbers.iter().map(|(kind, &number)| (kind.clone(), State::from(number)));
            let tensors = param.tensors.iter().map(|(kind, tensor)| (kind.clone(), State::from(tensor.clone())));
            (name.clone(), State::Map(numbers.chain(tensors).collect()))
        };
        Ok(State::map([
            ("steps", State::from(state.steps as i64)),
            ("groups", State::Value(Value::of(&state.groups)?)),
            ("state", State::Map(state.params.iter().map(of_param).collect())),
        ]))
    }
}

/// Converts back to the state of an optimizer.
impl TryFrom<&State> for OptimizerState {
    type Error = Error;

    fn try_from(state: &State) -> Result<OptimizerState> {
        let Some(State::Map(stored)) = state.get("state") else {
            return Err(ErrorKind::state().error(
                "state",
                "no entry \"state\"",
                "the state of an optimizer",
                "pass the entry with the optimizer's state",
            ));
        };
        let mut params = BTreeMap::new();
        for (name, entries) in stored {
            let mut param = ParamState::default();
            if let State::Map(entries) = entries {
                for (kind, entry) in entries {
                    match entry {
                        State::Tensor(tensor) => drop(param.tensors.insert(kind.clone(), tensor.clone())),
                        State::Merged(tensor) => drop(param.tensors.insert(kind.clone(), tensor.stored().clone())),
                        // Without a detour through serde: JSON has no NaN and no infinities.
                        State::Value(Value::Float(number)) => drop(param.numbers.insert(kind.clone(), *number)),
                        other => {
                            let number = other.as_value().map_or(Ok(0.0), |value| value.read::<f64>())?;
                            param.numbers.insert(kind.clone(), number);
                        }
                    }
                }
            }
            params.insert(name.clone(), param);
        }
        let steps = state.value("steps")?.read::<u64>()?;
        // The schedule is stored separately (see `parts`): programs that store this state themselves set it again.
        Ok(OptimizerState { steps, schedule: None, groups: state.value("groups")?.read()?, params })
    }
}

impl From<GeneratorState> for State {
    fn from(state: GeneratorState) -> Self {
        // Seeds use all 64 bits; stored integers are signed.
        State::map([("seed", state.seed.cast_signed()), ("offset", state.offset.cast_signed())])
    }
}

impl TryFrom<&State> for GeneratorState {
    type Error = Error;

    fn try_from(state: &State) -> Result<GeneratorState> {
        let number = |name: &str| -> Result<u64> { Ok(state.value(name)?.read::<i64>()?.cast_unsigned()) };
        Ok(GeneratorState { seed: number("seed")?, offset: number("offset")? })
    }
}
