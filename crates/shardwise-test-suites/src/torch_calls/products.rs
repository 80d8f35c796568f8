//! Products of vectors, matrices and batches of them.

use serde_json::Value;
use shardwise::prelude::*;

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

    "addmv(input, mat, vec, *, beta=1, alpha=1)" => |a|
        a.tensor("input")?.addmv(&a.tensor("mat")?, &a.tensor("vec")?, a.float("beta")?, a.float("alpha")?);
    "addbmm(input, batch1, batch2, *, beta=1, alpha=1)" => |a|
        a.tensor("input")?.addbmm(&a.tensor("batch1")?, &a.tensor("batch2")?, a.float("beta")?, a.float("alpha")?);
    "addr(input, vec1, vec2, *, beta=1, alpha=1)" => |a| match a.is_bool("input") {
        // PyTorch's bools are combined by logic.
        true => logical_addr(a),
        false => a.tensor("input")?.addr(&a.tensor("vec1")?, &a.tensor("vec2")?, a.float("beta")?, a.float("alpha")?),
    };
    "inner(input, other)" => |a| a.tensor("input")?.inner(&a.tensor("other")?);
    // `dims=n`: the last n of `a` and the first n of `b`.
    "tensordot(a, b, dims=2)" => |a| a.tensor("a")?.tensordot(&a.tensor("b")?, &pairs(a)[0], &pairs(a)[1]);
    "cross(input, other, dim=None)" => |a| a.tensor("input")?.cross(&a.tensor("other")?, a.optional_int("dim"));
    "nn.functional.grouped_mm(mat_a, mat_b, *, offs=None)" => |a|
        a.tensor("mat_a")?.grouped_mm(&a.tensor("mat_b")?, a.optional_tensor("offs").as_ref());
    "nn.functional.bilinear(input1, input2, weight, bias=None)" => |a| a.tensor("input1")?.bilinear(
        &a.tensor("input2")?, &a.tensor("weight")?, a.optional_tensor("bias").as_ref());
}

/// The dimensions of both tensors of `tensordot`: listed, or a number of them.
fn pairs(a: &Arguments<'_>) -> [Vec<isize>; 2] {
    let dims = a.value("dims");
    let list = |value: &Value| match value {
        Value::Array(all) => all.iter().filter_map(Value::as_i64).map(|d| d as isize).collect(),
        one => one.as_i64().map(|d| d as isize).into_iter().collect(),
    };
    match dims.as_i64() {
        Some(n) => [(-n as isize..0).collect(), (0..n as isize).collect()],
        None => [list(&dims[0]), list(&dims[1])],
    }
}

fn logical_addr(a: &Arguments<'_>) -> Result<DTensor> {
    let product = a.tensor("vec1")?.outer(&a.tensor("vec2")?)?;
    let product = if a.flag("alpha") { product } else { product.zeros_like()? };
    if a.flag("beta") { a.tensor("input")?.logical_or(&product) } else { product.ne(0) }
}
