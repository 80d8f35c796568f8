//! Operators whose result size depends on the data.

use candle_core::DType;
use serde_json::Value;
use shardwise::ops::Unique;
use shardwise::prelude::*;

use super::arguments::Arguments;
use super::calls::calls;

calls! {
    "masked_select(input, mask)" => |a| a.tensor("input")?.masked_select(&a.tensor("mask")?);
    "nonzero(input, *, as_tuple=False)" => |a| match a.flag("as_tuple") {
        false => Ok::<_, Error>(vec![a.tensor("input")?.nonzero()?]),
        true => a.tensor("input")?.atleast_1d()?.nonzero()?.unbind(1),
    };
    "argwhere(input)" => |a| a.tensor("input")?.nonzero();
    "nonzero_static(input, *, size, fill_value=-1)" => |a|
        a.tensor("input")?.nonzero_static(a.size("size")?, a.int("fill_value")? as i64);
    // Inverse and counts only where they are asked for.
    "unique(input, sorted=True, return_inverse=False, return_counts=False, dim=None)" => |a|
        distinct(a, a.tensor("input")?.unique(a.optional_int("dim"))?);
    "unique_consecutive(input, return_inverse=False, return_counts=False, dim=None)" => |a|
        distinct(a, a.tensor("input")?.unique_consecutive(a.optional_int("dim"))?);
    "bincount(input, weights=None, minlength=0)" => |a|
        a.tensor("input")?.bincount(a.optional_tensor("weights").as_ref(), a.size("minlength")?);
    "histc(input, bins=100, min=0, max=0)" => |a|
        a.tensor("input")?.histc(a.size("bins")?, a.float("min")?, a.float("max")?);
    "histogram(input, bins, *, range=None, weight=None, density=False)" => |a| {
        let x = a.tensor("input")?;
        let edges = edges(a, &x, &a.value("bins"), &a.floats("range"))?;
        Ok::<_, Error>((x.histogram(&edges, a.optional_tensor("weight").as_ref(), a.flag("density"))?, edges))
    };
    "histogramdd(input, bins, *, range=None, weight=None, density=False)" => |a| {
        let x = a.tensor("input")?;
        let width = x.shape()[x.ndim() - 1];
        let (bins, range) = (a.value("bins"), a.floats("range"));
        let of_dim = |d: usize| {
            let own = if bins.is_array() { &bins[d] } else { &bins };
            let range = range.get(2 * d..2 * d + 2).unwrap_or(&[]);
            edges(a, &x.select(-1, d as isize)?, own, range)
        };
        let edges = (0..width).map(of_dim).collect::<Result<Vec<_>>>()?;
        let all: Vec<&DTensor> = edges.iter().collect();
        Ok::<_, Error>((x.histogramdd(&all, a.optional_tensor("weight").as_ref(), a.flag("density"))?, edges))
    };
    "bucketize(input, boundaries, *, out_int32=False, right=False)" => |a| {
        let boundaries = a.tensor("boundaries")?;
        let found = boundaries.searchsorted(&a.as_tensor("input", &boundaries)?, a.flag("right"))?;
        if a.flag("out_int32") { found.to_dtype(DType::I32) } else { Ok(found) }
    };
    "searchsorted(sorted_sequence, input, *, out_int32=False, right=False, side=None, sorter=None)" => |a| {
        let sorted = a.tensor("sorted_sequence")?;
        let right = a.flag("right") || a.text("side").as_deref() == Some("right");
        let values = a.as_tensor("input", &sorted)?;
        // The sorter is the order of a sequence that is not sorted.
        let sorted = match a.optional_tensor("sorter") {
            Some(sorter) => sorted.gather(-1, &sorter)?,
            None => sorted,
        };
        let found = sorted.searchsorted(&values, right)?;
        if a.flag("out_int32") { found.to_dtype(DType::I32) } else { Ok(found) }
    };
    "isin(elements, test_elements, *, assume_unique=False, invert=False)" => |a| {
        let x = match a.optional_tensor("elements") {
            Some(x) => x,
            None => a.as_tensor("elements", &a.tensor("test_elements")?)?,
        };
        x.isin(&a.as_tensor("test_elements", &x)?, a.flag("invert"))
    };
    "unravel_index(indices, shape)" => |a| {
        let shape = match a.value("shape").as_u64() {
            Some(n) => vec![n as usize],
            None => a.sizes("shape"),
        };
        a.tensor("indices")?.unravel_index(&shape)
    };
}

fn distinct(a: &Arguments<'_>, found: Unique) -> Result<Vec<DTensor>> {
    let inverse = a.flag("return_inverse").then_some(found.inverse);
    let counts = a.flag("return_counts").then_some(found.counts);
    Ok([Some(found.values), inverse, counts].into_iter().flatten().collect())
}

/// The edges of a histogram: given, or a number of intervals of equal length.
fn edges(a: &Arguments<'_>, x: &DTensor, bins: &Value, range: &[f64]) -> Result<DTensor> {
    if let Some(edges) = a.tensor_of(bins) {
        return Ok(edges.tensor.clone());
    }
    let (low, high) = match range {
        [low, high] => (*low, *high),
        _ => (0.0, 0.0),
    };
    let bins = bins.as_u64().ok_or_else(|| Error::other(format!("bins={bins}")))?;
    match x.elem_count() {
        // No elements: from 0 to 1.
        0 if low == high => x.histogram_edges(bins as usize, 0.0, 1.0),
        _ => x.histogram_edges(bins as usize, low, high),
    }
}
