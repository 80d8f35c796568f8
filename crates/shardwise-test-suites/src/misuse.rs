//! Random programs with one faulty rank, for any engine.

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use shardwise::{Error, Group, ReduceOp, Result, TensorMeta, World};

/// What the faulty rank does instead of one of its steps.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
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

/// All of them.
pub const FAULTS: [Fault; 18] = [
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

/// A program in which one rank does something else than the other ranks.
#[derive(Debug, Clone)]
pub struct FaultyProgram {
    /// Number of ranks.
    pub ranks: usize,
    steps: Vec<Step>,
    /// What the faulty rank does.
    pub fault: Fault,
    /// The faulty rank.
    pub faulty: usize,
    at: usize,
}

impl FaultyProgram {
    /// The program of a seed.
    pub fn random(seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed);
        let ranks = rng.random_range(2..=6);
        let steps: Vec<Step> = (0..rng.random_range(1..8)).map(|_| Step::random(rng, ranks)).collect();
        let at = rng.random_range(0..steps.len());
        let faulty = *steps[at].group.choose(rng).unwrap();
        FaultyProgram { ranks, steps, fault: *FAULTS.choose(rng).unwrap(), faulty, at }
    }

    /// Runs it on one rank.
    pub fn run(&self, world: &World) -> Result<()> {
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

    /// Whether a rank may return without an error.
    pub fn may_end_well(&self, rank: usize) -> bool {
        match self.fault {
            // The message is never received, which is reported for its sender at the end.
            Fault::SendsWhatNobodyReceives => rank != self.faulty,
            Fault::ReturnsOk | Fault::Aborts => rank == self.faulty,
            // A call that looks like the next one is missed, or is too many, only at the end of the program.
            Fault::SkipsCall => rank == self.faulty,
            Fault::ExtraCall => rank != self.faulty,
            _ => false,
        }
    }

    /// What must hold of the results.
    ///
    /// # Errors
    /// What does not.
    pub fn judge(&self, results: &[Result<()>]) -> std::result::Result<(), String> {
        let errors: Vec<String> = results.iter().filter_map(|r| r.as_ref().err()).map(ToString::to_string).collect();
        let named = format!("rank {}", self.faulty);
        if !errors.iter().any(|e| e.contains(&named)) {
            return Err(format!("no error names {named}"));
        }
        for (rank, result) in results.iter().enumerate() {
            match result {
                Ok(()) if !self.may_end_well(rank) => return Err(format!("rank {rank} ended well")),
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
