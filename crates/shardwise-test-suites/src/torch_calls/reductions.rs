//! Reductions over dimensions, sorting and scans.

use shardwise::ops::{MatrixNorm, QuantileInterpolation, Spacing};
use shardwise::prelude::*;

use super::arguments::Arguments;
use super::calls::{IntoOutputs, calls};

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
    // A scan of integers is i64 unless a type is given.
    "cumsum(input, dim, *, dtype=None)" => |a|
        a.converted(&a.converted(&a.tensor("input")?, "dtype")?.cumsum(a.int("dim")?)?, "dtype");
    "cumprod(input, dim, *, dtype=None)" => |a|
        a.converted(&a.converted(&a.tensor("input")?, "dtype")?.cumprod(a.int("dim")?)?, "dtype");
    "cummax(input, dim)" => |a| a.tensor("input")?.cummax(a.int("dim")?);
    "cummin(input, dim)" => |a| a.tensor("input")?.cummin(a.int("dim")?);

    "nansum(input, dim=None, keepdim=False, *, dtype=None)" => |a|
        a.converted(&a.tensor("input")?, "dtype")?.nansum(&a.ints("dim"), a.flag("keepdim"));
    "nanmean(input, dim=None, keepdim=False, *, dtype=None)" => |a|
        a.converted(&a.tensor("input")?, "dtype")?.nanmean(&a.ints("dim"), a.flag("keepdim"));
    "var_mean(input, dim=None, unbiased=None, keepdim=False, *, correction=1)" => |a| {
        let (dims, correction) = spread(a);
        a.tensor("input")?.var_mean(&dims, correction, a.flag("keepdim"))
    };
    "std_mean(input, dim=None, unbiased=None, keepdim=False, *, correction=1)" => |a| {
        let (dims, correction) = spread(a);
        a.tensor("input")?.std_mean(&dims, correction, a.flag("keepdim"))
    };
    "logcumsumexp(input, dim)" => |a| a.tensor("input")?.logcumsumexp(a.int("dim")?);
    "max(input, dim=None, keepdim=False)" => |a| extreme(a, "dim", |x, y| x.maximum(y), DTensor::max_dim, DTensor::amax);
    "min(input, dim=None, keepdim=False)" => |a| extreme(a, "dim", |x, y| x.minimum(y), DTensor::min_dim, DTensor::amin);
    // Without a dimension the median of all elements, without its index.
    "median(input, dim=None, keepdim=False)" => |a| match a.optional_int("dim") {
        Some(dim) => Ok::<_, Error>(pair(a.tensor("input")?.median(dim, a.flag("keepdim"))?)),
        None => Ok(vec![a.tensor("input")?.reshape(&[-1])?.median(0, false)?.0]),
    };
    "nanmedian(input, dim=None, keepdim=False)" => |a| match a.optional_int("dim") {
        Some(dim) => Ok::<_, Error>(pair(a.tensor("input")?.nanmedian(dim, a.flag("keepdim"))?)),
        None => Ok(vec![a.tensor("input")?.reshape(&[-1])?.nanmedian(0, false)?.0]),
    };
    "mode(input, dim=-1, keepdim=False)" => |a| a.tensor("input")?.mode(a.int("dim")?, a.flag("keepdim"));
    "quantile(input, q, dim=None, keepdim=False, *, interpolation='linear')" => |a| {
        let x = a.tensor("input")?;
        x.quantile(&a.as_tensor("q", &x)?, a.optional_int("dim"), a.flag("keepdim"), interpolation(a))
    };
    "nanquantile(input, q, dim=None, keepdim=False, *, interpolation='linear')" => |a| {
        let x = a.tensor("input")?;
        x.nanquantile(&a.as_tensor("q", &x)?, a.optional_int("dim"), a.flag("keepdim"), interpolation(a))
    };
    "cov(input, *, correction=1, fweights=None, aweights=None)" => |a| a.tensor("input")?.cov(
        a.float("correction")?, a.optional_tensor("fweights").as_ref(), a.optional_tensor("aweights").as_ref());
    "corrcoef(input)" => |a| a.tensor("input")?.corrcoef();
    "diff(input, n=1, dim=-1, prepend=None, append=None)" => |a| a.tensor("input")?.diff(
        a.size("n")?, a.int("dim")?, a.optional_tensor("prepend").as_ref(), a.optional_tensor("append").as_ref());
    "trapezoid(y, x=None, *, dx=1, dim=-1)" => |a| match a.optional_tensor("x") {
        Some(x) => a.tensor("y")?.trapezoid(&x, a.int("dim")?),
        None => a.tensor("y")?.trapezoid(a.float("dx")?, a.int("dim")?),
    };
    "trapz(y, x=None, *, dx=1, dim=-1)" => |a| match a.optional_tensor("x") {
        Some(x) => a.tensor("y")?.trapezoid(&x, a.int("dim")?),
        None => a.tensor("y")?.trapezoid(a.float("dx")?, a.int("dim")?),
    };
    "cumulative_trapezoid(y, x=None, *, dx=1, dim=-1)" => |a| match a.optional_tensor("x") {
        Some(x) => a.tensor("y")?.cumulative_trapezoid(&x, a.int("dim")?),
        None => a.tensor("y")?.cumulative_trapezoid(a.float("dx")?, a.int("dim")?),
    };
    "gradient(input, *, spacing=None, dim=None, edge_order=1)" => |a| {
        let x = a.tensor("input")?;
        let dims = if a.has("dim") { a.ints("dim") } else { (0..x.ndim() as isize).collect() };
        let coordinates = if a.value("spacing").is_array() { a.tensors("spacing").ok() } else { None };
        let distances = a.floats("spacing");
        let spacing = |i: usize| match &coordinates {
            Some(all) if !all.is_empty() => Spacing::Coordinates(all[i].clone()),
            _ => Spacing::Distance(distances.get(i).or(distances.first()).copied().unwrap_or(1.0)),
        };
        let dims: Vec<(isize, Spacing)> = dims.iter().enumerate().map(|(i, &dim)| (dim, spacing(i))).collect();
        x.gradient(&dims, a.size("edge_order")?)
    };
    "trace(input)" => |a| a.tensor("input")?.trace();
    "norm(input, p='fro', dim=None, keepdim=False, dtype=None)" => |a| {
        let order = match a.text("p").as_deref() {
            Some("nuc") => {
                let dims = a.ints("dim");
                let [rows, columns] = *dims.as_slice() else { return Ok(nuclear(a, [-2, -1])?.into_outputs()) };
                return Ok(nuclear(a, [rows, columns])?.into_outputs());
            }
            Some(_) => 2.0,
            None => a.optional_float("p").unwrap_or(2.0),
        };
        a.tensor("input")?.norm(order, &a.ints("dim"), a.flag("keepdim"))
    };
    "dist(input, other, p=2)" => |a| a.tensor("input")?.dist(&a.tensor("other")?, a.float("p")?);
    "cdist(x1, x2, p=2.0, compute_mode=None)" => |a| a.tensor("x1")?.cdist(&a.tensor("x2")?, a.float("p")?);
    "renorm(input, p, dim, maxnorm)" => |a|
        a.tensor("input")?.renorm(a.float("p")?, a.int("dim")?, a.float("maxnorm")?);
}

/// Dimensions and correction of a variance. PyTorch's `unbiased` is a correction of 1 or 0, and may stand in the place of `dim`.
pub(super) fn spread(a: &Arguments<'_>) -> (Vec<isize>, f64) {
    let unbiased = if a.value("dim").is_boolean() { Some(a.flag("dim")) } else { a.value("unbiased").as_bool() };
    let correction = unbiased.map_or_else(|| a.float("correction").unwrap_or(1.0), |u| f64::from(u8::from(u)));
    (a.ints("dim"), correction)
}

/// PyTorch's `max` and `min`: of two tensors, along a dimension with indices, or of all elements.
fn extreme(
    a: &Arguments<'_>,
    second: &str,
    of_two: for<'x> fn(&DTensor, &'x DTensor) -> Result<DTensor>,
    along: fn(&DTensor, isize, bool) -> Result<(DTensor, DTensor)>,
    of_all: fn(&DTensor, &[isize], bool) -> Result<DTensor>,
) -> Result<Vec<DTensor>> {
    let x = a.tensor("input")?;
    match (a.optional_tensor(second), a.optional_int(second)) {
        (Some(other), _) => Ok(vec![of_two(&x, &other)?]),
        (None, Some(dim)) => Ok(pair(along(&x, dim, a.flag("keepdim"))?)),
        (None, None) => Ok(vec![of_all(&x, &[], false)?]),
    }
}

fn pair((values, indices): (DTensor, DTensor)) -> Vec<DTensor> {
    vec![values, indices]
}

fn interpolation(a: &Arguments<'_>) -> QuantileInterpolation {
    match a.text("interpolation").as_deref() {
        Some("lower") => QuantileInterpolation::Lower,
        Some("higher") => QuantileInterpolation::Higher,
        Some("midpoint") => QuantileInterpolation::Midpoint,
        Some("nearest") => QuantileInterpolation::Nearest,
        _ => QuantileInterpolation::Linear,
    }
}

/// The nuclear norm of matrices in two dimensions.
fn nuclear(a: &Arguments<'_>, dims: [isize; 2]) -> Result<DTensor> {
    a.tensor("input")?.linalg_matrix_norm(MatrixNorm::Nuclear, dims, a.flag("keepdim"))
}
