//! Products of local tensors by the labels of their dimensions: diagonals, sums over labels, and matrix products.

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::layout::Runs;
use crate::ops::products::equation::{Label, Term};
use shardwise_kernels::{
    DimReduction, IndexRange, NO_INDEX, add_assign, add_batched_matmul, batched_matmul as matrix_product,
    batched_matmul_f32, contiguous, index_select, reduce_dims, with_slice,
};

/// Takes the diagonals of a tensor that has labels twice, so that each label is left once. `held` gives the indices that
/// this rank holds of a dimension.
pub(in crate::ops) fn diagonal(x: &Tensor, term: &Term, held: &dyn Fn(usize) -> Runs) -> Result<(Tensor, Term)> {
    let (mut x, mut labels) = (x.clone(), term.clone());
    // From the last dimension on, so that the numbers of earlier dimensions stay valid.
    for second in (0..term.len()).rev() {
        let Some(first) = term[..second].iter().position(|label| *label == term[second]) else { continue };
        let held_columns = IndexRange::new(held(second).iter());
        let columns: Vec<usize> = held(first).iter().flatten().map(|row| held_columns.position(row)).collect();
        let dims = x.dims().to_vec();
        let (count, between) =
            (dims[..first].iter().product::<usize>(), dims[first + 1..second].iter().product::<usize>());
        let mut taken = Vec::with_capacity(count * columns.len() * between);
        for outer in 0..count {
            for (row, &column) in columns.iter().enumerate() {
                let line = |m: usize| ((outer * dims[first] + row) * between + m) * dims[second] + column;
                taken.extend((0..between).map(|m| if column == NO_INDEX { NO_INDEX } else { line(m) }));
            }
        }
        let inner: usize = dims[second + 1..].iter().product();
        let lines = contiguous(&x)?.reshape((dims[..=second].iter().product::<usize>(), inner))?;
        labels.remove(second);
        let mut shape = dims;
        shape.remove(second);
        x = index_select(&lines, 0, &taken)?.reshape(shape)?;
    }
    Ok((x, labels))
}

/// The inverse of [`diagonal`]: writes to the diagonal of zeros. `held` gives the indices that this rank holds of a dimension of
/// the result.
pub(in crate::ops) fn embedded(x: &Tensor, term: &Term, held: &dyn Fn(usize) -> Runs) -> Result<Tensor> {
    let mut x = x.clone();
    for second in 0..term.len() {
        let Some(first) = term[..second].iter().position(|label| *label == term[second]) else { continue };
        let rows: Vec<usize> = held(first).iter().flatten().collect();
        let columns: Vec<usize> = held(second).iter().flatten().collect();
        let dims = x.dims().to_vec();
        let (count, between) =
            (dims[..first].iter().product::<usize>(), dims[first + 1..second].iter().product::<usize>());
        let mut taken = Vec::with_capacity(count * rows.len() * between * columns.len());
        for outer in 0..count {
            for (i, row) in rows.iter().enumerate() {
                for m in 0..between {
                    let line = (outer * rows.len() + i) * between + m;
                    taken.extend(columns.iter().map(|column| if column == row { line } else { NO_INDEX }));
                }
            }
        }
        let inner: usize = dims[second..].iter().product();
        let lines = contiguous(&x)?.reshape((dims[..second].iter().product::<usize>(), inner))?;
        let mut shape = dims;
        shape.insert(second, columns.len());
        x = index_select(&lines, 0, &taken)?.reshape(shape)?;
    }
    Ok(x)
}

/// Removes the dimensions of a factor that broadcast to the other factor.
pub(in crate::ops) fn without_stretched((x, term): &(Tensor, Term), other: &(Tensor, Term)) -> Result<(Tensor, Term)> {
    let size = |label: Label| other.1.iter().position(|&l| l == label).map(|d| other.0.dims()[d]);
    let stretched = |d: usize| x.dims()[d] == 1 && size(term[d]).is_some_and(|n| n != 1);
    let (mut kept, mut labels) = (x.clone(), term.clone());
    for d in (0..term.len()).rev().filter(|&d| stretched(d)) {
        kept = kept.squeeze(d)?;
        labels.remove(d);
    }
    Ok((kept, labels))
}

/// Sums over the labels that the target lacks, and permutes the remaining ones to its order.
pub(in crate::ops) fn sum_to(x: &Tensor, term: &[Label], target: &[Label]) -> Result<Tensor> {
    let (kept, summed): (Vec<usize>, Vec<usize>) = (0..term.len()).partition(|&d| target.contains(&term[d]));
    let sizes: Vec<usize> = kept.iter().map(|&d| x.dims()[d]).collect();
    let x = if summed.is_empty() { x.clone() } else { reduce_dims(DimReduction::Sum, x, &summed, &sizes, x.dtype())? };
    let place = |label: &Label| kept.iter().position(|&d| term[d] == *label).expect("a label of the term");
    Ok(x.permute(target.iter().map(place).collect::<Vec<_>>())?)
}

/// The product of two tensors as a batch of matrix products: labels of both tensors are the batch if the target has them, and
/// summed over if not.
pub(in crate::ops) fn product(
    a: &Tensor,
    a_term: &[Label],
    b: &Tensor,
    b_term: &[Label],
    target: &[Label],
    result: ProductResult<'_>,
) -> Result<Tensor> {
    let of = |term: &[Label], wanted: &dyn Fn(&Label) -> bool| term.iter().copied().filter(wanted).collect::<Term>();
    // Labels that only one tensor has, and the target lacks, are summed over first.
    let a_kept = of(a_term, &|l| b_term.contains(l) || target.contains(l));
    let b_kept = of(b_term, &|l| a_term.contains(l) || target.contains(l));
    let (a, b) = (sum_to(a, a_term, &a_kept)?, sum_to(b, b_term, &b_kept)?);
    let batch = of(&a_kept, &|l| b_kept.contains(l) && target.contains(l));
    let inner = of(&a_kept, &|l| b_kept.contains(l) && !target.contains(l));
    let (rows, columns) = (of(&a_kept, &|l| !b_kept.contains(l)), of(&b_kept, &|l| !a_kept.contains(l)));
    let place = |term: &[Label], label: &Label| term.iter().position(|l| l == label);
    let size = |label: &Label| match place(&a_kept, label) {
        Some(d) => a.dims()[d],
        None => b.dims()[place(&b_kept, label).expect("a label of a factor")],
    };
    let joined = |terms: [&Term; 3]| terms.into_iter().flatten().copied().collect::<Term>();
    let arranged = |t: &Tensor, term: &[Label], order: Term| -> Result<Tensor> {
        let dims = order.iter().map(|label| place(term, label).expect("a label of the factor"));
        Ok(t.permute(dims.collect::<Vec<_>>())?)
    };
    let made = joined([&batch, &rows, &columns]);
    let shape: Vec<usize> = made.iter().map(size).collect();
    let multiplied = if shape.contains(&0) || inner.iter().map(size).any(|n| n == 0) {
        let dtype = if matches!(result, ProductResult::SumsF32) { DType::F32 } else { a.dtype() };
        Tensor::zeros(shape, dtype, a.device())?
    } else {
        let left = arranged(&a, &a_kept, joined([&batch, &rows, &inner]))?;
        let right = arranged(&b, &b_kept, joined([&batch, &inner, &columns]))?;
        match left.dtype() {
            DType::I64 => whole_product(&left, &right, batch.len(), inner.len())?,
            _ => match result {
                ProductResult::OfFactorType => matrix_product(&left, &right, batch.len(), inner.len())?,
                ProductResult::SumsF32 => batched_matmul_f32(&left, &right, batch.len(), inner.len())?,
                ProductResult::AddTo(sum) if made[..] == *target => {
                    add_batched_matmul(sum, &left, &right, batch.len(), inner.len())?;
                    return Ok(sum.clone());
                }
                ProductResult::AddTo(_) => matrix_product(&left, &right, batch.len(), inner.len())?,
            },
        }
    };
    let arranged = arranged(&multiplied, &made, target.iter().copied().collect())?;
    if let ProductResult::AddTo(sum) = result {
        add_assign(sum, &arranged)?;
    }
    Ok(arranged)
}

/// Where a product of two factors goes, and in which type.
#[derive(Clone, Copy)]
pub(in crate::ops) enum ProductResult<'a> {
    /// A new tensor of the type of the factors.
    OfFactorType,
    /// A new tensor of f32 sums of half-precision factors.
    SumsF32,
    /// Added to a tensor in place.
    AddTo(&'a Tensor),
}

/// The product of integers; dimensions as in [`matrix_product`].
fn whole_product(a: &Tensor, b: &Tensor, batch: usize, inner: usize) -> Result<Tensor> {
    let rows = a.rank() - inner;
    let count = |dims: &[usize]| dims.iter().product::<usize>();
    let (m, k) = (count(&a.dims()[batch..rows]), count(&a.dims()[rows..]));
    let n = count(&b.dims()[batch + inner..]);
    let products = with_slice::<i64, _>(a, |left| {
        with_slice::<i64, _>(b, |right| {
            let mut products = vec![0i64; left.len() / k * n];
            for (i, line) in products.chunks_exact_mut(n).enumerate() {
                let from = &right[i / m * k * n..];
                for (j, &x) in left[i * k..(i + 1) * k].iter().enumerate() {
                    line.iter_mut().zip(&from[j * n..]).for_each(|(y, &z)| *y = y.wrapping_add(x.wrapping_mul(z)));
                }
            }
            products
        })
    })??;
    let shape = [&a.dims()[..rows], &b.dims()[batch + inner..]].concat();
    Ok(Tensor::from_vec(products, shape, a.device())?)
}
