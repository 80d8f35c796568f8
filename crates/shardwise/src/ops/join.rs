//! Tensors joined along a dimension. Where the dimension is cut, ranks fetch what their part of the result lacks; what
//! they hold already stays.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::{OpEntry, Sample, dtype};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{Layout, TensorBox, TensorMeta, coordinates, ragged};
use crate::mesh::Mesh;
use crate::op::{Accumulation, Gradient, Op, OpPlan, Place, dispatch};
use crate::placement::Placement;
use crate::rule::{Decision, Need, Shared, Signature};
use crate::tensor::{DTensor, Keeps};
use shardwise_kernels::{Number, concat};

/// Joins its inputs along a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Cat {
    dim: usize,
}

impl DTensor {
    /// The tensors one after the other along a dimension.
    #[track_caller]
    pub fn cat(tensors: &[&DTensor], dim: isize) -> Result<DTensor> {
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

    /// The tensors, all of one shape, one after the other along a new dimension.
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

    /// A border of one number: `(before, after)` per dimension, from the last dimension backwards.
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
                let whole = vec![Placement::Replicate; padded.placements().len()];
                DTensor::full(value, (shape.as_slice(), padded.dtype()), padded.device_mesh(), whole)
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

    /// The elements moved on by `shifts` places along `dims`; those that leave at the end enter at the front.
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

    /// The tensor so many times per dimension; new dimensions in front.
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

    /// Every slice along a dimension so many times.
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
        Accumulation::OneTerm
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
        let shared = (0..first.len()).map(|d| if d == self.dim { Shared::Never } else { Shared::Free });
        let signature = Signature::new(shared, inputs.iter().map(|_| dims()), [dims()]).passing_all();
        let mut shape = first.clone();
        // A sum that overflows is refused as a shape that memory cannot address.
        shape[self.dim] = inputs.iter().fold(0, |sum, m| sum.saturating_add(m.shape[self.dim]));
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: inputs[0].dtype }] })
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        let mesh = inputs[0].mesh();
        let shape = &plan.outputs[0].shape;
        // Along an axis the joined dimension stays cut if most of the data is cut so.
        let weight = |axis: usize, wanted: &dyn Fn(usize) -> bool| -> usize {
            let cut = |l: &&&Layout| l.placements()[axis].shard_dim().is_some_and(wanted);
            inputs.iter().filter(cut).map(|l| l.shape().iter().product::<usize>()).sum()
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
        let elsewhere = plan.signature.decide(&bare.iter().collect::<Vec<_>>(), elem, &[shape])?;
        let mut from = Vec::new();
        for (input, need) in inputs.iter().zip(&elsewhere.inputs) {
            let Need::As(other) = need else { unreachable!("a signature asks for layouts") };
            from.push(self.cut_along(input, other, &along)?);
        }
        let to = self.output(&from, &elsewhere.outputs[0], &along)?;
        let mut start = 0;
        let mut needs = Vec::new();
        for from in from {
            let n = from.shape()[self.dim];
            let boxes = mesh.ranks().iter().map(|&rank| self.part_of(&to, rank, start, n)).collect();
            start += n;
            needs.push(Need::Boxes { from, axes: along.clone(), boxes });
        }
        Ok(Decision { inputs: needs, outputs: vec![to] })
    }

    fn run(&self, inputs: &[Tensor], _: &Place<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![concat(inputs, self.dim)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(Keeps::Nothing, |op, saved, gradients| {
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
    /// An input as it lies `elsewhere`, and along the given axes cut in the joined dimension as it was, or in chunks if it
    /// was cut in another way; replicas stay.
    fn cut_along(&self, input: &Layout, elsewhere: &Layout, along: &[usize]) -> Result<Layout> {
        let build = |plain: bool| {
            let mut placements = elsewhere.placements().to_vec();
            let mut cuts = elsewhere.cuts();
            let mut order: Vec<usize> = input.shard_order(self.dim).to_vec();
            order.extend(along.iter().filter(|a| !input.shard_order(self.dim).contains(a)));
            for axis in order.into_iter().filter(|a| along.contains(a)) {
                placements[axis] = match &input.placements()[axis] {
                    whole if whole.is_replicate() => continue,
                    own if !plain && own.is_contiguous() && own.is_shard(Some(self.dim)) => own.clone(),
                    _ => Placement::Shard(self.dim as isize),
                };
                cuts[self.dim].push(axis);
            }
            Layout::from_cuts(input.mesh(), input.shape(), &placements, &cuts)
        };
        build(false).or_else(|_| build(true))
    }

    /// The layout of the result: chunks of the joined dimension, or, if one input alone is cut, its own cuts with what
    /// comes before and after it added at the ends, so that nothing moves.
    fn output(&self, from: &[Layout], elsewhere: &Layout, along: &[usize]) -> Result<Layout> {
        let mesh = elsewhere.mesh();
        let is_cut = |l: &&Layout| !l.shard_order(self.dim).is_empty();
        let leader = from.iter().filter(is_cut).max_by_key(|l| l.shape()[self.dim]).expect("some input is cut");
        let mut order = leader.shard_order(self.dim).to_vec();
        order.extend(along.iter().filter(|a| !leader.shard_order(self.dim).contains(a)));
        let with = |cut: &dyn Fn(usize) -> Placement| {
            let mut placements = elsewhere.placements().to_vec();
            let mut cuts = elsewhere.cuts();
            for &axis in &order {
                placements[axis] = cut(axis);
            }
            cuts[self.dim].clone_from(&order);
            Layout::from_cuts(mesh, elsewhere.shape(), &placements, &cuts)
        };
        let chunks = with(&|_| Placement::Shard(self.dim as isize))?;
        let total = elsewhere.shape()[self.dim];
        let Some(attached) = self.attached(from, leader, &order, mesh) else { return Ok(chunks) };
        let even = total.div_ceil(attached.len());
        if self.is_local(from, &chunks) || attached.iter().any(|&n| n > even + even / 2) {
            return Ok(chunks);
        }
        let placements = ragged(mesh, self.dim, &order, &attached);
        with(&|axis| placements.iter().find(|(a, _)| *a == axis).expect("one per axis").1.clone())
    }

    /// Sizes per coordinate if the parts of the only input that is cut stay where they are.
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

    /// Whether every rank holds what it needs for the layout `to`.
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

    /// The box of an input that begins at `start` of the result and is `n` long, as a rank needs it for its part.
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

pub(super) const OPS: &[OpEntry] = &[
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

fn samples() -> Vec<Vec<Sample>> {
    let shapes: [&[usize]; 3] = [&[5, 3], &[8, 1], &[0, 2]];
    shapes.iter().map(|shape| vec![Sample::new(shape, DType::I64)]).collect()
}

fn pairs() -> Vec<Vec<Sample>> {
    let shapes: [(&[usize], &[usize]); 3] = [(&[5, 3], &[2, 3]), (&[4, 2], &[4, 2]), (&[0, 2], &[3, 2])];
    shapes.iter().map(|(a, b)| vec![Sample::new(a, DType::I64), Sample::new(b, DType::I64)]).collect()
}

fn twins() -> Vec<Vec<Sample>> {
    let shapes: [&[usize]; 2] = [&[5, 3], &[1, 4]];
    shapes.iter().map(|s| vec![Sample::new(s, DType::I64), Sample::new(s, DType::I64)]).collect()
}
