//! Texts of any size to token files, in the background.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;

use rayon::prelude::*;

use super::texts::{TextPart, Texts};
use super::token_file::{TokenFile, TokenFileWriter};
use crate::error::{Error, ErrorKind, Result};
use crate::text::Tokenizer;

/// Bytes of text per thread that are in memory at a time. Their tokens take about as much.
const BYTES_PER_THREAD: usize = 2 << 20;

/// How far a [`Tokenization`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenizeProgress {
    /// Bytes of the files that have been tokenized.
    pub bytes: u64,
    /// Bytes of all files.
    pub total_bytes: u64,
    /// Tokens written.
    pub tokens: u64,
}

/// Texts that are being tokenized in the background, into a [`TokenFile`].
///
/// Local. A thread reads the texts of the files ([`Texts`]) in their order, a few megabytes at a time, and other threads tokenize them.
/// Every document is followed by the end token of the model, if it has one. The file appears when it is complete; dropping this without
/// [`wait`](Self::wait) ends the work and leaves nothing.
///
/// ```
/// use shardwise::data::{TokenFile, Tokenization};
/// use shardwise::text::Tokenizer;
///
/// let directory = std::env::temp_dir().join(format!("tokenize-{}", std::process::id()));
/// std::fs::create_dir_all(&directory)?;
/// let (text, tokens) = (directory.join("a.txt"), directory.join("a.bin"));
/// std::fs::write(&text, "some text")?;
/// let running = Tokenization::start(vec![text], "text", Tokenizer::bytes(), &tokens, 2)?;
/// assert!(running.progress().total_bytes == 9);
/// assert_eq!(running.wait()?.len(), 9);
/// # std::fs::remove_dir_all(directory)?;
/// # Ok::<(), shardwise::Error>(())
/// ```
pub struct Tokenization {
    state: Arc<TokenizeState>,
    thread: Option<JoinHandle<Result<()>>>,
    path: PathBuf,
}

#[derive(Default)]
struct TokenizeState {
    bytes: AtomicU64,
    total: AtomicU64,
    tokens: AtomicU64,
    is_cancelled: AtomicBool,
}

impl Tokenization {
    /// Starts to tokenize files on some threads. `field` names the field of JSON lines or the column of Parquet that has the texts.
    ///
    /// # Errors
    /// [`ErrorKind::Path`] if a file cannot be read or the token file cannot be written. What is wrong inside files is reported by
    /// [`wait`](Self::wait).
    pub fn start(
        files: Vec<PathBuf>,
        field: &str,
        tokenizer: Tokenizer,
        to: impl AsRef<Path>,
        threads: usize,
    ) -> Result<Self> {
        let path = to.as_ref().to_path_buf();
        let state = Arc::new(TokenizeState::default());
        for file in &files {
            Texts::open(file, field)?;
            state.total.fetch_add(std::fs::metadata(file)?.len(), Relaxed);
        }
        let writer = TokenFileWriter::create(&path, tokenizer.vocab_size())?;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|i| format!("tokenize {i}"))
            .build()
            .map_err(Error::other)?;
        let (shared, field) = (state.clone(), field.to_string());
        let work = move || tokenize(&files, &field, &tokenizer, writer, &pool, &shared);
        let thread = std::thread::Builder::new().name("tokenize".into()).spawn(work).map_err(Error::other)?;
        Ok(Tokenization { state, thread: Some(thread), path })
    }

    /// How far it is.
    pub fn progress(&self) -> TokenizeProgress {
        let TokenizeState { bytes, total, tokens, .. } = &*self.state;
        TokenizeProgress { bytes: bytes.load(Relaxed), total_bytes: total.load(Relaxed), tokens: tokens.load(Relaxed) }
    }

    /// Whether it has ended, so that [`wait`](Self::wait) returns at once.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the end, and opens the token file.
    ///
    /// # Errors
    /// [`ErrorKind::Data`] with file and line of a text that cannot be read or tokenized, [`ErrorKind::Path`] if the token file cannot be
    /// written.
    pub fn wait(mut self) -> Result<TokenFile> {
        let thread = self.thread.take().expect("waited for once");
        thread.join().map_err(|_| Error::other("the tokenizer panicked"))??;
        TokenFile::open(&self.path)
    }
}

impl Drop for Tokenization {
    fn drop(&mut self) {
        self.state.is_cancelled.store(true, Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

fn tokenize(
    files: &[PathBuf],
    field: &str,
    tokenizer: &Tokenizer,
    mut writer: TokenFileWriter,
    pool: &rayon::ThreadPool,
    state: &TokenizeState,
) -> Result<()> {
    let end = tokenizer.special().eos.first().copied();
    let most = BYTES_PER_THREAD * pool.current_num_threads();
    let mut before = 0;
    for file in files {
        let mut texts = Texts::open(file, field)?;
        let (mut is_first_part, has_documents) = (true, texts.has_documents());
        loop {
            let (mut parts, mut bytes) = (Vec::new(), 0);
            while bytes < most
                && let Some(part) = texts.next()
            {
                let part = part?;
                bytes += part.text.len();
                parts.push(part);
            }
            let Some(read) = parts.last().map(|part| part.bytes) else { break };
            // Only a document in one part gets the tokens that the model expects around a text.
            let whole: Vec<bool> =
                parts.iter().map(|part| std::mem::replace(&mut is_first_part, part.is_end) && part.is_end).collect();
            let encode = |(part, is_whole): (&TextPart, bool)| -> Result<Vec<u32>> {
                let mut ids = match is_whole && has_documents {
                    true => tokenizer.encode(&part.text)?,
                    false => tokenizer.encode_without_special(&part.text)?,
                };
                let has_end = ids.last().copied() == end;
                ids.extend(end.filter(|_| part.is_end && !has_end));
                Ok(ids)
            };
            let tokens: Result<Vec<Vec<u32>>> = pool.install(|| parts.par_iter().zip(whole).map(encode).collect());
            let tokens = tokens.map_err(|error| {
                let found = format!("{}: {}", file.display(), error.found());
                ErrorKind::Data.error::<Error>("data", found, "text that the tokenizer takes", "check the tokenizer")
            })?;
            for tokens in &tokens {
                writer.push(tokens)?;
                state.tokens.fetch_add(tokens.len() as u64, Relaxed);
            }
            state.bytes.store(before + read, Relaxed);
            if state.is_cancelled.load(Relaxed) {
                return Ok(());
            }
        }
        before += std::fs::metadata(file)?.len();
        state.bytes.store(before, Relaxed);
    }
    writer.finish()
}
