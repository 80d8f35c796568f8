//! The files of a tokenizer as they are written.

use serde_json::Value;

use super::files::TextFiles;

impl TextFiles {
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
