//! Prose uses the field's words: a list of phrases that have a better one, looked for in comments, string literals and
//! Markdown. A line that has to use one of them, for instance because it quotes it, carries the comment `words: allow`.
//!
//! `scripts/check-words [PATH ...]` prints the findings of some directories.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use super::prose::{ProseWord, split_rust, words};

/// A phrase and what to write instead.
///
/// Words are separated by spaces and may have alternatives (`is|are`). A last word that begins with `!` lists words that, if they
/// follow, make the phrase a good one; a first word that begins with `!` lists such words in front of it.
type PhraseRule = (&'static str, &'static str);

const RULES: &[PhraseRule] = &[
    ("lie|lies", "is placed, is stored, is in"),
    ("carried|carries|carry out", "executed, runs; reduced"),
    ("way back", "the backward pass"),
    ("pending sum|sums", "partial sum"),
    ("cut|cuts|cutting !off|short", "sharded, split, truncated"),
    ("whole number|numbers", "integers"),
    ("not-a-number", "NaN"),
    ("said apart", "specified separately"),
    ("of one's own", "custom"),
    ("program's own", "custom"),
    ("how a|the|each|every tensor|parameter|weight|table begins", "initializer"),
    ("how it|they begins|begin", "initializer"),
    ("half a wave", "cosine decay"),
    ("largest mean", "AMSGrad"),
    ("input or output failed", "I/O error"),
    ("memory at most", "peak memory"),
    ("ranks that share a|the dimension", "ranks a dimension is sharded over"),
    ("tell|tells|told !apart", "reports, is reported, returns"),
    ("is|are|was|were|be|been|being|it|tensor|value made", "created, built, returned, allocated"),
    ("made of|from|anew", "created, built, returned, allocated"),
    ("makes of|new|from", "creates, builds, returns, allocates"),
    ("makes a|an !call|mistake|difference", "creates, builds, returns, allocates"),
    ("a|one|this|the|each|every|such|another training !RUN", "a training run"),
    ("elsewhere", "name the place"),
    ("others", "name the things"),
    ("those that", "name the things"),
    ("!there is|are|was|were no !NO", "is not a, are not"),
    ("beside", "next to, compared with, together with, in addition to"),
    ("behind it|them|each|every|one !is|are", "after"),
    ("zeros|rows|columns|padding|elements|added behind", "after"),
    (
        "rank|ranks|tensor|tensors|axis|dimension|seed|size|sizes|shape|layout|layouts|index|metadata|argument|value alone",
        "only",
    ),
];

/// Nouns that may follow "training".
const RUN: &str = "run|runs|step|steps|loop|loops|data|set|loss|losses|tokens|batch|batches|program|script|job|curve|mode|text|state|\
                   command|example|code|process|world|test|tests|settings|configuration|sample|samples|log|bench|benchmark";

/// Words that may follow "is no".
const NO: &str = "longer|larger|smaller|faster|slower|worse|better|more|less|such|need|way|use|different";

/// Files that are not checked: the list above.
const UNCHECKED: &[&str] = &["tests/communication/architecture/words.rs"];

/// The rules by each word that a phrase may begin with.
static RULES_BY_WORD: LazyLock<HashMap<&str, Vec<PhraseRule>>> = LazyLock::new(|| {
    let mut rules: HashMap<&str, Vec<PhraseRule>> = HashMap::new();
    for (phrase, instead) in RULES {
        for word in split_rule(phrase).1.split(' ').next().unwrap_or_default().split('|') {
            rules.entry(word).or_default().push((phrase, instead));
        }
    }
    rules
});

struct WordFinding {
    file: PathBuf,
    line: usize,
    phrase: String,
    instead: &'static str,
}

impl fmt::Display for WordFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: \"{}\": {}", self.file.display(), self.line, self.phrase, self.instead)
    }
}

/// The words that may not come before a phrase, and the phrase.
fn split_rule(phrase: &str) -> (&str, &str) {
    phrase.strip_prefix('!').and_then(|rest| rest.split_once(' ')).unwrap_or(("", phrase))
}

/// Whether the words at the start of `words`, which follow the word `before`, are the phrase; how many they are.
fn matches(phrase: &str, before: &str, words: &[ProseWord]) -> Option<usize> {
    let (excepted, phrase) = split_rule(phrase);
    if !before.is_empty() && excepted.split('|').any(|other| other == before) {
        return None;
    }
    let mut length = 0;
    for alternatives in phrase.split(' ') {
        let word = words.get(length).map_or("", |word| word.text.as_str());
        if let Some(exceptions) = alternatives.strip_prefix('!') {
            let exceptions = match exceptions {
                "RUN" => RUN,
                "NO" => NO,
                listed => listed,
            };
            return (!exceptions.split('|').any(|other| other == word)).then_some(length);
        }
        if !alternatives.split('|').any(|other| other == word) {
            return None;
        }
        length += 1;
    }
    Some(length)
}

/// The findings in a text, as line, phrase and what to write instead.
fn findings(text: &str, is_rust: bool) -> Vec<(usize, String, &'static str)> {
    let words = if is_rust { words(&split_rust(text).prose) } else { words(text) };
    let lines: Vec<&str> = text.split('\n').collect();
    let mut found = Vec::new();
    for start in 0..words.len() {
        for (phrase, instead) in RULES_BY_WORD.get(words[start].text.as_str()).into_iter().flatten() {
            let before = if start > 0 { words[start - 1].text.as_str() } else { "" };
            let Some(length) = matches(phrase, before, &words[start..]) else { continue };
            let line = words[start].line;
            if !lines[line - 1].contains("words: allow") {
                let texts: Vec<&str> = words[start..start + length].iter().map(|word| word.text.as_str()).collect();
                found.push((line, texts.join(" "), *instead));
            }
        }
    }
    found
}

fn prose_files(path: &Path, files: &mut Vec<PathBuf>) {
    let hidden = path.file_name().is_some_and(|name| name == "target" || name.to_string_lossy().starts_with('.'));
    let unchecked = UNCHECKED.iter().any(|end| path.ends_with(end));
    if hidden || unchecked {
        return;
    }
    if let Ok(entries) = std::fs::read_dir(path) {
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().for_each(|path| prose_files(path, files));
    } else if path.extension().is_some_and(|end| end == "rs" || end == "md") {
        files.push(path.to_owned());
    }
}

/// The paths to check: those of `SHARDWISE_WORDS`, else the workspace.
fn checked_paths() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned();
    match std::env::var("SHARDWISE_WORDS") {
        Ok(paths) => paths.split_whitespace().map(PathBuf::from).collect(),
        Err(_) => vec![root],
    }
}

#[test]
fn prose_uses_the_words_of_the_field() {
    let mut files = Vec::new();
    checked_paths().iter().for_each(|path| prose_files(path, &mut files));
    assert!(!files.is_empty(), "no .rs or .md file in {:?}", checked_paths());
    let mut found = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let is_rust = file.extension().is_some_and(|end| end == "rs");
        found.extend(findings(&text, is_rust).into_iter().map(|(line, phrase, instead)| WordFinding {
            file: file.clone(),
            line,
            phrase,
            instead,
        }));
    }
    let lines: Vec<String> = found.iter().map(WordFinding::to_string).collect();
    assert!(lines.is_empty(), "write instead (or add `words: allow` to the line):\n{}\n", lines.join("\n"));
}

#[test]
fn phrases_are_found_across_lines_and_only_in_prose() {
    let source = "/// The sum is carried\n/// out here. Out of it.\nfn cut() { let tells = \"a whole\\\n  number\"; }\n\
                  // a training run, a training that ends\n// lies // words: allow\n// was cut off, not cut\n\
                  // there is no bound, a bound is no shape, and no longer one\n// of this rank alone, left alone\n";
    let found: Vec<(usize, String)> =
        findings(source, true).into_iter().map(|(line, phrase, _)| (line, phrase)).collect();
    let expected =
        [(1, "carried out"), (3, "whole number"), (5, "a training"), (7, "cut"), (8, "is no"), (9, "rank alone")];
    assert_eq!(found, expected.map(|(line, phrase)| (line, phrase.to_owned())));
}
