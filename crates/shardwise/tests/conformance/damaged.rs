//! Calls of PyTorch's operator database with one argument damaged: a strange number, another shape, another type. Whatever a call
//! does with it, no rank panics and none waits until its deadline.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{DType, Tensor};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde::Deserialize;
use serde_json::{Value, json};
use shardwise::prelude::*;
use shardwise_test_suites::settings::env_or;
use shardwise_test_suites::torch_calls::{self, CallOutput, RecordedCall, TensorArgument, TorchCall};
use shardwise_test_suites::vectors::{RecordedTensor, directory};

#[derive(Deserialize)]
struct Case {
    id: String,
    op: String,
    variant: String,
    args: Vec<Value>,
    kwargs: Value,
    inputs: Vec<RecordedTensor>,
}

/// A call after the damage.
struct Call {
    text: String,
    args: Vec<Value>,
    kwargs: Value,
    variant: String,
    inputs: Vec<(Tensor, String, Placement)>,
}

/// Far longer than a call takes, also where other tests use the cores: only a hang reaches it.
const DEADLINE: Duration = Duration::from_secs(60);

/// Numbers at which sums, products and casts of sizes overflow, and small ones of either sign. None is a size that fits into the memory
/// of a large machine only.
const STRANGE: [i64; 12] = [-1, 0, 1, 2, 3, -2, 7, -9, 64, i64::MAX, i64::MIN, 1 << 62];

/// Damages every case `SHARDWISE_DAMAGED_CALLS` times.
pub(crate) fn run() {
    let rounds = env_or("SHARDWISE_DAMAGED_CALLS", 1u64);
    let first = env_or("SHARDWISE_SEED", 0u64);
    let path = directory().join("opinfo.jsonl");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()));
    let cases: Vec<Case> = text.lines().map(|line| serde_json::from_str(line).expect("a case per line")).collect();
    let queue = Mutex::new((first..first + rounds).flat_map(|seed| cases.iter().map(move |case| (seed, case))));
    let outcomes: Mutex<(usize, Vec<String>)> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some((seed, case)) = queue.lock().unwrap().next() else { break };
                    let Some(operator) = torch_calls::find(&case.op) else { continue };
                    let call = Arc::new(case.damaged(seed));
                    let outcome = attempt(&call, operator);
                    let mut outcomes = outcomes.lock().unwrap();
                    match outcome {
                        Ok(refused) => outcomes.0 += usize::from(refused),
                        Err(problem) => outcomes.1.push(format!("SHARDWISE_SEED={seed}: {}: {problem}", call.text)),
                    }
                }
            });
        }
    });
    let (refused, problems) = outcomes.into_inner().unwrap();
    println!("damaged calls: {} from seed {first}, {refused} refused", cases.len() * rounds as usize);
    assert!(problems.is_empty(), "{} calls went wrong:\n{}", problems.len(), problems.join("\n"));
    assert!(refused > 0, "no damage was noticed");
}

impl Case {
    /// The call with one argument or input changed.
    fn damaged(&self, seed: u64) -> Call {
        let digest = self.id.bytes().fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let mut rng = StdRng::seed_from_u64(digest);
        let (mut args, mut kwargs) = (self.args.clone(), self.kwargs.clone());
        let mut inputs: Vec<(Tensor, String, Placement)> =
            self.inputs.iter().map(|input| (input.to_tensor(), input.dtype.clone(), Replicate)).collect();
        let mut numbers: Vec<&mut Value> = Vec::new();
        args.iter_mut().for_each(|arg| collect_numbers(arg, &mut numbers));
        kwargs.as_object_mut().into_iter().flatten().for_each(|(_, arg)| collect_numbers(arg, &mut numbers));
        let damage = if !numbers.is_empty() && (inputs.is_empty() || rng.random_bool(0.5)) {
            let at = rng.random_range(0..numbers.len());
            let strange = match numbers[at].is_f64() && rng.random_bool(0.5) {
                true => json!({ "float": *["nan", "inf", "-inf"].choose(&mut rng).expect("some") }),
                false => json!(*STRANGE.choose(&mut rng).expect("some")),
            };
            let before = std::mem::replace(numbers[at], strange.clone());
            format!("{before} became {strange}")
        } else if inputs.is_empty() {
            String::from("nothing to damage")
        } else {
            let at = rng.random_range(0..inputs.len());
            let damage = damage_tensor(&mut rng, &mut inputs[at]);
            format!("input {at} {damage}")
        };
        for (tensor, _, placement) in &mut inputs {
            *placement = match tensor.rank() {
                0 => Replicate,
                ndim if rng.random_bool(0.7) => Shard(rng.random_range(0..ndim) as isize),
                _ => Replicate,
            };
        }
        let shapes: Vec<String> = inputs.iter().map(|(t, dtype, p)| format!("{dtype} {:?} {p}", t.dims())).collect();
        let text = format!("{} of {}: {damage}", self.id, shapes.join(", "));
        Call { text, args, kwargs, variant: self.variant.clone(), inputs }
    }
}

/// The numbers inside of an encoded argument, except references to inputs.
fn collect_numbers<'a>(argument: &'a mut Value, found: &mut Vec<&'a mut Value>) {
    match argument {
        Value::Number(_) => found.push(argument),
        Value::Array(all) => all.iter_mut().for_each(|one| collect_numbers(one, found)),
        Value::Object(map) if !map.contains_key("tensor") => {
            map.values_mut().for_each(|one| collect_numbers(one, found));
        }
        _ => {}
    }
}

/// Changes the shape or the type of an input, and says how.
fn damage_tensor(rng: &mut StdRng, (tensor, dtype, _): &mut (Tensor, String, Placement)) -> String {
    let shape = tensor.dims().to_vec();
    let other = match rng.random_range(0..5) {
        0 => tensor.unsqueeze(0),
        1 if !shape.is_empty() => {
            tensor.narrow(0, 0, shape[0].min(1)).and_then(|first| first.flatten(0, usize::from(shape.len() > 1)))
        }
        2 if !shape.is_empty() => {
            let dim = rng.random_range(0..shape.len());
            tensor.narrow(dim, 0, rng.random_range(0..=shape[dim])).and_then(|part| part.contiguous())
        }
        3 if !shape.is_empty() => Tensor::cat(&[&*tensor, &*tensor], rng.random_range(0..shape.len())),
        _ => {
            let (kind, name) = *[(DType::I64, "i64"), (DType::U8, "bool"), (DType::BF16, "bf16"), (DType::F32, "f32")]
                .choose(rng)
                .expect("some");
            *dtype = String::from(name);
            tensor.to_dtype(kind)
        }
    };
    if let Ok(other) = other {
        *tensor = other;
    }
    format!("was {shape:?}")
}

/// Runs a call on two ranks with its gradient: whether a rank refused it, or what went wrong.
fn attempt(call: &Arc<Call>, operator: &'static TorchCall) -> std::result::Result<bool, String> {
    let world = ThreadWorld::new(2).map_err(|e| e.to_string())?.deadline(DEADLINE).kernel_threads(1);
    let program = Arc::clone(call);
    match world.run(move |world| Ok(execute(&program, operator, &world).map_err(|e| e.to_string()))) {
        Ok(ranks) => match ranks.iter().find_map(|rank| rank.as_ref().err().filter(|e| is_defect(e))) {
            Some(problem) => Err(problem.clone()),
            None => Ok(ranks.iter().any(|rank| rank.is_err())),
        },
        Err(error) => Err(error.to_string()),
    }
}

/// Whether an error is one that no argument may cause.
fn is_defect(error: &str) -> bool {
    ["panicked", "deadline", "timed out"].iter().any(|word| error.contains(word))
}

fn execute(call: &Call, operator: &TorchCall, world: &World) -> Result<()> {
    let mesh = world.mesh([("a", 2)])?;
    let mut tensors = Vec::new();
    for (tensor, dtype, placement) in &call.inputs {
        let tensor = DTensor::distribute_tensor(tensor, &mesh, [placement.clone()], None)?;
        let tensor = if tensor.dtype().is_float() { tensor.requires_grad() } else { tensor };
        tensors.push(TensorArgument { tensor, dtype: dtype.clone() });
    }
    let recorded = RecordedCall {
        positional: &call.args,
        keyword: &call.kwargs,
        tensors: &tensors,
        mesh: &mesh,
        variant: &call.variant,
    };
    let mut outputs = operator.run(&recorded)?;
    outputs.retain(|output| matches!(output, CallOutput::Tensor(tensor) if tensor.has_gradient()));
    if let Some(CallOutput::Tensor(output)) = outputs.first() {
        let gradients = output.sum_all()?.backward()?;
        for argument in &tensors {
            if let Ok(gradient) = gradients.get(&argument.tensor) {
                gradient.full_tensor()?;
            }
        }
    }
    Ok(())
}
