//! Concatenation, and what is built on it: stack, pad, roll, repeat. If the joined dimension is sharded, ranks fetch only what
//! their shard of the result lacks.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{Error, ErrorKind, Result};
use crate::layout::{Layout, TensorBox, TensorMeta, coordinates, ragged};
use crate::mesh::Mesh;
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpPlan, check_one_mesh, dispatch};
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::placement::Placement;
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::{Number, concat};

/// Concatenates its inputs along a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Cat {
    dim: usize,
}

impl DTensor {
    /// Concatenates tensors along a dimension; types are promoted.
    ///
    /// Local if the dimension is not sharded. If it is, the result is sharded on it too, and ranks exchange the elements that
    /// belong to another rank's shard of the result. If a single input is sharded, its shards stay where they are (as a ragged
    /// shard), unless that would be too uneven.
    ///
    /// # Errors
    /// If there is no tensor, or sizes differ in another dimension.
    #[track_caller]
    pub fn cat(tensors: &[&DTensor], dim: isize) -> Result<DTensor> {
        // An empty vector fits any other tensor, as in PyTorch.
        let fits = |t: &&&DTensor| t.shape() != [0];
        let others: Vec<&DTensor> = tensors.iter().filter(fits).copied().collect();
        if !others.is_empty() && others.len() < tensors.len() && others[0].ndim() != 1 {
            let meet = tensors.iter().map(|t| t.dtype()).reduce(dtype::promote).expect("at least one tensor");
            check_one_mesh("cat", tensors, Location::caller())?;
            return DTensor::cat(&others, dim)?.to_dtype(meet);
        }
        let Some(first) = tensors.first() else {
            return Err(ErrorKind::Operands.error(
                "operands",
                "no tensors in cat",
                "at least one",
                "pass some tensors",
            ));
        };
        let dim = first.resolve_dim("cat", dim)?;
        let meet = tensors.iter().map(|t| t.dtype()).reduce(dtype::promote).expect("at least one tensor");
        let same = tensors.iter().map(|t| t.to_dtype(meet)).collect::<Result<Vec<_>>>()?;
        let inputs: Vec<&DTensor> = same.iter().collect();
        if let [single] = inputs[..] {
            return Ok(single.clone());
        }
        Ok(dispatch(&Cat { dim }, &inputs, Location::caller())?.swap_remove(0))
    }

    /// Stacks tensors of one shape along a new dimension.
    ///
    /// Communicates only if the tensors are sharded differently.
    #[track_caller]
    pub fn stack(tensors: &[&DTensor], dim: isize) -> Result<DTensor> {
        if let Some(other) = tensors.iter().find(|t| t.shape() != tensors[0].shape()) {
            let found = format!("{} and {} in stack", tensors[0].layout(), other.layout());
            return Err(ErrorKind::shape(other.shape()).error(
                "operands",
                found,
                "tensors of one shape",
                "use cat to join along a dimension",
            ));
        }
        let thick = tensors.iter().map(|t| t.unsqueeze(dim)).collect::<Result<Vec<_>>>()?;
        let at = if dim < 0 { dim + thick.first().map_or(0, DTensor::ndim) as isize } else { dim };
        DTensor::cat(&thick.iter().collect::<Vec<_>>(), at)
    }

    /// Pads with a constant: `(before, after)` per dimension, from the last dimension backwards as in PyTorch.
    ///
    /// A padded dimension that is sharded stays so: the padding goes to the first and last shard, and elements move only if the
    /// shards would become too uneven.
    #[track_caller]
    pub fn pad(&self, border: &[(usize, usize)], value: impl Into<Number>) -> Result<DTensor> {
        let value = value.into();
        if border.len() > self.ndim() {
            let found = format!("{} borders in pad of {}", border.len(), self.layout());
            return Err(ErrorKind::Argument.error("borders", found, "at most one per dimension", "leave some out"));
        }
        let mut padded = self.clone();
        for (i, &(before, after)) in border.iter().enumerate() {
            let dim = self.ndim() - 1 - i;
            let edge = |n: usize| {
                let mut shape = padded.shape().to_vec();
                shape[dim] = n;
                let replicated = vec![Placement::Replicate; padded.placements().len()];
                DTensor::full(value, shape.as_slice(), padded.dtype(), padded.device_mesh(), replicated)
            };
            let (front, back) = (edge(before)?, edge(after)?);
            let parts: Vec<&DTensor> = [(before, &front), (1, &padded), (after, &back)]
                .into_iter()
                .filter_map(|(n, part)| (n > 0).then_some(part))
                .collect();
            padded = DTensor::cat(&parts, dim as isize)?;
        }
        Ok(padded)
    }

    /// Rolls the elements by `shifts` along `dims`; elements that leave at the end re-enter at the beginning.
    ///
    /// With one shift and no `dims` the tensor is flattened first, as in PyTorch. Ranks exchange what crosses shards.
    #[track_caller]
    pub fn roll(&self, shifts: &[isize], dims: &[isize]) -> Result<DTensor> {
        if dims.is_empty() && shifts.len() == 1 {
            let flat = self.reshape(&[-1])?.roll(shifts, &[0])?;
            return flat.reshape(&self.shape().iter().map(|&n| n as isize).collect::<Vec<_>>());
        }
        if shifts.len() != dims.len() {
            let found = format!("{} shifts and {} dimensions in roll of {}", shifts.len(), dims.len(), self.layout());
            return Err(ErrorKind::Argument.error("shifts", found, "one shift per dimension", "list both"));
        }
        if let [dim] = *dims
            && self.is_scalar_with(dim)
        {
            return Ok(self.clone());
        }
        let mut rolled = self.clone();
        for (&shift, &dim) in shifts.iter().zip(dims) {
            let at = self.resolve_dim("roll", dim)?;
            let n = self.shape()[at];
            let shift = if n == 0 { 0 } else { shift.rem_euclid(n as isize) as usize };
            if shift > 0 {
                let (tail, head) = (rolled.narrow(dim, n - shift, shift)?, rolled.narrow(dim, 0, n - shift)?);
                rolled = DTensor::cat(&[&tail, &head], at as isize)?;
            }
        }
        Ok(rolled)
    }

    /// Repeats the tensor `times[d]` times along dimension `d`; surplus numbers add dimensions in front.
    ///
    /// Repeated dimensions that are sharded are resharded or gathered, as [`reshape`](Self::reshape) needs it.
    #[track_caller]
    pub fn repeat(&self, times: &[usize]) -> Result<DTensor> {
        let Some(new) = times.len().checked_sub(self.ndim()) else {
            let found = format!("{} numbers in repeat of {}", times.len(), self.layout());
            return Err(ErrorKind::Argument.error(
                "repeats",
                found,
                "one per dimension",
                "repeat other dimensions once",
            ));
        };
        let mut thick = self.clone();
        let (mut sizes, mut merged) = (Vec::new(), Vec::new());
        for (i, &times) in times.iter().enumerate() {
            let n = i.checked_sub(new).map_or(1, |d| self.shape()[d]);
            thick = thick.unsqueeze(2 * i as isize)?;
            if i < new {
                thick = thick.unsqueeze(2 * i as isize)?;
            }
            sizes.extend([times as isize, n as isize]);
            merged.push(times.checked_mul(n).and_then(|n| isize::try_from(n).ok()).ok_or_else(|| {
                let found = format!("{times} times {n} in repeat of {}", self.layout());
                ErrorKind::shape(self.shape()).error::<Error>(
                    "repeats",
                    found,
                    "a tensor that memory can address",
                    "repeat less often",
                )
            })?);
        }
        thick.expand(&sizes)?.reshape(&merged)
    }

    /// Repeats every slice of a dimension `times` times in a row.
    ///
    /// Communicates as [`reshape`](Self::reshape) does: nothing if the dimension is not sharded.
    #[track_caller]
    pub fn repeat_interleave(&self, times: usize, dim: isize) -> Result<DTensor> {
        let at = self.resolve_dim("repeat_interleave", dim)?;
        let mut sizes: Vec<isize> = self.shape().iter().map(|&n| n as isize).collect();
        let product = self.shape()[at].checked_mul(times).and_then(|n| isize::try_from(n).ok());
        let (Some(product), Ok(times)) = (product, isize::try_from(times)) else {
            let found = format!("{times} times {} in repeat_interleave of {}", self.shape()[at], self.layout());
            return Err(ErrorKind::shape(self.shape()).error(
                "repeats",
                found,
                "a tensor that memory can address",
                "repeat less often",
            ));
        };
        sizes.insert(at + 1, times);
        let thick = self.unsqueeze(at as isize + 1)?.expand(&sizes)?;
        sizes.remove(at + 1);
        sizes[at] = product;
        thick.reshape(&sizes)
    }
}

impl Op for Cat {
    fn name(&self) -> &'static str {
        "cat"
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let first = &inputs[0].shape;
        let others = |shape: &[usize]| {
            shape.iter().enumerate().filter(|(d, _)| *d != self.dim).map(|(_, &n)| n).collect::<Vec<_>>()
        };
        if inputs.iter().any(|m| m.shape.len() != first.len() || others(&m.shape) != others(first)) {
            let shapes: Vec<&[usize]> = inputs.iter().map(|m| m.shape.as_slice()).collect();
            return Err(ErrorKind::shape(first).error(
                "operands",
                format!("shapes {shapes:?} in cat along dimension {}", self.dim),
                "equal sizes in all other dimensions",
                "reshape or slice the tensors",
            ));
        }
        let dims = || (0..first.len()).map(|d| (d != self.dim).then_some(d)).collect::<Vec<_>>();
        let sharding = (0..first.len()).map(|d| if d == self.dim { DimSharding::Never } else { DimSharding::Free });
        let signature = Signature::new(sharding, inputs.iter().map(|_| dims()), [dims()]).allow_all_partial();
        let mut shape = first.clone();
        // A sum that overflows saturates, and is refused as a shape that memory cannot address.
        shape[self.dim] = inputs.iter().fold(0, |sum, m| sum.saturating_add(m.shape[self.dim]));
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: inputs[0].dtype }] })
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        let mesh = inputs[0].mesh();
        let shape = &plan.outputs[0].shape;
        // Along a mesh axis the joined dimension stays sharded if at least as many elements are sharded on it as on another.
        let weight = |axis: usize, wanted: &dyn Fn(usize) -> bool| -> usize {
            let sharded = |l: &&&Layout| l.placements()[axis].shard_dim().is_some_and(wanted);
            inputs.iter().filter(sharded).map(|l| l.shape().iter().product::<usize>()).sum()
        };
        let along: Vec<usize> = (0..mesh.ndim())
            .filter(|&a| {
                let here = weight(a, &|d| d == self.dim);
                here > 0 && here >= weight(a, &|d| d != self.dim)
            })
            .collect();
        if along.is_empty() {
            return plan.signature.decide(inputs, elem, &[shape]);
        }
        let bare = inputs.iter().map(|l| l.unstrided(&|_| true)?.without_axes(&along)).collect::<Result<Vec<_>>>()?;
        let unsharded = plan.signature.decide(&bare.iter().collect::<Vec<_>>(), elem, &[shape])?;
        let mut from = Vec::new();
        for (input, need) in inputs.iter().zip(&unsharded.inputs) {
            let RequiredInput::Layout(other) = need else { unreachable!("a signature asks for layouts") };
            from.push(self.sharded_on_dim(input, other, &along)?);
        }
        let to = self.output(&from, &unsharded.outputs[0], &along)?;
        let mut start = 0;
        let mut needs = Vec::new();
        for from in from {
            let n = from.shape()[self.dim];
            let boxes = mesh.ranks().iter().map(|&rank| self.part_of(&to, rank, start, n)).collect();
            start += n;
            needs.push(RequiredInput::Boxes { from, axes: along.clone(), boxes });
        }
        Ok(Decision { inputs: needs, outputs: vec![to] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![concat(inputs, self.dim)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let mut start = 0;
            let mut pieces = Vec::new();
            for i in 0..saved.num_inputs() {
                let n = saved.shape(i)[op.dim];
                pieces.push(saved.needs_input_grad(i).then(|| gradient.narrow(op.dim as isize, start, n)).transpose()?);
                start += n;
            }
            Ok(pieces)
        })
    }
}

impl Cat {
    /// The layout `base` with the joined dimension sharded along some axes: as in `input` if that shards it, else into chunks.
    /// Axes along which `input` is replicated stay so.
    fn sharded_on_dim(&self, input: &Layout, base: &Layout, along: &[usize]) -> Result<Layout> {
        let build = |plain: bool| {
            let mut placements = base.placements().to_vec();
            let mut orders = base.shard_orders();
            let mut order: Vec<usize> = input.shard_order(self.dim).to_vec();
            order.extend(along.iter().filter(|a| !input.shard_order(self.dim).contains(a)));
            for axis in order.into_iter().filter(|a| along.contains(a)) {
                placements[axis] = match &input.placements()[axis] {
                    whole if whole.is_replicate() => continue,
                    own if !plain && own.is_contiguous() && own.is_shard(Some(self.dim)) => own.clone(),
                    _ => Placement::Shard(self.dim as isize),
                };
                orders[self.dim].push(axis);
            }
            Layout::from_shard_orders(input.mesh(), input.shape(), &placements, &orders)
        };
        build(false).or_else(|_| build(true))
    }

    /// The layout of the result: chunks of the joined dimension, or, if a single input is sharded, the shards of that input with
    /// the inputs before and after it attached to the first and last shard, so that nothing moves.
    fn output(&self, from: &[Layout], base: &Layout, along: &[usize]) -> Result<Layout> {
        let mesh = base.mesh();
        let is_sharded = |l: &&Layout| !l.shard_order(self.dim).is_empty();
        let leader = from.iter().filter(is_sharded).max_by_key(|l| l.shape()[self.dim]).expect("some input is sharded");
        let mut order = leader.shard_order(self.dim).to_vec();
        order.extend(along.iter().filter(|a| !leader.shard_order(self.dim).contains(a)));
        let with = |shard: &dyn Fn(usize) -> Placement| {
            let mut placements = base.placements().to_vec();
            let mut orders = base.shard_orders();
            for &axis in &order {
                placements[axis] = shard(axis);
            }
            orders[self.dim].clone_from(&order);
            Layout::from_shard_orders(mesh, base.shape(), &placements, &orders)
        };
        let chunks = with(&|_| Placement::Shard(self.dim as isize))?;
        let total = base.shape()[self.dim];
        let Some(attached) = self.attached(from, leader, &order, mesh) else { return Ok(chunks) };
        // A shard of one and a half times the even size is the limit: the slowest rank sets the pace of all later operators.
        let even = total.div_ceil(attached.len());
        if self.is_local(from, &chunks) || attached.iter().any(|&n| n > even + even / 2) {
            return Ok(chunks);
        }
        let placements = ragged(mesh, self.dim, &order, &attached);
        with(&|axis| placements.iter().find(|(a, _)| *a == axis).expect("one per axis").1.clone())
    }

    /// Shard sizes per coordinate if the shards of the only sharded input stay where they are; `None` if several are sharded.
    fn attached(&self, from: &[Layout], leader: &Layout, order: &[usize], mesh: &Mesh) -> Option<Vec<usize>> {
        if from.iter().filter(|l| !l.shard_order(self.dim).is_empty()).count() > 1
            || leader.shard_order(self.dim) != order
        {
            return None;
        }
        let mut sizes: Vec<usize> = coordinates(mesh, order).map(|c| leader.owned(self.dim, &c).len()).collect();
        let at = from.iter().position(|l| l == leader)?;
        let length = |parts: &[Layout]| parts.iter().map(|l| l.shape()[self.dim]).sum::<usize>();
        let first = sizes.iter().position(|&n| n > 0)?;
        let last = sizes.iter().rposition(|&n| n > 0)?;
        sizes[first] += length(&from[..at]);
        sizes[last] += length(&from[at + 1..]);
        Some(sizes)
    }

    /// Whether every rank holds what it needs for the layout `to`, so that nothing moves.
    fn is_local(&self, from: &[Layout], to: &Layout) -> bool {
        let mut start = 0;
        from.iter().all(|from| {
            let n = from.shape()[self.dim];
            let local = to.mesh().ranks().iter().all(|&rank| {
                let part = self.part_of(to, rank, start, n);
                part.volume() == 0
                    || from.boxes_of(rank).iter().any(|o| o.global.intersect(&part).as_ref() == Some(&part))
            });
            start += n;
            local
        })
    }

    /// The box that a rank needs of an input that covers `start..start + n` of the joined dimension of the result.
    fn part_of(&self, to: &Layout, rank: usize, start: usize, n: usize) -> TensorBox {
        let (offsets, sizes) = (to.global_offset(rank), to.local_shape(rank));
        let mut part = TensorBox { offsets, sizes };
        let (from, until) = (part.offsets[self.dim], part.offsets[self.dim] + part.sizes[self.dim]);
        let (from, until) = (from.clamp(start, start + n), until.clamp(start, start + n));
        part.offsets[self.dim] = from - start;
        part.sizes[self.dim] = until - from;
        part
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "cat", samples: pairs, apply: |x| Ok(vec![DTensor::cat(&[&x[0], &x[1]], 0)?]) },
    OpEntry {
        name: "stack",
        samples: twins,
        apply: |x| Ok(vec![DTensor::stack(&[&x[0], &x[1]], 0)?, DTensor::stack(&[&x[0], &x[1]], -1)?]),
    },
    OpEntry {
        name: "pad",
        samples,
        apply: |x| Ok(vec![x[0].pad(&[(1, 0), (2, 3)], 7.0)?, x[0].pad(&[(0, 0), (0, 1)], 0.0)?]),
    },
    OpEntry { name: "roll", samples, apply: |x| Ok(vec![x[0].roll(&[1, -2], &[0, 1])?, x[0].roll(&[3], &[])?]) },
    OpEntry { name: "repeat", samples, apply: |x| Ok(vec![x[0].repeat(&[2, 1, 3])?, x[0].repeat(&[2, 1])?]) },
    OpEntry {
        name: "repeat_interleave",
        samples,
        apply: |x| Ok(vec![x[0].repeat_interleave(2, 0)?, x[0].repeat_interleave(3, -1)?]),
    },
];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[5, 3], &[8, 1], &[0, 2]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::I64)]).collect()
}

fn pairs() -> Vec<Vec<SampleInput>> {
    let shapes: [(&[usize], &[usize]); 3] = [(&[5, 3], &[2, 3]), (&[4, 2], &[4, 2]), (&[0, 2], &[3, 2])];
    shapes.iter().map(|(a, b)| vec![SampleInput::new(a, DType::I64), SampleInput::new(b, DType::I64)]).collect()
}

fn twins() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 2] = [&[5, 3], &[1, 4]];
    shapes.iter().map(|s| vec![SampleInput::new(s, DType::I64), SampleInput::new(s, DType::I64)]).collect()
}
