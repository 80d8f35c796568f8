//! CamemBERT: RoBERTa with a French vocabulary.

use super::Family;
use super::roberta::{read_roberta, roberta};

pub(super) static FAMILY: Family = roberta("camembert", "CamembertModel", |fields| read_roberta(fields, 30522));
