//! The text of tokens that come one by one.

use super::tokenizer::Tokenizer;
use crate::error::Result;

/// Tokens before the first one that are decoded with it. Tokenizers drop the space in front of a text, so a text that continues
/// another one has to be decoded with its end.
const CONTEXT: usize = 6;

/// Bytes of a character, each of which may be a token: of so many neighbouring tokens one begins a character.
const CHARACTER: usize = 4;

/// Decodes tokens one by one; see [`Tokenizer::stream`].
///
/// Pieces are complete characters: bytes of a character that is not complete are kept until it is. Together the pieces are
/// what decoding all tokens at once gives. Tokenizers with byte fallback are an exception where invalid bytes follow a character
/// of several bytes: decoding at once spoils both, while the stream has returned the character already and keeps it. Special
/// tokens are skipped.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    /// Tokens from here on are decoded.
    start: usize,
    /// Tokens before this one have been returned as text.
    returned: usize,
}

impl Tokenizer {
    /// A decoder of tokens that come one by one, after the tokens `before`, which have been shown already.
    pub fn stream(&self, before: &[u32]) -> TextStream<'_> {
        TextStream::new(self, before)
    }
}

impl<'a> TextStream<'a> {
    fn new(tokenizer: &'a Tokenizer, before: &[u32]) -> Self {
        // Decoding from inside a character on would spoil what follows it.
        let starts = (CONTEXT..CONTEXT + CHARACTER).map(|length| before.len().saturating_sub(length));
        let begins = |&start: &usize| {
            tokenizer.decode(&before[start..]).is_ok_and(|text| !text.starts_with(char::REPLACEMENT_CHARACTER))
        };
        let ids = before[starts.into_iter().find(begins).unwrap_or(0)..].to_vec();
        TextStream { tokenizer, start: 0, returned: ids.len(), ids }
    }

    /// Adds a token and returns the text that it completes; empty if it completes none.
    ///
    /// # Errors
    /// [`ErrorKind::Data`](crate::ErrorKind::Data) if the tokenizer fails on the tokens.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let all = self.tokenizer.decode(&self.ids[self.start..])?;
        // Incomplete bytes decode to the replacement character.
        if all.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        self.take(&all)
    }

    /// Returns what is left: the text of an incomplete character, as decoding gives it.
    pub fn finish(&mut self) -> Result<String> {
        let all = self.tokenizer.decode(&self.ids[self.start..])?;
        self.take(&all)
    }

    /// The part of `all` that has not been returned yet.
    fn take(&mut self, all: &str) -> Result<String> {
        let before = self.tokenizer.decode(&self.ids[self.start..self.returned])?;
        if !all.starts_with(&before) && !before.ends_with(char::REPLACEMENT_CHARACTER) {
            // Invalid bytes spoil the bytes before them, which have been returned as a character: decode them by themselves.
            self.ids.drain(..self.returned);
            (self.start, self.returned) = (0, self.ids.len());
            return self.tokenizer.decode(&self.ids);
        }
        // Tokens before the first one may end with an incomplete character, which the next token has completed.
        let same = before.char_indices().zip(all.chars()).find(|((_, a), b)| a != b).map(|((at, _), _)| at);
        let piece = all.get(same.unwrap_or(before.len()).min(all.len())..).unwrap_or_default().to_string();
        if !piece.is_empty() {
            // Later tokens are decoded from a complete character on.
            if !before.ends_with(char::REPLACEMENT_CHARACTER) {
                self.start = self.returned;
            }
            self.returned = self.ids.len();
        }
        // Tokens before `start` are never needed again.
        self.ids.drain(..self.start);
        (self.start, self.returned) = (0, self.returned - self.start);
        Ok(piece)
    }
}
