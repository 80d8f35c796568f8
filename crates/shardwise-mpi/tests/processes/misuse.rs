//! The misuse programs of the thread engine on processes, with the default settings.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shardwise_mpi::{launch, launched};
use shardwise_test_suites::misuse::{Fault, FaultyProgram};
use shardwise_test_suites::settings::env_or;

use crate::job::Job;

/// One program, whose seed is in the environment.
pub(crate) fn faulty_program() {
    let program = Arc::new(FaultyProgram::random(env_or("SHARDWISE_SEED", 0)));
    let (ran, rank) = (Arc::clone(&program), launched().expect("started by a launcher").rank);
    match launch(program.ranks, move |world| ran.run(&world)) {
        Ok(()) => println!("rank {rank} ended well"),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

/// Every program ends soon in an error that names the faulty rank, and only ranks that may do so end well.
pub(crate) fn every_faulty_program_ends_in_an_error_that_names_the_faulty_rank() {
    let (cases, first) = (env_or("SHARDWISE_MPI_MISUSE_CASES", 60u64), env_or("SHARDWISE_SEED", 0u64));
    let mut seen = BTreeMap::<String, usize>::new();
    for seed in first..first + cases {
        let program = FaultyProgram::random(seed);
        let ended = Job::new("faulty_program", program.ranks).set("SHARDWISE_SEED", seed.to_string()).run();
        let context = format!("SHARDWISE_SEED={seed} {program:?}, after {:?}:\n{}", ended.took, ended.output);
        assert!(!ended.success, "no error: {context}");
        // The default deadline is five minutes: only a hang takes so long.
        assert!(ended.took < Duration::from_secs(60), "waited in vain: {context}");
        assert!(ended.output.contains(&format!("rank {}", program.faulty)), "the faulty rank is not named: {context}");
        // Here the receiver of a message that nobody takes reports it, not the sender.
        let reported_elsewhere = program.fault == Fault::SendsWhatNobodyReceives;
        for rank in (0..program.ranks).filter(|&rank| !reported_elsewhere && !program.may_end_well(rank)) {
            assert!(!ended.output.contains(&format!("rank {rank} ended well")), "{context}");
        }
        *seen.entry(format!("{:?}", program.fault)).or_default() += 1;
    }
    println!("{cases} programs by fault: {seen:?}");
}
