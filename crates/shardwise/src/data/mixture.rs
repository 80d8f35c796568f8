//! Several datasets as one.

use candle_core::Tensor;

use super::dataset::Dataset;
use super::order::SampleOrder;
use crate::error::{ErrorKind, Result};

/// Several datasets as one: one after the other, or drawn from by weight.
///
/// The samples of the first dataset have the first indices. Which dataset comes next depends on the position alone, so that a run
/// resumes on any mesh without losing or repeating a sample of any of them.
///
/// ```
/// use shardwise::data::{Batches, Dataset, Mixture, TokenSequences};
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let tokens = |from: u32, count: u32| TokenSequences::new((from..from + count).collect::<Vec<u32>>(), 4);
///     let (web, books) = (tokens(0, 4001)?, tokens(10_000, 401)?);
///     let mut batches = Batches::new(Mixture::weighted([(web, 0.75), (books, 0.25)])?, &mesh)?.batch(8).sharded("dp")?;
///     let ids = batches.next_batch()?[0].full_tensor()?.to_vec2::<i64>()?;
///     assert_eq!(ids.iter().filter(|ids| ids[0] >= 10_000).count(), 2);
///     assert_eq!(batches.order().drawn(batches.position()), [6, 2]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "ConcatDataset")]
#[doc(alias = "interleave_datasets")]
#[derive(Debug, Clone)]
pub struct Mixture<D> {
    parts: Vec<D>,
    /// Where the samples of each part end.
    ends: Vec<usize>,
    order: SampleOrder,
}

impl<D: Dataset> Mixture<D> {
    /// Datasets one after the other: each has as large a share of an epoch as it has samples.
    ///
    /// # Errors
    /// [`ErrorKind::Data`] if there are no samples, or a dataset draws by weight itself.
    pub fn concatenated(parts: impl IntoIterator<Item = D>) -> Result<Self> {
        let (parts, ends) = Self::joined(parts)?;
        let order = SampleOrder::new(ends.last().copied().unwrap_or(0))?;
        Ok(Mixture { parts, ends, order })
    }

    /// Datasets with weights, of any sum: of many samples each dataset has the share of its weight, and epochs of its own. See
    /// [`SampleOrder::weighted`].
    ///
    /// # Errors
    /// [`ErrorKind::Data`] for a dataset without samples or one that draws by weight itself, and a weight that is not positive or too
    /// small.
    pub fn weighted(parts: impl IntoIterator<Item = (D, f64)>) -> Result<Self> {
        let (parts, weights): (Vec<D>, Vec<f64>) = parts.into_iter().unzip();
        let (parts, ends) = Self::joined(parts)?;
        let sources: Vec<(usize, f64)> = parts.iter().map(Dataset::len).zip(weights).collect();
        Ok(Mixture { order: SampleOrder::weighted(&sources)?, parts, ends })
    }

    /// The datasets, with the ends of their indices.
    fn joined(parts: impl IntoIterator<Item = D>) -> Result<(Vec<D>, Vec<usize>)> {
        let parts: Vec<D> = parts.into_iter().collect();
        let mut ends = Vec::with_capacity(parts.len());
        for (i, part) in parts.iter().enumerate() {
            // Its weights would be lost.
            if !part.is_empty() && part.order()?.shares().len() > 1 {
                let fix = "pass the datasets inside of it with the products of their weights";
                return Err(ErrorKind::Data.error(
                    "mixture",
                    format!("a mixture as source {i}"),
                    "datasets without weights",
                    fix,
                ));
            }
            ends.push(ends.last().copied().unwrap_or(0) + part.len());
        }
        Ok((parts, ends))
    }

    /// The datasets.
    pub fn parts(&self) -> &[D] {
        &self.parts
    }
}

impl<D: Dataset> Dataset for Mixture<D> {
    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        let at = self.ends.partition_point(|&end| end <= index);
        let first = if at == 0 { 0 } else { self.ends[at - 1] };
        self.parts[at].sample(index - first)
    }

    fn order(&self) -> Result<SampleOrder> {
        Ok(self.order.clone())
    }
}
