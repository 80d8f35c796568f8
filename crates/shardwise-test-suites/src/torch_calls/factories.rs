//! Tensors from numbers. The result may have any placements; here it is replicated.

use candle_core::DType;
use shardwise::prelude::*;
use shardwise::tensor::{Arange, Number};

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
    DTensor::full(value, (shape, dtype), a.mesh(), a.replicated())
}
