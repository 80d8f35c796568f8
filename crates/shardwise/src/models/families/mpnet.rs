//! MPNet: BERT without token types, with a bias of attention by the distance of two positions that all layers share.

use super::bert::read_bert;
use super::{Architecture, Family, NameEntry, exact, module};

/// Buckets of distances. transformers computes with 32, whatever the configuration says.
const BUCKETS: usize = 32;

pub(super) static FAMILY: Family = Family {
    model_type: "mpnet",
    architecture: "MPNetModel",
    prefix: "mpnet.",
    names: NAMES,
    other_names: &[],
    ignored_tensors: &["lm_head.*", "classifier.*", "qa_outputs.*", "*embeddings.position_ids"],
    read: |fields| {
        let mut spec = read_bert(fields, 30527)?;
        spec.token_types = 0;
        // After the row of padding, which is not configurable.
        spec.first_position = 2;
        spec.distance_buckets = fields.size_or("relative_attention_num_buckets", BUCKETS)?;
        if spec.distance_buckets != BUCKETS {
            return Err(fields.bad("relative_attention_num_buckets", "32, the only value that is supported"));
        }
        Ok(Architecture::Encoder(spec))
    },
};

const NAMES: &[NameEntry] = &[
    module("embeddings.word_embeddings", &["tokens"]),
    exact("embeddings.position_embeddings.weight", &["positions"]),
    module("embeddings.LayerNorm", &["norm"]),
    exact("encoder.relative_attention_bias.weight", &["distance_bias"]),
    module("encoder.layer.{i}.attention.attn.q", &["blocks.{i}.attention.query"]),
    module("encoder.layer.{i}.attention.attn.k", &["blocks.{i}.attention.key"]),
    module("encoder.layer.{i}.attention.attn.v", &["blocks.{i}.attention.value"]),
    module("encoder.layer.{i}.attention.attn.o", &["blocks.{i}.attention.output"]),
    module("encoder.layer.{i}.attention.LayerNorm", &["blocks.{i}.after_attention"]),
    module("encoder.layer.{i}.intermediate.dense", &["blocks.{i}.mlp.up"]),
    module("encoder.layer.{i}.output.dense", &["blocks.{i}.mlp.down"]),
    module("encoder.layer.{i}.output.LayerNorm", &["blocks.{i}.after_mlp"]),
    module("pooler.dense", &["pooler"]),
];
