//! Tensors from numbers. The result may have any placements; here it is replicated.

use candle_core::DType;
use shardwise::prelude::*;
use shardwise::tensor::{Arange, Linspace, Logspace, Number};

use super::arguments::Arguments;
use super::calls::calls;

calls! {
    "arange(start, end=None, step=1, *, dtype=None)" => |a| {
        // `arange(n)` begins at 0.
        let (start, end) = match a.has("end") {
            true => (a.number("start")?, a.number("end")?),
            false => (Number::Integer(0), a.number("start")?),
        };
        let step = a.number("step")?;
        DTensor::arange(Arange::new(start, end, step), dtype(a, &[start, end, step]), a.mesh(), a.replicated())
    };
    "eye(n, m=None, *, dtype=None)" => |a| {
        let n = a.size("n")?;
        let m = if a.has("m") { a.size("m")? } else { n };
        DTensor::eye((n, m), dtype(a, &[Number::Real(0.0)]), a.mesh(), a.replicated())
    };
    "full(size, fill_value, *, dtype=None)" => |a| filled(a, a.sizes("size"), a.number("fill_value")?, a.is_bool("fill_value"));
    "ones(*size, *, dtype=None)" => |a| filled(a, sizes(a), Number::Real(1.0), false);
    "zeros(*size, *, dtype=None)" => |a| filled(a, sizes(a), Number::Real(0.0), false);
    "scalar_tensor(s, *, dtype=None)" => |a| filled(a, Vec::new(), Number::Real(a.float("s")?), false);
    "zeros_like(input, *, dtype=None)" => |a| a.converted(&a.tensor("input")?.zeros_like()?, "dtype");
    "ones_like(input, *, dtype=None)" => |a| a.converted(&a.tensor("input")?.ones_like()?, "dtype");

    "full_like(input, fill_value, *, dtype=None)" => |a| {
        let x = a.converted(&a.tensor("input")?.zeros_like()?, "dtype")?;
        let is_bool = a.is_bool_type("dtype") || !a.has("dtype") && a.is_bool("input");
        x.full_like(if is_bool { truth(a.number("fill_value")?) } else { a.number("fill_value")? })
    };
    "new_zeros(input, size, *, dtype=None)" => |a| new(a, Number::Integer(0));
    "new_ones(input, size, *, dtype=None)" => |a| new(a, Number::Integer(1));
    "new_full(input, size, fill_value, *, dtype=None)" => |a| new(a, a.number("fill_value")?);
    "linspace(start, end, steps, *, dtype=None)" => |a| {
        let (start, end) = (scalar(a, "start")?, scalar(a, "end")?);
        let space = Linspace { start, end, steps: a.size("steps")? };
        DTensor::linspace(space, a.dtype("dtype").unwrap_or(DType::F32), a.mesh(), a.replicated())
    };
    "logspace(start, end, steps, base=10.0, *, dtype=None)" => |a| {
        let (start, end) = (scalar(a, "start")?, scalar(a, "end")?);
        let space = Logspace { start, end, steps: a.size("steps")?, base: a.float("base")? };
        DTensor::logspace(space, a.dtype("dtype").unwrap_or(DType::F32), a.mesh(), a.replicated())
    };
    "tril_indices(row, col, offset=0, *, dtype=None)" => |a| a.converted(&DTensor::tril_indices(
        (a.size("row")?, a.size("col")?), a.int("offset")?, a.mesh(), a.replicated())?, "dtype");
    "triu_indices(row, col, offset=0, *, dtype=None)" => |a| a.converted(&DTensor::triu_indices(
        (a.size("row")?, a.size("col")?), a.int("offset")?, a.mesh(), a.replicated())?, "dtype");
}

fn sizes(a: &Arguments<'_>) -> Vec<usize> {
    a.spread_ints("size").iter().map(|&n| n as usize).collect()
}

/// The type that is asked for, or PyTorch's default for these numbers.
pub(super) fn dtype(a: &Arguments<'_>, numbers: &[Number]) -> DType {
    let real = numbers.iter().any(|n| matches!(n, Number::Real(_)));
    a.dtype("dtype").unwrap_or(if real { DType::F32 } else { DType::I64 })
}

fn filled(a: &Arguments<'_>, shape: Vec<usize>, value: Number, is_bool: bool) -> Result<DTensor> {
    let dtype = if is_bool && !a.has("dtype") { DType::U8 } else { dtype(a, &[value]) };
    let value = if a.is_bool_type("dtype") { Number::Integer(i64::from(value.to_f64() != 0.0)) } else { value };
    DTensor::full(value, shape, dtype, a.mesh(), a.replicated())
}

/// A number, or that of a scalar tensor.
fn scalar(a: &Arguments<'_>, name: &str) -> Result<f64> {
    match a.optional_tensor(name) {
        Some(tensor) => tensor.to_dtype(DType::F64)?.item::<f64>(),
        None => a.float(name),
    }
}

fn truth(number: Number) -> Number {
    Number::Integer(i64::from(number.to_f64() != 0.0))
}

fn new(a: &Arguments<'_>, value: Number) -> Result<DTensor> {
    let like = a.tensor("input")?.dtype();
    let is_bool = a.is_bool_type("dtype") || !a.has("dtype") && a.is_bool("input");
    let value = if is_bool { truth(value) } else { value };
    DTensor::full(value, a.sizes("size"), a.dtype("dtype").unwrap_or(like), a.mesh(), a.replicated())
}
