//! ELECTRA: BERT without a pooler, whose embeddings may be narrower than its layers.

use super::bert::{BertDefaults, read_bert_like};
use super::{Architecture, Family, NameEntry, exact, module};

pub(super) static FAMILY: Family = Family {
    model_type: "electra",
    architecture: "ElectraModel",
    prefix: "electra.",
    names: NAMES,
    other_names: &[],
    ignored_tensors: &[
        "discriminator_predictions.*",
        "generator_predictions.*",
        "generator_lm_head.*",
        "classifier.*",
        "qa_outputs.*",
        "*embeddings.position_ids",
    ],
    read: |fields| {
        let defaults = BertDefaults { vocab_size: 30522, width: 256, heads: 4, hidden: 1024 };
        let mut spec = read_bert_like(fields, &defaults)?;
        spec.embedding_width = fields.size_or("embedding_size", 128)?;
        spec.pooler = false;
        Ok(Architecture::Encoder(spec))
    },
};

const NAMES: &[NameEntry] = &[
    module("embeddings.word_embeddings", &["tokens"]),
    exact("embeddings.position_embeddings.weight", &["positions"]),
    exact("embeddings.token_type_embeddings.weight", &["token_types"]),
    module("embeddings.LayerNorm", &["norm"]),
    module("embeddings_project", &["projection"]),
    module("encoder.layer.{i}.attention.self.query", &["blocks.{i}.attention.query"]),
    module("encoder.layer.{i}.attention.self.key", &["blocks.{i}.attention.key"]),
    module("encoder.layer.{i}.attention.self.value", &["blocks.{i}.attention.value"]),
    module("encoder.layer.{i}.attention.output.dense", &["blocks.{i}.attention.output"]),
    module("encoder.layer.{i}.attention.output.LayerNorm", &["blocks.{i}.after_attention"]),
    module("encoder.layer.{i}.intermediate.dense", &["blocks.{i}.mlp.up"]),
    module("encoder.layer.{i}.output.dense", &["blocks.{i}.mlp.down"]),
    module("encoder.layer.{i}.output.LayerNorm", &["blocks.{i}.after_mlp"]),
];
