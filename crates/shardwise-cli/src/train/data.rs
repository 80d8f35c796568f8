//! Text as tokens, and batches of it.

use shardwise::error::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use shardwise::data::{Batches, TokenSequences};
use shardwise::{DeviceMesh, Error, Result};
use tokenizers::Tokenizer;

/// The book that is used unless other text is given.
const BOOK: &str = include_str!("../../data/alice.txt");

/// Name of the tokenizer's file beside a trained model.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// How text becomes tokens and back.
pub(crate) enum Coding {
    /// A token is a byte.
    Bytes,
    /// A file of the tokenizers library.
    File(Box<Tokenizer>),
}

impl Coding {
    /// Bytes, or what a file says.
    pub(crate) fn read(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Ok(Coding::Bytes) };
        let tokenizer = Tokenizer::from_file(path).map_err(|error| {
            let found = format!("{}: {error}", path.display());
            ErrorKind::Data.error::<Error>(
                "tokenizer",
                found,
                "a tokenizer.json of the tokenizers library",
                "check the file",
            )
        })?;
        Ok(Coding::File(Box::new(tokenizer)))
    }

    /// The tokens of a text.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Coding::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Coding::File(tokenizer) => {
                let encoded = tokenizer.encode(text, false).map_err(|error| Error::other(error.to_string()))?;
                Ok(encoded.get_ids().to_vec())
            }
        }
    }

    /// The text of tokens; what is no text shows as a replacement character.
    pub(crate) fn decode(&self, tokens: &[u32]) -> Result<String> {
        match self {
            Coding::Bytes => {
                let bytes: Vec<u8> = tokens.iter().map(|&token| u8::try_from(token).unwrap_or(b'?')).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Coding::File(tokenizer) => tokenizer.decode(tokens, false).map_err(|error| Error::other(error.to_string())),
        }
    }

    /// Writes the tokenizer's file into a directory, if there is one.
    pub(crate) fn write(&self, directory: &Path) -> Result<bool> {
        let Coding::File(tokenizer) = self else { return Ok(false) };
        let path = directory.join(TOKENIZER);
        tokenizer.save(&path, false).map_err(|error| {
            let found = format!("{}: {error}", path.display());
            ErrorKind::Argument.error::<Error>(
                "output file",
                found,
                "a place that can be written to",
                "make room there, or name another place",
            )
        })?;
        Ok(true)
    }

    fn vocabulary(&self) -> usize {
        match self {
            Coding::Bytes => 256,
            // Numbers may have gaps.
            Coding::File(tokenizer) => {
                tokenizer.get_vocab(true).values().max().map_or(0, |&largest| largest as usize + 1)
            }
        }
    }
}

/// A text in tokens, a tenth of it held out.
pub(crate) struct Tokens {
    pub(crate) coding: Coding,
    learned: Arc<[u32]>,
    held_out: Arc<[u32]>,
}

impl Tokens {
    /// The tokens of a file, or of the book that comes with the command.
    pub(crate) fn read(data: Option<&Path>, tokenizer: Option<&Path>) -> Result<Self> {
        let coding = Coding::read(tokenizer)?;
        let all = match data {
            None => coding.encode(BOOK)?,
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
                coding.encode(&text)?
            }
        };
        let (learned, held_out) = all.split_at(all.len() - all.len() / 10);
        Ok(Tokens { coding, learned: learned.into(), held_out: held_out.into() })
    }

    /// How many different tokens there may be.
    pub(crate) fn vocabulary(&self) -> usize {
        self.coding.vocabulary()
    }

    /// Number of tokens to learn from, and of those held out.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.learned.len(), self.held_out.len())
    }

    /// A number that other tokens do not have.
    pub(crate) fn fingerprint(&self) -> u64 {
        let all = self.learned.iter().chain(&*self.held_out);
        all.fold(self.vocabulary() as u64, |before, &token| scramble(before ^ u64::from(token)))
    }

    /// An error if the text is too short for sequences of a length.
    pub(crate) fn check(&self, length: usize) -> Result<()> {
        let (learned, held_out) = self.counts();
        if learned.min(held_out) > length {
            return Ok(());
        }
        let found = format!("{} token(s), of which {held_out} are held out", learned + held_out);
        let needed = format!("more than {length}, the length of a sequence, in both parts");
        Err(ErrorKind::Data.error("data", found, needed, "use a longer text or shorter sequences"))
    }

    /// The mean number of nats per token of a guess that knows only how frequent tokens are.
    pub(crate) fn unigram_entropy(&self) -> f64 {
        let mut counts = vec![0u64; self.vocabulary()];
        self.learned.iter().for_each(|&token| counts[token as usize] += 1);
        let total = self.learned.len() as f64;
        let term = |&count: &u64| if count == 0 { 0.0 } else { -(count as f64 / total) * (count as f64 / total).ln() };
        counts.iter().map(term).sum()
    }

    /// Batches of the text to learn from, in an order that follows from the seed.
    pub(crate) fn batches(&self, mesh: &DeviceMesh, shape: BatchShape, seed: u64) -> Result<Batches<TokenSequences>> {
        batches(&self.learned, mesh, shape, seed)
    }

    /// Batches from all over the held-out text, always the same ones from the beginning.
    pub(crate) fn held_out(&self, mesh: &DeviceMesh, shape: BatchShape) -> Result<Batches<TokenSequences>> {
        batches(&self.held_out, mesh, shape, 0)
    }

    /// What the held-out text begins with.
    pub(crate) fn beginning(&self, count: usize) -> Vec<u32> {
        self.held_out.iter().copied().take(count).collect()
    }
}

/// Sizes of a batch.
#[derive(Clone, Copy)]
pub(crate) struct BatchShape {
    /// Over all ranks.
    pub(crate) sequences: usize,
    /// Of a sequence, in tokens.
    pub(crate) length: usize,
}

/// Shuffled batches of a text, sharded over the axis `dp` if there is one.
fn batches(text: &Arc<[u32]>, mesh: &DeviceMesh, shape: BatchShape, seed: u64) -> Result<Batches<TokenSequences>> {
    let text = TokenSequences::new(text.clone(), shape.length)?;
    let batches = Batches::new(text, mesh)?.shuffle(seed).batch(shape.sequences);
    if mesh.mesh().axis("dp").is_ok() { batches.sharded("dp") } else { Ok(batches) }
}

/// A number that has nothing to do with the one it is made of (SplitMix64).
pub(super) fn scramble(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
