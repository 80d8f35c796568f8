//! The files of a model directory that concern text.

use std::path::Path;

use serde_json::Value;

use crate::error::{Error, ErrorKind, Result};
use crate::read_file::{MOST_CONFIG_BYTES, read_bytes};

/// Largest `tokenizer.json`: four times the largest one in use, of a vocabulary of 262,144 tokens.
const MOST_TOKENIZER_BYTES: u64 = 128 << 20;

/// The files of a model directory that concern text, unparsed or as JSON.
///
/// A missing file is empty or [`Value::Null`]. Formats that store a tokenizer in another way build one of these.
#[derive(Debug, Clone, Default)]
pub struct TextFiles {
    /// `tokenizer.json` of the tokenizers library.
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`: texts of special tokens, chat template.
    pub tokenizer_config: Value,
    /// `config.json`: ids of special tokens, among the sizes of the model.
    pub config: Value,
    /// `generation_config.json`: ids of special tokens for generation, which win over those of `config.json`.
    pub generation_config: Value,
    /// `chat_template.jinja`, which wins over the template of `tokenizer_config`.
    pub chat_template: Option<String>,
}

impl TextFiles {
    /// Names of the files in a directory that [`write`](Self::write) writes.
    pub const NAMES: [&str; 4] =
        ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"];

    /// Writes the files that are not missing into an existing directory, except for `config.json`, which belongs to the
    /// weights. Local.
    ///
    /// # Errors
    /// [`ErrorKind::Path`] if a file cannot be written.
    pub fn write(&self, directory: impl AsRef<Path>) -> Result<()> {
        for (name, content) in self.contents() {
            let path = directory.as_ref().join(name);
            std::fs::write(&path, content).map_err(|error| {
                let found = format!("{}: {error}", path.display());
                ErrorKind::path(&path).error::<Error>("output file", found, "a writable path", "choose another")
            })?;
        }
        Ok(())
    }

    /// Reads the files of a directory. Local.
    ///
    /// # Errors
    /// [`ErrorKind::Path`] if there is no `tokenizer.json` or a file cannot be read, [`ErrorKind::Damaged`] if one is too large
    /// or no JSON.
    pub fn read(directory: impl AsRef<Path>) -> Result<Self> {
        let directory = directory.as_ref();
        let tokenizer = directory.join("tokenizer.json");
        let Some(bytes) = read_bounded(&tokenizer, MOST_TOKENIZER_BYTES)? else {
            let found = format!("no file {}", tokenizer.display());
            let fix = "add the file, such as with `save_pretrained` of a fast tokenizer, or choose another directory";
            return Err(ErrorKind::path(tokenizer).error("tokenizer", found, "a tokenizer.json", fix));
        };
        let template = directory.join("chat_template.jinja");
        let chat_template = match read_bounded(&template, MOST_CONFIG_BYTES)? {
            None => None,
            Some(bytes) => {
                Some(String::from_utf8(bytes).map_err(|error| damaged(&template, &error.to_string(), "UTF-8 text"))?)
            }
        };
        Ok(TextFiles {
            tokenizer: bytes,
            tokenizer_config: read_json(&directory.join("tokenizer_config.json"))?,
            config: read_json(&directory.join("config.json"))?,
            generation_config: read_json(&directory.join("generation_config.json"))?,
            chat_template,
        })
    }
}

/// The value of a JSON file, `Null` if there is none.
fn read_json(path: &Path) -> Result<Value> {
    let Some(bytes) = read_bounded(path, MOST_CONFIG_BYTES)? else { return Ok(Value::Null) };
    serde_json::from_slice(&bytes).map_err(|error| damaged(path, &error.to_string(), "JSON"))
}

/// The bytes of a file, `None` if there is none.
pub(super) fn read_bounded(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    let unreadable = |error: &std::io::Error| {
        let found = format!("{}: {error}", path.display());
        ErrorKind::path(path).error("file", found, "a readable file", "check the path and its permissions")
    };
    match read_bytes(path, most) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::FileTooLarge => {
            Err(damaged(path, &error.to_string(), &format!("at most {most} bytes")))
        }
        Err(error) => Err(unreadable(&error)),
    }
}

/// The error of a file that is not what its name says.
pub(super) fn damaged(path: &Path, problem: &str, needed: &str) -> crate::error::Error {
    let found = format!("{}: {problem}", path.display());
    ErrorKind::Damaged.error("file of the model", found, needed, "restore the file")
}
