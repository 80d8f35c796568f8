//! Options of loading models.

use std::sync::Arc;

use candle_core::DType;

/// Options of [`load_with`](super::load_with) and [`load_encoder_with`](super::load_encoder_with).
///
/// ```
/// use shardwise::models::LoadOptions;
/// use shardwise::prelude::*;
///
/// let options = LoadOptions { dtype: DType::BF16, ..LoadOptions::default() };
/// ```
#[derive(Clone)]
pub struct LoadOptions {
    /// Type of the weights in memory, in which the model computes; f32 by default, whatever the files have.
    #[doc(alias = "torch_dtype")]
    pub dtype: DType,
    /// Whether weights that are quantized in a GGUF file stay so in memory, for inference; otherwise they are expanded to
    /// [`dtype`](Self::dtype). False by default.
    ///
    /// Linear layers and embeddings compute with the blocks as they are: a fraction of the memory and of the time of a token,
    /// the same results up to rounding. Their shards begin and end between blocks. Other weights are expanded, and so
    /// are transposed weights and ones joined of several types, and all if `dtype` is not f32.
    pub keep_quantized: bool,
    /// Unknown fields of `config.json` that are not errors, because they are known to change nothing.
    pub ignored_fields: Vec<String>,
    /// Unknown tensors that are not errors: exact names.
    pub ignored_tensors: Vec<String>,
    /// Called on this rank after every parameter with the bytes that it has read so far, and all that it will read.
    pub progress: Option<ProgressFn>,
}

/// Bytes that a rank has read so far, and all that it will read.
pub type ProgressFn = Arc<dyn Fn(u64, u64) + Send + Sync>;

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            dtype: DType::F32,
            keep_quantized: false,
            ignored_fields: Vec::new(),
            ignored_tensors: Vec::new(),
            progress: None,
        }
    }
}
