//! Tokenized text, and batches of it.

use shardwise::error::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use shardwise::data::{Batches, TokenSequences};
use shardwise::text::{TextFiles, Tokenizer};
use shardwise::{DeviceMesh, Error, Result};

/// The built-in training text.
const BOOK: &str = include_str!("../../data/alice.txt");

/// File name of the tokenizer in an output directory.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// Reads a tokenizer file; without a path, a token is a byte.
pub(crate) fn read_tokenizer(path: Option<&Path>) -> Result<Tokenizer> {
    let Some(path) = path else { return Ok(Tokenizer::bytes()) };
    let bad = |error: String| -> Error {
        let (found, needed) = (format!("{}: {error}", path.display()), "a tokenizer.json of the tokenizers library");
        ErrorKind::Data.error("tokenizer", found, needed, "check the file")
    };
    let tokenizer = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
    Tokenizer::new(&TextFiles { tokenizer, ..TextFiles::default() }).map_err(|error| bad(error.to_string()))
}

/// A tokenized text, of which the last tenth is held out.
pub(crate) struct TokenizedText {
    pub(crate) tokenizer: Tokenizer,
    training: Arc<[u32]>,
    held_out: Arc<[u32]>,
}

impl TokenizedText {
    /// Reads and tokenizes a file, or the built-in book.
    pub(crate) fn read(data: Option<&Path>, tokenizer: Option<&Path>) -> Result<Self> {
        let tokenizer = read_tokenizer(tokenizer)?;
        let all = match data {
            None => tokenizer.encode_without_special(BOOK)?,
            Some(path) => {
                let found = |what: String| {
                    let found = format!("{}: {what}", path.display());
                    ErrorKind::Data.error::<Error>(
                        "data",
                        found,
                        "a file of UTF-8 text",
                        "give another file with --data",
                    )
                };
                let bytes = std::fs::read(path).map_err(|error| found(error.to_string()))?;
                let text = String::from_utf8(bytes).map_err(|error| found(error.to_string()))?;
                tokenizer.encode_without_special(&text)?
            }
        };
        let (training, held_out) = all.split_at(all.len() - all.len() / 10);
        Ok(TokenizedText { tokenizer, training: training.into(), held_out: held_out.into() })
    }

    /// The size of the vocabulary.
    pub(crate) fn vocabulary(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// The number of training tokens and of held-out tokens.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.training.len(), self.held_out.len())
    }

    /// A hash of the tokens, with which ranks compare their texts.
    pub(crate) fn fingerprint(&self) -> u64 {
        let all = self.training.iter().chain(&*self.held_out);
        all.fold(self.vocabulary() as u64, |before, &token| splitmix64(before ^ u64::from(token)))
    }

    /// Fails if the text is too short for sequences of this length.
    pub(crate) fn check(&self, length: usize) -> Result<()> {
        let (training, held_out) = self.counts();
        if training.min(held_out) > length {
            return Ok(());
        }
        let found = format!("{} token(s), of which {held_out} are held out", training + held_out);
        let needed = format!("more than {length}, the length of a sequence, in both parts");
        Err(ErrorKind::Data.error("data", found, needed, "use a longer text or shorter sequences"))
    }

    /// The loss in nats per token of predicting by token frequency alone.
    pub(crate) fn unigram_entropy(&self) -> f64 {
        let mut counts = vec![0u64; self.vocabulary()];
        self.training.iter().for_each(|&token| counts[token as usize] += 1);
        let total = self.training.len() as f64;
        let term = |&count: &u64| if count == 0 { 0.0 } else { -(count as f64 / total) * (count as f64 / total).ln() };
        counts.iter().map(term).sum()
    }

    /// Batches of the training text, shuffled by the seed.
    pub(crate) fn batches(&self, mesh: &DeviceMesh, shape: BatchShape, seed: u64) -> Result<Batches<TokenSequences>> {
        batches(&self.training, mesh, shape, seed)
    }

    /// Batches of the held-out text, always in the same order.
    pub(crate) fn held_out(&self, mesh: &DeviceMesh, shape: BatchShape) -> Result<Batches<TokenSequences>> {
        batches(&self.held_out, mesh, shape, 0)
    }

    /// The first tokens of the held-out text.
    pub(crate) fn beginning(&self, count: usize) -> Vec<u32> {
        self.held_out.iter().copied().take(count).collect()
    }
}

/// The shape of a batch.
#[derive(Clone, Copy)]
pub(crate) struct BatchShape {
    /// Number of sequences, over all ranks.
    pub(crate) sequences: usize,
    /// Tokens per sequence.
    pub(crate) length: usize,
}

/// Shuffled batches of a text, sharded over the axis `dp` if there is one.
fn batches(text: &Arc<[u32]>, mesh: &DeviceMesh, shape: BatchShape, seed: u64) -> Result<Batches<TokenSequences>> {
    let text = TokenSequences::new(text.clone(), shape.length)?;
    let batches = Batches::new(text, mesh)?.shuffle(seed).batch(shape.sequences);
    if mesh.mesh().axis("dp").is_ok() { batches.sharded("dp") } else { Ok(batches) }
}

/// The SplitMix64 hash of a number.
fn splitmix64(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
