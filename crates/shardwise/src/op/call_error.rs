//! Errors of a call: which operator, on which tensors, on which line.

use crate::error::{Error, Site};
use crate::module_scope::user_site;
use crate::tensor::DTensor;

/// Adds the operator, its tensors and the line of the program to an error.
#[cold]
pub(crate) fn name_call(error: Error, name: &str, inputs: &[&DTensor], site: Site) -> Error {
    let Error::Invalid(mut invalid) = error else { return error };
    let tensors: Vec<String> = inputs.iter().map(|t| format!("{} {}", t.dtype().as_str(), t.layout())).collect();
    let site = user_site(site);
    invalid.found = format!("{} (called as {}({}) at {site})", invalid.found, name, tensors.join("; "));
    Error::Invalid(invalid)
}
