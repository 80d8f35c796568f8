//! The arguments of a call as PyTorch takes them: by position or by name, with the defaults of the signature.

use candle_core::{DType, Tensor};
use serde_json::Value;
use shardwise::prelude::*;
use shardwise::tensor::{Number, Operand};

use super::signature::Signature;

/// A tensor among the arguments of a call.
pub struct TensorArgument {
    /// The distributed tensor.
    pub tensor: DTensor,
    /// Its type in PyTorch. `bool` is u8 here.
    pub dtype: String,
}

/// The arguments of one call, read by the names of PyTorch's signature.
///
/// An argument that is absent has the default of the signature; one without a default is an error.
pub struct Arguments<'a> {
    pub(super) signature: Signature,
    pub(super) positional: &'a [Value],
    pub(super) keyword: &'a Value,
    pub(super) tensors: &'a [TensorArgument],
    pub(super) mesh: &'a DeviceMesh,
    pub(super) variant: &'a str,
}

/// A tensor or a number, where PyTorch takes either.
#[derive(Clone)]
pub enum OperandArgument {
    /// A distributed tensor.
    Tensor(DTensor),
    /// A number.
    Number(Number),
}

impl OperandArgument {
    /// The operand as operators take it.
    pub fn operand(&self) -> Operand<'_> {
        match self {
            OperandArgument::Tensor(tensor) => Operand::Tensor(tensor),
            OperandArgument::Number(number) => Operand::Number(*number),
        }
    }
}

impl<'a> Arguments<'a> {
    /// The mesh of the call, for operators without a tensor.
    pub fn mesh(&self) -> &'a DeviceMesh {
        self.mesh
    }

    /// Placements for a result of an operator without a tensor: replicated.
    pub fn replicated(&self) -> Vec<Placement> {
        vec![Replicate; self.mesh.ndim()]
    }

    /// The name of the entry in PyTorch's database, where an operator has several.
    pub fn variant(&self) -> &'a str {
        self.variant
    }

    /// The encoded argument: given by position or by name, or the default.
    pub fn value(&self, name: &str) -> Value {
        if let Some(given) = self.given(name) {
            return given.clone();
        }
        self.signature.default_of(name).cloned().unwrap_or(Value::Null)
    }

    fn given(&self, name: &str) -> Option<&'a Value> {
        let by_position = self.signature.position(name).and_then(|i| self.positional.get(i));
        by_position.or_else(|| self.keyword.get(name))
    }

    /// Whether an argument is given and not None.
    pub fn has(&self, name: &str) -> bool {
        !self.value(name).is_null()
    }

    fn wrong(&self, name: &str, needed: &str) -> Error {
        Error::other(format!(
            "argument {name} of {}: {} where {needed} is needed",
            self.signature.name,
            self.value(name)
        ))
    }

    /// The tensor that an encoded value names.
    pub fn tensor_of(&self, value: &Value) -> Option<&'a TensorArgument> {
        self.tensors.get(value.get("tensor")?.as_u64()? as usize)
    }

    /// A tensor.
    pub fn tensor(&self, name: &str) -> Result<DTensor> {
        self.optional_tensor(name).ok_or_else(|| self.wrong(name, "a tensor"))
    }

    /// A tensor, or None.
    pub fn optional_tensor(&self, name: &str) -> Option<DTensor> {
        self.tensor_of(&self.value(name)).map(|t| t.tensor.clone())
    }

    /// A list of tensors: one argument that is a list, or all further arguments by position.
    pub fn tensors(&self, name: &str) -> Result<Vec<DTensor>> {
        let first = self.signature.position(name).unwrap_or(0);
        let listed = match self.value(name) {
            Value::Array(all) => all,
            _ => self.positional.get(first..).unwrap_or(&[]).to_vec(),
        };
        let tensor = |v: &Value| self.tensor_of(v).map(|t| t.tensor.clone());
        listed.iter().map(|v| tensor(v).ok_or_else(|| self.wrong(name, "a list of tensors"))).collect()
    }

    /// Whether an argument is a tensor.
    pub fn is_tensor(&self, name: &str) -> bool {
        self.tensor_of(&self.value(name)).is_some()
    }

    /// Whether an argument is a tensor of PyTorch's type bool, or the number True or False.
    pub fn is_bool(&self, name: &str) -> bool {
        let value = self.value(name);
        value.is_boolean() || self.tensor_of(&value).is_some_and(|t| t.dtype == "bool")
    }

    /// A tensor or a number.
    pub fn operand(&self, name: &str) -> Result<OperandArgument> {
        match self.optional_tensor(name) {
            Some(tensor) => Ok(OperandArgument::Tensor(tensor)),
            None => self.number(name).map(OperandArgument::Number),
        }
    }

    /// A tensor; a number becomes a replicated scalar tensor of PyTorch's default type, or the type of `other`.
    pub fn as_tensor(&self, name: &str, other: &DTensor) -> Result<DTensor> {
        match self.operand(name)? {
            OperandArgument::Tensor(tensor) => Ok(tensor),
            OperandArgument::Number(number) => {
                let dtype = match number {
                    Number::Real(_) if !other.dtype().is_float() => DType::F32,
                    _ => other.dtype(),
                };
                DTensor::full(number, (), dtype, self.mesh, self.replicated())
            }
        }
    }

    /// A number as a tensor in the type that PyTorch gives numbers: f32 or i64.
    pub fn number_tensor(&self, name: &str) -> Result<DTensor> {
        let number = self.number(name)?;
        let dtype = if matches!(number, Number::Real(_)) { DType::F32 } else { DType::I64 };
        DTensor::full(number, (), dtype, self.mesh, self.replicated())
    }

    /// A number: an integer or a float; True is 1.
    pub fn number(&self, name: &str) -> Result<Number> {
        number_of(&self.value(name)).ok_or_else(|| self.wrong(name, "a number"))
    }

    /// A float.
    pub fn float(&self, name: &str) -> Result<f64> {
        Ok(self.number(name)?.to_f64())
    }

    /// A float, or None.
    pub fn optional_float(&self, name: &str) -> Option<f64> {
        number_of(&self.value(name)).map(Number::to_f64)
    }

    /// A list of floats; a number is a list of one, None is empty.
    pub fn floats(&self, name: &str) -> Vec<f64> {
        match &self.value(name) {
            Value::Array(all) => all.iter().filter_map(number_of).map(Number::to_f64).collect(),
            one => number_of(one).map(Number::to_f64).into_iter().collect(),
        }
    }

    /// An integer: a dimension, an offset, a shift.
    pub fn int(&self, name: &str) -> Result<isize> {
        self.optional_int(name).ok_or_else(|| self.wrong(name, "an integer"))
    }

    /// An integer, or None.
    pub fn optional_int(&self, name: &str) -> Option<isize> {
        let value = self.value(name);
        value.as_i64().or_else(|| value.as_bool().map(i64::from)).map(|n| n as isize)
    }

    /// Integers: one or a list. None is an empty list, which reductions read as all dimensions.
    pub fn ints(&self, name: &str) -> Vec<isize> {
        match &self.value(name) {
            Value::Array(all) => all.iter().filter_map(Value::as_i64).map(|n| n as isize).collect(),
            one => one.as_i64().map(|n| n as isize).into_iter().collect(),
        }
    }

    /// Integers that are one list or all further arguments by position: `x.expand(2, 3)` and `x.expand([2, 3])`.
    pub fn spread_ints(&self, name: &str) -> Vec<isize> {
        match self.value(name) {
            Value::Array(_) => self.ints(name),
            _ => {
                let first = self.signature.position(name).unwrap_or(0);
                let rest = self.positional.get(first..).unwrap_or(&[]);
                rest.iter().filter_map(Value::as_i64).map(|n| n as isize).collect()
            }
        }
    }

    /// All arguments by position as shapes; a number is a shape of one dimension.
    pub fn shapes(&self) -> Vec<Vec<usize>> {
        let sizes = |value: &Value| match value {
            Value::Array(all) => all.iter().filter_map(Value::as_u64).map(|n| n as usize).collect(),
            one => one.as_u64().map(|n| n as usize).into_iter().collect(),
        };
        self.positional.iter().map(sizes).collect()
    }

    /// A size or a count.
    pub fn size(&self, name: &str) -> Result<usize> {
        usize::try_from(self.int(name)?).map_err(|_| self.wrong(name, "a number that is not negative"))
    }

    /// Sizes: one or a list.
    pub fn sizes(&self, name: &str) -> Vec<usize> {
        self.ints(name).into_iter().map(|n| n as usize).collect()
    }

    /// A bool.
    pub fn flag(&self, name: &str) -> bool {
        let value = self.value(name);
        value.as_bool().unwrap_or_else(|| value.as_i64().is_some_and(|n| n != 0))
    }

    /// A string, or None.
    pub fn text(&self, name: &str) -> Option<String> {
        self.value(name).as_str().map(str::to_string)
    }

    /// A type, or None. PyTorch's bool is u8, and its i8, which candle lacks, is i16.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        dtype_of(self.value(name).get("dtype")?.as_str()?)
    }

    /// Whether an argument is PyTorch's type bool.
    pub fn is_bool_type(&self, name: &str) -> bool {
        self.value(name).get("dtype").and_then(Value::as_str) == Some("bool")
    }

    /// Converts a tensor to the type that an argument names, if it does.
    pub fn converted(&self, x: &DTensor, name: &str) -> Result<DTensor> {
        match self.dtype(name) {
            None => Ok(x.clone()),
            Some(_) if self.is_bool_type(name) => x.ne(0),
            Some(dtype) => x.to_dtype(dtype),
        }
    }

    /// A tensor in which PyTorch's bool has become i64, as with an integer.
    pub fn tensor_beyond_bool(&self, name: &str) -> Result<DTensor> {
        let x = self.tensor(name)?;
        if self.is_bool(name) { x.to_dtype(DType::I64) } else { Ok(x) }
    }

    /// A tensor that exists on every rank, from numbers of the program.
    pub fn replicate(&self, tensor: &Tensor) -> Result<DTensor> {
        DTensor::distribute_tensor(tensor, self.mesh, self.replicated(), None)
    }
}

/// The type of a name in the vectors.
pub fn dtype_of(name: &str) -> Option<DType> {
    match name {
        "bool" => Some(DType::U8),
        "i8" => Some(DType::I16),
        other => other.parse().ok(),
    }
}

/// A number: JSON's, a bool, or a float that JSON cannot write.
pub fn number_of(value: &Value) -> Option<Number> {
    if let Some(integer) = value.as_i64() {
        return Some(Number::Integer(integer));
    }
    if let Some(real) = value.as_f64() {
        return Some(Number::Real(real));
    }
    if let Some(truth) = value.as_bool() {
        return Some(Number::Integer(i64::from(truth)));
    }
    match value.get("float")?.as_str()? {
        "inf" => Some(Number::Real(f64::INFINITY)),
        "-inf" => Some(Number::Real(f64::NEG_INFINITY)),
        "nan" => Some(Number::Real(f64::NAN)),
        _ => None,
    }
}
