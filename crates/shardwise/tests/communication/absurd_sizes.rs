//! Sizes beyond any memory are typed errors on every rank: nothing aborts, overflows or runs forever.

use std::time::Instant;

use candle_core::{Device, Tensor};
use shardwise::DryWorld;
use shardwise::ops::ConvOptions;
use shardwise::prelude::*;
use shardwise::tensor::{Linspace, Logspace};
use shardwise_test_suites::refusals::{AT_ONCE, VAST, refused};

#[test]
fn factories_reject_sizes_beyond_memory() {
    for placement in [Replicate, Shard(0)] {
        let of = move || [placement.clone()];
        let place = of.clone();
        refused(move |mesh| DTensor::arange(0.0..1e12, DType::F32, mesh, place()));
        let place = of.clone();
        refused(move |mesh| DTensor::arange(0.0..1e12, DType::I64, mesh, place()));
        let place = of.clone();
        refused(move |mesh| {
            DTensor::linspace(Linspace { start: 0.0, end: 1.0, steps: VAST }, DType::F64, mesh, place())
        });
        let place = of.clone();
        refused(move |mesh| {
            DTensor::logspace(Logspace { start: 0.0, end: 1.0, steps: VAST, base: 2.0 }, DType::F64, mesh, place())
        });
        let place = of.clone();
        refused(move |mesh| DTensor::randn(VAST, mesh, place()));
        let place = of.clone();
        refused(move |mesh| DTensor::rand((1_000_000, 1_000_000), mesh, place()));
        let place = of.clone();
        refused(move |mesh| DTensor::randint(0..9, VAST, mesh, place()));
        let place = of.clone();
        refused(move |mesh| DTensor::randperm(VAST, mesh, place()));
        let place = of.clone();
        refused(move |mesh| DTensor::eye((10_000_000, 10_000_000), DType::U8, mesh, place()));
        let place = of.clone();
        refused(move |mesh| DTensor::tril_indices((VAST, VAST), 0, mesh, place()));
        let place = of.clone();
        refused(move |mesh| DTensor::triu_indices((usize::MAX, usize::MAX), isize::MIN, mesh, place()));
        let place = of.clone();
        refused(move |mesh| DTensor::from_fn(VAST, DType::F32, mesh, place(), |_| 0.0));
        let place = of.clone();
        refused(move |mesh| DTensor::zeros(VAST, DType::F32, mesh, place()));
        let place = of.clone();
        refused(move |mesh| DTensor::full(1.0, (VAST, 2), DType::U8, mesh, place()));
    }
}

#[test]
fn a_shard_too_large_for_one_rank_is_an_error_on_both_ranks() {
    let texts = refused(|mesh| DTensor::zeros(VAST + 1, DType::F32, mesh, [Placement::ragged(0, [1, VAST])]));
    assert!(texts.iter().all(|text| text.contains("rank 1")), "{texts:?}");
}

#[test]
fn operators_reject_results_beyond_memory() {
    fn ids(mesh: &DeviceMesh) -> Result<DTensor> {
        DTensor::arange(0.0..4.0, DType::I64, mesh, [Shard(0)])
    }
    refused(|mesh| ids(mesh)?.one_hot(VAST));
    refused(|mesh| ids(mesh)?.one_hot(usize::MAX));
    for border in [VAST, usize::MAX, usize::MAX - 3, 1 << 62, 1 << 40] {
        refused(move |mesh| ids(mesh)?.pad(&[(border, 0)], 0.0));
        refused(move |mesh| ids(mesh)?.pad(&[(border, border)], 0.0));
        refused(move |mesh| ids(mesh)?.repeat(&[border]));
        refused(move |mesh| ids(mesh)?.repeat(&[border, border]));
        refused(move |mesh| ids(mesh)?.repeat_interleave(border, 0));
        refused(move |mesh| ids(mesh)?.narrow(0, border, border));
        refused(move |mesh| ids(mesh)?.narrow(0, 1, border));
    }
    refused(|mesh| DTensor::zeros((0, 3), DType::F32, mesh, [Replicate])?.chunk(VAST, 0)?.swap_remove(0).exp());
    refused(|mesh| ids(mesh)?.topk(usize::MAX, 0, true).map(|pair| pair.0));
    refused(|mesh| {
        let x = DTensor::zeros((1 << 20, 1), DType::F32, mesh, [Shard(0)])?;
        x.mul(&DTensor::zeros((1, 1 << 24), DType::F32, mesh, [Replicate])?)
    });
}

#[test]
fn convolution_windows_of_absurd_sizes_are_rejected() {
    for size in [usize::MAX, usize::MAX / 2, 1 << 62, 1 << 50, VAST] {
        let with = move |change: fn(&mut ConvOptions, usize)| {
            let mut options = ConvOptions::default();
            change(&mut options, size);
            for placements in [[Replicate], [Shard(2)]] {
                refused(move |mesh| {
                    let x = DTensor::ones((1, 2, 6, 6), DType::F32, mesh, placements.clone())?;
                    let w = DTensor::ones((2, 2, 3, 3), DType::F32, mesh, [Replicate])?;
                    x.conv2d(&w, None, options)
                });
            }
            refused(move |mesh| {
                let x = DTensor::ones((1, 2, 6), DType::F32, mesh, [Replicate])?;
                let w = DTensor::ones((2, 2, 3), DType::F32, mesh, [Replicate])?;
                x.conv1d(&w, None, options)
            });
        };
        with(|options, size| options.padding = size);
        with(|options, size| options.dilation = size);
        with(|options, size| options.groups = size);
        refused(move |mesh| DTensor::ones((1, 2, 6), DType::F32, mesh, [Replicate])?.avg_pool1d(size, None, 0));
        refused(move |mesh| DTensor::ones((1, 2, 6), DType::F32, mesh, [Replicate])?.max_pool1d(size, None, size / 2));
        refused(move |mesh| {
            DTensor::ones((1, 2, 6, 6), DType::F32, mesh, [Shard(3)])?.max_pool2d(size, Some(size), size)
        });
    }
    // A step beyond the end is one window, as in PyTorch.
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        for placement in [Replicate, Shard(2)] {
            let x = DTensor::ones((1, 1, 6), DType::F32, &mesh, [placement])?;
            let y = x.max_pool1d(3, Some(usize::MAX), 0)?;
            assert_eq!(y.shape(), [1, 1, 1]);
            assert_eq!(y.full_tensor()?.flatten_all()?.to_vec1::<f32>()?, [1.0]);
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().deadline(AT_ONCE).run(run).unwrap();
}

#[test]
fn worlds_and_meshes_of_absurd_sizes_are_rejected() {
    let begun = Instant::now();
    assert!(launch(1_000_000_000, |_| Ok(())).is_err());
    let error = ThreadWorld::new(1).unwrap().kernel_threads(100_000_000).run(|_| Ok(())).unwrap_err();
    assert!(error.to_string().contains("kernel threads"), "{error}");
    for axes in [vec![("a", usize::MAX)], vec![("a", 1 << 40)], vec![("a", 1 << 33), ("b", 1 << 33)]] {
        let error = Mesh::new(axes).unwrap_err().to_string();
        assert!(error.starts_with("invalid mesh"), "{error}");
    }
    assert!("dp=1000000000000".parse::<Mesh>().is_err());
    assert!(DryWorld::new(1 << 60).is_err());
    assert!(begun.elapsed() < AT_ONCE);
}

#[test]
fn sharded_tensors_of_absurd_sizes_are_rejected() {
    use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
    let begun = Instant::now();
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let spec = || ChunkShardingSpec::over_ranks(0, [0, 1]);
        for shape in [vec![VAST], vec![1 << 40, 1 << 40], vec![usize::MAX, 2]] {
            let zeros = ShardedTensor::zeros(spec()?, shape.as_slice(), DType::F32, &mesh);
            let random = ShardedTensor::rand(spec()?, shape.as_slice(), DType::F32, &mesh);
            for made in [zeros, random] {
                let error = made.unwrap_err().to_string();
                assert!(error.contains("invalid "), "{error}");
                world.barrier()?;
            }
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().deadline(AT_ONCE).run(run).unwrap();
    assert!(begun.elapsed() < AT_ONCE);
}

#[test]
fn dry_runs_of_huge_tensors_allocate_nothing() {
    let run = DryWorld::new(8).unwrap().run(|world| {
        let mesh = world.mesh([("a", 8)])?;
        let x = DTensor::randn((1 << 24, 1 << 20), &mesh, [Shard(0)])?;
        let y = DTensor::arange(0.0..1e12, DType::F32, &mesh, [Replicate])?;
        let z = x.add(&x)?.pad(&[(1 << 20, 0)], 0.0)?;
        Ok((z.shape().to_vec(), y.shape().to_vec()))
    });
    let value = run.unwrap().value;
    assert_eq!(value, (vec![1 << 24, 1 << 21], vec![VAST]));
}

#[test]
fn a_huge_broadcast_view_is_rejected_where_it_would_be_copied() {
    let texts = refused(|mesh| {
        let view = Tensor::zeros((1, 1), DType::F32, &Device::Cpu)?.broadcast_as((1 << 24, 1 << 20))?;
        DTensor::from_local_with_shape(&view, mesh, [Replicate], (1 << 24, 1 << 20))
    });
    assert!(texts[0].contains("memory"), "{texts:?}");
}
