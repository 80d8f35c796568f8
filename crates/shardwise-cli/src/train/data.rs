//! Tokenized text, and batches of it.

use shardwise::error::ErrorKind;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use shardwise::data::{
    Batches, Dataset, LabeledTokens, Mixture, PackedSequences, Packing, Texts, TokenFile, TokenSequences, data_files,
    read_documents,
};
use shardwise::read_file::read_bytes;
use shardwise::text::{TextFiles, Tokenizer};
use shardwise::{DeviceMesh, Error, Result};

use super::sources::{self, DataSource};

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

/// Sources of tokens to train on, and what is evaluated on: the last tenth of each, or sets of their own.
pub(crate) struct TokenizedText {
    pub(crate) tokenizer: Tokenizer,
    /// What the tokenizer was read from; empty if a token is a byte.
    pub(crate) files: TextFiles,
    /// The parts of each source.
    training: Vec<Vec<TextTokens>>,
    /// One for each source; none if all have the share of their size.
    weights: Option<Vec<f64>>,
    held_out: Vec<EvalSet>,
    packing: Packing,
    /// Whether samples say where documents begin, for models that keep packed documents apart.
    has_positions: bool,
}

/// Text to evaluate on.
struct EvalSet {
    name: String,
    parts: Vec<TextTokens>,
}

/// The name of the set that is held out of the training data.
const HELD_OUT: &str = "held-out";

/// A part of the tokens.
enum TextTokens {
    /// One long text, from which sequences are taken at every position.
    Text(Vec<u32>),
    /// A file of tokens, and some of them for statistics.
    File(TokenFile, Vec<u32>),
    /// Documents with labels.
    Documents(Vec<LabeledTokens>),
}

/// Tokens of a file that statistics are computed from.
const SAMPLED_TOKENS: usize = 1 << 18;

impl TextTokens {
    fn count(&self) -> usize {
        match self {
            TextTokens::Text(tokens) => tokens.len(),
            TextTokens::File(file, _) => file.len(),
            TextTokens::Documents(documents) => documents.iter().map(|document| document.ids.len()).sum(),
        }
    }

    /// The tokens, or the sampled ones of a file.
    fn ids(&self) -> Box<dyn Iterator<Item = u32> + '_> {
        match self {
            TextTokens::Text(tokens) | TextTokens::File(_, tokens) => Box::new(tokens.iter().copied()),
            TextTokens::Documents(documents) => Box::new(documents.iter().flat_map(|document| &document.ids).copied()),
        }
    }

    /// The tokens that are to be predicted.
    fn targets(&self) -> Box<dyn Iterator<Item = u32> + '_> {
        match self {
            TextTokens::Text(tokens) | TextTokens::File(_, tokens) => Box::new(tokens.iter().copied()),
            TextTokens::Documents(documents) => {
                let labels = documents.iter().flat_map(|document| document.labels.iter().skip(1));
                Box::new(labels.filter_map(|&label| u32::try_from(label).ok()))
            }
        }
    }
}

impl TextTokens {
    /// Reads a file of tokens.
    fn of_file(file: TokenFile) -> Result<Self> {
        let sampled = file.spread(SAMPLED_TOKENS)?;
        Ok(TextTokens::File(file, sampled))
    }

    /// Without the last tenth, and the last tenth.
    fn split(self) -> Result<(Self, Self)> {
        Ok(match self {
            TextTokens::Text(mut tokens) => {
                let held_out = tokens.split_off(tokens.len() - tokens.len() / 10);
                (TextTokens::Text(tokens), TextTokens::Text(held_out))
            }
            TextTokens::File(file, _) => {
                let (training, held_out) = file.split_at(file.len() - file.len() / 10);
                (TextTokens::of_file(training)?, TextTokens::of_file(held_out)?)
            }
            TextTokens::Documents(mut documents) => {
                // One at least, so that there is something to evaluate on.
                let held_out = documents.split_off(documents.len() - documents.len().div_ceil(10));
                (TextTokens::Documents(documents), TextTokens::Documents(held_out))
            }
        })
    }

    fn is_documents(&self) -> bool {
        matches!(self, TextTokens::Documents(_))
    }
}

/// Reads and tokenizes a file or the files of a directory: plain texts become one part, documents become one, and each file of
/// tokens is one.
fn read_source(path: &Path, tokenizer: &Tokenizer) -> Result<Vec<TextTokens>> {
    let files = if path.is_dir() { data_files(path)? } else { vec![path.to_path_buf()] };
    let (mut text, mut documents, mut parts): (Vec<u32>, Vec<LabeledTokens>, Vec<TextTokens>) = Default::default();
    for file in &files {
        let end = file.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        match end.as_str() {
            "jsonl" => documents.extend(read_documents(file, tokenizer)?),
            "parquet" => {
                for part in Texts::open(file, "text")? {
                    let mut ids = tokenizer.encode(&part?.text)?;
                    let end = tokenizer.special().eos.first().copied();
                    let has_end = ids.last().copied() == end;
                    ids.extend(end.filter(|_| !has_end));
                    documents.push(LabeledTokens::all(ids));
                }
            }
            "bin" | "u16" | "u32" => {
                let tokens = TokenFile::open(file)?.with_vocab_size(tokenizer.vocab_size());
                parts.push(TextTokens::of_file(tokens)?);
            }
            _ => {
                // A text does not continue the one before.
                let end = tokenizer.special().eos.first().filter(|_| !text.is_empty());
                text.extend(end);
                text.extend(read_text(file, tokenizer)?);
            }
        }
    }
    if !text.is_empty() {
        parts.push(TextTokens::Text(text));
    }
    if !documents.is_empty() {
        parts.push(TextTokens::Documents(documents));
    }
    Ok(parts)
}

fn read_text(path: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let found = |what: String| {
        let found = format!("{}: {what}", path.display());
        let needed =
            "a file of UTF-8 text, of JSON lines with a name that ends with .jsonl, or of tokens that ends with .bin";
        ErrorKind::Data.error::<Error>("data", found, needed, "give another file with --data")
    };
    let bytes = read_bytes(path, MOST_TEXT_BYTES).map_err(|error| match error.kind() {
        std::io::ErrorKind::FileTooLarge => {
            let fix = "write a file of tokens with `shardwise tokenize`, and train on that";
            ErrorKind::Data.error("data", format!("{}: {error}", path.display()), "a text that fits into memory", fix)
        }
        _ => found(error.to_string()),
    })?;
    let text = String::from_utf8(bytes).map_err(|error| found(error.to_string()))?;
    tokenizer.encode_without_special(&text)
}

impl TokenizedText {
    /// Reads and tokenizes the sources, or the built-in book. Without a tokenizer in `files`, a token is a byte.
    pub(crate) fn read(data: &[DataSource], eval_data: &[PathBuf], files: TextFiles, packed: bool) -> Result<Self> {
        let tokenizer = if files.tokenizer.is_empty() { Tokenizer::bytes() } else { Tokenizer::new(&files)? };
        let packing = if packed { Packing::Packed } else { Packing::OnePerSequence };
        let weights = sources::weights(data)?;
        let mut training = match data {
            [] => vec![vec![TextTokens::Text(tokenizer.encode_without_special(BOOK)?)]],
            data => data.iter().map(|source| read_source(&source.path, &tokenizer)).collect::<Result<_>>()?,
        };
        let mut held_out = Vec::new();
        for path in eval_data {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            held_out.push(EvalSet { name, parts: read_source(path, &tokenizer)? });
        }
        if held_out.is_empty() {
            let mut parts = Vec::new();
            for source in &mut training {
                for part in std::mem::take(source) {
                    let (kept, end) = part.split()?;
                    source.push(kept);
                    parts.push(end);
                }
            }
            held_out.push(EvalSet { name: HELD_OUT.into(), parts });
        }
        let all = training.iter().flatten().chain(held_out.iter().flat_map(|set| &set.parts));
        // Texts have no borders between documents.
        let has_positions = packed && all.into_iter().all(TextTokens::is_documents);
        Ok(TokenizedText { tokenizer, files, training, weights, held_out, packing, has_positions })
    }

    /// All parts to train on.
    fn training_parts(&self) -> impl Iterator<Item = &TextTokens> {
        self.training.iter().flatten()
    }

    /// All parts to evaluate on.
    fn held_out_parts(&self) -> impl Iterator<Item = &TextTokens> {
        self.held_out.iter().flat_map(|set| &set.parts)
    }

    /// The size of the vocabulary.
    pub(crate) fn vocabulary(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// The largest token, as far as tokens are in memory.
    pub(crate) fn largest(&self) -> u32 {
        self.training_parts().chain(self.held_out_parts()).flat_map(TextTokens::ids).max().unwrap_or(0)
    }

    /// The number of training tokens and of held-out tokens.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.training_parts().map(TextTokens::count).sum(), self.held_out_parts().map(TextTokens::count).sum())
    }

    /// A hash of the tokens, with which ranks compare their texts.
    pub(crate) fn fingerprint(&self) -> u64 {
        let parts = self.training_parts().chain(self.held_out_parts());
        let all = parts.flat_map(|part| {
            part.ids().map(u64::from).chain([part.count() as u64]).chain(part.targets().map(u64::from))
        });
        all.fold(self.vocabulary() as u64, |before, number| splitmix64(before ^ number))
    }

    /// Fails if there are fewer tokens than sequences of this length need.
    pub(crate) fn check(&self, length: usize) -> Result<()> {
        for (part, is_training) in
            self.training_parts().map(|part| (part, true)).chain(self.held_out_parts().map(|part| (part, false)))
        {
            let is_short = match part {
                TextTokens::Documents(documents) => documents.is_empty(),
                TextTokens::Text(_) | TextTokens::File(..) => part.count() <= length,
            };
            if !is_short {
                continue;
            }
            let (training, held_out) = self.counts();
            if part.is_documents() {
                let held_out: usize = self.held_out_parts().filter(|part| part.is_documents()).count();
                let found = format!("{held_out} document(s), of which one is held out");
                return Err(ErrorKind::Data.error("data", found, "two at least", "add documents"));
            }
            let name = match part {
                TextTokens::File(file, _) => format!("{}: ", file.path().display()),
                _ => String::new(),
            };
            let kind = if is_training { "to train on" } else { "to evaluate on" };
            let (count, all) = (part.count(), training + held_out);
            let found = format!("{name}{count} token(s) {kind}, of {all} token(s), of which {held_out} are held out");
            let needed = format!("more than {length}, the length of a sequence, in both parts");
            return Err(ErrorKind::Data.error("data", found, needed, "use a longer text or shorter sequences"));
        }
        if self.training_parts().next().is_none() {
            return Err(ErrorKind::Data.error("data", "empty files", "tokens to train on", "use other files"));
        }
        Ok(())
    }

    /// The loss in nats per token of predicting only by token frequency.
    pub(crate) fn unigram_entropy(&self) -> f64 {
        let mut counts = vec![0u64; self.vocabulary()];
        self.training_parts().flat_map(TextTokens::targets).for_each(|token| counts[token as usize] += 1);
        let total = counts.iter().sum::<u64>().max(1) as f64;
        let term = |&count: &u64| if count == 0 { 0.0 } else { -(count as f64 / total) * (count as f64 / total).ln() };
        counts.iter().map(term).sum()
    }

    /// Batches of the training text, shuffled by the seed.
    pub(crate) fn batches(&self, mesh: &DeviceMesh, shape: BatchShape, seed: u64) -> Result<Batches<TextData>> {
        let parts = self.training.iter().map(|parts| self.sequences(parts, shape)).collect::<Result<Vec<_>>>()?;
        let mixture = match &self.weights {
            Some(weights) => Mixture::weighted(parts.into_iter().zip(weights.iter().copied()))?,
            None => Mixture::concatenated(parts)?,
        };
        batches_of(mixture, mesh, shape, seed)
    }

    /// Batches of the sets to evaluate on, always in the same order, with the names of the sets.
    pub(crate) fn held_out(&self, mesh: &DeviceMesh, shape: BatchShape) -> Result<Vec<(String, Batches<TextData>)>> {
        let set = |set: &EvalSet| {
            let mixture = Mixture::concatenated([self.sequences(&set.parts, shape)?])?;
            Ok((set.name.clone(), batches_of(mixture, mesh, shape, 0)?))
        };
        self.held_out.iter().map(set).collect()
    }

    /// The first tokens of the text to evaluate on.
    pub(crate) fn beginning(&self, count: usize) -> Vec<u32> {
        self.held_out_parts().flat_map(TextTokens::ids).take(count).collect()
    }

    /// The sequences of the parts of a source.
    fn sequences(&self, parts: &[TextTokens], shape: BatchShape) -> Result<Mixture<TextSequences>> {
        let sequences = |part: &TextTokens| {
            Ok(match part {
                TextTokens::Text(tokens) => TextSequences::Text(TokenSequences::new(tokens.as_slice(), shape.length)?),
                TextTokens::File(file, _) => TextSequences::Text(TokenSequences::of_file(file.clone(), shape.length)?),
                TextTokens::Documents(documents) => {
                    let special = self.tokenizer.special();
                    let pad = special.pad.or(special.eos.first().copied()).unwrap_or(0);
                    let packed = PackedSequences::new(documents, shape.length, pad, self.packing)?;
                    TextSequences::Documents(if self.has_positions { packed.with_positions() } else { packed })
                }
            })
        };
        Mixture::concatenated(parts.iter().map(sequences).collect::<Result<Vec<_>>>()?)
    }
}

/// Shuffled batches, sharded over the axis `dp` if there is one.
fn batches_of(data: TextData, mesh: &DeviceMesh, shape: BatchShape, seed: u64) -> Result<Batches<TextData>> {
    let batches = Batches::new(data, mesh)?.shuffle(seed).batch(shape.sequences);
    if mesh.mesh().axis("dp").is_ok() { batches.sharded("dp") } else { Ok(batches) }
}

/// The parts of sources.
pub(crate) type TextData = Mixture<Mixture<TextSequences>>;

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
