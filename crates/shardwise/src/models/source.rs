//! Where a model comes from: a directory in Hugging Face's form, or a GGUF file.

use std::path::{Path, PathBuf};

use crate::checkpoint::gguf;
use crate::error::{ErrorKind, Result};
use crate::text::{TextFiles, Tokenizer};

/// The GGUF file at a path: the file itself, or the only one in a directory without a `config.json`. Of a model in several files
/// any stands for all.
pub(super) fn gguf_file(path: &Path) -> Option<PathBuf> {
    if path.is_file() {
        return path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")).then(|| path.to_path_buf());
    }
    if path.join("config.json").exists() {
        return None;
    }
    let files = std::fs::read_dir(path).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<PathBuf> = files.filter_map(|file| gguf_file(&file).filter(|_| file.is_file())).collect();
    found.sort();
    let first = found.first()?;
    (gguf::parts_of(first) == found).then(|| first.clone())
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
    Tokenizer::new(&load_text_files(path)?)
}

/// Reads the files of a model directory that concern text, or their contents in a GGUF file. Local.
///
/// # Errors
/// [`ErrorKind::Path`] if the directory does not exist or has no `tokenizer.json`; [`ErrorKind::Damaged`] if a file is not JSON.
pub fn load_text_files(path: impl AsRef<Path>) -> Result<TextFiles> {
    let path = path.as_ref();
    let Some(file) = gguf_file(path) else {
        // Otherwise the tokenizer would be what is missing.
        if !path.is_dir() {
            let found = match path.exists() {
                true => format!("{}, a file that is not a GGUF file", path.display()),
                false => format!("no such file or directory: {}", path.display()),
            };
            let needed = "a model directory with a config.json, or a GGUF file";
            return Err(ErrorKind::path(path).error("model", found, needed, "check the path"));
        }
        return TextFiles::read(path);
    };
    let view = gguf::open_as_hf(&file)?;
    let Some(tokenizer) = view.tokenizer_json else {
        let found = format!("a GGUF file without a tokenizer: {}", file.display());
        let fix = "convert the model again, with its tokenizer";
        return Err(ErrorKind::path(file).error("tokenizer", found, "a file with `tokenizer.ggml` keys", fix));
    };
    Ok(TextFiles {
        tokenizer: tokenizer.into_bytes(),
        tokenizer_config: view.tokenizer_config,
        config: view.config,
        ..TextFiles::default()
    })
}
