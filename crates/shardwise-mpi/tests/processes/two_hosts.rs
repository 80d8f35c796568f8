//! Ranks on two hosts that share nothing but a network: namespaces of this machine, joined by a virtual cable.

use std::time::Duration;

use crate::job::{Ended, Job, mpirun};
use crate::scratch::Scratch;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/processes/two_hosts.sh");

/// What the script says where the system does not allow it.
const NOT_HERE: &str = "two hosts cannot be made here";

/// Runs a case on two ranks per host; nothing where that cannot be done.
fn run(case: &str) -> Option<Ended> {
    let scratch = Scratch::new(&format!("two-hosts-{case}"));
    let program = std::env::current_exe().expect("the name of this program");
    let program = program.to_str().expect("a name in UTF-8");
    let ended = Job::from_launcher(&["bash", SCRIPT, &mpirun(), "2", program])
        .set("SHARDWISE_CASE", case)
        .set("SHARDWISE_SCRATCH", &scratch.0)
        .run();
    match ended.output.lines().find(|line| line.contains(NOT_HERE)) {
        Some(reason) => {
            println!("SKIPPED: {reason}");
            None
        }
        None => Some(ended),
    }
}

pub(crate) fn the_suites_run_across_two_hosts() {
    for case in ["collectives", "remote_reads", "recorded_training"] {
        let Some(ended) = run(case) else { return };
        println!(
            "{case} on two hosts: {:.1} s, {}",
            ended.took.as_secs_f64(),
            ended.output.lines().last().unwrap_or("")
        );
        let crossed = ended.output.contains("bytes that crossed");
        assert!(ended.success && crossed, "{case}:\n{}", ended.output);
    }
}

pub(crate) fn a_rank_killed_on_the_other_host_ends_the_job() {
    let Some(Ended { success, output, took }) = run("one_rank_is_killed") else { return };
    assert!(!success && took < Duration::from_secs(30), "{took:?}:\n{output}");
    if crate::job::is_open_mpi() {
        assert!(output.contains("rank 3") && output.contains("signal 9"), "{output}");
    }
}
