//! Datasets.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::order::SampleOrder;
use super::token_file::TokenFile;
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

    /// The order in which [`Batches`](super::Batches) draws samples before it is shuffled; one after the other by default. A
    /// [`Mixture`](super::Mixture) draws by weight.
    fn order(&self) -> Result<SampleOrder> {
        SampleOrder::new(self.len())
    }
}

/// A tokenized text, in memory or in a file, split into consecutive sequences of one length, for language models.
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
    tokens: TokenStore,
    length: usize,
}

/// Where tokens are.
#[derive(Debug, Clone)]
enum TokenStore {
    Memory(Arc<[u32]>),
    File(TokenFile),
}

impl TokenSequences {
    /// Splits tokens into sequences of `length`.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the tokens do not fill one sequence and its last target.
    pub fn new(tokens: impl Into<Arc<[u32]>>, length: usize) -> Result<Self> {
        TokenSequences { tokens: TokenStore::Memory(tokens.into()), length }.checked()
    }

    /// Splits the tokens of a file into sequences of `length`. A sample is read when it is asked for: nothing stays in memory.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_file(file: TokenFile, length: usize) -> Result<Self> {
        TokenSequences { tokens: TokenStore::File(file), length }.checked()
    }

    fn token_count(&self) -> usize {
        match &self.tokens {
            TokenStore::Memory(tokens) => tokens.len(),
            TokenStore::File(file) => file.len(),
        }
    }

    fn checked(self) -> Result<Self> {
        let (tokens, length) = (self.token_count(), self.length);
        if length == 0 || tokens <= length {
            let found = format!("{tokens} token(s) for sequences of {length}");
            let needed = "sequences of at least 1 token, and more tokens than one of them has";
            return Err(ErrorKind::Data.error("tokens", found, needed, "use more text or shorter sequences"));
        }
        Ok(self)
    }
}

impl Dataset for TokenSequences {
    fn len(&self) -> usize {
        (self.token_count() - 1) / self.length
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        let range = index * self.length..(index + 1) * self.length + 1;
        let ids: Vec<i64> = match &self.tokens {
            TokenStore::Memory(tokens) => tokens[range].iter().map(|&token| i64::from(token)).collect(),
            TokenStore::File(file) => file.read(range)?.into_iter().map(i64::from).collect(),
        };
        let sequence = |from: usize| -> Result<Tensor> {
            Ok(Tensor::from_slice(&ids[from..from + self.length], self.length, &Device::Cpu)?)
        };
        Ok(vec![sequence(0)?, sequence(1)?])
    }
}

impl<D: Dataset + ?Sized> Dataset for &D {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        (**self).sample(index)
    }

    fn order(&self) -> Result<SampleOrder> {
        (**self).order()
    }
}

impl<D: Dataset + ?Sized> Dataset for Box<D> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        (**self).sample(index)
    }

    fn order(&self) -> Result<SampleOrder> {
        (**self).order()
    }
}
