//! Where a model comes from: a directory in Hugging Face's form, or a GGUF file.

use std::path::{Path, PathBuf};

use crate::checkpoint::gguf;
use crate::error::{ErrorKind, Result};
use crate::text::{TextFiles, Tokenizer};

/// The GGUF file at a path: the file itself, or the only one in a directory without a `config.json`.
pub(super) fn gguf_file(path: &Path) -> Option<PathBuf> {
    if path.is_file() {
        return path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")).then(|| path.to_path_buf());
    }
    if path.join("config.json").exists() {
        return None;
    }
    let files = std::fs::read_dir(path).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found = files.filter_map(|file| gguf_file(&file).filter(|_| file.is_file()));
    found.next().filter(|_| found.next().is_none())
}

/// Reads the tokenizer of a model directory, or that in a GGUF file. Local.
///
/// # Errors
/// [`ErrorKind::Path`] if the directory does not exist or has no `tokenizer.json`, and those of [`Tokenizer::new`].
///
/// ```no_run
/// let tokenizer = shardwise::models::load_tokenizer("path/to/model")?;
/// let ids = tokenizer.encode("Hello")?;
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "AutoTokenizer")]
pub fn load_tokenizer(path: impl AsRef<Path>) -> Result<Tokenizer> {
    let path = path.as_ref();
    let Some(file) = gguf_file(path) else { return Tokenizer::from_dir(path) };
    let view = gguf::open_as_hf(&file)?;
    let Some(tokenizer) = view.tokenizer_json else {
        let found = format!("a GGUF file without a tokenizer: {}", file.display());
        let fix = "convert the model again, with its tokenizer";
        return Err(ErrorKind::path(file).error("tokenizer", found, "a file with `tokenizer.ggml` keys", fix));
    };
    Tokenizer::new(&TextFiles {
        tokenizer: tokenizer.into_bytes(),
        tokenizer_config: view.tokenizer_config,
        config: view.config,
        ..TextFiles::default()
    })
}
