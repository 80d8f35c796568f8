//! Cross entropy with every argument of PyTorch, also of the logits of a linear layer.

use candle_core::DType;

use crate::error::{ErrorKind, Result};
use crate::ops::losses::loss::LossOptions;
use crate::ops::shapes::arrange::signed;
use crate::ops::{OpEntry, SampleInput};
use crate::tensor::DTensor;

impl DTensor {
    /// Computes the cross entropy of logits and targets: class indices, or probabilities of classes if they are floating-point numbers;
    /// with an optional weight per class. PyTorch's `nn.functional.cross_entropy`.
    ///
    /// Communicates as [`cross_entropy`](Self::cross_entropy) does.
    #[track_caller]
    pub fn cross_entropy_with(
        &self,
        target: &DTensor,
        weight: Option<&DTensor>,
        options: LossOptions,
    ) -> Result<DTensor> {
        match weight {
            weight if target.dtype().is_float() => self.cross_entropy_probabilities(target, weight, options),
            Some(weight) => self.cross_entropy_weighted(target, weight, options),
            None => self.cross_entropy(target, options),
        }
    }

    /// Computes the cross entropy of the logits of a linear layer with `weight` `[classes, .., features]`.
    ///
    /// Communicates as [`linear`](Self::linear) and [`cross_entropy`](Self::cross_entropy) do. The logits are stored.
    #[track_caller]
    pub fn linear_cross_entropy(
        &self,
        weight: &DTensor,
        bias: Option<&DTensor>,
        target: &DTensor,
        class_weight: Option<&DTensor>,
        options: LossOptions,
    ) -> Result<DTensor> {
        if self.ndim() == 0 || weight.ndim() < 2 {
            let found = format!("{} and {} in linear_cross_entropy", self.layout(), weight.layout());
            let needed = "an input [.., features] and a weight [classes, .., features]";
            return Err(ErrorKind::shape(self.shape()).error("operands", found, needed, "reshape the tensors"));
        }
        // The weight is one matrix, whose rows are taken apart again.
        let (outputs, features) = weight.shape().split_at(weight.ndim() - 1);
        let bias = bias.map(|b| b.reshape(&[-1])).transpose()?;
        let logits = self.linear(&weight.reshape(&[-1, features[0] as isize])?, bias.as_ref())?;
        let lead = signed(&self.shape()[..self.ndim() - 1]);
        let logits = logits.reshape(&[lead, signed(outputs)].concat())?;
        logits.cross_entropy_with(target, class_weight, options)
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "cross_entropy_with",
        samples: classes,
        apply: |x| Ok(vec![x[0].cross_entropy_with(&x[1], None, LossOptions::default())?]),
    },
    OpEntry {
        name: "linear_cross_entropy",
        samples: features,
        apply: |x| Ok(vec![x[0].linear_cross_entropy(&x[1], Some(&x[2]), &x[3], None, LossOptions::default())?]),
    },
];

fn classes() -> Vec<Vec<SampleInput>> {
    vec![
        vec![SampleInput::new(&[5, 4], DType::F64), SampleInput::index(&[5], 4)],
        vec![SampleInput::new(&[5, 4], DType::F64), SampleInput::new(&[5, 4], DType::F64)],
    ]
}

fn features() -> Vec<Vec<SampleInput>> {
    vec![vec![
        SampleInput::new(&[5, 3], DType::F64),
        SampleInput::new(&[4, 3], DType::F64),
        SampleInput::new(&[4], DType::F64),
        SampleInput::index(&[5], 4),
    ]]
}
