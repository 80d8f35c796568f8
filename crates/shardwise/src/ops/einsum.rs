//! Products that sum over shared dimensions: one equation says the rule and the kernel.

use std::borrow::Cow;
use std::panic::Location;

use candle_core::{DType, Tensor};

use super::{OpEntry, Sample, dtype};
use crate::error::{Error, Result};
use crate::layout::TensorMeta;
use crate::op::{Op, OpPlan, Place, dispatch, name_call};
use crate::placement::Placement;
use crate::rule::Signature;
use crate::tensor::{DTensor, Keeps, Saved};
use shardwise_kernels::{Fold, dense, fold, product as matrix_product, wholes};

/// A product of one or two tensors after an equation such as `mk,kn->mn`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Einsum {
    name: &'static str,
    equation: Cow<'static, str>,
}

impl DTensor {
    /// The product that an equation such as `bmk,bkn->bmn` describes; letters missing on the right are summed over.
    #[track_caller]
    pub fn einsum(equation: &str, inputs: &[&DTensor]) -> Result<DTensor> {
        let site = Location::caller();
        let equation: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
        check(&equation, inputs.len()).map_err(|e| name_call(e, "einsum", inputs, site))?;
        // More than two factors are multiplied one after the other.
        let [first, second, rest @ ..] = inputs else {
            return Ok(dispatch(&Einsum { name: "einsum", equation: equation.into() }, inputs, site)?.swap_remove(0));
        };
        if rest.is_empty() {
            return Ok(dispatch(&Einsum { name: "einsum", equation: equation.into() }, inputs, site)?.swap_remove(0));
        }
        let (left, right) = equation.split_once("->").expect("checked");
        let terms: Vec<&str> = left.split(',').collect();
        let later: String = terms[2..].concat() + right;
        let mut kept: Vec<char> = Vec::new();
        for c in (terms[0].to_string() + terms[1]).chars().filter(|c| later.contains(*c)) {
            if !kept.contains(&c) {
                kept.push(c);
            }
        }
        let kept: String = kept.into_iter().collect();
        let product = DTensor::einsum(&format!("{},{}->{kept}", terms[0], terms[1]), &[first, second])?;
        let equation = format!("{kept},{}->{right}", terms[2..].join(","));
        let remaining: Vec<&DTensor> = std::iter::once(&product).chain(rest.iter().copied()).collect();
        DTensor::einsum(&equation, &remaining)
    }

    /// The matrix product, with vectors and with leading dimensions that broadcast.
    #[track_caller]
    pub fn matmul(&self, other: &DTensor) -> Result<DTensor> {
        let equation = match (self.rank(), other.rank()) {
            (0, _) | (_, 0) => {
                let error = Error::invalid("operands", "a scalar in matmul", "vectors or matrices", "use mul");
                return Err(name_call(error, "matmul", &[self, other], Location::caller()));
            }
            (1, 1) => "k,k->".into(),
            (2, 2) => "mk,kn->mn".into(),
            (1, n) => {
                let batch = letters(n - 2);
                format!("k,{batch}kn->{batch}n").into()
            }
            (m, 1) => {
                let batch = letters(m - 2);
                format!("{batch}mk,k->{batch}m").into()
            }
            (m, n) => {
                let batch = letters(m.max(n) - 2);
                let tail = |count: usize| &batch[batch.len() - count..];
                format!("{}mk,{}kn->{batch}mn", tail(m - 2), tail(n - 2)).into()
            }
        };
        named("matmul", equation, self, other)
    }

    /// The product of two matrices.
    #[track_caller]
    pub fn mm(&self, other: &DTensor) -> Result<DTensor> {
        named("mm", "mk,kn->mn".into(), self, other)
    }

    /// The products of a batch of matrices.
    #[track_caller]
    pub fn bmm(&self, other: &DTensor) -> Result<DTensor> {
        named("bmm", "bmk,bkn->bmn".into(), self, other)
    }

    /// A matrix times a vector.
    #[track_caller]
    pub fn mv(&self, vector: &DTensor) -> Result<DTensor> {
        named("mv", "mk,k->m".into(), self, vector)
    }

    /// The inner product of two vectors.
    #[track_caller]
    pub fn dot(&self, other: &DTensor) -> Result<DTensor> {
        named("dot", "k,k->".into(), self, other)
    }

    /// The outer product of two vectors.
    #[track_caller]
    pub fn outer(&self, other: &DTensor) -> Result<DTensor> {
        named("outer", "m,n->mn".into(), self, other)
    }
}

#[track_caller]
fn named(name: &'static str, equation: Cow<'static, str>, a: &DTensor, b: &DTensor) -> Result<DTensor> {
    Ok(dispatch(&Einsum { name, equation }, &[a, b], Location::caller())?.swap_remove(0))
}

/// Names for leading dimensions.
pub(super) fn letters(count: usize) -> String {
    ('A'..).take(count).collect()
}

fn check(equation: &str, inputs: usize) -> Result<()> {
    let bad = |found: String| {
        Error::invalid(
            "equation",
            found,
            "one term per tensor and an arrow, such as `mk,kn->mn`",
            "correct the equation",
        )
    };
    let (left, right) = equation.split_once("->").ok_or_else(|| bad(format!("`{equation}`")))?;
    let terms: Vec<&str> = left.split(',').collect();
    let distinct = |term: &str| term.char_indices().all(|(i, c)| !term[..i].contains(c));
    let known = right.chars().all(|c| left.contains(c));
    let good = terms.len() == inputs && inputs > 0 && terms.iter().all(|t| distinct(t)) && distinct(right) && known;
    let words = equation.chars().all(|c| c.is_ascii_alphabetic() || ",->".contains(c));
    if good && words { Ok(()) } else { Err(bad(format!("`{equation}` for {inputs} tensor(s)"))) }
}

impl Op for Einsum {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (left, right) = self.equation.split_once("->").expect("checked");
        let mut sizes: Vec<(char, usize)> = Vec::new();
        for (term, input) in left.split(',').zip(inputs) {
            let shapes: Vec<&[usize]> = inputs.iter().map(|m| m.shape.as_slice()).collect();
            let mismatch = |needed: String| {
                let found = format!("shapes {shapes:?} in {}({})", self.name, self.equation);
                Error::invalid("operands", found, needed, "transpose or reshape the tensors")
            };
            if term.len() != input.shape.len() {
                return Err(mismatch(format!("{} dimension(s) for `{term}`", term.len())));
            }
            for (c, &n) in term.chars().zip(&input.shape) {
                match sizes.iter_mut().find(|(name, _)| *name == c) {
                    // Leading dimensions of matmul, which have capital names, broadcast.
                    Some((_, size)) if *size == 1 && c.is_ascii_uppercase() => *size = n,
                    Some((_, size)) if *size != n && !(n == 1 && c.is_ascii_uppercase()) => {
                        return Err(mismatch(format!("one size for `{c}`, found {size} and {n}")));
                    }
                    Some(_) => {}
                    None => sizes.push((c, n)),
                }
            }
        }
        let size = |c: char| sizes.iter().find(|(name, _)| *name == c).expect("named on the left").1;
        let shape: Vec<usize> = right.chars().map(size).collect();
        let dtype = inputs.iter().map(|m| m.dtype).reduce(dtype::promote).expect("at least one input");
        let broadcast = |input: usize, dim: usize, c: char| inputs[input].shape[dim] != size(c);
        let mut signature = Signature::einsum(&self.equation, &broadcast);
        if inputs.iter().any(|m| m.dtype != dtype) {
            signature = signature.without_passes(); // operands must not be rounded before they are reduced
        }
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype }] })
    }

    fn run(&self, inputs: &[Tensor], _: &Place<'_>) -> Result<Vec<Tensor>> {
        // The usual case needs no analysis.
        if let ([a, b], "mk,kn->mn") = (inputs, &*self.equation)
            && a.dtype() == b.dtype()
            && a.dtype().is_float()
            && a.elem_count() * b.elem_count() > 0
        {
            return Ok(vec![matrix_product(a, b, 0, 1)?]);
        }
        let (left, right) = self.equation.split_once("->").expect("checked");
        let terms: Vec<&str> = left.split(',').collect();
        let dtype = inputs.iter().map(Tensor::dtype).reduce(dtype::promote).expect("at least one input");
        // Whole numbers are computed as i64 and wrap in the end, as their pending sums do.
        let work = if dtype.is_float() { dtype } else { DType::I64 };
        let result = match inputs {
            [x] => sum_to(&x.to_dtype(work)?, terms[0], right)?,
            [a, b] => product(&a.to_dtype(work)?, terms[0], &b.to_dtype(work)?, terms[1], right)?,
            _ => unreachable!("longer products are taken apart"),
        };
        Ok(vec![dense(&result.to_dtype(dtype)?)?])
    }

    /// A multiplication and an addition for every combination of indices.
    fn flops(&self, inputs: &[&[usize]], _: &[&[usize]]) -> u64 {
        let (left, _) = self.equation.split_once("->").expect("checked");
        let sizes = || left.split(',').zip(inputs).flat_map(|(term, shape)| term.chars().zip(shape.iter().copied()));
        let mut names: Vec<char> = left.chars().filter(|c| *c != ',').collect();
        names.sort_unstable();
        names.dedup();
        let size = |c: char| sizes().filter(|(name, _)| *name == c).map(|(_, n)| n).max().unwrap_or(1);
        2 * names.into_iter().map(|c| size(c) as u64).product::<u64>()
    }

    fn differentiable(&self) -> Option<Keeps> {
        Some(if self.equation.contains(',') { Keeps::Inputs } else { Keeps::Nothing })
    }

    /// The product of the gradient and the other factors, summed over what this factor has not.
    fn gradient(&self, saved: &Saved<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.inputs()]) };
        let (left, right) = self.equation.split_once("->").expect("checked");
        let terms: Vec<&str> = left.split(',').collect();
        let mut found = Vec::new();
        for (i, term) in terms.iter().enumerate() {
            if !saved.wants(i) {
                found.push(None);
                continue;
            }
            let others: Vec<usize> = (0..terms.len()).filter(|&o| o != i).collect();
            let size = |c: char| {
                let sizes = (0..terms.len()).filter_map(|t| Some(saved.shape(t)[terms[t].find(c)?]));
                sizes.max().expect("a letter of a term")
            };
            // Letters that this factor is stretched along are summed over; those that it alone has are spread evenly.
            let elsewhere = |c: char| right.contains(c) || others.iter().any(|&o| terms[o].contains(c));
            let whole = |(d, c): (usize, char)| saved.shape(i)[d] == size(c) && elsewhere(c);
            let target: String = term.chars().enumerate().filter(|&(d, c)| whole((d, c))).map(|(_, c)| c).collect();
            // Where this factor is sharded, a partial one that is smaller is reduced first: else the product would have to be.
            let scattered = |(p, own): (&Placement, &Placement)| p.is_partial() && own.is_shard(None);
            let factor = |&o: &usize| {
                let factor = saved.input(o);
                let pays = factor.placements().iter().zip(saved.layout(i).placements()).any(scattered);
                let larger = saved.shape(i).iter().product::<usize>() > factor.elem_count();
                if larger && pays { factor.everywhere(self.name) } else { Ok(factor) }
            };
            let factors = others.iter().map(factor).collect::<Result<Vec<DTensor>>>()?;
            let equation = std::iter::once(right).chain(others.iter().map(|&o| terms[o])).collect::<Vec<_>>().join(",");
            let inputs: Vec<&DTensor> = std::iter::once(gradient).chain(&factors).collect();
            let mut product = DTensor::einsum(&format!("{equation}->{target}"), &inputs)?;
            for (d, c) in term.chars().enumerate().filter(|&(d, c)| !whole((d, c))) {
                product = product.unsqueeze(d as isize)?;
                if saved.shape(i)[d] == size(c) {
                    let mut sizes = vec![-1; product.rank()];
                    sizes[d] = saved.shape(i)[d] as isize;
                    product = product.expand(&sizes)?;
                }
            }
            found.push(Some(product.to_dtype(saved.dtype(i))?));
        }
        Ok(found)
    }
}

/// Sums over the letters that the target has not, and puts the others in its order.
fn sum_to(x: &Tensor, term: &str, target: &str) -> Result<Tensor> {
    let (kept, summed): (Vec<_>, Vec<_>) = term.chars().enumerate().partition(|(_, c)| target.contains(*c));
    let summed: Vec<usize> = summed.into_iter().map(|(d, _)| d).collect();
    let sizes: Vec<usize> = kept.iter().map(|&(d, _)| x.dims()[d]).collect();
    let x = if summed.is_empty() { x.clone() } else { fold(Fold::Sum, x, &summed, &sizes, x.dtype())? };
    let place = |c: char| kept.iter().position(|&(_, k)| k == c).expect("a letter of the term");
    Ok(x.permute(target.chars().map(place).collect::<Vec<_>>())?)
}

/// The product of two tensors as a batch of matrix products: letters of both and of the target are the batch, letters of
/// both alone are summed over.
fn product(a: &Tensor, a_term: &str, b: &Tensor, b_term: &str, target: &str) -> Result<Tensor> {
    let of = |term: &str, wanted: &dyn Fn(char) -> bool| term.chars().filter(|c| wanted(*c)).collect::<String>();
    // Letters that one tensor has alone and the target has not are summed over first.
    let a_kept = of(a_term, &|c| b_term.contains(c) || target.contains(c));
    let b_kept = of(b_term, &|c| a_term.contains(c) || target.contains(c));
    let (a, b) = (sum_to(a, a_term, &a_kept)?, sum_to(b, b_term, &b_kept)?);
    let batch = of(&a_kept, &|c| b_kept.contains(c) && target.contains(c));
    let inner = of(&a_kept, &|c| b_kept.contains(c) && !target.contains(c));
    let (rows, columns) = (of(&a_kept, &|c| !b_kept.contains(c)), of(&b_kept, &|c| !a_kept.contains(c)));
    let size = |c: char| {
        let in_tensor = |term: &str, t: &Tensor| term.find(c).map_or(1, |i| t.dims()[i]);
        in_tensor(&a_kept, &a).max(in_tensor(&b_kept, &b))
    };
    // A batch dimension of size 1 that the other side has larger broadcasts; one without elements stays empty.
    let size = |c: char| {
        let sizes = [a_kept.find(c).map(|i| a.dims()[i]), b_kept.find(c).map(|i| b.dims()[i])];
        if sizes.contains(&Some(0)) { 0 } else { size(c) }
    };
    let arranged = |t: &Tensor, term: &str, order: &str| -> Result<Tensor> {
        let permuted =
            t.permute(order.chars().map(|c| term.find(c).expect("a letter of the term")).collect::<Vec<_>>())?;
        let full: Vec<usize> = order.chars().map(size).collect();
        if permuted.dims() == full { Ok(permuted) } else { Ok(permuted.broadcast_as(full)?) }
    };
    let shape: Vec<usize> = (batch.clone() + &rows + &columns).chars().map(size).collect();
    let multiplied = if shape.contains(&0) || inner.chars().map(size).any(|n| n == 0) {
        Tensor::zeros(shape, a.dtype(), a.device())?
    } else {
        let left = arranged(&a, &a_kept, &(batch.clone() + &rows + &inner))?;
        let right = arranged(&b, &b_kept, &(batch.clone() + &inner + &columns))?;
        match left.dtype() {
            DType::I64 => whole_product(&left, &right, batch.len(), inner.len())?,
            _ => matrix_product(&left, &right, batch.len(), inner.len())?,
        }
    };
    let named = batch + &rows + &columns;
    let order: Vec<usize> = target.chars().map(|c| named.find(c).expect("a letter of a term")).collect();
    Ok(multiplied.permute(order)?)
}

/// The product of integers, of which the dimensions are as those of [`matrix_product`].
fn whole_product(a: &Tensor, b: &Tensor, batch: usize, inner: usize) -> Result<Tensor> {
    let rows = a.rank() - inner;
    let count = |dims: &[usize]| dims.iter().product::<usize>();
    let (m, k) = (count(&a.dims()[batch..rows]), count(&a.dims()[rows..]));
    let n = count(&b.dims()[batch + inner..]);
    let (left, right) = (wholes(a)?, wholes(b)?);
    let mut products = vec![0i64; left.len() / k * n];
    for (i, line) in products.chunks_exact_mut(n).enumerate() {
        let from = &right[i / m * k * n..];
        for (j, &x) in left[i * k..(i + 1) * k].iter().enumerate() {
            line.iter_mut().zip(&from[j * n..]).for_each(|(y, &z)| *y = y.wrapping_add(x.wrapping_mul(z)));
        }
    }
    let shape = [&a.dims()[..rows], &b.dims()[batch + inner..]].concat();
    Ok(Tensor::from_vec(products, shape, a.device())?)
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry { name: "matmul", samples: matmul_samples, apply: |x| Ok(vec![x[0].matmul(&x[1])?]) },
    OpEntry { name: "mm", samples: mm_samples, apply: |x| Ok(vec![x[0].mm(&x[1])?]) },
    OpEntry { name: "bmm", samples: bmm_samples, apply: |x| Ok(vec![x[0].bmm(&x[1])?]) },
    OpEntry { name: "mv", samples: mv_samples, apply: |x| Ok(vec![x[0].mv(&x[1])?]) },
    OpEntry { name: "dot", samples: vector_samples, apply: |x| Ok(vec![x[0].dot(&x[1])?]) },
    OpEntry { name: "outer", samples: vector_samples, apply: |x| Ok(vec![x[0].outer(&x[1])?]) },
    OpEntry {
        name: "einsum",
        samples: bmm_samples,
        apply: |x| Ok(vec![DTensor::einsum("bij,bjk->ki", &[&x[0], &x[1]])?, DTensor::einsum("bij->jb", &[&x[0]])?]),
    },
];

fn pairs(shapes: &[(&[usize], &[usize])]) -> Vec<Vec<Sample>> {
    shapes.iter().map(|(a, b)| vec![Sample::new(a, DType::I64), Sample::new(b, DType::I64)]).collect()
}

fn matmul_samples() -> Vec<Vec<Sample>> {
    pairs(&[
        (&[5, 3], &[3, 4]),
        (&[2, 3, 4], &[4, 2]),
        (&[3, 1, 2, 3], &[5, 3, 2]),
        (&[3], &[3, 2]),
        (&[4, 3], &[3]),
        (&[0, 3], &[3, 2]),
    ])
}

fn mm_samples() -> Vec<Vec<Sample>> {
    pairs(&[(&[4, 6], &[6, 2]), (&[5, 3], &[3, 1]), (&[2, 0], &[0, 3])])
}

fn bmm_samples() -> Vec<Vec<Sample>> {
    pairs(&[(&[3, 2, 4], &[3, 4, 5]), (&[1, 5, 2], &[1, 2, 3])])
}

fn mv_samples() -> Vec<Vec<Sample>> {
    pairs(&[(&[5, 3], &[3])])
}

fn vector_samples() -> Vec<Vec<Sample>> {
    pairs(&[(&[5], &[5]), (&[1], &[1])])
}
