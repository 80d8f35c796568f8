//! Qwen3-MoE: Qwen3 with mixtures of experts.

use super::llama::{LlamaDefaults, read_llama_like, set_window};
use super::qwen2_moe::{NAMES, set_sparse_layers};
use super::{Architecture, Family, STACKED_EXPERTS};
use crate::models::decoder::{ExpertsSpec, QueryKeyNorm};

pub(super) static FAMILY: Family = Family {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    prefix: "model.",
    names: NAMES,
    other_names: STACKED_EXPERTS,
    ignored_tensors: &["*.rotary_emb.inv_freq"],
    read: |fields| {
        let defaults = LlamaDefaults {
            vocab_size: 151_936,
            hidden_size: 2048,
            intermediate_size: 6144,
            layers: 24,
            heads: 32,
            key_heads: Some(4),
            max_positions: 32768,
            ..LlamaDefaults::default()
        };
        let mut spec = read_llama_like(fields, &defaults)?;
        let bias = fields.flag("attention_bias", false)?;
        (spec.attention.bias, spec.attention.output_bias) = (bias, bias);
        spec.attention.query_key_norm = QueryKeyNorm::PerHead;
        let used = fields.flag("use_sliding_window", false)?;
        let window = if fields.has("sliding_window") { fields.size("sliding_window")? } else { Some(4096) };
        // All layers have it, whatever this field says.
        fields.size("max_window_layers")?;
        let all = vec![true; spec.layers.len()];
        set_window(&mut spec, window.filter(|_| used), &all);
        let experts = ExpertsSpec {
            count: fields.count_or("num_experts", fields.count_or("num_local_experts", 128)?)?,
            per_token: fields.size_or("num_experts_per_tok", 8)?,
            hidden: fields.size_or("moe_intermediate_size", 768)?,
            normalized: fields.flag("norm_topk_prob", false)?,
            shared_hidden: None,
        };
        set_sparse_layers(fields, &mut spec, experts)?;
        Ok(Architecture::Decoder(spec))
    },
};
