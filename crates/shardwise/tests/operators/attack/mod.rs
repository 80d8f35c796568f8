//! Differential fuzzing against PyTorch: random calls of operators with random shapes, dtypes, values, meshes and
//! placements, and randomly invalid calls.
//!
//! Values, dtypes, shapes and gradients of every call are compared in several settings, on one rank and on several. All
//! ranks must return the same result, an invalid call must be the same typed error on all of them, and nothing may hang or
//! panic.
//!
//! By default it runs the calls of the first seeds, whose answers are recorded in `data/answers.jsonl`. With
//! `SHARDWISE_ATTACK_LIVE=1` a PyTorch answers (that of `SHARDWISE_PYTHON`, see `scripts/attack_oracle.py`), so that
//! any number of calls can run: `SHARDWISE_ATTACK_CASES`, from `SHARDWISE_SEED` on, or as many as
//! `SHARDWISE_ATTACK_SECONDS` allow. `SHARDWISE_ATTACK_OP` selects one operator. `SHARDWISE_ATTACK_RECORD=1` rewrites
//! the recorded answers. The full run, with the seeds that come after those of the last one:
//!
//! ```text
//! SHARDWISE_PYTHON=... SHARDWISE_ATTACK_LIVE=1 SHARDWISE_SEED=130000 SHARDWISE_ATTACK_CASES=20000 \
//!     cargo test --workspace --test operators attack
//! ```
//!
//! Every difference is a defect, with a test in `found`, or one that is meant, with a reason in [`MEANT`]. Rounding is never meant:
//! the oracle says how far each value may be off.

mod draw;
mod found;
mod judge;
mod numbers;
mod operators;
mod oracle;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use draw::{Draw, Setting};
use numbers::Input;
use operators::Operator;
use oracle::{Answer, Live, Recorded};
use serde::Serialize;
use serde_json::Value;
use shardwise_test_suites::own_process::is_alone;
use shardwise_test_suites::settings::env_or;

/// A call without its layouts: all that the oracle needs.
#[derive(Debug, Serialize)]
pub(crate) struct Call {
    op: &'static str,
    attrs: Value,
    inputs: Vec<Input>,
    /// Whether gradients are taken.
    gradients: bool,
    seed: u64,
    /// How many elements of a large result are compared one by one.
    samples: usize,
}

/// Calls whose answers are recorded.
const RECORDED: u64 = 900;

/// Settings that every call runs in, besides one rank.
const SETTINGS: u64 = 2;

/// Number of calls sent to the oracle ahead of their comparison.
const AHEAD: usize = 32;

/// An intended difference from PyTorch.
struct Meant {
    /// The operator; empty for any.
    op: &'static str,
    /// A part of the reported text.
    part: &'static str,
    /// Calls in which it is intended.
    when: fn(&Call) -> bool,
    reason: &'static str,
}

const fn meant(op: &'static str, part: &'static str, when: fn(&Call) -> bool, reason: &'static str) -> Meant {
    Meant { op, part, when, reason }
}

const TYPES: &str = "operands of different types meet in one that holds both";

const MEANT: &[Meant] = &[
    meant("", " of [] on ", always, "a scalar has no dimension 0 or -1 to name"),
    meant(
        "flatten",
        "PyTorch refuses it: Dimension out of range (expected to be in range of [-1, 0]",
        always,
        "a scalar has no dimension to flatten",
    ),
    meant("t", "needed a matrix", always, "only a matrix is transposed"),
    meant("", "PyTorch refuses it: Expected more than 1 value per channel", always, "one value has the variance 0"),
    meant("", "PyTorch refuses it: Target size", always, "the target of a loss broadcasts"),
    meant(
        "",
        "PyTorch refuses it: Integers to negative integer powers",
        always,
        "a negative power of integers is a floating-point number",
    ),
    meant("addcdiv", "PyTorch refuses it: Integer division", always, "integers are divided as floating-point numbers"),
    meant("", "returned an invalid gradient", always, "a source longer than its index has a gradient"),
    meant("", "should be the same", types_meet, TYPES),
    meant("", "same dtype", types_meet, TYPES),
    meant("", "expected dtype", types_meet, TYPES),
    meant("", "scalar type", types_meet, TYPES),
    meant("", "dtypes must be the same", types_meet, TYPES),
    meant("", "dtypes match", types_meet, TYPES),
    meant("", "self.dtype to be equal to src.dtype", types_meet, TYPES),
    // PyTorch computes this loss in place, in the type of the target.
    meant("bce_with_logits", "output 0: f32 ", types_meet, TYPES),
    meant("bce_with_logits", "can't be cast to the desired output type", types_meet, TYPES),
    // PyTorch does not look at the type of the second operand.
    meant("einsum", "output 0: f32 ", |call| types_meet(call) && is_empty(call), TYPES),
    meant("", "expected target dtype to be Long or Byte, but got Int", always, "classes are integers of any type"),
    meant("gather", "needed integers", is_empty, "an empty index is one of integers too"),
    meant("embedding_bag", "argument #1 'weight' to have one of", always, "weights are of any type"),
    meant("rotary_embedding", "needed a number that usize holds", always, "positions count from 0"),
    meant("one_hot", "needed a number that usize holds", always, "the number of classes does not depend on elements"),
    meant(
        "scaled_dot_product_attention",
        "at non-singleton dimension",
        always,
        "several query heads may share a key head without a flag",
    ),
];

fn always(_: &Call) -> bool {
    true
}

fn types_meet(call: &Call) -> bool {
    call.inputs.iter().any(|input| input.dtype != call.inputs[0].dtype)
}

fn is_empty(call: &Call) -> bool {
    call.inputs.iter().any(|input| input.shape.contains(&0))
}

/// The call of a seed.
fn call(seed: u64, operators: &[&'static Operator], samples: usize) -> (&'static Operator, Arc<Call>) {
    let mut draw = Draw::new(seed);
    let operator = operators[draw.below(operators.len())];
    let (mut inputs, mut attrs) = (operator.draw)(&mut draw);
    if draw.one_in(8) {
        draw.spoil(&mut inputs, &mut attrs);
    }
    // Slopes next to infinities are infinities of either sign or NaN, by the formula that is chosen.
    let smooth = inputs.iter().all(|i| !matches!(i.values, "special" | "huge"));
    let gradients = smooth && !draw.one_in(3);
    let op = operator.name;
    (operator, Arc::new(Call { op, attrs, inputs, gradients, seed: seed & 0xFFFF_FFFF, samples }))
}

struct Report {
    calls: u64,
    runs: u64,
    gradients: u64,
    refused: u64,
    skipped: u64,
    meant: BTreeMap<&'static str, u64>,
    problems: Vec<(&'static str, String)>,
}

impl Report {
    fn new() -> Self {
        Report { calls: 0, runs: 0, gradients: 0, refused: 0, skipped: 0, meant: BTreeMap::new(), problems: Vec::new() }
    }

    /// Makes a call in all its settings.
    fn attack(&mut self, seed: u64, operator: &'static Operator, call: &Arc<Call>, answer: &Answer) {
        self.calls += 1;
        match answer {
            Answer::Unsupported(_) => self.skipped += 1,
            Answer::Refused(_) => self.refused += 1,
            Answer::Done { gradients, .. } => self.gradients += u64::from(gradients.is_some()),
            Answer::Broken(_) => {}
        }
        let mut draw = Draw::new(seed ^ 0x5E77_1265);
        let mut settings = vec![Setting::alone(&call.inputs)];
        settings.extend((0..SETTINGS).map(|_| Setting::draw(&mut draw, &call.inputs).expect("layouts that are tried")));
        for setting in &settings {
            self.runs += 1;
            let Some(problem) = judge::check(operator, call, setting, answer) else { continue };
            let is_meant =
                |m: &&Meant| (m.op.is_empty() || m.op == call.op) && problem.contains(m.part) && (m.when)(call);
            if let Some(meant) = MEANT.iter().find(is_meant) {
                *self.meant.entry(meant.reason).or_default() += 1;
                continue;
            }
            let inputs: Vec<String> = (call.inputs.iter().zip(&setting.placements))
                .map(|(i, p)| format!("{} {:?} of {} {p:?}", i.dtype.as_str(), i.shape, i.values))
                .collect();
            self.problems.push((
                call.op,
                format!(
                    "SHARDWISE_SEED={seed} SHARDWISE_ATTACK_CASES=1: {} {} of {} on {:?}: {problem}",
                    call.op,
                    call.attrs,
                    inputs.join(", "),
                    setting.mesh,
                ),
            ));
            // one setting is enough
            break;
        }
    }

    fn finish(&self) {
        let mut text = format!(
            "attack: {} calls in {} settings, {} with gradients, {} refused by PyTorch, {} without a PyTorch kernel, peak memory {} MB\n",
            self.calls,
            self.runs,
            self.gradients,
            self.refused,
            self.skipped,
            peak_memory() >> 20,
        );
        for (reason, n) in &self.meant {
            writeln!(text, "  meant: {reason} ({n})").expect("a string");
        }
        let mut by_operator: BTreeMap<&str, usize> = BTreeMap::new();
        self.problems.iter().for_each(|(op, _)| *by_operator.entry(op).or_default() += 1);
        for (op, n) in by_operator {
            writeln!(text, "  {op}: {n} wrong").expect("a string");
        }
        std::io::stdout().write_all(text.as_bytes()).expect("standard output");
        let list: Vec<&str> = self.problems.iter().map(|(_, p)| p.as_str()).collect();
        assert!(list.is_empty(), "{} calls went wrong:\n{}", list.len(), list.join("\n"));
        assert!(peak_memory() < MOST_MEMORY, "{} bytes of memory", peak_memory());
    }
}

/// The largest call holds a few tensors of 2 MB (in f64 4 MB) on 4 ranks, forward and backward; a gibibyte is far more.
const MOST_MEMORY: u64 = 1 << 30;

/// Peak memory of the process, where the system reports it.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
}

#[test]
fn random_calls_match_pytorch() {
    if !is_alone(module_path!(), "random_calls_match_pytorch") {
        return;
    }
    let only = std::env::var("SHARDWISE_ATTACK_OP").ok();
    let operators: Vec<&Operator> =
        operators::all().into_iter().filter(|o| only.as_deref().is_none_or(|name| name == o.name)).collect();
    assert!(!operators.is_empty(), "SHARDWISE_ATTACK_OP={only:?} is not an operator under attack");
    let first = env_or("SHARDWISE_SEED", 0u64);
    let seconds = env_or("SHARDWISE_ATTACK_SECONDS", u64::MAX);
    let default = if seconds == u64::MAX { RECORDED } else { u64::MAX };
    let cases = env_or("SHARDWISE_ATTACK_CASES", default);
    let mut report = Report::new();
    if env_or("SHARDWISE_ATTACK_RECORD", 0u64) == 1 {
        return record(&operators);
    }
    if env_or("SHARDWISE_ATTACK_LIVE", 0u64) == 0 {
        assert!(
            only.is_none() && first.saturating_add(cases) <= RECORDED,
            "only the first {RECORDED} seeds are recorded; set SHARDWISE_ATTACK_LIVE=1"
        );
        let recorded = oracle::recorded();
        for seed in first..first + cases {
            let (operator, call) = call(seed, &operators, RECORDED_SAMPLES);
            let found = recorded.get(&seed).filter(|r| r.call == oracle::fingerprint(&call));
            let found =
                found.unwrap_or_else(|| panic!("seed {seed} draws another call than the recorded one; record anew"));
            report.attack(seed, operator, &call, &found.answer);
        }
        return report.finish();
    }
    let mut live = Live::start();
    let began = Instant::now();
    let mut waiting: VecDeque<(u64, &'static Operator, Arc<Call>)> = VecDeque::new();
    let mut seeds = first..first.saturating_add(cases);
    loop {
        while waiting.len() < AHEAD && began.elapsed() < Duration::from_secs(seconds) {
            let Some(seed) = seeds.next() else { break };
            let (operator, call) = call(seed, &operators, LIVE_SAMPLES);
            live.ask(&call);
            waiting.push_back((seed, operator, call));
        }
        let Some((seed, operator, call)) = waiting.pop_front() else { break };
        let answer = live.answer();
        report.attack(seed, operator, &call, &answer);
    }
    report.finish();
}

const RECORDED_SAMPLES: usize = 16;
const LIVE_SAMPLES: usize = 256;

/// Writes the answers of the first seeds.
fn record(operators: &[&'static Operator]) {
    let mut live = Live::start();
    let mut text = String::new();
    for seed in 0..RECORDED {
        let (_, call) = call(seed, operators, RECORDED_SAMPLES);
        live.ask(&call);
        let recorded = Recorded { seed, call: oracle::fingerprint(&call), answer: live.answer() };
        writeln!(text, "{}", serde_json::to_string(&recorded).expect("JSON")).expect("a string");
    }
    std::fs::create_dir_all(oracle::path().parent().expect("a directory")).expect("a directory for the record");
    std::fs::write(oracle::path(), text).expect("the record");
}

#[test]
fn every_operator_is_covered_or_excluded_with_a_reason() {
    let attacked: Vec<&str> = operators::all().iter().map(|o| o.name).collect();
    let left_out: Vec<&str> = operators::LEFT_OUT.iter().map(|(name, _)| *name).collect();
    let missing: Vec<&str> =
        shardwise::ops::ops().map(|o| o.name).filter(|n| !attacked.contains(n) && !left_out.contains(n)).collect();
    assert!(missing.is_empty(), "not attacked: {missing:?}");
    // What is composed of attacked operators is compared with PyTorch by the cases of its operator database instead: the table of
    // calls has to call it.
    let calls = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../shardwise-test-suites/src/torch_calls");
    let files = std::fs::read_dir(calls).expect("the table of calls").map(|file| file.expect("a file").path());
    let calls: String = files.map(|file| std::fs::read_to_string(file).expect("a source")).collect();
    let called = |name: &str| [format!(".{name}("), format!("::{name}(")].iter().any(|call| calls.contains(call));
    let composed = shardwise::ops::composed_ops().map(|o| o.name).filter(|n| !attacked.contains(n));
    let missing: Vec<&str> =
        composed.filter(|n| !called(n) && !operators::NOT_CALLED.iter().any(|(m, _)| m == n)).collect();
    assert!(missing.is_empty(), "compared with PyTorch nowhere: {missing:?}");
}
