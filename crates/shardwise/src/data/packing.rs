//! Documents in sequences of one length.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::conversations::{IGNORED_LABEL, LabeledTokens};
use super::dataset::Dataset;
use crate::error::{ErrorKind, Result};

/// How documents share sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Several documents per sequence, one after the other. No token is predicted from another document. Tokens see those of
    /// documents before theirs, unless the model gets positions ([`PackedSequences::with_positions`]).
    Packed,
    /// One document per sequence, with padding after it.
    OnePerSequence,
}

/// Documents in sequences of one length, for language models.
///
/// A sample has two i64 tensors: the ids of a sequence, and its targets, which are one token ahead; a target of
/// [`IGNORED_LABEL`] does not count. A document that is longer than a sequence is split; the rest of a sequence is padding. With
/// [`Packing::Packed`] a document goes to the first of the open sequences that has room for it, so the order of documents is
/// not exactly kept. Local, and the same on every rank.
///
/// ```
/// use shardwise::data::{Dataset, LabeledTokens, PackedSequences, Packing};
///
/// let documents = [vec![1, 2, 3], vec![4, 5], vec![6, 7]].map(LabeledTokens::all);
/// let packed = PackedSequences::new(&documents, 6, 0, Packing::Packed)?;
/// let sample = packed.sample(0)?;
/// assert_eq!(sample[0].to_vec1::<i64>().unwrap(), [1, 2, 3, 4, 5, 0]);
/// // No document predicts the first token of the next one.
/// assert_eq!(sample[1].to_vec1::<i64>().unwrap(), [2, 3, -100, 5, -100, -100]);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PackedSequences {
    sequences: Arc<[PackedSequence]>,
    length: usize,
    pad: u32,
    has_positions: bool,
}

/// Documents one after the other.
#[derive(Debug)]
struct PackedSequence {
    tokens: LabeledTokens,
    /// Where the documents begin.
    starts: Vec<usize>,
}

/// Sequences with room that later documents may fill: enough for little padding, few enough to search quickly.
const OPEN: usize = 64;

impl PackedSequences {
    /// Puts documents into sequences of `length` tokens, filled up with `pad`.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if the length is less than 2, [`ErrorKind::Data`] if no token is to be predicted.
    pub fn new(documents: &[LabeledTokens], length: usize, pad: u32, packing: Packing) -> Result<Self> {
        if length < 2 {
            return Err(ErrorKind::Argument.error("sequence length", length, "at least 2", "use longer sequences"));
        }
        let mut sequences: Vec<PackedSequence> = Vec::new();
        let mut open: Vec<usize> = Vec::new();
        for document in documents {
            for (ids, labels) in document.ids.chunks(length).zip(document.labels.chunks(length)) {
                let fits = |&&at: &&usize| sequences[at].tokens.ids.len() + ids.len() <= length;
                let found = open.iter().find(fits).copied().filter(|_| packing == Packing::Packed);
                let at = found.unwrap_or_else(|| {
                    let tokens = LabeledTokens { ids: Vec::new(), labels: Vec::new() };
                    sequences.push(PackedSequence { tokens, starts: Vec::new() });
                    open.push(sequences.len() - 1);
                    if open.len() > OPEN {
                        open.remove(0);
                    }
                    sequences.len() - 1
                });
                let PackedSequence { tokens, starts } = &mut sequences[at];
                starts.push(tokens.ids.len());
                tokens.ids.extend(ids);
                // The first token of a part has nothing before it that could predict it.
                tokens.labels.push(IGNORED_LABEL);
                tokens.labels.extend(&labels[1..]);
                open.retain(|&at| sequences[at].tokens.ids.len() < length);
            }
        }
        // Where nothing counts there is nothing to learn, and a mean over no token is NaN.
        sequences.retain(|sequence| sequence.tokens.labels.iter().any(|&label| label != IGNORED_LABEL));
        if sequences.is_empty() {
            let fix = "use longer documents, or conversations with answers";
            return Err(ErrorKind::Data.error("documents", "no token to predict", "one at least", fix));
        }
        Ok(PackedSequences { sequences: sequences.into(), length, pad, has_positions: false })
    }

    /// Adds a third i64 tensor to the samples: the position of every token in its document. A model that gets it
    /// ([`PretrainedModel`](crate::models::PretrainedModel)) computes every document as if it were alone.
    ///
    /// ```
    /// use shardwise::data::{Dataset, LabeledTokens, PackedSequences, Packing};
    ///
    /// let documents = [vec![1, 2, 3], vec![4, 5]].map(LabeledTokens::all);
    /// let packed = PackedSequences::new(&documents, 6, 0, Packing::Packed)?.with_positions();
    /// assert_eq!(packed.sample(0)?[2].to_vec1::<i64>().unwrap(), [0, 1, 2, 0, 1, 0]);
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    #[doc(alias = "position_ids")]
    #[doc(alias = "DataCollatorWithFlattening")]
    #[must_use]
    pub fn with_positions(self) -> Self {
        PackedSequences { has_positions: true, ..self }
    }

    /// Share of all positions that hold tokens and not padding.
    pub fn fill(&self) -> f64 {
        let tokens: usize = self.sequences.iter().map(|sequence| sequence.tokens.ids.len()).sum();
        tokens as f64 / (self.sequences.len() * self.length) as f64
    }
}

impl Dataset for PackedSequences {
    fn len(&self) -> usize {
        self.sequences.len()
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        let PackedSequence { tokens: LabeledTokens { ids, labels }, starts } = &self.sequences[index];
        let id = |i: usize| ids.get(i).map_or(i64::from(self.pad), |&id| i64::from(id));
        let target = |i: usize| labels.get(i + 1).copied().unwrap_or(IGNORED_LABEL);
        let tensor = |value: &dyn Fn(usize) -> i64| -> Result<Tensor> {
            Ok(Tensor::from_vec((0..self.length).map(value).collect::<Vec<i64>>(), self.length, &Device::Cpu)?)
        };
        let mut sample = vec![tensor(&id)?, tensor(&target)?];
        if self.has_positions {
            // Padding is a document of its own.
            let start = |i: usize| starts.iter().copied().chain([ids.len()]).rfind(|&start| start <= i);
            sample.push(tensor(&|i| (i - start(i).unwrap_or(0)) as i64)?);
        }
        Ok(sample)
    }
}
