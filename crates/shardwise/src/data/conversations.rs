//! Conversations and completions as tokens with labels, from JSON lines.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::Deserialize;

use crate::error::{Error, ErrorKind, Result, listed};
use crate::read_file::open_file;
use crate::text::{ChatOptions, Message, Tokenizer};

/// The label of a token that is not to be predicted; PyTorch's and transformers' `ignore_index`.
pub const IGNORED_LABEL: i64 = -100;

/// Tokens of a document, and for each the label that a model has to predict there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabeledTokens {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The token itself where it counts in the loss, else [`IGNORED_LABEL`]. Not shifted: label `t` belongs to token `t`.
    pub labels: Vec<i64>,
}

impl LabeledTokens {
    /// Tokens that all count in the loss.
    pub fn all(ids: Vec<u32>) -> Self {
        let labels = ids.iter().map(|&id| i64::from(id)).collect();
        LabeledTokens { ids, labels }
    }

    /// Encodes a conversation with the chat template of the model; the answers of the assistant count in the loss, with the
    /// token that ends each of them.
    ///
    /// The template renders the messages before every answer, with the beginning of an answer, and the messages up to it; what
    /// the second text has more is the answer.
    ///
    /// # Errors
    /// [`ErrorKind::Data`] if the template refuses the messages, or renders the beginning of a conversation differently
    /// from the whole one, and if no message is of the assistant.
    pub fn conversation(tokenizer: &Tokenizer, messages: &[Message], tools: Option<&str>) -> Result<Self> {
        let render = |count: usize, add_generation_prompt: bool| {
            let tools = tools.map(str::to_string);
            let options = ChatOptions { add_generation_prompt, tools, ..ChatOptions::default() };
            tokenizer.chat_text(&messages[..count], &options)
        };
        let whole = render(messages.len(), false)?;
        let mut answers = Vec::new();
        for (i, _) in messages.iter().enumerate().filter(|(_, message)| message.role() == "assistant") {
            let (before, upto) = (render(i, true)?, render(i + 1, false)?);
            if !whole.starts_with(&upto) {
                let found = format!("a chat template that changes message {i} when messages follow it");
                let fix = "train on conversations that end with this message";
                return Err(ErrorKind::Data.error("conversation", found, "a text that only grows", fix));
            }
            let start = common_prefix(&before, &upto);
            let answer = upto[start..].trim_end();
            let ends = tokenizer.special().text("eos_token").is_some_and(|end| answer.ends_with(end));
            // Line feeds after the end token are written by the template, never by the model.
            answers.push(start..if ends { start + answer.len() } else { upto.len() });
        }
        if answers.is_empty() {
            let needed = "at least one message of the assistant";
            return Err(ErrorKind::Data.error("conversation", "no answer", needed, "leave it out"));
        }
        let tokens = tokenizer.encode_with_offsets(&whole, false)?;
        let counts = |at: &std::ops::Range<usize>| {
            !at.is_empty() && answers.iter().any(|answer| answer.contains(&at.start) && at.end <= answer.end)
        };
        let labels = tokens.iter().map(|(id, at)| if counts(at) { i64::from(*id) } else { IGNORED_LABEL }).collect();
        Ok(LabeledTokens { ids: tokens.into_iter().map(|(id, _)| id).collect(), labels })
    }

    /// Encodes a prompt and its completion, followed by the end token of the model; the completion counts in the loss.
    ///
    /// # Errors
    /// [`ErrorKind::Data`] if the completion is empty, or the tokenizer fails.
    pub fn completion(tokenizer: &Tokenizer, prompt: &str, completion: &str) -> Result<Self> {
        if completion.is_empty() {
            return Err(ErrorKind::Data.error("completion", "an empty text", "a text", "leave it out"));
        }
        let tokens = tokenizer.encode_with_offsets(&format!("{prompt}{completion}"), true)?;
        // Special tokens that the model expects around a text have no place in it.
        let counts = |at: &std::ops::Range<usize>| !at.is_empty() && at.start >= prompt.len();
        let mut found = LabeledTokens { ids: Vec::new(), labels: Vec::new() };
        for (id, at) in &tokens {
            found.ids.push(*id);
            found.labels.push(if counts(at) { i64::from(*id) } else { IGNORED_LABEL });
        }
        found.end(tokenizer);
        Ok(found)
    }

    /// Adds the end token of the model, unless the tokenizer has added it; it counts in the loss.
    fn end(&mut self, tokenizer: &Tokenizer) {
        let Some(&end) = tokenizer.special().eos.first() else { return };
        if self.ids.last() == Some(&end) {
            self.labels.pop();
        } else {
            self.ids.push(end);
        }
        self.labels.push(i64::from(end));
    }
}

/// A line of a file: a conversation, a completion or a text.
#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct DocumentLine {
    messages: Option<Vec<Message>>,
    tools: Option<Box<serde_json::value::RawValue>>,
    prompt: Option<String>,
    completion: Option<String>,
    text: Option<String>,
}

/// The fields of a line that is not a document, as an error names them.
fn fields_of(line: &str) -> String {
    let fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line).unwrap_or_default();
    match fields.is_empty() {
        true => "an object without fields".to_string(),
        false => format!("an object with only {}", listed(fields.keys().map(|name| format!("`{name:.40}`")))),
    }
}

/// Largest line: a document of a few million tokens. A file without line ends would become memory as a whole.
pub(super) const MOST_LINE_BYTES: u64 = 64 << 20;

/// Reads a file of JSON lines: conversations `{"messages": [...]}`, optionally with `tools`, completions
/// `{"prompt": ..., "completion": ...}`, and plain texts `{"text": ...}`, of which all tokens count in the loss. Local.
///
/// # Errors
/// [`ErrorKind::Path`] if the file cannot be read; [`ErrorKind::Data`] with the number of the line that is wrong, or if
/// there is none.
pub fn read_documents(path: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<Vec<LabeledTokens>> {
    let path = path.as_ref();
    let unreadable = |error: &std::io::Error| -> Error {
        let found = format!("{}: {error}", path.display());
        ErrorKind::path(path).error("data", found, "a file of JSON lines", "check the path")
    };
    let bad = |number: usize, found: &dyn std::fmt::Display| -> Error {
        let found = format!("{}, line {number}: {found}", path.display());
        let needed = "an object with `messages`, with `prompt` and `completion`, or with `text`";
        ErrorKind::Data.error("data", found, needed, "correct the line")
    };
    let mut file = BufReader::new(open_file(path).map_err(|error| unreadable(&error))?);
    let mut documents = Vec::new();
    for i in 0.. {
        let mut line = String::new();
        let read = (&mut file).take(MOST_LINE_BYTES + 1).read_line(&mut line).map_err(|error| unreadable(&error))?;
        if read as u64 > MOST_LINE_BYTES {
            return Err(bad(i + 1, &format!("more than {MOST_LINE_BYTES} bytes in one line")));
        }
        if read == 0 {
            break;
        }
        if line.trim().is_empty() {
            continue;
        }
        if !line.trim_start().starts_with('{') {
            return Err(bad(i + 1, &"a line that is not a JSON object"));
        }
        let DocumentLine { messages, tools, prompt, completion, text } =
            serde_json::from_str(&line).map_err(|error| bad(i + 1, &error))?;
        let document = match (messages, prompt.zip(completion), text) {
            (Some(messages), ..) => {
                let tools = tools.as_ref().map(|tools| tools.get()).filter(|tools| *tools != "null");
                LabeledTokens::conversation(tokenizer, &messages, tools)
            }
            (None, Some((prompt, completion)), _) => LabeledTokens::completion(tokenizer, &prompt, &completion),
            (None, None, Some(text)) => tokenizer.encode(&text).map(|ids| {
                let mut document = LabeledTokens::all(ids);
                document.end(tokenizer);
                document
            }),
            (None, None, None) => return Err(bad(i + 1, &fields_of(&line))),
        };
        documents.push(document.map_err(|error| bad(i + 1, &error.found()))?);
    }
    if documents.is_empty() {
        let found = format!("{}: no lines", path.display());
        return Err(ErrorKind::Data.error("data", found, "at least one document", "use another file"));
    }
    Ok(documents)
}

/// Number of bytes of the longest common beginning.
fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices().zip(b.chars()).find(|((_, a), b)| a != b).map_or(a.len().min(b.len()), |((at, _), _)| at)
}
