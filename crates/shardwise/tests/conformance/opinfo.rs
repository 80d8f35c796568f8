//! Calls of PyTorch's operator database in PyTorch's call form: results and gradients, whatever the placements.
//!
//! `opinfo_not_served.txt` lists the operators that are known to fail, with the reason. The test fails if another one fails,
//! and if a listed one passes, so that the list stays what it says.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Deserialize;
use serde_json::Value;
use shardwise::prelude::*;
use shardwise_test_suites::torch_calls::{self, CallOutput, RecordedCall, TensorArgument, TorchCall, number_of};
use shardwise_test_suites::values;
use shardwise_test_suites::vectors::{RecordedPlacement, RecordedTensor, close, directory};

#[derive(Clone, Deserialize)]
struct Case {
    id: String,
    op: String,
    variant: String,
    tier: usize,
    args: Vec<Value>,
    kwargs: Value,
    inputs: Vec<RecordedTensor>,
    mesh_shape: Vec<usize>,
    placements: Vec<Vec<RecordedPlacement>>,
    expected: Vec<Value>,
    grad_output: Option<Vec<Option<RecordedTensor>>>,
    expected_grads: Option<Vec<Option<RecordedTensor>>>,
    rtol: f64,
    atol: f64,
    /// Placements in place of the recorded ones.
    #[serde(skip)]
    drawn: Option<Vec<Vec<Placement>>>,
}

/// Why a case failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Failure {
    /// The operator is not in the table of calls.
    Missing,
    /// The call returned an error, or panicked.
    CallError,
    WrongForward,
    WrongGradient,
}

/// Runs all cases, prints what failed, and compares it with the list of operators that are not served.
pub(crate) fn run() {
    let one = std::env::var("SHARDWISE_OPINFO_OP").ok();
    let cases = read_cases(one.as_deref());
    let mut failures = check_all(&cases);
    failures.sort_by(|a, b| (a.1, &a.0.id).cmp(&(b.1, &b.0.id)));
    report(&cases, &failures);
    if one.is_none() {
        compare_with_list(&failures);
    }
}

/// Runs all cases with placements that are drawn at random instead of the recorded ones: the results are the same.
pub(crate) fn run_in_random_placements() {
    let rounds = std::env::var("SHARDWISE_OPINFO_PLACEMENTS").map_or(1, |n| n.parse().expect("a number of placements"));
    let recorded = read_cases(std::env::var("SHARDWISE_OPINFO_OP").ok().as_deref());
    for seed in 0..rounds {
        let cases: Vec<Arc<Case>> = recorded.iter().map(|case| Arc::new(case.in_random_placements(seed))).collect();
        let failures = check_all(&cases);
        println!("seed {seed}: {}/{} cases in random placements", cases.len() - failures.len(), cases.len());
        let listed = not_served();
        let unexpected: Vec<String> = failures
            .iter()
            .filter(|(case, ..)| !listed.contains(case.op.as_str()))
            .map(|(case, failure, message)| {
                let message: String = message.chars().take(400).collect();
                format!("{} on {:?} as {:?}: {failure:?}: {message}", case.id, case.mesh_shape, case.drawn)
            })
            .collect();
        assert!(unexpected.is_empty(), "seed {seed}:\n{}", unexpected.join("\n"));
    }
}

fn read_cases(only: Option<&str>) -> Vec<Arc<Case>> {
    let path = directory().join("opinfo.jsonl");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()));
    let mut cases: Vec<Arc<Case>> =
        text.lines().map(|line| Arc::new(serde_json::from_str(line).expect("a case per line"))).collect();
    cases.retain(|case| only.is_none_or(|names| names.split(',').any(|name| name == case.op)));
    assert!(!cases.is_empty(), "no cases in {}", path.display());
    cases
}

impl Case {
    /// The same case with other placements: even, strided and ragged shards, which may leave ranks empty, and partial sums.
    fn in_random_placements(&self, seed: u64) -> Case {
        let digest = self.id.bytes().fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let mut rng = StdRng::seed_from_u64(digest);
        let mesh = Mesh::new(self.mesh_shape.clone()).expect("the mesh of a case");
        let mut place = |input: &RecordedTensor| {
            let mut placements = vec![Replicate; self.mesh_shape.len()];
            for axis in 0..placements.len() {
                let choice = rng.random_range(0..if input.shape.is_empty() { 2 } else { 8 });
                let dim = rng.random_range(0..input.shape.len().max(1));
                placements[axis] = match choice {
                    // A sum of bools is not a bool.
                    0 if input.dtype != "bool" => Partial(ReduceOp::Sum),
                    0 | 1 => Replicate,
                    2 => Placement::StridedShard { dim: dim as isize, split_factor: rng.random_range(1..4) },
                    3 => values::ragged(&mesh, &input.shape, &placements, dim, axis, rng.random_range(0..99)),
                    _ => Shard(dim as isize),
                };
            }
            placements
        };
        let drawn = self.inputs.iter().map(&mut place).collect();
        Case { drawn: Some(drawn), ..self.clone() }
    }
}

/// Runs cases, and returns the failing ones.
fn check_all(cases: &[Arc<Case>]) -> Vec<(Arc<Case>, Failure, String)> {
    // Cases on more ranks than there are cores wait for each other: two at a time keep the machine busy.
    let queue = Mutex::new(cases.iter());
    let failures: Mutex<Vec<(Arc<Case>, Failure, String)>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(case) = queue.lock().unwrap().next() else { break };
                    if let Err((failure, message)) = check(case) {
                        failures.lock().unwrap().push((Arc::clone(case), failure, message));
                    }
                }
            });
        }
    });
    failures.into_inner().unwrap()
}

fn report(cases: &[Arc<Case>], failures: &[(Arc<Case>, Failure, String)]) {
    let mut out = std::io::stdout().lock();
    let tier = |n: usize| {
        let all = cases.iter().filter(|case| case.tier == n).count();
        let failed = failures.iter().filter(|(case, ..)| case.tier == n).count();
        format!("tier {n} {}/{all}", all - failed)
    };
    let (all, failed) = (cases.len(), failures.len());
    writeln!(out, "conformance opinfo: {}/{all} ({}, {}, {})", all - failed, tier(1), tier(2), tier(3)).unwrap();
    let gradients = cases.iter().filter(|case| case.expected_grads.is_some()).count();
    let no_forward = failures.iter().filter(|(_, failure, _)| *failure != Failure::WrongGradient).count();
    let no_gradient = failures.iter().filter(|(case, ..)| case.expected_grads.is_some()).count();
    writeln!(out, "  forward {}/{all}, gradients {}/{gradients}", all - no_forward, gradients - no_gradient).unwrap();
    let mut missing: BTreeMap<&str, usize> = BTreeMap::new();
    for (case, failure, message) in failures {
        match failure {
            Failure::Missing => *missing.entry(&case.op).or_default() += 1,
            _ => {
                let kind = match failure {
                    Failure::CallError => "error",
                    Failure::WrongForward => "wrong forward",
                    _ => "wrong gradient",
                };
                let message: String = message.chars().take(600).collect();
                writeln!(out, "  {kind}: {}: {message}", case.id).unwrap();
            }
        }
    }
    if !missing.is_empty() {
        let names: Vec<String> = missing.iter().map(|(name, count)| format!("{name} ({count})")).collect();
        writeln!(out, "  missing operators, with cases: {}", names.join(", ")).unwrap();
    }
}

/// Fails unless exactly the listed operators have failing cases. Vectors of another directory may hold fewer cases of an
/// operator, so there only operators that are not listed count.
fn compare_with_list(failures: &[(Arc<Case>, Failure, String)]) {
    let listed = not_served();
    let failed: BTreeSet<&str> = failures.iter().map(|(case, ..)| case.op.as_str()).collect();
    let unlisted: Vec<&&str> = failed.difference(&listed).collect();
    assert!(unlisted.is_empty(), "operators that fail and are not in opinfo_not_served.txt: {unlisted:?}");
    if std::env::var_os("SHARDWISE_CONFORMANCE_DIR").is_none() {
        let served: Vec<&&str> = listed.difference(&failed).collect();
        assert!(served.is_empty(), "operators in opinfo_not_served.txt that pass, or have no cases: {served:?}");
    }
}

/// Operators that are listed as not served.
fn not_served() -> BTreeSet<&'static str> {
    include_str!("opinfo_not_served.txt")
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'))
        .filter_map(|line| line.split(':').next())
        .collect()
}

fn check(case: &Arc<Case>) -> std::result::Result<(), (Failure, String)> {
    let Some(call) = torch_calls::find(&case.op) else { return Err((Failure::Missing, String::new())) };
    let error = |e: String| (Failure::CallError, e);
    let program = Arc::clone(case);
    let ran = catch_unwind(AssertUnwindSafe(|| {
        let world = ThreadWorld::new(case.mesh_shape.iter().product()).map_err(|e| error(e.to_string()))?;
        let outcomes = world.run(move |world| execute(&program, call, &world)).map_err(|e| error(e.to_string()))?;
        outcomes.into_iter().collect::<std::result::Result<Vec<()>, _>>().map(drop)
    }));
    ran.unwrap_or_else(|_| Err(error("panicked".into())))
}

type Outcome = std::result::Result<(), (Failure, String)>;

/// Runs the call and compares what it returns. A difference is a value, not an error of the rank: every rank finds it.
fn execute(case: &Case, call: &TorchCall, world: &World) -> Result<Outcome> {
    let mesh = world.mesh(case.mesh_shape.clone())?;
    let whole = || vec![Replicate; case.mesh_shape.len()];
    let wants = |i: usize| case.expected_grads.as_ref().is_some_and(|all| all[i].is_some());
    let mut tensors = Vec::new();
    let recorded = || case.placements.iter().map(|all| all.iter().map(RecordedPlacement::to_placement).collect());
    let placements: Vec<Vec<Placement>> = case.drawn.clone().unwrap_or_else(|| recorded().collect());
    for (i, (input, placements)) in case.inputs.iter().zip(placements).enumerate() {
        let tensor = DTensor::distribute_tensor(&input.to_tensor(), &mesh, placements, None)?;
        let tensor = if wants(i) { tensor.requires_grad() } else { tensor };
        tensors.push(TensorArgument { tensor, dtype: input.dtype.clone() });
    }
    let recorded = RecordedCall {
        positional: &case.args,
        keyword: &case.kwargs,
        tensors: &tensors,
        mesh: &mesh,
        variant: &case.variant,
    };
    let outputs = call.run(&recorded)?;
    if outputs.len() != case.expected.len() {
        let message = format!("{} outputs, expected {}", outputs.len(), case.expected.len());
        return Ok(Err((Failure::WrongForward, message)));
    }
    for (i, (output, expected)) in outputs.iter().zip(&case.expected).enumerate() {
        if let Err(e) = compare_output(output, expected, case)? {
            return Ok(Err((Failure::WrongForward, format!("output {i}: {e}"))));
        }
    }
    let (Some(expected), Some(cotangents)) = (&case.expected_grads, &case.grad_output) else { return Ok(Ok(())) };
    // The sum over all outputs of output * cotangent; an output that depends on no leaf adds nothing.
    let mut seeded = Vec::new();
    for (output, cotangent) in outputs.iter().zip(cotangents) {
        let (CallOutput::Tensor(output), Some(cotangent)) = (output, cotangent) else { continue };
        if output.has_gradient() {
            let cotangent = DTensor::distribute_tensor(&cotangent.to_tensor(), &mesh, whole(), None)?;
            seeded.push((output, cotangent));
        }
    }
    let gradients = match seeded.as_slice() {
        [] => None,
        [(output, cotangent)] => Some(output.backward_from(cotangent)?),
        several => {
            let term =
                |(output, cotangent): &(&DTensor, DTensor)| output.mul(cotangent)?.sum_all()?.to_dtype(DType::F64);
            let terms = several.iter().map(term).collect::<Result<Vec<_>>>()?;
            let sum = terms[1..].iter().try_fold(terms[0].clone(), |sum, next| sum.add(next))?;
            Some(sum.backward()?)
        }
    };
    for (i, expected) in expected.iter().enumerate() {
        let Some(expected) = expected else { continue };
        let expected = expected.to_tensor();
        let gradient = match gradients.as_ref().map(|all| all.get(&tensors[i].tensor)) {
            Some(Ok(gradient)) => gradient.full_tensor()?,
            _ => expected.zeros_like()?,
        };
        if let Err(e) = close(&gradient, &expected, case.rtol, case.atol) {
            return Ok(Err((Failure::WrongGradient, format!("gradient of input {i}: {e}"))));
        }
    }
    Ok(Ok(()))
}

/// Compares an output with an encoded one: a tensor, a number, a bool, or null for an output that is not determined.
fn compare_output(output: &CallOutput, expected: &Value, case: &Case) -> Result<Result<()>> {
    let differs = |found: String| Ok(Err(Error::other(format!("got {found}, expected {expected}"))));
    if expected.is_null() {
        return Ok(Ok(()));
    }
    match output {
        CallOutput::Tensor(tensor) => {
            let got = tensor.full_tensor()?;
            match RecordedTensor::deserialize(expected) {
                Ok(expected) => Ok(same(&got, &expected.to_tensor(), case)),
                Err(_) => differs(format!("a tensor {:?}", got.dims())),
            }
        }
        CallOutput::Number(number) => match number_of(expected).map(|n| n.to_f64()) {
            Some(e) if *number == e || (number - e).abs() <= case.atol + case.rtol * e.abs() => Ok(Ok(())),
            _ => differs(number.to_string()),
        },
        CallOutput::Bool(truth) => match expected.as_bool() == Some(*truth) {
            true => Ok(Ok(())),
            false => differs(truth.to_string()),
        },
    }
}

/// Integers exactly, beyond 2^53 too; real numbers within the tolerance.
fn same(got: &Tensor, expected: &Tensor, case: &Case) -> Result<()> {
    close(got, expected, case.rtol, case.atol)?;
    if got.dtype() == DType::I64 && got.flatten_all()?.to_vec1::<i64>()? != expected.flatten_all()?.to_vec1::<i64>()? {
        return Err(Error::other(format!("got {got}, expected {expected}")));
    }
    Ok(())
}
