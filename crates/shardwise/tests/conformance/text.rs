//! Tokenizers and chat templates of model directories: `models/*/cases.json`.

use std::path::Path;

use serde_json::Value;
use shardwise::text::{ChatOptions, Message, Tokenizer};
use shardwise_test_suites::vectors;

/// Checks the tokenizer of every model directory that has one.
pub(crate) fn run() {
    let (mut cases, mut failures) = (0, Vec::new());
    let mut directories: Vec<_> = std::fs::read_dir(vectors::directory().join("models"))
        .expect("a directory of models")
        .map(|entry| entry.expect("a readable directory").path())
        .filter(|path| path.join("tokenizer.json").exists())
        .collect();
    directories.sort();
    for directory in directories {
        let text = std::fs::read_to_string(directory.join("cases.json")).expect("cases.json");
        for (name, outcome) in check(&directory, &serde_json::from_str(&text).expect("JSON")) {
            cases += 1;
            if let Err(difference) = outcome {
                failures.push(format!("{}: {name}: {difference}", directory.display()));
            }
        }
    }
    vectors::conclude("text", cases, &failures);
}

/// The outcome of every text and chat case of a model directory, by name.
pub(crate) fn check(directory: &Path, cases: &Value) -> Vec<(String, Result<(), String>)> {
    let tokenizer = match Tokenizer::from_dir(directory) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return vec![("tokenizer".to_string(), Err(error.to_string()))],
    };
    let list = |name: &str| cases[name].as_array().cloned().unwrap_or_default();
    let mut outcomes = Vec::new();
    for (i, case) in list("text_cases").iter().enumerate() {
        outcomes.push((format!("text case {i}"), text_case(&tokenizer, case).map_err(|error| error.to_string())));
    }
    for (i, case) in list("chat_cases").iter().enumerate() {
        outcomes.push((format!("chat case {i}"), chat_case(&tokenizer, case).map_err(|error| error.to_string())));
    }
    outcomes
}

fn text_case(tokenizer: &Tokenizer, case: &Value) -> shardwise::Result<()> {
    let (text, ids) = (case["text"].as_str().expect("a text"), ids(&case["ids"]));
    same("ids", &tokenizer.encode(text)?, &ids)?;
    same("ids of a pair", &tokenizer.encode_pair(text, None, usize::MAX)?.ids, &ids)?;
    let without = self::ids(&case["ids_without_special"]);
    same("ids without special tokens", &tokenizer.encode_without_special(text)?, &without)?;
    let decoded = case["decoded"].as_str().expect("a text");
    same("text", tokenizer.decode(&ids)?.as_str(), decoded)?;
    let mut stream = tokenizer.stream(&[]);
    let mut streamed = ids.iter().map(|&id| stream.push(id)).collect::<shardwise::Result<String>>()?;
    streamed += &stream.finish()?;
    same("streamed text", streamed.as_str(), decoded)
}

fn chat_case(tokenizer: &Tokenizer, case: &Value) -> shardwise::Result<()> {
    let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).expect("messages");
    let options =
        ChatOptions { add_generation_prompt: case["add_generation_prompt"] == true, ..ChatOptions::default() };
    same("text", tokenizer.chat_text(&messages, &options)?.as_str(), case["text"].as_str().expect("a text"))?;
    same("ids", &tokenizer.encode_chat(&messages, &options)?, &ids(&case["ids"]))
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("a list of ids")
}

fn same<T: PartialEq + std::fmt::Debug + ?Sized>(what: &str, got: &T, expected: &T) -> shardwise::Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(shardwise::Error::other(format!("{what}: got {got:?}, expected {expected:?}")))
}
