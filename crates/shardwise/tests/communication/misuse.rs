//! Random programs with one faulty rank: each ends in an error that names that rank, on every rank that was still waiting,
//! and none hangs.
//!
//! `SHARDWISE_MISUSE_CASES` sets the number of programs (default 1500), `SHARDWISE_SEED` the first seed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use shardwise::{Error, Group, ReduceOp, Result, TensorMeta, ThreadWorld, World};
use shardwise_test_suites::settings::env_or;

/// Far longer than any of these programs takes: only a hang reaches it.
const DEADLINE: Duration = Duration::from_secs(20);

#[test]
fn every_faulty_program_ends_in_an_error_that_names_the_faulty_rank() {
    silence_injected_panics();
    let (cases, first) = (env_or("SHARDWISE_MISUSE_CASES", 1500u64), env_or("SHARDWISE_SEED", 0u64));
    let mut seen = std::collections::BTreeMap::<String, usize>::new();
    for seed in first..first + cases {
        let case = Arc::new(Case::random(&mut StdRng::seed_from_u64(seed)));
        let program = Arc::clone(&case);
        let start = Instant::now();
        let world = ThreadWorld::new(case.ranks).unwrap().deadline(DEADLINE);
        let results = world.run_each(move |world| program.run(&world));
        let context = format!("SHARDWISE_SEED={seed} {case:?}: {results:?}");
        assert!(start.elapsed() < DEADLINE, "took {:?}: {context}", start.elapsed());
        case.judge(&results).unwrap_or_else(|problem| panic!("{problem}\n{context}"));
        *seen.entry(format!("{:?}", case.fault)).or_default() += 1;
    }
    println!("{cases} programs by fault: {seen:?}");
    assert!(cases < 500 || seen.len() == FAULTS.len(), "a fault never came up: {seen:?}");
}

#[test]
fn the_same_programs_without_a_fault_succeed() {
    for seed in 0..100 {
        let case = Arc::new(Case { fault: Fault::None, ..Case::random(&mut StdRng::seed_from_u64(seed)) });
        let world = ThreadWorld::new(case.ranks).unwrap().deadline(DEADLINE);
        world.run(move |world| case.run(&world)).unwrap();
    }
}

/// What the faulty rank does instead of step `at`.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    OtherOperation,
    OtherReduction,
    OtherShape,
    OtherType,
    OtherRoot,
    OtherSizes,
    InvalidArgument,
    SkipsCall,
    ExtraCall,
    OtherGroup,
    GroupInOtherOrder,
    ReceivesWhatNobodySends,
    SendsWhatNobodyReceives,
    ReceivesOtherShape,
    ReturnsOk,
    ReturnsError,
    Panics,
    Aborts,
}

const FAULTS: [Fault; 18] = [
    Fault::OtherOperation,
    Fault::OtherReduction,
    Fault::OtherShape,
    Fault::OtherType,
    Fault::OtherRoot,
    Fault::OtherSizes,
    Fault::InvalidArgument,
    Fault::SkipsCall,
    Fault::ExtraCall,
    Fault::OtherGroup,
    Fault::GroupInOtherOrder,
    Fault::ReceivesWhatNobodySends,
    Fault::SendsWhatNobodyReceives,
    Fault::ReceivesOtherShape,
    Fault::ReturnsOk,
    Fault::ReturnsError,
    Fault::Panics,
    Fault::Aborts,
];

#[derive(Debug, Clone, Copy)]
enum Kind {
    Barrier,
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    ExchangeDims,
    AllToAll,
    Reduce,
}

const KINDS: [Kind; 8] = [
    Kind::Barrier,
    Kind::AllReduce,
    Kind::AllGather,
    Kind::ReduceScatter,
    Kind::Broadcast,
    Kind::ExchangeDims,
    Kind::AllToAll,
    Kind::Reduce,
];

#[derive(Debug, Clone)]
struct Step {
    kind: Kind,
    /// Global ranks that take part, at least two of them.
    group: Vec<usize>,
    size: usize,
}

#[derive(Debug, Clone)]
struct Case {
    ranks: usize,
    steps: Vec<Step>,
    fault: Fault,
    faulty: usize,
    at: usize,
}

impl Case {
    fn random(rng: &mut StdRng) -> Self {
        let ranks = rng.random_range(2..=6);
        let steps: Vec<Step> = (0..rng.random_range(1..8)).map(|_| Step::random(rng, ranks)).collect();
        let at = rng.random_range(0..steps.len());
        let faulty = *steps[at].group.choose(rng).unwrap();
        Case { ranks, steps, fault: *FAULTS.choose(rng).unwrap(), faulty, at }
    }

    fn run(&self, world: &World) -> Result<()> {
        for (i, step) in self.steps.iter().enumerate() {
            if !step.group.contains(&world.rank()) {
                continue;
            }
            let group = world.subgroup(&step.group)?;
            if world.rank() == self.faulty && i == self.at {
                if self.commit_fault(world, &group, step)? {
                    return Ok(());
                }
            } else {
                step.run(&group, DType::F32, 0, 0, ReduceOp::Sum)?;
            }
        }
        world.barrier()
    }

    /// Makes the faulty call; returns whether the program ends here.
    fn commit_fault(&self, world: &World, group: &Group, step: &Step) -> Result<bool> {
        let (next, size) = ((group.rank() + 1) % group.size(), group.size());
        let tensor = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
        match self.fault {
            Fault::None => step.run(group, DType::F32, 0, 0, ReduceOp::Sum)?,
            Fault::OtherOperation => match step.kind {
                Kind::AllReduce => group.barrier()?,
                _ => drop(group.all_reduce(&tensor, ReduceOp::Sum)?),
            },
            Fault::OtherReduction => match step.kind {
                Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter => {
                    step.run(group, DType::F32, 0, 0, ReduceOp::Max)?;
                }
                _ => drop(group.all_reduce(&tensor, ReduceOp::Max)?),
            },
            Fault::OtherShape => match step.kind {
                Kind::Barrier => drop(group.all_reduce(&tensor, ReduceOp::Sum)?),
                _ => step.run(group, DType::F32, 1, 0, ReduceOp::Sum)?,
            },
            Fault::OtherType => match step.kind {
                Kind::Barrier => drop(group.all_reduce(&tensor, ReduceOp::Sum)?),
                _ => step.run(group, DType::F64, 0, 0, ReduceOp::Sum)?,
            },
            Fault::OtherRoot => match step.kind {
                Kind::Broadcast | Kind::Reduce => step.run(group, DType::F32, 0, 1, ReduceOp::Sum)?,
                _ => drop(group.reduce(&tensor, ReduceOp::Sum, 1)?),
            },
            Fault::OtherSizes => {
                let mut sizes = vec![3; size];
                sizes[next] = 17;
                drop(group.all_gather(&tensor, 0, &sizes)?);
            }
            Fault::InvalidArgument => drop(group.all_gather(&tensor, 5, &vec![3; size])?),
            Fault::SkipsCall => {}
            Fault::ExtraCall => {
                step.run(group, DType::F32, 0, 0, ReduceOp::Sum)?;
                step.run(group, DType::F32, 0, 0, ReduceOp::Sum)?;
            }
            Fault::OtherGroup | Fault::GroupInOtherOrder => {
                let mut ranks = group.ranks().to_vec();
                let other = (0..world.size()).find(|r| !ranks.contains(r));
                match (self.fault, other) {
                    (Fault::OtherGroup, Some(other)) => ranks.push(other),
                    _ => ranks.reverse(),
                }
                step.run(&world.subgroup(&ranks)?, DType::F32, 0, 0, ReduceOp::Sum)?;
            }
            Fault::ReceivesWhatNobodySends => drop(group.recv(&TensorMeta::new(3, DType::F32), next, 99)?),
            Fault::SendsWhatNobodyReceives => {
                group.send(&tensor, next, 99)?;
                step.run(group, DType::F32, 0, 0, ReduceOp::Sum)?;
            }
            Fault::ReceivesOtherShape => {
                group.send(&tensor, group.rank(), 99)?;
                drop(group.recv(&TensorMeta::new(4, DType::F32), group.rank(), 99)?);
            }
            Fault::ReturnsOk => return Ok(true),
            Fault::ReturnsError => return Err(Error::other("injected error")),
            Fault::Panics => panic!("injected panic"),
            Fault::Aborts => {
                world.abort("injected abort");
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What must hold of the results.
    fn judge(&self, results: &[Result<()>]) -> std::result::Result<(), String> {
        let errors: Vec<String> = results.iter().filter_map(|r| r.as_ref().err()).map(ToString::to_string).collect();
        let named = format!("rank {}", self.faulty);
        if !errors.iter().any(|e| e.contains(&named)) {
            return Err(format!("no error names {named}"));
        }
        for (rank, result) in results.iter().enumerate() {
            let may_end_well = match self.fault {
                // The message is never received, which is reported for its sender at the end.
                Fault::SendsWhatNobodyReceives => rank != self.faulty,
                Fault::ReturnsOk | Fault::Aborts => rank == self.faulty,
                // A call that looks like the next one is missed, or is too many, only at the end of the program.
                Fault::SkipsCall => rank == self.faulty,
                Fault::ExtraCall => rank != self.faulty,
                _ => false,
            };
            match result {
                Ok(()) if !may_end_well => return Err(format!("rank {rank} ended well")),
                Err(Error::Timeout { .. } | Error::Stuck { .. }) => return Err(format!("rank {rank} waited in vain")),
                Err(error) if !error.to_string().contains("rank ") && rank != self.faulty => {
                    return Err(format!("the error of rank {rank} names no rank: {error}"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Step {
    fn random(rng: &mut StdRng, ranks: usize) -> Self {
        let mut group: Vec<usize> = (0..ranks).collect();
        if rng.random_bool(0.5) {
            let keep = rng.random_range(2..=ranks);
            group = rand::seq::index::sample(rng, ranks, keep).into_vec();
        }
        Step { kind: *KINDS.choose(rng).unwrap(), group, size: *[1, 4, 5000].choose(rng).unwrap() }
    }

    /// The correct step, up to what the arguments change.
    fn run(&self, group: &Group, dtype: DType, more: usize, root: usize, op: ReduceOp) -> Result<()> {
        let (n, me) = (group.size(), group.rank());
        let columns = self.size + more;
        let full = Tensor::ones((2 * n, columns), dtype, &Device::Cpu)?;
        let part = full.narrow(0, 0, 2)?;
        match self.kind {
            Kind::Barrier => group.barrier(),
            Kind::AllReduce => group.all_reduce(&full, op).map(drop),
            Kind::Reduce => group.reduce(&full, op, root).map(drop),
            Kind::AllGather => group.all_gather(&part, 0, &vec![2; n]).map(drop),
            Kind::ReduceScatter => group.reduce_scatter(&full, op, 0, &vec![2; n]).map(drop),
            Kind::Broadcast => {
                let whole = TensorMeta::new(full.dims(), dtype);
                group.broadcast((me == root).then_some(&full), &whole, root).map(drop)
            }
            Kind::ExchangeDims => {
                let mut columns_of = vec![0; n];
                columns_of[0] = columns;
                group.exchange_dims(&part, 0, &vec![2; n], 1, &columns_of).map(drop)
            }
            Kind::AllToAll => {
                let meta = TensorMeta::new(part.dims(), dtype);
                group.all_to_all(&vec![part; n], &vec![meta; n]).map(drop)
            }
        }
    }
}

#[test]
fn a_silent_rank_is_an_error_on_every_rank_after_the_deadline() {
    let deadline = Duration::from_millis(300);
    let start = Instant::now();
    let results = ThreadWorld::new(3).unwrap().deadline(deadline).run_each(move |world| {
        if world.rank() == 1 {
            std::thread::sleep(2 * deadline);
        }
        world.barrier()
    });
    assert!(start.elapsed() < 20 * deadline);
    for result in &results {
        let error = result.as_ref().expect_err("the barrier cannot complete").to_string();
        for part in ["barrier", "[1]", "300ms", "misuse.rs"] {
            assert!(error.contains(part), "{part} missing in {error}");
        }
    }
}

#[test]
fn a_rank_that_never_returns_is_abandoned_and_named() {
    let deadline = Duration::from_millis(300);
    let release = Arc::new(AtomicBool::new(false));
    let held = Arc::clone(&release);
    let start = Instant::now();
    let world = ThreadWorld::new(3).unwrap().deadline(deadline);
    let results = world.run_each(move |world| {
        while world.rank() == 2 && !held.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        world.barrier()
    });
    assert!(start.elapsed() < 20 * deadline, "{:?}", start.elapsed());
    assert!(matches!(results[2], Err(Error::Stuck { rank: 2, .. })), "{:?}", results[2]);
    assert!(matches!(results[0], Err(Error::Timeout { .. })), "{:?}", results[0]);
    release.store(true, SeqCst);
}

#[test]
fn a_mismatch_names_both_ranks_both_calls_and_both_call_sites() {
    let run = |world: World| {
        let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
        if world.rank() == 2 { world.barrier() } else { world.all_reduce(&tensor, ReduceOp::Max).map(drop) }
    };
    let results = ThreadWorld::new(3).unwrap().run_each(run);
    let texts: Vec<String> = results.iter().map(|r| r.as_ref().unwrap_err().to_string()).collect();
    assert!(texts.iter().all(|t| *t == texts[0]), "{texts:?}");
    for part in ["rank 0 called all_reduce(max) of f32 [2, 3]", "rank 2 called barrier", "[0, 1, 2]"] {
        assert!(texts[0].contains(part), "{part} missing in {}", texts[0]);
    }
    assert_eq!(texts[0].matches("misuse.rs:").count(), 2, "{}", texts[0]);
}

#[test]
fn a_group_is_usable_after_a_mismatch_that_all_ranks_handle() {
    let run = |world: World| {
        let sizes = [1 + world.rank(), 2];
        let tensor = Tensor::new(&[world.rank() as u32], &Device::Cpu)?;
        assert!(world.all_gather(&tensor, 0, &sizes).is_err());
        Ok(world.all_gather(&tensor, 0, &[1, 1])?.to_vec1::<u32>()?)
    };
    assert_eq!(ThreadWorld::new(2).unwrap().run(run).unwrap(), [[0, 1], [0, 1]]);
}

#[test]
fn a_deadlock_of_receives_is_detected_at_once() {
    let run = |world: World| world.recv(&TensorMeta::new(1, DType::F32), 1 - world.rank(), 0).map(drop);
    let start = Instant::now();
    let error = ThreadWorld::new(2).unwrap().deadline(DEADLINE).run(run).unwrap_err().to_string();
    assert!(start.elapsed() < DEADLINE / 2);
    assert!(error.contains("rank 0 called recv") && error.contains("rank 1 called recv"), "{error}");
}

#[test]
fn launch_returns_the_error_of_the_rank_that_failed_first() {
    let error = shardwise::launch(4, |world| {
        if world.rank() == 3 {
            return Err(Error::other("out of luck"));
        }
        world.barrier()
    });
    assert_eq!(error.unwrap_err().to_string(), "rank 3 failed: out of luck");
}

/// Panics that tests cause on purpose need not fill the screen.
fn silence_injected_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload().downcast_ref::<&str>() != Some(&"injected panic") {
            usual(info);
        }
    }));
}
