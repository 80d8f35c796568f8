//! Every operator method of `DTensor` is in the operator table, so that the tests that iterate over the table cover it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use shardwise::ops::{composed_ops, ops};

/// Methods that are not in the table, and why.
const OUTSIDE: &[(&str, &str)] = &[
    ("sum_all", "sum over no named dimensions, which the entry of sum calls"),
    ("mean_all", "mean over no named dimensions, which the entry of mean calls"),
    ("where_", "where_cond with its operands in another order"),
    ("attention_with_logsumexp", "scaled_dot_product_attention with a second result; the entry of that calls it"),
    ("quantized_linear", "takes blocks of bytes; tests/quantized.rs compares it with expanded weights in every layout"),
    ("dequantize", "takes blocks of bytes; tests/quantized.rs compares it in every layout"),
    ("i", "slices, selections and lookups, each an entry; tests/indexing.rs compares expressions of them"),
    ("set", "changes a tensor and returns none; tests/indexing.rs compares what it holds afterwards"),
];

/// The public methods in `impl DTensor` blocks of a source file, and the methods that its table of functions defines.
fn methods(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut block = "";
    for line in source.lines() {
        match line {
            "impl DTensor {" | "functions! {" => block = line,
            "}" => block = "",
            _ => {}
        }
        let name = |rest: &str| rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect::<String>();
        let defined = match block {
            "impl DTensor {" => line.strip_prefix("    pub fn ").map(name),
            "functions! {" => line.strip_prefix("    ").map(name).filter(|n| line[4 + n.len()..].starts_with(": ")),
            _ => None,
        };
        found.extend(defined.filter(|name| !name.is_empty()));
    }
    found
}

/// The files of a folder and of the folders in it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn every_operator_method_is_in_the_table_or_has_a_reason() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    let mut all = BTreeSet::new();
    for file in files(&sources) {
        all.extend(methods(&std::fs::read_to_string(file).unwrap()));
    }
    assert!(all.len() > 150, "{all:?}");
    let table: BTreeSet<String> = ops().chain(composed_ops()).map(|op| op.name.to_owned()).collect();
    assert_eq!(table.len(), ops().count() + composed_ops().count(), "an operator is in the table twice");
    let outside: BTreeSet<String> = OUTSIDE.iter().map(|(name, _)| (*name).to_owned()).collect();
    let missing: Vec<&String> = all.iter().filter(|name| !table.contains(*name) && !outside.contains(*name)).collect();
    assert!(missing.is_empty(), "neither in the table nor listed with a reason: {missing:?}");
    let unknown: Vec<&String> = table.union(&outside).filter(|name| !all.contains(*name)).collect();
    assert!(unknown.is_empty(), "no method of a tensor: {unknown:?}");
    let both: Vec<&String> = table.intersection(&outside).collect();
    assert!(both.is_empty(), "in the table, and listed as not being there: {both:?}");
}

#[test]
fn methods_are_found_in_blocks_and_in_tables_alone() {
    let source = "
impl DTensor {
    /// Doc.
    pub fn first(&self) -> Result<DTensor> {
        inner.pub_fn()
    }
    fn hidden(&self) {}
    pub fn second<'a>(
}
impl Other {
    pub fn third(&self) {}
}
functions! {
    /// The negative.
    fourth: Same, |x| each(-x)
        => slope(|_| -1.0, |x| {
            let t = x.tanh()?;
        });
}
";
    assert_eq!(methods(source), ["first", "second", "fourth"]);
}
