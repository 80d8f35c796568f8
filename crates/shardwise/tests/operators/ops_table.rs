//! Every operator method of `DTensor` is in the operator table, so that the tests that iterate over the table cover it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use shardwise::ops::{SampleInput, composed_ops, ops};
use shardwise::prelude::*;

/// Methods that are not in the table, and why.
const OUTSIDE: &[(&str, &str)] = &[
    ("sum_all", "sum over no named dimensions, which the entry of sum calls"),
    ("mean_all", "mean over no named dimensions, which the entry of mean calls"),
    ("where_", "where_cond with its operands in another order"),
    ("assign", "writes to a variable; tests/communication/dtensor.rs compares it in every layout"),
    ("fill_range", "writes to a variable; tests/communication/dtensor.rs compares it in every layout"),
    ("fill", "writes to a variable; tests/communication/dtensor.rs compares it in every layout"),
    ("copy_from", "writes to a variable; tests/communication/dtensor.rs compares it in every layout"),
    ("attention_with_logsumexp", "scaled_dot_product_attention with a second result; the entry of that calls it"),
    (
        "quantized_linear",
        "takes blocks of bytes; tests/operators/quantized.rs compares it with expanded weights in every layout",
    ),
    (
        "scaled_mm",
        "takes f8, which samples do not have; tests/operators/pytorch/eight_bit.rs compares it with PyTorch in every layout",
    ),
    (
        "view_as_complex",
        "returns complex numbers; tests/operators/pytorch/complex.rs compares them with PyTorch in every layout",
    ),
    (
        "fft_rfft",
        "returns complex numbers; tests/operators/pytorch/complex.rs compares them with PyTorch in every layout",
    ),
    ("i", "slices, selections and lookups, each an entry; tests/operators/indexing.rs compares expressions of them"),
    ("set", "changes a tensor and returns none; tests/operators/indexing.rs compares what it holds afterwards"),
];

/// The public methods in `impl DTensor` blocks of a source file, and the methods that its table of elementwise functions defines:
/// whether it is one of the table, and its name.
pub(crate) fn methods(source: &str) -> Vec<(bool, String)> {
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
        found.extend(defined.filter(|name| !name.is_empty()).map(|name| (block == "functions! {", name)));
    }
    found
}

/// The files of a folder and of the folders in it.
pub(crate) fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn every_operator_method_is_in_the_table_or_has_a_reason() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    let mut all = BTreeSet::new();
    for file in files(&sources) {
        all.extend(methods(&std::fs::read_to_string(file).unwrap()).into_iter().map(|(_, name)| name));
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
    let found = [(false, "first"), (false, "second"), (true, "fourth")];
    assert_eq!(methods(source), found.map(|(is_table, name)| (is_table, name.to_string())));
}

/// A rank outside the mesh runs the same program; it holds nothing, and its calls return.
#[test]
fn every_operator_returns_on_a_rank_outside_the_mesh() {
    let run = |world: World| {
        let mesh = world.device_mesh(Mesh::from_ranks([("a", 2)], vec![0, 2])?)?;
        let mut failed = Vec::new();
        for op in ops().chain(composed_ops()) {
            for samples in (op.samples)() {
                let input = |sample: &SampleInput| {
                    let value = |at: &[usize]| {
                        let flat = at.iter().fold(1, |sum, i| sum * 3 + i);
                        sample.below.map_or(0.25 + (flat % 7) as f64 / 8.0, |n| (flat % n) as f64)
                    };
                    let whole = DTensor::from_fn(sample.shape.as_slice(), sample.dtype, &mesh, [Replicate], value)?;
                    if sample.shape.is_empty() { Ok(whole) } else { whole.redistribute([Shard(0)]) }
                };
                mesh.manual_seed(7);
                let inputs = samples.iter().map(input).collect::<Result<Vec<_>>>()?;
                if let Err(error) = (op.apply)(&inputs) {
                    failed.push(format!("{}: {error}", op.name));
                }
            }
        }
        Ok(failed)
    };
    let deadline = std::time::Duration::from_secs(60);
    let failed = ThreadWorld::new(3).unwrap().deadline(deadline).run(run).unwrap();
    assert!(failed.iter().all(Vec::is_empty), "{failed:#?}");
}
