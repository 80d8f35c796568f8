//! What one rank does to its variables after a collective is invisible to the others.

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
fn a_deadline_beyond_the_clock_is_none() {
    let world = ThreadWorld::new(2).unwrap().deadline(std::time::Duration::MAX);
    let run = |world: World| {
        if world.rank() == 0 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        world.barrier()
    };
    world.run(run).unwrap();
}
