//! Quantized blocks of GGUF files: several elements that share scales, their expansion to f32, and products with them.
//!
//! A quantized matrix `[rows, columns]` is a u8 tensor `[rows, blocks, bytes of a block]` with a [`BlockType`], which its shape
//! does not determine.

mod block_type;
mod packed;
mod product;
mod rounded_rows;
mod vectors;

pub use block_type::BlockType;
pub use product::{dequantize, quantized_matmul};
