//! `Shard(dim)`: chunks of `ceil(n / k)` indices, as in PyTorch.

use std::fmt;

use super::division::{CanonicalForm, Division, DivisionContext};
use super::runs::{Runs, chunk};
use crate::error::Result;

/// Chunks of `ceil(n / k)` indices, one per coordinate; trailing chunks are smaller or empty.
pub(super) struct Chunks;

impl Chunks {
    /// The text form.
    pub(super) const FORM: &str = "S(dim)";

    /// Parses the dimension from the text form.
    pub(super) fn parse(head: &str, arguments: &str) -> Option<isize> {
        if head == "S" { arguments.trim().parse().ok() } else { None }
    }
}

impl Division for Chunks {
    fn part(&self, whole: &Runs, k: usize, i: usize, _: usize) -> Runs {
        let mut part = Runs::default();
        whole.take(chunk(whole.len(), k, i), &mut part);
        part
    }

    fn is_contiguous(&self) -> bool {
        true
    }

    fn canonical(&self, _: &DivisionContext<'_>) -> Result<CanonicalForm> {
        Ok(CanonicalForm::AsWritten)
    }

    fn write(&self, dim: isize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "S({dim})")
    }
}
