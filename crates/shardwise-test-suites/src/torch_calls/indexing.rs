//! Reads and writes by index.

use serde_json::Value;
use shardwise::ops::{Index, ScatterReduce};
use shardwise::prelude::*;
use shardwise::tensor::Number;

use super::arguments::Arguments;
use super::calls::calls;

calls! {
    "index_select(input, dim, index)" => |a| a.tensor("input")?.index_select(a.int("dim")?, &a.tensor("index")?);
    "gather(input, dim, index, sparse_grad=False)" => |a| a.tensor("input")?.gather(a.int("dim")?, &a.tensor("index")?);
    "scatter_add(input, dim, index, src)" => |a|
        {
            let sum = a.tensor("input")?.scatter_add(a.int("dim")?, &a.tensor("index")?, &a.tensor("src")?)?;
            if a.is_bool("input") { sum.ne(0) } else { Ok(sum) }
        };
    "masked_fill(input, mask, value)" => |a| match a.optional_tensor("value") {
        Some(value) => value.where_(&a.tensor("mask")?, &a.tensor("input")?),
        None if a.is_bool("input") => {
            let value = Number::Integer(i64::from(a.float("value")? != 0.0));
            a.tensor("input")?.masked_fill(&a.tensor("mask")?, value)
        }
        None => a.tensor("input")?.masked_fill(&a.tensor("mask")?, a.number("value")?),
    };

    "__getitem__(input, index)" => |a| a.tensor("input")?.i(indices(a, &a.value("index"))?);
    "index_add(input, dim, index, source, *, alpha=1)" => |a| {
        let source = a.tensor("source")?;
        let source = if a.float("alpha")? == 1.0 { source } else { source.mul(a.number("alpha")?)? };
        let sum = a.tensor("input")?.index_add(a.int("dim")?, &a.tensor("index")?, &source)?;
        if a.is_bool("input") { sum.ne(0) } else { Ok(sum) }
    };
    "index_copy(input, dim, index, source)" => |a|
        a.tensor("input")?.index_copy(a.int("dim")?, &a.tensor("index")?, &a.tensor("source")?);
    "index_fill(input, dim, index, value)" => |a|
        a.tensor("input")?.index_fill(a.int("dim")?, &a.tensor("index")?, a.operand("value")?.operand());
    "index_reduce(input, dim, index, source, reduce, *, include_self=True)" => |a| a.tensor("input")?.index_reduce(
        a.int("dim")?, &a.tensor("index")?, &a.tensor("source")?, reduce(a)?, a.flag("include_self"));
    "scatter_reduce(input, dim, index, src, reduce, *, include_self=True)" => |a| {
        let x = a.tensor("input")?;
        let reduced = x.scatter_reduce(
            a.int("dim")?, &a.tensor("index")?, &a.tensor("src")?, reduce(a)?, a.flag("include_self"))?;
        // A sum of PyTorch's bools is their logical or.
        if a.is_bool("input") { reduced.ne(0) } else { Ok(reduced) }
    };
    // The source may be a number, and may be reduced into the tensor.
    "scatter(input, dim, index, src, *, reduce=None)" => |a| {
        let (x, dim, index) = (a.tensor("input")?, a.int("dim")?, a.tensor("index")?);
        let source = match a.optional_tensor("src") {
            Some(source) => source,
            None => {
                let value = a.number("src")?;
                let value = if a.is_bool("input") { Number::Integer(i64::from(value.to_f64() != 0.0)) } else { value };
                DTensor::full(value, index.shape(), x.dtype(), a.mesh(), a.replicated())?
            }
        };
        match a.text("reduce").as_deref() {
            None => x.scatter(dim, &index, &source),
            Some("add") => {
                let sum = x.scatter_add(dim, &index, &source)?;
                if a.is_bool("input") { sum.ne(0) } else { Ok(sum) }
            }
            Some(_) => x.scatter_reduce(dim, &index, &source, ScatterReduce::Prod, true),
        }
    };
    "take(input, index)" => |a| a.tensor("input")?.take(&a.tensor("index")?);
    "put(input, index, source, accumulate=False)" => |a| {
        let put = a.tensor("input")?.put(&a.tensor("index")?, &a.tensor("source")?, a.flag("accumulate"))?;
        if a.is_bool("input") { put.ne(0) } else { Ok(put) }
    };
    "take_along_dim(input, indices, dim=None)" => |a|
        a.tensor("input")?.take_along_dim(&a.tensor("indices")?, a.optional_int("dim"));
    "masked_scatter(input, mask, source)" => |a|
        a.tensor("input")?.masked_scatter(&a.tensor("mask")?, &a.tensor("source")?);
    // A mask is an index of the places that it selects.
    "index_put(input, indices, values, accumulate=False)" => |a| {
        let mut places = Vec::new();
        for value in a.value("indices").as_array().unwrap_or(&Vec::new()) {
            let Some(index) = a.tensor_of(value) else { continue };
            match index.dtype == "bool" {
                true => places.extend(index.tensor.nonzero()?.unbind(1)?),
                false => places.push(index.tensor.clone()),
            }
        }
        let x = a.tensor("input")?;
        let rest = &x.shape()[places.len()..];
        let shape = [super::views::signed(places[0].shape()), super::views::signed(rest)].concat();
        let values = a.tensor("values")?.expand(&shape)?;
        let put = x.index_put(&places.iter().collect::<Vec<_>>(), &values, a.flag("accumulate"))?;
        if a.is_bool("input") { put.ne(0) } else { Ok(put) }
    };
    "nn.functional.one_hot(input, num_classes=-1)" => |a| {
        let ids = a.tensor("input")?;
        let classes = match a.int("num_classes")? {
            -1 => ids.amax(&[], false)?.item::<i64>()? as usize + 1,
            classes => classes as usize,
        };
        ids.one_hot(classes)
    };
}

fn reduce(a: &Arguments<'_>) -> Result<ScatterReduce> {
    match a.text("reduce").as_deref() {
        Some("sum") => Ok(ScatterReduce::Sum),
        Some("prod") => Ok(ScatterReduce::Prod),
        Some("mean") => Ok(ScatterReduce::Mean),
        Some("amax") => Ok(ScatterReduce::Amax),
        Some("amin") => Ok(ScatterReduce::Amin),
        other => Err(Error::other(format!("reduce={other:?}"))),
    }
}

/// The index of `x[...]`: a list has one entry per dimension, anything else is an index with this one entry.
fn indices(a: &Arguments<'_>, value: &Value) -> Result<Vec<Index<'static>>> {
    match value {
        Value::Array(entries) => entries.iter().map(|entry| index(a, entry)).collect(),
        one => Ok(vec![index(a, one)?]),
    }
}

fn index(a: &Arguments<'_>, entry: &Value) -> Result<Index<'static>> {
    if let Some(tensor) = a.tensor_of(entry) {
        return Ok(Index::from(tensor.tensor.clone()));
    }
    if let Some(at) = entry.as_i64() {
        return Ok(Index::At(at as isize));
    }
    if let Some(list) = entry.as_array() {
        return Ok(Index::List(list.iter().filter_map(Value::as_i64).collect()));
    }
    if let Some([start, end, step]) = entry.get("slice").and_then(Value::as_array).map(Vec::as_slice) {
        let edge = |v: &Value| v.as_i64().map(|i| i as isize);
        return Ok(Index::Range { start: edge(start), end: edge(end), step: step.as_u64().unwrap_or(1) as usize });
    }
    match entry {
        Value::Null => Ok(Index::NewAxis),
        Value::Object(_) => Ok(Index::Ellipsis),
        other => Err(Error::other(format!("the index {other}"))),
    }
}
