//! The sign of zero in every placement: an operator that adds the contributions of ranks must not add a zero that nobody
//! contributed.

use candle_core::Tensor;
use shardwise::ops::{OpEntry, SampleInput};
use shardwise::prelude::*;

/// Operators that multiply a partial sum by negative numbers or zeros, or subtract it: then -0.0, which the ranks without the element
/// hold, becomes 0.0, and so does their sum. Reducing first would keep the sign and take communication that nobody asked for.
const MULTIPLY: &[&str] = &["neg", "mul_scalar", "rotary_embedding", "inner", "prelu", "kron", "diff"];

/// Zeros of both signs, twice as many negative ones; indices below their bound.
fn input(mesh: &DeviceMesh, sample: &SampleInput, placement: &Placement) -> Result<DTensor> {
    let count: usize = sample.shape.iter().product();
    let cpu = &candle_core::Device::Cpu;
    let whole = match sample.below {
        Some(n) => Tensor::from_vec((0..count).map(|i| (i * 3 % n.max(1)) as i64).collect(), count, cpu)?,
        None => {
            Tensor::from_vec((0..count).map(|i| if i % 3 == 2 { 0.0 } else { -0.0 }).collect::<Vec<f64>>(), count, cpu)?
        }
    };
    let whole = whole.reshape(sample.shape.as_slice())?.to_dtype(sample.dtype)?;
    DTensor::distribute_tensor(&whole, mesh, [Replicate], None)?.redistribute([placement.clone()])
}

/// Whether each element is a negative zero; `None` for other numbers.
fn zeros(tensor: &Tensor) -> Result<Vec<Option<bool>>> {
    let all = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    Ok(all.into_iter().map(|x| (x == 0.0).then_some(x.is_sign_negative())).collect())
}

/// The operators whose zeros have other signs than those of the unsharded result, with the placements.
pub(crate) fn differing(
    world: &World,
    ops: impl Iterator<Item = &'static OpEntry>,
) -> Result<Vec<(&'static str, String)>> {
    let ranks = world.size();
    let mesh = world.mesh([("a", ranks)])?;
    let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
    let mut found = Vec::new();
    for op in ops {
        for samples in (op.samples)() {
            let run = |mesh: &DeviceMesh, chosen: &[Placement]| -> Result<Vec<Vec<Option<bool>>>> {
                let inputs = samples.iter().zip(chosen).map(|(s, p)| input(mesh, s, p)).collect::<Result<Vec<_>>>()?;
                let outputs = (op.apply)(&inputs)?;
                outputs.iter().filter(|t| t.dtype().is_float()).map(|t| zeros(&t.full_tensor()?)).collect()
            };
            // Zeros are not valid arguments of some operators.
            let Ok(expected) = run(&alone, &vec![Replicate; samples.len()]) else { continue };
            let mut tried = vec![Vec::new()];
            for sample in &samples {
                let mut options = vec![Replicate];
                options.extend((0..sample.shape.len()).map(|d| Shard(d as isize)));
                if sample.below.is_none() && sample.dtype.is_float() && !MULTIPLY.contains(&op.name) {
                    options.push(Partial(ReduceOp::Sum));
                }
                tried = tried
                    .iter()
                    .flat_map(|t: &Vec<Placement>| {
                        options.iter().map(move |p| [t.as_slice(), std::slice::from_ref(p)].concat())
                    })
                    .collect();
            }
            for chosen in tried {
                let got = run(&mesh, &chosen)?;
                if got != expected {
                    found.push((op.name, format!("{chosen:?} of {:?}", samples[0].shape)));
                }
            }
        }
    }
    Ok(found)
}
