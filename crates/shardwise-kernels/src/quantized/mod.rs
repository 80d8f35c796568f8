//! Quantized blocks of GGUF files: several elements that share scales, and their expansion to f32.

mod block_type;

pub use block_type::BlockType;
