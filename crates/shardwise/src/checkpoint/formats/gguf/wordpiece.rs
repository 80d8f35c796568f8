//! The WordPiece tokenizer of BERT. llama.cpp writes "▁" in front of tokens that begin a word and takes the "##" from tokens
//! that continue one.

use serde_json::{Map, Value as Json, json};

use super::metadata::{Metadata, bad};
use crate::error::Result;

/// The type of special tokens in `tokenizer.ggml.token_type`.
pub(super) const CONTROL: f64 = 3.0;
/// Longest word that is split; longer ones are unknown. The number of all public models.
const MAX_WORD: usize = 100;

/// The special tokens, their keys in the order in which they are looked for, and the numbers that llama.cpp assumes.
const SPECIAL: [(&str, &[&str], usize); 5] = [
    ("cls_token", &["cls", "bos"], 101),
    ("sep_token", &["seperator", "eos"], 102),
    ("unk_token", &["unknown"], 100),
    ("pad_token", &["padding"], 0),
    ("mask_token", &["mask"], 103),
];

/// The text of `tokenizer.json` and the value of `tokenizer_config.json`.
pub(super) fn wordpiece(meta: &Metadata<'_>) -> Result<(String, Json)> {
    let tokens = tokens(meta)?;
    let mut ids = Map::new();
    for (id, token) in tokens.iter().enumerate() {
        if let Some(other) = ids.insert(token.clone(), json!(id)) {
            let found = format!("{token:?} with the numbers {other} and {id}");
            return Err(bad("tokenizer.ggml.tokens", &found, "different tokens"));
        }
    }
    let mut special: Vec<(&str, usize)> = Vec::new();
    for (name, keys, assumed) in SPECIAL {
        special.extend(special_token(meta, keys, assumed, tokens.len())?.map(|id| (name, id)));
    }
    let named = |name: &str| -> Result<&str> {
        let found = special.iter().find(|(other, _)| *other == name).map(|(_, id)| tokens[*id].as_str());
        found.ok_or_else(|| bad("tokenizer.ggml", &format!("no {name}"), "the special tokens of BERT"))
    };
    let (first, last, unknown) = (named("cls_token")?, named("sep_token")?, named("unk_token")?);
    // Files of before these keys say nothing. A vocabulary without capitals has use only for lower case.
    let lowers = match meta.flag("tokenizer.ggml.normalizer.lowercase")? {
        Some(lowers) => lowers,
        None => !tokens.iter().any(|token| is_word(token) && token.chars().any(char::is_uppercase)),
    };
    let strips = meta.flag("tokenizer.ggml.normalizer.strip_accents")?;
    let mut of_special: Vec<usize> = special.iter().map(|(_, id)| *id).collect();
    of_special.sort_unstable();
    of_special.dedup();
    let added = |id: &usize| {
        json!({
            "id": id, "content": tokens[*id], "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": of_special.iter().map(added).collect::<Vec<Json>>(),
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": strips,
            "lowercase": lowers,
        },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": template(first, last, &ids),
        "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
        "model": {
            "type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": "##",
            "max_input_chars_per_word": MAX_WORD, "vocab": ids,
        },
    });
    let mut config = json!({ "tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": lowers });
    for (name, id) in &special {
        config[*name] = json!(tokens[*id]);
    }
    if let Some(context) = meta.count(".context_length")? {
        config["model_max_length"] = json!(context);
    }
    Ok((tokenizer.to_string(), config))
}

/// The tokens as WordPiece has them.
fn tokens(meta: &Metadata<'_>) -> Result<Vec<String>> {
    let key = "tokenizer.ggml.tokens";
    let stored = meta.texts(key)?.ok_or_else(|| bad(key, "none", "a list of tokens"))?;
    let types = meta.numbers("tokenizer.ggml.token_type")?;
    if let Some(types) = types.as_ref().filter(|types| types.len() != stored.len()) {
        let needed = format!("one for each of {} tokens", stored.len());
        return Err(bad("tokenizer.ggml.token_type", &format!("{} types", types.len()), &needed));
    }
    let is_control = |id: usize, token: &str| match &types {
        Some(types) => types[id] == CONTROL,
        None => !is_word(token),
    };
    let token = |(id, token): (usize, &&str)| match token.strip_prefix('▁') {
        _ if is_control(id, token) => token.to_string(),
        Some(word) if !word.is_empty() => word.to_string(),
        _ => format!("##{token}"),
    };
    Ok(stored.iter().enumerate().map(token).collect())
}

/// Whether a token is a part of a text, and none such as `[CLS]`.
fn is_word(token: &str) -> bool {
    !(token.starts_with('[') && token.ends_with(']'))
}

/// The number of a special token: that of the first key that the file has, or the assumed one if there is such a token.
fn special_token(meta: &Metadata<'_>, keys: &[&str], assumed: usize, tokens: usize) -> Result<Option<usize>> {
    for kind in keys {
        let key = format!("tokenizer.ggml.{kind}_token_id");
        match meta.count(&key)? {
            None => {}
            Some(id) if id < tokens => return Ok(Some(id)),
            Some(id) => return Err(bad(&key, &id.to_string(), &format!("a number below {tokens}"))),
        }
    }
    Ok(Some(assumed).filter(|id| *id < tokens))
}

/// The post-processor: `[CLS] A [SEP]`, and `B [SEP]` after it for a pair.
fn template(first: &str, last: &str, ids: &Map<String, Json>) -> Json {
    let special = |token: &str, kind: usize| json!({ "SpecialToken": { "id": token, "type_id": kind } });
    let sequence = |name: &str, kind: usize| json!({ "Sequence": { "id": name, "type_id": kind } });
    let single = vec![special(first, 0), sequence("A", 0), special(last, 0)];
    let pair = [single.clone(), vec![sequence("B", 1), special(last, 1)]].concat();
    let token = |token: &str| (token.to_string(), json!({ "id": token, "ids": [ids[token]], "tokens": [token] }));
    let tokens: Map<String, Json> = [token(first), token(last)].into_iter().collect();
    json!({ "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens })
}
