//! The kinds of shard placements are known only in `src/placement/`: adding one changes that folder and no list of kinds
//! outside it.

use std::path::Path;

use super::rust_files;

/// Kinds that other code builds by name and never matches on.
const BUILT: &str = "Shard";

/// Kinds that other code does not name: it builds them with functions of `Placement`.
const HIDDEN: [&str; 3] = ["StridedShard", "Ragged", "BlockCyclic"];

#[test]
fn kinds_of_shards_are_known_in_one_folder() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let own = crates.join("shardwise/src/placement");
    let mut read = 0;
    for name in std::fs::read_dir(crates).unwrap() {
        for file in rust_files(&name.unwrap().path().join("src")) {
            // Tests name the kinds that they test.
            let of_tests =
                ["shardwise-test-suites", "tests-outside"].iter().any(|name| file.starts_with(crates.join(name)));
            if of_tests || file.starts_with(&own) {
                continue;
            }
            read += 1;
            let found = taken_apart(&std::fs::read_to_string(&file).unwrap());
            assert!(found.is_empty(), "{}: {found:?}; ask the placement instead", file.display());
        }
    }
    assert!(read > 100, "{read} files");
}

#[test]
fn every_hidden_kind_is_a_placement() {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/placement/mod.rs")).unwrap();
    let kinds: Vec<&str> = text[text.find("pub enum Placement").unwrap()..text.find("\n}\n").unwrap()]
        .lines()
        .filter_map(|line| line.strip_prefix("    ")?.split(['(', ' ', ',']).next())
        .filter(|word| word.starts_with(char::is_uppercase))
        .collect();
    let mut known = vec![BUILT, "Replicate", "Partial"];
    known.extend(HIDDEN);
    assert!(kinds.len() == known.len() && kinds.iter().all(|kind| known.contains(kind)), "{kinds:?} are not {known:?}");
}

#[test]
fn the_check_distinguishes_values_from_patterns() {
    for taken in [
        "match p {\n    Placement::Shard(dim) if x => 1,",
        "    Shard(_) | Replicate => 1,",
        "let plain = matches!(p, Placement::Shard(_));",
        "if let Placement::Shard(dim) = p {",
        "let (Placement::Shard(a), b) = pair else {",
        "let p = Placement::StridedShard { dim: 0, split_factor: 2 };",
        "    Placement::Ragged { sizes, .. } => 2,",
    ] {
        assert_eq!(taken_apart(taken).len(), 1, "{taken}");
    }
    for value in [
        "let p = Placement::Shard(0);",
        "    Some(dim) => Placement::Shard(dim),",
        "redistribute([Shard(0), Replicate])?;",
        "// Placement::Ragged { .. } => in a comment",
        "let shard = Shard { tensor, metadata };",
        "    let p = if x { Placement::Shard(1) } else { Placement::ragged(0, sizes) };",
        "assert!(x == Placement::Shard(0));",
    ] {
        assert!(taken_apart(value).is_empty(), "{value}");
    }
}

/// The lines that name a hidden kind, or have `Shard(...)` where a pattern stands: before `=>`, in `matches!`, between
/// `let` and `=`.
fn taken_apart(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap();
        let hidden = HIDDEN.iter().any(|kind| code.contains(&format!("{kind} {{")));
        if hidden || positions(code).any(|at| is_pattern(code, at)) {
            found.push(format!("line {}: {}", number + 1, code.trim()));
        }
    }
    found
}

/// Where `Shard(` stands as a word.
fn positions(code: &str) -> impl Iterator<Item = usize> + '_ {
    let word = |at: &usize| !code[..*at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    code.match_indices("Shard(").map(|(at, _)| at).filter(word)
}

fn is_pattern(code: &str, at: usize) -> bool {
    let (before, behind) = code.split_at(at);
    let arm = behind.contains("=>");
    let matched = before.contains("matches!(");
    let bound = before.rfind("let ").is_some_and(|from| {
        let assigned = before[from..].match_indices('=').any(|(i, _)| !before[from + i..].starts_with("=="));
        !assigned && behind.contains('=')
    });
    arm || matched || bound
}
