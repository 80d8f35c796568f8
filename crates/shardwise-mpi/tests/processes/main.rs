//! The engine under `mpirun`: this program starts itself as 1 to 4 processes, once per case.
//!
//! Without a launcher it is the test runner; arguments that are no flags select cases by name. Under `mpirun` it is one
//! of the ranks, and `SHARDWISE_CASE` says what to do. `MPIRUN` names another `mpirun` than the one on the path: it must
//! belong to the library that this program is built with.

mod job;
mod suites;

#[path = "../../../shardwise/tests/suites/collectives.rs"]
mod collectives;

use job::Job;

/// A case: its name, the numbers of processes to run it on, and what each rank does.
type Case = (&'static str, &'static [usize], fn());

const ANY: &[usize] = &[1, 2, 3, 4];

/// What ranks do; the job must end well.
const CASES: &[Case] = &[
    ("collectives", ANY, suites::collectives_in_rank_order),
    ("collectives_in_pieces", &[2, 3], suites::collectives_in_pieces),
    ("groups", &[3, 4], suites::groups_side_by_side),
    ("fast_reductions", ANY, suites::fast_reductions),
];

fn main() {
    if let Ok(name) = std::env::var("SHARDWISE_CASE") {
        let case = CASES.iter().find(|(case, _, _)| *case == name).expect("a case of this program");
        return case.2();
    }
    let filters: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let chosen = |name: &str| filters.is_empty() || filters.iter().any(|f| name.contains(f.as_str()));
    let mut failures = 0;
    for (case, sizes, _) in CASES {
        for &size in *sizes {
            let name = format!("{case} on {size}");
            if chosen(&name) {
                let run = || Job::new(case, size).run().expect_success();
                failures += usize::from(!job::report(&name, run));
            }
        }
    }
    assert_eq!(failures, 0, "{failures} case(s) failed");
}
