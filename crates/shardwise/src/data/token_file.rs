//! Files of token ids, which may be larger than memory.
//!
//! Ranges are read with positional reads and not through a mapping of the file: a mapped file that another program shortens ends the
//! process with a signal, where a read returns an error, and pages of a mapping count as memory of the process. Both copy from the
//! page cache.

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::read_file::open_file;

/// The integers that tokens are stored as, in little-endian order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    /// 2 bytes, for vocabularies of up to 65536 tokens.
    U16,
    /// 4 bytes.
    U32,
}

impl TokenType {
    /// The narrowest type for a vocabulary.
    pub fn for_vocab(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 { TokenType::U16 } else { TokenType::U32 }
    }

    fn bytes(self) -> usize {
        match self {
            TokenType::U16 => 2,
            TokenType::U32 => 4,
        }
    }

    /// The numbers that a header begins with, those of llm.c.
    fn magic(self) -> [u32; 2] {
        match self {
            TokenType::U16 => [20_240_520, 1],
            TokenType::U32 => [20_240_801, 7],
        }
    }
}

/// Bytes of a header: 256 integers, of which all but the first four are 0.
const HEADER_BYTES: usize = 1024;

/// Tokens at the beginning of a file that show whether its type can be right.
const CHECKED_TOKENS: usize = 4096;

/// A file of token ids of which ranges are read when they are needed.
///
/// Reads what nanoGPT writes (u16 without a header, `.bin`), what llm.c writes (a header of 1024 bytes, then u16 or u32), and what
/// [`TokenFileWriter`] writes, which is llm.c's form. A file without a header has u32 if its name ends with `.u32` or `.u32.bin`, else
/// u16. Local: only the bytes of a range are read, and nothing stays in memory.
///
/// ```
/// use shardwise::data::{Dataset, TokenFile, TokenFileWriter, TokenSequences};
///
/// let path = std::env::temp_dir().join(format!("tokens-{}.bin", std::process::id()));
/// let mut writer = TokenFileWriter::create(&path, 100)?;
/// writer.push(&[5, 6, 7, 8, 9])?;
/// writer.finish()?;
/// let file = TokenFile::open(&path)?;
/// assert_eq!((file.len(), file.read(1..4)?), (5, vec![6, 7, 8]));
/// assert_eq!(TokenSequences::of_file(file, 2)?.len(), 2);
/// # std::fs::remove_file(path)?;
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "memmap")]
#[derive(Debug, Clone)]
pub struct TokenFile {
    file: Arc<File>,
    path: Arc<Path>,
    token_type: TokenType,
    /// Bytes before the first token of the file.
    header: usize,
    /// The tokens of the file that this is about.
    range: Range<usize>,
    vocab_size: usize,
}

impl TokenFile {
    /// Opens a file.
    ///
    /// # Errors
    /// [`ErrorKind::Path`] if it is not a regular file that can be read, [`ErrorKind::Data`] if its size does not fit its type or its
    /// header, or if it has no header and its first tokens, read as u16, look like u32.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (file, bytes) = opened(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let is_wide = name.ends_with(".u32") || name.ends_with(".u32.bin");
        let raw = if is_wide { TokenType::U32 } else { TokenType::U16 };
        let mut first = [0u8; 16];
        if bytes >= HEADER_BYTES {
            file.read_exact_at(&mut first, 0).map_err(|error| unreadable(path, &error))?;
        }
        let [magic, version, low, high] =
            std::array::from_fn(|i| u32::from_le_bytes(first[4 * i..][..4].try_into().expect("4 bytes")));
        let written = [TokenType::U16, TokenType::U32].into_iter().find(|kind| kind.magic() == [magic, version]);
        let (token_type, header) = written.map_or((raw, 0), |kind| (kind, HEADER_BYTES));
        let (count, rest) = ((bytes - header) / token_type.bytes(), (bytes - header) % token_type.bytes());
        let stated = written.map(|_| u64::from(low) | u64::from(high) << 32);
        if rest != 0 || stated.is_some_and(|stated| stated != count as u64) {
            let stated = stated
                .map_or("a multiple of the size of a token".into(), |n| format!("{n} tokens, as its header says"));
            let found = format!("{}: {bytes} bytes, {count} tokens of {} bytes", path.display(), token_type.bytes());
            let fix = "copy the file again; a file of u32 without a header needs a name that ends with .u32.bin";
            return Err(ErrorKind::Data.error("token file", found, stated, fix));
        }
        let path = Arc::from(path);
        let file =
            TokenFile { file: Arc::new(file), path, token_type, header, range: 0..count, vocab_size: usize::MAX };
        if header == 0 && token_type == TokenType::U16 {
            file.check_width()?;
        }
        Ok(file)
    }

    /// Refuses what looks like u32: small ids have zeros in every second place.
    fn check_width(&self) -> Result<()> {
        let first = self.read(0..self.len().min(CHECKED_TOKENS))?;
        let odd = first.iter().skip(1).step_by(2);
        if first.len() < 16 || odd.clone().any(|&token| token != 0) || first.iter().all(|&token| token == 0) {
            return Ok(());
        }
        let found = format!("{}: every second token of the first {} is 0", self.path.display(), first.len());
        let fix = "give a file of u32 a name that ends with .u32.bin";
        Err(ErrorKind::Data.error("token file", found, "tokens of u16", fix))
    }

    /// Refuses tokens that are not below the size of the vocabulary, when they are read.
    #[must_use]
    pub fn with_vocab_size(self, vocab_size: usize) -> Self {
        TokenFile { vocab_size, ..self }
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The path that the file was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Splits into the tokens before a position and those from there on.
    ///
    /// # Panics
    /// If there are fewer tokens.
    pub fn split_at(&self, position: usize) -> (Self, Self) {
        assert!(position <= self.len(), "position {position} of {} tokens", self.len());
        let at = self.range.start + position;
        let part = |range: Range<usize>| TokenFile { range, ..self.clone() };
        (part(self.range.start..at), part(at..self.range.end))
    }

    /// Reads a range of tokens.
    ///
    /// # Errors
    /// [`ErrorKind::Path`] if the file has become shorter or cannot be read, [`ErrorKind::Data`] for a token that is not in the vocabulary.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<u32>> {
        let width = self.token_type.bytes();
        let mut bytes = vec![0u8; range.len() * width];
        let at = self.header + (self.range.start + range.start) * width;
        self.file.read_exact_at(&mut bytes, at as u64).map_err(|error| unreadable(&self.path, &error))?;
        let tokens: Vec<u32> = match self.token_type {
            TokenType::U16 => bytes.as_chunks().0.iter().map(|&pair| u32::from(u16::from_le_bytes(pair))).collect(),
            TokenType::U32 => bytes.as_chunks().0.iter().map(|&four| u32::from_le_bytes(four)).collect(),
        };
        match tokens.iter().position(|&token| token as usize >= self.vocab_size) {
            None => Ok(tokens),
            Some(at) => {
                let (token, at) = (tokens[at], self.range.start + range.start + at);
                let found = format!("{}: token {token} at position {at}", self.path.display());
                let needed = format!("tokens below {}, the size of the vocabulary", self.vocab_size);
                Err(ErrorKind::Data.error(
                    "token file",
                    found,
                    needed,
                    "use the tokenizer that the file was written with",
                ))
            }
        }
    }

    /// Reads blocks that are evenly spread over the file, of `tokens` tokens in all; the whole file if it has no more. For statistics.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn spread(&self, tokens: usize) -> Result<Vec<u32>> {
        if self.len() <= tokens {
            return self.read(0..self.len());
        }
        let block = CHECKED_TOKENS.min(tokens).max(1);
        let blocks = (tokens / block).max(1);
        let mut all = Vec::with_capacity(blocks * block);
        for i in 0..blocks {
            let start = (self.len() - block) / blocks.max(2).saturating_sub(1) * i;
            all.extend(self.read(start..start + block)?);
        }
        Ok(all)
    }
}

fn opened(path: &Path) -> Result<(File, usize)> {
    let file = open_file(path).map_err(|error| unreadable(path, &error))?;
    let bytes = file.metadata().map_err(|error| unreadable(path, &error))?.len();
    Ok((file, bytes as usize))
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    let found = format!("{}: {error}", path.display());
    ErrorKind::path(path).error(
        "token file",
        found,
        "a file of tokens that does not change",
        "check the path and the file",
    )
}

/// Writes a [`TokenFile`] of any size; it appears under its name when it is finished.
#[derive(Debug)]
pub struct TokenFileWriter {
    file: BufWriter<File>,
    path: PathBuf,
    unfinished: PathBuf,
    token_type: TokenType,
    count: u64,
}

impl TokenFileWriter {
    /// Begins a file for tokens of a vocabulary.
    ///
    /// # Errors
    /// [`ErrorKind::Path`] if it cannot be written.
    pub fn create(path: impl AsRef<Path>, vocab_size: usize) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let unfinished = path.with_file_name(format!(".{name}.{}.unfinished", std::process::id()));
        let mut file = BufWriter::new(File::create(&unfinished).map_err(|error| unwritable(&path, &error))?);
        // Replaced by the header at the end.
        file.write_all(&[0; HEADER_BYTES]).map_err(|error| unwritable(&path, &error))?;
        Ok(TokenFileWriter { file, path, unfinished, token_type: TokenType::for_vocab(vocab_size), count: 0 })
    }

    /// Appends tokens.
    ///
    /// # Errors
    /// [`ErrorKind::Path`] if they cannot be written, [`ErrorKind::Data`] for a token that does not fit the type of the file.
    pub fn push(&mut self, tokens: &[u32]) -> Result<()> {
        for &token in tokens {
            let bytes = token.to_le_bytes();
            if self.token_type == TokenType::U16 && token > u32::from(u16::MAX) {
                let needed = "tokens below 65536, the size of the vocabulary";
                return Err(ErrorKind::Data.error("token file", token, needed, "state the size of the vocabulary"));
            }
            let written = self.file.write_all(&bytes[..self.token_type.bytes()]);
            written.map_err(|error| unwritable(&self.path, &error))?;
        }
        self.count += tokens.len() as u64;
        Ok(())
    }

    /// Writes the header, waits until the file is on disk and gives it its name, in place of a file of that name.
    ///
    /// # Errors
    /// [`ErrorKind::Path`] if the disk is full or the name is that of a directory.
    pub fn finish(mut self) -> Result<()> {
        let [magic, version] = self.token_type.magic();
        let header = [magic, version, self.count as u32, (self.count >> 32) as u32];
        let header: Vec<u8> = header.into_iter().flat_map(u32::to_le_bytes).collect();
        let mut finish = || -> std::io::Result<()> {
            self.file.seek(SeekFrom::Start(0))?;
            self.file.write_all(&header)?;
            self.file.flush()?;
            self.file.get_ref().sync_all()?;
            std::fs::rename(&self.unfinished, &self.path)
        };
        finish().map_err(|error| unwritable(&self.path, &error))
    }
}

impl Drop for TokenFileWriter {
    fn drop(&mut self) {
        // Gone if it was finished.
        let _ = std::fs::remove_file(&self.unfinished);
    }
}

fn unwritable(path: &Path, error: &std::io::Error) -> Error {
    let found = format!("{}: {error}", path.display());
    ErrorKind::path(path).error(
        "token file",
        found,
        "a path that can be written",
        "free disk space or name another file",
    )
}
