//! Products of vectors, matrices and batches of them.

use serde_json::Value;
use shardwise::prelude::*;
use shardwise::tensor::Number;

use super::arguments::Arguments;
use super::calls::calls;

calls! {
    "matmul(input, other)" => |a| a.tensor("input")?.matmul(&a.tensor("other")?);
    "__rmatmul__(input, other)" => |a| a.tensor("other")?.matmul(&a.tensor("input")?);
    "mm(input, mat2)" => |a| a.tensor("input")?.mm(&a.tensor("mat2")?);
    "bmm(input, mat2)" => |a| a.tensor("input")?.bmm(&a.tensor("mat2")?);
    "mv(input, vec)" => |a| a.tensor("input")?.mv(&a.tensor("vec")?);
    "dot(input, tensor)" => |a| a.tensor("input")?.dot(&a.tensor("tensor")?);
    "vdot(input, other)" => |a| a.tensor("input")?.dot(&a.tensor("other")?);
    "outer(input, vec2)" => |a| a.tensor("input")?.outer(&a.tensor("vec2")?);
    "einsum(operands, equation)" => |a| {
        let equation = a.text("equation").unwrap_or_default();
        DTensor::einsum(&equation, &a.tensors("operands")?.iter().collect::<Vec<_>>())
    };
    "addmm(input, mat1, mat2, *, beta=1, alpha=1)" => |a|
        a.tensor("input")?.addmm(&a.tensor("mat1")?, &a.tensor("mat2")?, a.float("beta")?, a.float("alpha")?);
    "baddbmm(input, batch1, batch2, *, beta=1, alpha=1)" => |a|
        a.tensor("input")?.baddbmm(&a.tensor("batch1")?, &a.tensor("batch2")?, a.float("beta")?, a.float("alpha")?);
    "nn.functional.linear(input, weight, bias=None)" => |a|
        a.tensor("input")?.linear(&a.tensor("weight")?, a.optional_tensor("bias").as_ref());

    "addmv(input, mat, vec, *, beta=1, alpha=1)" => |a| {
        let product = a.tensor("mat")?.mv(&a.tensor("vec")?)?;
        scaled_sum(a, &product)
    };
    "addbmm(input, batch1, batch2, *, beta=1, alpha=1)" => |a| {
        let product = a.tensor("batch1")?.bmm(&a.tensor("batch2")?)?.sum(&[0], false)?;
        scaled_sum(a, &product)
    };
    "addr(input, vec1, vec2, *, beta=1, alpha=1)" => |a| {
        let product = a.tensor("vec1")?.outer(&a.tensor("vec2")?)?;
        match a.is_bool("input") {
            // PyTorch's bools are combined by logic.
            true => {
                let product = if a.flag("alpha") { product } else { product.zeros_like()? };
                if a.flag("beta") { a.tensor("input")?.logical_or(&product) } else { product.ne(0) }
            }
            false => scaled_sum(a, &product),
        }
    };
    "inner(input, other)" => |a| {
        let (x, y) = (a.tensor("input")?, a.tensor("other")?);
        match (x.ndim(), y.ndim()) {
            (0, _) | (_, 0) => x.mul(&y),
            _ => tensordot(&x, &y, &[-1], &[-1]),
        }
    };
    "tensordot(a, b, dims=2)" => |a| {
        let (x, y) = (a.tensor("a")?, a.tensor("b")?);
        let dims = a.value("dims");
        match dims.as_i64() {
            Some(n) => {
                let n = n as isize;
                tensordot(&x, &y, &(-n..0).collect::<Vec<_>>(), &(0..n).collect::<Vec<_>>())
            }
            None => {
                let list = |i: usize| match &dims[i] {
                    Value::Array(all) => all.iter().filter_map(Value::as_i64).map(|d| d as isize).collect::<Vec<_>>(),
                    one => one.as_i64().map(|d| d as isize).into_iter().collect(),
                };
                tensordot(&x, &y, &list(0), &list(1))
            }
        }
    };
    "cross(input, other, dim=None)" => |a| {
        let (x, y) = (a.tensor("input")?, a.tensor("other")?);
        // The first dimension of size 3, if none is named.
        let dim = match a.optional_int("dim") {
            Some(dim) => dim,
            None => x.shape().iter().position(|&n| n == 3).unwrap_or(0) as isize,
        };
        cross(&x, &y, dim)
    };
    "nn.functional.bilinear(input1, input2, weight, bias=None)" => |a| a.tensor("input1")?.bilinear(
        &a.tensor("input2")?, &a.tensor("weight")?, a.optional_tensor("bias").as_ref());
}

/// `beta * input + alpha * product`; with `beta` 0 the input does not count, not even where it is NaN.
fn scaled_sum(a: &Arguments<'_>, product: &DTensor) -> Result<DTensor> {
    let (mut beta, mut alpha) = (a.number("beta")?, a.number("alpha")?);
    if !product.dtype().is_float() {
        (beta, alpha) = (Number::Integer(beta.to_i64()), Number::Integer(alpha.to_i64()));
    }
    let product = product.mul(alpha)?;
    match beta.to_f64() {
        0.0 => Ok(product),
        _ => a.tensor("input")?.mul(beta)?.add(&product),
    }
}

/// The sum of products over pairs of dimensions.
fn tensordot(x: &DTensor, y: &DTensor, of_x: &[isize], of_y: &[isize]) -> Result<DTensor> {
    let letter = |i: usize| char::from(b'a' + i as u8);
    let at = |d: isize, ndim: usize| (if d < 0 { d + ndim as isize } else { d }) as usize;
    let mut left: Vec<char> = (0..x.ndim()).map(letter).collect();
    let mut right: Vec<char> = (0..y.ndim()).map(|i| letter(x.ndim() + i)).collect();
    let mut summed = Vec::new();
    for (&i, &j) in of_x.iter().zip(of_y) {
        let name = left[at(i, x.ndim())];
        right[at(j, y.ndim())] = name;
        summed.push(name);
    }
    let kept: String = left.iter().chain(&right).filter(|c| !summed.contains(c)).collect();
    let (left, right): (String, String) = (left.drain(..).collect(), right.drain(..).collect());
    DTensor::einsum(&format!("{left},{right}->{kept}"), &[x, y])
}

/// The cross product of vectors of three elements along a dimension.
fn cross(x: &DTensor, y: &DTensor, dim: isize) -> Result<DTensor> {
    let both = DTensor::broadcast_tensors(&[x, y])?;
    let turned = |t: &DTensor, by: isize| t.roll(&[by], &[dim]);
    turned(&both[0], -1)?.mul(&turned(&both[1], -2)?)?.sub(&turned(&both[0], -2)?.mul(&turned(&both[1], -1)?)?)
}
