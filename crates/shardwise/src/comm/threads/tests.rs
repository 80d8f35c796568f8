use super::*;
use crate::comm::Group;
use crate::placement::ReduceOp;
use candle_core::{DType, Device, Tensor};

#[test]
fn a_world_has_at_least_one_rank_and_not_absurdly_many() {
    for ranks in [0, MAX_RANKS + 1] {
        let message = ThreadWorld::new(ranks).unwrap_err().to_string();
        assert!(message.contains(&format!("{ranks} ranks")) && message.contains("launch at least one"), "{message}");
    }
    assert!(launch(0, |_| Ok(())).is_err());
}

#[test]
fn kernels_of_a_rank_stay_within_its_share_of_the_cores() {
    for ranks in [1, 2, 5] {
        let threads = ThreadWorld::new(ranks).unwrap().run(|_| Ok(rayon::current_num_threads())).unwrap();
        assert_eq!(threads, vec![(available_cores() / ranks).max(1); ranks]);
    }
    let threads = ThreadWorld::new(2).unwrap().kernel_threads(3).run(|_| Ok(rayon::current_num_threads()));
    assert_eq!(threads.unwrap(), [3, 3]);
}

#[test]
fn broadcast_shares_memory_instead_of_copying_it() {
    let addresses = ThreadWorld::new(3).unwrap().run(|world| {
        let mine = Tensor::zeros(1000, DType::F32, &Device::Cpu)?;
        let meta = crate::layout::TensorMeta::new(1000, DType::F32);
        let got = world.broadcast((world.rank() == 1).then_some(&mine), &meta, 1)?;
        world.barrier()?;
        let (storage, _) = got.storage_and_layout();
        Ok(std::ptr::from_ref(&*storage) as usize)
    });
    let addresses = addresses.unwrap();
    assert!(addresses.iter().all(|a| *a == addresses[0]), "{addresses:?}");
}

#[test]
fn a_collective_keeps_no_tensor_alive_once_all_have_read_it() {
    let hub = Arc::new(Hub::new(1, Duration::from_secs(1), true));
    let solo = Group::new(Arc::new(Member::of_world(Arc::clone(&hub), 0)));
    let tensor = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap();
    solo.all_gather(&tensor, 0, &[4]).unwrap();
    solo.barrier().unwrap();
    assert_eq!(hub.meeting(&[0]).posted(), 0);
}

#[test]
fn results_come_back_in_rank_order_and_outlive_the_world() {
    let tensors = ThreadWorld::new(4).unwrap().run(|world| {
        let mine = Tensor::full(world.rank() as f64, 2, &Device::Cpu)?;
        Ok(mine.add(&world.all_reduce(&mine, ReduceOp::Sum)?)?)
    });
    let values: Vec<f64> = tensors.unwrap().iter().map(|t| t.to_vec1::<f64>().unwrap()[0]).collect();
    assert_eq!(values, [6.0, 7.0, 8.0, 9.0]);
}

#[test]
fn tensors_on_types_the_engine_does_not_serve_are_refused_on_every_rank() {
    let results = ThreadWorld::new(2).unwrap().run_each(|world| {
        let tensor = Tensor::zeros(4, DType::F32, &Device::Cpu)?.to_dtype(DType::F8E4M3)?;
        world.all_reduce(&tensor, ReduceOp::Sum)
    });
    for result in results {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("called all_reduce") && message.contains("f8e4m3"), "{message}");
    }
}

#[test]
fn an_absurd_number_of_kernel_threads_is_refused() {
    let message = ThreadWorld::new(1).unwrap().kernel_threads(100_000_000).run(|_| Ok(())).unwrap_err().to_string();
    assert!(message.contains("100000000") && message.contains("at most 4096"), "{message}");
}
