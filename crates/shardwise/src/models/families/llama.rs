//! Llama 2 and 3, and what most later families have in common with them.

use super::{Architecture, Family, NameEntry, local_layers, module};
use crate::error::Result;
use crate::models::decoder::{
    AttentionSpec, DecoderSpec, DropoutSpec, LayerSpec, MlpSpec, NormKind, NormSpec, QueryKeyNorm,
};
use crate::models::fields::{ConfigFields, RopeDefaults, RopeSizes, read_rope};
use crate::nn::Activation;

pub(super) static FAMILY: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    prefix: "model.",
    names: NAMES,
    other_names: &[],
    ignored_tensors: &["*.rotary_emb.inv_freq"],
    read: |fields| {
        let mut spec = read_llama_like(fields, &LlamaDefaults::default())?;
        let bias = fields.flag("attention_bias", false)?;
        (spec.attention.bias, spec.attention.output_bias) = (bias, bias);
        spec.mlp.bias = fields.flag("mlp_bias", false)?;
        fields.only("rope_interleaved", false)?;
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
    module("model.norm", &["norm"]),
    module("lm_head", &["head"]),
];

/// Values of fields that are absent.
pub(super) struct LlamaDefaults {
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    /// `None`: as many as query heads.
    pub(super) key_heads: Option<usize>,
    /// `None`: the hidden size divided by the heads.
    pub(super) head_dim: Option<usize>,
    pub(super) max_positions: usize,
    pub(super) eps: f64,
    pub(super) tied: bool,
    pub(super) activation: Activation,
    pub(super) activation_field: &'static str,
    pub(super) theta: f64,
    /// Whether the family reads its rotary embeddings itself.
    pub(super) own_ropes: bool,
}

impl Default for LlamaDefaults {
    fn default() -> Self {
        LlamaDefaults {
            vocab_size: 32000,
            hidden_size: 4096,
            intermediate_size: 11008,
            layers: 32,
            heads: 32,
            key_heads: None,
            head_dim: None,
            max_positions: 2048,
            eps: 1e-6,
            tied: false,
            activation: Activation::Silu,
            activation_field: "hidden_act",
            theta: 10000.0,
            own_ropes: false,
        }
    }
}

/// Reads the fields that Llama and its successors share: a decoder without biases, with one rotary embedding, a gated MLP and
/// RMS norms before each branch.
pub(super) fn read_llama_like(fields: &ConfigFields<'_>, defaults: &LlamaDefaults) -> Result<DecoderSpec> {
    let width = fields.size_or("hidden_size", defaults.hidden_size)?;
    let heads = fields.size_or("num_attention_heads", defaults.heads)?;
    // An explicit null means as many as query heads, whatever the default is.
    let default_key_heads = match fields.has("num_key_value_heads") {
        true => heads,
        false => defaults.key_heads.unwrap_or(heads),
    };
    let key_heads = fields.size_or("num_key_value_heads", default_key_heads)?;
    let head_dim = fields.size("head_dim")?.or(defaults.head_dim).unwrap_or(width / heads.max(1));
    let max_positions = fields.size_or("max_position_embeddings", defaults.max_positions)?;
    let layers = fields.count_or("num_hidden_layers", defaults.layers)?;
    let rope = RopeDefaults { theta: defaults.theta, ..RopeDefaults::default() };
    let ropes = match defaults.own_ropes {
        true => Vec::new(),
        false => vec![read_rope(fields, &rope, RopeSizes { head_dim, max_positions })?],
    };
    let layer =
        LayerSpec { window: None, rope: Some(0), scale: (head_dim.max(1) as f64).sqrt().recip(), experts: None };
    Ok(DecoderSpec {
        vocab_size: fields.size_or("vocab_size", defaults.vocab_size)?,
        width,
        max_positions,
        learned_positions: false,
        attention: AttentionSpec {
            heads,
            key_heads,
            head_dim,
            bias: false,
            output_bias: false,
            query_key_norm: QueryKeyNorm::None,
            clip: None,
            soft_cap: None,
        },
        norm: NormSpec { kind: NormKind::Rms, eps: fields.number_or("rms_norm_eps", defaults.eps)? },
        norms_before: true,
        norms_after: false,
        parallel_residual: false,
        mlp: MlpSpec {
            hidden: fields.size_or("intermediate_size", defaults.intermediate_size)?,
            gated: true,
            activation: fields.activation(defaults.activation_field, defaults.activation)?,
            bias: false,
        },
        layers: vec![layer; layers],
        ropes,
        embedding_scale: None,
        logit_soft_cap: None,
        tied_head: fields.flag("tie_word_embeddings", defaults.tied)?,
        head_bias: false,
        dropout: DropoutSpec::default(),
    })
}

/// Sets a sliding window in the layers that `is_local` names.
pub(super) fn set_window(spec: &mut DecoderSpec, window: Option<usize>, is_local: &[bool]) {
    for (layer, local) in spec.layers.iter_mut().zip(is_local) {
        layer.window = window.filter(|_| *local);
    }
}

/// Reads the sliding window of the Qwen families: off unless `use_sliding_window`, and then in the layers that `layer_types`
/// names, or without it in the layers that `default` accepts.
pub(super) fn read_optional_window(
    fields: &ConfigFields<'_>,
    spec: &mut DecoderSpec,
    default: impl Fn(usize, usize) -> bool,
) -> Result<()> {
    let used = fields.flag("use_sliding_window", false)?;
    let window = fields.size_or("sliding_window", 4096)?;
    let from = fields.size_or("max_window_layers", 28)?;
    let is_local = local_layers(fields, spec.layers.len(), |i| default(i, from))?;
    // A window that is null is none, as is one that is not used.
    let window = Some(window).filter(|_| used && !fields.is_null("sliding_window"));
    set_window(spec, window, &is_local);
    Ok(())
}
