//! Qwen2-MoE: Qwen2 with mixtures of experts and an expert that every token uses.

use super::llama::{LlamaDefaults, read_llama_like, read_optional_window};
use super::{Architecture, Family, NameEntry, STACKED_EXPERTS, module, per_expert};
use crate::error::Result;
use crate::models::decoder::{DecoderSpec, ExpertsSpec};
use crate::models::fields::ConfigFields;

pub(super) static FAMILY: Family = Family {
    model_type: "qwen2_moe",
    architecture: "Qwen2MoeForCausalLM",
    prefix: "model.",
    names: NAMES,
    other_names: STACKED_EXPERTS,
    ignored_tensors: &["*.rotary_emb.inv_freq"],
    read: |fields| {
        let defaults = LlamaDefaults {
            vocab_size: 151_936,
            hidden_size: 2048,
            intermediate_size: 5632,
            layers: 24,
            heads: 16,
            key_heads: Some(16),
            max_positions: 32768,
            ..LlamaDefaults::default()
        };
        let mut spec = read_llama_like(fields, &defaults)?;
        spec.attention.bias = fields.flag("qkv_bias", true)?;
        // Every second layer, below a number of layers.
        read_optional_window(fields, &mut spec, |layer, below| layer % 2 == 0 && layer < below)?;
        let experts = ExpertsSpec {
            count: fields.count_or("num_experts", 60)?,
            per_token: fields.size_or("num_experts_per_tok", 4)?,
            hidden: fields.size_or("moe_intermediate_size", 1408)?,
            normalized: fields.flag("norm_topk_prob", false)?,
            shared_hidden: Some(fields.size_or("shared_expert_intermediate_size", 5632)?),
        };
        set_sparse_layers(fields, &mut spec, experts)?;
        Ok(Architecture::Decoder(spec))
    },
};

pub(super) const NAMES: &[NameEntry] = &[
    module("model.embed_tokens", &["tokens"]),
    module("model.layers.{i}.input_layernorm", &["blocks.{i}.before_attention"]),
    module("model.layers.{i}.self_attn.q_proj", &["blocks.{i}.attention.query"]),
    module("model.layers.{i}.self_attn.k_proj", &["blocks.{i}.attention.key"]),
    module("model.layers.{i}.self_attn.v_proj", &["blocks.{i}.attention.value"]),
    module("model.layers.{i}.self_attn.q_norm", &["blocks.{i}.attention.query_norm"]),
    module("model.layers.{i}.self_attn.k_norm", &["blocks.{i}.attention.key_norm"]),
    module("model.layers.{i}.self_attn.o_proj", &["blocks.{i}.attention.output"]),
    module("model.layers.{i}.post_attention_layernorm", &["blocks.{i}.before_mlp"]),
    module("model.layers.{i}.mlp.gate_proj", &["blocks.{i}.mlp.gate"]),
    module("model.layers.{i}.mlp.up_proj", &["blocks.{i}.mlp.up"]),
    module("model.layers.{i}.mlp.down_proj", &["blocks.{i}.mlp.down"]),
    module("model.layers.{i}.mlp.gate", &["blocks.{i}.experts.router"]),
    per_expert("model.layers.{i}.mlp.experts.{e}.gate_proj.weight", &["blocks.{i}.experts.experts.gate"]),
    per_expert("model.layers.{i}.mlp.experts.{e}.up_proj.weight", &["blocks.{i}.experts.experts.up"]),
    per_expert("model.layers.{i}.mlp.experts.{e}.down_proj.weight", &["blocks.{i}.experts.experts.down"]),
    module("model.layers.{i}.mlp.shared_expert.gate_proj", &["blocks.{i}.experts.shared.gate"]),
    module("model.layers.{i}.mlp.shared_expert.up_proj", &["blocks.{i}.experts.shared.up"]),
    module("model.layers.{i}.mlp.shared_expert.down_proj", &["blocks.{i}.experts.shared.down"]),
    module("model.layers.{i}.mlp.shared_expert_gate", &["blocks.{i}.experts.shared_gate"]),
    module("model.norm", &["norm"]),
    module("lm_head", &["head"]),
];

/// Gives experts to every layer, or to the layers that `decoder_sparse_step` and `mlp_only_layers` name.
pub(super) fn set_sparse_layers(fields: &ConfigFields<'_>, spec: &mut DecoderSpec, experts: ExpertsSpec) -> Result<()> {
    // Adds a balancing term to the loss.
    fields.only("output_router_logits", false)?;
    fields.number("router_aux_loss_coef")?;
    let step = fields.size_or("decoder_sparse_step", 1)?;
    let dense = fields.sizes("mlp_only_layers")?.unwrap_or_default();
    if step == 0 {
        return Err(fields.bad("decoder_sparse_step", "at least 1"));
    }
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        let sparse = experts.count > 0 && !dense.contains(&i) && (i + 1).is_multiple_of(step);
        layer.experts = sparse.then_some(experts);
    }
    Ok(())
}
