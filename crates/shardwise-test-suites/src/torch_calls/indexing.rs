//! Reads and writes by index.

use super::calls::calls;

calls! {
    "index_select(input, dim, index)" => |a| a.tensor("input")?.index_select(a.int("dim")?, &a.tensor("index")?);
    "gather(input, dim, index, sparse_grad=False)" => |a| a.tensor("input")?.gather(a.int("dim")?, &a.tensor("index")?);
    "scatter_add(input, dim, index, src)" => |a|
        a.tensor("input")?.scatter_add(a.int("dim")?, &a.tensor("index")?, &a.tensor("src")?);
    "masked_fill(input, mask, value)" => |a| match a.optional_tensor("value") {
        Some(value) => value.where_(&a.tensor("mask")?, &a.tensor("input")?),
        None => a.tensor("input")?.masked_fill(&a.tensor("mask")?, a.number("value")?),
    };
}
