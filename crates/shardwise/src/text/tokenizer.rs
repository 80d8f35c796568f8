//! Tokenizers of model directories.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use tokenizers::{PaddingParams, PostProcessor, TruncationParams};

use super::chat::{ChatOptions, ChatTemplate, Message};
use super::files::TextFiles;
use super::growth::unbounded_growth;
use super::special::SpecialTokens;
use crate::error::{Error, ErrorKind, Result};
use crate::rank_context::{RankContext, in_scope, rank_context_if_alive};

/// Encodes text as tokens and decodes tokens, with the special tokens and the chat template of a model.
///
/// All methods are local. Padding and truncation that a `tokenizer.json` asks for are ignored: they would change the results of
/// models, and batches are padded with masks where they are built.
///
/// ```
/// use shardwise::text::Tokenizer;
///
/// let tokenizer = Tokenizer::bytes();
/// assert_eq!(tokenizer.encode("Hi")?, [72, 105]);
/// assert_eq!(tokenizer.decode(&[72, 105])?, "Hi");
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "AutoTokenizer")]
pub struct Tokenizer {
    encoding: TextEncoding,
    special: SpecialTokens,
    template: Option<ChatTemplate>,
}

enum TextEncoding {
    /// One token per byte.
    Bytes,
    File(Box<FileTokenizer>),
}

struct FileTokenizer {
    /// Without padding and truncation.
    tokenizer: tokenizers::Tokenizer,
    /// What the file says, to write it back.
    padding: Option<PaddingParams>,
    truncation: Option<TruncationParams>,
}

/// An encoded text, or pair of texts, for an encoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedPair {
    /// Token ids, with special tokens.
    pub ids: Vec<u32>,
    /// 0 for tokens of the first text, 1 for those of the second.
    #[doc(alias = "token_type_ids")]
    pub types: Vec<u32>,
}

impl Tokenizer {
    /// A tokenizer with one token per byte and no special tokens.
    pub fn bytes() -> Self {
        Tokenizer { encoding: TextEncoding::Bytes, special: SpecialTokens::default(), template: None }
    }

    /// Reads the tokenizer of a model directory: `tokenizer.json`, and, where they exist, `tokenizer_config.json`,
    /// `config.json`, `generation_config.json` and `chat_template.jinja`.
    ///
    /// # Errors
    /// As [`TextFiles::read`] and [`Tokenizer::new`].
    #[doc(alias = "from_pretrained")]
    pub fn from_dir(directory: impl AsRef<Path>) -> Result<Self> {
        Self::new(&TextFiles::read(directory)?)
    }

    /// Builds the tokenizer of a model's files.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if `tokenizer.json` is not one, [`ErrorKind::Model`] if a special token or the chat template is
    /// invalid.
    pub fn new(files: &TextFiles) -> Result<Self> {
        let bad = |found: String| -> Error {
            let needed = "a tokenizer.json of the tokenizers library";
            ErrorKind::Damaged.error("tokenizer", found, needed, "restore the file, or write it with a newer version")
        };
        if let Some(found) = unbounded_growth(&files.tokenizer) {
            return Err(bad(found));
        }
        let mut tokenizer = guarded(|| tokenizers::Tokenizer::from_bytes(&files.tokenizer)).map_err(bad)?;
        let (padding, truncation) = (tokenizer.get_padding().cloned(), tokenizer.get_truncation().cloned());
        tokenizer.with_padding(None);
        guarded(|| tokenizer.with_truncation(None).map(drop)).map_err(bad)?;
        let special = SpecialTokens::of(files, |text| tokenizer.token_to_id(text))?;
        let template = ChatTemplate::of(files)?;
        let file = FileTokenizer { tokenizer, padding, truncation };
        Ok(Tokenizer { encoding: TextEncoding::File(Box::new(file)), special, template })
    }

    /// Special tokens of the model.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    /// The chat template of the model, if it has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Largest token id plus one. Models may have more rows than that in their embedding.
    pub fn vocab_size(&self) -> usize {
        match &self.encoding {
            TextEncoding::Bytes => 256,
            // Token ids may have gaps.
            TextEncoding::File(file) => {
                file.tokenizer.get_vocab(true).values().max().map_or(0, |&largest| largest as usize + 1)
            }
        }
    }

    /// Encodes a text, with the special tokens that the model expects around one.
    ///
    /// # Errors
    /// [`ErrorKind::Data`] if the tokenizer fails on the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_text(text, true)
    }

    /// Encodes the beginning of a text that a model is to continue: with the special tokens that the model expects in front of
    /// a text, and without those after one.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let TextEncoding::File(file) = &self.encoding else { return self.encode(text) };
        let encoding = guarded(|| file.tokenizer.encode_fast(text, true)).map_err(cannot_encode)?;
        // Marks tokens that were added, not special tokens that the text spells out.
        let added = encoding.get_special_tokens_mask().iter().rev().take_while(|&&added| added == 1).count();
        let ids = encoding.get_ids();
        // Without text, all of them are in front.
        let kept = if added == ids.len() { ids.len() } else { ids.len() - added };
        Ok(ids[..kept].to_vec())
    }

    /// Encodes a text without adding special tokens. Special tokens that the text itself spells out are recognised.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_without_special(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_text(text, false)
    }

    fn encode_text(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        match &self.encoding {
            TextEncoding::Bytes => Ok(text.bytes().map(u32::from).collect()),
            TextEncoding::File(file) => {
                let encoding = guarded(|| file.tokenizer.encode_fast(text, add_special)).map_err(cannot_encode)?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Encodes a text and returns with every token the bytes of the text that it stands for; none for special tokens that are
    /// added.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_with_offsets(&self, text: &str, add_special: bool) -> Result<Vec<(u32, Range<usize>)>> {
        let TextEncoding::File(file) = &self.encoding else {
            return Ok(text.bytes().enumerate().map(|(at, byte)| (u32::from(byte), at..at + 1)).collect());
        };
        let encoding = guarded(|| file.tokenizer.encode(text, add_special)).map_err(cannot_encode)?;
        let offsets = encoding.get_offsets().iter().map(|&(start, end)| start..end);
        Ok(encoding.get_ids().iter().copied().zip(offsets).collect())
    }

    /// Encodes a text, or two as a pair, for an encoder, with special tokens. At most `most` tokens: the end of the text is
    /// dropped, for a pair the end of the longer one.
    ///
    /// # Errors
    /// As [`encode`](Self::encode), and [`ErrorKind::Argument`] if `most` is less than the number of special tokens.
    pub fn encode_pair(&self, text: &str, pair: Option<&str>, most: usize) -> Result<EncodedPair> {
        let TextEncoding::File(file) = &self.encoding else {
            let both: Vec<&str> = std::iter::once(text).chain(pair).collect();
            let tokens =
                both.iter().zip(0..).flat_map(|(text, kind)| text.bytes().map(move |byte| (u32::from(byte), kind)));
            let (ids, types) = tokens.take(most).unzip();
            return Ok(EncodedPair { ids, types });
        };
        let tokenizer = &file.tokenizer;
        let added = tokenizer.get_post_processor().map_or(0, |post| post.added_tokens(pair.is_some()));
        if most < added {
            let needed = format!("at least {added}, the special tokens of the model");
            return Err(ErrorKind::Argument.error("number of tokens", most, needed, "allow longer inputs"));
        }
        let encoded = guarded(|| {
            let encode = |text: &str| tokenizer.encode_fast(text, false);
            let (mut first, mut second) = (encode(text)?, pair.map(encode).transpose()?);
            let lengths = (first.len(), second.as_ref().map_or(0, tokenizers::Encoding::len));
            let (left, right) = longest_first(lengths, most - added);
            first.truncate(left, 0, tokenizers::TruncationDirection::Right);
            if let Some(second) = &mut second {
                second.truncate(right, 0, tokenizers::TruncationDirection::Right);
            }
            tokenizer.post_process(first, second, true)
        });
        let encoded = encoded.map_err(cannot_encode)?;
        Ok(EncodedPair { ids: encoded.get_ids().to_vec(), types: encoded.get_type_ids().to_vec() })
    }

    /// Decodes tokens, without special tokens. Bytes that are not UTF-8 become replacement characters.
    ///
    /// # Errors
    /// [`ErrorKind::Data`] if the tokenizer fails on the tokens. Unknown ids are skipped.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_ids(ids, true)
    }

    /// Decodes tokens and spells out special tokens.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String> {
        self.decode_ids(ids, false)
    }

    fn decode_ids(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        match &self.encoding {
            TextEncoding::Bytes => {
                let bytes: Vec<u8> = ids.iter().map(|&id| u8::try_from(id).unwrap_or(b'?')).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            TextEncoding::File(file) => guarded(|| file.tokenizer.decode(ids, skip_special)).map_err(|found| {
                let needed = "tokens of the model";
                ErrorKind::Data.error("tokens", found, needed, "check that tokenizer and model belong together")
            }),
        }
    }

    /// Renders a conversation with the model's chat template and encodes it.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the model has no chat template, and as [`ChatTemplate::render`].
    #[doc(alias = "apply_chat_template")]
    pub fn encode_chat(&self, messages: &[Message], options: &ChatOptions) -> Result<Vec<u32>> {
        // The text has its special tokens already.
        self.encode_without_special(&self.chat_text(messages, options)?)
    }

    /// Renders a conversation with the model's chat template.
    ///
    /// # Errors
    /// As [`encode_chat`](Self::encode_chat).
    pub fn chat_text(&self, messages: &[Message], options: &ChatOptions) -> Result<String> {
        let Some(template) = &self.template else {
            return Err(ErrorKind::Unsupported.error(
                "conversation",
                "a model without a chat template",
                "a chat_template.jinja, or one in tokenizer_config.json",
                "use a model that was trained on conversations, or pass plain text",
            ));
        };
        template.render(messages, options, &self.special)
    }

    /// Writes `tokenizer.json` as it was read. Returns whether there is one.
    ///
    /// # Errors
    /// [`ErrorKind::Path`] if the file cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<bool> {
        let TextEncoding::File(file) = &self.encoding else { return Ok(false) };
        let path = path.as_ref();
        let mut tokenizer = file.tokenizer.clone();
        tokenizer.with_padding(file.padding.clone());
        let saved = guarded(|| tokenizer.with_truncation(file.truncation.clone())?.save(path, false));
        saved.map_err(|error| {
            let found = format!("{}: {error}", path.display());
            let fix = "free disk space or grant permission, or choose another path";
            ErrorKind::path(path).error::<Error>("output file", found, "a writable path", fix)
        })?;
        Ok(true)
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.encoding {
            TextEncoding::Bytes => "bytes",
            TextEncoding::File(_) => "tokenizer.json",
        };
        write!(f, "Tokenizer({kind}, {} tokens)", self.vocab_size())
    }
}

/// Whether this thread calls a library whose panics are caught and become errors: a hook for panics should not print them.
///
/// Local. The command's hook asks it; the default hook of Rust prints every panic.
pub fn catches_panics() -> bool {
    rank_context_if_alive(|context| context.catches_panics.get()).unwrap_or(false)
}

/// Calls the tokenizers library; its errors and panics become text. A file with contradictions can make it panic.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    let enter = |context: &RankContext| context.catches_panics.replace(true);
    let leave = |context: &RankContext, before| context.catches_panics.set(before);
    match in_scope(enter, leave, || catch_unwind(AssertUnwindSafe(call))) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(payload) => {
            let text = payload.downcast_ref::<&str>().map(|text| (*text).to_string());
            let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
            Err(format!("a contradiction in the file: {}", text.unwrap_or_else(|| "no reason given".into())))
        }
    }
}

fn cannot_encode(found: String) -> Error {
    ErrorKind::Data.error("text", found, "a text that the tokenizer accepts", "check the tokenizer of the model")
}

/// Lengths of a pair after tokens have been dropped from the longer one, one by one.
fn longest_first((mut left, mut right): (usize, usize), most: usize) -> (usize, usize) {
    while left + right > most {
        if left > right { left -= 1 } else { right -= 1 }
    }
    (left, right)
}
