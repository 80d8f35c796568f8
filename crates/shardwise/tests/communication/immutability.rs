//! Overwriting a variable after a collective, or after a tensor was created from it, changes no other tensor.

use candle_core::{DType, Device, Tensor, Var};
use shardwise::prelude::*;

#[test]
fn a_variable_may_be_overwritten_right_after_a_collective() {
    let run = |world: World| {
        let expected: f32 = (0..world.size()).map(|r| r as f32).sum();
        let meta = TensorMeta::new(8, DType::F32);
        for round in 0..500 {
            let var = Var::from_tensor(&Tensor::full(world.rank() as f32, 8, &Device::Cpu)?)?;
            let sum = world.all_reduce(var.as_tensor(), ReduceOp::Sum)?;
            var.set(&Tensor::full(1e9f32, 8, &Device::Cpu)?)?;
            assert_eq!(sum.to_vec1::<f32>()?, vec![expected; 8], "round {round}");

            let root = round % world.size();
            let var = Var::from_tensor(&Tensor::full(round as f32, 8, &Device::Cpu)?)?;
            let got = world.broadcast((world.rank() == root).then_some(var.as_tensor()), &meta, root)?;
            var.set(&Tensor::full(-1f32, 8, &Device::Cpu)?)?;
            assert_eq!(got.to_vec1::<f32>()?, vec![round as f32; 8]);
            // also on one rank, where the result could be the very same tensor
            var.set(&got)?;
        }
        Ok(())
    };
    for ranks in [1, 2, 3] {
        ThreadWorld::new(ranks).unwrap().run(run).unwrap();
    }
}

#[test]
fn absurd_sizes_are_an_error_and_not_an_abort() {
    let run = |world: World| {
        let small = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
        for sizes in [[3, usize::MAX], [3, usize::MAX / 2], [3, 1 << 45]] {
            assert!(world.all_gather(&small, 0, &sizes).is_err());
        }
        let vast = Tensor::zeros((1, 1), DType::U8, &Device::Cpu)?.broadcast_as((1 << 32, 1 << 31))?;
        assert!(world.all_gather(&vast, 0, &[1 << 32, 1 << 32]).is_err());
        world.barrier()
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn a_deadline_beyond_the_clock_means_no_deadline() {
    let world = ThreadWorld::new(2).unwrap().deadline(std::time::Duration::MAX);
    let run = |world: World| {
        if world.rank() == 0 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        world.barrier()
    };
    world.run(run).unwrap();
}

/// Ways in which candle hands out the memory of a variable as an ordinary tensor.
const DISGUISES: [fn(&Var) -> candle_core::Result<Tensor>; 4] = [
    |var| Ok(var.as_detached_tensor()),
    |var| var.as_detached_tensor().reshape((2, 4)),
    |var| var.as_detached_tensor().narrow(0, 0, 8),
    |var| var.as_detached_tensor().reshape((4, 2))?.narrow(0, 1, 3),
];

fn list(x: &DTensor) -> Result<Vec<f32>> {
    Ok(x.full_tensor()?.flatten_all()?.to_vec1()?)
}

#[test]
fn a_tensor_never_aliases_the_variable_it_was_created_from() {
    for disguise in DISGUISES {
        let run = move |world: World| {
            let mesh = world.mesh([("a", 2)])?;
            let var = Var::from_tensor(&Tensor::ones(8, DType::F32, &Device::Cpu)?)?;
            let local = disguise(&var)?;
            let whole = Layout::replicated(mesh.mesh(), local.dims())?;
            let sharded =
                shardwise::sharded::TensorShard::from_tensor_and_offsets(&local, vec![0; local.rank()], world.rank())?;
            let tensors = [
                DTensor::from_local(&local, &mesh, [Shard(0)])?,
                DTensor::from_local(&local, &mesh, [Replicate])?,
                DTensor::from_local_with_shape(&local, &mesh, [Replicate], whole.shape())?,
                DTensor::distribute_tensor(&local, &mesh, [Replicate], None)?,
                DTensor::distribute_tensor(&local, &mesh, [Replicate], Some(0))?,
                DTensor::distribute_tensor(&local, &mesh, [Shard(0)], Some(1))?,
                shardwise::local_map(&[&DTensor::zeros(1, DType::F32, &mesh, [Replicate])?], [Replicate], &[], |_| {
                    Ok(local.clone())
                })?,
            ];
            var.set(&Tensor::zeros(8, DType::F32, &Device::Cpu)?)?;
            world.barrier()?;
            for (i, tensor) in tensors.iter().enumerate() {
                assert!(list(tensor)?.iter().all(|&x| x == 1.0), "{i}: {tensor:?}");
            }
            assert_eq!(sharded.tensor().flatten_all()?.to_vec1::<f32>()?, vec![1.0; local.elem_count()]);
            Ok(())
        };
        ThreadWorld::new(2).unwrap().run(run).unwrap();
    }
}

#[test]
fn in_place_writes_to_a_returned_tensor_change_nothing_else() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let zeros = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
        for placement in [Replicate, Shard(0)] {
            let x = DTensor::ones(8, DType::F32, &mesh, [placement])?;
            let y = x.clone();
            x.to_local()?.slice_set(&zeros, 0, 0)?;
            world.barrier()?;
            assert_eq!(list(&x)?, [1.0; 8]);
            assert_eq!(list(&y)?, [1.0; 8]);
            // ranks of one process share the memory of a large gather
            x.full_tensor()?.slice_set(&zeros, 0, 0)?;
            world.barrier()?;
            assert_eq!(list(&x)?, [1.0; 8]);
            let large = DTensor::ones(1 << 16, DType::F32, &mesh, x.placements().to_vec())?;
            let whole = large.full_tensor()?;
            world.barrier()?;
            if world.rank() == 0 {
                whole.slice_set(&zeros, 0, 0)?;
            }
            world.barrier()?;
            let begins = if world.rank() == 0 { 0.0 } else { 1.0 };
            assert_eq!(whole.narrow(0, 0, 1)?.to_vec1::<f32>()?, [begins]);
            let mapped = shardwise::local_map(&[&x], x.placements().to_vec(), &[], |local| {
                local[0].slice_set(&zeros, 0, 0)?;
                Ok(local[0].clone())
            })?;
            assert!(list(&mapped)?.contains(&0.0));
            assert_eq!(list(&x)?, [1.0; 8]);
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn inputs_of_a_collective_may_be_overwritten_when_it_returns() {
    let run = |world: World| {
        let (me, size) = (world.rank(), world.size());
        // every rank computes a small result for itself; a large one is computed jointly
        for n in [8, 1 << 14] {
            let meta = TensorMeta::new(n, DType::F32);
            let halves = [n / 2, n - n / 2];
            for round in 0..200 {
                let mine = Var::from_tensor(&Tensor::full((me + 1) as f32, n, &Device::Cpu)?)?;
                let given = mine.as_detached_tensor();
                let over = || mine.set(&Tensor::full(1e9f32, n, &Device::Cpu)?);
                let root = round % size;
                let is = |got: &Tensor, expected: f32| -> Result<()> {
                    let got = got.flatten_all()?.to_vec1::<f32>()?;
                    assert!(got.iter().all(|&x| x == expected), "round {round}: {expected} in {:?}", &got[..4]);
                    Ok(())
                };
                let again = || mine.set(&Tensor::full((me + 1) as f32, n, &Device::Cpu)?);
                let got = world.all_reduce(&given, ReduceOp::Sum)?;
                over()?;
                is(&got, 3.0)?;
                again()?;
                let got = world.reduce_scatter(&given, ReduceOp::Sum, 0, &halves)?;
                over()?;
                is(&got, 3.0)?;
                again()?;
                let got = world.broadcast((me == root).then_some(&given), &meta, root)?;
                over()?;
                is(&got, (root + 1) as f32)?;
                again()?;
                let got = world.scatter((me == root).then_some(&given), &meta, 0, &halves, root)?;
                over()?;
                is(&got, (root + 1) as f32)?;
                again()?;
                let got = world.all_gather(&given, 0, &[n, n])?;
                over()?;
                is(&got.narrow(0, 0, n)?, 1.0)?;
                is(&got.narrow(0, n, n)?, 2.0)?;
                again()?;
                let got = world.all_to_all(&[given.clone(), given.clone()], &[meta.clone(), meta.clone()])?;
                over()?;
                is(&got[0], 1.0)?;
                is(&got[1], 2.0)?;
                again()?;
                if let Some(got) = world.gather(&given, 0, &[n, n], root)? {
                    is(&got.narrow(0, 0, n)?, 1.0)?;
                    is(&got.narrow(0, n, n)?, 2.0)?;
                }
                over()?;
                again()?;
                world.send(&given, 1 - me, 0)?;
                over()?;
                is(&world.recv(&meta, 1 - me, 0)?, (2 - me) as f32)?;
                world.barrier()?;
            }
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}
