//! Mistral: Llama with a sliding window in all layers.

use super::llama::{LlamaDefaults, NAMES, read_llama_like, set_window};
use super::{Architecture, Family};

pub(super) static FAMILY: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    prefix: "model.",
    names: NAMES,
    ignored_tensors: &["*.rotary_emb.inv_freq"],
    read: |fields| {
        let defaults = LlamaDefaults {
            intermediate_size: 14336,
            key_heads: Some(8),
            max_positions: 4096 * 32,
            ..LlamaDefaults::default()
        };
        let mut spec = read_llama_like(fields, &defaults)?;
        let window = match fields.has("sliding_window") {
            true => fields.size("sliding_window")?,
            false => Some(4096),
        };
        let all = vec![true; spec.layers.len()];
        set_window(&mut spec, window, &all);
        Ok(Architecture::Decoder(spec))
    },
};
