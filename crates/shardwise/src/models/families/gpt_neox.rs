//! GPT-NeoX and Pythia: layer norms, attention and MLP side by side, positions that turn a part of a head, and queries, keys
//! and values head by head in one matrix.

use super::{Architecture, Family, NameEntry, module, per_head};
use crate::models::decoder::{
    AttentionSpec, DecoderSpec, DropoutSpec, LayerSpec, MlpSpec, NormKind, NormSpec, QueryKeyNorm,
};
use crate::models::fields::{RopeDefaults, RopeSizes, read_rope};
use crate::nn::Activation;

pub(super) static FAMILY: Family = Family {
    model_type: "gpt_neox",
    architecture: "GPTNeoXForCausalLM",
    prefix: "gpt_neox.",
    names: NAMES,
    other_names: &[module("lm_head", &["head"])],
    // Causal masks and angles, which older files store.
    ignored_tensors: &["*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"],
    read: |fields| {
        let width = fields.size_or("hidden_size", 6144)?;
        let heads = fields.size_or("num_attention_heads", 64)?;
        let layers = fields.count_or("num_hidden_layers", 44)?;
        let max_positions = fields.size_or("max_position_embeddings", 2048)?;
        let head_dim = width / heads.max(1);
        // A causal model either way.
        fields.flag("is_decoder", false)?;
        let rope = RopeDefaults {
            theta: 10000.0,
            theta_field: if fields.has("rotary_emb_base") { "rotary_emb_base" } else { "rope_theta" },
            part: 0.25,
            part_field: if fields.has("rotary_pct") { "rotary_pct" } else { "partial_rotary_factor" },
        };
        let rope = read_rope(fields, &rope, RopeSizes { head_dim, max_positions })?;
        // Other names of what has been read.
        for name in ["rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"] {
            fields.number(name)?;
        }
        let bias = fields.flag("attention_bias", true)?;
        let layer =
            LayerSpec { window: None, rope: Some(0), scale: (head_dim.max(1) as f64).sqrt().recip(), experts: None };
        Ok(Architecture::Decoder(DecoderSpec {
            vocab_size: fields.size_or("vocab_size", 50432)?,
            width,
            max_positions,
            learned_positions: false,
            attention: AttentionSpec {
                heads,
                key_heads: heads,
                head_dim,
                bias,
                output_bias: bias,
                query_key_norm: QueryKeyNorm::None,
                clip: None,
                soft_cap: None,
            },
            norm: NormSpec { kind: NormKind::Layer, eps: fields.number_or("layer_norm_eps", 1e-5)? },
            norms_before: true,
            norms_after: false,
            parallel_residual: fields.flag("use_parallel_residual", true)?,
            mlp: MlpSpec {
                hidden: fields.size_or("intermediate_size", 24576)?,
                gated: false,
                activation: fields.activation("hidden_act", Activation::Gelu)?,
                bias: true,
            },
            layers: vec![layer; layers],
            ropes: vec![rope],
            embedding_scale: None,
            logit_soft_cap: None,
            tied_head: fields.flag("tie_word_embeddings", false)?,
            head_bias: false,
            dropout: DropoutSpec::default(),
        }))
    },
};

const NAMES: &[NameEntry] = &[
    module("gpt_neox.embed_in", &["tokens"]),
    module("gpt_neox.layers.{i}.input_layernorm", &["blocks.{i}.before_attention"]),
    module("gpt_neox.layers.{i}.post_attention_layernorm", &["blocks.{i}.before_mlp"]),
    per_head(
        "gpt_neox.layers.{i}.attention.query_key_value",
        &["blocks.{i}.attention.query", "blocks.{i}.attention.key", "blocks.{i}.attention.value"],
    ),
    module("gpt_neox.layers.{i}.attention.dense", &["blocks.{i}.attention.output"]),
    module("gpt_neox.layers.{i}.mlp.dense_h_to_4h", &["blocks.{i}.mlp.up"]),
    module("gpt_neox.layers.{i}.mlp.dense_4h_to_h", &["blocks.{i}.mlp.down"]),
    module("gpt_neox.final_layer_norm", &["norm"]),
    module("embed_out", &["head"]),
];
