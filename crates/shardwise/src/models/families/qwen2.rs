//! Qwen2: Llama with biases of queries, keys and values, and a sliding window that is usually off.

use super::llama::{LlamaDefaults, NAMES, read_llama_like, read_optional_window};
use super::{Architecture, Family};

pub(super) static FAMILY: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    prefix: "model.",
    names: NAMES,
    ignored_tensors: &["*.rotary_emb.inv_freq"],
    read: |fields| {
        let defaults = LlamaDefaults {
            vocab_size: 151_936,
            intermediate_size: 22016,
            key_heads: Some(32),
            max_positions: 32768,
            ..LlamaDefaults::default()
        };
        let mut spec = read_llama_like(fields, &defaults)?;
        spec.attention.bias = true;
        read_optional_window(fields, &mut spec, |layer, from| layer >= from)?;
        Ok(Architecture::Decoder(spec))
    },
};
