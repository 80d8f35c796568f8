//! Special tokens of a model: their ids and their texts.

use serde_json::Value;

use super::files::TextFiles;
use crate::error::{ErrorKind, Result};

/// Special tokens of a model.
///
/// Ids are those of `generation_config.json`, else of `config.json`, else those of the texts in `tokenizer_config.json`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SpecialTokens {
    /// Token before a text.
    #[doc(alias = "bos_token_id")]
    pub bos: Option<u32>,
    /// Tokens of which any one ends a text.
    #[doc(alias = "eos_token_id")]
    pub eos: Vec<u32>,
    /// Token that fills up shorter rows of a batch; the first end token if the files name none.
    #[doc(alias = "pad_token_id")]
    pub pad: Option<u32>,
    /// Texts by name, such as `bos_token`, as chat templates use them.
    pub texts: Vec<(String, String)>,
}

impl SpecialTokens {
    /// Collects the special tokens of a model's files; `id_of` looks up the text of a token.
    pub(super) fn of(files: &TextFiles, id_of: impl Fn(&str) -> Option<u32>) -> Result<Self> {
        let texts = token_texts(&files.tokenizer_config);
        let ids = |field: &str| -> Result<Vec<u32>> {
            for (name, config) in [("generation_config.json", &files.generation_config), ("config.json", &files.config)]
            {
                let found = ids_of(name, field, config.get(format!("{field}_id")))?;
                if !found.is_empty() {
                    return Ok(found);
                }
            }
            let text = texts.iter().find(|(name, _)| name == field).map(|(_, text)| text);
            Ok(text.and_then(|text| id_of(text)).into_iter().collect())
        };
        let (bos, eos, pad) = (ids("bos_token")?, ids("eos_token")?, ids("pad_token")?);
        let pad = pad.first().or(eos.first()).copied();
        Ok(SpecialTokens { bos: bos.first().copied(), eos, pad, texts })
    }

    /// Text of a token by its name, such as `bos_token`.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.texts.iter().find(|(own, _)| own == name).map(|(_, text)| text.as_str())
    }
}

/// The ids in a field: one number, a list, or nothing.
fn ids_of(file: &str, field: &str, value: Option<&Value>) -> Result<Vec<u32>> {
    let id = |value: &Value| {
        // -1 stands for "none" in some older configurations.
        value.as_u64().and_then(|id| u32::try_from(id).ok()).map(Some).or((value.as_i64() == Some(-1)).then_some(None))
    };
    let ids = match value {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(one) => id(one).map(|one| vec![one]),
    };
    let Some(ids) = ids else {
        let found = format!("`{field}_id` of {} in {file}", value.unwrap_or(&Value::Null));
        let needed = "a token id, a list of them, or null";
        return Err(ErrorKind::Model.error("special token", found, needed, "correct the file"));
    };
    Ok(ids.into_iter().flatten().collect())
}

/// The texts of special tokens in `tokenizer_config.json`: a string, or an object with its `content`.
fn token_texts(config: &Value) -> Vec<(String, String)> {
    let Value::Object(fields) = config else { return Vec::new() };
    let text = |(name, value): (&String, &Value)| {
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        name.ends_with("_token").then(|| (name.clone(), text.to_string()))
    };
    fields.iter().filter_map(text).collect()
}
