//! docs/pytorch-operators.md: which operators of PyTorch are served, with which arguments, from the table that conformance runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use serde::Deserialize;
use shardwise_test_suites::torch_calls;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/pytorch-operators.md");
/// What `shardwise ops` knows of the table: a tier (0: not in the vectors) and a signature per line.
const SIGNATURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../shardwise-cli/data/pytorch_signatures.txt");
const VECTORS: &str = include_str!("../conformance/data/opinfo.jsonl");
const NOT_SERVED: &str = include_str!("../conformance/opinfo_not_served.txt");

#[derive(Deserialize)]
struct Case {
    op: String,
    tier: usize,
    expected_grads: Option<serde_json::Value>,
}

/// What the vectors say about an operator.
#[derive(Default)]
struct Recorded {
    tier: usize,
    cases: usize,
    gradients: usize,
}

const INTRODUCTION: &str = "\
# PyTorch's operators

Which operators of PyTorch are served, with which arguments. The signatures are those of the table that maps PyTorch's calls to ours
(`crates/shardwise-test-suites/src/torch_calls`), which shows each call in Rust. `cargo test --workspace --test conformance opinfo` runs all of them on
vectors from PyTorch's own operator database, in random placements, with gradients where PyTorch has them. This page is generated:
`SHARDWISE_UPDATE_DOCS=1 cargo test --workspace --test operators pytorch_operators`.

Tier 1 is what models use, tier 2 factorizations, statistics, special functions and results whose shape depends on data, tier 3 the rest.
`cases` are those of the vectors, `gradients` the cases among them that compare gradients. Arguments that have no meaning here (device, layout, memory
format, `out`) are left out.
";

const OUTSIDE: &str = "
## Not in the vectors

| operators | why |
|---|---|
| `bernoulli`, `normal`, `randn`, `multinomial`, ... | drawn at random, from another generator than PyTorch's; `tests/communication/random_draws.rs` |
| `complex`, `fft.fft`, `stft`, `linalg.eig`, ... | complex numbers, which are not an element type here; `ComplexTensor` has arithmetic, products and Fourier transforms |
| `sparse.*`, `to_sparse` | sparse tensors, which the library does not have |
| `as_strided`, `resize_` | the result depends on strides, which a sharded tensor does not have |
| `empty`, `new_empty`, ... | the content of the result is not determined; use `zeros` |
";

/// What the vectors say, by the name of the operator in PyTorch.
fn recorded() -> BTreeMap<String, Recorded> {
    let mut recorded: BTreeMap<String, Recorded> = BTreeMap::new();
    for line in VECTORS.lines() {
        let case: Case = serde_json::from_str(line).expect("a case per line");
        let entry = recorded.entry(case.op).or_default();
        entry.tier = case.tier;
        entry.cases += 1;
        entry.gradients += usize::from(case.expected_grads.is_some());
    }
    recorded
}

fn signatures() -> String {
    let recorded = recorded();
    let tier = |name: &str| recorded.get(name).map_or(0, |found| found.tier);
    let calls = torch_calls::families().flat_map(|(_, calls)| calls);
    calls.map(|call| format!("{} {}\n", tier(call.name()), call.signature)).collect()
}

fn page() -> String {
    let recorded = recorded();
    let reasons: BTreeMap<&str, &str> =
        NOT_SERVED.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(": ")).collect();
    let mut text = INTRODUCTION.to_string();
    let mut listed = BTreeSet::new();
    for (title, calls) in torch_calls::families() {
        write!(text, "\n## {title}\n\n| PyTorch | tier | cases | gradients |\n|---|---|---|---|\n").unwrap();
        for call in calls {
            listed.insert(call.name());
            let Recorded { tier, cases, gradients } =
                recorded.get(call.name()).unwrap_or(&Recorded { tier: 0, cases: 0, gradients: 0 });
            let tier = if *tier == 0 { String::new() } else { tier.to_string() };
            writeln!(text, "| `{}` | {tier} | {cases} | {gradients} |", call.signature.replace('|', "\\|")).unwrap();
        }
    }
    text += "\n## Known to differ, or not served\n\n| PyTorch | why |\n|---|---|\n";
    let missing = recorded.keys().filter(|name| !listed.contains(name.as_str()));
    let names: BTreeSet<&str> = reasons.keys().copied().chain(missing.map(String::as_str)).collect();
    for name in names {
        writeln!(text, "| `{name}` | {} |", reasons.get(name).unwrap_or(&"not built")).unwrap();
    }
    text + OUTSIDE
}

#[test]
fn the_page_of_operators_and_the_list_of_the_command_are_those_of_the_table() {
    for (path, text) in [(PAGE, page()), (SIGNATURES, signatures())] {
        if std::env::var_os("SHARDWISE_UPDATE_DOCS").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        let written = std::fs::read_to_string(Path::new(path)).unwrap_or_default();
        let same = written == text;
        assert!(same, "{path} is not what the table says; run this test with SHARDWISE_UPDATE_DOCS=1");
    }
}
