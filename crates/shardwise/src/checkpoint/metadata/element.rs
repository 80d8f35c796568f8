//! Element types of stored tensors. Some have no candle dtype: such tensors can be converted and copied between files.

use std::fmt;
use std::str::FromStr;

use candle_core::DType;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::error::{Error, ErrorKind, Result};

macro_rules! elements {
    ($($name:ident $bytes:literal $safetensors:literal $torch:literal $candle:expr, $doc:literal;)*) => {
        /// The element type of a stored tensor; a superset of the dtypes that tensors in memory can have.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum ElementType {
            $(#[doc = $doc] $name,)*
        }

        impl ElementType {
            /// All element types.
            pub const ALL: &'static [ElementType] = &[$(ElementType::$name),*];

            /// Size of an element in bytes.
            pub fn size_in_bytes(self) -> usize {
                match self { $(ElementType::$name => $bytes,)* }
            }

            /// Name in a safetensors header, such as `F32`.
            pub fn safetensors_name(self) -> &'static str {
                match self { $(ElementType::$name => $safetensors,)* }
            }

            /// Name of the PyTorch dtype, such as `float32`.
            pub fn torch_name(self) -> &'static str {
                match self { $(ElementType::$name => $torch,)* }
            }

            /// The dtype with the same representation in memory, if tensors can have it.
            pub fn dtype(self) -> Option<DType> {
                match self { $(ElementType::$name => $candle,)* }
            }
        }
    };
}

elements! {
    Bool 1 "BOOL" "bool" Some(DType::U8), "Boolean, one byte, 0 or 1; `u8` in memory.";
    U8 1 "U8" "uint8" Some(DType::U8), "8-bit unsigned integer.";
    I8 1 "I8" "int8" None, "8-bit signed integer; widened to `i16` in memory.";
    F8E5M2 1 "F8_E5M2" "float8_e5m2" None, "8-bit float with 5 exponent bits; widened to `f32` in memory.";
    F8E4M3 1 "F8_E4M3" "float8_e4m3fn" Some(DType::F8E4M3), "8-bit float with 4 exponent bits and no infinities; widened to `f32` in memory unless a template has the type.";
    I16 2 "I16" "int16" Some(DType::I16), "16-bit signed integer.";
    U16 2 "U16" "uint16" None, "16-bit unsigned integer; widened to `u32` in memory.";
    F16 2 "F16" "float16" Some(DType::F16), "IEEE half precision.";
    BF16 2 "BF16" "bfloat16" Some(DType::BF16), "bfloat16, the upper 16 bits of an `f32`.";
    I32 4 "I32" "int32" Some(DType::I32), "32-bit signed integer.";
    U32 4 "U32" "uint32" Some(DType::U32), "32-bit unsigned integer.";
    F32 4 "F32" "float32" Some(DType::F32), "IEEE single precision.";
    I64 8 "I64" "int64" Some(DType::I64), "64-bit signed integer.";
    U64 8 "U64" "uint64" None, "64-bit unsigned integer; copied between files, not loaded.";
    F64 8 "F64" "float64" Some(DType::F64), "IEEE double precision.";
    C64 8 "C64" "complex64" None, "Complex number of two `f32`; copied between files, not loaded.";
}

impl ElementType {
    /// Returns the element type that tensors of a dtype are stored as.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] for a dtype that distributed tensors do not support.
    pub fn of(dtype: DType) -> Result<ElementType> {
        let found = ElementType::ALL.iter().find(|e| **e != ElementType::Bool && e.dtype() == Some(dtype));
        found.copied().ok_or_else(|| {
            let needed = "f64, f32, f16, bf16, f8e4m3, i64, i32, i16, u32 or u8";
            ErrorKind::dtype(dtype).error("element type", dtype.as_str(), needed, "convert the tensor to one of these")
        })
    }

    /// Returns the element type with a safetensors name (`F32`) or a PyTorch name (`float32`).
    ///
    /// # Errors
    /// [`ErrorKind::UnknownName`] with the list of names.
    pub fn from_name(name: &str) -> Result<ElementType> {
        let named = |e: &&ElementType| e.safetensors_name() == name || e.torch_name() == name;
        ElementType::ALL.iter().find(named).copied().ok_or_else(|| {
            let all: Vec<String> = ElementType::ALL.iter().map(ToString::to_string).collect();
            ErrorKind::unknown(name).error(
                "element type",
                format!("{name:?}"),
                all.join(", "),
                "convert the tensor to one of these",
            )
        })
    }

    /// Returns the dtype that tensors of this type are loaded as: the same, or a wider one where candle lacks it or there are no
    /// operators for it (f8).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for `u64` and `c64`, which no dtype can hold.
    pub fn widened(self) -> Result<DType> {
        match self {
            ElementType::I8 => Ok(DType::I16),
            ElementType::U16 => Ok(DType::U32),
            ElementType::F8E5M2 | ElementType::F8E4M3 => Ok(DType::F32),
            other => other.dtype().ok_or_else(|| {
                let fix = match other {
                    ElementType::C64 => "leave the tensor out, or store it with PyTorch as torch.view_as_real first",
                    _ => "leave the tensor out, or store it with PyTorch as int64 first",
                };
                let found = format!("{other}, which can be copied between files but not loaded or converted");
                ErrorKind::Unsupported.error("element type", found, "a type with a dtype", fix)
            }),
        }
    }
}

impl ElementType {
    /// Whether a dtype does not hold all values of this type exactly, so that converting to it may lose some.
    pub fn narrows_to(self, dtype: DType) -> bool {
        if self.dtype() == Some(dtype) || self == ElementType::Bool {
            return false;
        }
        let Ok(to) = ElementType::of(dtype) else { return true };
        match (self.number(), to.number()) {
            (NumberForm::Integer { signed, bits }, NumberForm::Integer { signed: to_signed, bits: to_bits }) => {
                signed && !to_signed || bits + u32::from(!signed && to_signed) > to_bits
            }
            // A sign bit adds no digits: the lowest integer is a power of two.
            (NumberForm::Integer { signed, bits }, NumberForm::Float { digits, .. }) => {
                bits - u32::from(signed) > digits
            }
            (
                NumberForm::Float { digits, exponent },
                NumberForm::Float { digits: to_digits, exponent: to_exponent },
            ) => digits > to_digits || exponent > to_exponent,
            _ => true,
        }
    }

    fn number(self) -> NumberForm {
        use NumberForm::{Float, Integer, Other};
        match self {
            ElementType::Bool => Integer { signed: false, bits: 1 },
            ElementType::U8 => Integer { signed: false, bits: 8 },
            ElementType::I8 => Integer { signed: true, bits: 8 },
            ElementType::U16 => Integer { signed: false, bits: 16 },
            ElementType::I16 => Integer { signed: true, bits: 16 },
            ElementType::U32 => Integer { signed: false, bits: 32 },
            ElementType::I32 => Integer { signed: true, bits: 32 },
            ElementType::U64 => Integer { signed: false, bits: 64 },
            ElementType::I64 => Integer { signed: true, bits: 64 },
            ElementType::F8E5M2 => Float { digits: 3, exponent: 5 },
            ElementType::F8E4M3 => Float { digits: 4, exponent: 4 },
            ElementType::F16 => Float { digits: 11, exponent: 5 },
            ElementType::BF16 => Float { digits: 8, exponent: 8 },
            ElementType::F32 => Float { digits: 24, exponent: 8 },
            ElementType::F64 => Float { digits: 53, exponent: 11 },
            ElementType::C64 => Other,
        }
    }
}

/// Which numbers a type holds: bits of an integer, or significant digits and exponent bits of a float.
enum NumberForm {
    Integer { signed: bool, bits: u32 },
    Float { digits: u32, exponent: u32 },
    Other,
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.safetensors_name().to_lowercase())
    }
}

impl FromStr for ElementType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        ElementType::from_name(text).or_else(|error| ElementType::from_name(&text.to_uppercase()).map_err(|_| error))
    }
}

impl Serialize for ElementType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ElementType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}
