//! What a kernel can ask about the rank that it runs on.

use candle_core::DType;

use crate::layout::{Runs, TensorMeta, coordinates};
use crate::mesh::Mesh;
use crate::rule::{Decision, RequiredInput};

/// What a kernel can ask about the rank that it runs on: which indices of inputs and outputs the rank holds, and in which types.
///
/// Local: answers from the layouts, without communication.
pub struct KernelContext<'a> {
    pub(super) decision: &'a Decision,
    pub(super) locals: &'a [TensorMeta],
    pub(super) storage_types: &'a [DType],
    pub(super) mesh: &'a Mesh,
    pub(super) rank: usize,
}

impl KernelContext<'_> {
    /// The global indices along a dimension that this rank holds of an input, in local order, as ranges.
    pub(crate) fn input_runs(&self, input: usize, dim: usize) -> Runs {
        match &self.decision.inputs[input] {
            RequiredInput::Layout(layout) => layout.owned(dim, &self.coordinate()),
            RequiredInput::Boxes { boxes, .. } => {
                let own = &boxes[self.position()];
                Runs::range(own.offsets[dim]..own.offsets[dim] + own.sizes[dim])
            }
        }
    }

    /// The local shape of an output on this rank.
    pub fn local_shape(&self, output: usize) -> &[usize] {
        &self.locals[output].shape
    }

    /// The type in which this rank holds its local tensor of an output.
    ///
    /// Terms of a partial sum are stored in a wider type than the reduced tensor has, see [`Accumulation`](super::Accumulation). A result in another
    /// floating-point type is converted.
    pub fn output_dtype(&self, output: usize) -> DType {
        self.storage_types[output]
    }

    /// The global indices along a dimension that this rank holds of an output, in local order, as ranges.
    pub(crate) fn output_runs(&self, output: usize, dim: usize) -> Runs {
        self.decision.outputs[output].owned(dim, &self.coordinate())
    }

    /// How many shards of an input along a dimension begin before an index.
    pub(crate) fn shards_before(&self, input: usize, dim: usize, index: usize) -> usize {
        let RequiredInput::Layout(layout) = &self.decision.inputs[input] else { return 0 };
        let starts = coordinates(self.mesh, layout.shard_order(dim)).filter_map(|c| layout.owned(dim, &c).first());
        starts.filter(|&start| start < index).count()
    }

    /// The global shape of an input.
    pub fn input_shape(&self, input: usize) -> &[usize] {
        match &self.decision.inputs[input] {
            RequiredInput::Layout(layout) | RequiredInput::Boxes { from: layout, .. } => layout.shape(),
        }
    }

    /// The global indices along a dimension that this rank holds of an input, one by one in local order.
    pub fn input_indices(&self, input: usize, dim: usize) -> Vec<usize> {
        self.input_runs(input, dim).iter().flatten().collect()
    }

    /// The global indices along a dimension that this rank holds of an output, one by one in local order.
    pub fn output_indices(&self, output: usize, dim: usize) -> Vec<usize> {
        self.output_runs(output, dim).iter().flatten().collect()
    }

    fn coordinate(&self) -> Vec<usize> {
        self.mesh.coordinate(self.rank).expect("kernels run on ranks of the mesh")
    }

    fn position(&self) -> usize {
        self.mesh.ranks().iter().position(|&r| r == self.rank).expect("kernels run on ranks of the mesh")
    }
}
