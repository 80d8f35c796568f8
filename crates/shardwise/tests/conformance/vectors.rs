//! Reading vectors, running a check over them, and telling what came out.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::Value;
use shardwise::{Placement, ReduceOp};

/// A placement as the vectors write it.
#[derive(Deserialize, Debug)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum PlacementForm {
    Replicate,
    Shard { dim: isize },
    StridedShard { dim: isize, split_factor: usize },
    Partial { op: String },
}

impl PlacementForm {
    pub(crate) fn to_placement(&self) -> Placement {
        match self {
            PlacementForm::Replicate => Placement::Replicate,
            PlacementForm::Shard { dim } => Placement::Shard(*dim),
            PlacementForm::StridedShard { dim, split_factor } => {
                Placement::StridedShard { dim: *dim, split_factor: *split_factor }
            }
            PlacementForm::Partial { op } => Placement::Partial(op.parse::<ReduceOp>().expect("a known reduction")),
        }
    }
}

/// A tensor as the vectors write it.
#[derive(Deserialize, Debug)]
pub(crate) struct TensorForm {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    data: Vec<Value>,
}

impl TensorForm {
    /// The tensor; types that candle lacks become the next larger one, bool becomes u8.
    pub(crate) fn to_tensor(&self) -> Tensor {
        let whole = |v: &Value| v.as_i64().or_else(|| v.as_bool().map(i64::from)).expect("a whole number or bool");
        let real = |v: &Value| match v.as_str() {
            Some("nan") => f64::NAN,
            Some("inf") => f64::INFINITY,
            Some("-inf") => f64::NEG_INFINITY,
            _ => v.as_f64().expect("a number"),
        };
        let dtype = match self.dtype.as_str() {
            "bool" => DType::U8,
            "i8" => DType::I16,
            other => other.parse().expect("a known type"),
        };
        let made = match dtype.is_float() {
            true => {
                Tensor::from_vec(self.data.iter().map(real).collect::<Vec<f64>>(), self.shape.as_slice(), &Device::Cpu)
            }
            false => {
                Tensor::from_vec(self.data.iter().map(whole).collect::<Vec<i64>>(), self.shape.as_slice(), &Device::Cpu)
            }
        };
        made.and_then(|t| t.to_dtype(dtype)).expect("as many elements as the shape has")
    }
}

/// Runs `check` on every case of `<name>.jsonl`, prints `conformance <name>: <passed>/<total>` and every difference, and
/// fails if any case failed.
pub(crate) fn run(name: &str, check: fn(&Value) -> Result<(), String>) {
    let path = directory().join(format!("{name}.jsonl"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()));
    let cases: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("a JSON object per line")).collect();
    let mut failures = Vec::new();
    for case in &cases {
        let outcome = catch_unwind(AssertUnwindSafe(|| check(case))).unwrap_or_else(|_| Err("panicked".into()));
        if let Err(difference) = outcome {
            failures.push(format!("{}: {difference}", case["id"]));
        }
    }
    conclude(name, cases.len(), &failures);
}

/// Where the vectors are.
pub(crate) fn directory() -> PathBuf {
    std::env::var_os("SHARDWISE_CONFORMANCE_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data"), PathBuf::from)
}

/// Prints how many cases passed and every difference; fails if any case failed, or if there are none.
pub(crate) fn conclude(name: &str, cases: usize, failures: &[String]) {
    // Not println!: the count is to be seen even when the test passes and its output is captured.
    let mut out = std::io::stdout().lock();
    writeln!(out, "conformance {name}: {}/{cases}", cases - failures.len()).expect("standard output");
    for failure in failures {
        writeln!(out, "  {failure}").expect("standard output");
    }
    drop(out);
    assert!(cases > 0, "no cases of {name} in {}", directory().display());
    assert!(failures.is_empty(), "{} of {cases} cases failed", failures.len());
}
