//! Mixtral: Mistral with a mixture of experts in place of every MLP.

use super::llama::{LlamaDefaults, read_llama_like, set_window};
use super::{Architecture, Family, NameEntry, STACKED_EXPERTS, module, per_expert};
use crate::models::decoder::ExpertsSpec;

pub(super) static FAMILY: Family = Family {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    prefix: "model.",
    names: NAMES,
    other_names: STACKED_EXPERTS,
    ignored_tensors: &["*.rotary_emb.inv_freq"],
    read: |fields| {
        let defaults = LlamaDefaults {
            intermediate_size: 14336,
            key_heads: Some(8),
            max_positions: 4096 * 32,
            eps: 1e-5,
            theta: 1e6,
            ..LlamaDefaults::default()
        };
        let mut spec = read_llama_like(fields, &defaults)?;
        let window = fields.size("sliding_window")?;
        let all = vec![true; spec.layers.len()];
        set_window(&mut spec, window, &all);
        // Adds a balancing term to the loss.
        fields.only("output_router_logits", false)?;
        fields.number("router_aux_loss_coef")?;
        // Noise only in training.
        fields.number("router_jitter_noise")?;
        let experts = ExpertsSpec {
            count: fields.count_or("num_local_experts", 8)?,
            per_token: fields.size_or("num_experts_per_tok", 2)?,
            hidden: spec.mlp.hidden,
            normalized: true,
            shared_hidden: None,
        };
        spec.layers.iter_mut().for_each(|layer| layer.experts = Some(experts));
        Ok(Architecture::Decoder(spec))
    },
};

const NAMES: &[NameEntry] = &[
    module("model.embed_tokens", &["tokens"]),
    module("model.layers.{i}.input_layernorm", &["blocks.{i}.before_attention"]),
    module("model.layers.{i}.self_attn.q_proj", &["blocks.{i}.attention.query"]),
    module("model.layers.{i}.self_attn.k_proj", &["blocks.{i}.attention.key"]),
    module("model.layers.{i}.self_attn.v_proj", &["blocks.{i}.attention.value"]),
    module("model.layers.{i}.self_attn.o_proj", &["blocks.{i}.attention.output"]),
    module("model.layers.{i}.post_attention_layernorm", &["blocks.{i}.before_mlp"]),
    module("model.layers.{i}.block_sparse_moe.gate", &["blocks.{i}.experts.router"]),
    per_expert("model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight", &["blocks.{i}.experts.experts.gate"]),
    per_expert("model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight", &["blocks.{i}.experts.experts.up"]),
    per_expert("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight", &["blocks.{i}.experts.experts.down"]),
    module("model.norm", &["norm"]),
    module("lm_head", &["head"]),
];
