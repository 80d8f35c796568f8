//! Order statistics of a sharded dimension from counts: no element moves. Ranks of elements are found byte by byte; per byte, the ranks of
//! the mesh add up how many elements have each of its values.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::comm::record_implicit_operator;
use crate::error::Result;
use crate::layout::{Layout, Runs, TensorMeta, coordinates};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{Decision, DimSharding, Signature};
use crate::tensor::DTensor;
use shardwise_kernels::{BYTE_VALUES, SortOrder, byte_counts, count_rank, next_byte, nth_of_rank, rank_bytes};

/// One step of the search for elements at given places of the sorted lines of a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct OrderStatistics {
    name: &'static str,
    dim: usize,
    order: SortOrder,
    step: OrderStep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum OrderStep {
    /// Counts a byte of the ranks of elements. Inputs: elements, ranks so far. Output: counts, partial sums.
    Count { byte: usize },
    /// Finds that byte. Inputs: counts, ranks so far, places. Outputs: ranks, places among elements with these ranks.
    Descend { byte: usize },
    /// Counts elements of the ranks that were found, per shard that has elements. Inputs: elements, ranks.
    Equal { shards: usize },
    /// Finds the indices. Inputs: elements, ranks, places, counts of all shards. Output: indices, one nonzero term each.
    Find,
}

/// The elements at given places of sorted lines.
pub(in crate::ops) struct FoundPlaces {
    /// Their ranks, as integers that order elements (i64).
    pub(in crate::ops) ranks: DTensor,
    /// Their indices along the dimension (i64).
    pub(in crate::ops) indices: DTensor,
}

/// The bytes per line that counting sends for every other rank: counts are sent twice, to be added and to be returned.
pub(in crate::ops) fn counted_bytes(dtype: DType, wanted: usize) -> usize {
    2 * rank_bytes(dtype) * BYTE_VALUES * wanted * DType::I64.size_in_bytes()
}

impl DTensor {
    /// Whether finding `wanted` elements per line of a sharded dimension by counting sends fewer bytes than sorting it.
    pub(in crate::ops) fn counts_are_fewer(&self, dim: usize, wanted: usize) -> bool {
        let axes = self.layout().shard_order(dim);
        let parts: usize = axes.iter().map(|&a| self.layout().mesh().shape()[a]).product();
        let lines = self.elem_count() / self.shape()[dim].max(1);
        // Per line and other rank. Elements to be sorted are sent once, and each to one rank if there are lines for every rank.
        let counts = counted_bytes(self.dtype(), wanted);
        let elements = self.shape()[dim] * self.dtype().size_in_bytes() / if lines < parts { 1 } else { parts };
        parts > 1 && wanted > 0 && counts < elements
    }

    /// Finds the elements at `places` (i64, from 0) of the sorted lines of a dimension: `[.., wanted, ..]`.
    ///
    /// Collective if the dimension is sharded: per byte of an element one all-reduce of counts, then one number per shard.
    #[track_caller]
    pub(in crate::ops) fn at_places(
        &self,
        name: &'static str,
        dim: usize,
        order: SortOrder,
        places: &DTensor,
    ) -> Result<FoundPlaces> {
        let site = Location::caller();
        let step = |step: OrderStep| OrderStatistics { name, dim, order, step };
        // Once, not in every step.
        let settled = self.layout().reduced().unstrided(&|d| d == dim)?;
        let x = record_implicit_operator(name, || self.detach().to_layout_at(&settled, site))?;
        let mut places = places.detach().all_reduced(name)?;
        let mut ranks = places.zeros_like()?;
        for byte in (0..rank_bytes(self.dtype())).rev() {
            let counts = dispatch(&step(OrderStep::Count { byte }), &[&x, &ranks], site)?.swap_remove(0);
            let mut found = dispatch(&step(OrderStep::Descend { byte }), &[&counts, &ranks, &places], site)?;
            places = found.pop().expect("two outputs");
            ranks = found.pop().expect("two outputs");
        }
        let axes = settled.shard_order(dim);
        let held = coordinates(settled.mesh(), axes).filter(|c| settled.owned(dim, c).len() > 0);
        let equal = OrderStep::Equal { shards: held.count() };
        let equal = dispatch(&step(equal), &[&x, &ranks], site)?.swap_remove(0);
        let indices = dispatch(&step(OrderStep::Find), &[&x, &ranks, &places, &equal], site)?.swap_remove(0);
        Ok(FoundPlaces { ranks, indices: indices.all_reduced(name)? })
    }
}

impl OrderStatistics {
    /// The layout of lines of `size` elements that every rank along the axes of the dimension has, or has a term of.
    fn lines(&self, elements: &Layout, size: usize, partial: bool) -> Result<Layout> {
        let axes = elements.shard_order(self.dim).to_vec();
        let whole = elements.without_axes(&axes)?.resized(self.dim, size, &|_| size)?;
        if !partial {
            return Ok(whole);
        }
        let mut placements = whole.placements().to_vec();
        axes.iter().for_each(|&axis| placements[axis] = Placement::Partial(ReduceOp::Sum));
        Layout::from_shard_orders(whole.mesh(), whole.shape(), &placements, &whole.shard_orders())
    }
}

impl Op for OrderStatistics {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        // The layouts follow from that of the elements, see `decide`.
        let unnamed = |m: &TensorMeta| vec![None; m.shape.len()];
        let wanted = inputs[1].shape[self.dim];
        let numbers = |along: usize| {
            let mut shape = inputs[1].shape.clone();
            shape[self.dim] = along;
            TensorMeta { shape, dtype: DType::I64 }
        };
        let outputs = match self.step {
            OrderStep::Count { .. } => vec![numbers(wanted * BYTE_VALUES)],
            OrderStep::Descend { .. } => vec![numbers(wanted), numbers(wanted)],
            OrderStep::Equal { shards } => vec![numbers(shards * wanted)],
            OrderStep::Find => vec![numbers(wanted)],
        };
        let no_dims = std::iter::empty::<DimSharding>();
        let signature = Signature::new(no_dims, inputs.iter().map(unnamed), outputs.iter().map(unnamed));
        Ok(OpPlan { signature, outputs })
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        let first = inputs[0].clone();
        let wanted = inputs[1].shape()[self.dim];
        let numbers = self.lines(&first.reduced(), wanted, false)?;
        Ok(match self.step {
            OrderStep::Count { .. } => {
                let counts = self.lines(&first, plan.outputs[0].shape[self.dim], true)?;
                Decision::new([first, numbers], [counts])
            }
            OrderStep::Descend { .. } => {
                Decision::new([first.reduced(), numbers.clone(), numbers.clone()], [numbers.clone(), numbers])
            }
            OrderStep::Equal { shards } => {
                let of_shard = |runs: &Runs| if runs.len() > 0 { wanted } else { 0 };
                let counts = first.resized(self.dim, shards * wanted, &of_shard)?;
                Decision::new([first, numbers], [counts])
            }
            OrderStep::Find => {
                let found = self.lines(&first, wanted, true)?;
                let counts = self.lines(&first, inputs[3].shape()[self.dim], false)?;
                Decision::new([first, numbers.clone(), numbers, counts], [found])
            }
        })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (dim, order) = (self.dim, self.order);
        Ok(match self.step {
            OrderStep::Count { byte } => vec![byte_counts(&inputs[0], dim, order, &inputs[1], byte)?],
            OrderStep::Descend { byte } => {
                let (ranks, places) = next_byte(&inputs[0], dim, &inputs[1], &inputs[2], byte)?;
                vec![ranks, places]
            }
            // A shard without elements has no counts.
            OrderStep::Equal { .. } if context.local_shape(0)[dim] == 0 => {
                vec![Tensor::zeros(context.local_shape(0), DType::I64, inputs[0].device())?]
            }
            OrderStep::Equal { .. } => vec![count_rank(&inputs[0], dim, order, &inputs[1])?],
            OrderStep::Find => {
                let wanted = inputs[1].dims()[dim];
                let first = context.input_runs(0, dim).first().unwrap_or(0);
                // Places among the elements of this shard: negative ones belong to shards before.
                let mut places = inputs[2].clone();
                for shard in 0..context.shards_before(0, dim, first) {
                    places = (places - inputs[3].narrow(dim, shard * wanted, wanted)?)?;
                }
                vec![nth_of_rank(&inputs[0], dim, order, &inputs[1], &places, first as i64)?]
            }
        })
    }

    /// Elements that need a gradient are looked up by their indices.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}
