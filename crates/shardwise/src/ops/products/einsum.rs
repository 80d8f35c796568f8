//! Matrix products and `einsum`: one equation of labels determines the sharding rule, the kernel and the gradient.

use std::borrow::Cow;
use std::hash::{Hash, Hasher};
use std::panic::Location;
use std::sync::LazyLock;

use candle_core::{DType, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpKind, OpPlan, dispatch, dispatch_onto, name_call};
use crate::ops::gradients::accumulate::target;
use crate::ops::products::contraction::order;
use crate::ops::products::equation::{Equation, Label, Term, batch, distinct, letters, size_of};
use crate::ops::products::local_product::{ProductResult, diagonal, embedded, product, sum_to, without_stretched};
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::placement::Placement;
use crate::rule::Signature;
use crate::tensor::{DTensor, SaveForBackward, SavedTensors};
use shardwise_kernels::{add_assign, batched_matmul as matrix_product, batched_matmul_f32, contiguous};

/// The dimensions of matrix products.
const M: Label = Label::letter('m');
const K: Label = Label::letter('k');
const N: Label = Label::letter('n');

// Built once: composing them would take a third of the time that a call of a small product takes.
static MATRICES: LazyLock<Equation> = LazyLock::new(|| equation(["mk", "kn"], "mn"));
static BATCHES: LazyLock<Equation> = LazyLock::new(|| equation(["bmk", "bkn"], "bmn"));
static MATRIX_VECTOR: LazyLock<Equation> = LazyLock::new(|| equation(["mk", "k"], "m"));
static INNER: LazyLock<Equation> = LazyLock::new(|| equation(["k", "k"], ""));
static OUTER: LazyLock<Equation> = LazyLock::new(|| equation(["m", "n"], "mn"));

fn equation(terms: [&str; 2], output: &str) -> Equation {
    Equation::new(terms.map(|term| letters(term).collect()), letters(output))
}

/// A product of one or two tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Einsum {
    name: &'static str,
    equation: Cow<'static, Equation>,
    /// Whether a dimension of size 1 broadcasts to the size that its letter has in the other tensor.
    stretches: bool,
}

impl Hash for Einsum {
    /// Without the name, which dispatch hashes anyway.
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&*self.equation, self.stretches).hash(state);
    }
}

impl DTensor {
    /// Evaluates an Einstein summation such as `bmk,bkn->bmn`; letters missing on the right are summed over.
    ///
    /// A letter that is sharded in all tensors that have it needs no communication: if it is summed over, the result is
    /// `Partial(Sum)`, else it is sharded on that letter. Other combinations redistribute the cheapest operands (collective).
    ///
    /// Equations are those of PyTorch: `...` stands for dimensions that broadcast, a letter that one tensor has twice for its
    /// diagonal, a dimension of size 1 broadcasts to the size of its letter in the other tensors, and without `->` the output has
    /// the letters that occur once, in alphabetical order, capital letters first.
    ///
    /// Three or more tensors are multiplied two at a time, in the order with the fewest multiplications (greedily for more than
    /// eight tensors); half precision is rounded after each product.
    ///
    /// # Errors
    /// If the equation is malformed, or sizes of a letter differ.
    #[track_caller]
    pub fn einsum(equation: &str, inputs: &[&DTensor]) -> Result<DTensor> {
        let site = Location::caller();
        if inputs.is_empty() {
            let found = format!("`{equation}` without tensors");
            return Err(ErrorKind::Operands.error(
                "operands",
                found,
                "at least one tensor",
                "pass the tensors of the equation",
            ));
        }
        let ndims: Vec<usize> = inputs.iter().map(|x| x.ndim()).collect();
        let equation = Equation::parse(equation, &ndims).map_err(|e| name_call(e, "einsum", inputs, site))?;
        if inputs.len() > 2 {
            return chain(&equation, inputs);
        }
        multiply("einsum", equation, true, inputs)
    }

    /// Computes the matrix product; vectors and broadcasting leading dimensions as in PyTorch.
    ///
    /// Communicates nothing if the rows of the left or the columns of the right operand are sharded (the result is sharded on
    /// them), or if the summed dimension is sharded in both (the result is `Partial(Sum)`). Otherwise the operand that is
    /// cheaper to move is redistributed, which is collective.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("tp", 2)])?;
    ///     let x = DTensor::ones((4, 6), DType::F32, &mesh, [Replicate])?;
    ///     let up = DTensor::ones((6, 8), DType::F32, &mesh, [Shard(1)])?; // column-parallel
    ///     let down = DTensor::ones((8, 6), DType::F32, &mesh, [Shard(0)])?; // row-parallel
    ///     let hidden = x.matmul(&up)?;
    ///     assert_eq!(hidden.placements(), [Shard(1)]);
    ///     assert_eq!(hidden.matmul(&down)?.placements(), [Partial(ReduceOp::Sum)]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// If an operand is a scalar, or sizes do not fit.
    #[track_caller]
    pub fn matmul(&self, other: &DTensor) -> Result<DTensor> {
        let (m, n) = (self.ndim(), other.ndim());
        if m == 0 || n == 0 {
            let error = ErrorKind::shape(&[]).error("operands", "a scalar in matmul", "vectors or matrices", "use mul");
            return Err(name_call(error, "matmul", &[self, other], Location::caller()));
        }
        if (m, n) == (2, 2) {
            return named("matmul", &MATRICES, self, other);
        }
        let left: &[Label] = if m == 1 { &[K] } else { &[M, K] };
        let right: &[Label] = if n == 1 { &[K] } else { &[K, N] };
        let output: &[Label] = match (m, n) {
            (1, 1) => &[],
            (1, _) => &[N],
            (_, 1) => &[M],
            _ => &[M, N],
        };
        let term = |ndim: usize, named: &[Label]| {
            let mut term: Term = batch(ndim.saturating_sub(2)).collect();
            term.extend_from_slice(named);
            term
        };
        let equation = Equation::new([term(m, left), term(n, right)], term(m.max(n), output));
        multiply("matmul", equation, false, &[self, other])
    }

    /// Multiplies two matrices. Communicates as [`matmul`](Self::matmul) does.
    #[track_caller]
    pub fn mm(&self, other: &DTensor) -> Result<DTensor> {
        named("mm", &MATRICES, self, other)
    }

    /// Multiplies two batches of matrices, `[batch, m, k]` and `[batch, k, n]`. Communicates nothing if the batch is sharded, else
    /// as [`matmul`](Self::matmul) does.
    #[track_caller]
    pub fn bmm(&self, other: &DTensor) -> Result<DTensor> {
        named("bmm", &BATCHES, self, other)
    }

    /// Multiplies a matrix and a vector. Communicates as [`matmul`](Self::matmul) does.
    #[track_caller]
    pub fn mv(&self, vector: &DTensor) -> Result<DTensor> {
        named("mv", &MATRIX_VECTOR, self, vector)
    }

    /// Computes the inner product of two vectors: `Partial(Sum)` if they are sharded.
    #[track_caller]
    pub fn dot(&self, other: &DTensor) -> Result<DTensor> {
        named("dot", &INNER, self, other)
    }

    /// Computes the outer product of two vectors, sharded on rows or columns as the vectors are.
    #[track_caller]
    pub fn outer(&self, other: &DTensor) -> Result<DTensor> {
        named("outer", &OUTER, self, other)
    }

    /// `x` of shape `[..., in]` times the transpose of a weight of shape `[out, in]`.
    #[track_caller]
    pub(in crate::ops) fn times_transposed(&self, weight: &DTensor) -> Result<DTensor> {
        let leading = || batch(self.ndim() - 1);
        let inputs = [leading().chain(letters("k")).collect(), letters("nk").collect()];
        multiply("einsum", Equation::new(inputs, leading().chain(letters("n"))), false, &[self, weight])
    }

    /// The gradient of the input of a linear layer: this one of its result, `[..., out]`, times the weight, `[out, in]`. Adds
    /// `sum` if it is in the layout of the gradient, and takes it then.
    #[track_caller]
    pub(in crate::ops) fn linear_input_gradient(&self, weight: &DTensor, sum: &mut Option<DTensor>) -> Result<DTensor> {
        let leading = || batch(self.ndim() - 1);
        let inputs = [leading().chain(letters("n")).collect(), letters("nk").collect()];
        multiply_onto(sum, Equation::new(inputs, leading().chain(letters("k"))), false, &[self, weight])
    }

    /// The gradient of the weight of a linear layer: this one of its result, `[..., out]`, times the input, `[..., in]`, summed
    /// over all leading dimensions.
    #[track_caller]
    pub(in crate::ops) fn linear_weight_gradient(&self, input: &DTensor) -> Result<DTensor> {
        let leading = || batch(self.ndim() - 1);
        let inputs = [leading().chain(letters("n")).collect(), leading().chain(letters("k")).collect()];
        multiply("einsum", Equation::new(inputs, letters("nk")), false, &[self, input])
    }
}

#[track_caller]
fn named(name: &'static str, equation: &'static Equation, a: &DTensor, b: &DTensor) -> Result<DTensor> {
    let op = Einsum { name, equation: Cow::Borrowed(equation), stretches: false };
    Ok(dispatch(&op, &[a, b], Location::caller())?.swap_remove(0))
}

/// The product of two batches of matrices, as [`DTensor::bmm`], for an operator of another name.
#[track_caller]
pub(in crate::ops) fn multiply_batches(name: &'static str, a: &DTensor, b: &DTensor) -> Result<DTensor> {
    named(name, &BATCHES, a, b)
}

/// Dispatches the product of one or two tensors.
#[track_caller]
fn multiply(name: &'static str, equation: Equation, stretches: bool, inputs: &[&DTensor]) -> Result<DTensor> {
    let op = Einsum { name, equation: Cow::Owned(equation), stretches };
    Ok(dispatch(&op, inputs, Location::caller())?.swap_remove(0))
}

/// Dispatches a product of a backward pass, and adds `sum` if it is in the layout of the product: then it is `None` afterwards.
#[track_caller]
fn multiply_onto(
    sum: &mut Option<DTensor>,
    equation: Equation,
    stretches: bool,
    inputs: &[&DTensor],
) -> Result<DTensor> {
    let op = Einsum { name: "einsum", equation: Cow::Owned(equation), stretches };
    let kernel = |sum: &Tensor, is_exclusive: bool, inputs: &[Tensor], context: &KernelContext<'_>| {
        Ok(vec![op.run_onto(&target(sum, is_exclusive)?, inputs, context)?])
    };
    Ok(dispatch_onto(&op, inputs, sum, &kernel, false, Location::caller())?.swap_remove(0))
}

/// The product of three or more tensors, two at a time.
#[track_caller]
fn chain(equation: &Equation, inputs: &[&DTensor]) -> Result<DTensor> {
    let site = Location::caller();
    let shapes: Vec<&[usize]> = inputs.iter().map(|x| x.shape()).collect();
    let sizes = equation.sizes("einsum", &shapes, true).map_err(|e| name_call(e, "einsum", inputs, site))?;
    // Broadcast dimensions are removed: their labels can then be summed over early in the other factors.
    let mut factors = Vec::new();
    let mut terms = Vec::new();
    for (term, &input) in equation.inputs.iter().zip(inputs) {
        let full = |d: &usize| input.shape()[*d] == size_of(&sizes, term[*d]);
        let mut factor = input.clone();
        for d in (0..term.len()).rev().filter(|d| !full(d)) {
            factor = factor.squeeze(Some(d as isize))?;
        }
        factors.push(factor);
        terms.push((0..term.len()).filter(full).map(|d| term[d]).collect::<Term>());
    }
    let equation = Equation::new(terms, equation.output.iter().copied());
    let mut terms = equation.inputs.clone();
    for step in order(&equation, &sizes) {
        let [a, b] = step.factors;
        let pair = Equation::new([terms[a].clone(), terms[b].clone()], step.output.iter().copied());
        factors.push(multiply("einsum", pair, false, &[&factors[a], &factors[b]])?);
        terms.push(step.output);
    }
    Ok(factors.pop().expect("the product"))
}

impl Einsum {
    /// The dimensions of a tensor for the sharding rule: `None` for dimensions that broadcast and for the second of a diagonal.
    fn named(term: &[Label], numbers: &[Label], stretched: impl Fn(usize) -> bool) -> Vec<Option<usize>> {
        let number = |d: usize| numbers.iter().position(|&label| label == term[d]);
        let named = |d: usize| if stretched(d) || term[..d].contains(&term[d]) { None } else { number(d) };
        (0..term.len()).map(named).collect()
    }
}

impl Op for Einsum {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let shapes: Vec<&[usize]> = inputs.iter().map(|m| m.shape.as_slice()).collect();
        let sizes = self.equation.sizes(self.name, &shapes, self.stretches)?;
        let numbers: Vec<Label> = sizes.iter().map(|&(label, _)| label).collect();
        let output = &self.equation.output;
        let shape: Vec<usize> = output.iter().map(|&label| size_of(&sizes, label)).collect();
        let names = self
            .equation
            .inputs
            .iter()
            .zip(&shapes)
            .map(|(term, shape)| Self::named(term, &numbers, |d| shape[d] != size_of(&sizes, term[d])));
        let mut signature = Signature::product(names, Self::named(output, &numbers, |_| false));
        let dtype = inputs.iter().map(|m| m.dtype).reduce(dtype::promote).expect("at least one input");
        if inputs.iter().any(|m| m.dtype != dtype) {
            signature = signature.forbid_partial(); // converting the terms of a partial operand would round each of them
        }
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype }] })
    }

    /// `mv`, `dot`, `outer` and sums over one tensor take no part in `autocast`, as on PyTorch's CPU.
    fn kind(&self) -> OpKind {
        let is_product = self.equation.inputs.len() == 2 && !["mv", "dot", "outer"].contains(&self.name);
        if is_product { OpKind::Product } else { OpKind::Arithmetic }
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::InF32FromAnyType
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let dtype = context.output_dtype(0);
        let sums_f32 = self.sums_f32(inputs, dtype);
        // The common case skips the analysis of the equation.
        if let [a, b] = inputs
            && self.equation.is_matrix_product
            && a.dims()[1] == b.dims()[0]
            && a.dtype() == b.dtype()
            && (a.dtype() == dtype || sums_f32)
            && dtype.is_float()
            && a.elem_count() * b.elem_count() > 0
        {
            return Ok(vec![if sums_f32 { batched_matmul_f32(a, b, 0, 1)? } else { matrix_product(a, b, 0, 1)? }]);
        }
        // Integers are computed in i64 and wrap at the end, as their partial sums do.
        let work = match dtype.is_float() {
            true if sums_f32 => inputs[0].dtype(),
            true => dtype,
            false => DType::I64,
        };
        let mut factors = Vec::with_capacity(inputs.len());
        for (i, (x, term)) in inputs.iter().zip(&self.equation.inputs).enumerate() {
            let held = |d: usize| context.input_runs(i, d);
            factors.push(diagonal(&x.to_dtype(work)?, term, &held)?);
        }
        let output = distinct(&self.equation.output);
        let result = match factors.as_slice() {
            [(x, term)] => sum_to(x, term, &output)?,
            [a, b] => {
                let (a, b) = (without_stretched(a, b)?, without_stretched(b, a)?);
                let result = if sums_f32 { ProductResult::SumsF32 } else { ProductResult::OfFactorType };
                product(&a.0, &a.1, &b.0, &b.1, &output, result)?
            }
            _ => unreachable!("longer products are taken apart"),
        };
        let result = result.to_dtype(dtype)?;
        let held = |d: usize| context.output_runs(0, d);
        let result =
            if output == self.equation.output { result } else { embedded(&result, &self.equation.output, &held)? };
        Ok(vec![contiguous(&result)?])
    }

    /// One multiplication and one addition per combination of indices.
    fn flops(&self, inputs: &[&[usize]], _: &[&[usize]]) -> u64 {
        let terms = || self.equation.inputs.iter().zip(inputs);
        let all: Term = terms().flat_map(|(term, _)| term.iter().copied()).collect();
        let size = |label: Label| {
            let sizes = terms().flat_map(|(term, shape)| term.iter().zip(*shape)).filter(|(l, _)| **l == label);
            sizes.map(|(_, &n)| n as u64).max().unwrap_or(1)
        };
        2 * distinct(&all).into_iter().map(size).product::<u64>()
    }

    fn gradient(&self) -> Gradient<Self> {
        let saves = if self.equation.inputs.len() > 1 { SaveForBackward::Inputs } else { SaveForBackward::Nothing };
        Gradient::From(saves, |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let of = |i: usize| saved.needs_input_grad(i).then(|| op.of_factor(i, saved, gradient)).transpose();
            (0..saved.num_inputs()).map(of).collect()
        })
    }
}

impl Einsum {
    /// As `run`, with the product added to `sum`.
    fn run_onto(&self, sum: &Tensor, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Tensor> {
        let Equation { inputs: terms, output, .. } = &*self.equation;
        let simple = |term: &Term| distinct(term) == *term;
        if let ([a, b], [left, right]) = (inputs, &terms[..])
            && [a, b].iter().all(|x| x.dtype() == sum.dtype() && !x.dims().contains(&0))
            && [left, right, output].into_iter().all(simple)
        {
            let (a, b) = ((a.clone(), left.clone()), (b.clone(), right.clone()));
            let (a, b) = (without_stretched(&a, &b)?, without_stretched(&b, &a)?);
            product(&a.0, &a.1, &b.0, &b.1, output, ProductResult::AddTo(sum))?;
        } else {
            add_assign(sum, &self.run(inputs, context)?[0])?;
        }
        Ok(sum.clone())
    }

    /// Whether the result holds sums in f32 of products of two half-precision factors, which the kernel reads in their type. A
    /// label that only one factor would sum over first, since the other lacks it or broadcasts, needs wider factors.
    fn sums_f32(&self, inputs: &[Tensor], output: DType) -> bool {
        let ([a, b], [left, right]) = (inputs, &self.equation.inputs[..]) else { return false };
        if output != DType::F32 || a.dtype() != b.dtype() || !matches!(a.dtype(), DType::F16 | DType::BF16) {
            return false;
        }
        let met = |x: &Tensor, term: &Term, other: &Tensor, other_term: &Term| {
            term.iter().zip(x.dims()).all(|(label, n)| {
                let in_other = other_term.iter().position(|l| l == label).map(|d| other.dims()[d]);
                in_other == Some(*n) || self.equation.output.contains(label)
            })
        };
        met(a, left, b, right) && met(b, right, a, left)
    }

    /// The gradient of one factor: the product of the gradient of the result and the other factors, summed over the labels that
    /// this factor lacks.
    #[track_caller]
    fn of_factor(&self, i: usize, saved: &SavedTensors<'_>, gradient: &DTensor) -> Result<DTensor> {
        let (terms, output) = (&self.equation.inputs, &self.equation.output);
        let (term, shape) = (&terms[i], saved.shape(i));
        let own = distinct(term);
        let extent = |label: Label| shape[term.iter().position(|&l| l == label).expect("a label of the factor")];
        let others: Vec<usize> = (0..terms.len()).filter(|&o| o != i).collect();
        // A label that the result or another factor has in the same size is computed by the product. Of the rest, one that
        // broadcast here is summed over, and one that only this factor has gets the same gradient along all of it.
        let size = |o: usize, label: Label| terms[o].iter().position(|&l| l == label).map(|d| saved.shape(o)[d]);
        let largest =
            |label: Label| others.iter().filter_map(|&o| size(o, label)).find(|&n| n != 1).unwrap_or(extent(label));
        let elsewhere =
            |label: Label| output.contains(&label) || others.iter().any(|&o| size(o, label) == Some(extent(label)));
        let wanted: Term =
            own.iter().copied().filter(|&label| extent(label) == largest(label) && elsewhere(label)).collect();
        // If this factor is sharded, a smaller factor that is partial is reduced first: otherwise the larger product would be.
        let scattered = |(p, own): (&Placement, &Placement)| p.is_partial() && own.is_shard(None);
        let factor = |&o: &usize| {
            let factor = saved.input(o);
            let pays = factor.placements().iter().zip(saved.layout(i).placements()).any(scattered);
            let larger = shape.iter().product::<usize>() > factor.elem_count();
            if larger && pays { factor.all_reduced(self.name) } else { Ok(factor) }
        };
        let factors = others.iter().map(factor).collect::<Result<Vec<DTensor>>>()?;
        let inputs: Vec<&DTensor> = std::iter::once(gradient).chain(&factors).collect();
        let inputs_terms = std::iter::once(output).chain(others.iter().map(|&o| &terms[o])).cloned();
        let product = Equation::new(inputs_terms, wanted.iter().copied());
        // The product is the gradient itself, and can be added to a sum, unless dimensions or the type have to be changed.
        let is_gradient = wanted == *term && gradient.dtype() == saved.dtype(i);
        let mut product = match is_gradient {
            true => saved.with_sum(i, |sum| multiply_onto(sum, product, true, &inputs))?,
            false => multiply("einsum", product, true, &inputs)?,
        };
        for (d, &label) in own.iter().enumerate().filter(|(_, label)| !wanted.contains(label)) {
            product = product.unsqueeze(d as isize)?;
            if extent(label) != 1 {
                let mut sizes = vec![-1; product.ndim()];
                sizes[d] = extent(label) as isize;
                product = product.expand(&sizes)?;
            }
        }
        if own.len() < term.len() {
            product = multiply("einsum", Equation::new([own], term.iter().copied()), false, &[&product])?;
        }
        product.to_dtype(saved.dtype(i))
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "matmul", samples: matmul_samples, apply: |x| Ok(vec![x[0].matmul(&x[1])?]) },
    OpEntry { name: "mm", samples: mm_samples, apply: |x| Ok(vec![x[0].mm(&x[1])?]) },
    OpEntry { name: "bmm", samples: bmm_samples, apply: |x| Ok(vec![x[0].bmm(&x[1])?]) },
    OpEntry { name: "mv", samples: mv_samples, apply: |x| Ok(vec![x[0].mv(&x[1])?]) },
    OpEntry { name: "dot", samples: vector_samples, apply: |x| Ok(vec![x[0].dot(&x[1])?]) },
    OpEntry { name: "outer", samples: vector_samples, apply: |x| Ok(vec![x[0].outer(&x[1])?]) },
    OpEntry {
        name: "einsum",
        samples: bmm_samples,
        apply: |x| {
            Ok(vec![
                DTensor::einsum("bij,bjk->ki", &[&x[0], &x[1]])?,
                DTensor::einsum("bij->jb", &[&x[0]])?,
                DTensor::einsum("...ij,...jk", &[&x[0], &x[1]])?,
                DTensor::einsum("Bij,Bjk,Bij->kB", &[&x[0], &x[1], &x[0]])?,
            ])
        },
    },
];

fn pairs(shapes: &[(&[usize], &[usize])]) -> Vec<Vec<SampleInput>> {
    shapes.iter().map(|(a, b)| vec![SampleInput::new(a, DType::I64), SampleInput::new(b, DType::I64)]).collect()
}

fn matmul_samples() -> Vec<Vec<SampleInput>> {
    pairs(&[
        (&[5, 3], &[3, 4]),
        (&[2, 3, 4], &[4, 2]),
        (&[3, 1, 2, 3], &[5, 3, 2]),
        (&[3], &[3, 2]),
        (&[4, 3], &[3]),
        (&[0, 3], &[3, 2]),
    ])
}

fn mm_samples() -> Vec<Vec<SampleInput>> {
    pairs(&[(&[4, 6], &[6, 2]), (&[5, 3], &[3, 1]), (&[2, 0], &[0, 3])])
}

fn bmm_samples() -> Vec<Vec<SampleInput>> {
    pairs(&[(&[3, 2, 4], &[3, 4, 5]), (&[1, 5, 2], &[1, 2, 3])])
}

fn mv_samples() -> Vec<Vec<SampleInput>> {
    pairs(&[(&[5, 3], &[3])])
}

fn vector_samples() -> Vec<Vec<SampleInput>> {
    pairs(&[(&[5], &[5]), (&[1], &[1])])
}
