//! PyTorch's answer to a call: recorded for the seeds of a short run, or asked for live.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::attack::Call;

/// The expected outcome of a call.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Answer {
    /// PyTorch has no kernel for the call: nothing to compare with.
    Unsupported(String),
    /// The call is wrong.
    Refused(String),
    /// The oracle itself failed.
    Broken(String),
    #[serde(untagged)]
    Done { outputs: Vec<Expected>, gradients: Option<Vec<Option<Expected>>> },
}

/// An expected tensor, at sampled positions.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Expected {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<Value>,
    /// How far a value may be off; absent for integers, which are exact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) distances: Option<Vec<Value>>,
    /// The same where operands are partial sums; absent for exact values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) partial: Option<Vec<Value>>,
    /// What PyTorch gives in the type of the call, by sample, where that is something else.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) own: BTreeMap<String, Value>,
    /// Where not all positions are sampled: the sum of all values, how far it may be off, the number of values without
    /// one, and how far it may be off where operands are partial sums; of integers the sum modulo 2^64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) total: Option<Value>,
}

/// A number of an answer; JSON has no NaN, no infinities and no -0.
pub(crate) fn number(value: &Value) -> f64 {
    match value.as_str() {
        Some(text) => text.parse().expect("a number"),
        None => value.as_f64().expect("a number"),
    }
}

/// A Python with PyTorch that answers calls in the order in which it is asked.
pub(crate) struct Live {
    child: Child,
    questions: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Live {
    pub(crate) fn start() -> Live {
        let python = std::env::var("SHARDWISE_PYTHON").unwrap_or_else(|_| "python3".to_string());
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/attack_oracle.py");
        let mut child = Command::new(&python)
            .arg(script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|e| panic!("{python} does not start: {e}; name a Python with PyTorch in SHARDWISE_PYTHON"));
        let (questions, answers) = (child.stdin.take(), child.stdout.take().expect("piped"));
        Live { child, questions, answers: BufReader::new(answers) }
    }

    /// Sends a call; the answer is fetched later, so that both sides work at once.
    pub(crate) fn ask(&mut self, call: &Call) {
        let questions = self.questions.as_mut().expect("open until dropped");
        let line = serde_json::to_string(call).expect("a call is JSON");
        writeln!(questions, "{line}").expect("the oracle has ended: is there PyTorch in SHARDWISE_PYTHON?");
    }

    pub(crate) fn answer(&mut self) -> Answer {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("an answer");
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e} in the answer of the oracle: {line}"))
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // The end of its input ends the script.
        drop(self.questions.take());
        let _ = self.child.wait();
    }
}

/// One line of the record: the seed, a hash of the call, and the answer.
#[derive(Serialize, Deserialize)]
pub(crate) struct Recorded {
    pub(crate) seed: u64,
    pub(crate) call: u32,
    pub(crate) answer: Answer,
}

pub(crate) fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/operators/attack/data/answers.jsonl")
}

/// The recorded answers by seed.
pub(crate) fn recorded() -> BTreeMap<u64, Recorded> {
    let text = std::fs::read_to_string(path()).expect("the record of answers");
    let one = |line: &str| {
        let found: Recorded = serde_json::from_str(line).expect("a recorded answer");
        (found.seed, found)
    };
    text.lines().map(one).collect()
}

/// A number that changes when a call does.
pub(crate) fn fingerprint(call: &Call) -> u32 {
    crc32fast::hash(serde_json::to_string(call).expect("a call is JSON").as_bytes())
}
