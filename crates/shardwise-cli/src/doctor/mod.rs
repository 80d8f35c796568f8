//! `shardwise doctor`: what this machine and this build have, what the environment asks for, and whether it works.

mod environment;
mod machine;
mod self_test;

use std::io::Write;

use clap::Args;
use serde::Serialize;
use shardwise::Result;

use self_test::TestedCase;

/// The options of `shardwise doctor`.
#[derive(Args)]
#[command(after_help = "\
The self-test takes about five seconds. It compares the results of kernels and collectives with exact ones, and their speed with what \
this processor reaches at that moment: the time of the same arithmetic in registers, or of moving the same bytes. Other programs on the \
machine make both slower. The exit code is 1 if something is marked `wrong`; what is marked `note` is worth knowing.

Examples:
  shardwise doctor
  shardwise doctor --json
  shardwise doctor --no-test")]
pub(crate) struct DoctorOptions {
    /// Leave out the self-test
    #[arg(long)]
    no_test: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// How a check ended.
#[derive(Serialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// Worth knowing, not a mistake.
    Note,
    Wrong,
}

impl Verdict {
    fn mark(self) -> &'static str {
        match self {
            Verdict::Ok => "",
            Verdict::Note => "note: ",
            Verdict::Wrong => "wrong: ",
        }
    }
}

/// What a check found.
#[derive(Serialize)]
struct Finding {
    name: &'static str,
    verdict: Verdict,
    found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

impl Finding {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Finding { name, verdict: Verdict::Ok, found: found.into(), advice: None }
    }

    fn with(verdict: Verdict, name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Finding { name, verdict, found: found.into(), advice: Some(advice.into()) }
    }
}

/// The output of `--json`.
#[derive(Serialize)]
struct Diagnosis {
    version: &'static str,
    ok: bool,
    checks: Vec<Finding>,
    self_test: Vec<TestedCase>,
}

/// Whether nothing is wrong.
pub(crate) fn run(options: &DoctorOptions) -> Result<bool> {
    let mut checks = machine::findings();
    checks.extend(environment::findings());
    // A kernel panics on an instruction set that does not exist.
    let can_test = !options.no_test && environment::simd_is_valid();
    let self_test = if can_test { self_test::run()? } else { Vec::new() };
    let ok = checks.iter().all(|check| check.verdict != Verdict::Wrong)
        && self_test.iter().all(|case| case.verdict != Verdict::Wrong);
    let diagnosis = Diagnosis { version: env!("CARGO_PKG_VERSION"), ok, checks, self_test };
    let mut out = std::io::stdout().lock();
    if options.json {
        writeln!(out, "{}", serde_json::to_string(&diagnosis).map_err(shardwise::Error::other)?)?;
    } else {
        write!(out, "{}", diagnosis.text())?;
    }
    Ok(ok)
}

/// Columns of the text: those of every terminal.
const COLUMNS: usize = 80;

/// Columns of the names of checks.
const NAME: usize = 14;

impl Diagnosis {
    fn text(&self) -> String {
        let mut text =
            entry("shardwise", &format!("{} on {} {}", self.version, std::env::consts::OS, std::env::consts::ARCH));
        for Finding { name, verdict, found, advice } in &self.checks {
            let advice = advice.as_ref().map_or(String::new(), |advice| format!("; {advice}"));
            text += &entry(name, &format!("{}{found}{advice}", verdict.mark()));
        }
        if !self.self_test.is_empty() {
            text += &format!("\n{:<28}{:>12}{:>12}  {}\n", "self-test", "measured", "expected", "unit");
            for case in &self.self_test {
                text += &case.line();
            }
        }
        text + if self.ok { "\nnothing is wrong\n" } else { "\nsomething is wrong, see above\n" }
    }
}

/// A name and what was found, broken between words.
fn entry(name: &str, found: &str) -> String {
    let mut lines = vec![String::new()];
    for word in found.split(' ') {
        let last = lines.last_mut().expect("one line at least");
        if !last.is_empty() && NAME + last.chars().count() + 1 + word.chars().count() > COLUMNS {
            lines.push(word.to_string());
        } else {
            *last += if last.is_empty() { "" } else { " " };
            *last += word;
        }
    }
    let indented =
        lines.iter().enumerate().map(|(i, line)| format!("{:<NAME$}{line}\n", if i == 0 { name } else { "" }));
    indented.collect()
}

#[test]
fn entries_are_broken_between_words() {
    assert_eq!(entry("cores", "2"), "cores         2\n");
    let text = entry("files", &"word ".repeat(30));
    assert!(text.lines().count() == 3 && text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
}
