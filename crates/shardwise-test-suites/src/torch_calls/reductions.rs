//! Reductions over dimensions, sorting and scans.

use shardwise::prelude::*;

use super::arguments::Arguments;
use super::calls::calls;

calls! {
    // No dimension, or an empty list of them, stands for all dimensions.
    "sum(input, dim=None, keepdim=False, *, dtype=None)" => |a|
        a.converted(&a.tensor("input")?, "dtype")?.sum(&a.ints("dim"), a.flag("keepdim"));
    "mean(input, dim=None, keepdim=False, *, dtype=None)" => |a|
        a.converted(&a.tensor("input")?, "dtype")?.mean(&a.ints("dim"), a.flag("keepdim"));
    "prod(input, dim=None, keepdim=False, *, dtype=None)" => |a| {
        let product = a.converted(&a.tensor("input")?, "dtype")?.prod(&a.ints("dim"), a.flag("keepdim"))?;
        a.converted(&product, "dtype")
    };
    "amax(input, dim=[], keepdim=False)" => |a| a.tensor("input")?.amax(&a.ints("dim"), a.flag("keepdim"));
    "amin(input, dim=[], keepdim=False)" => |a| a.tensor("input")?.amin(&a.ints("dim"), a.flag("keepdim"));
    "any(input, dim=None, keepdim=False)" => |a| a.tensor("input")?.any(&a.ints("dim"), a.flag("keepdim"));
    "all(input, dim=None, keepdim=False)" => |a| a.tensor("input")?.all(&a.ints("dim"), a.flag("keepdim"));
    "count_nonzero(input, dim=None)" => |a| a.tensor("input")?.count_nonzero(&a.ints("dim"), false);
    "logsumexp(input, dim, keepdim=False)" => |a| a.tensor("input")?.logsumexp(&a.ints("dim"), a.flag("keepdim"));
    "var(input, dim=None, unbiased=None, keepdim=False, *, correction=1)" => |a| {
        let (dims, correction) = spread(a);
        a.tensor("input")?.var(&dims, correction, a.flag("keepdim"))
    };
    "std(input, dim=None, unbiased=None, keepdim=False, *, correction=1)" => |a| {
        let (dims, correction) = spread(a);
        a.tensor("input")?.std(&dims, correction, a.flag("keepdim"))
    };
    "argmax(input, dim=None, keepdim=False)" => |a| a.tensor("input")?.argmax(a.optional_int("dim"), a.flag("keepdim"));
    "argmin(input, dim=None, keepdim=False)" => |a| a.tensor("input")?.argmin(a.optional_int("dim"), a.flag("keepdim"));
    "aminmax(input, *, dim=None, keepdim=False)" => |a|
        a.tensor("input")?.aminmax(a.optional_int("dim"), a.flag("keepdim"));
    "softmax(input, dim, *, dtype=None)" => |a| a.converted(&a.tensor("input")?, "dtype")?.softmax(a.int("dim")?);
    "log_softmax(input, dim, *, dtype=None)" => |a|
        a.converted(&a.tensor("input")?, "dtype")?.log_softmax(a.int("dim")?);

    // Sorting. Every sort is stable.
    "sort(input, dim=-1, descending=False, stable=False)" => |a|
        a.tensor("input")?.sort(a.int("dim")?, a.flag("descending"));
    "argsort(input, dim=-1, descending=False, stable=False)" => |a|
        a.tensor("input")?.argsort(a.int("dim")?, a.flag("descending"));
    "topk(input, k, dim=-1, largest=True, sorted=True)" => |a|
        a.tensor("input")?.topk(a.size("k")?, a.int("dim")?, a.flag("largest"));
    "kthvalue(input, k, dim=-1, keepdim=False)" => |a|
        a.tensor("input")?.kthvalue(a.size("k")?, a.int("dim")?, a.flag("keepdim"));
    "msort(input)" => |a| Ok::<_, Error>(a.tensor("input")?.sort(0, false)?.0);

    // Scans.
    "cumsum(input, dim, *, dtype=None)" => |a| a.converted(&a.tensor("input")?, "dtype")?.cumsum(a.int("dim")?);
    "cumprod(input, dim, *, dtype=None)" => |a| a.converted(&a.tensor("input")?, "dtype")?.cumprod(a.int("dim")?);
    "cummax(input, dim)" => |a| a.tensor("input")?.cummax(a.int("dim")?);
    "cummin(input, dim)" => |a| a.tensor("input")?.cummin(a.int("dim")?);
}

/// Dimensions and correction of a variance. PyTorch's `unbiased` is a correction of 1 or 0, and may stand in the place of `dim`.
pub(super) fn spread(a: &Arguments<'_>) -> (Vec<isize>, f64) {
    let unbiased = if a.value("dim").is_boolean() { Some(a.flag("dim")) } else { a.value("unbiased").as_bool() };
    let correction = unbiased.map_or_else(|| a.float("correction").unwrap_or(1.0), |u| f64::from(u8::from(u)));
    (a.ints("dim"), correction)
}
