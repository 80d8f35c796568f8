//! f8 (`float8_e4m3fn`): converted as in PyTorch 2.15, moved, saved, and multiplied with scales; all other arithmetic is refused.

use candle_core::{Device, Tensor};
use shardwise::checkpoint::{self, Format, SaveOptions, State};
use shardwise::nn::init::Init;
use shardwise::sharded::{ChunkShardingSpec, ShardedTensor, shard_tensor};
use shardwise::{DryWorld, prelude::*};
use shardwise_kernels::convert;
use shardwise_test_suites::counting::counted;
use shardwise_test_suites::scratch::Scratch;

use crate::pytorch::{list, on};

const F8: DType = DType::F8E4M3;

#[test]
fn numbers_round_as_in_pytorch() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let smallest = 2f32.powi(-9);
        #[rustfmt::skip]
        let given = [
            0.0, -0.0, 1.0, 1.0625, 1.1875, 447.0, 464.0, 465.0, 1000.0, f32::INFINITY, smallest, smallest / 2.0, smallest * 0.75, 0.017, -3.3,
            0.4375001, -1e9,
        ];
        #[rustfmt::skip]
        let rounded = [
            0.0, -0.0, 1.0, 1.0, 1.25, 448.0, 448.0, 448.0, 448.0, 448.0, 0.001953125, 0.0, 0.001953125, 0.017578125, -3.25, 0.4375, -448.0,
        ];
        let x = Tensor::from_slice(&given, given.len(), &Device::Cpu)?;
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let x = DTensor::distribute_tensor(&x, &mesh, [Shard(0)], None)?.to_dtype(dtype)?;
            let f8 = x.to_dtype(F8)?;
            assert_eq!((f8.dtype(), f8.placements()), (F8, [Shard(0)].as_slice()));
            // bf16 has rounded some of them before
            if dtype != DType::BF16 {
                assert_eq!(list(&f8)?, rounded, "{dtype:?}");
            }
            assert_eq!(list(&f8.to_dtype(DType::F16)?.to_dtype(F8)?)?, list(&f8)?);
        }
        let nan = DTensor::full(f64::NAN, 3, DType::F32, &mesh, [Shard(0)])?.to_dtype(F8)?;
        assert!(list(&nan)?.iter().all(|x| x.is_nan()));
        // Terms of a sum are added up before they are rounded.
        let terms = DTensor::full(0.07, 3, DType::F32, &mesh, [Replicate])?.redistribute([Partial(ReduceOp::Sum)])?;
        let sum = terms.to_dtype(F8)?;
        assert_eq!((sum.placements(), list(&sum)?), ([Replicate].as_slice(), vec![0.0703125; 3]));
        Ok(())
    });
}

#[test]
fn tensors_are_created_moved_compared_and_viewed_but_not_computed_with() {
    on(4, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let x = DTensor::from_fn((5, 3), F8, &mesh, [Shard(0), Shard(1)], |at| (at[0] * 3 + at[1]) as f64)?;
        let expected: Vec<f64> = (0..15).map(f64::from).collect();
        for to in [[Replicate, Shard(0)], [Shard(1), Replicate], [Shard(0), Shard(0)], [Replicate, Replicate]] {
            let y = x.redistribute(to.clone())?;
            assert_eq!((y.dtype(), y.placements(), list(&y)?), (F8, to.as_slice(), expected.clone()));
            assert!(y.equal(&x)?);
        }
        assert_eq!(list(&x.t()?)?, (0..15).map(|i| f64::from(i % 5 * 3 + i / 5)).collect::<Vec<_>>());
        assert_eq!(list(&x.reshape(&[15])?.narrow(0, 3, 4)?)?, [3.0, 4.0, 5.0, 6.0]);
        let full = x.full_tensor()?;
        assert_eq!(full.dtype(), F8);
        assert!(DTensor::from_local(&full, &mesh, [Replicate, Replicate])?.equal(&x)?);
        assert_eq!(list(&x.zeros_like()?)?, [0.0; 15]);
        assert!(
            DTensor::random(Distribution::Normal { mean: 0.0, std: 1.0 }, (4, 4), F8, &mesh, [Shard(0), Replicate])?
                .dtype()
                == F8
        );
        assert!(x.to_string().contains("f8e4m3"), "{x}");
        let refused = [
            x.add(&x).map(drop),
            x.matmul(&x.t()?).map(drop),
            x.relu().map(drop),
            x.sum_all().map(drop),
            x.sort(0, false).map(drop),
            x.index_select(0, &DTensor::zeros(2, DType::I64, &mesh, [Replicate, Replicate])?).map(drop),
            x.softmax(0).map(drop),
            x.gt(0.0).map(drop),
        ];
        for (i, refused) in refused.into_iter().enumerate() {
            let message = refused.expect_err("arithmetic").to_string();
            assert!(message.contains("f8e4m3") && message.contains("to_dtype(DType::F32)"), "{i}: {message}");
        }
        assert!(x.redistribute([Partial(ReduceOp::Sum), Replicate]).is_err());
        Ok(())
    });
    let moved = |dtype: DType| {
        let run = DryWorld::new(4).unwrap().run(move |world| {
            let mesh = world.mesh([("a", 4)])?;
            let x = DTensor::ones((8, 4), DType::F32, &mesh, [Shard(0)])?.to_dtype(dtype)?;
            world.trace().clear();
            x.redistribute([Replicate])?;
            Ok(world.trace().records().iter().map(|record| record.bytes).sum::<usize>())
        });
        run.unwrap().value
    };
    assert!(moved(F8) > 0 && moved(F8) * 4 == moved(DType::F32), "one byte per element");
}

#[test]
fn checkpoints_keep_the_type_in_every_format() {
    let scratch = Scratch::new("eight-bit");
    let path = scratch.0.clone();
    on(2, move |world| {
        let mesh = world.mesh([("a", 2)])?;
        // Every f8 but the two NaNs.
        let bits = |i: usize| if i % 128 == 127 { 0u8 } else { i as u8 };
        let all: Vec<u8> = (0..256).map(bits).collect();
        let whole = Tensor::from_raw_buffer(&all, F8, &[16, 16], &Device::Cpu)?;
        let x = DTensor::distribute_tensor(&whole, &mesh, [Shard(0)], None)?;
        for format in [Format::Native, Format::Dcp, Format::HuggingFace] {
            let at = path.join(format!("{format:?}"));
            let options = SaveOptions { format, ..SaveOptions::default() };
            checkpoint::save_with(&world, &at, &State::map([("w", x.clone())]), &options)?;
            for (dtype, placement) in [(F8, Shard(1)), (F8, Shard(0)), (DType::F32, Shard(1)), (DType::BF16, Replicate)]
            {
                let template = State::map([("w", DTensor::zeros((16, 16), dtype, &mesh, [placement])?)]);
                let loaded = checkpoint::load(&world, &at, &template)?.tensor("w")?.clone();
                assert_eq!(loaded.dtype(), dtype, "{format:?}");
                assert_eq!(list(&loaded)?, list(&x)?, "{format:?} as {dtype:?}");
            }
        }
        // Stored numbers of another type are rounded as `to_dtype` does.
        let wide = DTensor::randn((8, 8), &mesh, [Shard(0)])?.mul_scalar(300.0)?;
        checkpoint::save(&world, path.join("wide"), &State::map([("w", wide.clone())]))?;
        let template = State::map([("w", DTensor::zeros((8, 8), F8, &mesh, [Shard(1)])?)]);
        assert!(checkpoint::load(&world, path.join("wide"), &template)?.tensor("w")?.equal(&wide.to_dtype(F8)?)?);
        Ok(())
    });
}

/// Elements as PyTorch's answers were computed with.
fn exact(mesh: &DeviceMesh, shape: [usize; 2], by: [usize; 2], divisor: f64, placement: &Placement) -> Result<DTensor> {
    DTensor::from_fn(shape.as_slice(), DType::F32, mesh, [placement.clone()], |at| {
        ((((at[0] * shape[1] + at[1]) * by[0] + by[1]) % 23) as f64 - 11.0) / divisor
    })
}

/// The first row of `torch._scaled_mm` with one scale per matrix, and with one per row and column.
#[rustfmt::skip]
const BY_MATRIX: [f64; 16] = [
    0.35546875, -1.515625, -0.87890625, 0.390625, 0.1328125, -1.109375, -0.3828125, 1.0625, 1.171875, 1.453125, -0.875, -0.14453125, 1.21875,
    1.046875, 0.87890625, -1.359375,
];
#[rustfmt::skip]
const BY_LINE: [f64; 16] = [
    1.0, -1.8984375, 0.275390625, -0.734375, -0.45703125, -2.4375, -0.2392578125, -1.0, -2.921875, 4.53125, -1.3671875, 0.0, -1.8984375,
    -3.265625, 2.203125, -1.2734375,
];

#[test]
fn scaled_products_are_those_of_pytorch_without_communication() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let number = |x: f64| DTensor::full(x, (), DType::F32, &mesh, [Replicate]);
        let layouts = [
            (Shard(0), Replicate, Shard(0)),
            (Replicate, Shard(1), Shard(1)),
            (Shard(1), Shard(0), Partial(ReduceOp::Sum)),
        ];
        for (left, right, result) in &layouts {
            let a = exact(&mesh, [16, 32], [7, 3], 4.0, left)?.to_dtype(F8)?;
            let b = exact(&mesh, [32, 16], [5, 1], 8.0, right)?.to_dtype(F8)?;
            let rows = exact(&mesh, [16, 1], [3, 1], 16.0, &if *left == Shard(0) { Shard(0) } else { Replicate })?;
            let columns = exact(&mesh, [1, 16], [5, 2], 16.0, &if *right == Shard(1) { Shard(1) } else { Replicate })?;
            for (scales, expected) in [([number(0.5)?, number(0.25)?], &BY_MATRIX), ([rows, columns], &BY_LINE)] {
                let run = || a.scaled_mm(&b, &scales[0], &scales[1], DType::BF16);
                let (y, calls) = counted(&world, run)?;
                assert_eq!(calls, [""; 0], "{left} {right}");
                assert_eq!((y.dtype(), y.placements()), (DType::BF16, std::slice::from_ref(result)));
                assert_eq!(list(&y.narrow(0, 0, 1)?)?, expected, "{left} {right}");
                // The whole result, from converted factors.
                let wide =
                    a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?)?.mul(&scales[0])?.mul(&scales[1])?;
                assert_eq!(list(&y)?, list(&wide.to_dtype(DType::BF16)?)?, "{left} {right}");
            }
        }
        let a = DTensor::ones((4, 8), F8, &mesh, [Shard(0)])?;
        let (b, one) = (DTensor::ones((8, 3), F8, &mesh, [Replicate])?, number(1.0)?);
        let wrong = [
            a.scaled_mm(&a, &one, &one, DType::F32),
            a.scaled_mm(&b.to_dtype(DType::F32)?, &one, &one, DType::F32),
            a.scaled_mm(&b, &DTensor::ones(4, DType::F32, &mesh, [Replicate])?, &one, DType::F32),
            a.scaled_mm(&b, &one, &one, DType::F64),
        ];
        for (i, wrong) in wrong.into_iter().enumerate() {
            let message = wrong.unwrap_err().to_string();
            assert!(message.contains("scaled_mm") && message.contains("f32"), "{i}: {message}");
        }
        // More ranks than rows: some have none.
        let few = DTensor::ones((3, 8), F8, &mesh, [Shard(0)])?.scaled_mm(&b, &one, &one, DType::F32)?;
        assert_eq!(list(&few)?, [8.0; 9]);
        Ok(())
    });
}

/// Sharded tensors of f8: created, drawn, sharded, resharded, compared, converted, stored and saved; arithmetic is refused.
#[test]
fn sharded_tensors_of_f8_are_moved_and_saved_but_not_computed_with() {
    let scratch = Scratch::new("sharded-f8");
    let path = scratch.0.join("state");
    on(3, move |world| {
        let mesh = world.mesh([("all", 3)])?;
        let rows = || ChunkShardingSpec::over_ranks(0, [2, 0, 1]);
        // Every f8 but the two NaNs, in rows that do not divide.
        let bytes: Vec<u8> = (0..=255u8).filter(|byte| byte & 0x7f != 0x7f).collect();
        let whole = Tensor::from_raw_buffer(&bytes, F8, &[127, 2], &Device::Cpu)?;
        let x = shard_tensor(&whole, rows()?, &mesh, Some(1))?;
        assert_eq!((x.dtype(), x.local_tensor()?.dims()), (F8, [[43, 2], [41, 2], [43, 2]][world.rank()].as_slice()));
        let stored = |t: &Tensor| -> Result<Vec<f32>> { Ok(convert(t, DType::F32)?.flatten_all()?.to_vec1()?) };
        let expected = stored(&whole)?;
        assert_eq!(stored(&x.full_tensor()?)?, expected);
        world.trace().clear();
        let columns = x.reshard(ChunkShardingSpec::over_ranks(1, [0, 1])?)?;
        assert!(
            world.trace().records().iter().filter(|r| r.call == "all_to_all").all(|r| r.bytes <= 254),
            "one byte each"
        );
        assert!(columns.equal(&x)? && columns.allclose(&x, 0.0, 0.0)? && columns.allclose(&x, 1e-3, 1e-3)?);
        assert!(!x.equal(&x.zeros_like()?)?);
        assert_eq!(stored(&columns.to_dtensor()?.full_tensor()?)?, expected);
        assert_eq!(ShardedTensor::from_dtensor(&x.to_dtensor()?)?.dtype(), F8);
        // To other types and back; f32 holds all of them.
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            assert!(x.to_dtype(dtype)?.to_dtype(F8)?.equal(&x)?, "{dtype:?}");
        }
        // Draws and initializers are those of distributed tensors, rounded.
        mesh.manual_seed(4);
        let drawn = ShardedTensor::randn(rows()?, (7, 3), F8, &mesh)?;
        mesh.manual_seed(4);
        let normal = Distribution::Normal { mean: 0.0, std: 1.0 };
        let of_dtensor = DTensor::random(normal, (7, 3), F8, &mesh, [Replicate])?;
        assert_eq!(stored(&drawn.full_tensor()?)?, stored(&of_dtensor.to_local()?)?);
        let mut filled = ShardedTensor::empty(rows()?, (7, 3), F8, &mesh)?;
        mesh.manual_seed(4);
        filled.init(Init::Normal(0.0, 1.0))?;
        assert!(filled.equal(&drawn)?);
        filled.fill(1.5)?;
        assert_eq!(stored(&filled.full_tensor()?)?, [1.5; 21]);
        // Stored states and checkpoints.
        let loaded = ShardedTensor::load_with_process_group(&mesh, &[x.state()?], Some(rows()?.into()))?;
        assert!(loaded.equal(&x)?);
        checkpoint::save(&world, &path, &State::map([("x", x.clone())]))?;
        let like = ShardedTensor::zeros(ChunkShardingSpec::over_ranks(1, 0..2)?, (127, 2), F8, &mesh)?;
        let State::Sharded(loaded) =
            checkpoint::load(&world, &path, &State::map([("x", like)]))?.get("x").cloned().expect("saved")
        else {
            panic!("a sharded tensor")
        };
        assert!(loaded.equal(&x)? && loaded.dtype() == F8);
        let message = x.add(&x).unwrap_err().to_string();
        assert!(message.contains("f8e4m3") && message.contains("to_dtype(DType::F32)"), "{message}");
        Ok(())
    });
}
