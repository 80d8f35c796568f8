//! RoBERTa: BERT whose positions begin after the row of the padding token.

use super::bert::{NAMES, read_bert};
use super::{Architecture, Family};

pub(super) static FAMILY: Family = Family {
    model_type: "roberta",
    architecture: "RobertaModel",
    prefix: "roberta.",
    names: NAMES,
    other_names: &[],
    ignored_tensors: &["lm_head.*", "classifier.*", "qa_outputs.*", "*embeddings.position_ids"],
    read: |fields| {
        let mut spec = read_bert(fields, 50265)?;
        spec.first_position = fields.size_or("pad_token_id", 1)? + 1;
        Ok(Architecture::Encoder(spec))
    },
};
