//! RoBERTa: BERT whose positions begin after the row of the padding token.

use super::bert::{NAMES, read_bert};
use super::{Architecture, Family};
use crate::error::Result;
use crate::models::fields::ConfigFields;

pub(super) static FAMILY: Family = roberta("roberta", "RobertaModel", |fields| read_roberta(fields, 50265));

/// A family with the layers and the names of RoBERTa.
pub(super) const fn roberta(
    model_type: &'static str,
    architecture: &'static str,
    read: fn(&ConfigFields<'_>) -> Result<Architecture>,
) -> Family {
    Family {
        model_type,
        architecture,
        prefix: "roberta.",
        names: NAMES,
        other_names: &[],
        ignored_tensors: &["lm_head.*", "classifier.*", "qa_outputs.*", "*embeddings.position_ids"],
        read,
    }
}

/// Reads the fields of RoBERTa, with this vocabulary if the field is absent.
pub(super) fn read_roberta(fields: &ConfigFields<'_>, vocab_size: usize) -> Result<Architecture> {
    let mut spec = read_bert(fields, vocab_size)?;
    spec.first_position = fields.size_or("pad_token_id", 1)? + 1;
    Ok(Architecture::Encoder(spec))
}
