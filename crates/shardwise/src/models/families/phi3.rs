//! Phi-3: Llama with one matrix for queries, keys and values, one for gate and up, and positions that may turn a part of a
//! head only.

use super::llama::{LlamaDefaults, read_llama_like, set_window};
use super::{Architecture, Family, NameEntry, joined, module};

pub(super) static FAMILY: Family = Family {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    prefix: "model.",
    names: NAMES,
    other_names: &[],
    ignored_tensors: &["*.rotary_emb.inv_freq"],
    read: |fields| {
        let defaults = LlamaDefaults {
            vocab_size: 32064,
            hidden_size: 3072,
            intermediate_size: 8192,
            max_positions: 4096,
            eps: 1e-5,
            ..LlamaDefaults::default()
        };
        let mut spec = read_llama_like(fields, &defaults)?;
        let window = fields.size("sliding_window")?;
        let all = vec![true; spec.layers.len()];
        set_window(&mut spec, window, &all);
        // The fused matrices have no biases.
        fields.only("attention_bias", false)?;
        fields.only("mlp_bias", false)?;
        // In files of Phi-4-mini; the model that reads them has no use for them.
        for name in ["full_attn_mod", "interpolate_factor"] {
            fields.number(name)?;
        }
        Ok(Architecture::Decoder(spec))
    },
};

const NAMES: &[NameEntry] = &[
    module("model.embed_tokens", &["tokens"]),
    module("model.layers.{i}.input_layernorm", &["blocks.{i}.before_attention"]),
    joined(
        "model.layers.{i}.self_attn.qkv_proj",
        &["blocks.{i}.attention.query", "blocks.{i}.attention.key", "blocks.{i}.attention.value"],
    ),
    module("model.layers.{i}.self_attn.o_proj", &["blocks.{i}.attention.output"]),
    module("model.layers.{i}.post_attention_layernorm", &["blocks.{i}.before_mlp"]),
    joined("model.layers.{i}.mlp.gate_up_proj", &["blocks.{i}.mlp.gate", "blocks.{i}.mlp.up"]),
    module("model.layers.{i}.mlp.down_proj", &["blocks.{i}.mlp.down"]),
    module("model.norm", &["norm"]),
    module("lm_head", &["head"]),
];
