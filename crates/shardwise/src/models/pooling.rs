//! The pooling that a model was trained with.

use std::fmt;
use std::path::Path;

use serde_json::Value;

use super::encoder::Pooling;
use super::source::gguf_file;
use crate::checkpoint::gguf::{FilePooling, open_as_hf};
use crate::error::{Error, ErrorKind, Result};
use crate::read_file::{MOST_CONFIG_BYTES, read_text};

/// Where sentence-transformers keeps the settings of its pooling.
const SETTINGS: &str = "1_Pooling/config.json";

/// Reads the pooling that a model was trained with: of a directory from the `1_Pooling/config.json` of sentence-transformers, of
/// a GGUF file from its metadata; `None` if nothing says so. Local.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if the model uses another pooling than [`Pooling`] has; [`ErrorKind::Path`] if the file is not JSON.
///
/// ```no_run
/// use shardwise::models::{Pooling, load_pooling};
///
/// let pooling = load_pooling("path/to/encoder")?.unwrap_or(Pooling::Mean);
/// # Ok::<(), shardwise::Error>(())
/// ```
pub fn load_pooling(path: impl AsRef<Path>) -> Result<Option<Pooling>> {
    let path = path.as_ref();
    if let Some(file) = gguf_file(path) {
        return Ok(open_as_hf(file)?.pooling.map(|pooling| match pooling {
            FilePooling::Mean => Pooling::Mean,
            FilePooling::Cls => Pooling::Cls,
        }));
    }
    let file = path.join(SETTINGS);
    if !file.exists() {
        return Ok(None);
    }
    let unreadable = |error: &dyn fmt::Display| {
        let found = format!("{error} in {}", file.display());
        ErrorKind::path(&file).error::<Error>("pooling", found, "a JSON object", "download the file again")
    };
    let text = read_text(&file, MOST_CONFIG_BYTES).map_err(|error| unreadable(&error))?;
    let settings: Value = serde_json::from_str(&text).map_err(|error| unreadable(&error))?;
    of_settings(&settings).map_err(|mode| {
        let found = format!("{mode} in {}", file.display());
        let fix = "choose one that the model was not trained with, or use another model";
        ErrorKind::Unsupported.error("pooling", found, "the mean of all tokens, or the first token", fix)
    })
}

/// The pooling in settings of either form: a `pooling_mode`, or a flag per mode. The error is the mode that is not supported.
fn of_settings(settings: &Value) -> std::result::Result<Option<Pooling>, String> {
    if let Some(mode) = settings["pooling_mode"].as_str() {
        return match mode {
            "mean" => Ok(Some(Pooling::Mean)),
            "cls" => Ok(Some(Pooling::Cls)),
            other => Err(format!("pooling_mode {other:?}")),
        };
    }
    let flags = settings.as_object().into_iter().flatten();
    let set = flags.filter(|(name, value)| name.starts_with("pooling_mode_") && **value == Value::Bool(true));
    match set.map(|(name, _)| name.as_str()).collect::<Vec<_>>().as_slice() {
        [] => Ok(None),
        ["pooling_mode_mean_tokens"] => Ok(Some(Pooling::Mean)),
        ["pooling_mode_cls_token"] => Ok(Some(Pooling::Cls)),
        several => Err(several.join(" and ")),
    }
}
