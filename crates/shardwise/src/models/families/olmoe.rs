//! OLMoE: experts in every layer, and norms of queries and keys over all heads together.

use super::llama::{LlamaDefaults, read_llama_like};
use super::qwen2_moe::{NAMES, set_sparse_layers};
use super::{Architecture, Family, STACKED_EXPERTS};
use crate::models::decoder::{ExpertsSpec, QueryKeyNorm};

pub(super) static FAMILY: Family = Family {
    model_type: "olmoe",
    architecture: "OlmoeForCausalLM",
    prefix: "model.",
    names: NAMES,
    other_names: STACKED_EXPERTS,
    ignored_tensors: &["*.rotary_emb.inv_freq"],
    read: |fields| {
        let defaults = LlamaDefaults {
            vocab_size: 50304,
            hidden_size: 2048,
            intermediate_size: 2048,
            layers: 16,
            heads: 16,
            max_positions: 4096,
            eps: 1e-5,
            ..LlamaDefaults::default()
        };
        let mut spec = read_llama_like(fields, &defaults)?;
        let bias = fields.flag("attention_bias", false)?;
        (spec.attention.bias, spec.attention.output_bias) = (bias, bias);
        spec.attention.query_key_norm = QueryKeyNorm::AllHeads;
        spec.attention.clip = fields.number("clip_qkv")?;
        let experts = ExpertsSpec {
            count: fields.count_or("num_experts", 64)?,
            per_token: fields.size_or("num_experts_per_tok", 8)?,
            hidden: spec.mlp.hidden,
            normalized: fields.flag("norm_topk_prob", false)?,
            shared_hidden: None,
        };
        set_sparse_layers(fields, &mut spec, experts)?;
        Ok(Architecture::Decoder(spec))
    },
};
