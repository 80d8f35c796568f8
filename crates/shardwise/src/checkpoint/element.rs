//! Element types as files name them. There are more than tensors here can have: files pass through untouched.

use std::fmt;
use std::str::FromStr;

use candle_core::DType;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::error::{Error, ErrorKind, Result};

macro_rules! elements {
    ($($name:ident $bytes:literal $safetensors:literal $torch:literal $candle:expr, $doc:literal;)*) => {
        /// The type of the elements of a stored tensor.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum ElementType {
            $(#[doc = $doc] $name,)*
        }

        impl ElementType {
            /// All of them.
            pub const ALL: &'static [ElementType] = &[$(ElementType::$name),*];

            /// Size of an element in bytes.
            pub fn size_in_bytes(self) -> usize {
                match self { $(ElementType::$name => $bytes,)* }
            }

            /// The name in the header of a safetensors file.
            pub fn safetensors_name(self) -> &'static str {
                match self { $(ElementType::$name => $safetensors,)* }
            }

            /// The name of PyTorch's type.
            pub fn torch_name(self) -> &'static str {
                match self { $(ElementType::$name => $torch,)* }
            }

            /// The type of a tensor that holds such elements as they are stored, if there is one.
            pub fn dtype(self) -> Option<DType> {
                match self { $(ElementType::$name => $candle,)* }
            }
        }
    };
}

elements! {
    Bool 1 "BOOL" "bool" Some(DType::U8), "Truth values, one byte each, 0 or 1.";
    U8 1 "U8" "uint8" Some(DType::U8), "Whole numbers of 8 bits without a sign.";
    I8 1 "I8" "int8" None, "Whole numbers of 8 bits.";
    F8E5M2 1 "F8_E5M2" "float8_e5m2" None, "Numbers of 8 bits, 5 of them for the exponent.";
    F8E4M3 1 "F8_E4M3" "float8_e4m3fn" None, "Numbers of 8 bits, 4 of them for the exponent.";
    I16 2 "I16" "int16" Some(DType::I16), "Whole numbers of 16 bits.";
    U16 2 "U16" "uint16" None, "Whole numbers of 16 bits without a sign.";
    F16 2 "F16" "float16" Some(DType::F16), "Half precision.";
    BF16 2 "BF16" "bfloat16" Some(DType::BF16), "The upper half of single precision.";
    I32 4 "I32" "int32" Some(DType::I32), "Whole numbers of 32 bits.";
    U32 4 "U32" "uint32" Some(DType::U32), "Whole numbers of 32 bits without a sign.";
    F32 4 "F32" "float32" Some(DType::F32), "Single precision.";
    I64 8 "I64" "int64" Some(DType::I64), "Whole numbers of 64 bits.";
    U64 8 "U64" "uint64" None, "Whole numbers of 64 bits without a sign.";
    F64 8 "F64" "float64" Some(DType::F64), "Double precision.";
    C64 8 "C64" "complex64" None, "Complex numbers of two single-precision parts.";
}

impl ElementType {
    /// The type in which the elements of a tensor are stored.
    pub fn of(dtype: DType) -> Result<ElementType> {
        let found = ElementType::ALL.iter().find(|e| **e != ElementType::Bool && e.dtype() == Some(dtype));
        found.copied().ok_or_else(|| {
            let needed = "f64, f32, f16, bf16, i64, i32, i16, u32 or u8";
            ErrorKind::dtype(dtype).error("element type", dtype.as_str(), needed, "tensors here have no other types")
        })
    }

    /// The type with a name of safetensors (`F32`) or of PyTorch (`float32`).
    pub fn from_name(name: &str) -> Result<ElementType> {
        let named = |e: &&ElementType| e.safetensors_name() == name || e.torch_name() == name;
        ElementType::ALL.iter().find(named).copied().ok_or_else(|| {
            let all: Vec<String> = ElementType::ALL.iter().map(ToString::to_string).collect();
            ErrorKind::unknown(name).error(
                "element type",
                format!("{name:?}"),
                all.join(", "),
                "this version knows no other",
            )
        })
    }

    /// The type of tensor that can hold all such numbers: the own one, or the next wider one.
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
                let found = format!("{other}, which passes through files unchanged and is not converted");
                ErrorKind::Unsupported.error("element type", found, "a type that tensors here can have", fix)
            }),
        }
    }
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
