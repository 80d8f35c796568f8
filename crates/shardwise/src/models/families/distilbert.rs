//! DistilBERT: BERT without token types and pooler.

use super::{Architecture, Family, NameEntry, exact, module};
use crate::models::encoder::EncoderSpec;
use crate::nn::Activation;

pub(super) static FAMILY: Family = Family {
    model_type: "distilbert",
    architecture: "DistilBertModel",
    prefix: "distilbert.",
    names: NAMES,
    other_names: &[],
    ignored_tensors: &["vocab_*", "pre_classifier.*", "classifier.*", "qa_outputs.*", "*embeddings.position_ids"],
    read: |fields| {
        // How the table of positions was initialized; it is stored either way.
        fields.flag("sinusoidal_pos_embds", false)?;
        // Dropout, and the head of classifiers.
        for name in ["dropout", "qa_dropout", "seq_classif_dropout"] {
            fields.number(name)?;
        }
        for name in ["tie_weights_", "tie_word_embeddings"] {
            fields.flag(name, true)?;
        }
        let width = fields.size_or("dim", 768)?;
        Ok(Architecture::Encoder(EncoderSpec {
            vocab_size: fields.size_or("vocab_size", 30522)?,
            width,
            embedding_width: width,
            layers: fields.count_or("n_layers", 6)?,
            heads: fields.size_or("n_heads", 12)?,
            hidden: fields.size_or("hidden_dim", 3072)?,
            activation: fields.activation("activation", Activation::Gelu)?,
            positions: fields.size_or("max_position_embeddings", 512)?,
            first_position: 0,
            token_types: 0,
            distance_buckets: 0,
            // Not in the configuration.
            eps: 1e-12,
            pooler: false,
        }))
    },
};

const NAMES: &[NameEntry] = &[
    module("embeddings.word_embeddings", &["tokens"]),
    exact("embeddings.position_embeddings.weight", &["positions"]),
    module("embeddings.LayerNorm", &["norm"]),
    module("transformer.layer.{i}.attention.q_lin", &["blocks.{i}.attention.query"]),
    module("transformer.layer.{i}.attention.k_lin", &["blocks.{i}.attention.key"]),
    module("transformer.layer.{i}.attention.v_lin", &["blocks.{i}.attention.value"]),
    module("transformer.layer.{i}.attention.out_lin", &["blocks.{i}.attention.output"]),
    module("transformer.layer.{i}.sa_layer_norm", &["blocks.{i}.after_attention"]),
    module("transformer.layer.{i}.ffn.lin1", &["blocks.{i}.mlp.up"]),
    module("transformer.layer.{i}.ffn.lin2", &["blocks.{i}.mlp.down"]),
    module("transformer.layer.{i}.output_layer_norm", &["blocks.{i}.after_mlp"]),
];
