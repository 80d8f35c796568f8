//! Data loading: batches in a reproducible order, sharded over mesh axes, resumable on any number of ranks.
//!
//! Data may be larger than memory: a [`TokenFile`] is read as it is needed, [`Tokenization`] writes one from texts of any size, and a
//! [`Mixture`] draws from several sources by weight.
//!
//! The position in the data is the number of samples drawn so far. It does not depend on the mesh, so that a run that resumes
//! on another mesh loses and repeats no sample.
//!
//! ```
//! use shardwise::data::{Batches, TokenSequences};
//! use shardwise::prelude::*;
//!
//! launch(2, |world| {
//!     let mesh = world.mesh([("dp", 2)])?;
//!     let text = TokenSequences::new((0..100).collect::<Vec<u32>>(), 8)?;
//!     let mut batches = Batches::new(text, &mesh)?.shuffle(7).batch(4).sharded("dp")?;
//!     let batch = batches.next_batch()?; // each rank loads two of the four sequences
//!     let [ids, targets] = &batch[..] else { unreachable!() };
//!     assert_eq!((ids.shape(), targets.placements()), (&[4, 8][..], &[Shard(0)][..]));
//!     assert_eq!(batches.position(), 4);
//!     Ok(())
//! })?;
//! # Ok::<(), Error>(())
//! ```

mod conversations;
mod order;
mod token_file;
mod dataset;
mod mixture;
mod packing;
#[cfg(feature = "parquet")]
mod parquet_texts;
mod texts;
mod tokenize;

pub use conversations::{IGNORED_LABEL, LabeledTokens, read_documents};
pub use dataset::{Dataset, TokenSequences};
pub use mixture::Mixture;
pub use order::SampleOrder;
pub use packing::{PackedSequences, Packing};
pub use texts::{TextPart, Texts, data_files};
pub use token_file::{TokenFile, TokenFileWriter, TokenType};
pub use tokenize::{Tokenization, TokenizeProgress};

use candle_core::{Shape, Tensor};

use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// An endless loader of batches: after the last sample of an epoch come those of the next, in the same batch if it is not
/// full.
///
/// Local: no call communicates. All ranks of the mesh draw the same batches; each loads only the samples of its own shard.
#[doc(alias = "DataLoader")]
#[derive(Debug, Clone)]
pub struct Batches<D> {
    dataset: D,
    mesh: DeviceMesh,
    placements: Vec<Placement>,
    order: SampleOrder,
    batch: usize,
    position: u64,
}

impl<D: Dataset> Batches<D> {
    /// A loader of batches of one sample, in the order of the dataset, replicated on all ranks of the mesh.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the dataset has no samples.
    pub fn new(dataset: D, mesh: &DeviceMesh) -> Result<Self> {
        let order = dataset.order()?;
        let placements = vec![Placement::Replicate; mesh.ndim()];
        Ok(Batches { dataset, mesh: mesh.clone(), placements, order, batch: 1, position: 0 })
    }

    /// Shuffles every epoch anew; the order depends only on the seed.
    pub fn shuffle(self, seed: u64) -> Self {
        Batches { order: self.order.shuffled(seed), ..self }
    }

    /// Sets the global batch size, over all ranks; 1 by default.
    #[doc(alias = "batch_size")]
    pub fn batch(self, samples: usize) -> Self {
        Batches { batch: samples, ..self }
    }

    /// Shards batches on dimension 0 over a mesh axis. Several calls shard over several axes.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the mesh has no such axis.
    pub fn sharded(mut self, axis: &str) -> Result<Self> {
        let axis = self.mesh.mesh().axis(axis)?;
        self.placements[axis] = Placement::Shard(0);
        Ok(self)
    }

    /// Number of samples drawn so far, over all ranks and epochs. Save it to resume with [`seek`](Self::seek).
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Number of complete epochs; of a [`Mixture`] as if it had no weights, see [`SampleOrder::drawn`].
    pub fn epoch(&self) -> u64 {
        self.position / self.order.samples()
    }

    /// Order in which samples are drawn.
    pub fn order(&self) -> &SampleOrder {
        &self.order
    }

    /// Continues at another position, such as that of an interrupted run.
    pub fn seek(&mut self, position: u64) {
        self.position = position;
    }

    /// Loads the next batch: the tensors of its samples, stacked on a new dimension 0.
    ///
    /// # Errors
    /// Errors of the dataset, and [`Error::Invalid`](crate::Error::Invalid) if tensors of samples differ in number, shape or
    /// type. The position does not change then.
    pub fn next_batch(&mut self) -> Result<Vec<DTensor>> {
        let layout = Layout::new(self.mesh.mesh(), self.batch, self.placements.iter().cloned())?;
        let rank = self.mesh.world().rank();
        let (first, count) = match self.mesh.contains(rank) {
            true => (layout.global_offset(rank)[0], layout.local_shape(rank)[0]),
            false => (0, 0),
        };
        let load = |index: usize| self.dataset.sample(self.order.sample(self.position + index as u64) as usize);
        // A rank without samples loads one too: its empty shard needs shape and type.
        let like = load(first.min(self.batch.saturating_sub(1)))?;
        let mut columns: Vec<Vec<Tensor>> = vec![Vec::with_capacity(count); like.len()];
        for index in first..first + count {
            let sample = if index == first { like.clone() } else { load(index)? };
            check_same_shapes(&like, &sample)?;
            columns.iter_mut().zip(sample).for_each(|(column, tensor)| column.push(tensor));
        }
        let batch = columns.iter().zip(&like).map(|(column, like)| self.stacked(column, like));
        let batch = batch.collect::<Result<Vec<_>>>()?;
        self.position += self.batch as u64;
        Ok(batch)
    }

    /// One tensor of a batch, stacked from the tensors of this rank's samples.
    fn stacked(&self, column: &[Tensor], like: &Tensor) -> Result<DTensor> {
        let with_samples = |samples: usize| Shape::from([&[samples], like.dims()].concat());
        let local = match column {
            [] => Tensor::zeros(with_samples(0), like.dtype(), like.device())?,
            column => Tensor::stack(column, 0)?,
        };
        DTensor::from_local_with_shape(&local, &self.mesh, self.placements.iter().cloned(), with_samples(self.batch))
    }
}

/// Checks that two samples have tensors of the same shapes and types.
fn check_same_shapes(first: &[Tensor], sample: &[Tensor]) -> Result<()> {
    let described = |sample: &[Tensor]| -> Vec<String> {
        sample.iter().map(|t| format!("{} {:?}", t.dtype().as_str(), t.dims())).collect()
    };
    if first.len() == sample.len()
        && first.iter().zip(sample).all(|(a, b)| a.dims() == b.dims() && a.dtype() == b.dtype())
    {
        return Ok(());
    }
    Err(ErrorKind::Data.error(
        "samples of a batch",
        format!("[{}] and [{}]", described(first).join(", "), described(sample).join(", ")),
        "tensors of the same shapes and types in all samples",
        "pad or truncate the samples in the dataset",
    ))
}
