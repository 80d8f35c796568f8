//! Optimizer state in PyTorch's form: `state` by parameter, with `step` as a tensor, and `param_groups`.
//!
//! `get_optimizer_state_dict` names parameters, `optimizer.state_dict()` numbers them. Both are read; the former is written.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use serde_json::Value as Json;

use crate::checkpoint::catalogs::catalog::Catalog;
use crate::checkpoint::metadata::state::State;
use crate::checkpoint::metadata::value::Value;
use crate::error::{Error, ErrorKind, Result};
use crate::optim::{Adam, AdamW, GroupState, Optimizer, OptimizerState, ParamGroup, ParamState, ShardedOptimizer};

const GROUPS: &str = "param_groups";
/// Our additional entry with the optimizer's number of steps: PyTorch counts steps per parameter only.
const STEPS: &str = "steps";

/// Whether a checkpoint has optimizer state in PyTorch's form under an entry.
pub(in crate::checkpoint) fn is_torch(stored: &Catalog, entry: &str) -> bool {
    let prefix = format!("{entry}.{GROUPS}");
    stored.values.range(prefix.clone()..).next().is_some_and(|(key, _)| key.starts_with(&prefix))
}

/// Converts optimizer state to PyTorch's form.
pub(in crate::checkpoint) fn to_torch(state: &OptimizerState) -> Result<State> {
    let of_param = |(name, param): (&String, &ParamState)| -> Result<(String, State)> {
        let mut entries: BTreeMap<String, State> = BTreeMap::new();
        for (kind, &number) in &param.numbers {
            let entry = match kind.as_str() {
                // PyTorch stores step counts as f32.
                "step" => State::from(Tensor::new(number as f32, &Device::Cpu)?),
                "mu_product" => State::from(Tensor::new(number, &Device::Cpu)?),
                _ => State::from(number),
            };
            entries.insert(kind.clone(), entry);
        }
        entries.extend(param.tensors.iter().map(|(kind, tensor)| (kind.clone(), State::from(tensor.clone()))));
        Ok((name.clone(), State::Map(entries)))
    };
    let params = state.params.iter().map(of_param).collect::<Result<_>>()?;
    let groups = state.groups.iter().map(group_to_torch).collect::<Result<_>>()?;
    Ok(State::map([
        ("state", State::Map(params)),
        (GROUPS, State::Value(Value::List(groups))),
        (STEPS, State::from(state.steps as i64)),
    ]))
}

/// A parameter group with all keys that PyTorch's optimizers require; options that do not affect results get their defaults.
fn group_to_torch(state: &GroupState) -> Result<Value> {
    let mut group = BTreeMap::new();
    // Settings have PyTorch's names.
    for (name, value) in state.group.algorithm.settings()? {
        let value = match Value::of(&value)? {
            Value::List(values) => Value::Tuple(values),
            other => other,
        };
        group.insert(name, value);
    }
    let is_decoupled = state.group.algorithm.name() == AdamW::NAME;
    for (name, value) in [
        ("lr", Value::Float(state.group.lr)),
        ("maximize", Value::Bool(state.group.maximize)),
        ("foreach", Value::None),
        ("fused", Value::None),
        ("capturable", Value::Bool(false)),
        ("differentiable", Value::Bool(false)),
        ("params", Value::List(state.params.iter().map(|name| Value::Text(name.clone())).collect())),
    ] {
        group.insert(name.to_string(), value);
    }
    // A setting of some algorithms; for Adam and AdamW it says which of them wrote the group.
    group.entry("decoupled_weight_decay".to_string()).or_insert(Value::Bool(is_decoupled));
    Ok(Value::Map(group))
}

/// The template for loading PyTorch's optimizer state: the state that the checkpoint has, in the layouts of the parameters, and
/// all settings.
pub(in crate::checkpoint) fn template(optimizer: &ShardedOptimizer, stored: &Catalog, entry: &str) -> Result<State> {
    let groups = stored.value(&format!("{entry}.{GROUPS}"))?;
    let keys = keys(optimizer, &groups)?;
    let own = optimizer.state_template()?;
    let mut params = BTreeMap::new();
    for (name, param) in &own.params {
        let Some(key) = keys.get(name) else { continue };
        let prefix = format!("{entry}.state.{key}");
        let has = |kind: &str| {
            let key = format!("{prefix}.{kind}");
            stored.tensors.contains_key(&key) || stored.values.contains_key(&key)
        };
        // PyTorch stores no state for a parameter that never had a gradient. f32 master copies are optional.
        let kinds: Vec<&String> = param.tensors.keys().chain(param.numbers.keys()).collect();
        if !kinds.iter().any(|kind| has(kind)) {
            continue;
        }
        let tensors = param.tensors.iter().filter(|(kind, _)| *kind != "master_param" || has(kind));
        let tensors = tensors.map(|(kind, tensor)| (kind.clone(), State::from(tensor.clone())));
        let numbers = param.numbers.iter().map(|(kind, &number)| (kind.clone(), State::from(number)));
        params.insert(key.clone(), State::Map(tensors.chain(numbers).collect()));
    }
    let mut entries =
        BTreeMap::from([("state".to_string(), State::Map(params)), (GROUPS.into(), State::Value(groups))]);
    let steps = stored.values.get(&format!("{entry}.{STEPS}"));
    entries.extend(steps.map(|steps| (STEPS.to_string(), State::Value(steps.clone()))));
    Ok(State::Map(entries))
}

/// Converts what was loaded with [`template`] to optimizer state.
pub(in crate::checkpoint) fn from_torch(optimizer: &ShardedOptimizer, loaded: &State) -> Result<OptimizerState> {
    let stored = loaded.value(GROUPS)?;
    let keys = keys(optimizer, &stored)?;
    let mut params = BTreeMap::new();
    for (name, _) in optimizer.params() {
        let mut param = ParamState::default();
        let found = keys.get(name).and_then(|key| match loaded.get("state") {
            Some(State::Map(all)) => all.get(key),
            _ => None,
        });
        if let Some(State::Map(entries)) = found {
            for (kind, entry) in entries {
                match entry {
                    State::Tensor(tensor) => drop(param.tensors.insert(kind.clone(), tensor.clone())),
                    State::Merged(tensor) => drop(param.tensors.insert(kind.clone(), tensor.stored().clone())),
                    State::Value(Value::Float(number)) => drop(param.numbers.insert(kind.clone(), *number)),
                    State::Value(value) => drop(param.numbers.insert(kind.clone(), value.read::<f64>()?)),
                    _ => {}
                }
            }
        }
        params.insert(name.to_string(), param);
    }
    let mut groups = Vec::new();
    for (stored, own) in list(&stored)?.iter().zip(optimizer.group_states()) {
        groups.push(GroupState { group: group_from_torch(stored, &own.group, optimizer)?, params: own.params });
    }
    let most = params.values().filter_map(|param| param.numbers.get("step")).fold(0.0, |most: f64, &n| most.max(n));
    let steps = loaded.value(STEPS).ok().map(|steps| steps.read::<u64>()).transpose()?.unwrap_or(most as u64);
    Ok(OptimizerState { steps, schedule: None, groups, params })
}

fn bad(found: impl std::fmt::Display, needed: impl std::fmt::Display) -> Error {
    let fix = "build the optimizer like the one that was saved, and save with PyTorch's get_optimizer_state_dict";
    ErrorKind::state().error("PyTorch optimizer state", found, needed, fix)
}

fn list(groups: &Value) -> Result<&[Value]> {
    match groups {
        Value::List(groups) => Ok(groups),
        // With flatten_optimizer_state_dict, settings are stored per parameter and not per group.
        other => Err(bad(format!("{GROUPS} as {other:.60}"), "a list (save without flatten_optimizer_state_dict)")),
    }
}

fn field<'a>(group: &'a Value, name: &str) -> Option<&'a Value> {
    match group {
        Value::Map(entries) => entries.get(name),
        _ => None,
    }
}

/// The key of each parameter in the checkpoint: its name, or its number.
fn keys(optimizer: &ShardedOptimizer, groups: &Value) -> Result<BTreeMap<String, String>> {
    let (groups, own) = (list(groups)?, optimizer.group_states());
    if groups.len() != own.len() {
        return Err(bad(format!("{} parameter group(s)", groups.len()), format!("{}", own.len())));
    }
    let mut keys = BTreeMap::new();
    for (i, (group, own)) in groups.iter().zip(&own).enumerate() {
        let Some(Value::List(params)) = field(group, "params") else {
            return Err(bad(format!("group {i} without params"), "names or numbers of parameters"));
        };
        if params.len() != own.params.len() {
            return Err(bad(
                format!("{} parameters in group {i}", params.len()),
                format!("{}: {:?}", own.params.len(), own.params),
            ));
        }
        for (stored, name) in params.iter().zip(&own.params) {
            match stored {
                // PyTorch numbers parameters in the optimizer's order.
                Value::Int(number) => drop(keys.insert(name.clone(), number.to_string())),
                Value::Text(stored) if own.params.contains(stored) => drop(keys.insert(stored.clone(), stored.clone())),
                other => return Err(bad(format!("parameter {other} in group {i}"), format!("{:?}", own.params))),
            }
        }
    }
    Ok(keys)
}

/// A parameter group with the settings that PyTorch stored. The algorithm is that of the optimizer: PyTorch does not store it.
fn group_from_torch(stored: &Value, own: &ParamGroup, optimizer: &ShardedOptimizer) -> Result<ParamGroup> {
    let number =
        |name: &str| -> Result<Option<f64>> { field(stored, name).map(|value| value.read::<f64>()).transpose() };
    let mut settings = own.algorithm.settings()?;
    for (name, setting) in &mut settings {
        let found = field(stored, name)
            .ok_or_else(|| bad(format!("a group without {name}"), format!("settings of {}", own.algorithm.name())))?;
        *setting = found.read::<Json>()?;
    }
    let algorithm = own.algorithm.with_settings(settings)?;
    let is_decoupled = field(stored, "decoupled_weight_decay");
    let decoupled_here = algorithm.name() == AdamW::NAME;
    if let Some(Value::Bool(stored)) = is_decoupled
        && *stored != decoupled_here
        && [Adam::NAME, AdamW::NAME].contains(&algorithm.name())
    {
        return Err(bad(format!("decoupled_weight_decay = {stored}"), format!("that of {}", own.algorithm.name())));
    }
    // With a schedule, the base rate that the schedule multiplies; `lr` is the scheduled one.
    let base = match optimizer.schedule() {
        crate::optim::Schedule::Constant => None,
        _ => number("initial_lr")?,
    };
    let lr = match base {
        Some(base) => base,
        None => number("lr")?.ok_or_else(|| bad("a group without lr", "a learning rate"))?,
    };
    let maximize = matches!(field(stored, "maximize"), Some(Value::Bool(true)));
    Ok(ParamGroup { algorithm, lr, maximize, master: own.master, state_dtype: own.state_dtype })
}
