//! Dtypes and devices without kernels are rejected at the entry points, with an accurate message.

use candle_core::{CudaDevice, Device};
use shardwise::DryWorld;
use shardwise::prelude::*;
use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};

fn on(ranks: usize, program: impl Fn(World) -> Result<()> + Send + Sync + 'static) {
    ThreadWorld::new(ranks).unwrap().deadline(std::time::Duration::from_secs(20)).run(program).unwrap();
}

const WITHOUT_KERNELS: [DType; 4] = [DType::F6E2M3, DType::F6E3M2, DType::F4, DType::F8E8M0];

#[test]
fn element_types_without_kernels_are_rejected_everywhere() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let x = DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?;
        let spec = || ChunkShardingSpec::over_ranks(0, [0, 1]);
        for dtype in WITHOUT_KERNELS {
            let refused = [
                x.to_dtype(dtype).map(drop),
                x.to_dtype(dtype).and_then(|x| x.sort(0, false).map(drop)),
                DTensor::zeros(4, dtype, &mesh, [Shard(0)]).map(drop),
                DTensor::arange(0.0..4.0, dtype, &mesh, [Shard(0)]).map(drop),
                DTensor::random(Distribution::Normal { mean: 0.0, std: 1.0 }, 4, dtype, &mesh, [Shard(0)]).map(drop),
                ShardedTensor::zeros(spec()?, 4, dtype, &mesh).map(drop),
                ShardedTensor::ones(spec()?, 4, DType::F32, &mesh)?.to_dtype(dtype).map(drop),
            ];
            for (i, result) in refused.into_iter().enumerate() {
                let message = result.expect_err("no kernels").to_string();
                assert!(message.contains(dtype.as_str()) && message.contains("needed f64, f32"), "{i}: {message}");
            }
        }
        // Rejected calls did not advance the generator.
        world.agree("draws", &[mesh.generator().state().offset])
    });
    let dry = DryWorld::new(2).unwrap().run(|world| {
        let mesh = world.mesh([("a", 2)])?;
        Ok(DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?.to_dtype(DType::F4).is_err())
    });
    assert!(dry.unwrap().value);
}

#[test]
fn meshes_on_devices_without_kernels_are_rejected() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let message = mesh.on_device("xyz").unwrap_err().to_string();
        assert!(message.contains("`xyz`") && message.contains("register_backend"), "{message}");
        for device in ["cuda", "metal", "xla", "mps"] {
            // As a description a mesh may be on any known type of device; a world computes on the CPU.
            let described = mesh.on_device(device)?;
            let message = world.device_mesh(described).unwrap_err().to_string();
            assert!(message.contains(&format!("`{device}`")) && message.contains("does not compute"), "{message}");
        }
        assert!(world.device_mesh(mesh.on_device("cpu")?).is_ok());
        Ok(())
    });
    // A dry run computes nothing, so that it may imagine a cluster of any devices.
    let run = DryWorld::new(16).unwrap().run(|world| {
        let mesh = world.device_mesh("cuda/dp=16".parse()?)?;
        Ok(DTensor::ones((64, 4), DType::F32, &mesh, [Shard(0)])?.exp()?.shape().to_vec())
    });
    assert_eq!(run.unwrap().value, [64, 4]);
}

#[test]
fn tensors_are_not_moved_to_devices_without_kernels() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let cuda = Device::Cuda(CudaDevice);
        let x = DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?;
        let sharded = ShardedTensor::ones(ChunkShardingSpec::over_ranks(0, [0, 1])?, 4, DType::F32, &mesh)?;
        for message in [x.to_device(&cuda).unwrap_err(), sharded.to(&cuda).unwrap_err()].map(|e| e.to_string()) {
            assert!(message.contains("`cuda`") && message.contains("does not compute on"), "{message}");
        }
        assert!(x.to_device(&Device::Cpu)?.equal(&x)?);
        let spec = ChunkShardingSpec::new(0, ["rank:0/cuda:0", "rank:1/cuda:1"])?;
        let message = ShardedTensor::zeros(spec, 4, DType::F32, &mesh).unwrap_err().to_string();
        assert!(message.contains("cuda:0") && message.contains("needed the CPU"), "{message}");
        Ok(())
    });
}
