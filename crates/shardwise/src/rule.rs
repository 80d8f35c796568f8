//! Sharding rules: in which layouts an operator can run, and which of them is cheapest.
//!
//! An operator names the dimensions of its tensors, as in `mk,kn->mn`. Along one mesh axis it can then run in a few ways:
//! every rank computes everything (replicated); one named dimension is sharded, in every tensor that has it; or `Partial`
//! placements of inputs pass through to the outputs unreduced. One choice per mesh axis determines the layout of every tensor.
//!
//! Shardy, the partitioner of JAX, calls the named dimensions *factors*. Pure arithmetic: nothing here communicates.

mod explain;

use smallvec::SmallVec;

use crate::error::Result;
use crate::layout::{Layout, TensorBox, TensorMeta};
use crate::mesh::Mesh;
use crate::placement::{Placement, ReduceOp};

/// What sharding a dimension of an operator means for its outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DimSharding {
    /// Ranks compute their shards independently: outputs that have the dimension are sharded on it. (Shardy: pass-through.)
    Free,
    /// Ranks compute their shards independently, and outputs without the dimension are `Partial` with this reduction, as the
    /// `k` of a matrix product. (Shardy: reduction.)
    Reduces(ReduceOp),
    /// The operator needs the whole dimension on every rank, as a sort does. (Shardy: need-replication.)
    Never,
}

/// The named dimensions of an operator's tensors, and the `Partial` placements that pass through it.
///
/// Names are numbers: two tensor dimensions with one number have the same size and are sharded together.
#[doc(alias = "register_sharding")]
#[doc(alias = "op_sharding_rule")]
#[derive(Debug, Clone)]
pub struct Signature {
    /// Per dimension of the operator what sharding it means.
    dims: SmallVec<[DimSharding; 8]>,
    /// Per input and tensor dimension the dimension of the operator; `None`: never sharded, for instance because it broadcasts.
    inputs: Vec<Vec<Option<usize>>>,
    outputs: Vec<Vec<Option<usize>>>,
    passes: Vec<PartialPass>,
}

/// A combination of `Partial` inputs with which the operator can run without reducing them first.
#[derive(Debug, Clone)]
struct PartialPass {
    /// Per input its reduction, or `None` for an input that is not partial.
    inputs: SmallVec<[Option<ReduceOp>; 3]>,
    output: ReduceOp,
}

/// The layouts in which one call of an operator runs: what every rank needs of the inputs, and the layouts of the outputs.
#[doc(alias = "OpSpec")]
#[doc(alias = "OutputSharding")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// One requirement per input, in order; inputs in another layout are redistributed.
    pub inputs: Vec<RequiredInput>,
    /// One layout per output, in order. The kernel must return the local shards of these layouts.
    pub outputs: Vec<Layout>,
}

impl Decision {
    /// A decision that needs the inputs in the layouts `inputs` and returns outputs in the layouts `outputs`.
    pub fn new(inputs: impl IntoIterator<Item = Layout>, outputs: impl IntoIterator<Item = Layout>) -> Self {
        Decision {
            inputs: inputs.into_iter().map(RequiredInput::Layout).collect(),
            outputs: outputs.into_iter().collect(),
        }
    }
}

/// A call of an operator for which a custom rule decides, see [`override_rule`](crate::ops::override_rule).
#[derive(Debug)]
pub struct RuleCall<'a> {
    /// Layouts of the inputs, in order.
    pub inputs: &'a [&'a Layout],
    /// Global shape and type of each output.
    pub outputs: &'a [TensorMeta],
    /// The operator's own rule for this call, which its arguments determine: which dimensions it reduces, keeps or needs whole.
    pub signature: &'a Signature,
}

/// What an operator needs of one input before its kernel runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequiredInput {
    /// The input redistributed to this layout; nothing moves if it is there already.
    Layout(Layout),
    /// One box of the input per rank. Boxes may overlap, as the halos of a convolution do: ranks exchange what they lack.
    Boxes {
        /// The layout that the input is redistributed to first. Not partial along `axes`.
        from: Layout,
        /// The mesh axes along which ranks exchange data.
        axes: Vec<usize>,
        /// The box of every rank, in the order of the mesh.
        boxes: Vec<TensorBox>,
    },
}

impl Signature {
    /// The signature of a product of tensors, from an equation such as `mk,kn->mn`.
    ///
    /// Letters that are missing on the right are summed over. Every letter is one dimension of one size; see
    /// [`product`](Self::product) for tensors that broadcast.
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

    /// The signature of a product of tensors, from the number of each of their dimensions (`None`: it broadcasts).
    ///
    /// Numbers that the output lacks are summed over. Partial sums and means of one factor pass, because a product is linear in
    /// each factor.
    pub fn product(inputs: impl IntoIterator<Item = Vec<Option<usize>>>, output: Vec<Option<usize>>) -> Self {
        let inputs: Vec<Vec<Option<usize>>> = inputs.into_iter().collect();
        let count = inputs.iter().flatten().flatten().max().map_or(0, |last| last + 1);
        let kept = |dim: usize| output.contains(&Some(dim));
        let dims = (0..count)
            .map(|dim| if kept(dim) { DimSharding::Free } else { DimSharding::Reduces(ReduceOp::Sum) })
            .collect();
        let mut signature = Signature { dims, inputs, outputs: vec![output], passes: Vec::new() };
        // Linear in each factor, as long as the other factors are not partial.
        for factor in 0..signature.inputs.len() {
            for op in [ReduceOp::Sum, ReduceOp::Avg] {
                let partial = (0..signature.inputs.len()).map(|i| (i == factor).then_some(op));
                signature = signature.allow_partial(partial, op);
            }
        }
        signature
    }

    /// A signature from the dimensions of the operator and, per tensor, the number of each of its dimensions in `dims`
    /// (`None`: never sharded).
    pub fn new(
        dims: impl IntoIterator<Item = DimSharding>,
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

    /// Lets inputs that are all `Partial` with one reduction pass unreduced, whichever reduction it is.
    ///
    /// For operators that only move elements, such as a transpose.
    pub fn allow_all_partial(mut self) -> Self {
        for op in ReduceOp::ALL {
            let inputs = vec![Some(op); self.inputs.len()];
            self = self.allow_partial(inputs, op);
        }
        self
    }

    /// The signature of an elementwise operator on inputs that broadcast to `shape`.
    pub fn pointwise(inputs: &[&[usize]], shape: &[usize]) -> Self {
        let tensor = |input: &[usize]| -> Vec<Option<usize>> {
            let missing = shape.len() - input.len();
            (0..input.len()).map(|d| (input[d] == shape[d + missing]).then_some(d + missing)).collect()
        };
        Signature {
            dims: shape.iter().map(|_| DimSharding::Free).collect(),
            inputs: inputs.iter().map(|input| tensor(input)).collect(),
            outputs: vec![tensor(shape)],
            passes: Vec::new(),
        }
    }

    /// The signature of a reduction over the dimensions `reduced` of a tensor with `ndim` dimensions; `sharding` says what
    /// sharding those means.
    pub fn reduction(ndim: usize, reduced: &[usize], keepdim: bool, sharding: DimSharding) -> Self {
        let dims = (0..ndim).map(|d| if reduced.contains(&d) { sharding } else { DimSharding::Free }).collect();
        let output = (0..ndim).filter(|d| keepdim || !reduced.contains(d));
        let output = output.map(|d| (!reduced.contains(&d)).then_some(d)).collect();
        Signature { dims, inputs: vec![(0..ndim).map(Some).collect()], outputs: vec![output], passes: Vec::new() }
    }

    /// The signature of an operator that rearranges the dimensions of one tensor: per dimension of the output that of the input
    /// (`None`: a new one). Dimensions that do not stay cannot be sharded.
    pub fn rearrangement(ndim: usize, stays: &dyn Fn(usize) -> bool, output: Vec<Option<usize>>) -> Self {
        let dims = (0..ndim).map(|d| if stays(d) { DimSharding::Free } else { DimSharding::Never }).collect();
        Signature { dims, inputs: vec![(0..ndim).map(Some).collect()], outputs: vec![output], passes: Vec::new() }
    }

    /// What sharding a dimension of an input means; `None` if it is never sharded, for instance because it broadcasts.
    pub fn sharding(&self, input: usize, dim: usize) -> Option<DimSharding> {
        self.inputs[input][dim].map(|named| self.dims[named])
    }

    /// The dimensions of an input that no output has, because the operator reduces them.
    pub fn reduced_dims(&self, input: usize) -> Vec<usize> {
        let kept = |named: &Option<usize>| self.outputs.iter().any(|output| output.contains(named));
        let named = self.inputs[input].iter().enumerate();
        named.filter(|(_, named)| named.is_some() && !kept(named)).map(|(dim, _)| dim).collect()
    }

    /// Removes all ways to run on partial inputs: they are reduced first.
    pub fn forbid_partial(mut self) -> Self {
        self.passes.clear();
        self
    }

    /// Adds a way to run without reducing partial inputs: if they are `Partial` with these reductions (`None`: not partial), the
    /// outputs are `Partial` with `output`.
    pub fn allow_partial(mut self, inputs: impl IntoIterator<Item = Option<ReduceOp>>, output: ReduceOp) -> Self {
        self.passes.push(PartialPass { inputs: inputs.into_iter().collect(), output });
        self
    }
}

/// How an operator runs along one mesh axis.
#[derive(Debug, Clone, Copy, PartialEq)]
enum AxisChoice {
    /// Every rank computes everything.
    Replicate,
    /// A dimension of the operator is sharded, as in the input `leader`, or into plain chunks without one.
    Shard { dim: usize, leader: Option<usize> },
    /// Partial inputs pass unreduced, as `passes[i]` says.
    KeepPartial(usize),
}

impl Signature {
    /// Chooses the layouts in which the operator moves the fewest bytes, for inputs in these layouts.
    ///
    /// `elem` is the element size of each input in bytes, `shapes` are the shapes of the outputs. Every mesh axis is decided by
    /// itself, so the effort grows linearly with the number of axes; a joint search would be exponential.
    ///
    /// # Errors
    /// If the chosen placements do not form a layout.
    pub fn decide(&self, inputs: &[&Layout], elem: &[usize], shapes: &[&[usize]]) -> Result<Decision> {
        let mesh = inputs[0].mesh();
        let bytes: Vec<f64> = inputs
            .iter()
            .zip(elem)
            .map(|(layout, elem)| {
                let shards: usize = layout
                    .placements()
                    .iter()
                    .zip(mesh.shape())
                    .filter(|(p, _)| p.is_shard(None))
                    .map(|(_, n)| n)
                    .product();
                layout.shape().iter().product::<usize>() as f64 * *elem as f64 / shards as f64
            })
            .collect();
        // Per dimension of the operator the bytes of the outputs that are left partial if it is sharded: outputs without it.
        let without = |dim: usize| {
            let pairs = self.outputs.iter().zip(shapes).filter(|(output, _)| !output.contains(&Some(dim)));
            pairs.map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>() as f64 * elem[0] as f64
        };
        let partial: Vec<f64> = (0..self.dims.len()).map(without).collect();
        let choices: Vec<AxisChoice> =
            (0..mesh.ndim()).map(|axis| self.cheapest(inputs, &bytes, &partial, axis)).collect();
        let sharded_as_led = self.layouts(mesh, inputs, &choices, shapes, false);
        // Ragged sizes of an input belong to its other shards and may not fit the chosen ones; plain chunks always do.
        sharded_as_led.or_else(|_| self.layouts(mesh, inputs, &choices, shapes, true))
    }

    /// The choice along one axis that moves the fewest bytes. `bytes` are the local bytes of each input; `partial` are, per
    /// dimension of the operator, the bytes of the outputs that are left partial if it is sharded.
    ///
    /// Bytes stand for time: along one axis all options use the same link, whose bandwidth scales them alike. Latency is not
    /// modelled.
    fn cheapest(&self, inputs: &[&Layout], bytes: &[f64], partial: &[f64], axis: usize) -> AxisChoice {
        let mut options = vec![AxisChoice::Replicate];
        // A combination passes only if an input is partial so already: making a replicated tensor partial gains nothing.
        let is_partial = |pass: &PartialPass| {
            let mut pairs = inputs.iter().zip(&pass.inputs);
            pairs.any(|(l, op)| op.is_some_and(|op| l.placements()[axis] == Placement::Partial(op)))
        };
        for (i, layout) in inputs.iter().enumerate() {
            if let Some(dim) = layout.placements()[axis].shard_dim().and_then(|d| self.inputs[i][d])
                && self.dims[dim] != DimSharding::Never
            {
                options.push(AxisChoice::Shard { dim, leader: Some(i) });
            }
        }
        options.extend((0..self.passes.len()).filter(|&i| is_partial(&self.passes[i])).map(AxisChoice::KeepPartial));
        let cost = |choice: &AxisChoice| -> f64 {
            let moved: f64 = (0..inputs.len()).map(|i| bytes[i] * self.transition(inputs, i, axis, choice)).sum();
            match choice {
                // Sharding a summed dimension leaves outputs partial. If inputs are already sharded so, the caller asked for it
                // (row-parallel linear) and may combine the partial sum with other ones before it is reduced: free. If inputs have
                // to be moved for it, the reduction that will follow is charged: the bytes of those outputs once.
                AxisChoice::Shard { dim, leader } if leader.is_none() || moved > 0.0 => match self.dims[*dim] {
                    DimSharding::Reduces(_) => moved + partial[*dim],
                    _ => moved,
                },
                _ => moved,
            }
        };
        // If every option so far moves data, sharding a dimension on which no input is sharded may be cheaper: a partial input
        // is then reduce-scattered, at half the bytes of an all-reduce.
        if options.iter().all(|choice| cost(choice) > 0.0) {
            let free = (0..self.dims.len()).filter(|&d| self.dims[d] != DimSharding::Never);
            options.extend(free.map(|dim| AxisChoice::Shard { dim, leader: None }));
        }
        // Ties: sharded as an input is (each rank computes 1/k), then partial (no more work than before), then replicated
        // (every rank computes everything), and last a sharding that no input has, which later operators would have to undo.
        let preference = |choice: &AxisChoice| match choice {
            AxisChoice::Shard { leader: Some(_), .. } => 0,
            AxisChoice::KeepPartial(_) => 1,
            AxisChoice::Replicate => 2,
            AxisChoice::Shard { leader: None, .. } => 3,
        };
        let better =
            |a: &&AxisChoice, b: &&AxisChoice| cost(a).total_cmp(&cost(b)).then(preference(a).cmp(&preference(b)));
        *options.iter().min_by(better).expect("replicated is always possible")
    }

    /// What redistributing an input along one axis of size `k` moves per rank, in units of its local bytes: an all-gather
    /// receives the other `k - 1` shards; a reduce-scatter and a move between shards transfer `(k - 1) / k`; an all-reduce is
    /// a reduce-scatter followed by an all-gather of the result, twice `(k - 1) / k`. Narrowing a replicated input is free.
    fn transition(&self, inputs: &[&Layout], input: usize, axis: usize, choice: &AxisChoice) -> f64 {
        let (now, k) = (&inputs[input].placements()[axis], inputs[input].mesh().shape()[axis] as f64);
        let gather = k - 1.0;
        let exchange = (k - 1.0) / k;
        let wanted = match choice {
            AxisChoice::Replicate => None,
            AxisChoice::Shard { dim, .. } => self.inputs[input].iter().position(|d| *d == Some(*dim)),
            AxisChoice::KeepPartial(pass) => {
                return match (now, self.passes[*pass].inputs[input]) {
                    (Placement::Partial(op), Some(wanted)) if *op == wanted => 0.0,
                    (Placement::Replicate, _) => 0.0,
                    (Placement::Partial(_), _) => 2.0 * exchange,
                    _ => gather,
                };
            }
        };
        match (now, wanted) {
            (Placement::Replicate, _) => 0.0,
            (Placement::Partial(_), Some(_)) => exchange,
            (Placement::Partial(_), None) => 2.0 * exchange,
            (_, None) => gather,
            (now, Some(dim)) => {
                let same_dim = now.shard_dim() == Some(dim);
                let led = matches!(choice, AxisChoice::Shard { leader: Some(l), .. } if sharded_alike(inputs, *l, input, axis));
                if same_dim && led { 0.0 } else { exchange }
            }
        }
    }

    /// The layouts that one choice per axis results in; `plain`: sharded into plain chunks, whatever the leaders have.
    fn layouts(
        &self,
        mesh: &Mesh,
        inputs: &[&Layout],
        choices: &[AxisChoice],
        shapes: &[&[usize]],
        plain: bool,
    ) -> Result<Decision> {
        let orders: Vec<Vec<usize>> =
            (0..self.dims.len()).map(|dim| shard_order_of(inputs, choices, &self.inputs, dim)).collect();
        let layout = |tensor: &[Option<usize>], shape: &[usize], of: TensorRole| -> Result<Layout> {
            let placement = |(axis, choice): (usize, &AxisChoice)| match choice {
                AxisChoice::Replicate => Placement::Replicate,
                AxisChoice::KeepPartial(pass) => match of {
                    TensorRole::Input(i) => {
                        self.passes[*pass].inputs[i].map_or(Placement::Replicate, Placement::Partial)
                    }
                    TensorRole::Output => Placement::Partial(self.passes[*pass].output),
                },
                AxisChoice::Shard { dim, leader } => match tensor.iter().position(|d| d == &Some(*dim)) {
                    Some(at) => match leader.filter(|_| !plain).map(|l| &inputs[l].placements()[axis]) {
                        Some(led) => led.with_dim(at),
                        None => Placement::Shard(at as isize),
                    },
                    None => match (of, self.dims[*dim]) {
                        (TensorRole::Output, DimSharding::Reduces(op)) => Placement::Partial(op),
                        _ => Placement::Replicate,
                    },
                },
            };
            let placements: Vec<Placement> = choices.iter().enumerate().map(placement).collect();
            let orders: Vec<Vec<usize>> = tensor.iter().map(|d| d.map_or(Vec::new(), |d| orders[d].clone())).collect();
            Layout::from_shard_orders(mesh, shape, &placements, &orders)
        };
        let needed = inputs
            .iter()
            .enumerate()
            .map(|(i, l)| layout(&self.inputs[i], l.shape(), TensorRole::Input(i)).map(RequiredInput::Layout));
        let made = self.outputs.iter().zip(shapes).map(|(tensor, shape)| layout(tensor, shape, TensorRole::Output));
        Ok(Decision { inputs: needed.collect::<Result<_>>()?, outputs: made.collect::<Result<_>>()? })
    }
}

#[derive(Clone, Copy)]
enum TensorRole {
    Input(usize),
    Output,
}

/// Whether two inputs are sharded alike along an axis: the same placement, after the same axes in the order of shards.
fn sharded_alike(inputs: &[&Layout], a: usize, b: usize, axis: usize) -> bool {
    let sharding = |i: usize| {
        let placement = &inputs[i].placements()[axis];
        let dim = placement.shard_dim()?;
        let before = inputs[i].shard_order(dim).iter().take_while(|&&a| a != axis).copied().collect::<Vec<_>>();
        Some((before, placement.with_dim(0)))
    };
    a == b || sharding(a) == sharding(b)
}

/// The axes that shard a dimension of the operator, in order: those led by an input in its shard order, then the rest.
fn shard_order_of(
    inputs: &[&Layout],
    choices: &[AxisChoice],
    tensors: &[Vec<Option<usize>>],
    dim: usize,
) -> Vec<usize> {
    let led_by = |axis: usize, by: Option<usize>| matches!(choices[axis], AxisChoice::Shard { dim: d, leader } if d == dim && leader == by);
    let mut order = Vec::new();
    for (i, layout) in inputs.iter().enumerate() {
        if let Some(at) = tensors[i].iter().position(|d| d == &Some(dim)) {
            order.extend(layout.shard_order(at).iter().copied().filter(|&axis| led_by(axis, Some(i))));
        }
    }
    order.extend((0..choices.len()).filter(|&axis| led_by(axis, None)));
    order
}
