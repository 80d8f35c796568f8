//! Gemma 2: norms before and after each branch with weights stored without their 1, soft caps, a scaled embedding, and local
//! attention in every second layer.

use super::llama::{LlamaDefaults, read_llama_like, set_window};
use super::{Architecture, Family, NameEntry, local_layers, module};
use crate::error::Result;
use crate::models::decoder::{DecoderSpec, NormKind};
use crate::models::fields::ConfigFields;
use crate::nn::Activation;

pub(super) static FAMILY: Family = Family {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    prefix: "model.",
    names: NAMES,
    other_names: &[],
    ignored_tensors: &["*.rotary_emb.inv_freq"],
    read: |fields| {
        let mut spec = read_llama_like(fields, &gemma_defaults(256_000, 8192))?;
        read_gemma(fields, &mut spec)?;
        spec.attention.soft_cap = optional(fields, "attn_logit_softcapping", 50.0)?;
        spec.logit_soft_cap = optional(fields, "final_logit_softcapping", 30.0)?;
        let is_local = local_layers(fields, spec.layers.len(), |i| i % 2 == 0)?;
        set_window(&mut spec, window(fields)?, &is_local);
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
    module("model.layers.{i}.post_attention_layernorm", &["blocks.{i}.after_attention"]),
    module("model.layers.{i}.pre_feedforward_layernorm", &["blocks.{i}.before_mlp"]),
    module("model.layers.{i}.mlp.gate_proj", &["blocks.{i}.mlp.gate"]),
    module("model.layers.{i}.mlp.up_proj", &["blocks.{i}.mlp.up"]),
    module("model.layers.{i}.mlp.down_proj", &["blocks.{i}.mlp.down"]),
    module("model.layers.{i}.post_feedforward_layernorm", &["blocks.{i}.after_mlp"]),
    module("model.norm", &["norm"]),
    module("lm_head", &["head"]),
];

/// Values of absent fields, in Gemma 2 and 3.
pub(super) fn gemma_defaults(vocab_size: usize, max_positions: usize) -> LlamaDefaults {
    LlamaDefaults {
        vocab_size,
        hidden_size: 2304,
        intermediate_size: 9216,
        layers: 26,
        heads: 8,
        key_heads: Some(4),
        head_dim: Some(256),
        max_positions,
        tied: true,
        activation: Activation::GeluTanh,
        activation_field: "hidden_activation",
        ..LlamaDefaults::default()
    }
}

/// What Gemma 2 and 3 have in common beyond a Llama.
pub(super) fn read_gemma(fields: &ConfigFields<'_>, spec: &mut DecoderSpec) -> Result<()> {
    spec.norm.kind = NormKind::RmsPlusOne;
    spec.norms_after = true;
    spec.embedding_scale = Some((spec.width as f64).sqrt());
    let bias = fields.flag("attention_bias", false)?;
    (spec.attention.bias, spec.attention.output_bias) = (bias, bias);
    fields.only("use_bidirectional_attention", false)?;
    // The same function under the name that older files have; the other field wins.
    fields.text("hidden_act")?;
    let scale = fields.number_or("query_pre_attn_scalar", 256.0)?;
    if scale <= 0.0 {
        return Err(fields.bad("query_pre_attn_scalar", "a number above 0"));
    }
    spec.layers.iter_mut().for_each(|layer| layer.scale = scale.sqrt().recip());
    Ok(())
}

/// The sliding window: 4096 if the field is absent, none if it is null.
pub(super) fn window(fields: &ConfigFields<'_>) -> Result<Option<usize>> {
    let found = fields.size("sliding_window")?;
    Ok(if fields.has("sliding_window") { found } else { Some(4096) })
}

/// A number with a default; none if the field is null.
pub(super) fn optional(fields: &ConfigFields<'_>, name: &str, default: f64) -> Result<Option<f64>> {
    let found = fields.number(name)?;
    Ok(if fields.has(name) { found } else { Some(default) })
}
