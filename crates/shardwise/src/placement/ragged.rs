//! `Ragged { dim, sizes }`: ranges of explicit sizes.
//!
//! Slicing, concatenating or filtering a sharded tensor leaves ranks with uneven parts. Ragged shards describe them, so that
//! such operators need no communication. Where an outer axis shards the same dimension, the parts of different outer
//! coordinates differ too: then there is one row of sizes per combination of outer coordinates. Slicing `3..9` of 12 rows on
//! a 2 x 2 mesh leaves outer coordinate 0 with sizes `0, 3` and coordinate 1 with `3, 0`, which no single row can express.

use std::fmt;

use super::division::{CanonicalForm, Division, DivisionContext};
use super::runs::{Runs, chunk};
use crate::error::{ErrorKind, Result};

/// Ranges of explicit sizes: one per coordinate, or one row of them per combination of outer coordinates.
pub(super) struct Ragged<'a> {
    pub(super) sizes: &'a [usize],
}

impl Ragged<'_> {
    /// The text form.
    pub(super) const FORM: &'static str = "S(dim;size,size,...)";

    /// Parses the dimension and the sizes from the text form.
    pub(super) fn parse(head: &str, arguments: &str) -> Option<(isize, Vec<usize>)> {
        let (dim, sizes) = arguments.split_once(';').filter(|_| head == "S")?;
        let listed = sizes.split(',').filter(|_| !sizes.trim().is_empty());
        let sizes = listed.map(|size| size.trim().parse().ok()).collect::<Option<Vec<_>>>()?;
        Some((dim.trim().parse().ok()?, sizes))
    }

    /// The sizes at one combination of outer coordinates.
    fn row(&self, k: usize, outer: usize) -> &[usize] {
        if self.sizes.len() == k { self.sizes } else { &self.sizes[outer * k..(outer + 1) * k] }
    }

    fn check_count(&self, divided: &DivisionContext<'_>) -> Result<()> {
        let DivisionContext { k, combinations, name, .. } = divided;
        if self.sizes.len() == *k || self.sizes.len() == combinations * k {
            return Ok(());
        }
        Err(ErrorKind::Layout.error(
            "ragged sizes",
            format!("{} sizes in {}", self.sizes.len(), name()),
            if *combinations == 1 { format!("{k}") } else { format!("{k} or {}", combinations * k) },
            "give one size per coordinate",
        ))
    }
}

impl Division for Ragged<'_> {
    fn part(&self, whole: &Runs, k: usize, i: usize, outer: usize) -> Runs {
        let row = self.row(k, outer);
        let start: usize = row[..i].iter().sum();
        let mut part = Runs::default();
        whole.take(start..start + row[i], &mut part);
        part
    }

    fn is_contiguous(&self) -> bool {
        true
    }

    fn divides_any(&self) -> bool {
        false
    }

    fn canonical(&self, divided: &DivisionContext<'_>) -> Result<CanonicalForm> {
        self.check_count(divided)?;
        let k = divided.k;
        let mut is_chunked = true;
        for outer in 0..divided.combinations {
            let (have, row) = ((divided.len)(outer), self.row(k, outer));
            if row.iter().try_fold(0usize, |sum, &s| sum.checked_add(s)) != Some(have) {
                return Err(ErrorKind::Layout.error(
                    "ragged sizes",
                    format!("{row:?} in {}", (divided.name)()),
                    format!("sizes that add up to {have}"),
                    "correct the sizes",
                ));
            }
            is_chunked &= row.iter().enumerate().all(|(i, &s)| s == chunk(have, k, i).len());
        }
        if is_chunked {
            return Ok(CanonicalForm::Chunks);
        }
        let first = &self.sizes[..k];
        let repeats = self.sizes.len() > k && self.sizes.chunks(k).all(|row| row == first);
        Ok(if repeats { CanonicalForm::Sizes(first.into()) } else { CanonicalForm::AsWritten })
    }

    fn write(&self, dim: isize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "S({dim};")?;
        for (i, size) in self.sizes.iter().enumerate() {
            write!(f, "{}{size}", if i == 0 { "" } else { "," })?;
        }
        f.write_str(")")
    }
}
