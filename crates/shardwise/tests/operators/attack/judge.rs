//! Runs one call in one setting on its own world and compares what every rank returned with the expected result.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use candle_core::Tensor;
use serde_json::Value;
use shardwise::prelude::*;

use crate::attack::Call;
use crate::attack::draw::Setting;
use crate::attack::numbers::{Elements, cotangent, elements, positions, to_tensor};
use crate::attack::operators::{Attrs, Operator};
use crate::attack::oracle::{Answer, Expected, number};

/// Far longer than a call takes, also where other tests use the cores: only a hang reaches it.
const DEADLINE: Duration = Duration::from_secs(60);

/// What a rank found.
#[derive(Debug, Clone)]
enum Outcome {
    Refused { typed: bool, text: String },
    Done { outputs: Vec<Found>, gradients: Option<Vec<Option<Found>>> },
}

/// A full tensor. Only the first rank returns its elements; all return a checksum of them.
#[derive(Debug, Clone)]
struct Found {
    dtype: DType,
    shape: Vec<usize>,
    elements: Option<Elements>,
    digest: u64,
}

impl Found {
    fn new(tensor: &Tensor, first: bool) -> Result<Self> {
        let all = elements(tensor)?;
        let mut hasher = DefaultHasher::new();
        match &all {
            // NaN has many bits
            Elements::Real(all) => {
                all.iter().for_each(|x| if x.is_nan() { 1u64 } else { x.to_bits() }.hash(&mut hasher));
            }
            Elements::Whole(all) => all.hash(&mut hasher),
        }
        let (dtype, shape) = (tensor.dtype(), tensor.dims().to_vec());
        Ok(Found { dtype, shape, elements: first.then_some(all), digest: hasher.finish() })
    }

    fn same(&self, other: &Found) -> bool {
        (self.dtype, &self.shape, self.digest) == (other.dtype, &other.shape, other.digest)
    }
}

/// Runs a call in a setting and returns what is wrong with the outcome.
pub(crate) fn check(
    operator: &'static Operator,
    call: &Arc<Call>,
    setting: &Setting,
    expected: &Answer,
) -> Option<String> {
    let ranks: usize = setting.mesh.iter().product();
    let (program, placed) = (Arc::clone(call), setting.clone());
    let world = ThreadWorld::new(ranks).expect("a few ranks").deadline(DEADLINE).kernel_threads(1);
    let outcomes = match world.run(move |world| run(operator, &program, &placed, &world)) {
        Ok(outcomes) => outcomes,
        Err(error) if depends_on_data(&error) => {
            return match expected {
                Answer::Done { .. } => Some(format!("refused, but PyTorch does it: {error}")),
                _ => None,
            };
        }
        Err(error) => return Some(format!("failed: {error}")),
    };
    let first = &outcomes[0];
    if let Some(rank) = outcomes.iter().position(|o| !agree(first, o)) {
        return Some(format!("ranks differ: rank 0 has {}, rank {rank} has {}", brief(first), brief(&outcomes[rank])));
    }
    match (first, expected) {
        (_, Answer::Unsupported(_)) => None,
        (_, Answer::Broken(text)) => Some(format!("the oracle is broken: {text}")),
        (Outcome::Refused { typed: false, text }, _) => Some(format!("an error without a type: {text}")),
        (Outcome::Refused { .. }, Answer::Refused(_)) => None,
        (Outcome::Refused { text, .. }, Answer::Done { .. }) => Some(format!("refused, but PyTorch does it: {text}")),
        (Outcome::Done { .. }, Answer::Refused(text)) => Some(format!("accepted, but PyTorch refuses it: {text}")),
        (Outcome::Done { outputs, gradients }, Answer::Done { outputs: wanted, gradients: slopes }) => {
            if outputs.len() != wanted.len() {
                return Some(format!("{} outputs, expected {}", outputs.len(), wanted.len()));
            }
            let sums = |p: &Placement| matches!(p, Partial(ReduceOp::Sum | ReduceOp::Avg));
            let sums = ranks > 1 && setting.placements.iter().flatten().any(sums);
            for (i, (found, wanted)) in outputs.iter().zip(wanted).enumerate() {
                // Of 0 and -0 a reduction may give either.
                let accuracy = Accuracy { signed_zeros: ranks == 1, sums };
                if let Some(problem) = differs(found, wanted, call, call.seed + i as u64, accuracy) {
                    return Some(format!("output {i}: {problem}"));
                }
            }
            match (gradients, slopes) {
                (Some(found), Some(wanted)) => compare_gradients(found, wanted, call, sums),
                (None, Some(_)) => Some("no gradient, but PyTorch has one".to_string()),
                _ => None,
            }
        }
    }
}

/// How a result is compared.
#[derive(Clone, Copy)]
struct Accuracy {
    /// Whether 0 and -0 are different.
    signed_zeros: bool,
    /// Whether operands are partial sums, whose terms are larger than their sum.
    sums: bool,
}

fn compare_gradients(found: &[Option<Found>], wanted: &[Option<Expected>], call: &Call, sums: bool) -> Option<String> {
    let accuracy = Accuracy { signed_zeros: false, sums };
    for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let problem = match (found, wanted) {
            (Some(found), Some(wanted)) => differs(found, wanted, call, call.seed + 100 + i as u64, accuracy),
            (None, Some(wanted)) if wanted.values.iter().any(|v| number(v) != 0.0) => Some("is missing".to_string()),
            _ => None,
        };
        if let Some(problem) = problem {
            return Some(format!("gradient of input {i}: {problem}"));
        }
    }
    None
}

/// The program of a rank.
fn run(operator: &Operator, call: &Call, setting: &Setting, world: &World) -> Result<Outcome> {
    let axes = setting.mesh.iter().zip(["a", "b"]).map(|(&n, name)| (name, n)).collect::<Vec<_>>();
    let mesh = world.mesh(axes)?;
    let mut inputs = Vec::new();
    for (input, placements) in call.inputs.iter().zip(&setting.placements) {
        let layout = Layout::new(mesh.mesh(), input.shape.as_slice(), placements.clone())?;
        let local = input.local(&layout, world.rank())?;
        let tensor = DTensor::from_local_with_shape(&local, &mesh, placements.clone(), input.shape.as_slice())?;
        inputs.push(if call.gradients && input.dtype.is_float() { tensor.requires_grad() } else { tensor });
    }
    let made =
        (operator.apply)(&inputs, &Attrs(&call.attrs)).and_then(|outputs| finish(call, &inputs, &outputs, world));
    let outcome = match made {
        Ok(outcome) => outcome,
        // Only ranks that hold the element know of it: the error ends the program, as it does for whoever passes it on.
        Err(error) if depends_on_data(&error) => return Err(error),
        // Errors from other ranks count too; the call site is not compared.
        Err(error) => Outcome::Refused {
            typed: matches!(error, Error::Invalid(_) | Error::Rejected { .. } | Error::OnRank { .. }),
            text: error.to_string(),
        },
    };
    // An error leaves the world as it was.
    world.barrier()?;
    Ok(outcome)
}

fn finish(call: &Call, inputs: &[DTensor], outputs: &[DTensor], world: &World) -> Result<Outcome> {
    let first = world.rank() == 0;
    let whole = |t: &DTensor| Found::new(&t.full_tensor()?, first);
    let found = outputs.iter().map(whole).collect::<Result<Vec<_>>>()?;
    let mut loss: Option<DTensor> = None;
    let taken: Vec<(usize, &DTensor)> = outputs.iter().enumerate().filter(|(_, o)| o.has_gradient()).collect();
    if taken.is_empty() {
        return Ok(Outcome::Done { outputs: found, gradients: None });
    }
    let weight = |i: usize, output: &DTensor| {
        let values = (0..output.elem_count()).map(|k| cotangent(call.seed, i, k)).collect();
        let tensor = to_tensor(&Elements::Real(values), output.shape(), output.dtype())?;
        let whole = vec![Replicate; output.placements().len()];
        DTensor::distribute_tensor(&tensor, output.device_mesh(), whole, None)
    };
    let gradients = if let [(i, output)] = taken[..] {
        output.backward_from(&weight(i, output)?)?
    } else {
        for (i, output) in taken {
            let part = output.mul(&weight(i, output)?)?.sum_all()?;
            loss = Some(match loss {
                Some(so_far) => so_far.add(&part)?,
                None => part,
            });
        }
        loss.expect("some outputs").backward()?
    };
    let slopes = inputs.iter().map(|leaf| gradients.get(leaf).ok().map(&whole).transpose());
    let slopes = slopes.collect::<Result<Vec<_>>>()?;
    Ok(Outcome::Done { outputs: found, gradients: Some(slopes) })
}

/// Whether an error is about the value of an element, which the rank that holds it finds.
fn depends_on_data(error: &Error) -> bool {
    let text = error.to_string();
    ["invalid index", "invalid class index", "invalid divisor"].iter().any(|kind| text.contains(kind))
}

/// Whether two ranks came to the same result.
fn agree(a: &Outcome, b: &Outcome) -> bool {
    match (a, b) {
        (Outcome::Refused { text: a, .. }, Outcome::Refused { text: b, .. }) => a == b,
        (Outcome::Done { outputs: a, gradients: g }, Outcome::Done { outputs: b, gradients: h }) => {
            let all = |a: &[Found], b: &[Found]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.same(b));
            let slopes = |g: &Option<Vec<Option<Found>>>| g.iter().flatten().flatten().cloned().collect::<Vec<_>>();
            all(a, b) && all(&slopes(g), &slopes(h))
        }
        _ => false,
    }
}

fn brief(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Refused { text, .. } => format!("the error `{text}`"),
        Outcome::Done { outputs, .. } => {
            format!("{:?}", outputs.iter().map(|o| (o.dtype, &o.shape, o.digest)).collect::<Vec<_>>())
        }
    }
}

/// What is wrong with a tensor, if anything is.
fn differs(found: &Found, wanted: &Expected, call: &Call, seed: u64, accuracy: Accuracy) -> Option<String> {
    if found.dtype.as_str() != wanted.dtype || found.shape != wanted.shape {
        let (dtype, shape) = (found.dtype.as_str(), &found.shape);
        return Some(format!("{dtype} {shape:?}, expected {} {:?}", wanted.dtype, wanted.shape));
    }
    let all = found.elements.as_ref().expect("the first rank's");
    let n: usize = found.shape.iter().product();
    let at = positions(n, call.samples, seed);
    match all {
        Elements::Whole(all) => {
            for (&i, value) in at.iter().zip(&wanted.values) {
                if Some(all[i]) != value.as_i64() {
                    return Some(format!("{} at {i}, expected {value}", all[i]));
                }
            }
            let sum = all.iter().fold(0u64, |sum, &x| sum.wrapping_add(x as u64));
            match wanted.total.as_ref().and_then(Value::as_u64) {
                Some(total) if total != sum => Some(format!("elements add up to {sum}, expected {total} modulo 2^64")),
                _ => None,
            }
        }
        Elements::Real(all) => {
            let partial = wanted.partial.as_ref().filter(|_| accuracy.sums);
            let distances = partial.or(wanted.distances.as_ref()).expect("floating-point values have distances");
            for (k, &i) in at.iter().enumerate() {
                let (value, distance) = (number(&wanted.values[k]), number(&distances[k]));
                let own = wanted.own.get(&k.to_string()).map(number);
                let exact = accuracy.signed_zeros && value == 0.0 && distance == 0.0;
                if !near(all[i], value, distance, exact) && !own.is_some_and(|own| near(all[i], own, 0.0, false)) {
                    return Some(format!("{:?} at {i}, expected {value:?} up to {distance:e}", all[i]));
                }
            }
            let total = wanted.total.as_ref().and_then(Value::as_array)?;
            let distance = total.get(3).filter(|_| accuracy.sums).unwrap_or(&total[1]);
            let (sum, distance) = (number(&total[0]), number(distance));
            let infinite = all.iter().filter(|x| !x.is_finite()).count() as u64;
            if infinite == 0 && total[2].as_u64() == Some(0) {
                let found: f64 = all.iter().sum();
                // The sums themselves are rounded on either side.
                let slack = all.iter().map(|x| x.abs()).sum::<f64>() * f64::EPSILON * (64 + n) as f64;
                if (found - sum).abs() > distance + slack {
                    return Some(format!("elements add up to {found:e}, expected {sum:e} up to {distance:e}"));
                }
            } else if infinite > total[2].as_u64().unwrap_or(0) {
                return Some(format!("{infinite} elements are not finite, expected {}", total[2]));
            }
            None
        }
    }
}

fn near(found: f64, value: f64, distance: f64, signed_zero: bool) -> bool {
    if distance.is_infinite() {
        return true;
    }
    if found.is_nan() || value.is_nan() {
        return found.is_nan() && value.is_nan();
    }
    if signed_zero && found == 0.0 && found.is_sign_negative() != value.is_sign_negative() {
        return false;
    }
    found == value || (found - value).abs() <= distance
}
