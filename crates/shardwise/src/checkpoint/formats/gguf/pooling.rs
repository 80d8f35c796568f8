//! How an encoder makes one embedding of the tokens of a sentence: in a GGUF file a number, in a directory the files of
//! sentence-transformers.

use serde_json::{Value as Json, json};

use super::metadata::Metadata;
use crate::error::{ErrorKind, Result};

/// The pooling that a GGUF file names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FilePooling {
    /// The mean of all tokens.
    Mean,
    /// The first token.
    Cls,
}

/// Reads the pooling of a file; `None` if it names none.
pub(super) fn pooling(meta: &Metadata<'_>) -> Result<Option<FilePooling>> {
    let key = ".pooling_type";
    let other = |name: &str| {
        Err(ErrorKind::Unsupported.error(
            "GGUF metadata",
            format!("{}{key} {name}", meta.architecture),
            "0 (none), 1 (mean) or 2 (cls)",
            "use the Hugging Face directory of the model",
        ))
    };
    match meta.count(key)? {
        None | Some(0) => Ok(None),
        Some(1) => Ok(Some(FilePooling::Mean)),
        Some(2) => Ok(Some(FilePooling::Cls)),
        Some(3) => other("3 (last token)"),
        Some(4) => other("4 (a classifier that ranks)"),
        Some(number) => other(&number.to_string()),
    }
}

/// The files with which sentence-transformers knows a pooling.
pub(super) fn pooling_files(pooling: FilePooling, config: &Json) -> [(&'static str, String); 2] {
    let module = |index: usize, path: &str, class: &str| {
        let class = format!("sentence_transformers.models.{class}");
        json!({ "idx": index, "name": index.to_string(), "path": path, "type": class })
    };
    let width = config.get("hidden_size").or(config.get("dim"));
    let settings = json!({
        "word_embedding_dimension": width,
        "pooling_mode_cls_token": pooling == FilePooling::Cls,
        "pooling_mode_mean_tokens": pooling == FilePooling::Mean,
        "pooling_mode_max_tokens": false,
        "pooling_mode_mean_sqrt_len_tokens": false,
    });
    let modules = json!([module(0, "", "Transformer"), module(1, "1_Pooling", "Pooling")]);
    [("modules.json", format!("{modules:#}\n")), ("1_Pooling/config.json", format!("{settings:#}\n"))]
}
