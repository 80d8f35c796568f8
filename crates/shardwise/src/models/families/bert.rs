//! BERT: an encoder with norms after the residual sums.

use super::{Architecture, Family, NameEntry, exact, module};
use crate::error::Result;
use crate::models::encoder::EncoderSpec;
use crate::models::fields::ConfigFields;
use crate::nn::Activation;

pub(super) static FAMILY: Family = Family {
    model_type: "bert",
    architecture: "BertModel",
    prefix: "bert.",
    names: NAMES,
    other_names: &[],
    // Heads for other tasks, and positions that are 0, 1, 2, ...
    ignored_tensors: &["cls.*", "classifier.*", "qa_outputs.*", "*embeddings.position_ids"],
    read: |fields| Ok(Architecture::Encoder(read_bert(fields, 30522)?)),
};

pub(super) const NAMES: &[NameEntry] = &[
    module("embeddings.word_embeddings", &["tokens"]),
    exact("embeddings.position_embeddings.weight", &["positions"]),
    exact("embeddings.token_type_embeddings.weight", &["token_types"]),
    module("embeddings.LayerNorm", &["norm"]),
    module("encoder.layer.{i}.attention.self.query", &["blocks.{i}.attention.query"]),
    module("encoder.layer.{i}.attention.self.key", &["blocks.{i}.attention.key"]),
    module("encoder.layer.{i}.attention.self.value", &["blocks.{i}.attention.value"]),
    module("encoder.layer.{i}.attention.output.dense", &["blocks.{i}.attention.output"]),
    module("encoder.layer.{i}.attention.output.LayerNorm", &["blocks.{i}.after_attention"]),
    module("encoder.layer.{i}.intermediate.dense", &["blocks.{i}.mlp.up"]),
    module("encoder.layer.{i}.output.dense", &["blocks.{i}.mlp.down"]),
    module("encoder.layer.{i}.output.LayerNorm", &["blocks.{i}.after_mlp"]),
    module("pooler.dense", &["pooler"]),
];

/// Values of absent fields.
pub(super) struct BertDefaults {
    pub(super) vocab_size: usize,
    pub(super) width: usize,
    pub(super) heads: usize,
    /// Features inside an MLP.
    pub(super) hidden: usize,
}

/// Reads the fields of BERT, with its sizes where they are absent and this vocabulary.
pub(super) fn read_bert(fields: &ConfigFields<'_>, vocab_size: usize) -> Result<EncoderSpec> {
    read_bert_like(fields, &BertDefaults { vocab_size, width: 768, heads: 12, hidden: 3072 })
}

/// Reads the fields that BERT and its successors share.
pub(super) fn read_bert_like(fields: &ConfigFields<'_>, defaults: &BertDefaults) -> Result<EncoderSpec> {
    fields.only("is_decoder", false)?;
    fields.only("add_cross_attention", false)?;
    if fields.text("position_embedding_type")?.is_some_and(|kind| kind != "absolute") {
        return Err(fields.bad("position_embedding_type", "absolute"));
    }
    // Only heads are tied.
    fields.flag("tie_word_embeddings", true)?;
    let width = fields.size_or("hidden_size", defaults.width)?;
    Ok(EncoderSpec {
        vocab_size: fields.size_or("vocab_size", defaults.vocab_size)?,
        width,
        embedding_width: width,
        layers: fields.count_or("num_hidden_layers", 12)?,
        heads: fields.size_or("num_attention_heads", defaults.heads)?,
        hidden: fields.size_or("intermediate_size", defaults.hidden)?,
        activation: fields.activation("hidden_act", Activation::Gelu)?,
        positions: fields.size_or("max_position_embeddings", 512)?,
        first_position: 0,
        token_types: fields.size_or("type_vocab_size", 2)?,
        distance_buckets: 0,
        eps: fields.number_or("layer_norm_eps", 1e-12)?,
        pooler: true,
    })
}
