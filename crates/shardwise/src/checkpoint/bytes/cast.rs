//! Conversion of stored elements between types.

use std::borrow::Cow;

use candle_core::{Device, Tensor};

use crate::checkpoint::metadata::element::ElementType;
use crate::error::{Error, ErrorKind, Result};
use shardwise_kernels::{bytes_of, convert};

/// Converts elements from one type to another. Integers convert to integers with wrapping; conversions to and from floats
/// round to the nearest.
pub(in crate::checkpoint) fn convert_elements(
    bytes: &[u8],
    from: ElementType,
    to: ElementType,
) -> Result<Cow<'_, [u8]>> {
    if from == to {
        return Ok(Cow::Borrowed(bytes));
    }
    let numbers = to_tensor(bytes, from)?;
    let dtype = to.dtype().ok_or_else(|| {
        let fix = "choose f64, f32, f16, bf16, f8_e4m3, i64, i32, i16, u32, u8 or bool";
        ErrorKind::Unsupported.error::<Error>("conversion", format!("{from} to {to}"), "a type with a dtype", fix)
    })?;
    let numbers = match to {
        ElementType::Bool => numbers.ne(&numbers.zeros_like()?)?,
        _ => convert(&numbers, dtype)?,
    };
    Ok(Cow::Owned(bytes_of(&numbers)?))
}

/// Elements as a 1-D tensor of the dtype [`ElementType::widened`] returns.
pub(in crate::checkpoint) fn to_tensor(bytes: &[u8], from: ElementType) -> Result<Tensor> {
    let count = bytes.len() / from.size_in_bytes();
    let vector = |values: Vec<f32>| Ok(Tensor::from_vec(values, count, &Device::Cpu)?);
    match from {
        ElementType::I8 => {
            let wide: Vec<i16> = bytes.iter().map(|&b| i16::from(b.cast_signed())).collect();
            Ok(Tensor::from_vec(wide, count, &Device::Cpu)?)
        }
        ElementType::U16 => {
            let wide: Vec<u32> = bytes.chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]]))).collect();
            Ok(Tensor::from_vec(wide, count, &Device::Cpu)?)
        }
        ElementType::F8E4M3 => vector(bytes.iter().map(|&b| small_float(b, 4)).collect()),
        ElementType::F8E5M2 => vector(bytes.iter().map(|&b| small_float(b, 5)).collect()),
        other => Ok(Tensor::from_raw_buffer(bytes, other.widened()?, &[count], &Device::Cpu)?),
    }
}

/// Decodes an 8-bit float. With 4 exponent bits (E4M3FN) there are no infinities and one NaN pattern; E5M2 follows IEEE.
fn small_float(bits: u8, exponent_bits: u32) -> f32 {
    let mantissa_bits = 7 - exponent_bits;
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(bits & 0x7f) >> mantissa_bits;
    let mantissa = i32::from(bits) & ((1 << mantissa_bits) - 1);
    let bias = (1 << (exponent_bits - 1)) - 1;
    let scale = 1 << mantissa_bits;
    match (exponent, mantissa) {
        (15, 7) if exponent_bits == 4 => f32::NAN,
        (31, 0) if exponent_bits == 5 => sign * f32::INFINITY,
        (31, _) if exponent_bits == 5 => f32::NAN,
        (0, m) => sign * m as f32 / scale as f32 * 2f32.powi(1 - bias),
        (e, m) => sign * (1.0 + m as f32 / scale as f32) * 2f32.powi(e - bias),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bit_floats_decode_as_defined() {
        // largest, smallest normal, smallest subnormal, one
        let e4 = [(0x7e, 448.0), (0x08, 2f32.powi(-6)), (0x01, 2f32.powi(-9)), (0x38, 1.0), (0xb8, -1.0)];
        let e5 =
            [(0x7b, 57344.0), (0x04, 2f32.powi(-14)), (0x01, 2f32.powi(-16)), (0x3c, 1.0), (0xfc, f32::NEG_INFINITY)];
        e4.iter().for_each(|&(bits, x)| assert_eq!(small_float(bits, 4), x));
        e5.iter().for_each(|&(bits, x)| assert_eq!(small_float(bits, 5), x));
        assert!(small_float(0x7f, 4).is_nan() && small_float(0x7d, 5).is_nan());
    }

    #[test]
    fn elements_convert_by_value() {
        let bytes = [0x80u8, 0xff, 1]; // -128, -1, 1
        let wide = convert_elements(&bytes, ElementType::I8, ElementType::I32).unwrap();
        let numbers: Vec<i32> = wide.chunks(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        assert_eq!(numbers, [-128, -1, 1]);
        assert_eq!(*convert_elements(&[0, 0, 0x80, 0x3f], ElementType::F32, ElementType::Bool).unwrap(), [1]);
        assert!(convert_elements(&bytes, ElementType::I8, ElementType::C64).is_err());
    }
}
