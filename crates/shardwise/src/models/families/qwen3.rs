//! Qwen3: Llama with a norm on every query and key head, and heads of their own size.

use super::llama::{LlamaDefaults, NAMES, read_llama_like, read_optional_window};
use super::{Architecture, Family};
use crate::models::decoder::QueryKeyNorm;

pub(super) static FAMILY: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    prefix: "model.",
    names: NAMES,
    ignored_tensors: &["*.rotary_emb.inv_freq"],
    read: |fields| {
        let defaults = LlamaDefaults {
            vocab_size: 151_936,
            intermediate_size: 22016,
            key_heads: Some(32),
            head_dim: Some(128),
            max_positions: 32768,
            ..LlamaDefaults::default()
        };
        let mut spec = read_llama_like(fields, &defaults)?;
        let bias = fields.flag("attention_bias", false)?;
        (spec.attention.bias, spec.attention.output_bias) = (bias, bias);
        spec.attention.query_key_norm = QueryKeyNorm::PerHead;
        read_optional_window(fields, &mut spec, |layer, from| layer >= from)?;
        Ok(Architecture::Decoder(spec))
    },
};
