//! The misuse programs of the thread engine on processes, with the default settings.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shardwise_mpi::{launch, launched};
use shardwise_test_suites::misuse::{FAULTS, Fault, FaultyProgram};
use shardwise_test_suites::settings::env_or;

use crate::job::Job;

/// The program of a seed; consecutive seeds go through all kinds of faults.
fn program_of(seed: u64) -> FaultyProgram {
    let mut program = FaultyProgram::random(seed);
    program.fault = FAULTS[(seed % FAULTS.len() as u64) as usize];
    program
}

/// One program, whose seed is in the environment.
pub(crate) fn faulty_program() {
    let program = Arc::new(program_of(env_or("SHARDWISE_SEED", 0)));
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
        let program = program_of(seed);
        let ended = Job::new("faulty_program", program.ranks).set("SHARDWISE_SEED", seed.to_string()).run();
        let context = format!("SHARDWISE_SEED={seed} {program:?}, after {:?}:\n{}", ended.took, ended.output);
        assert!(!ended.success, "no error: {context}");
        // The default deadline is five minutes: only a hang takes so long.
        assert!(ended.took < Duration::from_secs(60), "waited in vain: {context}");
        // What the program prints of itself names a rank, too.
        let ended_well = |rank| format!("rank {rank} ended well");
        let errors = (0..program.ranks).fold(ended.output.clone(), |text, rank| text.replace(&ended_well(rank), ""));
        assert!(errors.contains(&format!("rank {}", program.faulty)), "the faulty rank is not named: {context}");
        // Here the receiver of a message that nobody takes reports it, not the sender.
        let reported_elsewhere = program.fault == Fault::SendsWhatNobodyReceives;
        for rank in (0..program.ranks).filter(|&rank| !reported_elsewhere && !program.may_end_well(rank)) {
            assert!(!ended.output.contains(&ended_well(rank)), "{context}");
        }
        *seen.entry(format!("{:?}", program.fault)).or_default() += 1;
    }
    println!("{cases} programs by fault: {seen:?}");
    let kinds = FAULTS.len().min(cases as usize);
    assert_eq!(seen.len(), kinds, "kinds of faults in {cases} programs: {seen:?}");
}
