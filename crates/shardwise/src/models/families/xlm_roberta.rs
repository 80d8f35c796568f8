//! XLM-RoBERTa: RoBERTa with a vocabulary of many languages.

use super::Family;
use super::roberta::{read_roberta, roberta};

pub(super) static FAMILY: Family = roberta("xlm-roberta", "XLMRobertaModel", |fields| read_roberta(fields, 30522));
