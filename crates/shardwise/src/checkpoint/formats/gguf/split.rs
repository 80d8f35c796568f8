//! Models in several GGUF files, as `llama-gguf-split` writes them: `name-00001-of-00003.gguf`, each with a part of the tensors.

use crate::checkpoint::metadata::value::Value;
use crate::error::{ErrorKind, Result};
use std::collections::BTreeMap;

/// The most files that a model is read from: each has a header of its own, and real models have a few dozen.
const MAX_FILES: usize = 10_000;

/// The files of a model, the first one first, if `name` is of the form of a part; otherwise only `name`.
pub(super) fn parts(name: &str) -> Vec<String> {
    let alone = || vec![name.to_string()];
    let Some((start, _, count)) = parse(name) else { return alone() };
    if count == 0 || count > MAX_FILES {
        return alone();
    }
    let extension = &name[name.len() - ".gguf".len()..];
    (1..=count).map(|number| format!("{start}-{number:05}-of-{count:05}{extension}")).collect()
}

/// What is before the numbers, the number of the file, and the number of files.
fn parse(name: &str) -> Option<(&str, usize, usize)> {
    let stem = name.get(..name.len().checked_sub(".gguf".len())?)?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (start, number) = rest.rsplit_once('-')?;
    let parsed = |text: &str| {
        let digits = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse::<usize>().ok()).flatten()
    };
    Some((start, parsed(number)?, parsed(count)?))
}

/// Checks what the header of file `index` says about the split against the number of files.
pub(super) fn check(name: &str, values: &BTreeMap<String, Value>, index: usize, count: usize) -> Result<()> {
    let number = |key: &str| match values.get(key) {
        Some(Value::Int(n)) => usize::try_from(*n).ok(),
        _ => None,
    };
    let said = (number("split.no").unwrap_or(0), number("split.count").unwrap_or(1).max(1));
    if said == (index, count) {
        return Ok(());
    }
    let found = format!("{name:?}, which says that it is file {} of {}", said.0 + 1, said.1);
    let needed = format!("file {} of {count}", index + 1);
    Err(ErrorKind::Damaged.error("GGUF file", found, needed, "keep the names that the files were written with"))
}

#[test]
fn names_of_parts_are_those_of_llama_cpp() {
    let all = parts("model-Q4_0-00002-of-00003.gguf");
    let expected = ["00001", "00002", "00003"].map(|n| format!("model-Q4_0-{n}-of-00003.gguf"));
    assert_eq!(all, expected);
    for alone in ["model.gguf", "x-1-of-3.gguf", "x-00001-of-00000.gguf", "x-00001-of-99999.gguf", "gguf", "é.gguf"] {
        assert_eq!(parts(alone), [alone]);
    }
}
