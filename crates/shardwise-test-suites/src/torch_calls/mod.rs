//! PyTorch's operators in PyTorch's call form, and the calls of this library that replace them: one table, split by family.
//!
//! The left side of a row is PyTorch's signature with its defaults, the right side the call here, which reads the arguments by
//! name. PyTorch's bool is u8 in this library; where that makes a difference (`True + True` is True, `True + 1` is an i64) the
//! row says what to convert.

mod arguments;
mod calls;
mod signature;

mod data_dependent;
mod factories;
mod fft;
mod indexing;
mod linalg;
mod losses;
mod masked;
mod nn;
mod pointwise;
mod products;
mod reductions;
mod special;
mod views;

pub use arguments::{Arguments, OperandArgument, TensorArgument, dtype_of, number_of};
pub use calls::{CallOutput, IntoOutputs, TorchCall};
use serde_json::Value;
use shardwise::prelude::*;
use signature::Signature;

/// The rows by family, with the title of the family.
static FAMILIES: [(&str, &[TorchCall]); 13] = [
    ("Elementwise", pointwise::CALLS),
    ("Reductions, sorting and scans", reductions::CALLS),
    ("Views and shapes", views::CALLS),
    ("Indexing", indexing::CALLS),
    ("Products", products::CALLS),
    ("Layers", nn::CALLS),
    ("Losses", losses::CALLS),
    ("Masked reductions", masked::CALLS),
    ("Results whose shape depends on data", data_dependent::CALLS),
    ("Linear algebra", linalg::CALLS),
    ("Special functions", special::CALLS),
    ("Fourier transforms and windows", fft::CALLS),
    ("Factories", factories::CALLS),
];

/// All rows by family, with the title of the family.
pub fn families() -> impl Iterator<Item = (&'static str, &'static [TorchCall])> {
    FAMILIES.into_iter()
}

/// The row of an operator, if it is in the table.
pub fn find(name: &str) -> Option<&'static TorchCall> {
    families().flat_map(|(_, calls)| calls).find(|call| call.name() == name)
}

/// A call of the vectors: PyTorch's arguments, encoded, and the tensors among them.
pub struct RecordedCall<'a> {
    /// Arguments by position.
    pub positional: &'a [Value],
    /// Arguments by name, a JSON object.
    pub keyword: &'a Value,
    /// The tensors that the arguments refer to.
    pub tensors: &'a [TensorArgument],
    /// The mesh of the tensors.
    pub mesh: &'a DeviceMesh,
    /// The name of the entry in PyTorch's database, where an operator has several.
    pub variant: &'a str,
}

impl TorchCall {
    /// Runs the call that replaces PyTorch's.
    ///
    /// # Errors
    /// Those of the operator; also if an argument is not in the signature, or of another kind.
    pub fn run(&self, call: &RecordedCall<'_>) -> Result<Vec<CallOutput>> {
        let signature = Signature::parse(self.signature);
        if let Some(unknown) = signature.unknown(call.keyword) {
            return Err(Error::other(format!("{} has no argument {unknown}", self.signature)));
        }
        let RecordedCall { positional, keyword, tensors, mesh, variant } = *call;
        (self.call)(&Arguments { signature, positional, keyword, tensors, mesh, variant })
    }
}
