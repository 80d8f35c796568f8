//! The environment variables of the project.

use shardwise::error::nearest;
use shardwise_mpi::Settings;

use super::{Finding, Verdict};

/// What the variables that the library, the command and the engines read are for.
const VARIABLES: [(&str, &str); 9] = [
    ("SHARDWISE_CHECK", "whether ranks compare calls under MPI"),
    ("SHARDWISE_DEADLINE", "seconds to wait for other ranks"),
    ("SHARDWISE_DETERMINISTIC", "the same bits under MPI as on threads"),
    ("SHARDWISE_DUMP_DIR", "where failed runs say what they did"),
    ("SHARDWISE_LINK_ACROSS", "the link between hosts, for planners"),
    ("SHARDWISE_LINK_INSIDE", "the link inside a host, for planners"),
    ("SHARDWISE_SIMD", "the instruction set of kernels"),
    ("SHARDWISE_TAKE_TURNS", "whether processes share cores"),
    ("SHARDWISE_UPDATE_LOCK", "whether lockfiles of communication are written"),
];

/// Variables of other programs that change what this one does.
const OTHER_VARIABLES: [&str; 5] = ["CANDLE_NUM_THREADS", "NO_COLOR", "OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TMPDIR"];

pub(super) fn findings() -> Vec<Finding> {
    let mut all: Vec<(String, String)> = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .filter(|(name, _)| name.starts_with("SHARDWISE_") || OTHER_VARIABLES.contains(&name.as_str()))
        .collect();
    all.sort();
    let mut findings: Vec<Finding> = all.iter().map(|(name, value)| finding(name, value)).collect();
    if let Err(error) = Settings::from_env() {
        findings.push(Finding::with(Verdict::Wrong, "environment", error.found(), "correct the variable or unset it"));
    }
    if findings.is_empty() {
        findings.push(Finding::ok("environment", "no variable of this project is set"));
    }
    findings
}

fn finding(name: &str, value: &str) -> Finding {
    // A value may be long.
    let set = format!("{name}={value:.60}");
    if name == "SHARDWISE_SIMD" && !simd_is_valid() {
        let needed = format!("use one of {}", shardwise_kernels::instruction_sets().join(", "));
        return Finding::with(Verdict::Wrong, "environment", set, needed);
    }
    match VARIABLES.iter().find(|(known, _)| *known == name) {
        Some((_, about)) => Finding::ok("environment", format!("{set}, {about}")),
        None if !name.starts_with("SHARDWISE_") => Finding::ok("environment", set),
        None => {
            let advice = format!("the nearest are {}", nearest(name, VARIABLES.map(|(known, _)| known)));
            Finding::with(Verdict::Note, "environment", format!("{set}, which nothing reads"), advice)
        }
    }
}

/// Whether `SHARDWISE_SIMD` is unset or names a set of this processor.
pub(super) fn simd_is_valid() -> bool {
    let sets = shardwise_kernels::instruction_sets();
    std::env::var("SHARDWISE_SIMD").map_or(true, |name| name.is_empty() || sets.contains(&name.as_str()))
}
