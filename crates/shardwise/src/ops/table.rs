//! Operators as tests and tables see them: samples, and what they do with every placement along one axis.

use candle_core::DType;

use crate::comm::DryWorld;
use crate::error::Result;
use crate::placement::{Placement, ReduceOp};
use crate::tensor::DTensor;

/// One operator.
pub struct OpEntry {
    /// Name of the method on [`DTensor`].
    pub name: &'static str,
    /// Inputs to try it on: shapes that broadcast, are uneven, of size one, or empty.
    pub samples: fn() -> Vec<Vec<Sample>>,
    /// The operator on such inputs.
    pub apply: fn(&[DTensor]) -> Result<Vec<DTensor>>,
}

/// One input of a sample call.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: DType,
    /// Its elements are indices below this number.
    pub below: Option<usize>,
}

impl Sample {
    pub(super) fn new(shape: &[usize], dtype: DType) -> Self {
        Sample { shape: shape.to_vec(), dtype, below: None }
    }

    pub(super) fn index(shape: &[usize], below: usize) -> Self {
        Sample { shape: shape.to_vec(), dtype: DType::I64, below: Some(below) }
    }
}

/// What an operator does with inputs placed so along one axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The placement of every input.
    pub inputs: Vec<Placement>,
    /// The placement of the first output.
    pub output: Placement,
    /// What is communicated for it; nothing if the rule applies as it is.
    pub collectives: Vec<&'static str>,
}

impl OpEntry {
    /// Whether a gradient can be taken through the operator: tried on its first sample, with floating-point inputs.
    pub fn is_differentiable(&self) -> Result<bool> {
        let ran = DryWorld::new(1)?.run(|world| {
            let mesh = world.mesh([("one", 1)])?;
            let input = |sample: &Sample| {
                let dtype = if sample.below.is_some() { sample.dtype } else { DType::F64 };
                let tensor = DTensor::zeros(sample.shape.as_slice(), dtype, &mesh, [Placement::Replicate])?;
                Ok(if sample.below.is_some() { tensor } else { tensor.requires_grad() })
            };
            let inputs = (self.samples)()[0].iter().map(input).collect::<Result<Vec<_>>>()?;
            // Operators on integers alone refuse others.
            Ok((self.apply)(&inputs).is_ok_and(|outputs| outputs.iter().any(DTensor::has_gradient)))
        })?;
        Ok(ran.value)
    }

    /// What happens along one axis of two ranks for every combination of replicas, shards and partial sums of the inputs,
    /// on the first sample: found by running the operator without data.
    pub fn rules(&self) -> Result<Vec<Rule>> {
        let ran = DryWorld::new(2)?.run(|world| {
            let mesh = world.mesh([("axis", 2)])?;
            let samples = (self.samples)().swap_remove(0);
            let mut rules = Vec::new();
            for inputs in combinations(&samples) {
                let each = samples.iter().zip(&inputs);
                let tensors = each.map(|(sample, placement)| {
                    DTensor::zeros(sample.shape.as_slice(), sample.dtype, &mesh, [placement.clone()])
                });
                let tensors = tensors.collect::<Result<Vec<_>>>()?;
                world.trace().clear();
                let outputs = (self.apply)(&tensors)?;
                let mut collectives: Vec<&'static str> = Vec::new();
                for record in world.trace().records().iter().filter(|r| r.call != "agree") {
                    if !collectives.contains(&record.call) {
                        collectives.push(record.call);
                    }
                }
                rules.push(Rule { inputs, output: outputs[0].placements()[0].clone(), collectives });
            }
            Ok(rules)
        })?;
        Ok(ran.value)
    }
}

/// All combinations of placements of up to two inputs; further ones are replicated.
fn combinations(samples: &[Sample]) -> Vec<Vec<Placement>> {
    let options = |(i, sample): (usize, &Sample)| {
        let mut all = vec![Placement::Replicate];
        if i < 2 {
            all.extend((0..sample.shape.len() as isize).map(Placement::Shard));
        }
        if i < 2 && sample.below.is_none() {
            all.push(Placement::Partial(ReduceOp::Sum));
        }
        all
    };
    samples.iter().enumerate().map(options).fold(vec![Vec::new()], |so_far, options| {
        let with = |chosen: &Vec<Placement>, p: &Placement| [chosen.as_slice(), std::slice::from_ref(p)].concat();
        so_far.iter().flat_map(|chosen| options.iter().map(move |p| with(chosen, p))).collect()
    })
}
