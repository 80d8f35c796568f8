//! Test vectors recorded from PyTorch: reads them, runs a check on every case, and prints how many cases passed.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::Value;
use shardwise::{Error, Placement, ReduceOp};

/// A placement in the vectors' JSON: `{"kind": "shard", "dim": 0}`.
#[derive(Clone, Deserialize, Debug)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RecordedPlacement {
    /// [`Placement::Replicate`].
    Replicate,
    /// [`Placement::Shard`].
    #[allow(missing_docs)]
    Shard { dim: isize },
    /// [`Placement::StridedShard`].
    #[allow(missing_docs)]
    StridedShard { dim: isize, split_factor: usize },
    /// [`Placement::Partial`], with the reduction's name in PyTorch.
    #[allow(missing_docs)]
    Partial { op: String },
}

impl RecordedPlacement {
    /// The placement of the library.
    ///
    /// # Panics
    /// If the reduction is unknown.
    pub fn to_placement(&self) -> Placement {
        match self {
            RecordedPlacement::Replicate => Placement::Replicate,
            RecordedPlacement::Shard { dim } => Placement::Shard(*dim),
            RecordedPlacement::StridedShard { dim, split_factor } => {
                Placement::StridedShard { dim: *dim, split_factor: *split_factor }
            }
            RecordedPlacement::Partial { op } => Placement::Partial(op.parse::<ReduceOp>().expect("a known reduction")),
        }
    }
}

/// A tensor in the vectors' JSON: dtype, shape, and the elements in row-major order.
#[derive(Clone, Deserialize, Debug)]
pub struct RecordedTensor {
    /// Name of the type, such as `f32`, `i8` or `bool`.
    pub dtype: String,
    /// Size of every dimension.
    pub shape: Vec<usize>,
    data: Vec<Value>,
}

impl RecordedTensor {
    /// The tensor. Types that candle lacks become the next larger one (`i8` is read as `i16`), bool becomes `u8`.
    pub fn to_tensor(&self) -> Tensor {
        let integer = |v: &Value| v.as_i64().or_else(|| v.as_bool().map(i64::from)).expect("an integer or a bool");
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
        let tensor = match dtype.is_float() {
            true => {
                Tensor::from_vec(self.data.iter().map(real).collect::<Vec<f64>>(), self.shape.as_slice(), &Device::Cpu)
            }
            false => Tensor::from_vec(
                self.data.iter().map(integer).collect::<Vec<i64>>(),
                self.shape.as_slice(),
                &Device::Cpu,
            ),
        };
        tensor.and_then(|t| t.to_dtype(dtype)).expect("as many elements as the shape has")
    }
}

/// Runs `check` on every case of `<name>.jsonl`, prints `conformance <name>: <passed>/<total>` and every difference, and
/// fails if any case failed.
pub fn run(name: &str, check: fn(&Value) -> Result<(), String>) {
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

/// The directory of the vectors: `SHARDWISE_CONFORMANCE_DIR` if set, else the vectors of the repository.
pub fn directory() -> PathBuf {
    std::env::var_os("SHARDWISE_CONFORMANCE_DIR").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shardwise/tests/conformance/data"),
        PathBuf::from,
    )
}

/// Prints how many cases passed and every difference; fails if any case failed, or if there are none.
pub fn conclude(name: &str, cases: usize, failures: &[String]) {
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

/// Compares a result with the recorded tensor: shape and dtype equal, elements within `atol + rtol * |expected|`.
pub fn close(got: &Tensor, expected: &Tensor, rtol: f64, atol: f64) -> shardwise::Result<()> {
    if got.dims() != expected.dims() || got.dtype() != expected.dtype() {
        return Err(Error::other(format!(
            "got {:?} {:?}, expected {:?} {:?}",
            got.dtype(),
            got.dims(),
            expected.dtype(),
            expected.dims()
        )));
    }
    if got.elem_count() == 0 {
        return Ok(());
    }
    let values = |t: &Tensor| -> shardwise::Result<Vec<f64>> { Ok(t.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?) };
    let fits = |a: f64, b: f64| a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= atol + rtol * b.abs();
    let (elements, recorded) = (values(got)?, values(expected)?);
    let mut wrong = elements.iter().zip(&recorded).enumerate().filter(|(_, (a, b))| !fits(**a, **b));
    let Some((first, (a, b))) = wrong.next() else { return Ok(()) };
    let (count, shape) = (1 + wrong.count(), got.dims());
    Err(Error::other(format!(
        "{count} of {} elements of {shape:?} differ: got {a} at {first}, expected {b}",
        elements.len()
    )))
}
