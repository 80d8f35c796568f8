//! The engine under `mpirun`: this program starts itself as 1 to 4 processes, once per case.
//!
//! Without a launcher it is the test runner; arguments that are not flags select tests by name. Under `mpirun` it is one
//! of the ranks, and `SHARDWISE_CASE` says what to do. `MPIRUN` names another `mpirun` than the one on the path: it must
//! belong to the library that this program is built with. `SHARDWISE_CROSS_MESH_CASES` (default 500),
//! `SHARDWISE_PAIR_STRIDE` (default 1) and `SHARDWISE_SEED` are those of the redistribution suite, and
//! `SHARDWISE_MPI_MISUSE_CASES` (default 60) sets the number of faulty programs.

mod agreed;
mod checkpoints;
mod failing;
mod job;
mod links;
mod misuse;
mod suites;
mod two_hosts;

use job::Job;
use shardwise_test_suites::scratch::Scratch;

const ANY: &[usize] = &[1, 2, 3, 4];

/// The name of what ranks do, the numbers of processes on which the job must end well, and what they do.
type Case = (&'static str, &'static [usize], fn());

const CASES: &[Case] = &[
    ("collectives", ANY, suites::collectives_in_rank_order),
    ("collectives_in_pieces", &[2, 3], suites::collectives_in_pieces),
    ("groups", &[3, 4], suites::groups_side_by_side),
    ("fast_reductions", ANY, suites::fast_reductions),
    ("redistribution", ANY, suites::redistribution),
    ("remote_shards", ANY, suites::remote_shards),
    ("recorded_training", &[2, 3, 4], suites::recorded_training),
    ("waiting", &[2], suites::waiting_is_measured),
    ("calls_that_do_not_fit", &[2, 4], agreed::calls_that_do_not_fit),
    ("disagreements", &[2, 3], agreed::disagreements),
    ("messages", &[2, 3], agreed::messages),
    ("launches", &[2, 3], agreed::launches),
    ("links_of_one_host", &[1, 2, 4], links::of_one_host),
    ("links_configured", &[2], links::configured),
    // Parts of the tests below.
    ("links_of_two_hosts", &[], links::of_two_hosts),
    ("save_by_processes", &[], checkpoints::save_by_processes),
    ("load_by_processes", &[], checkpoints::load_by_processes),
    ("one_rank_fails", &[], failing::one_rank_fails),
    ("one_rank_panics", &[], failing::one_rank_panics),
    ("one_rank_is_silent", &[], failing::one_rank_is_silent),
    ("ranks_in_other_groups", &[], failing::ranks_in_other_groups),
    ("one_rank_leaves", &[], failing::one_rank_leaves),
    ("one_rank_exits", &[], failing::one_rank_exits),
    ("one_rank_aborts", &[], failing::one_rank_aborts),
    ("one_rank_is_killed", &[], failing::one_rank_is_killed),
    ("faulty_program", &[], misuse::faulty_program),
];

/// Tests that look at how jobs end, or that take more than one.
const TESTS: &[(&str, fn())] = &[
    ("checkpoint_from_processes_to_threads", checkpoints::from_processes_to_threads),
    ("checkpoint_from_threads_to_processes", checkpoints::from_threads_to_processes),
    (
        "a_rank_that_fails_prints_its_error_and_ends_the_job",
        failing::a_rank_that_fails_prints_its_error_and_ends_the_job,
    ),
    ("a_silent_rank_is_named_after_the_deadline", failing::a_silent_rank_is_named_after_the_deadline),
    ("ranks_that_wait_for_each_other_are_named_soon", failing::ranks_that_wait_for_each_other_are_named_soon),
    ("a_rank_that_left_is_named", failing::a_rank_that_left_is_named),
    ("an_abort_carries_its_reason", failing::an_abort_carries_its_reason),
    ("a_killed_rank_ends_the_job", failing::a_killed_rank_ends_the_job),
    ("misuse", misuse::every_faulty_program_ends_in_an_error_that_names_the_faulty_rank),
    ("two_hosts", two_hosts::the_suites_run_across_two_hosts),
    ("two_hosts_links", two_hosts::the_axis_across_hosts_has_their_link),
    ("two_hosts_killed", two_hosts::a_rank_killed_on_the_other_host_ends_the_job),
];

fn main() {
    if let Ok(name) = std::env::var("SHARDWISE_CASE") {
        let (_, _, case) = CASES.iter().find(|(case, _, _)| *case == name).expect("a case of this program");
        return case();
    }
    let selection = Selection::from_arguments();
    let tests = jobs().chain(TESTS.iter().map(|&(name, body)| (name.to_string(), Box::new(body) as Box<dyn Fn()>)));
    let chosen: Vec<(String, Box<dyn Fn()>)> = tests.filter(|(name, _)| selection.has(name)).collect();
    if selection.lists {
        // In the form that `cargo nextest` reads; no test is ignored.
        return chosen.iter().filter(|_| !selection.ignored).for_each(|(name, _)| println!("{name}: test"));
    }
    let run = chosen.len();
    let failed: Vec<String> =
        chosen.into_iter().filter(|(name, body)| !job::report(name, body)).map(|(name, _)| name).collect();
    println!("{} of {run} tests passed, under {}", run - failed.len(), job::version());
    assert!(failed.is_empty(), "failed: {failed:?}");
}

/// A test per case and number of processes.
fn jobs() -> impl Iterator<Item = (String, Box<dyn Fn()>)> {
    let of_case = |&(case, sizes, _): &Case| {
        sizes.iter().map(move |&size| {
            let body = move || {
                let scratch = Scratch::new(&format!("{case}-{size}"));
                Job::new(case, size).set("SHARDWISE_SCRATCH", &scratch.0).run().expect_success();
            };
            (format!("{case} on {size}"), Box::new(body) as Box<dyn Fn()>)
        })
    };
    CASES.iter().flat_map(of_case)
}

/// What the arguments select, as test programs of the standard harness take them.
struct Selection {
    names: Vec<String>,
    exact: bool,
    lists: bool,
    ignored: bool,
}

impl Selection {
    fn from_arguments() -> Self {
        let mut found = Selection { names: Vec::new(), exact: false, lists: false, ignored: false };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--exact" => found.exact = true,
                "--list" => found.lists = true,
                "--ignored" => found.ignored = true,
                // With a value that is not a name.
                "--format" | "--test-threads" | "--color" => drop(arguments.next()),
                flag if flag.starts_with('-') => {}
                name => found.names.push(name.to_string()),
            }
        }
        found
    }

    fn has(&self, name: &str) -> bool {
        let fits = |wanted: &String| if self.exact { name == wanted } else { name.contains(wanted.as_str()) };
        self.names.is_empty() || self.names.iter().any(fits)
    }
}
