//! GPT-2: learned positions, layer norms, matrices with inputs first.

use super::{Architecture, Family, NameEntry, exact, module, transposed};
use crate::models::decoder::{
    AttentionSpec, DecoderSpec, DropoutSpec, LayerSpec, MlpSpec, NormKind, NormSpec, QueryKeyNorm,
};
use crate::nn::Activation;

pub(super) static FAMILY: Family = Family {
    model_type: "gpt2",
    architecture: "GPT2LMHeadModel",
    prefix: "transformer.",
    names: NAMES,
    other_names: &[],
    // Causal masks, which some files store.
    ignored_tensors: &["*.attn.bias", "*.attn.masked_bias"],
    read: |fields| {
        let width = fields.size_or("n_embd", 768)?;
        let heads = fields.size_or("n_head", 12)?;
        let layers = fields.count_or("n_layer", 12)?;
        let max_positions = fields.size_or("n_positions", 1024)?;
        // The same number under its older name.
        fields.size("n_ctx")?;
        fields.only("add_cross_attention", false)?;
        // Another order of rounding, not another result.
        fields.flag("reorder_and_upcast_attn", false)?;
        let head_dim = width / heads.max(1);
        let scaled = if fields.flag("scale_attn_weights", true)? { (head_dim as f64).sqrt().recip() } else { 1.0 };
        let by_layer = fields.flag("scale_attn_by_inverse_layer_idx", false)?;
        let layer = |i: usize| LayerSpec {
            window: None,
            rope: None,
            scale: if by_layer { scaled / (i + 1) as f64 } else { scaled },
            experts: None,
        };
        Ok(Architecture::Decoder(DecoderSpec {
            vocab_size: fields.size_or("vocab_size", 50257)?,
            width,
            max_positions,
            learned_positions: true,
            attention: AttentionSpec {
                heads,
                key_heads: heads,
                head_dim,
                bias: true,
                output_bias: true,
                query_key_norm: QueryKeyNorm::None,
                clip: None,
                soft_cap: None,
            },
            norm: NormSpec { kind: NormKind::Layer, eps: fields.number_or("layer_norm_epsilon", 1e-5)? },
            norms_before: true,
            norms_after: false,
            parallel_residual: false,
            mlp: MlpSpec {
                hidden: fields.size_or("n_inner", 4 * width)?,
                gated: false,
                activation: fields.activation("activation_function", Activation::GeluTanh)?,
                bias: true,
            },
            layers: (0..layers).map(layer).collect(),
            ropes: Vec::new(),
            embedding_scale: None,
            logit_soft_cap: None,
            tied_head: fields.flag("tie_word_embeddings", true)?,
            head_bias: false,
            dropout: DropoutSpec::default(),
        }))
    },
};

pub(super) const NAMES: &[NameEntry] = &[
    module("transformer.wte", &["tokens"]),
    exact("transformer.wpe.weight", &["positions"]),
    module("transformer.h.{i}.ln_1", &["blocks.{i}.before_attention"]),
    transposed(
        "transformer.h.{i}.attn.c_attn",
        &["blocks.{i}.attention.query", "blocks.{i}.attention.key", "blocks.{i}.attention.value"],
    ),
    transposed("transformer.h.{i}.attn.c_proj", &["blocks.{i}.attention.output"]),
    module("transformer.h.{i}.ln_2", &["blocks.{i}.before_mlp"]),
    transposed("transformer.h.{i}.mlp.c_fc", &["blocks.{i}.mlp.up"]),
    transposed("transformer.h.{i}.mlp.c_proj", &["blocks.{i}.mlp.down"]),
    module("transformer.ln_f", &["norm"]),
    module("lm_head", &["head"]),
];
