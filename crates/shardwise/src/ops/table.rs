//! The table of operators: sample inputs for tests, and what each operator does with every placement along one mesh axis.

use candle_core::DType;

use crate::comm::DryWorld;
use crate::error::Result;
use crate::placement::{Placement, ReduceOp};
use crate::tensor::DTensor;

/// One operator of the table, with inputs to try it on.
#[doc(alias = "OpInfo")]
pub struct OpEntry {
    /// The name of the method of [`DTensor`].
    pub name: &'static str,
    /// Returns lists of inputs for one call each: shapes that broadcast, do not divide evenly, have size one, or are empty.
    pub samples: fn() -> Vec<Vec<SampleInput>>,
    /// Calls the operator on such inputs, possibly with several arguments; returns the outputs of all calls.
    pub apply: fn(&[DTensor]) -> Result<Vec<DTensor>>,
}

/// One input of a sample call.
#[derive(Debug, Clone)]
pub struct SampleInput {
    /// The global shape.
    pub shape: Vec<usize>,
    /// The element type.
    pub dtype: DType,
    /// If set, the elements are indices below this number; else any values.
    pub below: Option<usize>,
}

impl SampleInput {
    pub(super) fn new(shape: &[usize], dtype: DType) -> Self {
        SampleInput { shape: shape.to_vec(), dtype, below: None }
    }

    pub(super) fn index(shape: &[usize], below: usize) -> Self {
        SampleInput { shape: shape.to_vec(), dtype: DType::I64, below: Some(below) }
    }
}

/// The placement of an output that results from one combination of input placements along one mesh axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementRule {
    /// The placement of every input.
    pub inputs: Vec<Placement>,
    /// The placement of the first output.
    pub output: Placement,
    /// The collectives that the call runs; empty if it communicates nothing.
    pub collectives: Vec<&'static str>,
}

impl OpEntry {
    /// Whether the operator is differentiable: tried in a dry run on its first sample, with floating-point inputs.
    pub fn is_differentiable(&self) -> Result<bool> {
        let ran = DryWorld::new(1)?.run(|world| {
            let mesh = world.mesh([("one", 1)])?;
            let input = |sample: &SampleInput| {
                let dtype = if sample.below.is_some() { sample.dtype } else { DType::F64 };
                let tensor = DTensor::zeros(sample.shape.as_slice(), dtype, &mesh, [Placement::Replicate])?;
                Ok(if sample.below.is_some() { tensor } else { tensor.requires_grad() })
            };
            let inputs = (self.samples)()[0].iter().map(input).collect::<Result<Vec<_>>>()?;
            // Operators that take only integers refuse floating-point inputs.
            Ok((self.apply)(&inputs).is_ok_and(|outputs| outputs.iter().any(DTensor::has_gradient)))
        })?;
        Ok(ran.value)
    }

    /// Returns the rule for every combination of replicated, sharded and partial inputs along one axis of two ranks.
    ///
    /// Local: found by dry runs on the first sample.
    pub fn rules(&self) -> Result<Vec<PlacementRule>> {
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
                rules.push(PlacementRule { inputs, output: outputs[0].placements()[0].clone(), collectives });
            }
            Ok(rules)
        })?;
        Ok(ran.value)
    }
}

/// All combinations of placements of the first two inputs; further inputs are replicated.
fn combinations(samples: &[SampleInput]) -> Vec<Vec<Placement>> {
    let options = |(i, sample): (usize, &SampleInput)| {
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
