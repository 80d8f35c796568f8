//! The files of a tokenizer as they are written: as read, or of a tokenizer with one token per byte.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::files::TextFiles;

impl TextFiles {
    /// The files of [`Tokenizer::bytes`](super::Tokenizer::bytes) for other libraries: a byte-level `tokenizer.json` without
    /// merges, in which the id of a token is its byte. Local.
    ///
    /// ```
    /// use shardwise::text::{TextFiles, Tokenizer};
    ///
    /// let tokenizer = Tokenizer::new(&TextFiles::bytes())?;
    /// assert_eq!(tokenizer.encode("né")?, Tokenizer::bytes().encode("né")?);
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn bytes() -> TextFiles {
        let vocabulary: BTreeMap<String, u32> = byte_symbols().into_iter().map(String::from).zip(0..).collect();
        let byte_level =
            json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
        let tokenizer = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [],
            "normalizer": null,
            "pre_tokenizer": byte_level,
            "post_processor": null,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": false,
                "vocab": vocabulary,
                "merges": [],
            },
        });
        // The class that reads any tokenizer.json; without it transformers takes the one of the model's family, which adds tokens.
        let config = json!({ "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false });
        TextFiles {
            tokenizer: format!("{tokenizer:#}\n").into_bytes(),
            tokenizer_config: config,
            ..TextFiles::default()
        }
    }

    /// Names and contents of the files that [`write`](Self::write) writes.
    pub(crate) fn contents(&self) -> Vec<(&'static str, Vec<u8>)> {
        let json = |value: &Value| match value {
            Value::Null => Vec::new(),
            value => format!("{value:#}\n").into_bytes(),
        };
        let template = self.chat_template.clone().unwrap_or_default().into_bytes();
        let contents = [self.tokenizer.clone(), json(&self.tokenizer_config), json(&self.generation_config), template];
        Self::NAMES.into_iter().zip(contents).filter(|(_, content)| !content.is_empty()).collect()
    }
}

/// The characters that stand for the 256 bytes in a byte-level vocabulary, as GPT-2 has chosen them: printable ones for
/// themselves, the remaining ones in order from U+0100.
fn byte_symbols() -> [char; 256] {
    let mut moved = 0;
    std::array::from_fn(|byte| match char::from(byte as u8) {
        printable @ ('!'..='~' | '¡'..='¬' | '®'..='ÿ') => printable,
        _ => {
            moved += 1;
            char::from_u32(0xff + moved).unwrap_or_default()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Tokenizer;

    #[test]
    fn every_byte_has_its_own_token() {
        let (own, written) = (Tokenizer::bytes(), Tokenizer::new(&TextFiles::bytes()).unwrap());
        assert_eq!(written.vocab_size(), own.vocab_size());
        // Every character below U+0800 has all bytes that UTF-8 uses in two, and the control characters.
        let text: String = (0..0x800).chain([0x20ac, 0x1f600]).filter_map(char::from_u32).collect();
        for text in [text.as_str(), "", " \n a  b\r\n", "déjà vu"] {
            let ids = own.encode(text).unwrap();
            assert_eq!(written.encode(text).unwrap(), ids);
            assert_eq!(written.decode(&ids).unwrap(), text);
        }
        // bytes that are not text
        let ids: Vec<u32> = (0..256).collect();
        assert_eq!(written.decode(&ids).unwrap(), own.decode(&ids).unwrap());
    }
}
