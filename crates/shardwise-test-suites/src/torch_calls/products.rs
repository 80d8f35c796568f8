//! Products of vectors, matrices and batches of them.

use shardwise::prelude::*;

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
}
