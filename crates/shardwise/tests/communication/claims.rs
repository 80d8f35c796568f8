//! The programs of the example `claims` on threads, and their rows in `docs/claims.md`, which `scripts/compare-claims` writes.

#[path = "../../../shardwise-mpi/examples/claims/programs/mod.rs"]
mod programs;

use programs::{CLAIMS, RANKS};

#[test]
fn all_claims_hold_and_the_page_says_so() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/claims.md")).unwrap();
    let mut failures = Vec::new();
    for claim in CLAIMS {
        let seen = match shardwise::launch(RANKS, |world| (claim.run)(&world)) {
            Ok(seen) => seen,
            Err(error) => {
                failures.push(format!("{} does not hold: {error}", claim.name));
                continue;
            }
        };
        let is_row = |line: &&str| line.contains(&format!("[{}](../crates/", claim.name)) && line.contains(claim.file);
        let row = page.lines().find(is_row).unwrap_or("no row");
        let numbers = claim.threads.iter().map(|thread| thread.split_once('/').expect("owner/repository#number").1);
        let missing = numbers.chain([claim.wrong, seen.as_str()]).find(|part| !row.contains(part));
        failures
            .extend(missing.map(|part| format!("docs/claims.md lacks {part:?} in the row of {}: {row}", claim.name)));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
