//! A row of the table of calls, and what a call returns.

use shardwise::prelude::*;

use super::arguments::Arguments;

/// PyTorch's signature of an operator and the call that replaces it.
pub struct TorchCall {
    /// The signature, with the name of the operator and its defaults.
    pub signature: &'static str,
    pub(super) call: fn(&Arguments<'_>) -> Result<Vec<CallOutput>>,
}

impl TorchCall {
    /// Name of the operator in PyTorch.
    pub fn name(&self) -> &'static str {
        self.signature.split('(').next().unwrap_or(self.signature)
    }
}

/// One output of a call.
pub enum CallOutput {
    /// A distributed tensor.
    Tensor(DTensor),
    /// A number, the same on every rank.
    Number(f64),
    /// A bool, the same on every rank.
    Bool(bool),
}

/// A result that is one or several outputs, in order.
pub trait IntoOutputs {
    /// The outputs.
    fn into_outputs(self) -> Vec<CallOutput>;
}

impl IntoOutputs for DTensor {
    fn into_outputs(self) -> Vec<CallOutput> {
        vec![CallOutput::Tensor(self)]
    }
}

impl IntoOutputs for bool {
    fn into_outputs(self) -> Vec<CallOutput> {
        vec![CallOutput::Bool(self)]
    }
}

impl IntoOutputs for f64 {
    fn into_outputs(self) -> Vec<CallOutput> {
        vec![CallOutput::Number(self)]
    }
}

impl IntoOutputs for CallOutput {
    fn into_outputs(self) -> Vec<CallOutput> {
        vec![self]
    }
}

impl<T: IntoOutputs> IntoOutputs for Vec<T> {
    fn into_outputs(self) -> Vec<CallOutput> {
        self.into_iter().flat_map(IntoOutputs::into_outputs).collect()
    }
}

impl<A: IntoOutputs, B: IntoOutputs> IntoOutputs for (A, B) {
    fn into_outputs(self) -> Vec<CallOutput> {
        self.0.into_outputs().into_iter().chain(self.1.into_outputs()).collect()
    }
}

impl<A: IntoOutputs, B: IntoOutputs, C: IntoOutputs> IntoOutputs for (A, B, C) {
    fn into_outputs(self) -> Vec<CallOutput> {
        (self.0, (self.1, self.2)).into_outputs()
    }
}

/// Builds the rows of a family: `"signature" => |a| call;`.
macro_rules! calls {
    ($($signature:literal => |$a:ident| $call:expr;)*) => {
        pub(super) const CALLS: &[$crate::torch_calls::TorchCall] = &[$(
            $crate::torch_calls::TorchCall {
                signature: $signature,
                call: |$a| Ok($crate::torch_calls::IntoOutputs::into_outputs($call?)),
            },
        )*];
    };
}
pub(super) use calls;
