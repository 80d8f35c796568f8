//! The tokenizer of a GGUF file in the form of the `tokenizers` library, and the settings next to it.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use super::metadata::{Metadata, bad};
use super::pre_tokenizer::{PreTokenizer, byte_level};
use super::wordpiece::{CONTROL, wordpiece};
use crate::error::{ErrorKind, Result};

/// Types of tokens in `tokenizer.ggml.token_type`.
const NORMAL: f64 = 1.0;
const UNKNOWN: f64 = 2.0;
const USER_DEFINED: f64 = 4.0;

/// Longest piece that merges are looked for, in bytes. Vocabularies have none above 100; the search is quadratic.
const MAX_PIECE: usize = 256;

/// The tokens of a file with their types.
struct Vocabulary<'a> {
    tokens: Vec<String>,
    types: Option<Vec<f64>>,
    meta: &'a Metadata<'a>,
}

/// The text of `tokenizer.json` and the value of `tokenizer_config.json`; `None` if the file has no tokenizer.
pub(super) fn tokenizer(meta: &Metadata<'_>) -> Result<Option<(String, Json)>> {
    let kind = match meta.text("tokenizer.ggml.model")? {
        None | Some("none" | "no_vocab") => return Ok(None),
        Some(kind) => kind,
    };
    if kind == "bert" {
        return wordpiece(meta).map(Some);
    }
    let vocabulary = Vocabulary::read(meta)?;
    let (mut tokenizer, adds_bos) = match kind {
        "gpt2" => vocabulary.byte_level_bpe()?,
        "llama" => vocabulary.sentence_piece()?,
        other => {
            return Err(ErrorKind::Unsupported.error(
                "GGUF metadata",
                format!("tokenizer.ggml.model {other:?}"),
                "gpt2 (byte-level BPE), llama (SentencePiece) or bert (WordPiece)",
                "use the tokenizer.json of the model's Hugging Face directory",
            ));
        }
    };
    let adds_bos = meta.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
    // RoBERTa's separator is also its end token.
    let adds_sep = meta.flag("tokenizer.ggml.add_sep_token")?;
    let is_roberta = meta.text("tokenizer.ggml.pre")? == Some("roberta-bpe");
    let adds_eos = meta.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false) || adds_sep.unwrap_or(is_roberta);
    tokenizer["version"] = json!("1.0");
    tokenizer["truncation"] = Json::Null;
    tokenizer["padding"] = Json::Null;
    tokenizer["added_tokens"] = vocabulary.added_tokens()?;
    tokenizer["post_processor"] = vocabulary.template(adds_bos, adds_eos)?;
    let config = vocabulary.config(adds_bos, adds_eos)?;
    Ok(Some((tokenizer.to_string(), config)))
}

impl<'a> Vocabulary<'a> {
    fn read(meta: &'a Metadata<'a>) -> Result<Self> {
        let key = "tokenizer.ggml.tokens";
        let tokens = meta.texts(key)?.ok_or_else(|| bad(key, "none", "a list of tokens"))?;
        // A token without text can never be found in one; it still has its number.
        let named = |(i, token): (usize, &&str)| match token.is_empty() {
            true => format!("[EMPTY_{i}]"),
            false => token.to_string(),
        };
        let tokens: Vec<String> = tokens.iter().enumerate().map(named).collect();
        let types = meta.numbers("tokenizer.ggml.token_type")?;
        if let Some(types) = types.as_ref().filter(|types| types.len() != tokens.len()) {
            let needed = format!("one for each of {} tokens", tokens.len());
            return Err(bad("tokenizer.ggml.token_type", &format!("{} types", types.len()), &needed));
        }
        Ok(Vocabulary { tokens, types, meta })
    }

    /// Numbers by token.
    fn ids(&self) -> Result<HashMap<&str, usize>> {
        let mut ids = HashMap::with_capacity(self.tokens.len());
        for (id, token) in self.tokens.iter().enumerate() {
            if let Some(other) = ids.insert(token.as_str(), id) {
                let found = format!("{token:?} with the numbers {other} and {id}");
                return Err(bad("tokenizer.ggml.tokens", &found, "different tokens"));
            }
        }
        Ok(ids)
    }

    fn json_ids(&self) -> Result<Json> {
        let entry = |(token, id): (&str, usize)| (token.to_string(), json!(id));
        Ok(Json::Object(self.ids()?.into_iter().map(entry).collect()))
    }

    /// Byte-level BPE, and whether it adds a first token unless the file says otherwise.
    fn byte_level_bpe(&self) -> Result<(Json, bool)> {
        let pre = PreTokenizer::named(self.meta.text("tokenizer.ggml.pre")?.unwrap_or("default"))?;
        let merges = self.merges()?.ok_or_else(|| bad("tokenizer.ggml.merges", "none", "a list of merges"))?;
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": pre.ignores_merges, "vocab": self.json_ids()?, "merges": merges,
        });
        let decoder = byte_level(true);
        let tokenizer =
            json!({ "normalizer": pre.normalizer, "pre_tokenizer": pre.splits, "decoder": decoder, "model": model });
        Ok((tokenizer, pre.adds_bos))
    }

    /// The merges that the file lists, as pairs.
    fn merges(&self) -> Result<Option<Json>> {
        let key = "tokenizer.ggml.merges";
        let Some(merges) = self.meta.texts(key)? else { return Ok(None) };
        let ids = self.ids()?;
        let pair = |merge: &&str| -> Result<Json> {
            // Tokens have no spaces, but one may be a space.
            let at = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
            let pair = at.map(|at| (&merge[..at], &merge[at + 1..]));
            let is_known = |(left, right): &(&str, &str)| {
                [left, right].iter().all(|part| ids.contains_key(**part))
                    && ids.contains_key(format!("{left}{right}").as_str())
            };
            let (left, right) = pair
                .filter(is_known)
                .ok_or_else(|| bad(key, &format!("{merge:.60?}"), "two tokens that together are a token"))?;
            Ok(json!([left, right]))
        };
        merges.iter().map(pair).collect::<Result<Vec<Json>>>().map(|merges| Some(Json::Array(merges)))
    }

    /// SentencePiece's BPE: pieces with scores, and tokens for single bytes.
    fn sentence_piece(&self) -> Result<(Json, bool)> {
        let merges = match self.merges()? {
            Some(merges) => merges,
            None => self.merges_by_score()?,
        };
        let ids = self.ids()?;
        let has_bytes = ids.contains_key("<0x00>");
        let unknown = self.token("unknown")?.or_else(|| self.of_type(UNKNOWN));
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": has_bytes, "ignore_merges": false,
            "vocab": self.json_ids()?, "merges": merges,
        });
        let adds_space = self.meta.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        if self.meta.flag("tokenizer.ggml.remove_extra_whitespaces")? == Some(true) {
            return Err(ErrorKind::Unsupported.error(
                "GGUF metadata",
                "tokenizer.ggml.remove_extra_whitespaces true",
                "a tokenizer that keeps spaces",
                "use the tokenizer.json of the model's Hugging Face directory",
            ));
        }
        let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
        let normalizer = match adds_space {
            true => json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "▁" }, spaces] }),
            false => spaces,
        };
        let mut decoders = vec![
            json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if adds_space {
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        let decoder = json!({ "type": "Sequence", "decoders": decoders });
        let tokenizer = json!({ "normalizer": normalizer, "pre_tokenizer": null, "decoder": decoder, "model": model });
        Ok((tokenizer, true))
    }

    /// Merges in the order of SentencePiece: the piece with the highest score first.
    fn merges_by_score(&self) -> Result<Json> {
        let key = "tokenizer.ggml.scores";
        let scores = self.meta.numbers(key)?.ok_or_else(|| bad(key, "none", "a score for each token"))?;
        if scores.len() != self.tokens.len() {
            let needed = format!("one for each of {} tokens", self.tokens.len());
            return Err(bad(key, &format!("{} scores", scores.len()), &needed));
        }
        let ids = self.ids()?;
        let is_piece = |id: usize| self.types.as_ref().is_none_or(|types| [NORMAL, USER_DEFINED].contains(&types[id]));
        let mut merges: Vec<(f64, usize, &str, &str)> = Vec::new();
        for (id, token) in self.tokens.iter().enumerate() {
            if token.len() > MAX_PIECE || !is_piece(id) {
                continue;
            }
            for (at, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(at);
                if [left, right].iter().all(|part| ids.get(part).is_some_and(|&id| is_piece(id))) {
                    merges.push((scores[id], id, left, right));
                }
            }
        }
        // Of several pairs with the same result, the one with the longer beginning.
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(b.2.len().cmp(&a.2.len())));
        Ok(merges.into_iter().map(|(_, _, left, right)| json!([left, right])).collect())
    }

    /// Special tokens and tokens that the user of a model defined, which are found in a text before anything else.
    fn added_tokens(&self) -> Result<Json> {
        let mut special: Vec<usize> = Vec::new();
        for kind in ["bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "cls", "mask"] {
            special.extend(self.id(kind)?);
        }
        let added = |(id, token): (usize, &String)| {
            let is_special = match &self.types {
                Some(types) => [CONTROL, UNKNOWN].contains(&types[id]),
                None => special.contains(&id),
            };
            let is_added = is_special || self.types.as_ref().is_some_and(|types| types[id] == USER_DEFINED);
            is_added.then(|| {
                json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": is_special,
                })
            })
        };
        Ok(Json::Array(self.tokens.iter().enumerate().filter_map(added).collect()))
    }

    /// The post-processor that adds the first and the last token, null if neither is added.
    fn template(&self, adds_bos: bool, adds_eos: bool) -> Result<Json> {
        let special = |kind: &str, is_added: bool| -> Result<Option<(usize, String)>> {
            if !is_added {
                return Ok(None);
            }
            let id = self.id(kind)?.ok_or_else(|| {
                bad(&format!("tokenizer.ggml.{kind}_token_id"), "none", "the token that the tokenizer adds")
            })?;
            Ok(Some((id, self.tokens[id].clone())))
        };
        let (first, last) = (special("bos", adds_bos)?, special("eos", adds_eos)?);
        if first.is_none() && last.is_none() {
            return Ok(Json::Null);
        }
        let one = |sequence: &str, id: usize| {
            let token = |(_, token): &(usize, String)| json!({ "SpecialToken": { "id": token, "type_id": id } });
            let mut items: Vec<Json> = first.iter().map(token).collect();
            items.push(json!({ "Sequence": { "id": sequence, "type_id": id } }));
            items.extend(last.iter().map(token));
            items
        };
        let tokens: Map<String, Json> = [&first, &last]
            .into_iter()
            .flatten()
            .map(|(id, token)| (token.clone(), json!({ "id": token, "ids": [id], "tokens": [token] })))
            .collect();
        let pair = [one("A", 0), one("B", 1)].concat();
        Ok(json!({ "type": "TemplateProcessing", "single": one("A", 0), "pair": pair, "special_tokens": tokens }))
    }

    /// The value of `tokenizer_config.json`.
    fn config(&self, adds_bos: bool, adds_eos: bool) -> Result<Json> {
        let mut config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": adds_bos, "add_eos_token": adds_eos,
            "clean_up_tokenization_spaces": false,
        });
        for (kind, name) in
            [("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")]
        {
            if let Some(token) = self.token(kind)? {
                config[name] = json!(token);
            }
        }
        if let Some(context) = self.meta.count(".context_length")? {
            config["model_max_length"] = json!(context);
        }
        let main = self.meta.text("tokenizer.chat_template")?;
        let prefix = "tokenizer.chat_template.";
        let mut named = Vec::new();
        for key in self.meta.keys(prefix) {
            named.push(json!({ "name": &key[prefix.len()..], "template": self.meta.text(key)? }));
        }
        match (main, named.is_empty()) {
            (None, true) => {}
            (Some(main), true) => config["chat_template"] = json!(main),
            (main, false) => {
                named.extend(main.map(|main| json!({ "name": "default", "template": main })));
                config["chat_template"] = json!(named);
            }
        }
        Ok(config)
    }

    /// The number of a special token, if the file has one.
    fn id(&self, kind: &str) -> Result<Option<usize>> {
        let key = format!("tokenizer.ggml.{kind}_token_id");
        let Some(id) = self.meta.count(&key)? else { return Ok(None) };
        if id >= self.tokens.len() {
            return Err(bad(&key, &id.to_string(), &format!("a number below {}", self.tokens.len())));
        }
        Ok(Some(id))
    }

    fn token(&self, kind: &str) -> Result<Option<&str>> {
        Ok(self.id(kind)?.map(|id| self.tokens[id].as_str()))
    }

    fn of_type(&self, kind: f64) -> Option<&str> {
        let at = self.types.as_ref()?.iter().position(|found| *found == kind)?;
        Some(&self.tokens[at])
    }
}
