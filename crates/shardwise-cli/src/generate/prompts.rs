//! What to generate from: one prompt, a file of prompts, or a conversation.

use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use shardwise::error::ErrorKind;
use shardwise::prelude::*;
use shardwise::text::{ChatOptions, Message};

use super::GenerateOptions;
use super::source::GenerationSource;
use crate::processes;

/// Largest file of prompts: far more than anybody generates from at once.
const MOST_BYTES: u64 = 256 << 20;

/// What to generate from.
pub(super) enum Request {
    /// Nothing: the model is not run.
    Nothing,
    Prompts(Vec<EncodedPrompt>),
    /// A conversation with whoever writes to standard input.
    Chat {
        system: Option<String>,
    },
}

/// A prompt and its tokens.
pub(super) struct EncodedPrompt {
    /// As the user gave it; for messages, the text of the last one.
    pub(super) text: String,
    /// Whether the answer continues the text of the prompt.
    pub(super) is_text: bool,
    pub(super) ids: Vec<u32>,
}

impl Request {
    pub(super) fn new(options: &GenerateOptions, source: &GenerationSource) -> Result<Self> {
        if options.chat && source.is_trained() && source.tokenizer.chat_template().is_none() {
            let found = "a model of `shardwise train` without a chat template";
            let needed = "a model that was trained with --init from one that has a template";
            return Err(ErrorKind::Unsupported.error("chat", found, needed, "use --prompt"));
        }
        let system = options.system.as_deref();
        if let Some(file) = &options.batch {
            return Ok(Request::Prompts(read_batch(file, source)?));
        }
        let prompt = match options.prompt.as_deref() {
            Some("-") => Some(processes::read_in_first(read_standard_input)?),
            Some(text) => Some(text.to_string()),
            None => None,
        };
        match (prompt, options.chat) {
            (None, true) => {
                // A model without a template is refused before it is loaded.
                if source.tokenizer.chat_template().is_none() {
                    encode_messages(&[], source)?;
                }
                Ok(Request::Chat { system: system.map(str::to_string) })
            }
            (Some(text), true) => {
                let mut messages: Vec<Message> = system.map(|text| Message::new("system", text)).into_iter().collect();
                messages.push(Message::new("user", &text));
                let ids = encode_messages(&messages, source)?;
                Ok(Request::Prompts(vec![EncodedPrompt { text, is_text: false, ids }]))
            }
            (Some(text), false) => Ok(Request::Prompts(vec![encode_text(text, source)?])),
            (None, false) if source.is_trained() => Ok(Request::Prompts(vec![encode_text("The ".into(), source)?])),
            (None, false) => Err(ErrorKind::Argument.error(
                "prompt",
                "none",
                "one of --prompt TEXT, --batch FILE and --chat",
                "add one of these options",
            )),
        }
    }

    /// Whether ranks wait for a person.
    pub(super) fn is_interactive(&self) -> bool {
        matches!(self, Request::Chat { .. })
    }

    /// A hash of the prompts, with which ranks compare what they have read.
    pub(super) fn fingerprint(&self) -> u64 {
        let Request::Prompts(prompts) = self else { return 0 };
        // FNV-1a over ids, with a mark after each prompt.
        let ids = prompts.iter().flat_map(|prompt| prompt.ids.iter().map(|&id| u64::from(id)).chain([u64::MAX]));
        ids.fold(0xcbf2_9ce4_8422_2325, |hash, id| (hash ^ id).wrapping_mul(0x0100_0000_01b3))
    }
}

fn encode_text(text: String, source: &GenerationSource) -> Result<EncodedPrompt> {
    let ids = match source.is_trained() {
        // Trained without special tokens.
        true => source.tokenizer.encode_without_special(&text)?,
        false => source.tokenizer.encode_prompt(&text)?,
    };
    if text.is_empty() || ids.is_empty() {
        let fix = "give a prompt that is not empty";
        return Err(ErrorKind::Argument.error("prompt", "no tokens", "at least one", fix));
    }
    source.check(&ids)?;
    Ok(EncodedPrompt { text, is_text: true, ids })
}

fn encode_messages(messages: &[Message], source: &GenerationSource) -> Result<Vec<u32>> {
    let options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
    let ids = source.tokenizer.encode_chat(messages, &options)?;
    source.check(&ids).map(|()| ids)
}

/// A line of a .jsonl file, with one of the two.
#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct BatchLine {
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
}

/// The prompts of a file: one per line, or one per JSON object.
fn read_batch(path: &Path, source: &GenerationSource) -> Result<Vec<EncodedPrompt>> {
    let bad = |found: String, needed: &str| -> Error {
        let found = format!("{}: {found}", path.display());
        ErrorKind::path(path).error("batch", found, needed, "correct the file, or choose another one")
    };
    let text = crate::lines::read(path, MOST_BYTES)?;
    let is_json = path.extension().is_some_and(|end| end == "jsonl");
    let mut prompts = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        if !is_json {
            prompts.push(encode_text(line.to_string(), source)?);
            continue;
        }
        let needed = "an object with `prompt` or `messages` per line";
        let bad_line = |found: String| bad(format!("line {}: {found}", number + 1), needed);
        let line: BatchLine = serde_json::from_str(line).map_err(|error| bad_line(error.to_string()))?;
        prompts.push(match (line.prompt, line.messages) {
            (Some(prompt), None) => encode_text(prompt, source)?,
            (None, Some(messages)) => EncodedPrompt {
                text: messages.last().and_then(Message::content).unwrap_or_default(),
                is_text: false,
                ids: encode_messages(&messages, source)?,
            },
            (Some(_), Some(_)) => return Err(bad_line("an object with both".into())),
            (None, None) => return Err(bad_line("an object with neither".into())),
        });
    }
    if prompts.is_empty() {
        return Err(bad("no prompts".into(), "at least one line"));
    }
    Ok(prompts)
}

fn read_standard_input() -> Result<String> {
    let mut text = String::new();
    std::io::stdin().take(MOST_BYTES).read_to_string(&mut text)?;
    Ok(text.strip_suffix('\n').map(str::to_string).unwrap_or(text))
}
