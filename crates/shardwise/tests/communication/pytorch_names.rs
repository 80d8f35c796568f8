//! A search of the documentation for a PyTorch name finds the corresponding item.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The lines of `data/pytorch_names.txt` without comments.
fn entries() -> impl Iterator<Item = &'static str> {
    let text = include_str!("../data/pytorch_names.txt");
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// The names that must be found.
fn wanted() -> Vec<&'static str> {
    entries().filter(|line| !line.starts_with("- ")).collect()
}

/// The names without a counterpart, with the reason.
fn without_counterpart() -> Vec<(&'static str, &'static str)> {
    let reasons = entries().filter_map(|line| line.strip_prefix("- "));
    reasons.map(|line| line.split_once(": ").unwrap_or((line, ""))).collect()
}

fn rust_files(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => rust_files(&path, files),
            false => files.extend(path.extension().is_some_and(|end| end == "rs").then_some(path)),
        }
    }
}

fn identifier(text: &str) -> &str {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default()
}

/// The name that a line declares: a public item or a method of a trait.
fn declared(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let is_public = line.strip_prefix("pub ");
    let mut rest = is_public.unwrap_or(line);
    while let Some(next) = ["async ", "unsafe ", "const fn ", "default "].iter().find_map(|word| {
        let next = rest.strip_prefix(word)?;
        Some(if *word == "const fn " { &rest["const ".len()..] } else { next })
    }) {
        rest = next;
    }
    let kinds = ["fn ", "struct ", "enum ", "trait ", "type ", "const ", "mod ", "static "];
    let name = kinds.iter().find_map(|kind| rest.strip_prefix(kind)).map(identifier)?;
    (is_public.is_some() || rest.starts_with("fn ")).then_some(name)
}

/// The names that a source re-exports, which include items that macros declare.
fn exported(source: &str) -> BTreeSet<String> {
    let uses = source.split("\npub use ").skip(1).map(|rest| rest.split(';').next().unwrap_or_default());
    let names = uses.flat_map(|list| list.split(['{', '}', ',', ' ', '\n'])).filter(|name| !name.ends_with("::"));
    names.filter_map(|path| path.rsplit("::").next()).filter(|name| !name.is_empty()).map(str::to_string).collect()
}

/// All names by which the documentation of a source file is found: items, enum variants, and `doc(alias)` names.
fn found_in(source: &str) -> BTreeSet<String> {
    let mut names = exported(source);
    let mut in_enum = false;
    for line in source.lines().map(str::trim_end) {
        let code = line.trim_start();
        if code.starts_with("//") {
            continue;
        }
        if let Some(alias) = code.strip_prefix("#[doc(alias = \"") {
            names.insert(alias.split('"').next().unwrap_or_default().to_string());
        }
        names.extend(declared(line).map(str::to_string));
        in_enum = match (line.starts_with("pub enum "), line == "}") {
            (true, _) => true,
            (_, true) => false,
            _ => in_enum,
        };
        let is_variant = in_enum && line.len() - code.len() == 4 && code.starts_with(char::is_uppercase);
        names.extend(is_variant.then(|| identifier(code).to_string()));
    }
    names
}

/// All names by which the documentation is found.
fn documented() -> BTreeSet<String> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut files = Vec::new();
    for name in ["shardwise", "shardwise-kernels"] {
        rust_files(&crates.join(name).join("src"), &mut files);
    }
    files.iter().flat_map(|file| found_in(&std::fs::read_to_string(file).unwrap())).collect()
}

#[test]
fn every_name_of_pytorch_is_found() {
    let names = documented();
    let lost: Vec<&str> = wanted().into_iter().filter(|name| !names.contains(*name)).collect();
    assert!(lost.is_empty(), "{lost:?}: give the item that does the same a #[doc(alias = \"...\")]");
}

#[test]
fn names_without_a_counterpart_have_a_reason_and_are_not_found() {
    let names = documented();
    for (name, reason) in without_counterpart() {
        assert!(reason.len() > 10, "{name} has no reason");
        assert!(!names.contains(name), "{name} has a counterpart: move it to the names that must be found");
    }
}

#[test]
fn the_list_has_every_name_once() {
    let mut names = wanted();
    names.extend(without_counterpart().into_iter().map(|(name, _)| name));
    names.sort_unstable();
    let twice: Vec<&[&str]> = names.windows(2).filter(|pair| pair[0] == pair[1]).collect();
    assert!(twice.is_empty() && names.len() > 150, "{} names, {twice:?}", names.len());
}

#[test]
fn names_are_found_in_items_variants_and_aliases_alone() {
    let source = r#"
// pub struct Commented;
/// pub struct Documented;
#[doc(alias = "Alias")]
pub struct Item<T> { pub field: T }
pub use module::{Second, inner::Third};
pub use module::First;
pub(crate) use module::Inside;
pub(crate) struct Hidden;
struct Private;
pub enum Kind {
    /// A variant.
    Variant(usize),
}
    pub const fn constant(&self) {}
    fn of_a_trait(&self);
"#;
    let found = found_in(source);
    let names = ["Alias", "First", "Item", "Kind", "Second", "Third", "Variant", "constant", "of_a_trait"];
    assert_eq!(found, names.map(String::from).into());
}
