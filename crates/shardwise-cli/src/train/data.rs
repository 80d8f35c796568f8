//! Text as tokens, and batches of it.

use std::path::Path;

use shardwise::{Error, Result};
use tokenizers::Tokenizer;

use super::trainer::Batch;

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
            Error::invalid("tokenizer", found, "a tokenizer.json of the tokenizers library", "check the file")
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
            Error::invalid(
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
    all: Vec<u32>,
    /// Where the held-out part begins.
    split: usize,
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
                    Error::invalid("data", found, "a file of UTF-8 text", "give another file with --data")
                };
                let bytes = std::fs::read(path).map_err(|error| found(error.to_string()))?;
                let text = String::from_utf8(bytes).map_err(|error| found(error.to_string()))?;
                coding.encode(&text)?
            }
        };
        let split = all.len() - all.len() / 10;
        Ok(Tokens { coding, all, split })
    }

    /// How many different tokens there may be.
    pub(crate) fn vocabulary(&self) -> usize {
        self.coding.vocabulary()
    }

    /// Number of tokens to learn from, and of those held out.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.split, self.all.len() - self.split)
    }

    /// A number that other tokens do not have.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.all.iter().fold(self.vocabulary() as u64, |before, &token| scramble(before ^ u64::from(token)))
    }

    /// An error if the text is too short for sequences of a length.
    pub(crate) fn check(&self, length: usize) -> Result<()> {
        let (learned, held_out) = self.counts();
        if learned.min(held_out) > length {
            return Ok(());
        }
        let found = format!("{} token(s), of which {held_out} are held out", self.all.len());
        let needed = format!("more than {length}, the length of a sequence, in both parts");
        Err(Error::invalid("data", found, needed, "use a longer text or shorter sequences"))
    }

    /// The mean number of nats per token of a guess that knows only how frequent tokens are.
    pub(crate) fn unigram_entropy(&self) -> f64 {
        let mut counts = vec![0u64; self.vocabulary()];
        self.all[..self.split].iter().for_each(|&token| counts[token as usize] += 1);
        let total = self.split as f64;
        let term = |&count: &u64| if count == 0 { 0.0 } else { -(count as f64 / total) * (count as f64 / total).ln() };
        counts.iter().map(term).sum()
    }

    /// Sequences from anywhere in the text to learn from. The same seed and number give the same batch.
    pub(crate) fn batch(&self, seed: u64, number: u64, sequences: usize, length: usize) -> Batch {
        let begin = |i: usize| {
            let place = scramble(scramble(seed ^ scramble(number)) ^ i as u64);
            (place % (self.split - length) as u64) as usize
        };
        let tokens = (0..sequences).flat_map(|i| &self.all[begin(i)..][..=length]).copied().collect();
        Batch { tokens, sequences }
    }

    /// Batches from all over the held-out text, always the same.
    pub(crate) fn held_out(&self, batches: usize, sequences: usize, length: usize) -> Vec<Batch> {
        let text = &self.all[self.split..];
        let (count, room) = (batches * sequences, text.len() - length - 1);
        let begin = |i: usize| i * room / count.max(1);
        let batch = |b: usize| {
            let each = (b * sequences..(b + 1) * sequences).flat_map(|i| &text[begin(i)..][..=length]);
            Batch { tokens: each.copied().collect(), sequences }
        };
        (0..batches).map(batch).collect()
    }

    /// What the held-out text begins with.
    pub(crate) fn beginning(&self, count: usize) -> Vec<u32> {
        self.all[self.split..].iter().copied().take(count).collect()
    }
}

/// A number that has nothing to do with the one it is made of (SplitMix64).
pub(super) fn scramble(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
