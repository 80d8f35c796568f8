//! Optimizer steps and gradient clipping, with parameters and gradients in layouts that differ from case to case.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use serde::Deserialize;
use serde_json::Value;
use shardwise::optim::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Algorithm, Asgd, NAdam, ParamGroup, RAdam, RmsProp, Sgd, ShardedOptimizer,
    clip_grad_norm, clip_grad_value,
};
use shardwise::prelude::*;
use shardwise::{Gradients, Param};
use shardwise_test_suites::vectors::{RecordedTensor, close};

#[derive(Deserialize)]
struct Case {
    id: String,
    kind: String,
    optimizer: Option<String>,
    hyper: Option<Value>,
    groups: Option<Vec<GroupForm>>,
    #[serde(default)]
    params: Vec<RecordedTensor>,
    #[serde(default)]
    steps: Vec<Step>,
    final_state: Option<Vec<BTreeMap<String, RecordedTensor>>>,
    #[serde(default)]
    grads: Vec<RecordedTensor>,
    max_norm: Option<f64>,
    norm_type: Option<Value>,
    total_norm: Option<RecordedTensor>,
    clip_value: Option<f64>,
    #[serde(default)]
    clipped: Vec<RecordedTensor>,
}

#[derive(Deserialize)]
struct GroupForm {
    params: Vec<usize>,
    hyper: Value,
}

#[derive(Deserialize)]
struct Step {
    grads: Vec<RecordedTensor>,
    params: Vec<RecordedTensor>,
}

pub(crate) fn check(value: &Value) -> std::result::Result<(), String> {
    let case = Arc::new(Case::deserialize(value).map_err(|e| e.to_string())?);
    // two ranks, four in a row or four in a square
    for axes in [vec![2], vec![4], vec![2, 2]] {
        let (case, shape) = (Arc::clone(&case), axes.clone());
        let world = ThreadWorld::new(axes.iter().product()).map_err(|e| e.to_string())?;
        let run = move |world: World| run(&case, &world.mesh(shape.clone())?);
        world.run(run).map_err(|e| format!("on {axes:?}: {e}"))?;
    }
    Ok(())
}

fn run(case: &Case, mesh: &DeviceMesh) -> Result<()> {
    match case.kind.as_str() {
        "optimizer" | "optimizer_groups" => optimize(case, mesh),
        "clip_grad_norm" | "clip_grad_value" => clip(case, mesh),
        other => Err(Error::other(format!("no kind {other}"))),
    }
}

/// Beyond the tolerance of the vectors.
fn near(got: &Tensor, expected: &RecordedTensor, what: impl FnOnce() -> String) -> Result<()> {
    let got = if got.dims().is_empty() { got.flatten_all()?.reshape(())? } else { got.clone() };
    close(&got, &expected.to_tensor(), 2e-5, 2e-6).map_err(|e| Error::other(format!("{}: {e}", what())))
}

fn optimize(case: &Case, mesh: &DeviceMesh) -> Result<()> {
    let params: Vec<Param> =
        (0..case.params.len()).map(|i| param(case, i, &case.params[i], mesh)).collect::<Result<_>>()?;
    let name = |i: usize| format!("p{i}");
    let all = (0..params.len()).collect::<Vec<_>>();
    let groups: Vec<(&[usize], &Value)> = match (&case.groups, &case.hyper) {
        (Some(groups), _) => groups.iter().map(|group| (group.params.as_slice(), &group.hyper)).collect(),
        (None, Some(hyper)) => vec![(&all, hyper)],
        (None, None) => return Err(Error::other("no hyperparameters")),
    };
    let kind = case.optimizer.as_deref().unwrap_or_default();
    let mut optimizer: Option<ShardedOptimizer> = None;
    for (members, hyper) in groups {
        let named = members.iter().map(|&i| (name(i), params[i].clone()));
        match &mut optimizer {
            Some(optimizer) => optimizer.add_param_group(named, group(kind, hyper)?)?,
            None => optimizer = Some(ShardedOptimizer::new(named, group(kind, hyper)?)?),
        }
    }
    let mut optimizer = optimizer.expect("at least one group");
    for (t, step) in case.steps.iter().enumerate() {
        optimizer.step(gradients(case, &params, &step.grads, mesh, t)?)?;
        for (i, expected) in step.params.iter().enumerate() {
            near(&params[i].get().full_tensor()?, expected, || format!("parameter {i} after step {t}"))?;
        }
    }
    let state = optimizer.state_dict()?;
    for (i, expected) in case.final_state.iter().flatten().enumerate() {
        let own = &state.params[&name(i)];
        let mut kinds: Vec<&String> = own.numbers.keys().chain(own.tensors.keys()).collect();
        kinds.sort();
        if !kinds.iter().eq(&expected.keys().collect::<Vec<_>>()) {
            return Err(Error::other(format!("state {kinds:?}, expected {:?}", expected.keys())));
        }
        for (kind, expected) in expected {
            let got = match own.numbers.get(kind) {
                Some(&number) => Tensor::new(number, &candle_core::Device::Cpu)?.to_dtype(DType::F32)?,
                None => {
                    assert_eq!(own.tensors[kind].layout(), &params[i].layout());
                    own.tensors[kind].full_tensor()?
                }
            };
            near(&got, expected, || format!("{kind} of parameter {i}"))?;
        }
    }
    Ok(())
}

fn clip(case: &Case, mesh: &DeviceMesh) -> Result<()> {
    let params: Vec<Param> =
        (0..case.grads.len()).map(|i| param(case, i, &case.grads[i], mesh)).collect::<Result<_>>()?;
    let given = gradients(case, &params, &case.grads, mesh, 0)?;
    let clipped = match case.clip_value {
        Some(value) => clip_grad_value(given, &params, value)?,
        None => {
            let norm_type = match case.norm_type.as_ref() {
                Some(Value::String(_)) => f64::INFINITY,
                Some(number) => number.as_f64().expect("a number"),
                None => 2.0,
            };
            let (clipped, norm) = clip_grad_norm(given, &params, case.max_norm.expect("a norm"), norm_type)?;
            let norm = Tensor::new(norm as f32, &candle_core::Device::Cpu)?;
            near(&norm, case.total_norm.as_ref().expect("a norm"), || "norm".into())?;
            clipped
        }
    };
    for (i, expected) in case.clipped.iter().enumerate() {
        near(&clipped.get(&params[i].get())?.full_tensor()?, expected, || format!("gradient {i}"))?;
    }
    Ok(())
}

/// The settings in the vectors; missing ones have their defaults.
fn group(kind: &str, hyper: &Value) -> Result<ParamGroup> {
    let number = |name: &str, default: f64| hyper[name].as_f64().unwrap_or(default);
    let flag = |name: &str| hyper[name].as_bool().unwrap_or(false);
    let betas = |default: (f64, f64)| match hyper["betas"].as_array() {
        Some(betas) => (betas[0].as_f64().expect("a number"), betas[1].as_f64().expect("a number")),
        None => default,
    };
    macro_rules! settings {
        ($Name:ident: $($field:ident),*; betas: [$($betas:ident)?]; flags: [$($flag:ident),*]) => {{
            let default = $Name::default();
            let settings = $Name {
                $($field: number(stringify!($field), default.$field),)*
                $($betas: betas(default.$betas),)?
                $($flag: flag(stringify!($flag)),)*
            };
            Algorithm::from(settings)
        }};
    }
    let algorithm = match kind {
        "sgd" => settings!(Sgd: momentum, dampening, weight_decay; betas: []; flags: [nesterov]),
        "adagrad" => {
            settings!(Adagrad: lr_decay, eps, weight_decay, initial_accumulator_value; betas: []; flags: [])
        }
        "adam" => settings!(Adam: eps, weight_decay; betas: [betas]; flags: [amsgrad]),
        "adamw" => settings!(AdamW: eps, weight_decay; betas: [betas]; flags: [amsgrad]),
        "rmsprop" => settings!(RmsProp: alpha, eps, momentum, weight_decay; betas: []; flags: [centered]),
        "adadelta" => settings!(Adadelta: rho, eps, weight_decay; betas: []; flags: []),
        "adamax" => settings!(Adamax: eps, weight_decay; betas: [betas]; flags: []),
        "nadam" => {
            settings!(NAdam: eps, weight_decay, momentum_decay; betas: [betas]; flags: [decoupled_weight_decay])
        }
        "radam" => settings!(RAdam: eps, weight_decay; betas: [betas]; flags: [decoupled_weight_decay]),
        "asgd" => settings!(Asgd: lambd, alpha, t0, weight_decay; betas: []; flags: []),
        other => return Err(Error::other(format!("no optimizer {other}"))),
    };
    let group = ParamGroup::new(algorithm);
    Ok(ParamGroup { lr: number("lr", group.lr), maximize: flag("maximize"), ..group })
}

/// A number that differs from case to case and input to input.
fn choice(case: &Case, i: usize, t: usize) -> usize {
    case.id.bytes().fold(i * 7 + t * 3, |h, b| (h * 31 + usize::from(b)) % 1_000_003)
}

/// Some placements for a tensor, partial sums among them if `partial`.
fn placements(shape: &[usize], mesh: &DeviceMesh, mut choice: usize, partial: bool) -> Vec<Placement> {
    let mut chosen = Vec::new();
    for (axis, &k) in mesh.shape().iter().enumerate() {
        let last = shape.len().saturating_sub(1);
        chosen.push(match choice % 5 {
            0 if partial => Partial(ReduceOp::Sum),
            1 if !shape.is_empty() => Shard(0),
            2 if !shape.is_empty() => Shard(last as isize),
            // the last rank gets most; only where no other axis shards the dimension
            3 if !shape.is_empty() && axis == 0 => {
                let mut sizes = vec![shape[0] / (2 * k); k];
                sizes[k - 1] = shape[0] - sizes[..k - 1].iter().sum::<usize>();
                Placement::ragged(0, sizes)
            }
            4 if partial => Partial(ReduceOp::Sum),
            _ => Replicate,
        });
        choice /= 5;
    }
    chosen
}

fn param(case: &Case, i: usize, value: &RecordedTensor, mesh: &DeviceMesh) -> Result<Param> {
    let placed = placements(&value.shape, mesh, choice(case, i, 99), false);
    Ok(Param::new(&DTensor::distribute_tensor(&value.to_tensor(), mesh, placed, None)?))
}

/// Gradients as a backward pass leaves them: in other layouts than the parameters, some as partial sums.
fn gradients(
    case: &Case,
    params: &[Param],
    values: &[RecordedTensor],
    mesh: &DeviceMesh,
    t: usize,
) -> Result<Gradients> {
    let mut all: Option<Gradients> = None;
    for (i, (param, value)) in params.iter().zip(values).enumerate() {
        let placed = placements(&value.shape, mesh, choice(case, i, t), true);
        let gradient = DTensor::distribute_tensor(&value.to_tensor(), mesh, placed, None)?;
        let one = param.get().backward_from(&gradient)?;
        all = Some(match all {
            Some(all) => all.accumulate(one)?,
            None => one,
        });
    }
    Ok(all.expect("at least one parameter"))
}
