//! Rules: how an operator may be spread over a mesh, and which way is cheapest.
//!
//! An operator names the dimensions of its tensors: `mk,kn->mn`. Along one mesh axis it can then be executed in a few
//! ways: every rank does the whole; a dimension is sharded, in every tensor that has it; or the operands of a partial
//! placement pass through. A choice per axis gives the layout of every tensor. Pure arithmetic.

use smallvec::SmallVec;

use crate::error::Result;
use crate::layout::{Layout, TensorBox};
use crate::mesh::Mesh;
use crate::placement::{Placement, ReduceOp};

/// What happens when ranks share a dimension of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// Each rank does its part of it; outputs that have the dimension are cut, others are not affected.
    Free,
    /// Each rank does its part, and outputs without the dimension are partial with this reduction.
    Reduces(ReduceOp),
    /// It cannot be shared.
    Never,
}

/// The dimensions of an operator's tensors by name, and which partial placements pass through it.
#[derive(Debug, Clone)]
pub struct Signature {
    /// Per dimension of the operator what happens when it is shared.
    dims: SmallVec<[Shared; 8]>,
    /// Per input and tensor dimension the dimension of the operator; `None` for one that is broadcast.
    inputs: Vec<Vec<Option<usize>>>,
    outputs: Vec<Vec<Option<usize>>>,
    passes: Vec<Pass>,
}

/// Partial placements of inputs that pass through to the outputs.
#[derive(Debug, Clone)]
struct Pass {
    /// Per input its reduction, or `None` for an input that must be whole.
    inputs: SmallVec<[Option<ReduceOp>; 3]>,
    output: ReduceOp,
}

/// How an operator is executed: what every rank needs of its inputs, and the layouts of its outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// What is needed of every input.
    pub inputs: Vec<Need>,
    /// Layout that every output has.
    pub outputs: Vec<Layout>,
}

impl Decision {
    /// Inputs in some layouts give outputs in others.
    pub fn new(inputs: impl IntoIterator<Item = Layout>, outputs: impl IntoIterator<Item = Layout>) -> Self {
        Decision { inputs: inputs.into_iter().map(Need::As).collect(), outputs: outputs.into_iter().collect() }
    }
}

/// What an operator needs of one input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Need {
    /// The input in this layout.
    As(Layout),
    /// A box for every rank, which may overlap: what a rank lacks it gets from those that hold it in the layout `from`.
    Boxes {
        /// Layout that the input is brought to first; not partial where boxes are fetched.
        from: Layout,
        /// The mesh axes along which boxes move.
        axes: Vec<usize>,
        /// The box of every rank of the mesh, in its order.
        boxes: Vec<TensorBox>,
    },
}

impl Signature {
    /// A product of tensors from an equation such as `mk,kn->mn`: letters on the left that are missing on the right are summed
    /// over. Every letter is one dimension of one size; see [`product`](Self::product) for tensors that broadcast.
    ///
    /// # Panics
    /// If there is no arrow, or a letter on the right that is not on the left.
    pub fn einsum(equation: &str) -> Self {
        let (left, right) = equation.split_once("->").expect("an equation has an arrow");
        let mut letters: Vec<char> = left.chars().filter(|c| *c != ',').collect();
        letters.sort_unstable();
        letters.dedup();
        let number = |c: char| letters.binary_search(&c).expect("letters on the right are those on the left");
        let names = |term: &str| term.chars().map(|c| Some(number(c))).collect();
        Signature::product(left.split(',').map(names), names(right))
    }

    /// A product of tensors, from the number of each of their dimensions (`None`: one that is broadcast): numbers that the
    /// output lacks are summed over. Partial sums and means of one factor pass.
    pub fn product(inputs: impl IntoIterator<Item = Vec<Option<usize>>>, output: Vec<Option<usize>>) -> Self {
        let inputs: Vec<Vec<Option<usize>>> = inputs.into_iter().collect();
        let count = inputs.iter().flatten().flatten().max().map_or(0, |last| last + 1);
        let kept = |dim: usize| output.contains(&Some(dim));
        let dims =
            (0..count).map(|dim| if kept(dim) { Shared::Free } else { Shared::Reduces(ReduceOp::Sum) }).collect();
        let mut signature = Signature { dims, inputs, outputs: vec![output], passes: Vec::new() };
        // Linear in each factor.
        for factor in 0..signature.inputs.len() {
            for op in [ReduceOp::Sum, ReduceOp::Avg] {
                let partial = (0..signature.inputs.len()).map(|i| (i == factor).then_some(op));
                signature = signature.passing(partial, op);
            }
        }
        signature
    }

    /// From the dimensions of the operator and, per tensor, the name (number) of each of its dimensions.
    pub fn new(
        dims: impl IntoIterator<Item = Shared>,
        inputs: impl IntoIterator<Item = Vec<Option<usize>>>,
        outputs: impl IntoIterator<Item = Vec<Option<usize>>>,
    ) -> Self {
        Signature {
            dims: dims.into_iter().collect(),
            inputs: inputs.into_iter().collect(),
            outputs: outputs.into_iter().collect(),
            passes: Vec::new(),
        }
    }

    /// The same, with operands of every reduction passing from all inputs to the output.
    pub fn passing_all(mut self) -> Self {
        for op in ReduceOp::ALL {
            let inputs = vec![Some(op); self.inputs.len()];
            self = self.passing(inputs, op);
        }
        self
    }

    /// Elementwise on inputs that broadcast to `shape`.
    pub fn pointwise(inputs: &[&[usize]], shape: &[usize]) -> Self {
        let tensor = |input: &[usize]| -> Vec<Option<usize>> {
            let missing = shape.len() - input.len();
            (0..input.len()).map(|d| (input[d] == shape[d + missing]).then_some(d + missing)).collect()
        };
        Signature {
            dims: shape.iter().map(|_| Shared::Free).collect(),
            inputs: inputs.iter().map(|input| tensor(input)).collect(),
            outputs: vec![tensor(shape)],
            passes: Vec::new(),
        }
    }

    /// A reduction of the dimensions `reduced` of a tensor with `ndim` dimensions; `shared` says what becomes of them.
    pub fn reduction(ndim: usize, reduced: &[usize], keepdim: bool, shared: Shared) -> Self {
        let dims = (0..ndim).map(|d| if reduced.contains(&d) { shared } else { Shared::Free }).collect();
        let output = (0..ndim).filter(|d| keepdim || !reduced.contains(d));
        let output = output.map(|d| (!reduced.contains(&d)).then_some(d)).collect();
        Signature { dims, inputs: vec![(0..ndim).map(Some).collect()], outputs: vec![output], passes: Vec::new() }
    }

    /// The dimensions of one tensor under other names: per dimension of the output the input's (`None`: a new one). Those
    /// that do not stay cannot be shared.
    pub fn renaming(ndim: usize, stays: &dyn Fn(usize) -> bool, output: Vec<Option<usize>>) -> Self {
        let dims = (0..ndim).map(|d| if stays(d) { Shared::Free } else { Shared::Never }).collect();
        Signature { dims, inputs: vec![(0..ndim).map(Some).collect()], outputs: vec![output], passes: Vec::new() }
    }

    /// The same without partial placements that pass.
    pub fn without_passes(mut self) -> Self {
        self.passes.clear();
        self
    }

    /// Adds: if the inputs are partial with these reductions (`None`: not partial), the outputs are partial with `output`.
    pub fn passing(mut self, inputs: impl IntoIterator<Item = Option<ReduceOp>>, output: ReduceOp) -> Self {
        self.passes.push(Pass { inputs: inputs.into_iter().collect(), output });
        self
    }
}

/// What happens along one mesh axis.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Along {
    /// Every rank does the whole.
    Whole,
    /// A dimension is shared, cut as the input `leader` is, or into plain chunks.
    Cut { dim: usize, leader: Option<usize> },
    /// Operands of the pass with this number pass through.
    Pass(usize),
}

impl Signature {
    /// The cheapest way to carry the operator out on inputs in these layouts: bytes are counted along each axis by
    /// itself, so that the effort grows with the number of axes and not with its power. `elem` is the size of an element
    /// of each input, `shapes` are those of the outputs.
    pub fn decide(&self, inputs: &[&Layout], elem: &[usize], shapes: &[&[usize]]) -> Result<Decision> {
        let mesh = inputs[0].mesh();
        let bytes: Vec<f64> = inputs
            .iter()
            .zip(elem)
            .map(|(layout, elem)| {
                let cut: usize = layout
                    .placements()
                    .iter()
                    .zip(mesh.shape())
                    .filter(|(p, _)| p.is_shard(None))
                    .map(|(_, n)| n)
                    .product();
                layout.shape().iter().product::<usize>() as f64 * *elem as f64 / cut as f64
            })
            .collect();
        // Per dimension of the operator the bytes of the outputs that stay partial if it is sharded: those without it.
        let without = |dim: usize| {
            let pairs = self.outputs.iter().zip(shapes).filter(|(output, _)| !output.contains(&Some(dim)));
            pairs.map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>() as f64 * elem[0] as f64
        };
        let partial: Vec<f64> = (0..self.dims.len()).map(without).collect();
        let along: Vec<Along> = (0..mesh.ndim()).map(|axis| self.cheapest(inputs, &bytes, &partial, axis)).collect();
        let cut_as_led = self.layouts(mesh, inputs, &along, shapes, false);
        // Ragged sizes that fit one input's other cuts need not fit the choice; plain chunks always do.
        cut_as_led.or_else(|_| self.layouts(mesh, inputs, &along, shapes, true))
    }

    /// The choice along one axis; `partial` are, per dimension of the operator, the bytes of the outputs that are left
    /// partial if it is sharded.
    fn cheapest(&self, inputs: &[&Layout], bytes: &[f64], partial: &[f64], axis: usize) -> Along {
        let mut options = vec![Along::Whole];
        // Only what is partial passes: nothing is brought into a reduction that no input is in, nor one its type has not.
        let is_partial = |pass: &Pass| {
            let mut pairs = inputs.iter().zip(&pass.inputs);
            pairs.any(|(l, op)| op.is_some_and(|op| l.placements()[axis] == Placement::Partial(op)))
        };
        for (i, layout) in inputs.iter().enumerate() {
            if let Some(dim) = layout.placements()[axis].shard_dim().and_then(|d| self.inputs[i][d])
                && self.dims[dim] != Shared::Never
            {
                options.push(Along::Cut { dim, leader: Some(i) });
            }
        }
        options.extend((0..self.passes.len()).filter(|&i| is_partial(&self.passes[i])).map(Along::Pass));
        let cost = |along: &Along| -> f64 {
            let moved: f64 = (0..inputs.len()).map(|i| bytes[i] * self.transition(inputs, i, axis, along)).sum();
            match along {
                // A partial sum that inputs have to be moved for, or that none asks for, will have to be reduced.
                Along::Cut { dim, leader } if leader.is_none() || moved > 0.0 => match self.dims[*dim] {
                    Shared::Reduces(_) => moved + partial[*dim],
                    _ => moved,
                },
                _ => moved,
            }
        };
        // Where nothing is free, sharing a dimension that no input is cut along may still be cheaper than the whole.
        if options.iter().all(|along| cost(along) > 0.0) {
            let free = (0..self.dims.len()).filter(|&d| self.dims[d] != Shared::Never);
            options.extend(free.map(|dim| Along::Cut { dim, leader: None }));
        }
        // Among equals: sharing work is better than passing operands, and that is better than doing the whole everywhere.
        let rank = |along: &Along| match along {
            Along::Cut { leader: Some(_), .. } => 0,
            Along::Pass(_) => 1,
            Along::Whole => 2,
            Along::Cut { leader: None, .. } => 3,
        };
        let better = |a: &&Along, b: &&Along| cost(a).total_cmp(&cost(b)).then(rank(a).cmp(&rank(b)));
        *options.iter().min_by(better).expect("doing the whole is always possible")
    }

    /// What it takes to bring an input where it is needed along one axis, in units of its local bytes.
    fn transition(&self, inputs: &[&Layout], input: usize, axis: usize, along: &Along) -> f64 {
        let (now, k) = (&inputs[input].placements()[axis], inputs[input].mesh().shape()[axis] as f64);
        let gather = k - 1.0;
        let part = (k - 1.0) / k;
        let wanted = match along {
            Along::Whole => None,
            Along::Cut { dim, .. } => self.inputs[input].iter().position(|d| *d == Some(*dim)),
            Along::Pass(pass) => {
                return match (now, self.passes[*pass].inputs[input]) {
                    (Placement::Partial(op), Some(wanted)) if *op == wanted => 0.0,
                    (Placement::Replicate, _) => 0.0,
                    (Placement::Partial(_), _) => 2.0 * part,
                    _ => gather,
                };
            }
        };
        match (now, wanted) {
            (Placement::Replicate, _) => 0.0,
            (Placement::Partial(_), Some(_)) => part,
            (Placement::Partial(_), None) => 2.0 * part,
            (_, None) => gather,
            (now, Some(dim)) => {
                let same_dim = now.shard_dim() == Some(dim);
                let led = matches!(along, Along::Cut { leader: Some(l), .. } if same_cut(inputs, *l, input, axis));
                if same_dim && led { 0.0 } else { part }
            }
        }
    }

    /// The layouts that a choice per axis means.
    fn layouts(
        &self,
        mesh: &Mesh,
        inputs: &[&Layout],
        along: &[Along],
        shapes: &[&[usize]],
        plain: bool,
    ) -> Result<Decision> {
        let cuts: Vec<Vec<usize>> =
            (0..self.dims.len()).map(|dim| order_of_cuts(inputs, along, &self.inputs, dim)).collect();
        let layout = |tensor: &[Option<usize>], shape: &[usize], of: Tensor| -> Result<Layout> {
            let placement = |(axis, along): (usize, &Along)| match along {
                Along::Whole => Placement::Replicate,
                Along::Pass(pass) => match of {
                    Tensor::Input(i) => self.passes[*pass].inputs[i].map_or(Placement::Replicate, Placement::Partial),
                    Tensor::Output => Placement::Partial(self.passes[*pass].output),
                },
                Along::Cut { dim, leader } => match tensor.iter().position(|d| d == &Some(*dim)) {
                    Some(at) => match leader.filter(|_| !plain).map(|l| &inputs[l].placements()[axis]) {
                        Some(led) => led.with_dim(at),
                        None => Placement::Shard(at as isize),
                    },
                    None => match (of, self.dims[*dim]) {
                        (Tensor::Output, Shared::Reduces(op)) => Placement::Partial(op),
                        _ => Placement::Replicate,
                    },
                },
            };
            let placements: Vec<Placement> = along.iter().enumerate().map(placement).collect();
            let cuts: Vec<Vec<usize>> = tensor.iter().map(|d| d.map_or(Vec::new(), |d| cuts[d].clone())).collect();
            Layout::from_shard_orders(mesh, shape, &placements, &cuts)
        };
        let needed =
            inputs.iter().enumerate().map(|(i, l)| layout(&self.inputs[i], l.shape(), Tensor::Input(i)).map(Need::As));
        let made = self.outputs.iter().zip(shapes).map(|(tensor, shape)| layout(tensor, shape, Tensor::Output));
        Ok(Decision { inputs: needed.collect::<Result<_>>()?, outputs: made.collect::<Result<_>>()? })
    }
}

#[derive(Clone, Copy)]
enum Tensor {
    Input(usize),
    Output,
}

/// Whether two inputs are cut alike along an axis: the same placement, behind the same cuts of the dimension.
fn same_cut(inputs: &[&Layout], a: usize, b: usize, axis: usize) -> bool {
    let cut = |i: usize| {
        let placement = &inputs[i].placements()[axis];
        let dim = placement.shard_dim()?;
        let before = inputs[i].shard_order(dim).iter().take_while(|&&a| a != axis).copied().collect::<Vec<_>>();
        Some((before, placement.with_dim(0)))
    };
    a == b || cut(a) == cut(b)
}

/// The axes that share a dimension of the operator: those led by an input in its order, inputs one after the other.
fn order_of_cuts(inputs: &[&Layout], along: &[Along], tensors: &[Vec<Option<usize>>], dim: usize) -> Vec<usize> {
    let led_by = |axis: usize, by: Option<usize>| matches!(along[axis], Along::Cut { dim: d, leader } if d == dim && leader == by);
    let mut order = Vec::new();
    for (i, layout) in inputs.iter().enumerate() {
        if let Some(at) = tensors[i].iter().position(|d| d == &Some(dim)) {
            order.extend(layout.shard_order(at).iter().copied().filter(|&axis| led_by(axis, Some(i))));
        }
    }
    order.extend((0..along.len()).filter(|&axis| led_by(axis, None)));
    order
}
