//! Combinations of placements for which an operator communicates although it need not: the results that ranks compute from
//! their local shards are together the full result in some placement.

use std::collections::BTreeMap;
use std::fmt;

use candle_core::{DType, Device, Tensor};
use shardwise::ops::{OpEntry, SampleInput, ops};
use shardwise::prelude::*;
use shardwise_test_suites::values;

/// An operator, the placements of its inputs, and the placements that its outputs could have.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Combination {
    op: &'static str,
    inputs: Vec<String>,
    outputs: Vec<String>,
}

impl fmt::Debug for Combination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} -> {}", self.op, self.inputs.join(", "), self.outputs.join(", "))
    }
}

/// Why no rule offers a combination: operators, placements of which an input has one (none listed: any), and the reason.
type Reason = (&'static [&'static str], &'static [&'static str], &'static str);

const EXTREMES: &[&str] = &["P(max)", "P(min)"];

const REASONS: &[Reason] = &[
    (
        &[
            "add",
            "sub",
            "linear",
            "addmm",
            "baddbmm",
            "addcmul",
            "addcdiv",
            "index_add",
            "index_put",
            "scatter_add",
            "lerp",
        ],
        EXTREMES,
        "integers may wrap when something is added to an extreme, and unlike infinities give NaN",
    ),
    (&["neg", "mul_scalar"], EXTREMES, "integers may wrap"),
    (&["pow_scalar"], EXTREMES, "a power rises everywhere only with an odd exponent, and integers may wrap"),
    (&["ge", "gt", "le", "lt"], EXTREMES, "NaN wins as an extreme, and loses every comparison"),
    (&["softsign"], EXTREMES, "an infinite operand, which stands for none, gives NaN"),
    (&["sign"], EXTREMES, "NaN wins as an extreme, and its sign is 0"),
    (&["kl_div"], EXTREMES, "it rises or falls with its input by the sign of the target, which no rule knows"),
    (&["signbit"], EXTREMES, "which of two zeros is the larger is open"),
    (&["dropout"], EXTREMES, "a product does not know that one factor is never negative"),
    (&["diagonal"], EXTREMES, "it is computed by a sum, which does not commute with extremes"),
    (&["mean", "div_scalar"], &["P(sum)"], "integers would be rounded before they are reduced"),
    (&["floor", "ceil", "round", "trunc", "frac"], &[], "nobody rounds integers"),
    (&["isnan", "isinf", "isfinite", "nan_to_num", "isposinf", "isneginf"], &[], "by chance: all samples are finite"),
    (&["bucketize"], &["P(sum)", "P(avg)", "P(max)", "P(min)"], "by chance: all boundaries of the sample are zero"),
    (&["embedding_bag"], &["S(1)"], "not the operator communicates but the sample, which flattens the ids"),
    (&["cross_entropy", "nll_loss"], &["S(0)", "S(2)"], "by chance: all ranks have as many targets that count"),
    (&["nll_loss"], &[], "the mean divides by a number of targets that may be zero"),
    (&["clamp_tensor"], EXTREMES, "bounds that are extremes: nobody has them"),
    (&["cumsum"], &["P(sum)", "P(avg)"], "integers are widened before they are added up"),
    (
        &[
            "cholesky_solve",
            "linalg_ldl_solve",
            "linalg_lstsq",
            "linalg_lu_solve",
            "linalg_solve",
            "linalg_solve_ex",
            "linalg_solve_triangular",
        ],
        &["P(sum)", "P(avg)"],
        "right-hand sides are reduced before: a solution of each term would be rounded at the condition of the matrix",
    ),
    (&["linalg_matrix_rank"], &[], "by chance: all samples have full rank"),
    (&["digamma"], &["P(min)"], "it rises only between its poles; by chance the samples are above all of them"),
    (&["special_i1"], EXTREMES, "an infinite operand, which stands for none, gives NaN"),
    (
        &[
            "special_modified_bessel_k0",
            "special_modified_bessel_k1",
            "special_scaled_modified_bessel_k0",
            "special_scaled_modified_bessel_k1",
        ],
        &["P(min)"],
        "they fall where they are defined, and are NaN below: the largest of their values is not NaN if one is",
    ),
    (&["rsqrt"], &["P(min)"], "which of two zeros is the smaller is open, and their reciprocals are far apart"),
    (
        &["masked_select"],
        &["P(sum)", "P(avg)", "P(max)", "P(min)"],
        "masks are rarely applied to partial tensors, which are reduced",
    ),
    (&["masked_select"], &["S(0)"], "not elements are sent, but how many of them every rank picks"),
    (
        &["acos", "acosh", "atanh", "angle"],
        EXTREMES,
        "NaN wins as an extreme, and arguments outside of the domain give it",
    ),
    (&["deg2rad", "rad2deg"], &["P(sum)", "P(avg)"], "integers would be rounded before they are reduced"),
    (&["fmax", "fmin"], &[], "NaN wins as an extreme, and loses here"),
    (&["clamp_min", "clamp_max"], EXTREMES, "bounds that are extremes: nobody has them"),
    (&["copysign", "heaviside"], &[], "which of two zeros is the larger is open"),
    (&["xlogy"], &[], "it rises or falls by the sign of the other operand, which no rule knows"),
    (&["logaddexp", "logaddexp2"], EXTREMES, "an infinite operand, which stands for none, may give NaN"),
    (&["nextafter"], &[], "by chance: neighbours differ by less than what is compared"),
    (&["frexp_exponent"], &[], "by chance: the samples have few exponents"),
    (
        &["gcd", "lcm", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift"],
        &[],
        "nobody has partial sums or extremes of bits",
    ),
    (&["bucketize"], &["S(0)"], "boundaries are few: they are gathered rather than the counts reduced"),
];

pub(crate) fn reason(combination: &Combination) -> Option<&'static str> {
    let fits = |(names, placements, _): &&Reason| {
        let has = |p: &String| placements.contains(&p.as_str());
        names.contains(&combination.op) && (placements.is_empty() || combination.inputs.iter().any(has))
    };
    REASONS.iter().find(fits).map(|(_, _, reason)| *reason)
}

/// The combinations by reason, as one line of operators each.
pub(crate) fn grouped(found: &[Combination]) -> BTreeMap<&'static str, String> {
    let mut groups: BTreeMap<&'static str, Vec<&'static str>> = BTreeMap::new();
    for combination in found {
        groups.entry(reason(combination).unwrap_or("no reason")).or_default().push(combination.op);
    }
    let text = |mut names: Vec<&'static str>| {
        let count = names.len();
        names.dedup();
        format!("{} ({count} combinations)", names.join(", "))
    };
    groups.into_iter().map(|(reason, names)| (reason, text(names))).collect()
}

/// The same call on larger sizes, which two ranks share evenly; `None` for one without elements.
fn enlarged(samples: &[SampleInput]) -> Option<Vec<SampleInput>> {
    let larger = |s: &SampleInput| {
        let shape = s.shape.iter().map(|&n| if n == 1 { 1 } else { 4 * n }).collect();
        SampleInput { shape, dtype: s.dtype, below: s.below.map(|n| 4 * n) }
    };
    // A single input does not broadcast: along a dimension of one element there is nothing to do.
    let some = samples.iter().all(|s| !s.shape.contains(&0) && (samples.len() > 1 || !s.shape.contains(&1)));
    some.then(|| samples.iter().map(larger).collect())
}

/// The placements to try for an input: only even shards, of more than one element.
fn placements(sample: &SampleInput) -> Vec<Placement> {
    let shards = (0..sample.shape.len()).filter(|&d| sample.shape[d] > 1).map(|d| Shard(d as isize));
    let mut all: Vec<Placement> = std::iter::once(Replicate).chain(shards).collect();
    // A few elements may fit by chance.
    if sample.below.is_none() && sample.shape.iter().product::<usize>() >= 12 {
        all.extend(reductions(sample.dtype));
    }
    all
}

fn reductions(dtype: DType) -> impl Iterator<Item = Placement> {
    let all = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min];
    all.into_iter().filter(move |op| op.supports(dtype)).map(Partial)
}

/// Sets of values, so that a coincidence in one is not taken for a rule. Large and small ones, with and without
/// fractions, some with many zeros.
const SETS: usize = 64;

/// The inputs of a call with one of the sets of values.
fn inputs(mesh: &DeviceMesh, samples: &[SampleInput], chosen: &[Placement], set: usize) -> Result<Vec<DTensor>> {
    let mut all = Vec::new();
    for (i, (sample, placement)) in samples.iter().zip(chosen).enumerate() {
        let layout = Layout::new(mesh.mesh(), sample.shape.as_slice(), [placement.clone()])?;
        let salt = SETS * i + set;
        let (count, step) = [(64, 1.0), (7, 1.0), (64, 0.125), (15, 0.125)][set % 4];
        let value = |flat: usize| match (values::hash(&[salt, flat]), sample.below) {
            (h, Some(n)) => (h % n as u64) as f64,
            (_, None) if set == SETS - 1 => 0.0,
            (h, None) if set % 8 > 3 && h % 16 < 15 => 0.0,
            (h, None) => ((h / 16) % count) as f64 - (count / 2) as f64,
        };
        let step = if sample.dtype.is_float() { step } else { 1.0 };
        let local = values::local_of(&layout, mesh.world().rank(), salt, &value);
        let local = (local * step)?.to_dtype(sample.dtype)?;
        all.push(DTensor::from_local_with_shape(&local, mesh, [placement.clone()], sample.shape.as_slice())?);
    }
    Ok(all)
}

/// All combinations on two ranks that communicate although they need not.
pub(crate) fn combinations(world: &World) -> Result<Vec<Combination>> {
    let mesh = world.mesh([("a", 2)])?;
    let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
    let mut found = Vec::new();
    for op in ops() {
        for samples in (op.samples)().iter().filter_map(|s| enlarged(s)) {
            // skips operators that reject larger sizes
            let Ok(first) = unsharded(op, &alone, &samples, 0) else { continue };
            let mut all: Vec<Vec<Placement>> = vec![Vec::new()];
            for sample in &samples {
                let options = placements(sample);
                let with =
                    |so_far: &Vec<Placement>, p: &Placement| [so_far.as_slice(), std::slice::from_ref(p)].concat();
                all = all.iter().flat_map(|c| options.iter().map(move |p| with(c, p))).collect();
            }
            for chosen in all {
                world.trace().clear();
                (op.apply)(&inputs(&mesh, &samples, &chosen, 0)?)?;
                let talked = world.trace().records().iter().any(|r| r.call != "agree");
                if !agreed(world, &[talked])?[0] {
                    continue;
                }
                let mut valid: Option<Vec<Vec<Placement>>> = None;
                for set in 0..SETS {
                    let inputs = inputs(&mesh, &samples, &chosen, set)?;
                    let expected = if set == 0 { first.clone() } else { unsharded(op, &alone, &samples, set)? };
                    let found = local_placements(op, world, &alone, &inputs, &expected)?;
                    valid = Some(match valid {
                        None => found,
                        Some(so_far) => so_far.into_iter().zip(found).map(|(a, b)| common(a, &b)).collect(),
                    });
                    if valid.iter().flatten().any(Vec::is_empty) {
                        break;
                    }
                }
                let outputs: Vec<Placement> =
                    valid.into_iter().flatten().filter_map(|v| v.into_iter().next()).collect();
                if outputs.len() == first.len() {
                    let text = |all: &[Placement]| all.iter().map(ToString::to_string).collect();
                    found.push(Combination { op: op.name, inputs: text(&chosen), outputs: text(&outputs) });
                }
            }
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

fn common(a: Vec<Placement>, b: &[Placement]) -> Vec<Placement> {
    a.into_iter().filter(|p| b.contains(p)).collect()
}

fn unsharded(op: &OpEntry, alone: &DeviceMesh, samples: &[SampleInput], set: usize) -> Result<Vec<Tensor>> {
    let inputs = inputs(alone, samples, &vec![Replicate; samples.len()], set)?;
    (op.apply)(&inputs)?.iter().map(|t| t.full_tensor()).collect()
}

/// What is true on every rank.
fn agreed(world: &World, flags: &[bool]) -> Result<Vec<bool>> {
    let bytes: Vec<u8> = flags.iter().map(|&f| u8::from(f)).collect();
    let least = world.all_reduce(&Tensor::new(bytes, &Device::Cpu)?, ReduceOp::Min)?;
    Ok(least.to_vec1::<u8>()?.into_iter().map(|f| f == 1).collect())
}

/// Per output the placements in which the ranks' own results are the expected one; none if ranks cannot compute from what
/// they hold.
fn local_placements(
    op: &OpEntry,
    world: &World,
    alone: &DeviceMesh,
    inputs: &[DTensor],
    expected: &[Tensor],
) -> Result<Vec<Vec<Placement>>> {
    let own = |t: &DTensor| DTensor::from_local_with_shape(&t.to_local()?, alone, [Replicate], t.local_shape());
    let local = (op.apply)(&inputs.iter().map(own).collect::<Result<Vec<_>>>()?);
    let computed = local.as_ref().is_ok_and(|outputs| outputs.len() == expected.len());
    if !agreed(world, &[computed])?[0] {
        return Ok(vec![Vec::new(); expected.len()]);
    }
    let local = local?.iter().map(DTensor::full_tensor).collect::<Result<Vec<_>>>()?;
    let mut all = Vec::new();
    for (local, expected) in local.iter().zip(expected) {
        let dims = expected.dims();
        let mut options = vec![(Replicate, local.dims() == dims && values::close(local, expected, 1.0))];
        for dim in (0..dims.len()).filter(|&d| dims[d] > 0 && dims[d] % 2 == 0) {
            let half = dims[dim] / 2;
            let part = expected.narrow(dim, world.rank() * half, half)?.contiguous()?;
            options.push((Shard(dim as isize), local.dims() == part.dims() && values::close(local, &part, 1.0)));
        }
        if agreed(world, &[local.dims() == dims])?[0] {
            for placement in reductions(local.dtype()) {
                let Partial(op) = placement else { unreachable!("only partial placements are left") };
                let reduced = world.all_reduce(local, op)?;
                options.push((placement, values::close(&reduced, expected, 1.0)));
            }
        }
        let flags = agreed(world, &options.iter().map(|(_, valid)| *valid).collect::<Vec<_>>())?;
        let valid = options.into_iter().zip(flags).filter(|(_, valid)| *valid);
        all.push(valid.map(|((placement, _), _)| placement).collect());
    }
    Ok(all)
}
