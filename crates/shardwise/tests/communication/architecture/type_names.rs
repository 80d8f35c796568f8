//! A type name is defined once in a crate, so that a reader who meets it knows which one is meant. Unit tests, associated
//! types and types that a macro names are not counted. Definitions of one type for different platforms carry the comment
//! `type name: allow`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::prose::split_rust;

/// The type that a line of code defines.
fn defined_type(line: &str) -> Option<&str> {
    let mut rest = line.trim_start();
    let indented = rest.len() < line.len();
    if let Some(after) = rest.strip_prefix("pub") {
        rest = after.strip_prefix('(').map_or(after, |scope| scope.split_once(')').map_or(scope, |(_, rest)| rest));
        rest = rest.trim_start();
    }
    rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    // An indented alias is an associated type.
    let kinds: &[&str] = if indented {
        &["struct ", "enum ", "trait ", "union "]
    } else {
        &["struct ", "enum ", "trait ", "union ", "type "]
    };
    let after = kinds.iter().find_map(|kind| rest.strip_prefix(kind))?;
    let name = super::first_word(after);
    name.starts_with(char::is_uppercase).then_some(name)
}

/// The lines of a file's code that define types, without those of unit tests.
fn definitions(text: &str) -> Vec<(usize, String)> {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let code = split_rust(text).code;
    let lines = code.lines().zip(text.lines()).enumerate();
    let counted = lines.filter(|(_, (_, source))| !source.contains("type name: allow"));
    counted.filter_map(|(index, (line, _))| Some((index + 1, defined_type(line)?.to_owned()))).collect()
}

#[test]
fn no_type_name_is_defined_twice_in_a_crate() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut twice = Vec::new();
    for entry in std::fs::read_dir(crates).unwrap() {
        let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut files: Vec<PathBuf> = super::rust_files(&entry.unwrap().path().join("src"));
        files.retain(|file| !file.ends_with("tests.rs"));
        files.sort();
        for file in files {
            for (line, name) in definitions(&std::fs::read_to_string(&file).unwrap()) {
                let file = file.strip_prefix(crates).unwrap().display();
                places.entry(name).or_default().push(format!("{file}:{line}"));
            }
        }
        let repeated = places.into_iter().filter(|(_, places)| places.len() > 1);
        twice.extend(repeated.map(|(name, places)| format!("{name}: {}", places.join(" "))));
    }
    assert!(twice.is_empty(), "give all but one a name that says more:\n{}\n", twice.join("\n"));
}

#[test]
fn definitions_are_found_in_code_alone() {
    let text = "pub(crate) struct One<T>;\n// struct Two;\nimpl A for B {\n    type Output = One;\n}\ntype Three = u8;\n\
                fn f() {\n    enum Four { A }\n    let s = \"\nstruct Five;\";\n}\nstruct Six; // type name: allow\n\
                #[cfg(test)]\nmod tests {\n    struct One;\n}\n";
    let names: Vec<String> = definitions(text).into_iter().map(|(_, name)| name).collect();
    assert_eq!(names, ["One", "Three", "Four"]);
}
