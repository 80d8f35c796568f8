//! Errors that every rank of a group returns: the job and its processes go on.

use candle_core::{DType, Device, Tensor};
use shardwise::error::ErrorKind;
use shardwise::{Error, Group, ReduceOp, Result, TensorMeta, World};
use shardwise_mpi::{Settings, launch, launched};
use shardwise_test_suites::disagreements;

use crate::suites::scratch;

fn processes() -> usize {
    launched().expect("started by a launcher").size
}

fn zeros(count: usize, dtype: DType) -> Tensor {
    Tensor::zeros(count, dtype, &Device::Cpu).unwrap()
}

/// Runs a program that returns an error on all ranks, and returns the error of this rank.
fn refused(settings: &Settings, program: impl Fn(World) -> Result<()> + Send + Sync + 'static) -> Error {
    settings.launch(processes(), program).expect_err("an error on every rank")
}

/// Calls of the ranks that do not match, and parts of the resulting error.
type MismatchCase = (fn(&Group) -> Result<()>, &'static [&'static str]);

/// Mismatched calls, all in one launch: the group can be used after each of them.
pub(crate) fn calls_that_do_not_fit() {
    const CASES: &[MismatchCase] = &[
        (
            |world| match world.rank() {
                1 => world.all_reduce(&zeros(3, DType::F32), ReduceOp::Max).map(drop),
                _ => world.all_reduce(&zeros(3, DType::F32), ReduceOp::Sum).map(drop),
            },
            &["rank 0 called all_reduce(sum) of f32 [3]", "rank 1 called all_reduce(max)", "agreed.rs:", "same order"],
        ),
        (
            |world| world.all_reduce(&zeros(3 + world.rank(), DType::F32), ReduceOp::Sum).map(drop),
            &["f32 [3]", "f32 [4]"],
        ),
        (
            |world| world.broadcast(None, &TensorMeta::new(2, DType::F32), world.rank()).map(drop),
            &["rank 0 called broadcast", "was rejected", "Some(tensor)"],
        ),
        (
            |world| {
                let dtype = if world.rank() == 1 { DType::F8E4M3 } else { DType::F32 };
                world.all_reduce(&zeros(4, DType::F32).to_dtype(dtype)?, ReduceOp::Sum).map(drop)
            },
            &["rank 1 called all_reduce", "f8e4m3"],
        ),
        (
            |world| match world.rank() {
                0 => world.barrier(),
                _ => world.all_gather(&zeros(1, DType::U8), 0, &vec![1; world.size()]).map(drop),
            },
            &["rank 0 called barrier", "rank 1 called all_gather"],
        ),
        (
            |world| {
                let pieces = vec![zeros(2, DType::I64); world.size()];
                let mut expected = vec![TensorMeta::new(2, DType::I64); world.size()];
                if world.rank() == 1 {
                    expected[0] = TensorMeta::new(5, DType::I64);
                }
                world.all_to_all(&pieces, &expected).map(drop)
            },
            &["rank 0 called all_to_all", "rank 1 called all_to_all", "expects from it"],
        ),
        (|world| world.agree("step", &[world.rank() as u64]), &["agree(step [0])", "agree(step [1])"]),
        (|world| if world.rank() == 0 { world.expose(&[]).map(drop) } else { world.barrier() }, &["expose", "barrier"]),
    ];
    let done = Settings::default().launch(processes(), |world| {
        let backwards = world.subgroup(&(0..world.size()).rev().collect::<Vec<_>>())?;
        for (mismatch, parts) in CASES {
            let message = mismatch(&world).expect_err("an error on every rank").to_string();
            for part in *parts {
                assert!(message.contains(part), "{part} is missing in: {message}");
            }
            // the same text on all ranks
            let mine = Tensor::new(message.as_bytes(), &Device::Cpu)?;
            let whole = TensorMeta::new(mine.dims(), DType::U8);
            let first = world.broadcast((world.rank() == 0).then_some(&mine), &whole, 0)?;
            assert_eq!(first.to_vec1::<u8>()?, mine.to_vec1::<u8>()?);
            mismatch(&backwards).expect_err("an error in a group, too");
            assert_eq!(
                world.all_reduce(&Tensor::new(1i64, &Device::Cpu)?, ReduceOp::Sum)?.to_scalar::<i64>()?,
                world.size() as i64
            );
        }
        Ok(CASES.len())
    });
    assert_eq!(done.unwrap(), CASES.len());
    // Without the comparison of calls, `agree` and the checks of local arguments remain.
    let unchecked = Settings::default().check(false).launch(processes(), |world| {
        assert!(world.agree("step", &[world.rank() as u64]).is_err());
        let message = world.all_gather(&zeros(1, DType::U8), 0, &[]).unwrap_err().to_string();
        assert!(message.contains("one per rank of the group"), "{message}");
        Ok(())
    });
    unchecked.unwrap();
}

/// Ranks that compute different values, with the default settings.
pub(crate) fn disagreements() {
    let done = launch(processes(), |world| {
        disagreements::two_threads(&world)?;
        disagreements::layouts_to_load(&world, &scratch().join("state"))?;
        disagreements::run(&world)
    });
    assert!(done.unwrap() > 10);
}

/// Messages of the wrong shape, messages that are never sent, and messages that are never received.
pub(crate) fn messages() {
    let result = launch(processes(), |world| {
        let (me, meta) = (world.rank(), TensorMeta::new(3, DType::F32));
        if me == 0 {
            world.send(&zeros(4, DType::F32), 1, 0)?;
            world.send(&zeros(4, DType::F32).to_dtype(DType::F8E4M3)?, 1, 1)?;
            world.send(&Tensor::arange(0f32, 1e6, &Device::Cpu)?, 1, 3)?; // too long to be on its way at once
        }
        if me == 1 {
            let message = world.recv(&meta, 0, 0).unwrap_err().to_string();
            assert!(
                message.contains("rank 0 called send(to 1, tag 0) of f32 [4]") && message.contains("recv(f32 [3]"),
                "{message}"
            );
            let message = world.recv(&meta, 0, 1).unwrap_err().to_string();
            assert!(message.contains("f8e4m3") && message.contains("agreed.rs:"), "{message}");
            let message = world.recv(&meta, 0, 2).unwrap_err().to_string();
            assert!(
                message.contains("recv(f32 [3] from 0, tag 2)") && message.contains("already returned"),
                "{message}"
            );
            let long = world.recv(&TensorMeta::new(1_000_000, DType::F32), 0, 3)?;
            assert_eq!(long.get(999_999)?.to_scalar::<f32>()?, 999_999.0);
        }
        assert!(world.send(&zeros(1, DType::F32), world.size(), 0).is_err());
        assert!(world.recv(&meta, world.size(), 0).is_err());
        Ok(())
    });
    result.unwrap();
    let left_over = launch(processes(), |world| {
        if world.rank() == 0 {
            world.send(&zeros(4, DType::F32), 1, 7)?;
        }
        world.barrier() // the receiver is there until it is sent
    });
    match launched().expect("started by a launcher").rank {
        1 => {
            let message = left_over.unwrap_err().to_string();
            assert!(message.contains("rank 0 sent f32 [4] to rank 1") && message.contains("agreed.rs:"), "{message}");
        }
        _ => left_over.unwrap(),
    }
}

/// Errors before, during and after a launch.
pub(crate) fn launches() {
    let mine = launched().expect("started by a launcher").rank == 1;
    let message = refused(&Settings::default().deterministic(mine), |_| Ok(())).to_string();
    assert!(message.contains("invalid settings") && message.contains("deterministic: true"), "{message}");
    let nested = launch(processes(), |world| {
        let message = launch(world.size(), |_| Ok(())).unwrap_err().to_string();
        assert!(message.contains("one inside another"), "{message}");
        world.barrier()
    });
    nested.unwrap();
    let message = launch(processes() + 1, |_| Ok(())).unwrap_err().to_string();
    assert!(message.contains("one process per rank") && message.contains("-n"), "{message}");
    let kept = launch(processes(), Ok).unwrap();
    let message = kept.barrier().unwrap_err().to_string();
    assert!(message.contains("after the launch had ended"), "{message}");
    let message = refused(&Settings::default(), |world| {
        world.barrier()?;
        Err(ErrorKind::Argument.error("step", "nothing", "something", "try again"))
    });
    assert!(message.to_string().contains("failed: invalid step"), "{message}");
    let message = launch(processes(), |_| Ok(())).unwrap_err().to_string();
    assert!(message.contains("one after a launch in which rank 0 failed: invalid step"), "{message}");
}
