//! Tokenized text, and batches of it.

use shardwise::error::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;
use shardwise::data::{Batches, Dataset, LabeledTokens, PackedSequences, Packing, TokenSequences, read_documents};
use shardwise::read_file::read_bytes;
use shardwise::text::{TextFiles, Tokenizer};
use shardwise::{DeviceMesh, Error, Result};

/// The built-in training text.
const BOOK: &str = include_str!("../../data/alice.txt");

/// Largest tokenizer, as that of a model directory.
const MOST_TOKENIZER_BYTES: u64 = 128 << 20;

/// Largest text, which is tokenized in one piece: its tokens take several times its memory.
const MOST_TEXT_BYTES: u64 = 2 << 30;

/// A tokenizer that is a single file.
pub(crate) fn tokenizer_file(path: &Path) -> Result<TextFiles> {
    let tokenizer = read_bytes(path, MOST_TOKENIZER_BYTES).map_err(|error| bad_tokenizer(path, &error.to_string()))?;
    let files = TextFiles { tokenizer, ..TextFiles::default() };
    Tokenizer::new(&files).map_err(|error| bad_tokenizer(path, &error.found()))?;
    Ok(files)
}

fn bad_tokenizer(path: &Path, error: &str) -> Error {
    let (found, needed) = (format!("{}: {error}", path.display()), "a tokenizer.json of the tokenizers library");
    ErrorKind::Data.error("tokenizer", found, needed, "check the file")
}

/// A tokenized text, of which the last tenth is held out.
pub(crate) struct TokenizedText {
    pub(crate) tokenizer: Tokenizer,
    /// What the tokenizer was read from; empty if a token is a byte.
    pub(crate) files: TextFiles,
    training: TextTokens,
    held_out: TextTokens,
    packing: Packing,
    /// Whether samples say where documents begin, for models that keep packed documents apart.
    pub(crate) has_positions: bool,
}

/// A part of the tokens.
enum TextTokens {
    /// One long text, from which sequences are taken at every position.
    Text(Arc<[u32]>),
    /// Documents with labels.
    Documents(Vec<LabeledTokens>),
}

impl TextTokens {
    fn count(&self) -> usize {
        match self {
            TextTokens::Text(tokens) => tokens.len(),
            TextTokens::Documents(documents) => documents.iter().map(|document| document.ids.len()).sum(),
        }
    }

    fn ids(&self) -> Box<dyn Iterator<Item = u32> + '_> {
        match self {
            TextTokens::Text(tokens) => Box::new(tokens.iter().copied()),
            TextTokens::Documents(documents) => Box::new(documents.iter().flat_map(|document| &document.ids).copied()),
        }
    }

    /// The tokens that are to be predicted.
    fn targets(&self) -> Box<dyn Iterator<Item = u32> + '_> {
        match self {
            TextTokens::Text(tokens) => Box::new(tokens.iter().copied()),
            TextTokens::Documents(documents) => {
                let labels = documents.iter().flat_map(|document| document.labels.iter().skip(1));
                Box::new(labels.filter_map(|&label| u32::try_from(label).ok()))
            }
        }
    }
}

impl TokenizedText {
    /// Reads and tokenizes a file, or the built-in book. Without a tokenizer in `files`, a token is a byte.
    pub(crate) fn read(data: Option<&Path>, files: TextFiles, packed: bool) -> Result<Self> {
        let tokenizer = if files.tokenizer.is_empty() { Tokenizer::bytes() } else { Tokenizer::new(&files)? };
        let packing = if packed { Packing::Packed } else { Packing::OnePerSequence };
        let is_documents = |path: &&Path| path.extension().is_some_and(|end| end.eq_ignore_ascii_case("jsonl"));
        if let Some(path) = data.filter(is_documents) {
            let mut documents = read_documents(path, &tokenizer)?;
            // One at least, so that there is something to evaluate on.
            let held_out = documents.split_off(documents.len() - documents.len().div_ceil(10));
            let [training, held_out] = [documents, held_out].map(TextTokens::Documents);
            return Ok(TokenizedText { tokenizer, files, training, held_out, packing, has_positions: false });
        }
        let all = match data {
            None => tokenizer.encode_without_special(BOOK)?,
            Some(path) => {
                let found = |what: String| {
                    let found = format!("{}: {what}", path.display());
                    let needed = "a file of UTF-8 text, or of JSON lines with a name that ends with .jsonl";
                    ErrorKind::Data.error::<Error>("data", found, needed, "give another file with --data")
                };
                let bytes = read_bytes(path, MOST_TEXT_BYTES).map_err(|error| found(error.to_string()))?;
                let text = String::from_utf8(bytes).map_err(|error| found(error.to_string()))?;
                tokenizer.encode_without_special(&text)?
            }
        };
        let (training, held_out) = all.split_at(all.len() - all.len() / 10);
        let [training, held_out] = [training, held_out].map(|tokens| TextTokens::Text(tokens.into()));
        Ok(TokenizedText { tokenizer, files, training, held_out, packing, has_positions: false })
    }

    /// The size of the vocabulary.
    pub(crate) fn vocabulary(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// The largest token.
    pub(crate) fn largest(&self) -> u32 {
        self.training.ids().chain(self.held_out.ids()).max().unwrap_or(0)
    }

    /// The number of training tokens and of held-out tokens.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.training.count(), self.held_out.count())
    }

    /// A hash of the tokens, with which ranks compare their texts.
    pub(crate) fn fingerprint(&self) -> u64 {
        let parts = [&self.training, &self.held_out];
        let all = parts.iter().flat_map(|part| part.ids().chain(part.targets()));
        all.fold(self.vocabulary() as u64, |before, token| splitmix64(before ^ u64::from(token)))
    }

    /// Fails if the text is too short for sequences of this length.
    pub(crate) fn check(&self, length: usize) -> Result<()> {
        if let (TextTokens::Documents(training), TextTokens::Documents(held_out)) = (&self.training, &self.held_out) {
            if training.is_empty() {
                let found = format!("{} document(s), of which one is held out", held_out.len());
                return Err(ErrorKind::Data.error("data", found, "two at least", "add documents"));
            }
            return Ok(());
        }
        let (training, held_out) = self.counts();
        if training.min(held_out) > length {
            return Ok(());
        }
        let found = format!("{} token(s), of which {held_out} are held out", training + held_out);
        let needed = format!("more than {length}, the length of a sequence, in both parts");
        Err(ErrorKind::Data.error("data", found, needed, "use a longer text or shorter sequences"))
    }

    /// The loss in nats per token of predicting only by token frequency.
    pub(crate) fn unigram_entropy(&self) -> f64 {
        let mut counts = vec![0u64; self.vocabulary()];
        self.training.targets().for_each(|token| counts[token as usize] += 1);
        let total = counts.iter().sum::<u64>().max(1) as f64;
        let term = |&count: &u64| if count == 0 { 0.0 } else { -(count as f64 / total) * (count as f64 / total).ln() };
        counts.iter().map(term).sum()
    }

    /// Batches of the training text, shuffled by the seed.
    pub(crate) fn batches(&self, mesh: &DeviceMesh, shape: BatchShape, seed: u64) -> Result<Batches<TextSequences>> {
        self.batches_of(&self.training, mesh, shape, seed)
    }

    /// Batches of the held-out text, always in the same order.
    pub(crate) fn held_out(&self, mesh: &DeviceMesh, shape: BatchShape) -> Result<Batches<TextSequences>> {
        self.batches_of(&self.held_out, mesh, shape, 0)
    }

    /// The first tokens of the held-out text.
    pub(crate) fn beginning(&self, count: usize) -> Vec<u32> {
        self.held_out.ids().take(count).collect()
    }

    /// Shuffled batches of a part, sharded over the axis `dp` if there is one.
    fn batches_of(
        &self,
        part: &TextTokens,
        mesh: &DeviceMesh,
        shape: BatchShape,
        seed: u64,
    ) -> Result<Batches<TextSequences>> {
        let sequences = match part {
            TextTokens::Text(tokens) => TextSequences::Text(TokenSequences::new(tokens.clone(), shape.length)?),
            TextTokens::Documents(documents) => {
                let special = self.tokenizer.special();
                let pad = special.pad.or(special.eos.first().copied()).unwrap_or(0);
                let packed = PackedSequences::new(documents, shape.length, pad, self.packing)?;
                TextSequences::Documents(if self.has_positions { packed.with_positions() } else { packed })
            }
        };
        let batches = Batches::new(sequences, mesh)?.shuffle(seed).batch(shape.sequences);
        if mesh.mesh().axis("dp").is_ok() { batches.sharded("dp") } else { Ok(batches) }
    }
}

/// Sequences of a text or of documents.
pub(crate) enum TextSequences {
    Text(TokenSequences),
    Documents(PackedSequences),
}

impl Dataset for TextSequences {
    fn len(&self) -> usize {
        match self {
            TextSequences::Text(sequences) => sequences.len(),
            TextSequences::Documents(sequences) => sequences.len(),
        }
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        match self {
            TextSequences::Text(sequences) => sequences.sample(index),
            TextSequences::Documents(sequences) => sequences.sample(index),
        }
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

/// The SplitMix64 hash of a number.
fn splitmix64(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
