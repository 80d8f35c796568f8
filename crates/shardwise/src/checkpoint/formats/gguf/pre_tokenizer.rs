//! How byte-level BPE splits a text before it merges, by the names of llama.cpp.

use serde_json::{Value as Json, json};

use crate::error::{ErrorKind, Result};

/// The settings of one name.
pub(super) struct PreTokenizer {
    pub(super) normalizer: Json,
    pub(super) splits: Json,
    /// Whether a piece that is a token stays whole without regard to merges.
    pub(super) ignores_merges: bool,
    /// Whether a first token is added unless the file says otherwise.
    pub(super) adds_bos: bool,
}

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// What llama.cpp does without a name.
const DEFAULT: [&str; 4] = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"];
const FALCON: [&str; 3] = [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"];

const KNOWN: &str = "default, gpt-2, phi-2, olmo, mpt, jais, exaone4, trillion, roberta-bpe, smollm, starcoder, refact, command-r, codeshell, \
                     exaone, minerva-7b, llama-bpe, llama3, llama-v3, falcon3, falcon-h1, pixtral, lfm2, smaug-bpe, dbrx, \
                     qwen2, deepseek-r1-qwen, stablelm2, megrez, hunyuan, tekken, gpt-4o, llama4, falcon";

impl PreTokenizer {
    /// The settings of a `tokenizer.ggml.pre`.
    pub(super) fn named(name: &str) -> Result<PreTokenizer> {
        let plain =
            |splits: Json| PreTokenizer { normalizer: Json::Null, splits, ignores_merges: false, adds_bos: false };
        Ok(match name {
            "default" => plain(sequence(&DEFAULT)),
            "gpt-2" | "phi-2" | "olmo" | "mpt" | "jais" | "exaone4" | "trillion" => plain(byte_level(true)),
            "roberta-bpe" => PreTokenizer { adds_bos: true, ..plain(byte_level(true)) },
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" => {
                let digits = json!({ "type": "Digits", "individual_digits": true });
                plain(json!({ "type": "Sequence", "pretokenizers": [digits, byte_level(true)] }))
            }
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "lfm2" => {
                PreTokenizer { ignores_merges: true, adds_bos: true, ..plain(sequence(&[LLAMA3])) }
            }
            "smaug-bpe" | "dbrx" => plain(sequence(&[LLAMA3])),
            "qwen2" | "deepseek-r1-qwen" | "stablelm2" | "megrez" | "hunyuan" => {
                PreTokenizer { normalizer: json!({ "type": "NFC" }), ..plain(sequence(&[QWEN2])) }
            }
            "tekken" => PreTokenizer { ignores_merges: true, adds_bos: true, ..plain(sequence(&[TEKKEN])) },
            "gpt-4o" | "llama4" => plain(sequence(&[GPT4O])),
            "falcon" => plain(sequence(&FALCON)),
            other => {
                return Err(ErrorKind::unknown(other).error(
                    "GGUF metadata",
                    format!("tokenizer.ggml.pre {other:?}"),
                    format!("one of {KNOWN}"),
                    "use the tokenizer.json of the model's Hugging Face directory",
                ));
            }
        })
    }
}

/// The step that writes bytes as characters, with or without the split of GPT-2.
pub(super) fn byte_level(splits: bool) -> Json {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits })
}

/// Splits by each pattern in turn, then bytes as characters.
fn sequence(patterns: &[&str]) -> Json {
    let split = |pattern: &&str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
    let mut steps: Vec<Json> = patterns.iter().map(split).collect();
    steps.push(byte_level(false));
    json!({ "type": "Sequence", "pretokenizers": steps })
}
