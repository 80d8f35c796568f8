//! Datasets.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::error::{ErrorKind, Result};

/// A map-style dataset: samples by index, each of one or more tensors.
pub trait Dataset {
    /// Number of samples.
    fn len(&self) -> usize;

    /// Returns sample `index`, from 0. Its tensors must have the same shapes and types as those of all other samples.
    fn sample(&self, index: usize) -> Result<Vec<Tensor>>;

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A tokenized text, split into consecutive sequences of one length, for language models.
///
/// A sample has two i64 tensors: the ids of a sequence, and its targets, which are one token ahead. Tokens at the end that do
/// not fill a sequence are dropped.
///
/// ```
/// use shardwise::data::{Dataset, TokenSequences};
///
/// let text = TokenSequences::new(vec![5, 6, 7, 8, 9, 10, 11, 12], 3)?;
/// assert_eq!(text.len(), 2);
/// let sample = text.sample(1)?;
/// assert_eq!(sample[0].to_vec1::<i64>().unwrap(), [8, 9, 10]);
/// assert_eq!(sample[1].to_vec1::<i64>().unwrap(), [9, 10, 11]);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TokenSequences {
    tokens: Arc<[u32]>,
    length: usize,
}

impl TokenSequences {
    /// Splits tokens into sequences of `length`.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the tokens do not fill one sequence and its last target.
    pub fn new(tokens: impl Into<Arc<[u32]>>, length: usize) -> Result<Self> {
        let tokens = tokens.into();
        if length == 0 || tokens.len() <= length {
            let found = format!("{} token(s) for sequences of {length}", tokens.len());
            let needed = "sequences of at least 1 token, and more tokens than one of them has";
            return Err(ErrorKind::Data.error("tokens", found, needed, "use more text or shorter sequences"));
        }
        Ok(TokenSequences { tokens, length })
    }
}

impl Dataset for TokenSequences {
    fn len(&self) -> usize {
        (self.tokens.len() - 1) / self.length
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        let sequence = |start: usize| -> Result<Tensor> {
            let ids = self.tokens[start..start + self.length].iter().map(|&token| i64::from(token));
            Ok(Tensor::from_vec(ids.collect(), self.length, &Device::Cpu)?)
        };
        let start = index * self.length;
        Ok(vec![sequence(start)?, sequence(start + 1)?])
    }
}

impl<D: Dataset + ?Sized> Dataset for &D {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        (**self).sample(index)
    }
}
