//! Ranks must make the same calls with the same arguments, and nothing communicates after its launch has ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use shardwise::comm::{Call, Communicator, ExposedTensors};
use shardwise::error::Site;
use shardwise::mesh::Network;
use shardwise::prelude::*;
use shardwise::{Error, Group, TensorMeta, ThreadWorld};
use shardwise_test_suites::disagreements;

#[test]
fn ranks_with_different_calls_get_the_same_typed_error() {
    for ranks in [2, 3] {
        let done = ThreadWorld::new(ranks).unwrap().run(|world| disagreements::run(&world)).unwrap();
        assert!(done.iter().all(|cases| *cases == done[0]), "{done:?}");
    }
}

#[test]
fn calls_of_two_threads_of_one_rank_are_never_matched() {
    for _ in 0..50 {
        ThreadWorld::new(2).unwrap().run(|world| disagreements::two_threads(&world)).unwrap();
    }
}

/// The errors of all calls that communicate, on a world and a tensor that outlive their launch.
fn communicate(world: &World, x: &DTensor) -> Vec<Error> {
    let tensor = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap();
    let meta = TensorMeta::new(4, DType::F32);
    let ranks: Vec<usize> = (0..world.size()).collect();
    let mesh = world.mesh([("dp", world.size())]).unwrap();
    let mut results = vec![
        world.barrier(),
        world.all_reduce(&tensor, ReduceOp::Sum).map(drop),
        world.all_gather(&tensor, 0, &vec![4; world.size()]).map(drop),
        world.broadcast((world.rank() == 0).then_some(&tensor), &meta, 0).map(drop),
        world.send(&tensor, 0, 0),
        world.recv(&meta, 0, 0).map(drop),
        world.expose(&[]).map(drop),
        world.split(Some(0), 0).map(drop),
        world.subgroup(&ranks).unwrap().barrier(),
        mesh.group(&["dp"]).unwrap().barrier(),
    ];
    // A single rank needs no other rank for these.
    if world.size() > 1 {
        results.push(DTensor::from_local(&tensor, &mesh, [Shard(0)]).map(drop));
        results.push(x.full_tensor().map(drop));
        results.push(x.sum_all().unwrap().item::<f32>().map(drop));
    }
    let error = |(i, result): (usize, Result<()>)| result.expect_err(&format!("call {i}"));
    results.into_iter().enumerate().map(error).collect()
}

#[test]
fn tensors_and_worlds_that_outlive_their_launch_cannot_communicate() {
    for ranks in [1, 2, 3] {
        let left = ThreadWorld::new(ranks).unwrap().run(|world| {
            let mesh = world.mesh([("dp", world.size())])?;
            let x = DTensor::ones((6, 2), DType::F32, &mesh, [Shard(0)])?;
            assert_eq!(x.sum_all()?.item::<f32>()?, 12.0);
            Ok((world, x))
        });
        let left = Arc::new(left.unwrap());
        let check = |errors: Vec<Error>| {
            for error in errors {
                assert!(matches!(error, Error::Rejected { .. }), "{error}");
                assert!(error.to_string().contains("after the launch had ended"), "{error}");
            }
        };
        left.iter().for_each(|(world, x)| check(communicate(world, x)));
        // On as many threads as there were ranks, so that all of them could meet.
        let on_thread = |rank: usize| {
            let left = Arc::clone(&left);
            std::thread::spawn(move || communicate(&left[rank].0, &left[rank].1))
        };
        let threads: Vec<_> = (0..ranks).map(on_thread).collect();
        threads.into_iter().for_each(|thread| check(thread.join().expect("no panic")));
    }
}

#[test]
fn a_timeout_names_ranks_that_are_in_another_call() {
    let deadline = Duration::from_secs(1);
    let results = ThreadWorld::new(3).unwrap().deadline(deadline).run_each(move |world| {
        let begun = Instant::now();
        let until = |part: f64| {
            while begun.elapsed() < deadline.mul_f64(part) {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        match world.rank() {
            0 => world.barrier(),
            1 => {
                // Later than rank 0, whose deadline then comes first.
                until(0.5);
                world.recv(&TensorMeta::new(1, DType::F32), 2, 7).map(drop)
            }
            _ => {
                until(1.4);
                Ok(())
            }
        }
    });
    let Err(error @ Error::Timeout { missing, other_calls, .. }) = &results[0] else { panic!("{results:?}") };
    assert_eq!((missing.as_slice(), other_calls[0].rank), ([1, 2].as_slice(), 1));
    assert!(error.to_string().contains("rank 1 called recv(f32 [1] from 2, tag 7)"), "{error}");
}

/// An engine of another crate that returns arbitrary tensors.
struct Careless(fn() -> Vec<Tensor>);

impl Communicator for Careless {
    fn rank(&self) -> usize {
        0
    }
    fn ranks(&self) -> &[usize] {
        &[0, 1]
    }
    fn run(&self, _: &Call, _: &[Tensor], _: Site) -> Result<Vec<Tensor>> {
        Ok((self.0)())
    }
    fn send(&self, _: &Tensor, _: usize, _: u64, _: Site) -> Result<()> {
        Ok(())
    }
    fn recv(&self, _: &TensorMeta, _: usize, _: u64, _: Site) -> Result<Tensor> {
        Ok((self.0)().swap_remove(0))
    }
    fn subgroup(&self, _: &[usize]) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Careless(self.0)))
    }
    fn expose(&self, _: &[Tensor], _: Site) -> Result<Box<dyn ExposedTensors>> {
        struct Read(fn() -> Vec<Tensor>);
        impl ExposedTensors for Read {
            fn read(&self, _: usize, _: usize, _: &TensorMeta, _: Site) -> Result<Tensor> {
                Ok((self.0)().swap_remove(0))
            }
        }
        Ok(Box::new(Read(self.0)))
    }
    fn abort(&self, _: &str) {}
    fn network(&self) -> Network {
        Network::THREADS
    }
}

#[test]
fn results_of_a_custom_engine_are_checked_before_use() {
    let zeros = |count: usize, dtype| Tensor::zeros(count, dtype, &Device::Cpu).unwrap();
    let good = Group::new(Arc::new(Careless(|| vec![Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap()])));
    let input = zeros(4, DType::F32);
    assert!(good.all_reduce(&input, ReduceOp::Sum).is_ok());
    let bad: [fn() -> Vec<Tensor>; 4] = [
        || vec![Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap()],
        || vec![Tensor::zeros(4, DType::F64, &Device::Cpu).unwrap()],
        || vec![Tensor::zeros((4, 1), DType::F32, &Device::Cpu).unwrap()],
        || vec![Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap().to_dtype(DType::F8E4M3).unwrap()],
    ];
    let meta = TensorMeta::new(4, DType::F32);
    for make in bad {
        let group = Group::new(Arc::new(Careless(make)));
        let site = std::panic::Location::caller();
        let results = [
            group.all_reduce(&input, ReduceOp::Sum).map(drop),
            group.reduce(&input, ReduceOp::Sum, 0).map(drop),
            group.all_gather(&input, 0, &[4, 0]).map(drop),
            group.gather(&input, 0, &[4, 0], 0).map(drop),
            group.reduce_scatter(&zeros(6, DType::F32), ReduceOp::Sum, 0, &[4, 2]).map(drop),
            group.scatter(Some(&zeros(6, DType::F32)), &TensorMeta::new(6, DType::F32), 0, &[4, 2], 0).map(drop),
            group.broadcast(Some(&input), &meta, 0).map(drop),
            group.all_to_all(&[input.clone(), input.clone()], &[meta.clone(), meta.clone()]).map(drop),
            group.exchange_dims(&zeros(4, DType::F32).reshape((2, 2)).unwrap(), 0, &[2, 0], 1, &[2, 0]).map(drop),
            group.barrier(),
            group.agree("step", &[1]),
            group.recv(&meta, 1, 0).map(drop),
            group.expose(&[]).unwrap().read(1, 0, &meta, site).map(drop),
        ];
        for (i, result) in results.into_iter().enumerate() {
            assert!(matches!(result, Err(Error::Invalid(_))), "call {i}: {result:?}");
        }
    }
    let nothing = Group::new(Arc::new(Careless(Vec::new)));
    assert!(nothing.all_reduce(&input, ReduceOp::Sum).is_err());
}

#[test]
fn a_singular_matrix_that_had_to_be_gathered_is_an_error_on_all_ranks() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        // four matrices, of which only the last, zero, cannot be factorized; a shard of rows becomes one of the batch
        let mut matrices = vec![0.0; 4 * 4];
        (0..3).for_each(|i| (matrices[4 * i], matrices[4 * i + 3]) = (1.0, 2.0));
        let matrices = Tensor::from_vec(matrices, (4, 2, 2), &Device::Cpu)?;
        let rows = DTensor::distribute_tensor(&matrices, &mesh, [Shard(1)], None)?;
        let ones = DTensor::ones((4, 2, 1), DType::F64, &mesh, [Replicate])?;
        let verdicts = [
            rows.linalg_inv().map(drop),
            rows.linalg_cholesky(false).map(drop),
            rows.linalg_lu_factor(true).map(drop),
            rows.linalg_solve(&ones, true).map(drop),
        ];
        for verdict in verdicts {
            let message = verdict.expect_err("a singular matrix").to_string();
            assert!(message.contains("fails at row 1"), "{message}");
        }
        assert!(rows.narrow(0, 0, 3)?.linalg_inv().is_ok());
        world.barrier()
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}
