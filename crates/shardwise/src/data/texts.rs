//! Texts of files of any size, one document or a part of one at a time.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::conversations::MOST_LINE_BYTES;
#[cfg(feature = "parquet")]
use super::parquet_texts::ParquetTexts;
use crate::error::{Error, ErrorKind, Result};
use crate::read_file::open_file;

/// Bytes after which a plain text is divided at the next end of a line: enough for a tokenizer to be fast, little memory.
const PIECE_BYTES: usize = 1 << 20;

/// The ends of names of files with data.
const DATA_ENDS: [&str; 6] = ["jsonl", "txt", "parquet", "bin", "u16", "u32"];

/// The files of a path: itself, or the files of a directory whose names end as those of data do (`.jsonl`, `.txt`, `.parquet`, `.bin`,
/// `.u16`, `.u32`), in the order of their names. Hidden files are left out. Local.
///
/// # Errors
/// [`ErrorKind::Path`] if there is nothing, or a directory without such files.
pub fn data_files(path: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
    let path = path.as_ref();
    let bad = |found: String| -> Error {
        let needed = format!("a file, or a directory with files that end with .{}", DATA_ENDS.join(", ."));
        ErrorKind::path(path).error("data", format!("{}: {found}", path.display()), needed, "check the path")
    };
    let kind = std::fs::metadata(path).map_err(|error| bad(error.to_string()))?;
    if !kind.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(|error| bad(error.to_string()))? {
        let file = entry.map_err(|error| bad(error.to_string()))?.path();
        let is_hidden = file.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        let has_data =
            file.extension().is_some_and(|end| DATA_ENDS.iter().any(|known| end.eq_ignore_ascii_case(known)));
        if has_data && !is_hidden && !file.is_dir() {
            files.push(file);
        }
    }
    files.sort();
    if files.is_empty() { Err(bad("a directory without data".into())) } else { Ok(files) }
}

/// A document, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextPart {
    /// The text.
    pub text: String,
    /// Whether the document ends here.
    pub is_end: bool,
    /// Bytes of the file up to here.
    pub bytes: u64,
}

/// The texts of a file, one at a time: a field of JSON lines (`.jsonl`), a column of Parquet (`.parquet`, with the feature `parquet`),
/// else one plain text.
///
/// A plain text comes in parts of about a megabyte that end between two lines, neither of which begins or ends with a space, so that
/// tokenizers that divide texts at words give the tokens of the whole text.
///
/// ```
/// use shardwise::data::Texts;
///
/// let path = std::env::temp_dir().join(format!("texts-{}.jsonl", std::process::id()));
/// std::fs::write(&path, "{\"text\": \"one\"}\n{\"text\": \"two\", \"id\": 2}\n")?;
/// let texts: Vec<String> = Texts::open(&path, "text")?.map(|part| Ok(part?.text)).collect::<shardwise::Result<_>>()?;
/// assert_eq!(texts, ["one", "two"]);
/// # std::fs::remove_file(path)?;
/// # Ok::<(), shardwise::Error>(())
/// ```
pub struct Texts {
    path: PathBuf,
    source: TextSource,
    bytes: u64,
    /// Lines read so far.
    lines: u64,
    is_over: bool,
}

enum TextSource {
    Lines(BufReader<File>, String),
    Plain(BufReader<File>),
    #[cfg(feature = "parquet")]
    Parquet(ParquetTexts),
}

impl Texts {
    /// Opens a file, with the name of the field or column of texts.
    ///
    /// # Errors
    /// [`ErrorKind::Path`] if it is not a regular file that can be read; [`ErrorKind::Data`] for Parquet without the column, or
    /// without the feature.
    pub fn open(path: impl AsRef<Path>, field: &str) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let ends = |end: &str| path.extension().is_some_and(|own| own.eq_ignore_ascii_case(end));
        let file = open_file(&path).map_err(|error| unreadable(&path, &error))?;
        let source = if ends("parquet") {
            #[cfg(not(feature = "parquet"))]
            {
                let found = format!("{}, in a program without the feature `parquet`", path.display());
                let fix = "build with `--features parquet`, or convert the file to JSON lines";
                return Err(ErrorKind::Data.error("data", found, "JSON lines or plain text", fix));
            }
            #[cfg(feature = "parquet")]
            TextSource::Parquet(ParquetTexts::open(file, &path, field)?)
        } else if ends("jsonl") {
            TextSource::Lines(BufReader::new(file), field.to_string())
        } else {
            TextSource::Plain(BufReader::new(file))
        };
        Ok(Texts { path, source, bytes: 0, lines: 0, is_over: false })
    }

    /// Whether each text is a document of its own, and not a part of the file.
    pub(super) fn has_documents(&self) -> bool {
        !matches!(self.source, TextSource::Plain(_))
    }

    fn next_part(&mut self) -> Result<Option<TextPart>> {
        let (path, lines, total) = (&self.path, &mut self.lines, &mut self.bytes);
        let bad = |number: u64, found: &dyn std::fmt::Display| -> Error {
            let found = format!("{}, line {number}: {found}", path.display());
            ErrorKind::Data.error(
                "data",
                found,
                "lines of UTF-8 text, or JSON objects with the field",
                "correct the line",
            )
        };
        match &mut self.source {
            TextSource::Lines(file, field) => loop {
                let Some(line) = next_line(file, path)? else { return Ok(None) };
                (*lines, *total) = (*lines + 1, *total + line.len() as u64);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                let object: serde_json::Map<String, serde_json::Value> =
                    serde_json::from_slice(&line).map_err(|error| bad(*lines, &error))?;
                return match object.get(field) {
                    Some(serde_json::Value::String(text)) => {
                        Ok(Some(TextPart { text: text.clone(), is_end: true, bytes: *total }))
                    }
                    Some(_) => Err(bad(*lines, &format!("`{field}` is not a string"))),
                    None => {
                        let known = object.keys().map(|name| format!("`{name:.40}`"));
                        let found = format!("no `{field}` among {}", crate::error::listed(known));
                        Err(bad(*lines, &found))
                    }
                };
            },
            TextSource::Plain(file) => {
                let mut piece = Vec::new();
                loop {
                    let Some(line) = next_line(file, path)? else { break };
                    (*lines, *total) = (*lines + 1, *total + line.len() as u64);
                    piece.extend_from_slice(&line);
                    let next = file.fill_buf().map_err(|error| unreadable(path, &error))?.first();
                    let is_between = line.ends_with(b"\n")
                        && line.len() > 1
                        && !line[line.len() - 2].is_ascii_whitespace()
                        && next.is_some_and(|next| !next.is_ascii_whitespace());
                    if piece.len() >= PIECE_BYTES && is_between {
                        break;
                    }
                    if piece.len() as u64 > MOST_LINE_BYTES {
                        return Err(bad(*lines, &format!("no end of a paragraph in {MOST_LINE_BYTES} bytes")));
                    }
                }
                let is_end = file.fill_buf().map_err(|error| unreadable(path, &error))?.is_empty();
                let text = String::from_utf8(piece).map_err(|error| bad(*lines, &error.utf8_error()))?;
                self.is_over = is_end;
                Ok(Some(TextPart { text, is_end, bytes: *total }))
            }
            #[cfg(feature = "parquet")]
            TextSource::Parquet(texts) => {
                let next = texts.next_text()?;
                Ok(next.map(|(text, bytes)| TextPart { text, is_end: true, bytes }))
            }
        }
    }
}

/// The next line with its end, of at most [`MOST_LINE_BYTES`]; none at the end of the file.
fn next_line(file: &mut BufReader<File>, path: &Path) -> Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let read = file.take(MOST_LINE_BYTES + 1).read_until(b'\n', &mut line).map_err(|error| unreadable(path, &error))?;
    if read as u64 > MOST_LINE_BYTES {
        let found = format!("{}: a line of more than {MOST_LINE_BYTES} bytes", path.display());
        return Err(ErrorKind::Data.error("data", found, "lines that fit into memory", "divide the line"));
    }
    Ok((read > 0).then_some(line))
}

impl Iterator for Texts {
    type Item = Result<TextPart>;

    fn next(&mut self) -> Option<Result<TextPart>> {
        if self.is_over {
            return None;
        }
        let next = self.next_part().transpose();
        // After an error the position in the file is unknown.
        self.is_over |= matches!(next, None | Some(Err(_)));
        next
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    let found = format!("{}: {error}", path.display());
    ErrorKind::path(path).error("data", found, "a file that can be read", "check the path")
}
